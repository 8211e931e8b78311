//! Reading past the page cache: O_DIRECT through io_uring, many requests in flight from one thread, bytes straight from the
//! device into the buffers that the pieces are.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use io_uring::{IoUring, opcode, types};

use crate::disk::check_length;
use crate::{RangeRequest, process};

/// What devices and file systems want offsets, lengths and addresses to be multiples of.
const ALIGN: u64 = 4096;
const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Devices give their full rate from here on, and smaller requests finish sooner.
const REQUEST_BYTES: u64 = 1 << 20;
const DEPTH: u32 = 32;

/// Memory that a device may write into.
struct Buffer {
    memory: *mut u8,
    layout: Layout,
}

// SAFETY: the memory is owned, and only read once it is shared.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    fn new(bytes: usize) -> io::Result<Buffer> {
        let align = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { ALIGN as usize };
        let layout = Layout::from_size_align(bytes.max(1), align).map_err(io::Error::other)?;
        // SAFETY: the layout is not empty.
        let memory = unsafe { alloc(layout) };
        if memory.is_null() {
            handle_alloc_error(layout);
        }
        if bytes >= HUGE_PAGE_BYTES {
            // SAFETY: the range was just allocated; the advice changes no content.
            unsafe { libc::madvise(memory.cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        Ok(Buffer { memory, layout })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and nothing refers to it any more.
        unsafe { dealloc(self.memory, self.layout) }
    }
}

/// The first bytes of a buffer, all of which the device has written.
struct Filled {
    buffer: Buffer,
    bytes: usize,
}

impl AsRef<[u8]> for Filled {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `bytes` bytes were written by completed reads, and nobody writes any more.
        unsafe { std::slice::from_raw_parts(self.buffer.memory, self.bytes) }
    }
}

/// A range on its way into its buffer.
struct Job {
    file: Arc<File>,
    buffer: Buffer,
    /// Where in the file the buffer begins, and how many bytes from there must come.
    begin: u64,
    needed: u64,
    /// Length of the buffer: `needed`, rounded up.
    length: u64,
    failed: Option<io::Error>,
}

/// One request: of which job, and where in its buffer.
#[derive(Clone, Copy)]
struct Request {
    job: usize,
    at: u64,
    bytes: u64,
}

struct Ring {
    generation: u64,
    ring: IoUring,
}

thread_local! {
    /// A ring of this thread; a forked child must not touch its parent's.
    static RING: RefCell<Option<Ring>> = const { RefCell::new(None) };
}

/// Whether this kernel lets us have a ring at all.
pub fn is_there() -> bool {
    static THERE: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *THERE.get_or_init(|| IoUring::new(2).is_ok())
}

/// Read ranges of files. `Unsupported` where the file system refuses O_DIRECT: the caller reads those another way.
pub fn fetch(ranges: &[(PathBuf, &RangeRequest)]) -> Vec<io::Result<Vec<Bytes>>> {
    let mut files = HashMap::new();
    let mut jobs: Vec<io::Result<Job>> = ranges.iter().map(|(path, range)| begin(&mut files, path, range)).collect();
    let mut waiting = Vec::new();
    for (index, job) in jobs.iter().enumerate() {
        let Ok(job) = job else { continue };
        for at in (0..job.length).step_by(REQUEST_BYTES as usize) {
            waiting.push(Request { job: index, at, bytes: (job.length - at).min(REQUEST_BYTES) });
        }
    }
    waiting.reverse(); // Taken from the end.
    let driven = RING.with_borrow_mut(|cell| {
        if cell.as_ref().is_some_and(|ring| ring.generation != process::generation()) {
            std::mem::forget(cell.take()); // The parent's.
        }
        let ring = match cell {
            Some(ring) => ring,
            None => cell.insert(Ring { generation: process::generation(), ring: IoUring::new(DEPTH)? }),
        };
        drive(&mut ring.ring, &mut jobs, waiting).inspect_err(|_| std::mem::forget(cell.take())) // It may still be at work.
    });
    let finish = |(job, (_, range)): (io::Result<Job>, &(PathBuf, &RangeRequest))| {
        let mut job = job?;
        match (&driven, job.failed.take()) {
            (Err(error), _) => Err(io::Error::new(error.kind(), error.to_string())),
            (Ok(()), Some(error)) => Err(error),
            (Ok(()), None) => Ok(pieces(job, range)),
        }
    };
    jobs.into_iter().zip(ranges).map(finish).collect()
}

/// Open a file and look at its length once for all of its ranges, and make the buffer of this one.
fn begin<'a>(files: &mut HashMap<&'a Path, (Arc<File>, u64)>, path: &'a Path, range: &RangeRequest) -> io::Result<Job> {
    let (file, found) = match files.get(path) {
        Some(file) => file.clone(),
        None => {
            let opened = std::fs::OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(path);
            let opened = opened.map_err(|error| match error.raw_os_error() {
                Some(libc::EINVAL | libc::EOPNOTSUPP) => io::Error::new(io::ErrorKind::Unsupported, error),
                _ => error,
            })?;
            let length = opened.metadata()?.len();
            files.entry(path).or_insert((Arc::new(opened), length)).clone()
        }
    };
    check_length(found, range)?;
    if range.end() > found {
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("{found} bytes, expected {}", range.end())));
    }
    let begin = range.begin / ALIGN * ALIGN;
    let needed = range.end() - begin;
    let length = needed.next_multiple_of(ALIGN);
    Ok(Job { file, buffer: Buffer::new(length as usize)?, begin, needed, length, failed: None })
}

