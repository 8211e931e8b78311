//! Memory that devices and the network may write into, and that large arrays lie in.

use std::alloc::{Layout, alloc, dealloc};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use memmap2::MmapMut;

use crate::process::PerProcess;

/// What devices and file systems want offsets, lengths and addresses to be multiples of.
pub const ALIGN: u64 = 4096;
pub const HUGE_PAGE_BYTES: usize = 2 << 20;
/// Smaller memory is not worth a call of the kernel.
const RETURNED_FROM_BYTES: usize = 128 << 10;

/// Memory on page boundaries, on huge pages where it is large. What is in it is undefined.
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

// SAFETY: the memory is owned; whoever shares it takes care of who writes.
unsafe impl Send for Buffer {}
// SAFETY: as above.
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
            // SAFETY: the range was just allocated; the advice changes no content.
            unsafe { libc::madvise(memory.cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        Ok(Buffer { memory, bytes: layout.size(), owner: Owner::Allocator(layout) })
    }

    /// Memory of zeros that goes back to the kernel when it is dropped. An allocator may keep what is freed, for each thread some.
    pub fn mapped(bytes: usize) -> io::Result<Buffer> {
        let mut map = MmapMut::map_anon(bytes.max(1))?;
        Ok(Buffer { memory: map.as_mut_ptr(), bytes, owner: Owner::Kernel { _map: map } })
    }

    /// As `new`, for memory that threads hold for a moment: what is large goes back to the kernel, for allocators keep what is freed.
    pub fn returned(bytes: usize) -> io::Result<Buffer> {
        match bytes {
            ..RETURNED_FROM_BYTES => Buffer::new(bytes),
            RETURNED_FROM_BYTES..HUGE_PAGE_BYTES => Buffer::mapped(bytes),
            _ => Buffer::zeroed(bytes),
        }
    }

    /// As `new`, of zeros: for memory that is handed out as a slice. Large memory is the kernel's, whose pages are zeros anyway.
    pub fn zeroed(bytes: usize) -> io::Result<Buffer> {
        if bytes < HUGE_PAGE_BYTES {
            let buffer = Buffer::new(bytes)?;
            // SAFETY: the memory has that many bytes, and is not shared yet.
            unsafe { std::ptr::write_bytes(buffer.memory, 0, buffer.bytes) };
            return Ok(buffer);
        }
        let room = bytes.checked_add(HUGE_PAGE_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
        let mut map = MmapMut::map_anon(room)?;
        let skip = map.as_ptr().align_offset(HUGE_PAGE_BYTES);
        let memory = map[skip..][..bytes].as_mut_ptr();
        // SAFETY: the range lies inside the map; the advice changes no content.
        unsafe { libc::madvise(memory.cast(), bytes, libc::MADV_HUGEPAGE) };
        Ok(Buffer { memory, bytes, owner: Owner::Kernel { _map: map } })
    }

    /// Where it begins.
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
            // SAFETY: allocated in `new` with this layout, and nothing refers to it any more.
            unsafe { dealloc(self.memory, layout) }
        }
    }
}

/// Buffers of this process that nobody holds.
static IDLE: PerProcess<Mutex<Vec<Buffer>>> = PerProcess::new(|| Mutex::new(Vec::new()));

/// Large memory that is used again when its last holder lets go: the kernel clears fresh pages, which costs as much as copying
/// into them. Its content is whatever was there before: defined bytes, of no meaning.
#[derive(Debug)]
pub struct Recycled {
    buffer: Option<Buffer>,
    budget_bytes: u64,
}

impl Recycled {
    /// Buffers are multiples of this, so that one fits the next array of about the same size.
    pub const STEP_BYTES: usize = HUGE_PAGE_BYTES;

    /// At least that many bytes. Of the budget, idle memory takes no more than a quarter, or is one buffer.
    pub fn new(bytes: usize, budget_bytes: u64) -> io::Result<Recycled> {
        let least = bytes.checked_next_multiple_of(Self::STEP_BYTES).ok_or(io::ErrorKind::OutOfMemory)?;
        let idle = {
            let mut idle = IDLE.get().lock().unwrap_or_else(PoisonError::into_inner);
            let fits = |(_, buffer): &(usize, &Buffer)| (least..=least.saturating_mul(2)).contains(&buffer.bytes());
            let best = idle.iter().enumerate().filter(fits).min_by_key(|(_, buffer)| buffer.bytes()).map(|(at, _)| at);
            best.map(|at| idle.swap_remove(at))
        };
        let buffer = idle.map_or_else(|| Buffer::zeroed(least), Ok)?;
        Ok(Recycled { buffer: Some(buffer), budget_bytes })
    }

