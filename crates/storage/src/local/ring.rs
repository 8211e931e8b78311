//! Reads that bypass the page cache, with O_DIRECT and io_uring. One thread keeps many requests in flight, and the device writes
//! straight into the buffers that become the pieces.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use io_uring::{IoUring, opcode, types};

use super::disk::check_length;
use crate::buffer::{ALIGN, Buffer};
use crate::process::{self, PerProcess};
use crate::ranges::RangeRequest;

/// Devices reach their full rate at this request size. Larger requests would only take longer to finish.
const REQUEST_BYTES: u64 = 1 << 20;
const DEPTH: u32 = 32;
/// Memory for one stream request, including alignment. `DEPTH` slots take 8 MiB, which is the usual limit on locked memory.
const SLOT_BYTES: u64 = 256 << 10;
/// Maximum length of a streamed range.
pub const STREAM_BYTES: u64 = SLOT_BYTES - 2 * ALIGN;

/// A buffer whose first `bytes` bytes were written by the device.
struct Filled {
    buffer: Buffer,
    bytes: usize,
}

impl AsRef<[u8]> for Filled {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: completed reads have written `bytes` bytes, and no request writes to them any more.
        unsafe { std::slice::from_raw_parts(self.buffer.memory(), self.bytes) }
    }
}

/// A range that is being read into its buffer.
struct Fill {
    file: Arc<File>,
    buffer: Buffer,
    /// File offset of the start of the buffer.
    begin: u64,
    /// Number of bytes after `begin` that must arrive.
    needed: u64,
    /// Length of the buffer: `needed`, rounded up to `ALIGN`.
    length: u64,
    failed: Option<io::Error>,
}

/// One request: its fill, and its position in the fill's buffer.
#[derive(Clone, Copy)]
struct Request {
    fill: usize,
    at: u64,
    bytes: u64,
}

struct Ring {
    generation: u64,
    ring: IoUring,
    /// Memory that streams read into, allocated by the first stream.
    pool: Option<Pool>,
}

/// Memory with one slot for each of a ring's requests. Slots are reused, so their pages are already mapped.
struct Pool {
    buffer: Buffer,
    /// Whether the buffer is registered with the kernel. The kernel does not look up a registered buffer's pages for each request.
    registered: bool,
}

thread_local! {
    /// This thread's ring. A forked child must not touch its parent's ring.
    static RING: RefCell<Option<Ring>> = const { RefCell::new(None) };
}

/// Run `work` with this thread's ring. After a failure or a panic, the ring is leaked, because the kernel may still be writing
/// into its buffers.
fn with_ring<T>(work: impl FnOnce(&mut Ring) -> io::Result<T>) -> io::Result<T> {
    let generation = process::generation();
    let held = RING.take().map(ManuallyDrop::new).filter(|ring| ring.generation == generation); // Any other ring is the parent's.
    let mut ring = match held {
        Some(ring) => ring,
        None => ManuallyDrop::new(Ring { generation, ring: IoUring::new(DEPTH)?, pool: None }),
    };
    let done = work(&mut ring)?;
    RING.set(Some(ManuallyDrop::into_inner(ring)));
    Ok(done)
}

/// Return whether this kernel lets us create a ring.
pub fn is_there() -> bool {
    static THERE: PerProcess<bool> = PerProcess::new(|| IoUring::new(2).is_ok());
    *THERE.get()
}

/// Read file ranges. `Unsupported` means that the file system refuses O_DIRECT, so the caller must read that range another way.
pub fn fetch(ranges: &[(PathBuf, &RangeRequest)]) -> Vec<io::Result<Vec<Bytes>>> {
    let mut files = HashMap::new();
    let mut fills: Vec<io::Result<Fill>> = ranges.iter().map(|(path, range)| begin(&mut files, path, range)).collect();
    let mut waiting = Vec::new();
    for (index, fill) in fills.iter().enumerate() {
        let Ok(fill) = fill else { continue };
        for at in (0..fill.length).step_by(REQUEST_BYTES as usize) {
            waiting.push(Request { fill: index, at, bytes: (fill.length - at).min(REQUEST_BYTES) });
        }
    }
    waiting.reverse(); // `drive` takes requests from the end.
    let driven = with_ring(|ring| drive(&mut ring.ring, &mut fills, waiting));
    let finish = |(fill, (_, range)): (io::Result<Fill>, &(PathBuf, &RangeRequest))| {
        let mut fill = fill?;
        match (&driven, fill.failed.take()) {
            (Err(error), _) => Err(io::Error::new(error.kind(), error.to_string())),
            (Ok(()), Some(error)) => Err(error),
            (Ok(()), None) => Ok(pieces(fill, range)),
        }
    };
    fills.into_iter().zip(ranges).map(finish).collect()
}

