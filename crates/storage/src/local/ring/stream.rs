//! Reads short ranges into reused memory, or straight into the memory of the caller.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;

use io_uring::{IoUring, opcode, squeue, types};

use super::{DEPTH, Flight, Outcome, Reader, Ring, aligned, open, outcome, with_ring};
use crate::buffer::{ALIGN, Buffer};
use crate::ranges::RangeRequest;

/// Memory for one stream request, including alignment. `DEPTH` slots take 8 MiB, which is the usual limit on locked memory.
pub(super) const SLOT_BYTES: u64 = 256 << 10;
/// Maximum length of a streamed range.
pub const STREAM_BYTES: u64 = SLOT_BYTES - 2 * ALIGN;

/// Memory with one slot for each of a ring's requests. Slots are reused, so their pages are already mapped.
pub(super) struct Pool {
    buffer: Buffer,
    /// Whether the buffer is registered with the kernel. The kernel does not look up a registered buffer's pages for each request.
    registered: bool,
}

/// A range that is being read, and how much of it has arrived.
struct Streamed {
    range: usize,
    file: Arc<File>,
    at: u64,
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
            Ok(file) => waiting.push(Streamed { range: index, file, at: 0 }),
            Err(error) => answers[index] = Err(error),
        }
    }
    waiting.reverse(); // `drive` takes parts from the end.
    let driven = with_ring(|ring| {
        if ring.pool.is_none() {
            ring.pool = Some(Pool::new(&ring.ring)?);
        }
        let Ring { ring, pool: Some(pool), .. } = ring else { return Err(io::Error::other("the ring has no pool")) };
        let mut stream = Stream { pool, ranges, targets, answers: &mut answers, see };
        // SAFETY: each slot and each target has one request at a time, and `Flight` waits for all of them.
        unsafe { Flight::new(ring).drive(&mut stream, waiting) }
    });
    if let Err(error) = driven {
        answers.iter_mut().for_each(|answer| *answer = Err(io::Error::new(error.kind(), error.to_string())));
    }
    answers
}

impl Pool {
    fn new(ring: &IoUring) -> io::Result<Pool> {
        let buffer = Buffer::new(DEPTH as usize * SLOT_BYTES as usize)?;
        let mut pool = Pool { buffer, registered: false };
        let slot = |index: usize| libc::iovec { iov_base: pool.slot(index).cast(), iov_len: SLOT_BYTES as usize };
        let slots: Vec<libc::iovec> = (0..DEPTH as usize).map(slot).collect();
        // SAFETY: the pool and ring are dropped together. If a limit on locked memory prevents registration, plain reads still work.
        pool.registered = unsafe { ring.submitter().register_buffers(&slots) }.is_ok();
        Ok(pool)
    }

    /// Return the address of a slot.
    fn slot(&self, index: usize) -> *mut u8 {
        assert!(index < DEPTH as usize, "a ring has one slot per request");
        // SAFETY: the slot is inside the buffer.
        unsafe { self.buffer.memory().add(index * SLOT_BYTES as usize) }
    }
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

/// Return the address of the target if the device can write into it directly.
fn in_place(range: &RangeRequest, target: &mut [u8]) -> Option<*mut u8> {
    let aligned = range.begin.is_multiple_of(ALIGN)
        && (target.len() as u64).is_multiple_of(ALIGN)
        && (target.as_ptr() as u64).is_multiple_of(ALIGN);
    aligned.then_some(target.as_mut_ptr())
}

/// Ranges that are streamed, with their answers so far.
struct Stream<'a, 'target> {
    pool: &'a Pool,
    ranges: &'a [(PathBuf, &'a RangeRequest)],
    targets: Option<&'a mut [&'target mut [u8]]>,
    answers: &'a mut [io::Result<()>],
    see: &'a mut dyn FnMut(usize, &[u8]),
}

impl Reader for Stream<'_, '_> {
    type Part = Streamed;
    /// `see` takes long, so each slot gets a new request as soon as it has returned.
    const TOGETHER: u32 = 1;

    fn request(&mut self, part: &Streamed, slot: usize) -> squeue::Entry {
        let range = self.ranges[part.range].1;
        let (begin, _, length) = aligned(range);
        let in_place = self.targets.as_mut().and_then(|targets| in_place(range, targets[part.range]));
        // SAFETY: `fits` has checked that the range fits its slot and its target, and `at` is inside the range.
        let target = unsafe { in_place.unwrap_or(self.pool.slot(slot)).add(part.at as usize) };
        let (descriptor, bytes) = (types::Fd(part.file.as_raw_fd()), (length - part.at) as u32);
        match self.pool.registered && in_place.is_none() {
            true => opcode::ReadFixed::new(descriptor, target, bytes, slot as u16).offset(begin + part.at).build(),
            false => opcode::Read::new(descriptor, target, bytes).offset(begin + part.at).build(),
        }
    }

    fn complete(&mut self, mut part: Streamed, slot: usize, result: i32) -> Option<Streamed> {
        let range = self.ranges[part.range].1;
        let (begin, needed, length) = aligned(range);
        match outcome(result, part.at, length - part.at, needed) {
            Outcome::Whole => {
                let (skip, bytes) = ((range.begin - begin) as usize, (range.end() - range.begin) as usize);
                // SAFETY: called only if the range was read into the slot. Completed reads have written `needed` bytes there.
                let read = || unsafe { std::slice::from_raw_parts(self.pool.slot(slot).add(skip), bytes) };
                match &mut self.targets {
                    None => (self.see)(part.range, read()),
                    Some(targets) => {
                        let target = &mut *targets[part.range];
                        if in_place(range, target).is_none() {
                            target.copy_from_slice(read());
                        }
                        (self.see)(part.range, target);
                    }
                }
                None
            }
            Outcome::Short(got) => {
                part.at += got;
                Some(part)
            }
            Outcome::Failed(error) => {
                self.answers[part.range] = Err(error);
                None
            }
        }
    }
}
