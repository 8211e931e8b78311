//! Memory from which the kernel sends bytes without a copy: pages whose content never changes while anybody holds them.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use memmap2::MmapRaw;

/// The most that one slot holds.
pub const SLOT_BYTES: u64 = 256 << 10;
/// Shorter content is not worth a slot.
pub const LEAST_BYTES: usize = 32 << 10;

/// A mapping, and which parts of it are free. Slots of full length come first, in large pages: neighbours in memory are sent and verified
/// faster. Slots of shorter content follow, in small pages, so that memory is used only for what is stored.
#[derive(Debug)]
pub struct Arena {
    map: MmapRaw,
    full_slots: u32,
    /// Free slots of full length, and of shorter content.
    free: [Mutex<Vec<u32>>; 2],
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
    /// Return an arena for this many bytes. Memory is used only for what is stored, rounded up to large pages. A part of a large page that was
    /// given back is free again when memory is short, or with the rest of the page.
    pub fn new(bytes: u64) -> io::Result<Arc<Arena>> {
        let (full_slots, slots) = ((bytes / SLOT_BYTES) as u32, (bytes / LEAST_BYTES as u64) as u32);
        let end = full_slots + slots;
        let map = map(u64::from(end) * SLOT_BYTES, u64::from(full_slots) * SLOT_BYTES)?;
        let free = [0..full_slots, full_slots..end].map(|slots| Mutex::new(slots.rev().collect()));
        Ok(Arc::new(Arena { map, full_slots, free, bytes, held: AtomicU64::new(0) }))
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
        let Some(number) = self.free(bytes < SLOT_BYTES).pop() else {
            self.held.fetch_sub(bytes, Relaxed);
            return None;
        };
        let slot = Slot { arena: self.clone(), number, bytes: content.len() };
        // SAFETY: nobody else has this part of the map, which lasts as long as the slot, and the content is not longer than a slot.
        unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), slot.start().cast_mut(), content.len()) };
        Some(Bytes::from_owner(slot))
    }

    /// Return the free slots of shorter content, or of full length.
    fn free(&self, is_short: bool) -> MutexGuard<'_, Vec<u32>> {
        self.free[usize::from(is_short)].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return whether these bytes are a part of a slot.
    pub fn holds(&self, bytes: &[u8]) -> bool {
        self.offset(bytes).is_some()
    }

    fn offset(&self, bytes: &[u8]) -> Option<usize> {
        let at = (bytes.as_ptr() as usize).checked_sub(self.map.as_ptr() as usize)?;
        (at < self.map.len()).then_some(at)
    }

    /// Flip a bit, as broken memory does.
    #[cfg(test)]
    pub fn damage(&self, bytes: &[u8]) {
        let at = self.offset(bytes).expect("bytes of a slot");
        // SAFETY: it is inside the map, and only tests call this, while nobody else reads it.
        unsafe { *self.map.as_mut_ptr().add(at) ^= 4 };
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
        if unmap(&self.arena.map, self.begin()).is_ok() {
            self.arena.held.fetch_sub(self.bytes as u64, Relaxed);
            self.arena.free(self.number >= self.arena.full_slots).push(self.number);
        }
    }
}

/// Reserve addresses. The first part of them gets large pages, if the system allows that.
#[cfg(target_os = "linux")]
fn map(bytes: u64, large_bytes: u64) -> io::Result<MmapRaw> {
    use memmap2::{Advice, MmapOptions};
    let map = MmapRaw::from(MmapOptions::new().len(bytes as usize).no_reserve_swap().map_anon()?);
    // Kernels without large pages refuse the advice.
    let _ = map.advise_range(Advice::HugePage, 0, large_bytes as usize);
    let _ = map.advise_range(Advice::NoHugePage, large_bytes as usize, (bytes - large_bytes) as usize);
    Ok(map)
}

/// Give the pages of a slot back.
#[cfg(target_os = "linux")]
fn unmap(map: &MmapRaw, begin: u64) -> io::Result<()> {
    // SAFETY: only the slot that is dropped had this part of the map, and nobody has a reference to it any more.
    unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, begin as usize, SLOT_BYTES as usize) }
}

#[cfg(not(target_os = "linux"))]
fn map(_bytes: u64, _large_bytes: u64) -> io::Result<MmapRaw> {
    Err(io::Error::from(io::ErrorKind::Unsupported))
}

#[cfg(not(target_os = "linux"))]
fn unmap(_map: &MmapRaw, _begin: u64) -> io::Result<()> {
    Err(io::Error::from(io::ErrorKind::Unsupported))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_used_again_with_other_pages() {
        use rustix::pipe::{IoSliceRaw, SpliceFlags, vmsplice};
        for bytes in [SLOT_BYTES as usize, LEAST_BYTES] {
            let arena = Arena::new(SLOT_BYTES).unwrap();
            let first = arena.store(&vec![1; bytes]).unwrap();
            let at = arena.offset(&first);
            assert_eq!((arena.offset(&first[5..]), arena.holds(&first[5..])), (at.map(|at| at + 5), true));
            assert_eq!(arena.held_bytes(), bytes as u64);
            // A pipe holds pages of the slot, as a socket would.
            let (reader, writer) = std::io::pipe().unwrap();
            unsafe { vmsplice(&writer, &[IoSliceRaw::from_slice(&first[..4096])], SpliceFlags::empty()) }.unwrap();
            drop(first);
            assert_eq!(arena.held_bytes(), 0);
            let second = arena.store(&vec![2; bytes]).unwrap();
            assert_eq!(arena.offset(&second), at);
            let mut sent = [0; 4096];
            std::io::Read::read_exact(&mut &reader, &mut sent).unwrap();
            assert_eq!(sent, [1; 4096]);
        }
    }

    #[test]
    fn memory_is_used_only_for_what_is_stored() {
        const LARGE_PAGE: usize = 2 << 20;
        let arena = Arena::new(64 * SLOT_BYTES).unwrap();
        assert_eq!(resident_bytes(&arena), 0);
        let short: Vec<Bytes> = (0..64).map(|_| arena.store(&[7; LEAST_BYTES]).unwrap()).collect();
        assert_eq!(resident_bytes(&arena), 64 * LEAST_BYTES);
        drop(short);
        assert_eq!(resident_bytes(&arena), 0);
        let full: Vec<Bytes> = (0..20).map(|_| arena.store(&vec![7; SLOT_BYTES as usize]).unwrap()).collect();
        let held = 20 * SLOT_BYTES as usize;
        assert!((held..held + 2 * LARGE_PAGE).contains(&resident_bytes(&arena)));
        drop(full);
        // What was never used of the last large page stays.
        assert!(resident_bytes(&arena) < 2 * LARGE_PAGE);
    }

    /// Return how much memory the kernel has given to an arena.
    fn resident_bytes(arena: &Arena) -> usize {
        let page_bytes = rustix::param::page_size();
        let mut pages = vec![0u8; arena.map.len() / page_bytes];
        // SAFETY: there is a byte for each page of the map.
        assert_eq!(unsafe { libc::mincore(arena.map.as_mut_ptr().cast(), arena.map.len(), pages.as_mut_ptr()) }, 0);
        pages.iter().filter(|page| **page & 1 == 1).count() * page_bytes
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
        assert!(!arena.holds(b"elsewhere"));
    }
}