/// Read ranges of at most `STREAM_BYTES` into this thread's pool, or into `targets` if given. Each range is passed to `see`
/// as soon as it arrives, while other ranges are in flight. `Unsupported` means the same as for `fetch`.
pub fn stream(
    ranges: &[(PathBuf, &RangeRequest)],
    targets: Option<&mut [&mut [u8]]>,
    see: &mut dyn FnMut(usize, &[u8]),
) -> Vec<io::Result<()>> {
    let mut files = HashMap::new();
    let mut answers: Vec<io::Result<()>> = ranges.iter().map(|_| Ok(())).collect();
    let mut waiting = Vec::with_capacity(ranges.len());
    for (index, (path, range)) in ranges.iter().enumerate() {
        let target = targets.as_ref().map(|targets| targets.get(index).map_or(0, |target| target.len()) as u64);
        match fits(range, target).and_then(|()| open(&mut files, path, range)) {
            Ok(file) => waiting.push(Stream { range: index, file, at: 0 }),
            Err(error) => answers[index] = Err(error),
        }
    }
    waiting.reverse(); // `drive_stream` takes parts from the end.
    let driven = with_ring(|ring| {
        if ring.pool.is_none() {
            ring.pool = Some(Pool::new(&ring.ring)?);
        }
        drive_stream(ring, ranges, targets, waiting, &mut answers, see)
    });
    if let Err(error) = driven {
        answers.iter_mut().for_each(|answer| *answer = Err(io::Error::new(error.kind(), error.to_string())));
    }
    answers
}

impl Pool {
    fn new(ring: &IoUring) -> io::Result<Pool> {
        let buffer = Buffer::new(DEPTH as usize * SLOT_BYTES as usize)?;
        let slot = |index: usize| libc::iovec {
            // SAFETY: the slot is inside the buffer.
            iov_base: unsafe { buffer.memory().add(index * SLOT_BYTES as usize) }.cast(),
            iov_len: SLOT_BYTES as usize,
        };
        let slots: Vec<libc::iovec> = (0..DEPTH as usize).map(slot).collect();
        // SAFETY: the pool and ring are dropped together. If a limit on locked memory prevents registration, plain reads still work.
        let registered = unsafe { ring.submitter().register_buffers(&slots) }.is_ok();
        Ok(Pool { buffer, registered })
    }
}

/// A range that is being read, and how much of it has arrived.
struct Stream {
    range: usize,
    file: Arc<File>,
    at: u64,
}

/// Align a range. Returns the aligned offset, the number of bytes that must arrive, and the number to request.
fn aligned(range: &RangeRequest) -> (u64, u64, u64) {
    let begin = range.begin / ALIGN * ALIGN;
    let needed = range.end() - begin;
    (begin, needed, needed.next_multiple_of(ALIGN))
}

/// Check that a range fits a slot and is as long as its target, so that the device does not write outside either one.
fn fits(range: &RangeRequest, target: Option<u64>) -> io::Result<()> {
    let bytes = range.end() - range.begin;
    if aligned(range).2 <= SLOT_BYTES && target.is_none_or(|target| target == bytes) {
        return Ok(());
    }
    let target = target.map_or(String::new(), |target| format!(" or differs from its target of {target} bytes"));
    let text = format!("a range of {bytes} bytes exceeds a slot of {SLOT_BYTES} bytes{target}");
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

/// Requests in flight. `drop` waits until all of them have completed, even after a panic, because they write into the
/// caller's memory.
struct Flight<'a> {
    ring: &'a mut IoUring,
    requests: usize,
}

