//! Memory from which the kernel sends bytes without a copy: an unnamed file whose content never changes while anybody holds it.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use memmap2::{MmapOptions, MmapRaw};
use penstock_cache::punch;

/// The most that one slot holds.
pub const SLOT_BYTES: u64 = 256 << 10;
/// Shorter content is not worth a slot.
pub const LEAST_BYTES: usize = 32 << 10;

/// The file, its mapping, and which parts of it are free.
#[derive(Debug)]
pub struct Arena {
    file: File,
    map: MmapRaw,
    free: Mutex<Vec<u32>>,
    /// The most that may be held, and what is held now.
    bytes: u64,
    held: AtomicU64,
}

/// A slot with content.
struct Slot {
    arena: Arc<Arena>,
    number: u32,
    bytes: usize,
}

impl Arena {
    /// Return an arena for this many bytes. Memory is used only for what is stored.
    pub fn new(bytes: u64) -> io::Result<Arc<Arena>> {
        let slots = (bytes / LEAST_BYTES as u64) as u32;
        let file = unnamed_file()?;
        file.set_len(u64::from(slots) * SLOT_BYTES)?;
        let map = MmapOptions::new().map_raw(&file)?;
        // A part of a large page cannot be given back: it would be set to zero while it is sent. Kernels without large pages refuse the advice.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::NoHugePage);
        Ok(Arc::new(Arena { file, map, free: Mutex::new((0..slots).rev().collect()), bytes, held: AtomicU64::new(0) }))
    }

    /// Copy bytes into the arena. Returns None if they are too short or too long, or if it has no room left for them.
    pub fn store(self: &Arc<Self>, content: &[u8]) -> Option<Bytes> {
        let bytes = content.len() as u64;
        if content.len() < LEAST_BYTES || bytes > SLOT_BYTES {
            return None;
        }
        if self.held.fetch_add(bytes, Relaxed) + bytes > self.bytes {
            self.held.fetch_sub(bytes, Relaxed);
            return None;
        }
        let Some(number) = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop() else {
            self.held.fetch_sub(bytes, Relaxed);
            return None;
        };
        let slot = Slot { arena: self.clone(), number, bytes: content.len() };
        // Not by a write to the file, which the advice on the map does not concern.
        // SAFETY: nobody else has this part of the map, which lasts as long as the slot, and the content is not longer than a slot.
        unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), slot.start().cast_mut(), content.len()) };
        Some(Bytes::from_owner(slot))
    }

    /// Return where in the file these bytes are, if they are a part of a slot.
    pub fn place(&self, bytes: &[u8]) -> Option<u64> {
        let at = (bytes.as_ptr() as usize).checked_sub(self.map.as_ptr() as usize)?;
        (at < self.map.len()).then_some(at as u64)
    }

    pub fn file(&self) -> &File {
        &self.file
    }

    /// Return how many bytes may be held.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Return how many bytes are held.
    pub fn held_bytes(&self) -> u64 {
        self.held.load(Relaxed)
    }
}

impl Slot {
    fn begin(&self) -> u64 {
        u64::from(self.number) * SLOT_BYTES
    }

    fn start(&self) -> *const u8 {
        // The slot is inside the map.
        self.arena.map.as_ptr().wrapping_add(self.begin() as usize)
    }
}

impl AsRef<[u8]> for Slot {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: the slot is inside the map, which lives as long as the arena. Its content was written before it became a `Slot` that others
        // see, and is not changed until the slot is dropped.
        unsafe { std::slice::from_raw_parts(self.start(), self.bytes) }
    }
}

impl Drop for Slot {
    /// Give the pages back. Those that are on their way to a client stay as they are, and the next content of the slot gets other pages.
    fn drop(&mut self) {
        // A slot whose pages were not freed is not used again: its bytes may still be sent.
        if punch(&self.arena.file, self.begin(), SLOT_BYTES).is_ok() {
            self.arena.held.fetch_sub(self.bytes as u64, Relaxed);
            self.arena.free.lock().unwrap_or_else(PoisonError::into_inner).push(self.number);
        }
    }
}

fn unnamed_file() -> io::Result<File> {
    #[cfg(target_os = "linux")]
    {
        Ok(File::from(rustix::fs::memfd_create("penstock-hot", rustix::fs::MemfdFlags::CLOEXEC)?))
    }
    #[cfg(not(target_os = "linux"))]
    {
        Err(io::Error::from(io::ErrorKind::Unsupported))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_used_again_with_other_pages() {
        let arena = Arena::new(2 * SLOT_BYTES).unwrap();
        let first = arena.store(&vec![1; SLOT_BYTES as usize]).unwrap();
        let at = arena.place(&first).unwrap();
        assert_eq!(arena.place(&first[5..]), Some(at + 5));
        assert_eq!(arena.held_bytes(), SLOT_BYTES);
        // A pipe holds pages of the slot, as a socket would.
        let (reader, writer) = std::io::pipe().unwrap();
        rustix::pipe::splice(&arena.file, Some(&mut at.clone()), &writer, None, 4096, rustix::pipe::SpliceFlags::empty()).unwrap();
        drop(first);
        assert_eq!(arena.held_bytes(), 0);
        let second = arena.store(&vec![2; SLOT_BYTES as usize]).unwrap();
        assert_eq!(arena.place(&second), Some(at));
        let mut sent = [0; 4096];
        std::io::Read::read_exact(&mut &reader, &mut sent).unwrap();
        assert_eq!(sent, [1; 4096]);
    }

    #[test]
    fn it_holds_no_more_than_its_bytes() {
        let arena = Arena::new(2 * SLOT_BYTES).unwrap();
        let held: Vec<Bytes> = std::iter::from_fn(|| arena.store(&[7; LEAST_BYTES])).collect();
        assert_eq!(held.len(), (2 * SLOT_BYTES) as usize / LEAST_BYTES);
        assert!(held.iter().all(|bytes| bytes[..] == [7; LEAST_BYTES]));
        drop(held);
        assert_eq!(arena.held_bytes(), 0);
        assert!(arena.store(&[7; LEAST_BYTES - 1]).is_none());
        assert!(arena.store(&vec![7; SLOT_BYTES as usize + 1]).is_none());
        assert!(arena.place(b"elsewhere").is_none());
    }
}
