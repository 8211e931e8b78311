//! Objects of a cold store, read through the cache: which version is current, and the bytes of that version as a stream.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use penstock_cache::{Cached, Drives, Policy};
use penstock_storage::{RangeRequest, Storage as _};
use quick_cache::sync::Cache;
use s3s::dto::{ChecksumMode, GetObjectInput, HeadObjectInput, Range as HttpRange};
use s3s::{S3, S3Error, S3ErrorCode, S3Result, s3_error};

use crate::cold::request;
use crate::cold::source::{Early, Source, answer, receive};
use crate::memory::{Memory, Taken, overloaded};
use crate::meta::{Meta, Object, Version};
use crate::metrics::{Counted, Metrics};
use crate::read::buffers::Buffers;
use crate::read::hot::{Hot, PIECE_BYTES};

/// The first cold request of an object is this long, so that its first bytes arrive soon.
pub const FIRST_BYTES: u64 = 1 << 20;
/// States of objects that are kept.
const KEPT_STATES: usize = 200_000;
/// Cold requests begin and end at multiples of this, as the pages of the cache do.
const PAGE_BYTES: u64 = 4096;
/// Number of counters that show whether an object was written while it was read.
const GENERATIONS: usize = 1024;

/// When the current version of an object is asked for again.
#[derive(Debug, Clone, Copy)]
pub enum Revalidate {
    Never,
    After(Duration),
    Always,
}

/// The result of a cold fetch, for all who wait for it.
pub type Fetched<T> = Shared<BoxFuture<'static, Result<T, Arc<S3Error>>>>;

/// Cold fetches that run now.
type Flights<K, T> = Mutex<HashMap<K, Fetched<T>>>;

/// A version, and the bytes that arrived with the news of it.
pub type Resolved = (Arc<Meta>, Option<(u64, Bytes)>);

/// A question for the version of an object: the object, its generation, and the first and last byte that are wanted.
type Question = (Object, u64, Option<(u64, u64)>);

/// Objects of a cold store behind a cache.
pub struct Blocks {
    cold: Arc<dyn S3>,
    pub cached: Cached,
    early: Early,
    states: Cache<Object, Arc<Meta>>,
    /// Changes when an object with this hash is written, so that what was read before is not kept.
    generations: Vec<AtomicU64>,
    resolving: Flights<Question, Resolved>,
    heads: Flights<(Object, u64), Arc<Meta>>,
    windows: Flights<(String, u64, u64), Bytes>,
    memory: Memory,
    buffers: Arc<Buffers>,
    hot: Option<Hot>,
    revalidate: Revalidate,
    /// Returns whether an object never changes.
    is_immutable: fn(&str) -> bool,
    pub metrics: Arc<Metrics>,
}

impl Blocks {
    // Over 6 parameters: each comes from another part of the configuration.
    #[allow(clippy::too_many_arguments)]
    pub fn new(
        cold: Arc<dyn S3>,
        identity: String,
        drives: Drives,
        memory: Memory,
        hot: Option<Hot>,
        revalidate: Revalidate,
        is_immutable: fn(&str) -> bool,
        metrics: Arc<Metrics>,
    ) -> Blocks {
        let early = Early::default();
        let source = Source::new(cold.clone(), identity, tokio::runtime::Handle::current(), early.clone());
        let policy = Policy { keeps: |_| true, memory_bytes: || 0, changed: || {} };
        Blocks {
            cold,
            cached: Cached::over(Box::new(source), drives, None, policy),
            early,
            states: Cache::new(KEPT_STATES),
            generations: (0..GENERATIONS).map(|_| AtomicU64::new(0)).collect(),
            resolving: Mutex::default(),
            heads: Mutex::default(),
            windows: Mutex::default(),
            memory,
            buffers: Arc::default(),
            hot,
            revalidate,
            is_immutable,
            metrics,
        }
    }

