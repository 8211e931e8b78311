//! What is known of objects: in memory, and beside their pages on the drives. A state that is read from a drive was kept there by this server or an
//! earlier one; whether it is still true is decided in `current`.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use penstock_cache::Cached;
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use crate::meta::{Meta, Object, Version};

/// When the current version of an object is asked for again.
#[derive(Debug, Clone, Copy)]
pub enum Revalidate {
    Never,
    After(Duration),
    Always,
}

/// Objects with the same hash share their locks and the count of their writes.
const STRIPES: usize = 1024;
/// About the memory of a state, to size the table in which states are kept.
const STATE_BYTES: u64 = 2048;

/// The states of objects.
pub struct States {
    known: Cache<Object, Arc<Meta>, Bytes>,
    stripes: Vec<Stripe>,
    cached: Cached,
    /// Versions whose states wait to be written beside their pages.
    waiting: Mutex<HashSet<Version>>,
    /// Prefixes that are being purged.
    purged: Mutex<Vec<String>>,
    /// Until then, nothing is kept: an earlier server did not learn the outcome of a write.
    uncertain_until: Option<SystemTime>,
}

#[derive(Default)]
struct Stripe {
    writes: Mutex<Writes>,
    /// Held while a state on a drive is written or removed, and only by threads that may wait for drives.
    on_drive: Mutex<()>,
}

/// Nothing is kept of an object for this time after a write of it whose outcome is not known: the cold store may carry it out later.
pub const UNCERTAIN: Duration = Duration::from_secs(15 * 60);
/// At most this many such objects are remembered for each stripe.
const MOST_UNCERTAIN: usize = 256;

#[derive(Default)]
struct Writes {
    /// Changes when one of the objects is written, so that what was read before is not kept.
    generation: u64,
    /// Objects that are being written, and how many times. Nothing is kept of them.
    running: HashMap<Object, usize>,
    /// Objects whose last write may be carried out later, and when it ended.
    uncertain: HashMap<Object, Instant>,
}

impl Writes {
    fn is_uncertain(&self, object: &Object) -> bool {
        self.uncertain.get(object).is_some_and(|since| since.elapsed() < UNCERTAIN)
    }
}

#[derive(Debug, Clone)]
struct Bytes;

impl Weighter<Object, Arc<Meta>> for Bytes {
    fn weight(&self, object: &Object, meta: &Arc<Meta>) -> u64 {
        (size_of::<Object>() + object.bucket.len() + object.key.len()) as u64 + meta.held_bytes()
    }
}

impl States {
    /// Keep states in this much memory, and beside the pages of a cache.
    pub fn new(cached: Cached, bytes: u64) -> States {
        let known = Cache::with_weighter((bytes / STATE_BYTES) as usize, bytes, Bytes);
        let stripes = (0..STRIPES).map(|_| Stripe::default()).collect();
        let uncertain_until =
            cached.trust().map(|trust| trust.uncertain_until).filter(|until| *until > SystemTime::now());
        States { known, stripes, cached, waiting: Mutex::default(), purged: Mutex::default(), uncertain_until }
    }

