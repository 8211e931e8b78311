//! Which objects are acknowledged but not in the cold store yet. Their bytes are in a folder; this is what the server knows of them.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use s3s::dto::{ETag, ListBucketsInput, ListObjectsV2Input};
use s3s::{S3, S3Error, S3Result, s3_error};
use tokio::sync::watch;

use crate::cold::request;
use crate::folder::Folder;
use crate::meta::Object;

#[derive(Debug, Default)]
struct Entry {
    /// The length of the object in the folder, or None until its first put is durable.
    bytes: Option<u64>,
    /// Puts that are being received.
    writers: usize,
    /// Counts puts that became durable, so that an older version that was sent is not taken for the newest.
    version: u64,
    /// The newest version that was sent.
    sent: u64,
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

/// What a file needs besides its bytes.
const FILE_BYTES: u64 = 4096;

/// What the caller of `settle` needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// The version of this moment is in the cold store.
    Sent,
    /// Nothing is in the folder.
    Gone,
}

/// A put that is being received. It counts as failed when this is dropped without `done`.
pub struct Writing<'a> {
    pending: &'a Pending,
    object: Object,
    bytes: u64,
}

impl Writing<'_> {
    /// Note that the folder has the object, with so many bytes.
    pub fn done(self, bytes: u64) {
        self.pending.change(|state| {
            state.hold(&self.object, Some(bytes));
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
        let waits = |entry: &Entry| {
            entry.bytes.is_some() && !entry.is_queued && !entry.is_being_sent && !entry.is_being_removed
        };
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
        let count = |bytes: Option<u64>| {
            bytes.map_or(Counts::default(), |bytes| Counts { objects: 1, bytes: bytes + FILE_BYTES })
        };
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
        let bytes = bytes.saturating_add(FILE_BYTES);
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

    /// Wait for an object to send. Returns it with its version, and whether that was sent already and must only be removed.
    pub async fn next(&self) -> (Object, u64, bool) {
        self.until(|state| {
            loop {
                let object = state.queue.pop_front()?;
                let Some(entry) = state.objects.get_mut(&object) else { continue };
                entry.is_queued = false;
                // A delete that has taken the object comes first. It is queued again if the delete fails.
                if !entry.is_being_removed {
                    entry.is_being_sent = true;
                    return Some((object, entry.version, entry.sent == entry.version));
                }
            }
        })
        .await
    }

    /// Note that a version was sent. Returns whether it is still the newest one, and must now be removed from the folder.
    pub fn sent(&self, object: &Object, version: u64) -> bool {
        self.change(|state| {
            let Some(entry) = state.objects.get_mut(object) else { return false };
            (entry.is_being_sent, entry.why, entry.sent) = (false, None, version);
            entry.is_being_removed = entry.version == version && entry.writers == 0;
            let is_newest = entry.is_being_removed;
            if !is_newest {
                state.enqueue(object);
            }
            is_newest
        })
    }

    /// Record that the folder does not have an object any more.
    pub fn removed(&self, object: &Object) {
        self.change(|state| {
            state.hold(object, None);
            state.objects.get_mut(object).into_iter().for_each(|entry| entry.is_being_removed = false);
            state.tidy(object);
        });
    }

    /// Note that an object could not be sent or removed, and return how often. It is tried again after `again`.
    pub fn failed(&self, object: &Object, error: &S3Error) -> u64 {
        self.change(|state| {
            let Some(entry) = state.objects.get_mut(object) else { return 0 };
            (entry.is_being_sent, entry.is_being_removed, entry.failures) = (false, false, entry.failures + 1);
            entry.why = Some((error.code().clone(), error.message().unwrap_or("the cold store refused it").to_owned()));
            entry.failures
        })
    }

    /// Keep an object from being sent while it is deleted. Returns whether it is in the folder, and must then be noted as `removed` or `failed`.
    pub async fn take(&self, object: &Object) -> bool {
        self.until(|state| {
            let Some(entry) = state.objects.get_mut(object).filter(|entry| entry.bytes.is_some()) else {
                return Some(false);
            };
            let is_free = !entry.is_being_sent && !entry.is_being_removed && entry.writers == 0;
            entry.is_being_removed |= is_free;
            is_free.then_some(true)
        })
        .await
    }

    pub fn again(&self, object: &Object) {
        self.change(|state| state.enqueue(object));
    }

    /// Wait until an object is in the cold store. Fails if a try to send it fails meanwhile.
    pub async fn settle(&self, object: &Object, need: Need) -> S3Result<()> {
        // The pause after a failure ends now.
        self.again(object);
        let mut begun = None;
        self.until(|state| {
            let Some(entry) = state.objects.get(object).filter(|entry| entry.bytes.is_some() || entry.is_being_removed)
            else {
                return Some(Ok(()));
            };
            let (failures, version) = *begun.get_or_insert((entry.failures, entry.version));
            if need == Need::Sent && entry.sent >= version {
                return Some(Ok(()));
            }
            let (code, why) = entry.why.as_ref().filter(|_| entry.failures > failures)?;
            let text = format!(
                "an earlier put of `{}` is not in the cold store yet: {why}; deleting it resolves this",
                object.key
            );
            Some(Err(S3Error::with_message(code.clone(), text)))
        })
        .await
    }

    /// Return the pending objects of a bucket whose keys begin with a prefix.
    pub fn of(&self, bucket: &str, prefix: &str) -> Vec<Object> {
        let state = self.lock();
        state
            .objects
            .keys()
            .filter(|object| object.bucket == bucket && object.key.starts_with(prefix))
            .cloned()
            .collect()
    }

    /// Return how many bytes these objects have.
    pub fn bytes_of(&self, bucket: &str, prefix: &str) -> u64 {
        let state = self.lock();
        let below =
            state.objects.iter().filter(|(object, _)| object.bucket == bucket && object.key.starts_with(prefix));
        below.filter_map(|(_, entry)| entry.bytes).sum()
    }

    /// Wait until everything was sent, or could not be.
    pub async fn settle_all(&self) {
        self.until(|state| {
            state.objects.values().all(|entry| entry.bytes.is_none() || entry.why.is_some()).then_some(())
        })
        .await;
    }
}

/// Return the MD5 of an object in the folder. A file that was changed has an ETag of another form.
pub fn md5_of(etag: Option<&ETag>) -> S3Result<[u8; 16]> {
    let text = etag.and_then(ETag::as_strong).filter(|text| text.len() == 32 && text.is_ascii());
    let digits = text.map(|text| std::array::from_fn(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16).ok()));
    let md5 = digits.and_then(|digits: [Option<u8>; 16]| {
        digits.iter().all(Option::is_some).then(|| digits.map(Option::unwrap_or_default))
    });
    md5.ok_or_else(|| {
        s3_error!(
            InternalError,
            "the only copy of the object, in the --write-back folder, was modified by another program"
        )
    })
}

/// List what a folder has.
pub async fn held(folder: &Folder) -> S3Result<Vec<(Object, u64)>> {
    let buckets =
        S3::list_buckets(folder, request(ListBucketsInput::default())).await?.output.buckets.unwrap_or_default();
    let mut held = Vec::new();
    for bucket in buckets.into_iter().filter_map(|bucket| bucket.name) {
        let mut after = None;
        loop {
            let input = ListObjectsV2Input {
                bucket: bucket.clone(),
                continuation_token: after,
                ..ListObjectsV2Input::default()
            };
            let page = S3::list_objects_v2(folder, request(input)).await?.output;
            let objects = page.contents.unwrap_or_default().into_iter();
            held.extend(
                objects.filter_map(|found| Some((Object::new(&bucket, &found.key?), u64::try_from(found.size?).ok()?))),
            );
            after = page.next_continuation_token;
            if after.is_none() {
                break;
            }
        }
    }
    Ok(held)
}