    fn generation(&self, object: &Object) -> &AtomicU64 {
        let hash = |text: &str| text.bytes().fold(0usize, |hash, byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
        &self.generations[(hash(&object.bucket) ^ hash(&object.key)) % GENERATIONS]
    }

    /// Note that an object is being written or was written, and return what was known of it. Call it before and after the write.
    pub fn changed(&self, object: &Object) -> Option<Arc<Meta>> {
        self.generation(object).fetch_add(1, Relaxed);
        self.states.remove(object).map(|(_, meta)| meta)
    }

    /// Note that an object will be written, and remove its cached pages. They are not needed any more, and an object with the same digest must not
    /// be taken for it.
    pub async fn forget(&self, object: &Object) {
        if let Some(meta) = self.changed(object) {
            let (cached, name) = (self.cached.clone(), Version::new(object, &meta).name());
            self.hot.iter().for_each(|hot| hot.forget(&name));
            // A drive that hangs must not hold up the runtime.
            let _ = tokio::task::spawn_blocking(move || cached.forget(&name)).await;
        }
    }

    fn is_fresh(&self, object: &Object, meta: &Meta) -> bool {
        (self.is_immutable)(&object.key)
            || match self.revalidate {
                Revalidate::Never => true,
                Revalidate::After(time) => meta.seen.elapsed() < time,
                Revalidate::Always => false,
            }
    }

    /// Return the current version of an object. Cost: nothing if it is known and fresh, otherwise one cold request, which also returns the first
    /// bytes of `wanted` if the version was not known.
    pub async fn resolve(self: &Arc<Self>, object: &Object, wanted: Option<HttpRange>) -> S3Result<Resolved> {
        let known = self.states.get(object);
        if let Some(meta) = known.as_ref().filter(|meta| self.is_fresh(object, meta)) {
            return Ok((meta.clone(), None));
        }
        if known.is_some() {
            return Ok((self.state(object).await?, None));
        }
        let generation = self.generation(object).load(Relaxed);
        let range = first_range(wanted);
        let key = (object.clone(), generation, range);
        let flight = {
            let mut resolving = self.resolving.lock().unwrap_or_else(PoisonError::into_inner);
            let begin = || {
                let (blocks, key, object) = (self.clone(), key.clone(), object.clone());
                shared(async move {
                    let resolved = blocks.discover(&object, range).await;
                    if let Ok((meta, _)) = &resolved {
                        blocks.keep(&object, generation, meta);
                    }
                    blocks.resolving.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
                    resolved
                })
            };
            resolving.entry(key.clone()).or_insert_with(begin).clone()
        };
        flight.await.map_err(|error| copy(&error))
    }

    /// Return the state of an object with its checksums, if it is still this version. Cost: one cold request if they are not known.
    pub async fn with_sums(self: &Arc<Self>, object: &Object, meta: Arc<Meta>) -> S3Result<Arc<Meta>> {
        if meta.knows_sums {
            return Ok(meta);
        }
        let generation = self.generation(object).load(Relaxed);
        let full = self.shared_head(object, generation).await?;
        if full.etag != meta.etag || full.bytes != meta.bytes {
            return Ok(meta);
        }
        self.keep(object, generation, &full);
        Ok(full)
    }

    /// Return the current state of an object. Cost: nothing if it is known and fresh, otherwise one cold request.
    pub async fn state(&self, object: &Object) -> S3Result<Arc<Meta>> {
        if let Some(meta) = self.states.get(object).filter(|meta| self.is_fresh(object, meta)) {
            return Ok(meta);
        }
        let generation = self.generation(object).load(Relaxed);
        let meta = self.head(object).await?;
        self.keep(object, generation, &meta);
        Ok(meta)
    }

    /// Keep the state of an object, unless it was written since `generation`.
    fn keep(&self, object: &Object, generation: u64, meta: &Arc<Meta>) {
        self.states.insert(object.clone(), meta.clone());
        if self.generation(object).load(Relaxed) != generation {
            self.states.remove(object);
        }
    }

    /// Ask the cold store for the state of an object.
    pub async fn head(&self, object: &Object) -> S3Result<Arc<Meta>> {
        let input = HeadObjectInput {
            bucket: object.bucket.clone(),
            key: object.key.clone(),
            checksum_mode: Some(ChecksumMode::from_static(ChecksumMode::ENABLED)),
            ..HeadObjectInput::default()
        };
        let _waits = Counted::begin(&self.metrics.cold_waits);
        self.metrics.cold_requests.inc();
        let output = match self.cold.head_object(request(input)).await {
            // Responses to HEAD have no body that says what is missing.
            Err(error) if error.status_code().is_some_and(|status| status == 404) && *error.code() != S3ErrorCode::NoSuchBucket => {
                return Err(s3_error!(NoSuchKey, "the object does not exist"));
            }
            other => other?.output,
        };
        Meta::of_head(output).map(Arc::new).ok_or_else(no_version)
    }

    /// Ask the cold store for the state of an object, together with all others that ask for it now.
    async fn shared_head(self: &Arc<Self>, object: &Object, generation: u64) -> S3Result<Arc<Meta>> {
        let key = (object.clone(), generation);
        let flight = {
            let mut heads = self.heads.lock().unwrap_or_else(PoisonError::into_inner);
            let begin = || {
                let (blocks, key) = (self.clone(), key.clone());
                shared(async move {
                    let meta = blocks.head(&key.0).await;
                    blocks.heads.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
                    meta
                })
            };
            heads.entry(key.clone()).or_insert_with(begin).clone()
        };
        flight.await.map_err(|error| copy(&error))
    }

    /// Read the first bytes of an object whose version is not known, and let the cache keep them.
    async fn discover(self: &Arc<Self>, object: &Object, range: Option<(u64, u64)>) -> S3Result<Resolved> {
        let Some((first, last)) = range else { return Ok((self.head(object).await?, None)) };
        let input = GetObjectInput {
            bucket: object.bucket.clone(),
            key: object.key.clone(),
            range: Some(HttpRange::Int { first, last: Some(last) }),
            ..GetObjectInput::default()
        };
        let _waits = Counted::begin(&self.metrics.cold_waits);
        self.metrics.cold_requests.inc();
        let output = match self.cold.get_object(request(input)).await {
            // The object is empty, or ends before the range.
            Err(error) if *error.code() == S3ErrorCode::InvalidRange => return Ok((self.head(object).await?, None)),
            other => other?.output,
        };
        let meta = Meta::of_get(&output).map(Arc::new).ok_or_else(no_version)?;
        // A store may ignore ranges, and then sends the whole object.
        let begin = if output.content_range.is_some() { first } else { 0 };
        let length = u64::try_from(output.content_length.unwrap_or_default()).unwrap_or_default();
        if output.content_range.is_none() {
            // Perhaps it is the whole object, and perhaps a part of it without a word.
            let whole = self.head(object).await?;
            if whole.etag != meta.etag || whole.bytes != length {
                return Ok((whole, None));
            }
        }
        let is_asked = |range: &String| *range == format!("bytes {first}-{}/{}", (first + length).saturating_sub(1), meta.bytes);
        if !output.content_range.as_ref().is_none_or(is_asked) {
            return Err(s3_error!(ServiceUnavailable, "the cold store returned another range"));
        }
        if length > FIRST_BYTES || begin + length > meta.bytes || length == 0 {
            return Ok((meta, None));
        }
        let name = Version::new(object, &meta).name();
        if self.cached.has(&name, meta.bytes, begin..begin + length) {
            // The rest of the response is not received.
            return Ok((meta, None));
        }
        let mut bytes = BytesMut::with_capacity(length as usize);
        if receive(output.body, &mut bytes, length as usize).await.is_err() {
            // The window is read again, by ranges that are continued.
            return Ok((meta, None));
        }
        let bytes = bytes.freeze();
        self.early.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone(), (begin, bytes.clone()));
        // The bytes arrived, whether or not the cache can keep them.
        let kept = self.window(&name, meta.bytes, begin..begin + length, true).await;
        self.early.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
        Ok((meta, Some((begin, kept.unwrap_or(bytes)))))
    }