    fn stripe(&self, object: &Object) -> &Stripe {
        let hash = |text: &str| text.bytes().fold(0usize, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
        &self.stripes[(hash(&object.bucket) ^ hash(&object.key)) % STRIPES]
    }

    fn writes(&self, object: &Object) -> MutexGuard<'_, Writes> {
        self.stripe(object).writes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return what memory has of an object.
    pub fn get(&self, object: &Object) -> Option<Arc<Meta>> {
        self.known.get(object)
    }

    /// Return a number that changes with each write of the object. `keep` takes it.
    pub fn generation(&self, object: &Object) -> u64 {
        self.writes(object).generation
    }

    /// Keep the state of an object in memory, unless it was written since `generation`, is being written, or may be written later.
    pub fn keep(&self, object: &Object, generation: u64, meta: &Arc<Meta>) {
        self.keep_if(object, generation, meta, || true);
    }

    /// Keep a state that a drive has, unless memory has one: that is as new, and may know more.
    pub fn keep_noted(&self, object: &Object, generation: u64, meta: &Arc<Meta>) {
        self.keep_if(object, generation, meta, || self.get(object).is_none());
    }

    fn keep_if(&self, object: &Object, generation: u64, meta: &Arc<Meta>, takes: impl FnOnce() -> bool) {
        let writes = self.writes(object);
        let is_known =
            writes.generation == generation && !writes.running.contains_key(object) && !writes.is_uncertain(object);
        let is_sure = || self.uncertain_until.is_none_or(|until| until <= SystemTime::now());
        if is_known && is_sure() && !self.purged().iter().any(|prefix| object.begins_with(prefix)) && takes() {
            self.known.insert(object.clone(), meta.clone());
        }
    }

    /// Note that an object will be written, and return what memory had of it. Until `end_write`, nothing is kept of it.
    pub fn begin_write(&self, object: &Object) -> Option<Arc<Meta>> {
        let mut writes = self.writes(object);
        *writes.running.entry(object.clone()).or_default() += 1;
        writes.generation += 1;
        self.known.remove(object).map(|(_, meta)| meta)
    }

    /// Note that a write has ended, and whether the cold store may carry it out later.
    pub fn end_write(&self, object: &Object, is_uncertain: bool) {
        let mut writes = self.writes(object);
        writes.generation += 1;
        if is_uncertain {
            if writes.uncertain.len() >= MOST_UNCERTAIN {
                writes.uncertain.retain(|_, since| since.elapsed() < UNCERTAIN);
            }
            if writes.uncertain.len() >= MOST_UNCERTAIN
                && let Some(oldest) =
                    writes.uncertain.iter().min_by_key(|(_, since)| **since).map(|(object, _)| object.clone())
            {
                writes.uncertain.remove(&oldest);
            }
            writes.uncertain.insert(object.clone(), Instant::now());
        }
        if let Some(running) = writes.running.get_mut(object) {
            *running -= 1;
            if *running == 0 {
                writes.running.remove(object);
            }
        }
    }

    /// Forget the objects whose `bucket/key` begins with a prefix: those in memory, and by `clear` those of the drives. Until it returns, nothing is kept
    /// of them, because a reader may find a state on a drive that is not cleared yet. Waits for drives.
    pub fn purge<T>(&self, prefix: &str, clear: impl FnOnce() -> T) -> T {
        self.purged().push(prefix.to_owned());
        self.forget_all(prefix);
        // A thread that has seen a state in memory writes it before the drives are cleared.
        self.stripes.iter().for_each(|stripe| drop(stripe.on_drive.lock()));
        let cleared = clear();
        self.forget_all(prefix);
        let mut purged = self.purged();
        if let Some(own) = purged.iter().position(|other| other == prefix) {
            purged.swap_remove(own);
        }
        cleared
    }

    fn purged(&self) -> MutexGuard<'_, Vec<String>> {
        self.purged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget_all(&self, prefix: &str) {
        for stripe in &self.stripes {
            stripe.writes.lock().unwrap_or_else(PoisonError::into_inner).generation += 1;
        }
        self.known.retain(|object, _| !object.begins_with(prefix));
    }

    /// Remove the cached pages of an object, and its state beside them. Fails if the state may still be there, and then no state of a drive is believed.
    /// Waits for drives.
    pub fn forget_pages(&self, object: &Object) -> std::io::Result<()> {
        let _alone = self.stripe(object).on_drive.lock().unwrap_or_else(PoisonError::into_inner);
        self.cached.forget(&object.name())
    }

    fn waiting(&self) -> MutexGuard<'_, HashSet<Version>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Note that somebody will write the state of a version by `note`. Returns false if somebody is about to: what memory has by then is written.
    pub fn will_note(&self, version: &Version) -> bool {
        self.waiting().insert(version.clone())
    }

    /// Write the state of a version beside its pages, if memory still has it. Waits for drives.
    pub fn note(&self, version: &Version) {
        let object = &version.object;
        let _alone = self.stripe(object).on_drive.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting().remove(version);
        let Some(meta) = self.get(object).filter(|meta| Version::new(object, meta) == *version) else { return };
        if self.cached.annotate(&version.name(), &meta.note()) {
            meta.was_noted();
        }
    }

    /// Return the state of an object that a drive has. Waits for drives.
    pub fn find(&self, object: &Object) -> Option<Meta> {
        let _alone = self.stripe(object).on_drive.lock().unwrap_or_else(PoisonError::into_inner);
        let noted = self.cached.noted(&object.name())?;
        let meta = Meta::of_note(&noted.note, noted.is_believed)?;
        // The bytes beside it are those of this version.
        (Version::new(object, &meta).name() == noted.name).then_some(meta)
    }
}
