//! Which objects are acknowledged but not in the cold store yet. Their bytes are in a folder; this is what the server knows of them.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use s3s::S3Error;
use tokio::sync::watch;

use crate::meta::Object;

#[derive(Debug, Default)]
struct Entry {
    /// The length of the object in the folder, or None until its first put is durable.
    bytes: Option<u64>,
    /// Puts that are being received.
    writers: usize,
    /// Counts puts that became durable, so that an older version that was sent is not taken for the newest.
    version: u64,
    is_queued: bool,
    is_being_sent: bool,
    is_being_removed: bool,
    /// Number of failed tries, and why the last one failed.
    failures: u64,
    why: Option<(s3s::S3ErrorCode, String)>,
}

impl Entry {
    fn is_gone(&self) -> bool {
        self.bytes.is_none() && self.writers == 0 && !self.is_being_sent && !self.is_being_removed
    }
}

#[derive(Debug, Default)]
struct State {
    objects: HashMap<Object, Entry>,
    queue: VecDeque<Object>,
    held: Counts,
    reserved_bytes: u64,
}

/// How many objects and bytes are pending.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub objects: u64,
    pub bytes: u64,
}

#[derive(Debug)]
pub struct Pending {
    state: Mutex<State>,
    changed: watch::Sender<()>,
    most_bytes: u64,
}

/// A put that is being received. It counts as failed when this is dropped without `done`.
pub struct Writing<'a> {
    pending: &'a Pending,
    object: Object,
    bytes: u64,
}

impl Writing<'_> {
    /// Note that the object is durable in the folder.
    pub fn done(self) {
        self.pending.change(|state| {
            state.hold(&self.object, Some(self.bytes));
            state.enqueue(&self.object);
        });
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        self.pending.change(|state| {
            state.reserved_bytes -= self.bytes;
            if let Some(entry) = state.objects.get_mut(&self.object) {
                entry.writers -= 1;
            }
            state.tidy(&self.object);
        });
    }
}

impl State {
    fn enqueue(&mut self, object: &Object) {
        let waits = |entry: &Entry| entry.bytes.is_some() && !entry.is_queued && !entry.is_being_sent && !entry.is_being_removed;
        if let Some(entry) = self.objects.get_mut(object).filter(|entry| waits(entry)) {
            entry.is_queued = true;
            self.queue.push_back(object.clone());
        }
    }

    fn tidy(&mut self, object: &Object) {
        if self.objects.get(object).is_some_and(Entry::is_gone) {
            self.objects.remove(object);
        }
    }

    /// Note what the folder has of an object now.
    fn hold(&mut self, object: &Object, bytes: Option<u64>) {
        let Some(entry) = self.objects.get_mut(object) else { return };
        entry.version += 1;
        let before = std::mem::replace(&mut entry.bytes, bytes);
        let count = |bytes: Option<u64>| bytes.map_or(Counts::default(), |bytes| Counts { objects: 1, bytes });
        let (before, after) = (count(before), count(bytes));
        self.held.objects = self.held.objects + after.objects - before.objects;
        self.held.bytes = self.held.bytes + after.bytes - before.bytes;
    }
}

impl Pending {
    /// Begin with what the folder has.
    pub fn new(held: Vec<(Object, u64)>, most_bytes: u64) -> Pending {
        let mut state = State::default();
        for (object, bytes) in held {
            state.objects.insert(object.clone(), Entry::default());
            state.hold(&object, Some(bytes));
            state.enqueue(&object);
        }
        Pending { state: Mutex::new(state), changed: watch::Sender::new(()), most_bytes }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let answer = change(&mut self.lock());
        self.changed.send_replace(());
        answer
    }

    /// Repeat a look at the state, after each change, until it returns something.
    async fn until<T>(&self, mut look: impl FnMut(&mut State) -> Option<T>) -> T {
        let mut changes = self.changed.subscribe();
        loop {
            if let Some(found) = look(&mut self.lock()) {
                return found;
            }
            // The sender lives as long as this does.
            let _ = changes.changed().await;
        }
    }