    /// Return a part of one piece of a version, if it is cached, sound, and in memory.
    pub fn read_now(&self, name: &Arc<str>, object_bytes: u64, part: Range<u64>) -> Option<Bytes> {
        let touch = || self.cached.touch(name, object_bytes, part.start);
        if let Some(bytes) = self.hot.as_ref().and_then(|hot| hot.get(name, &part, touch)) {
            self.metrics.memory_hits.inc();
            return Some(bytes);
        }
        let mut memory = self.buffers.get();
        let Some(inside) = self.cached.read_now(name, object_bytes, part.clone(), &mut memory) else {
            self.buffers.give_back(memory);
            return None;
        };
        let bytes = self.buffers.freeze(memory).slice(inside);
        let piece = part.start / PIECE_BYTES;
        let is_whole = part.start.is_multiple_of(PIECE_BYTES) && part.end == object_bytes.min((piece + 1) * PIECE_BYTES);
        if let Some(hot) = self.hot.as_ref().filter(|_| is_whole) {
            hot.note(name, piece, &bytes);
        }
        Some(bytes)
    }

    /// Return how many bytes are held in memory.
    pub fn held_bytes(&self) -> u64 {
        self.hot.as_ref().map_or(0, |hot| hot.arena().held_bytes())
    }

    /// Read a part of a version through the cache, together with all others that want the same part.
    async fn window(self: &Arc<Self>, name: &str, object_bytes: u64, range: Range<u64>, waits: bool) -> S3Result<Bytes> {
        match self.begin_window(name, object_bytes, range, waits) {
            Some(window) => window.await.map_err(|error| copy(&error)),
            None => Err(overloaded()),
        }
    }