impl Flight<'_> {
    /// Return the slot and the result of a completed request.
    fn next(&mut self) -> Option<(usize, i32)> {
        let entry = self.ring.completion().next()?;
        self.requests -= 1;
        Some((entry.user_data() as usize, entry.result()))
    }
}

impl Drop for Flight<'_> {
    fn drop(&mut self) {
        while self.requests > 0 {
            if self.ring.submit_and_wait(1).is_err() {
                std::thread::sleep(std::time::Duration::from_millis(1)); // Requests complete even if this wait fails.
            }
            while self.next().is_some() {}
        }
    }
}

/// Return the address of the target if the device can write into it directly.
fn in_place(range: &RangeRequest, target: &mut [u8]) -> Option<*mut u8> {
    let aligned =
        range.begin.is_multiple_of(ALIGN) && (target.len() as u64).is_multiple_of(ALIGN) && (target.as_ptr() as u64).is_multiple_of(ALIGN);
    aligned.then_some(target.as_mut_ptr())
}

/// Keep up to `DEPTH` ranges in flight until all have completed. A slot is reused as soon as `see` has returned.
fn drive_stream(
    ring: &mut Ring,
    ranges: &[(PathBuf, &RangeRequest)],
    mut targets: Option<&mut [&mut [u8]]>,
    mut waiting: Vec<Stream>,
    answers: &mut [io::Result<()>],
    see: &mut dyn FnMut(usize, &[u8]),
) -> io::Result<()> {
    let Ring { ring, pool: Some(pool), .. } = ring else { return Err(io::Error::other("the ring has no pool")) };
    let mut flight = Flight { ring, requests: 0 };
    let mut slots: Vec<Option<Stream>> = (0..DEPTH).map(|_| None).collect();
    let mut idle: Vec<usize> = (0..DEPTH as usize).collect();
    loop {
        while let Some(slot) = idle.last().copied() {
            let Some(part) = waiting.pop() else { break };
            let range = ranges[part.range].1;
            let (begin, _, length) = aligned(range);
            let in_place = targets.as_mut().and_then(|targets| in_place(range, targets[part.range]));
            // SAFETY: `fits` has checked that the range fits its slot and its target, and `at` is inside the range.
            let target = unsafe { in_place.unwrap_or(pool.buffer.memory().add(slot * SLOT_BYTES as usize)).add(part.at as usize) };
            let (descriptor, bytes) = (types::Fd(part.file.as_raw_fd()), (length - part.at) as u32);
            let entry = match pool.registered && in_place.is_none() {
                true => opcode::ReadFixed::new(descriptor, target, bytes, slot as u16).offset(begin + part.at).build(),
                false => opcode::Read::new(descriptor, target, bytes).offset(begin + part.at).build(),
            };
            // SAFETY: no other request uses the slot until this one completes, and `slots` keeps the file open until then.
            let pushed = unsafe { flight.ring.submission().push(&entry.user_data(slot as u64)) };
            if pushed.is_err() {
                waiting.push(part);
                break;
            }
            idle.pop();
            flight.requests += 1;
            slots[slot] = Some(part);
        }
        if flight.requests == 0 {
            return if waiting.is_empty() { Ok(()) } else { Err(io::Error::other("the ring does not accept requests")) };
        }
        match flight.ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {}
            Err(error) => return Err(error),
        }
        let Some((slot, result)) = flight.next() else { continue };
        let Some(mut part) = slots[slot].take() else { continue };
        idle.push(slot);
        let range = ranges[part.range].1;
        let (begin, needed, length) = aligned(range);
        match outcome(result, part.at, length - part.at, needed) {
            Outcome::Whole => {
                let from = slot * SLOT_BYTES as usize + (range.begin - begin) as usize;
                // SAFETY: called only if the range was read into the slot. Completed reads have written `needed` bytes there.
                let read = || unsafe { std::slice::from_raw_parts(pool.buffer.memory().add(from), (range.end() - range.begin) as usize) };
                match &mut targets {
                    None => see(part.range, read()),
                    Some(targets) => {
                        let target = &mut *targets[part.range];
                        if in_place(range, target).is_none() {
                            target.copy_from_slice(read());
                        }
                        see(part.range, target);
                    }
                }
            }
            Outcome::Short(got) => {
                part.at += got;
                waiting.push(part);
            }
            Outcome::Failed(error) => answers[part.range] = Err(error),
        }
    }
}