/// Keep up to `DEPTH` requests in flight until all have ended, well or not: buffers must not go before that.
fn drive(ring: &mut IoUring, jobs: &mut [io::Result<Job>], mut waiting: Vec<Request>) -> io::Result<()> {
    let mut slots: Vec<Option<Request>> = vec![None; DEPTH as usize];
    let mut in_flight = 0;
    loop {
        for (slot, held) in slots.iter_mut().enumerate().filter(|(_, held)| held.is_none()) {
            let Some(request) = waiting.pop() else { break };
            let Ok(job) = &jobs[request.job] else { continue };
            // SAFETY: request.at + request.bytes lies inside the buffer.
            let target = unsafe { job.buffer.memory.add(request.at as usize) };
            let entry = opcode::Read::new(types::Fd(job.file.as_raw_fd()), target, request.bytes as u32)
                .offset(job.begin + request.at)
                .build()
                .user_data(slot as u64);
            // SAFETY: file and buffer live in `jobs` until the request has ended; no two requests share bytes.
            let pushed = unsafe { ring.submission().push(&entry) };
            if pushed.is_err() {
                waiting.push(request); // The queue is as deep as there are slots; a full one is emptied below.
                break;
            }
            *held = Some(request);
            in_flight += 1;
        }
        if in_flight == 0 {
            return Ok(());
        }
        match ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {}
            Err(error) => {
                // The kernel may still write: what it was given must live on.
                jobs.iter_mut().filter_map(|job| job.as_mut().ok()).for_each(|job| {
                    if let Ok(spare) = Buffer::new(0) {
                        std::mem::forget(std::mem::replace(&mut job.buffer, spare));
                    }
                });
                return Err(error);
            }
        }
        let ended: Vec<(u64, i32)> = ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        for (slot, result) in ended {
            in_flight -= 1;
            let Some(request) = slots[slot as usize].take() else { continue };
            let Ok(job) = &mut jobs[request.job] else { continue };
            waiting.extend(end(job, request, result));
        }
    }
}

/// What came of a request; what is to be asked again, if anything.
fn end(job: &mut Job, request: Request, result: i32) -> Option<Request> {
    match result {
        _ if result < 0 => match -result {
            libc::EINTR | libc::EAGAIN => return Some(request),
            libc::EINVAL | libc::EOPNOTSUPP => {
                job.failed = Some(io::Error::new(io::ErrorKind::Unsupported, "the file system refuses O_DIRECT"));
            }
            code => job.failed = Some(io::Error::from_raw_os_error(code)),
        },
        _ => {
            let got = result as u64;
            // The last page of a file comes short, and that is all of it.
            if got < request.bytes && request.at + got < job.needed {
                if got == 0 || !got.is_multiple_of(ALIGN) {
                    job.failed = Some(io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter while it was read"));
                } else {
                    return Some(Request { at: request.at + got, bytes: request.bytes - got, ..request });
                }
            }
        }
    }
    None
}

/// Cut the pieces out of a buffer that is full.
fn pieces(job: Job, range: &RangeRequest) -> Vec<Bytes> {
    let wanted: u64 = range.pieces.iter().map(|piece| piece.bytes as u64).sum();
    let begin = (range.begin - job.begin) as usize;
    // A piece holds on to the whole buffer: fine where that is not much more than the pieces.
    let share = range.shared || (range.pieces.len() == 1 && wanted >= job.length / 2);
    let whole = Bytes::from_owner(Filled { bytes: job.needed as usize, buffer: job.buffer });
    let mut at = begin;
    let cut = |piece: &crate::Piece| {
        let from = at + piece.skip as usize;
        at = from + piece.bytes;
        if share { whole.slice(from..at) } else { Bytes::copy_from_slice(&whole[from..at]) }
    };
    range.pieces.iter().map(cut).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Piece;

    fn read(path: &Path, begin: u64, pieces: &[Piece], shared: bool) -> io::Result<Vec<Bytes>> {
        let range = RangeRequest { name: "x".into(), begin, pieces: pieces.to_vec(), object_bytes: None, shared };
        fetch(&[(path.to_path_buf(), &range)]).remove(0)
    }

    #[test]
    fn unaligned_pieces_are_what_the_file_holds() -> io::Result<()> {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR"))?; // A temporary folder in memory may have no O_DIRECT.
        let path = folder.path().join("file");
        let body: Vec<u8> = (0..6_000_001u32).map(|value| (value * 7 / 3) as u8).collect();
        std::fs::write(&path, &body)?;
        for begin in [0u64, 1, 4095, 4096, 1_048_570, 2_999_999] {
            for bytes in [1usize, 100, 4096, 2_000_001] {
                for shared in [false, true] {
                    let pieces = [Piece { skip: 0, bytes }, Piece { skip: 13, bytes: 0 }, Piece { skip: 5, bytes: 17 }];
                    let at = begin as usize;
                    let found = match read(&path, begin, &pieces, shared) {
                        Err(error) if error.kind() == io::ErrorKind::Unsupported => return Ok(()),
                        other => other?,
                    };
                    assert_eq!(found[0], body[at..at + bytes]);
                    assert_eq!((found[1].len(), &found[2][..]), (0, &body[at + bytes + 18..at + bytes + 35]));
                }
            }
        }
        let last = read(&path, 6_000_000, &[Piece { skip: 0, bytes: 1 }], false)?;
        assert_eq!(last[0], body[6_000_000..]);
        let beyond = read(&path, 6_000_000, &[Piece { skip: 0, bytes: 2 }], false);
        assert!(beyond.is_err_and(|error| error.kind() == io::ErrorKind::UnexpectedEof));
        Ok(())
    }

    #[test]
    fn a_file_system_that_refuses_is_told_apart() {
        let refused = read(Path::new("/proc/version"), 0, &[], false);
        assert!(refused.is_err_and(|error| error.kind() == io::ErrorKind::Unsupported));
    }
}
