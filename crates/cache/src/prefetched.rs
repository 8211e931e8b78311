//! Bytes in memory that a plan has fetched for its loader, which reads them soon, and for which the drives have no room.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

use crate::extent::Key;

#[derive(Debug)]
struct Chunk {
    bytes: Bytes,
    /// The bytes go when the loader of the plan has read the steps below this.
    until: u64,
}

/// The bytes of one extent, by where they begin and the plan to which they belong.
type Chunks = BTreeMap<(u64, u64), Chunk>;

#[derive(Debug, Default)]
pub struct Prefetched {
    extents: Mutex<HashMap<Key, Chunks>>,
    /// Number of extents, so that a read without running plans takes no lock.
    count: AtomicUsize,
}

impl Prefetched {
    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Chunks>> {
        self.extents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn add(&self, plan: u64, until: u64, key: &Key, chunks: Vec<(u64, Bytes)>) {
        let mut extents = self.lock();
        let extent = extents.entry(key.clone()).or_default();
        extent.extend(chunks.into_iter().map(|(begin, bytes)| ((begin, plan), Chunk { bytes, until })));
        self.count.store(extents.len(), Relaxed);
    }

    /// Return the bytes from a place in an extent on, if they are here.
    pub fn find(&self, key: &Key, begin: u64) -> Option<Bytes> {
        if self.count.load(Relaxed) == 0 {
            return None;
        }
        let extents = self.lock();
        let ((at, _), chunk) = extents.get(key)?.range(..=(begin, u64::MAX)).next_back()?;
        let skip = (begin - at) as usize;
        (skip < chunk.bytes.len()).then(|| chunk.bytes.slice(skip..))
    }

    /// Drop the bytes of a plan whose loader has read the steps below `read`.
    pub fn end(&self, plan: u64, read: u64) {
        if self.count.load(Relaxed) == 0 {
            return;
        }
        let mut extents = self.lock();
        extents.retain(|_, chunks| {
            chunks.retain(|(_, of), chunk| *of != plan || chunk.until > read);
            !chunks.is_empty()
        });
        self.count.store(extents.len(), Relaxed);
    }
}
