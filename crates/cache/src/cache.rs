//! A cache over a store. `cached` reads through it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::time::{Duration, Instant};

use bytes::Bytes;
use penstock_error::{Error, Result};
use penstock_storage::Read;
use penstock_storage::process::PerProcess;

use crate::drive::Drive;
use crate::drives::Drives;
use crate::drives::trust::Trust;
use crate::extent::{Key, store_key};
use crate::prefetched::Prefetched;
use crate::room;

/// What the owner of a store decides.
#[derive(Debug, Clone, Copy)]
pub struct Policy {
    /// Returns whether an object never changes, so that its bytes may be kept.
    pub keeps: fn(&str) -> bool,
    /// Returns how many bytes of whole objects this process may hold in memory.
    pub memory_bytes: fn() -> u64,
    /// Called after the held bytes have changed.
    pub changed: fn(),
}

/// Reads of a store whose immutable objects are cached. Clones share everything.
#[derive(Debug, Clone)]
pub struct Cached {
    pub(crate) cold: Arc<dyn Read>,
    /// The identity of the cold store, in the keys of its objects.
    pub(crate) store: Arc<str>,
    drives: Arc<Drives>,
    policy: Policy,
    /// Number of plans that run in this process. While one runs, it alone decides what is kept.
    plans: Arc<PerProcess<AtomicUsize>>,
    /// Number of reads in this process that may keep what they fetch.
    keeping: Arc<PerProcess<AtomicUsize>>,
    /// What plans of this process have fetched into memory.
    prefetched: Arc<PerProcess<Prefetched>>,
    /// Which notes are believed, if the owner keeps notes.
    pub(crate) trust: Option<Arc<Trust>>,
}

/// Bytes of whole objects that this process holds in memory.
static HELD_BYTES: AtomicU64 = AtomicU64::new(0);

/// A whole object in memory.
struct HeldObject {
    bytes: Bytes,
    changed: fn(),
}

impl AsRef<[u8]> for HeldObject {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for HeldObject {
    fn drop(&mut self) {
        HELD_BYTES.fetch_sub(self.bytes.len() as u64, Relaxed);
        (self.changed)();
    }
}

/// Return how many bytes of whole objects this process holds in memory.
pub fn held_bytes() -> u64 {
    HELD_BYTES.load(Relaxed)
}

/// Something that is counted until this is dropped.
pub(crate) struct Counting(Arc<PerProcess<AtomicUsize>>);

impl Counting {
    fn begin(count: &Arc<PerProcess<AtomicUsize>>) -> Counting {
        count.get().fetch_add(1, SeqCst);
        Counting(count.clone())
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        self.0.get().fetch_sub(1, SeqCst);
    }
}

impl Cached {
    /// Cache the objects of a store that `policy` allows. `dataset_bytes` limits what each drive keeps of this store.
    pub fn over(cold: Arc<dyn Read>, drives: Drives, dataset_bytes: Option<u64>, policy: Policy) -> Cached {
        let store = store_key(&cold.identity());
        for drive in drives.drives.iter().filter(|_| dataset_bytes.is_some()) {
            // A drive that cannot write its counts fails for reads, too, and is left alone then.
            let _ = room::limit_store(drive, &store, dataset_bytes.unwrap_or(0));
        }
        Cached {
            cold,
            store: store.into(),
            drives: Arc::new(drives),
            policy,
            plans: Arc::new(PerProcess::new(AtomicUsize::default)),
            keeping: Arc::new(PerProcess::new(AtomicUsize::default)),
            prefetched: Arc::new(PerProcess::new(Prefetched::default)),
            trust: None,
        }
    }

    /// Let notes be kept beside the objects. Other processes may use the same drives, but do not believe notes of this one while it runs. Fails if
    /// another server of the store has been starting for too long.
    pub fn with_notes(self) -> Result<Cached> {
        let trust = Trust::open(&self.drives.drives, self.drives.failed.is_empty(), &self.store)?;
        Ok(Cached { trust: Some(Arc::new(trust)), ..self })
    }

    /// Return the same cache over another store of the same objects.
    pub fn with_cold(&self, cold: Arc<dyn Read>) -> Cached {
        Cached { cold, ..self.clone() }
    }

    /// Return whether the bytes of an object may be kept.
    pub(crate) fn keeps(&self, name: &str) -> bool {
        (self.policy.keeps)(name)
    }

    /// Count the bytes of a whole object until the last copy of the result is dropped.
    pub(crate) fn hold(&self, bytes: Bytes) -> Bytes {
        HELD_BYTES.fetch_add(bytes.len() as u64, Relaxed);
        (self.policy.changed)();
        Bytes::from_owner(HeldObject { bytes, changed: self.policy.changed })
    }

    /// Return whether an object of this length may be held in memory.
    pub(crate) fn may_hold(&self, bytes: u64) -> bool {
        HELD_BYTES.load(Relaxed).saturating_add(bytes) <= (self.policy.memory_bytes)()
    }

    pub fn drives(&self) -> &Drives {
        &self.drives
    }

    /// Return the key of a part of an object.
    pub(crate) fn key(&self, name: &str, extent: u32) -> Key {
        Key::new(&self.store, name, "", extent)
    }

    /// Return the drive that holds an extent.
    pub(crate) fn drive_of(&self, key: &Key) -> &Drive {
        self.numbered_drive_of(key).1
    }

    /// Return the drive that holds an extent, and its number.
    pub(crate) fn numbered_drive_of(&self, key: &Key) -> (usize, &Drive) {
        let number = self.drives.number_of(key);
        (number, &self.drives.drives[number])
    }

    /// Let a plan decide what is kept, until the guard is dropped.
    pub(crate) fn planned(&self) -> Counting {
        Counting::begin(&self.plans)
    }

    /// Wait at most this long for reads of this process that keep what they fetch. A plan would take pages that are not stored yet for those of
    /// other datasets.
    pub(crate) fn settle(&self, most: Duration) {
        let began = Instant::now();
        while self.keeping.get().load(SeqCst) > 0 && began.elapsed() < most {
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Return a guard for a read that may keep what it fetches, or None if a plan decides what is kept.
    pub(crate) fn may_keep(&self) -> Option<Counting> {
        let guard = Counting::begin(&self.keeping);
        self.keeps_reads().then_some(guard)
    }

    pub(crate) fn prefetched(&self) -> &Prefetched {
        self.prefetched.get()
    }

    /// Return whether reads may keep what they fetch.
    pub(crate) fn keeps_reads(&self) -> bool {
        self.plans.get().load(SeqCst) == 0
    }
}

/// Return the only piece of the only range of a read.
pub fn only(answers: Vec<Result<Vec<Bytes>>>) -> Result<Bytes> {
    let pieces = answers.into_iter().next().unwrap_or_else(no_answer)?;
    Ok(pieces.into_iter().next().unwrap_or_default())
}

pub fn no_answer<T>() -> Result<T> {
    Err(Error::new("internal", "the store did not respond"))
}