    /// Begin to read a part of a version. Returns None if it must not wait for memory, and there is none.
    pub fn begin_window(self: &Arc<Self>, name: &str, object_bytes: u64, range: Range<u64>, waits: bool) -> Option<Fetched<Bytes>> {
        let key = (name.to_owned(), range.start, range.end);
        let mut windows = self.windows.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(window) = windows.get(&key) {
            return Some(window.clone());
        }
        let taken = self.memory.try_take(range.end - range.start);
        if taken.is_none() && !waits {
            return None;
        }
        let (blocks, own) = (self.clone(), key.clone());
        let flight = shared(async move {
            let fetched = blocks.fetch(&own.0, object_bytes, own.1..own.2, taken).await;
            blocks.windows.lock().unwrap_or_else(PoisonError::into_inner).remove(&own);
            fetched
        });
        windows.insert(key, flight.clone());
        Some(flight)
    }

    async fn fetch(self: &Arc<Self>, name: &str, object_bytes: u64, range: Range<u64>, taken: Option<Taken>) -> S3Result<Bytes> {
        let taken = match taken {
            Some(taken) => taken,
            None => self.memory.take(range.end - range.start).await?,
        };
        let _waits = Counted::begin(&self.metrics.cold_waits);
        let (cached, name) = (self.cached.clone(), name.to_owned());
        let read = tokio::task::spawn_blocking(move || {
            let request = RangeRequest::plain(&name, range.start, range.end - range.start, Some(object_bytes));
            cached.fetch(vec![request]).pop()
        });
        let mut pieces = match read.await.map_err(S3Error::internal_error)? {
            Some(Ok(pieces)) => pieces,
            Some(Err(error)) => return Err(answer(&error)),
            None => return Err(s3_error!(InternalError, "a read returned nothing")),
        };
        Ok(taken.with(pieces.pop().unwrap_or_default()))
    }
}

/// Run work to its end, even if nobody waits for it any more.
fn shared<T: Clone + Send + Sync + 'static>(work: impl Future<Output = S3Result<T>> + Send + 'static) -> Fetched<T> {
    let joined = tokio::spawn(async move { work.await.map_err(Arc::new) });
    joined.map(|joined| joined.unwrap_or_else(|error| Err(Arc::new(S3Error::internal_error(error))))).boxed().shared()
}

/// Return the first bytes of a wanted range, first and last, or None if they cannot be known before the length is.
fn first_range(wanted: Option<HttpRange>) -> Option<(u64, u64)> {
    let wanted = match wanted {
        None => 0..u64::MAX,
        Some(HttpRange::Int { first, last }) => first..last.map_or(u64::MAX, |last| last.saturating_add(1)),
        Some(HttpRange::Suffix { .. }) => return None,
    };
    let page = wanted.start / PAGE_BYTES * PAGE_BYTES;
    let end = wanted.end.checked_next_multiple_of(PAGE_BYTES).unwrap_or(u64::MAX);
    (wanted.start < wanted.end).then(|| (page, end.min(page.saturating_add(FIRST_BYTES)) - 1))
}

/// Errors are not `Clone`, because of their sources.
pub fn copy(error: &S3Error) -> S3Error {
    let mut copy = S3Error::new(error.code().clone());
    if let Some(message) = error.message() {
        copy.set_message(message.to_owned());
    }
    if let Some(status) = error.status_code() {
        copy.set_status_code(status);
    }
    if let Some(headers) = error.headers() {
        copy.set_headers(headers.clone());
    }
    copy
}

fn no_version() -> S3Error {
    s3_error!(NotImplemented, "the cold store sent no ETag or length for this object")
}