/// Open a file and get its length, unless an earlier range has done so. Check that the file contains this range.
fn open<'a>(files: &mut HashMap<&'a Path, (Arc<File>, u64)>, path: &'a Path, range: &RangeRequest) -> io::Result<Arc<File>> {
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
    Ok(file)
}

/// Open a range's file and allocate its buffer.
fn begin<'a>(files: &mut HashMap<&'a Path, (Arc<File>, u64)>, path: &'a Path, range: &RangeRequest) -> io::Result<Fill> {
    let file = open(files, path, range)?;
    let (begin, needed, length) = aligned(range);
    Ok(Fill { file, buffer: Buffer::returned(length as usize)?, begin, needed, length, failed: None })
}

/// Keep up to `DEPTH` requests in flight until all have completed or failed. Buffers must not be freed before then.
fn drive(ring: &mut IoUring, fills: &mut [io::Result<Fill>], mut waiting: Vec<Request>) -> io::Result<()> {
    let mut slots: Vec<Option<Request>> = vec![None; DEPTH as usize];
    let mut idle: Vec<usize> = (0..DEPTH as usize).collect();
    let mut in_flight = 0;
    loop {
        while let Some(slot) = idle.last().copied() {
            let Some(request) = waiting.pop() else { break };
            let Ok(fill) = &fills[request.fill] else { continue };
            assert!(request.at + request.bytes <= fill.length, "a request must stay inside its buffer");
            // SAFETY: the assertion above keeps the address inside the buffer.
            let target = unsafe { fill.buffer.memory().add(request.at as usize) };
            let entry = opcode::Read::new(types::Fd(fill.file.as_raw_fd()), target, request.bytes as u32)
                .offset(fill.begin + request.at)
                .build()
                .user_data(slot as u64);
            // SAFETY: `fills` keeps the file and buffer alive until the request completes, and no two requests share bytes.
            let pushed = unsafe { ring.submission().push(&entry) };
            if pushed.is_err() {
                waiting.push(request); // The queue has one entry per slot. A full queue is submitted below.
                break;
            }
            idle.pop();
            slots[slot] = Some(request);
            in_flight += 1;
        }
        if in_flight == 0 {
            return if waiting.is_empty() { Ok(()) } else { Err(io::Error::other("the ring does not accept requests")) };
        }
        match ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {}
            Err(error) => {
                // Leak the buffers: the kernel may still write into them.
                fills.iter_mut().filter_map(|fill| fill.as_mut().ok()).for_each(|fill| {
                    if let Ok(spare) = Buffer::new(0) {
                        std::mem::forget(std::mem::replace(&mut fill.buffer, spare));
                    }
                });
                return Err(error);
            }
        }
        let ended: Vec<(u64, i32)> = ring.completion().map(|entry| (entry.user_data(), entry.result())).collect();
        for (slot, result) in ended {
            in_flight -= 1;
            let Some(request) = slots[slot as usize].take() else { continue };
            idle.push(slot as usize);
            let Ok(fill) = &mut fills[request.fill] else { continue };
            waiting.extend(end(fill, request, result));
        }
    }
}

/// Handle the result of a request. Returns a request for the missing bytes, if any.
fn end(fill: &mut Fill, request: Request, result: i32) -> Option<Request> {
    match outcome(result, request.at, request.bytes, fill.needed) {
        Outcome::Whole => None,
        Outcome::Short(got) => Some(Request { at: request.at + got, bytes: request.bytes - got, ..request }),
        Outcome::Failed(error) => {
            fill.failed = Some(error);
            None
        }
    }
}

enum Outcome {
    Whole,
    /// Only this many bytes arrived. The rest must be requested separately.
    Short(u64),
    Failed(io::Error),
}

