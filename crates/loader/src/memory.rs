//! Batch memory, which is counted while a consumer holds it. Large blocks are recycled when their last reference is dropped.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use penstock_dataset::Config;
use penstock_error::{Error, Result};
use penstock_storage::Recycled;

/// Round `bytes` up to the amount usually charged to the budget.
pub fn capacity(bytes: usize) -> usize {
    Recycled::capacity(bytes).unwrap_or(bytes)
}

/// Allocate memory for batch values. Large blocks are recycled.
pub fn recycled(bytes: usize) -> Result<Recycled> {
    Recycled::new(bytes, Config::memory_bytes()).map_err(|_| {
        Error::new("invalid-argument", format!("cannot allocate {bytes} bytes for a batch")).hint("use smaller batches")
    })
}

#[derive(Debug)]
enum Backing {
    Recycled(Recycled),
    Own(Own),
}

/// The bytes of a former `Vec`. They are stored as a raw pointer, because consumers may write to them.
#[derive(Debug)]
struct Own(*mut [u8]);

// SAFETY: `Own` is the only owner of its bytes, as the `Vec` was.
unsafe impl Send for Own {}
// SAFETY: `&Own` gives access only to the pointer, not to the bytes.
unsafe impl Sync for Own {}

impl Drop for Own {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `Box::into_raw` and is freed only here.
        drop(unsafe { Box::from_raw(self.0) })
    }
}

#[derive(Debug)]
pub struct Memory {
    place: Backing,
    bytes: usize,
    kept: Option<Arc<AtomicU64>>,
}

impl Memory {
    /// Allocate memory with arbitrary content.
    pub fn new(bytes: usize) -> Result<Memory> {
        Ok(Memory { place: Backing::Recycled(recycled(bytes)?), bytes, kept: None })
    }

    /// Take over the memory of a `Vec` without copying it.
    pub fn of(made: Vec<u8>) -> Memory {
        Memory { bytes: made.len(), place: Backing::Own(Own(Box::into_raw(made.into_boxed_slice()))), kept: None }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn begin(&self) -> *mut u8 {
        match &self.place {
            Backing::Recycled(recycled) => recycled.memory(),
            Backing::Own(own) => own.0.cast(),
        }
    }

    /// Return all bytes, mutably.
    pub fn slice(&mut self) -> &mut [u8] {
        // SAFETY: the memory has that many bytes, all initialised, and `&mut self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.begin(), self.bytes) }
    }

    /// Return a part of the bytes.
    pub fn bytes_of(&self, begin: usize, bytes: usize) -> &[u8] {
        assert!(begin + bytes <= self.bytes, "the part must be inside the memory");
        // SAFETY: the range is inside the memory, which is initialised; `&self` prevents writes.
        unsafe { std::slice::from_raw_parts(self.begin().add(begin), bytes) }
    }

    /// Hand the memory to a consumer and count it in `kept` until it is dropped.
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

/// Memory that several threads fill. Each part is written by one thread.
#[derive(Debug)]
pub struct Shared(Memory);

// SAFETY: only `part` hands out references, and its contract forbids overlapping parts.
unsafe impl Sync for Shared {}
// SAFETY: the memory is not tied to a thread.
unsafe impl Send for Shared {}

impl Shared {
    pub fn new(memory: Memory) -> Shared {
        Shared(memory)
    }

    /// Return bytes `begin..begin + bytes`.
    ///
    /// # Safety
    /// Overlapping parts must not be alive at the same time.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn part(&self, begin: usize, bytes: usize) -> &mut [u8] {
        assert!(begin + bytes <= self.0.bytes, "the part must be inside the memory");
        // SAFETY: the range is inside the memory; the caller guarantees that no other reference overlaps it.
        unsafe { std::slice::from_raw_parts_mut(self.0.begin().add(begin), bytes) }
    }

    pub fn into_inner(self) -> Memory {
        self.0
    }
}
