//! Memory buffers for large arrays and for reads from devices and the network.

use std::alloc::{Layout, alloc, dealloc};
use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use memmap2::MmapMut;

use crate::kernel;
use crate::process::PerProcess;

/// Alignment that devices and file systems require for offsets, lengths and addresses.
pub const ALIGN: u64 = 4096;
pub const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Buffers below this size are not worth a system call.
const MAPPED_FROM_BYTES: usize = 64 << 10;

/// Page-aligned memory, backed by huge pages if it is large. Its content is undefined unless the constructor zeroes it.
#[derive(Debug)]
pub struct Buffer {
    memory: *mut u8,
    bytes: usize,
    owner: Owner,
}

#[derive(Debug)]
enum Owner {
    Allocator(Layout),
    Kernel { _map: MmapMut },
}

// SAFETY: the buffer owns its memory; code that shares a buffer must coordinate writes to it.
unsafe impl Send for Buffer {}
// SAFETY: as for `Send`.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub fn new(bytes: usize) -> io::Result<Buffer> {
        let align = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { ALIGN as usize };
        let layout = Layout::from_size_align(bytes.max(1), align).map_err(io::Error::other)?;
        // SAFETY: the layout is not empty.
        let memory = unsafe { alloc(layout) };
        if memory.is_null() {
            return Err(io::Error::from(io::ErrorKind::OutOfMemory));
        }
        if bytes >= HUGE_PAGE_BYTES {
            // SAFETY: the range was just allocated. The advice does not change any data.
            unsafe { kernel::advise_huge_pages(memory, bytes) };
        }
        Ok(Buffer { memory, bytes: layout.size(), owner: Owner::Allocator(layout) })
    }

    /// Map zeroed memory that is returned to the kernel on drop. An allocator might keep the freed memory for one thread.
    pub fn mapped(bytes: usize) -> io::Result<Buffer> {
        let mut map = MmapMut::map_anon(bytes.max(1))?;
        Ok(Buffer { memory: map.as_mut_ptr(), bytes, owner: Owner::Kernel { _map: map } })
    }

    /// Works like `new`, for short-lived buffers. Large buffers are unmapped on drop, because an allocator may keep their memory.
    #[cfg(target_os = "linux")]
    pub fn returned(bytes: usize) -> io::Result<Buffer> {
        if bytes < MAPPED_FROM_BYTES { Buffer::new(bytes) } else { Buffer::zeroed(bytes) }
    }

    /// Like `new`, but zeroed, for memory that is exposed as a slice. Large buffers are mapped, so the kernel zeroes their pages.
    pub fn zeroed(bytes: usize) -> io::Result<Buffer> {
        if bytes < MAPPED_FROM_BYTES {
            let buffer = Buffer::new(bytes)?;
            // SAFETY: the memory has that many bytes and is not shared yet.
            unsafe { std::ptr::write_bytes(buffer.memory, 0, buffer.bytes) };
            return Ok(buffer);
        }
        if bytes < HUGE_PAGE_BYTES {
            return Buffer::mapped(bytes);
        }
        let room = bytes.checked_add(HUGE_PAGE_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut map = MmapMut::map_anon(room)?;
        let skip = map.as_ptr().align_offset(HUGE_PAGE_BYTES);
        let memory = map[skip..][..bytes].as_mut_ptr();
        // SAFETY: the range is inside the mapping. The advice does not change any data.
        unsafe { kernel::advise_huge_pages(memory, bytes) };
        Ok(Buffer { memory, bytes, owner: Owner::Kernel { _map: map } })
    }

    /// Return the address of the first byte.
    pub fn memory(&self) -> *mut u8 {
        self.memory
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Owner::Allocator(layout) = self.owner {
            // SAFETY: `new` allocated the memory with this layout, and nothing refers to it any more.
            unsafe { dealloc(self.memory, layout) }
        }
    }
}

