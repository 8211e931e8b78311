//! The memory that batches lie in: page-aligned, used again when its last reference dies, counted while a consumer holds it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use penstock_dataset::Config;
use penstock_error::{Error, Result};
use penstock_storage::Recycled;

/// Smaller memory is not kept for the next batch: the allocator does that as well.
const RECYCLED_FROM_BYTES: usize = 1 << 20;

/// What that many bytes take of the budget, mostly: memory that is used again comes in large steps.
pub fn capacity(bytes: usize) -> usize {
    if bytes < RECYCLED_FROM_BYTES { bytes } else { bytes.next_multiple_of(Recycled::STEP_BYTES) }
}

/// Memory for values of a batch.
pub fn recycled(bytes: usize) -> Result<Recycled> {
    let recycled = match bytes < RECYCLED_FROM_BYTES {
        true => Recycled::fresh(bytes),
        false => Recycled::new(bytes, Config::memory_bytes()),
    };
    recycled.map_err(|_| Error::new("invalid-argument", format!("no memory for {bytes} bytes of a batch")).hint("take smaller batches"))
}

#[derive(Debug)]
enum Place {
    Recycled(Recycled),
    Own(Own),
}

/// Bytes of a `Vec`, which consumers may write to.
#[derive(Debug)]
struct Own(*mut [u8]);

// SAFETY: it is the one owner of plain bytes, as the `Vec` was.
unsafe impl Send for Own {}
// SAFETY: `&Own` gives a pointer and nothing else.
unsafe impl Sync for Own {}

impl Drop for Own {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `Box::into_raw`, once.
        drop(unsafe { Box::from_raw(self.0) })
    }
}

#[derive(Debug)]
pub struct Memory {
    place: Place,
    bytes: usize,
    kept: Option<Arc<AtomicU64>>,
}

impl Memory {
    /// Memory of any content.
    pub fn new(bytes: usize) -> Result<Memory> {
        Ok(Memory { place: Place::Recycled(recycled(bytes)?), bytes, kept: None })
    }

    /// Take over the memory of a `Vec`, without a copy.
    pub fn of(made: Vec<u8>) -> Memory {
        Memory { bytes: made.len(), place: Place::Own(Own(Box::into_raw(made.into_boxed_slice()))), kept: None }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn begin(&self) -> *mut u8 {
        match &self.place {
            Place::Recycled(recycled) => recycled.memory(),
            Place::Own(own) => own.0.cast(),
        }
    }

    /// All of it, for its one owner.
    pub fn slice(&mut self) -> &mut [u8] {
        // SAFETY: the memory has that many bytes, all of them written once, and `&mut self` is the only way to them.
        unsafe { std::slice::from_raw_parts_mut(self.begin(), self.bytes) }
    }

    /// A part of it.
    pub fn bytes_of(&self, begin: usize, bytes: usize) -> &[u8] {
        assert!(begin + bytes <= self.bytes, "a part lies inside its memory");
        // SAFETY: inside the memory, which was filled by its owner; `&self` keeps others from writing.
        unsafe { std::slice::from_raw_parts(self.begin().add(begin), bytes) }
    }

    /// From now on a consumer's, counted in `kept` until it is gone.
    pub fn give(&mut self, kept: &Arc<AtomicU64>) {
        kept.fetch_add(self.bytes as u64, Relaxed);
        self.kept = Some(kept.clone());
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Some(kept) = &self.kept {
            kept.fetch_sub(self.bytes as u64, Relaxed);
        }
    }
}

/// Memory whose parts are filled by several threads, each part by one.
#[derive(Debug)]
pub struct Shared(Memory);

// SAFETY: parts are handed out by `part`, whose callers never ask for overlapping ones at a time.
unsafe impl Sync for Shared {}
// SAFETY: memory belongs to no thread.
unsafe impl Send for Shared {}

impl Shared {
    pub fn new(memory: Memory) -> Shared {
        Shared(memory)
    }

    /// Bytes `begin..begin + bytes`.
    ///
    /// # Safety
    /// No two parts that overlap may be alive at a time.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, begin: usize, bytes: usize) -> &mut [u8] {
        assert!(begin + bytes <= self.0.bytes, "a part lies inside its memory");
        // SAFETY: inside the memory; the caller sees to it that nobody else has it.
        unsafe { std::slice::from_raw_parts_mut(self.0.begin().add(begin), bytes) }
    }

    pub fn into_inner(self) -> Memory {
        self.0
    }
}