/// Classify the result of a request for `bytes` bytes at `at`. The range is complete after `needed` bytes.
fn outcome(result: i32, at: u64, bytes: u64, needed: u64) -> Outcome {
    if result < 0 {
        return match -result {
            libc::EINTR | libc::EAGAIN => Outcome::Short(0),
            libc::EINVAL | libc::EOPNOTSUPP => {
                Outcome::Failed(io::Error::new(io::ErrorKind::Unsupported, "the file system does not support O_DIRECT"))
            }
            code => Outcome::Failed(io::Error::from_raw_os_error(code)),
        };
    }
    let got = result as u64;
    // A read at the end of a file is short but complete.
    if got >= bytes || at + got >= needed {
        return Outcome::Whole;
    }
    match got == 0 || !got.is_multiple_of(ALIGN) {
        true => Outcome::Failed(io::Error::new(io::ErrorKind::UnexpectedEof, "the file shrank while it was being read")),
        false => Outcome::Short(got),
    }
}

/// Cut the pieces out of a filled buffer.
fn pieces(fill: Fill, range: &RangeRequest) -> Vec<Bytes> {
    let wanted: u64 = range.pieces.iter().map(|piece| piece.bytes as u64).sum();
    let begin = (range.begin - fill.begin) as usize;
    // A slice keeps the whole buffer alive, which is acceptable if the buffer is not much larger than the pieces.
    let share = range.shared || (range.pieces.len() == 1 && wanted >= fill.length / 2);
    let whole = Bytes::from_owner(Filled { bytes: fill.needed as usize, buffer: fill.buffer });
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
        let range = RangeRequest { pieces: pieces.to_vec(), shared, ..RangeRequest::plain("x", begin, 0, None) };
        fetch(&[(path.to_path_buf(), &range)]).remove(0)
    }

    #[test]
    fn unaligned_pieces_are_what_the_file_holds() -> io::Result<()> {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR"))?; // A temporary folder on tmpfs may not support O_DIRECT.
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
    fn a_stream_shows_each_range_once() -> io::Result<()> {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR"))?;
        let path = folder.path().join("file");
        let body: Vec<u8> = (0..9_000_001u32).map(|value| (value * 7 / 3) as u8).collect();
        std::fs::write(&path, &body)?;
        let ranges: Vec<RangeRequest> = (0..100u64)
            .map(|index| {
                let begin = index * 90_000 + index % 7 * 1000;
                RangeRequest::plain("x", begin, STREAM_BYTES.min(body.len() as u64 - begin).min(index * index * 50 + 1), None)
            })
            .collect();
        for _ in 0..3 {
            let requests: Vec<(PathBuf, &RangeRequest)> = ranges.iter().map(|range| (path.clone(), range)).collect();
            let mut seen = vec![0; ranges.len()];
            let answers = stream(&requests, None, &mut |index, bytes| {
                seen[index] += 1;
                assert_eq!(bytes, &body[ranges[index].begin as usize..ranges[index].end() as usize]);
            });
            if answers.iter().any(|answer| answer.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::Unsupported)) {
                return Ok(());
            }
            assert!(answers.iter().all(Result::is_ok) && seen.iter().all(|count| *count == 1), "{answers:?} {seen:?}");
        }
        let beyond = RangeRequest::plain("x", 9_000_000, 2, None);
        let answers = stream(&[(path.clone(), &beyond), (path.clone(), &ranges[5])], None, &mut |index, _| assert_eq!(index, 1));
        assert!(answers[0].as_ref().is_err_and(|error| error.kind() == io::ErrorKind::UnexpectedEof) && answers[1].is_ok());
        // Aligned ranges are read in place; all others go through the pool.
        let memory = Buffer::new(1 << 20)?;
        // SAFETY: the buffer holds 1 MiB, and all of it is written before it is read.
        let memory = unsafe { std::slice::from_raw_parts_mut(memory.memory(), 1 << 20) };
        memory.fill(0);
        let places = [(0u64, 65_536usize), (65_536, 196_608), (262_145, 4096), (1 << 20, 131_072), (2_000_000, 131_072)];
        let ranges: Vec<RangeRequest> = places.iter().map(|(begin, bytes)| RangeRequest::plain("x", *begin, *bytes as u64, None)).collect();
        let (mut targets, mut rest): (Vec<&mut [u8]>, _) = (Vec::new(), memory);
        for (_, bytes) in places {
            let (target, later) = rest.split_at_mut(bytes);
            targets.push(target);
            rest = later;
        }
        let requests: Vec<(PathBuf, &RangeRequest)> = ranges.iter().map(|range| (path.clone(), range)).collect();
        let whole = |range: usize| &body[ranges[range].begin as usize..ranges[range].end() as usize];
        let answers = stream(&requests, Some(&mut targets), &mut |index, bytes| assert_eq!(bytes, whole(index)));
        assert!(answers.iter().all(Result::is_ok) && (0..5).all(|index| *targets[index] == *whole(index)));
        // A panicking stream waits for its in-flight requests, and the next stream still works.
        let broken = std::panic::AssertUnwindSafe(|| stream(&requests, None, &mut |_, _| std::panic::resume_unwind(Box::new(()))));
        assert!(std::panic::catch_unwind(broken).is_err());
        assert!(stream(&requests, None, &mut |index, bytes| assert_eq!(bytes, whole(index))).iter().all(Result::is_ok));
        Ok(())
    }

    /// A device may return fewer bytes than requested, in multiples of its block size. Only a read at the end of a file may return any
    /// other number of bytes.
    #[test]
    fn a_short_read_is_not_taken_for_all() {
        let described = |result: i32, at: u64, bytes: u64, needed: u64| match outcome(result, at, bytes, needed) {
            Outcome::Whole => "whole".to_owned(),
            Outcome::Short(got) => format!("short {got}"),
            Outcome::Failed(error) => format!("{:?}", error.kind()),
        };
        assert_eq!(described(65_536, 0, 65_536, 65_536), "whole");
        assert_eq!(described(61_440, 0, 65_536, 65_536), "short 61440");
        assert_eq!(described(4_096, 0, 65_536, 65_000), "short 4096");
        assert_eq!(described(65_000, 0, 65_536, 65_000), "whole", "the last page of a file");
        assert_eq!(described(464, 4_096, 8_192, 4_560), "whole", "the rest after a short read");
        assert_eq!(described(0, 0, 65_536, 65_000), "UnexpectedEof");
        assert_eq!(described(64_999, 0, 65_536, 65_000), "UnexpectedEof");
        assert_eq!((described(-libc::EINTR, 0, 4_096, 1), described(-libc::EAGAIN, 0, 4_096, 1)), ("short 0".into(), "short 0".into()));
        assert_eq!(described(-libc::EIO, 0, 4_096, 1), format!("{:?}", io::Error::from_raw_os_error(libc::EIO).kind()));
    }

    #[test]
    fn a_range_that_does_not_fit_is_refused_before_the_device_writes() -> io::Result<()> {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR"))?;
        let path = folder.path().join("file");
        std::fs::write(&path, vec![7; 1 << 20])?;
        let long = RangeRequest::plain("x", 0, SLOT_BYTES + 1, None);
        let good = RangeRequest::plain("x", 4096, 8192, None);
        let mut seen = Vec::new();
        let answers = stream(&[(path.clone(), &long), (path.clone(), &good)], None, &mut |index, _| seen.push(index));
        assert!(answers[0].as_ref().is_err_and(|error| error.kind() == io::ErrorKind::InvalidInput));
        if answers[1].is_ok() {
            assert_eq!(seen, [1]);
        }
        let mut target = vec![0; 4096];
        let answers = stream(&[(path, &good)], Some(&mut [&mut target]), &mut |_, _| {});
        assert!(
            answers[0].as_ref().is_err_and(|error| error.kind() == io::ErrorKind::InvalidInput) && target.iter().all(|byte| *byte == 0)
        );
        Ok(())
    }

    #[test]
    fn a_file_system_without_direct_io_is_recognised() {
        let refused = read(Path::new("/proc/version"), 0, &[], false);
        assert!(refused.is_err_and(|error| error.kind() == io::ErrorKind::Unsupported));
    }
}