/// This process's idle buffers, kept for reuse, the oldest first.
static IDLE: PerProcess<Mutex<VecDeque<Buffer>>> = PerProcess::new(|| Mutex::new(VecDeque::new()));

/// A buffer that is reused after its last owner drops it. The kernel would have to map and zero fresh pages, which costs more than copying
/// data into them. The buffer's content is left over from earlier use: initialised, but meaningless.
#[derive(Debug)]
pub struct Recycled {
    buffer: Option<Buffer>,
    budget_bytes: u64,
}

impl Recycled {
    /// Return the size of a buffer for this many bytes. Sizes have steps, so that an idle buffer fits the next array of similar size. Small
    /// buffers are not reused, and have the size they need.
    pub fn capacity(bytes: usize) -> Option<usize> {
        match bytes {
            ..MAPPED_FROM_BYTES => Some(bytes),
            MAPPED_FROM_BYTES..HUGE_PAGE_BYTES => bytes.checked_next_multiple_of(MAPPED_FROM_BYTES),
            _ => bytes.checked_next_multiple_of(HUGE_PAGE_BYTES),
        }
    }

    /// Get a buffer of at least `bytes` bytes. Idle memory is limited to a quarter of the budget, or to one buffer if that is larger.
    pub fn new(bytes: usize, budget_bytes: u64) -> io::Result<Recycled> {
        if bytes < MAPPED_FROM_BYTES {
            return Recycled::fresh(bytes);
        }
        let least = Self::capacity(bytes).ok_or(io::ErrorKind::OutOfMemory)?;
        let idle = {
            let mut idle = IDLE.get().lock().unwrap_or_else(PoisonError::into_inner);
            let fits = |(_, buffer): &(usize, &Buffer)| (least..=least.saturating_mul(2)).contains(&buffer.bytes());
            // The newest of several is the most likely one to be in the processor's caches.
            let best =
                idle.iter().enumerate().rev().filter(fits).min_by_key(|(_, buffer)| buffer.bytes()).map(|(at, _)| at);
            best.and_then(|at| idle.remove(at))
        };
        let buffer = idle.map_or_else(|| Buffer::zeroed(least), Ok)?;
        Ok(Recycled { buffer: Some(buffer), budget_bytes })
    }

    /// Allocate memory that is not reused, for sizes too small to be worth keeping.
    pub fn fresh(bytes: usize) -> io::Result<Recycled> {
        Ok(Recycled { buffer: Some(Buffer::zeroed(bytes)?), budget_bytes: 0 })
    }

    /// Map memory that is not reused, for buffers that many threads keep for a long time.
    pub fn mapped(bytes: usize) -> io::Result<Recycled> {
        Ok(Recycled { buffer: Some(Buffer::mapped(bytes)?), budget_bytes: 0 })
    }

    /// Return the address of the first byte.
    pub fn memory(&self) -> *mut u8 {
        self.buffer.as_ref().map_or(std::ptr::null_mut(), Buffer::memory)
    }

    fn bytes(&self) -> usize {
        self.buffer.as_ref().map_or(0, Buffer::bytes)
    }

    /// Turn all of this memory into one empty slot.
    pub fn slot(self) -> Slot {
        let room = self.bytes();
        Slot { memory: Arc::new(self), begin: 0, filled: 0, room }
    }
}

impl Drop for Recycled {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take().filter(|buffer| buffer.bytes() as u64 <= self.budget_bytes) else {
            return;
        };
        let mut idle = IDLE.get().lock().unwrap_or_else(PoisonError::into_inner);
        idle.push_back(buffer);
        let mut bytes: u64 = idle.iter().map(|buffer| buffer.bytes() as u64).sum();
        // The newest buffer is always kept.
        while idle.len() > 1 && bytes > self.budget_bytes / 4 {
            bytes -= idle.pop_front().map_or(0, |oldest| oldest.bytes() as u64);
        }
    }
}