    /// Memory of that size, for what is too small to be kept.
    pub fn fresh(bytes: usize) -> io::Result<Recycled> {
        Ok(Recycled { buffer: Some(Buffer::zeroed(bytes)?), budget_bytes: 0 })
    }

    /// Memory of that size, for what is held for long and by many threads.
    pub fn mapped(bytes: usize) -> io::Result<Recycled> {
        Ok(Recycled { buffer: Some(Buffer::mapped(bytes)?), budget_bytes: 0 })
    }

    /// Where it begins.
    pub fn memory(&self) -> *mut u8 {
        self.buffer.as_ref().map_or(std::ptr::null_mut(), Buffer::memory)
    }

    fn bytes(&self) -> usize {
        self.buffer.as_ref().map_or(0, Buffer::bytes)
    }

    /// All of it as a place to be filled.
    pub fn slot(self) -> Slot {
        let room = self.bytes();
        Slot { memory: Arc::new(self), begin: 0, filled: 0, room }
    }
}

impl Drop for Recycled {
    fn drop(&mut self) {
        let Some(buffer) = self.buffer.take().filter(|buffer| buffer.bytes() as u64 <= self.budget_bytes) else { return };
        let mut idle = IDLE.get().lock().unwrap_or_else(PoisonError::into_inner);
        idle.push(buffer);
        // The newest is kept whatever it is.
        while idle.len() > 1 && idle.iter().map(Buffer::bytes).sum::<usize>() as u64 > self.budget_bytes / 4 {
            idle.remove(0);
        }
    }
}

/// A part of memory that has one owner, who fills it from its beginning.
#[derive(Debug)]
pub struct Slot {
    memory: Arc<Recycled>,
    begin: usize,
    filled: usize,
    room: usize,
}

impl Slot {
    /// Cut off the first `bytes` bytes of one that is still empty.
    pub fn split_to(&mut self, bytes: usize) -> Slot {
        assert!(self.filled == 0 && bytes <= self.room, "a slot is split before it is filled");
        let first = Slot { memory: self.memory.clone(), begin: self.begin, filled: 0, room: bytes };
        self.begin += bytes;
        self.room -= bytes;
        first
    }

    pub fn push(&mut self, bytes: &[u8]) {
        assert!(bytes.len() <= self.room - self.filled, "a slot takes what it has room for");
        // SAFETY: the place lies inside the memory, was checked to have the room, and is this slot's alone.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.memory.memory().add(self.begin + self.filled), bytes.len()) }
        self.filled += bytes.len();
    }

    pub fn filled(&self) -> usize {
        self.filled
    }

    /// What it was filled with; nobody writes there any more.
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(Frozen { memory: self.memory, begin: self.begin, bytes: self.filled })
    }

    /// The memory, for `joined`.
    pub fn owner(&self) -> Arc<Recycled> {
        self.memory.clone()
    }
}

/// A part that is filled.
#[derive(Debug, Clone)]
pub struct Frozen {
    memory: Arc<Recycled>,
    begin: usize,
    bytes: usize,
}

impl Frozen {
    /// The stretch that parts of one memory make up, where they lie in it one after the other; nothing where they do not.
    pub fn joined<'a>(memory: &Arc<Recycled>, parts: impl IntoIterator<Item = &'a [u8]>) -> Option<Frozen> {
        let base = memory.memory() as usize;
        let mut whole: Option<(usize, usize)> = None;
        for part in parts.into_iter().filter(|part| !part.is_empty()) {
            let begin = (part.as_ptr() as usize).checked_sub(base).filter(|begin| begin + part.len() <= memory.bytes())?;
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
        // SAFETY: filled by the slot it was, or put together from such; nobody writes there any more.
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
        // A size that no other test asks for.
        let first = Recycled::new(37 << 20, 1 << 30)?;
        let begin = first.memory();
        drop(first);
        let second = Recycled::new(36 << 20, 1 << 30)?;
        assert_eq!(second.memory(), begin);
        Ok(())
    }
}