    pub fn counts(&self) -> Counts {
        self.lock().held
    }

    /// Return whether the newest version of an object is in the folder.
    pub fn holds(&self, object: &Object) -> bool {
        self.lock().objects.get(object).is_some_and(|entry| entry.bytes.is_some())
    }

    /// Begin a put. Returns None if there is not enough room.
    pub async fn begin(&self, object: Object, bytes: u64) -> Option<Writing<'_>> {
        let begin = |state: &mut State| {
            if state.objects.get(&object).is_some_and(|entry| entry.is_being_removed) {
                return None;
            }
            if (state.held.bytes + state.reserved_bytes).saturating_add(bytes) > self.most_bytes {
                return Some(false);
            }
            state.reserved_bytes += bytes;
            state.objects.entry(object.clone()).or_default().writers += 1;
            Some(true)
        };
        let has_room = self.until(begin).await;
        has_room.then(|| Writing { pending: self, object, bytes })
    }

    /// Wait for an object to send, and return it with its version.
    pub async fn next(&self) -> (Object, u64) {
        self.until(|state| {
            let object = state.queue.pop_front()?;
            let entry = state.objects.get_mut(&object)?;
            (entry.is_queued, entry.is_being_sent) = (false, true);
            Some((object, entry.version))
        })
        .await
    }

    /// Note that a version was sent. Returns whether it is still the newest one, and must now be removed from the folder.
    pub fn sent(&self, object: &Object, version: u64) -> bool {
        self.change(|state| {
            let Some(entry) = state.objects.get_mut(object) else { return false };
            (entry.is_being_sent, entry.why) = (false, None);
            entry.is_being_removed = entry.version == version && entry.writers == 0;
            let is_newest = entry.is_being_removed;
            if !is_newest {
                state.enqueue(object);
            }
            is_newest
        })
    }

    /// Note whether an object is no longer in the folder. If it is, it must be sent again.
    pub fn removed(&self, object: &Object, is_gone: bool) {
        self.change(|state| {
            if is_gone {
                state.hold(object, None);
            }
            if let Some(entry) = state.objects.get_mut(object) {
                entry.is_being_removed = false;
            }
            state.tidy(object);
        });
    }

    /// Note that a try to send an object failed. It is sent again after `again`.
    pub fn failed(&self, object: &Object, error: &S3Error) {
        self.change(|state| {
            if let Some(entry) = state.objects.get_mut(object) {
                (entry.is_being_sent, entry.failures) = (false, entry.failures + 1);
                entry.why = Some((error.code().clone(), error.message().unwrap_or("the cold store refused it").to_owned()));
            }
        });
    }

    pub fn again(&self, object: &Object) {
        self.change(|state| state.enqueue(object));
    }

    /// Wait until an object is in the cold store. Fails if a try to send it fails meanwhile.
    pub async fn settle(&self, object: &Object) -> s3s::S3Result<()> {
        // The pause after a failure ends now.
        self.again(object);
        let mut failures = None;
        self.until(|state| {
            let Some(entry) = state.objects.get(object).filter(|entry| entry.bytes.is_some() || entry.is_being_removed) else {
                return Some(Ok(()));
            };
            if entry.failures > *failures.get_or_insert(entry.failures)
                && let Some((code, why)) = &entry.why
            {
                let text = format!("an earlier put of `{}` is not in the cold store yet: {why}", object.key);
                return Some(Err(S3Error::with_message(code.clone(), text)));
            }
            None
        })
        .await
    }

    /// Return the pending objects of a bucket whose keys begin with a prefix.
    pub fn of(&self, bucket: &str, prefix: &str) -> Vec<Object> {
        let state = self.lock();
        state.objects.keys().filter(|object| object.bucket == bucket && object.key.starts_with(prefix)).cloned().collect()
    }

    /// Wait until nothing is pending.
    pub async fn settle_all(&self) {
        self.until(|state| (state.held.objects == 0).then_some(())).await;
    }
}