/// Part of a recycled buffer, which a single owner fills from the start.
#[derive(Debug)]
pub struct Slot {
    memory: Arc<Recycled>,
    begin: usize,
    filled: usize,
    room: usize,
}

impl Slot {
    /// Split off the first `bytes` bytes of a slot that is still empty.
    pub fn split_to(&mut self, bytes: usize) -> Slot {
        assert!(self.filled == 0 && bytes <= self.room, "a slot must be split before it is filled");
        let first = Slot { memory: self.memory.clone(), begin: self.begin, filled: 0, room: bytes };
        self.begin += bytes;
        self.room -= bytes;
        first
    }

    pub fn push(&mut self, bytes: &[u8]) {
        assert!(bytes.len() <= self.room - self.filled, "a slot must have room for the bytes");
        // SAFETY: the destination is inside the memory, has enough room as asserted, and belongs only to this slot.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                self.memory.memory().add(self.begin + self.filled),
                bytes.len(),
            )
        }
        self.filled += bytes.len();
    }

    pub fn filled(&self) -> usize {
        self.filled
    }

    /// Turn the filled part into immutable bytes.
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(Frozen { memory: self.memory, begin: self.begin, bytes: self.filled })
    }

    /// Return the slot's memory, for `Frozen::joined`.
    pub fn owner(&self) -> Arc<Recycled> {
        self.memory.clone()
    }
}

/// A filled part of a recycled buffer.
#[derive(Debug, Clone)]
pub struct Frozen {
    memory: Arc<Recycled>,
    begin: usize,
    bytes: usize,
}

impl Frozen {
    /// Join parts that are adjacent in this memory. Returns None if the parts are not adjacent.
    pub fn joined<'a>(memory: &Arc<Recycled>, parts: impl IntoIterator<Item = &'a [u8]>) -> Option<Frozen> {
        let base = memory.memory() as usize;
        let mut whole: Option<(usize, usize)> = None;
        for part in parts.into_iter().filter(|part| !part.is_empty()) {
            let begin =
                (part.as_ptr() as usize).checked_sub(base).filter(|begin| begin + part.len() <= memory.bytes())?;
            whole = match whole {
                None => Some((begin, begin + part.len())),
                Some((first, end)) if begin == end => Some((first, end + part.len())),
                Some(_) => return None,
            };
        }
        whole.map(|(begin, end)| Frozen { memory: memory.clone(), begin, bytes: end - begin })
    }
}

impl AsRef<[u8]> for Frozen {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: slots have filled all of these bytes, and no slot writes to them any more.
        unsafe { std::slice::from_raw_parts(self.memory.memory().add(self.begin), self.bytes) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_lie_side_by_side_and_join() -> io::Result<()> {
        let mut rest = Recycled::new(100, 64 << 20)?.slot();
        let memory = rest.owner();
        let (mut first, mut second, third) = (rest.split_to(3), rest.split_to(2), rest.split_to(4));
        second.push(b"de");
        first.push(b"ab");
        first.push(b"c");
        let (first, second, third) = (first.freeze(), second.freeze(), third.freeze());
        assert_eq!((&first[..], &second[..], &third[..]), (&b"abc"[..], &b"de"[..], &b""[..]));
        let joined = Frozen::joined(&memory, [&first[1..], &second, &third]).map(|joined| joined.as_ref().to_vec());
        assert_eq!(joined.as_deref(), Some(&b"bcde"[..]));
        assert!(Frozen::joined(&memory, [&second[..], &first]).is_none());
        assert!(Frozen::joined(&memory, [&first[..], b"elsewhere"]).is_none());
        Ok(())
    }

    #[test]
    fn memory_is_used_again() -> io::Result<()> {
        // No other test uses this size.
        let first = Recycled::new(37 << 20, 1 << 30)?;
        let begin = first.memory();
        drop(first);
        let second = Recycled::new(36 << 20, 1 << 30)?;
        assert_eq!(second.memory(), begin);
        Ok(())
    }
}
