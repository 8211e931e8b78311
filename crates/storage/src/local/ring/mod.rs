//! Reads that bypass the page cache, with O_DIRECT and io_uring. One thread keeps many requests in flight, and the device writes
//! straight into the memory of the caller. `fetch` reads ranges of any length into new buffers, and `stream` short ranges into reused memory.

mod fetch;
mod stream;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use io_uring::{IoUring, squeue};

pub use self::fetch::fetch;
use self::stream::Pool;
pub use self::stream::{STREAM_BYTES, stream};
use super::disk::check_length;
use crate::buffer::ALIGN;
use crate::process::{self, PerProcess};
use crate::ranges::RangeRequest;

/// Requests in flight at once.
const DEPTH: u32 = 32;

struct Ring {
    generation: u64,
    ring: IoUring,
    /// Memory that streams read into, allocated by the first stream.
    pool: Option<Pool>,
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

/// Parts of ranges that `drive` reads. Each part is one request at a time, and each request in flight has a slot.
trait Reader {
    type Part;
    /// How many results are handled before their slots get new requests.
    const TOGETHER: u32;

    fn request(&mut self, part: &Self::Part, slot: usize) -> squeue::Entry;

    /// Handle the result of a part's request. Returns the part if bytes of it are missing.
    fn complete(&mut self, part: Self::Part, slot: usize, result: i32) -> Option<Self::Part>;
}

/// Requests in flight, each with its part. `drop` waits until all of them have completed, even after a panic, because they
/// write into the caller's memory.
struct Flight<'a, T> {
    ring: &'a mut IoUring,
    /// The part in each slot, or None for an idle one.
    slots: Vec<Option<T>>,
    idle: Vec<usize>,
}

impl<T> Flight<'_, T> {
    fn new(ring: &mut IoUring) -> Flight<'_, T> {
        Flight { ring, slots: (0..DEPTH).map(|_| None).collect(), idle: (0..DEPTH as usize).collect() }
    }

    /// Keep up to `DEPTH` requests in flight until none is waiting and all have completed. Parts are taken from the end of `waiting`.
    ///
    /// # Safety
    /// Nothing else uses the memory of the reader's requests until they have completed.
    unsafe fn drive<R: Reader<Part = T>>(&mut self, reader: &mut R, mut waiting: Vec<T>) -> io::Result<()> {
        loop {
            while let Some(slot) = self.idle.last().copied()
                && let Some(part) = waiting.pop()
            {
                let entry = reader.request(&part, slot).user_data(slot as u64);
                // SAFETY: the caller upholds the contract above, and the reader keeps the files open.
                if unsafe { self.ring.submission().push(&entry) }.is_err() {
                    waiting.push(part); // The queue has one entry per slot. A full queue is submitted below.
                    break;
                }
                self.idle.pop();
                self.slots[slot] = Some(part);
            }
            if self.idle.len() == self.slots.len() {
                return if waiting.is_empty() {
                    Ok(())
                } else {
                    Err(io::Error::other("the ring does not accept requests"))
                };
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY)) => {}
                Err(error) => return Err(error),
            }
            for _ in 0..R::TOGETHER {
                let Some((part, slot, result)) = self.completed() else { break };
                waiting.extend(reader.complete(part, slot, result));
            }
        }
    }

    /// Return the part, the slot and the result of a completed request. The slot is idle from then on.
    fn completed(&mut self) -> Option<(T, usize, i32)> {
        let entry = self.ring.completion().next()?;
        let slot = entry.user_data() as usize;
        let part = self.slots[slot].take()?;
        self.idle.push(slot);
        Some((part, slot, entry.result()))
    }
}

impl<T> Drop for Flight<'_, T> {
    fn drop(&mut self) {
        while self.idle.len() < self.slots.len() {
            if self.ring.submit_and_wait(1).is_err() {
                std::thread::sleep(std::time::Duration::from_millis(1)); // Requests complete even if this wait fails.
            }
            while self.completed().is_some() {}
        }
    }
}

/// Align a range. Returns the aligned offset, the number of bytes that must arrive, and the number to request.
fn aligned(range: &RangeRequest) -> (u64, u64, u64) {
    let begin = range.begin / ALIGN * ALIGN;
    let needed = range.end() - begin;
    (begin, needed, needed.next_multiple_of(ALIGN))
}

/// Open a file and get its length, unless an earlier range has done so. Check that the file contains this range.
fn open<'a>(
    files: &mut HashMap<&'a Path, (Arc<File>, u64)>,
    path: &'a Path,
    range: &RangeRequest,
) -> io::Result<Arc<File>> {
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
        true => {
            Outcome::Failed(io::Error::new(io::ErrorKind::UnexpectedEof, "the file shrank while it was being read"))
        }
        false => Outcome::Short(got),
    }
}
