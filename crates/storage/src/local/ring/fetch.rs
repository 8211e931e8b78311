//! Reads ranges into buffers of their own, which become the pieces.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use io_uring::{opcode, squeue, types};

use super::{DEPTH, Flight, Outcome, Reader, aligned, open, outcome, with_ring};
use crate::buffer::Buffer;
use crate::ranges::RangeRequest;

/// Devices reach their full rate at this request size. Larger requests would only take longer to finish.
const REQUEST_BYTES: u64 = 1 << 20;

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
struct RangeBuffer {
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

/// A part of a range: the range's number, and the position in its buffer.
#[derive(Clone, Copy)]
struct Part {
    range: usize,
    at: u64,
    bytes: u64,
}

/// Read file ranges. `Unsupported` means that the file system refuses O_DIRECT, so the caller must read that range another way.
pub fn fetch(ranges: &[(PathBuf, &RangeRequest)]) -> Vec<io::Result<Vec<Bytes>>> {
    let mut files = HashMap::new();
    let mut buffers: Vec<io::Result<RangeBuffer>> =
        ranges.iter().map(|(path, range)| begin(&mut files, path, range)).collect();
    let mut waiting = Vec::new();
    for (range, buffer) in buffers.iter().enumerate() {
        let Ok(buffer) = buffer else { continue };
        for at in (0..buffer.length).step_by(REQUEST_BYTES as usize) {
            waiting.push(Part { range, at, bytes: (buffer.length - at).min(REQUEST_BYTES) });
        }
    }
    waiting.reverse(); // `drive` takes requests from the end.
    let driven = with_ring(|ring| {
        // After a failure, the buffers are leaked, because the kernel may still write into them. Nothing waits for the requests then.
        let mut flight = ManuallyDrop::new(Flight::new(&mut ring.ring));
        // SAFETY: each part has bytes of its own, in a buffer that nothing reads or frees before the end.
        unsafe { flight.drive(&mut Buffers(&mut buffers), waiting) }.inspect_err(|_| leak(&mut buffers))?;
        drop(ManuallyDrop::into_inner(flight));
        Ok(())
    });
    let finish = |mut buffer: RangeBuffer, range: &RangeRequest| match (&driven, buffer.failed.take()) {
        (Err(error), _) => Err(io::Error::new(error.kind(), error.to_string())),
        (Ok(()), Some(error)) => Err(error),
        (Ok(()), None) => Ok(pieces(buffer, range)),
    };
    buffers.into_iter().zip(ranges).map(|(buffer, (_, range))| finish(buffer?, range)).collect()
}

/// Open a range's file and allocate its buffer.
fn begin<'a>(
    files: &mut HashMap<&'a Path, (Arc<File>, u64)>,
    path: &'a Path,
    range: &RangeRequest,
) -> io::Result<RangeBuffer> {
    let file = open(files, path, range)?;
    let (begin, needed, length) = aligned(range);
    Ok(RangeBuffer { file, buffer: Buffer::returned(length as usize)?, begin, needed, length, failed: None })
}

/// The buffers of all ranges.
struct Buffers<'a>(&'a mut [io::Result<RangeBuffer>]);

impl Reader for Buffers<'_> {
    type Part = Part;
    const TOGETHER: u32 = DEPTH;

    fn request(&mut self, part: &Part, _slot: usize) -> squeue::Entry {
        let Ok(buffer) = &self.0[part.range] else { return opcode::Nop::new().build() };
        assert!(part.at + part.bytes <= buffer.length, "a request must stay inside its buffer");
        // SAFETY: the assertion above keeps the address inside the buffer.
        let target = unsafe { buffer.buffer.memory().add(part.at as usize) };
        opcode::Read::new(types::Fd(buffer.file.as_raw_fd()), target, part.bytes as u32)
            .offset(buffer.begin + part.at)
            .build()
    }

    fn complete(&mut self, part: Part, _slot: usize, result: i32) -> Option<Part> {
        let Ok(buffer) = &mut self.0[part.range] else { return None };
        match outcome(result, part.at, part.bytes, buffer.needed) {
            Outcome::Whole => None,
            Outcome::Short(got) => Some(Part { at: part.at + got, bytes: part.bytes - got, ..part }),
            Outcome::Failed(error) => {
                buffer.failed = Some(error);
                None
            }
        }
    }
}

/// Leak the memory of buffers.
fn leak(buffers: &mut [io::Result<RangeBuffer>]) {
    for buffer in buffers.iter_mut().flatten() {
        if let Ok(empty) = Buffer::new(0) {
            std::mem::forget(std::mem::replace(&mut buffer.buffer, empty));
        }
    }
}

/// Cut the pieces out of a buffer that was read.
fn pieces(read: RangeBuffer, range: &RangeRequest) -> Vec<Bytes> {
    let wanted: u64 = range.pieces.iter().map(|piece| piece.bytes as u64).sum();
    // A slice keeps the whole buffer alive, which is acceptable if the buffer is not much larger than the pieces.
    let share = range.shared || (range.pieces.len() == 1 && wanted >= read.length / 2);
    let whole = Bytes::from_owner(Filled { bytes: read.needed as usize, buffer: read.buffer });
    let cut = |place: Range<u64>| {
        let place = (place.start - read.begin) as usize..(place.end - read.begin) as usize;
        if share { whole.slice(place) } else { Bytes::copy_from_slice(&whole[place]) }
    };
    range.places().map(cut).collect()
}
