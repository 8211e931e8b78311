//! Objects of a cold store, read through the cache: the bytes of a version as windows.

use std::ops::Range;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use penstock_cache::{Cached, Drives, Policy};
use penstock_error::Result;
use penstock_storage::{RangeRequest, Read as _};
use s3s::dto::{GetObjectInput, Range as HttpRange};
use s3s::{S3, S3Error, S3ErrorCode, S3Result, s3_error};
use tokio::sync::Semaphore;

use super::flights::{Fetched, Flights, copy};
use super::immutable::Immutable;
use super::states::{Revalidate, States};
use crate::cold::outage::Outage;
use crate::cold::source::{Early, Source, answer, receive};
use crate::cold::{check_is_object, request};
use crate::memory::{Memory, Taken, overloaded};
use crate::meta::{Meta, Object, Version};
use crate::metrics::{Counted, Metrics};
use crate::read::buffers::Buffers;
use crate::read::memory_cache::{MemoryCache, PIECE_BYTES};

/// The first cold request of an object is this long, so that its first bytes arrive soon.
pub const FIRST_BYTES: u64 = 1 << 20;
/// Cold requests begin and end at multiples of this, as the pages of the cache do.
const PAGE_BYTES: u64 = 4096;

/// A version, and the bytes that arrived with the news of it.
pub struct Resolved {
    pub meta: Arc<Meta>,
    pub early: Option<(u64, Bytes)>,
    /// How old the state is, if the cold store could not be asked.
    pub age: Option<Duration>,
}

/// A version, and its first bytes if they arrived.
type Discovered = (Arc<Meta>, Option<(u64, Bytes)>);

/// A question for the version of an object: the object, its generation, and the first and last byte that are wanted.
type Question = (Object, u64, Option<(u64, u64)>);

/// How a cold store is read through a cache.
pub struct Reading {
    pub memory: Memory,
    pub memory_cache: Option<MemoryCache>,
    /// The memory for states of objects.
    pub states_bytes: u64,
    pub revalidate: Revalidate,
    /// How old a state may be that is served while the cold store fails.
    pub stale_if_error: Duration,
    pub immutable: Immutable,
}

/// Objects of a cold store behind a cache.
pub struct CachedObjects {
    pub(super) cold: Arc<dyn S3>,
    pub cached: Cached,
    early: Early,
    pub(super) states: States,
    pub(super) on_drive: Flights<(Object, u64), Option<Arc<Meta>>>,
    resolving: Flights<Question, Discovered>,
    pub(super) heads: Flights<(Object, u64), Arc<Meta>>,
    windows: Flights<(String, u64, u64), Bytes>,
    memory: Memory,
    buffers: Arc<Buffers>,
    memory_cache: Option<MemoryCache>,
    pub(super) revalidate: Revalidate,
    pub(super) stale_if_error: Duration,
    pub(super) immutable: Immutable,
    pub(super) outage: Outage,
    pub metrics: Arc<Metrics>,
}

/// Reads that wait for a cold store at once, each in a thread for blocking work. It is half of what tokio has: these reads themselves wait for files of a
/// served folder and for addresses of hosts, which take such threads, too.
static FETCHES: Semaphore = Semaphore::const_new(256);
/// The same for reads of what the cache has. They never ask a cold store, so that they do not wait behind one that is slow.
static READS: Semaphore = Semaphore::const_new(128);
/// States that are written beside their pages at once. A process that is stopped may hold the lock of a page.
pub(super) static NOTES: Semaphore = Semaphore::const_new(64);

impl CachedObjects {
    pub fn new(
        cold: Arc<dyn S3>,
        identity: String,
        drives: Drives,
        reading: Reading,
        metrics: Arc<Metrics>,
    ) -> Result<CachedObjects> {
        let early = Early::default();
        let source = Source::new(cold.clone(), identity, tokio::runtime::Handle::current(), early.clone());
        let policy = Policy { keeps: |_| true, memory_bytes: || 0, changed: || {} };
        let cached = Cached::over(Arc::new(source), drives, None, policy).with_notes()?;
        let Reading { memory, memory_cache, states_bytes, revalidate, stale_if_error, immutable } = reading;
        Ok(CachedObjects {
            cold,
            early,
            states: States::new(cached.clone(), states_bytes),
            cached,
            on_drive: Flights::default(),
            resolving: Flights::default(),
            heads: Flights::default(),
            windows: Flights::default(),
            memory,
            buffers: Arc::default(),
            memory_cache,
            revalidate,
            stale_if_error,
            immutable,
            outage: Outage::default(),
            metrics,
        })
    }

    /// Note that an object will be written. Nothing is kept of it until `end_write`. Returns what memory had of it.
    pub fn begin_write(&self, object: &Object) -> Option<Arc<Meta>> {
        self.states.begin_write(object)
    }

    /// Note that a write has ended, and whether the cold store may carry it out later.
    pub fn end_write(&self, object: &Object, is_uncertain: bool) {
        self.states.end_write(object, is_uncertain);
    }

    /// Forget what is known of an object, because it is gone or another one. Nothing is kept of it meanwhile: a reader may find its state on the drive.
    pub async fn forget(self: &Arc<Self>, object: &Object) {
        let known = self.begin_write(object);
        self.remove_pages(object, known, |states, object| states.end_write(object, false)).await;
    }

    /// Forget the objects whose `bucket/key` begins with a prefix. Returns the bytes that were freed. Waits for drives. Cost: opens each extent.
    pub fn purge(&self, prefix: &str) -> std::io::Result<u64> {
        let is_meant = |name: &str| Version::parse(name).is_some_and(|version| version.object.begins_with(prefix));
        self.states.purge(prefix, || {
            self.memory_cache.iter().for_each(|memory_cache| memory_cache.forget_all(is_meant));
            self.cached.clear(is_meant)
        })
    }

    /// Remove the pages of an object, and its state on a drive.
    pub async fn forget_pages(self: &Arc<Self>, object: &Object, known: Option<Arc<Meta>>) {
        self.remove_pages(object, known, |_, _| ()).await;
    }

    /// Do so, and then something else, also if nobody waits for it any more.
    async fn remove_pages(
        self: &Arc<Self>,
        object: &Object,
        known: Option<Arc<Meta>>,
        then: impl FnOnce(&States, &Object) + Send + 'static,
    ) {
        if let (Some(memory_cache), Some(meta)) = (&self.memory_cache, known) {
            memory_cache.forget(&Version::new(object, &meta).name());
        }
        let (cached_objects, object) = (self.clone(), object.clone());
        // A drive that hangs must not hold up the runtime.
        let _ = tokio::task::spawn_blocking(move || {
            if cached_objects.states.forget_pages(&object).is_err() {
                cached_objects.metrics.missed_removals.inc();
            }
            then(&cached_objects.states, &object);
        })
        .await;
    }

    /// Find the version of an object of which memory had nothing, together with all others that ask for it now.
    pub(super) async fn discovered(
        self: &Arc<Self>,
        object: &Object,
        wanted: Option<HttpRange>,
    ) -> S3Result<Discovered> {
        let (generation, range) = (self.states.generation(object), first_range(wanted));
        // What memory has by now was asked for since this reader looked there. That of a drive may be old.
        let known = || self.states.get(object).filter(|meta| !meta.was_on_drive).map(|meta| (meta, None));
        let flight = self.resolving.join(&(object.clone(), generation, range), known, || {
            let (cached_objects, object) = (self.clone(), object.clone());
            async move { cached_objects.discover(&object, generation, range).await }
        });
        flight.await.map_err(|error| copy(&error))
    }

    /// Read the first bytes of an object whose version is not known, and let the cache keep them.
    async fn discover(
        self: &Arc<Self>,
        object: &Object,
        generation: u64,
        range: Option<(u64, u64)>,
    ) -> S3Result<Discovered> {
        let keep = |meta: Arc<Meta>| {
            self.keep(object, generation, &meta);
            Ok((meta, None))
        };
        let Some((first, last)) = range else { return keep(self.head(object).await?) };
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
            Err(error) if *error.code() == S3ErrorCode::InvalidRange => return keep(self.head(object).await?),
            other => other?.output,
        };
        check_is_object(output.e_tag.as_ref(), output.content_type.as_ref())?;
        let meta = Meta::of_get(&output).map(Arc::new).ok_or_else(no_version)?;
        // A store may ignore ranges, and then sends the whole object.
        let begin = if output.content_range.is_some() { first } else { 0 };
        let length = u64::try_from(output.content_length.unwrap_or_default()).unwrap_or_default();
        if output.content_range.is_none() {
            // Perhaps it is the whole object, and perhaps a part of it without a word.
            let whole = self.head(object).await?;
            if whole.etag != meta.etag || whole.bytes != length {
                return keep(whole);
            }
        }
        let is_asked =
            |range: &String| *range == format!("bytes {first}-{}/{}", (first + length).saturating_sub(1), meta.bytes);
        if !output.content_range.as_ref().is_none_or(is_asked) {
            return Err(s3_error!(ServiceUnavailable, "the cold store returned another range"));
        }
        if length > FIRST_BYTES || begin + length > meta.bytes || length == 0 {
            return keep(meta);
        }
        let name = Version::new(object, &meta).name();
        if self.cached.has(&name, meta.bytes, begin..begin + length) {
            // The rest of the response is not received.
            return keep(meta);
        }
        let mut bytes = BytesMut::with_capacity(length as usize);
        if receive(output.body, &mut bytes, length as usize).await.is_err() {
            // The window is read again, by ranges that are continued.
            return keep(meta);
        }
        let bytes = bytes.freeze();
        self.early.lock().unwrap_or_else(PoisonError::into_inner).insert(name.clone(), (begin, bytes.clone()));
        // Those who knew the state earlier would ask for these bytes again. Their fetch writes it beside them.
        self.states.keep(object, generation, &meta);
        // The bytes arrived, whether or not the cache can keep them.
        let kept = self.window(&name, meta.bytes, begin..begin + length, true).await;
        self.early.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
        Ok((meta, Some((begin, kept.unwrap_or(bytes)))))
    }

    /// Return a part of one piece of a version, if it is cached, sound, and in memory.
    pub fn read_now(&self, name: &Arc<str>, object_bytes: u64, part: Range<u64>) -> Option<Bytes> {
        let touch = || self.cached.touch(name, object_bytes, part.start);
        if let Some(bytes) = self.memory_cache.as_ref().and_then(|memory_cache| memory_cache.get(name, &part, touch)) {
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
        let is_whole =
            part.start.is_multiple_of(PIECE_BYTES) && part.end == object_bytes.min((piece + 1) * PIECE_BYTES);
        if let Some(memory_cache) = self.memory_cache.as_ref().filter(|_| is_whole) {
            memory_cache.note(name, piece, &bytes);
        }
        Some(bytes)
    }

    /// Return how many bytes are held in memory.
    pub fn held_bytes(&self) -> u64 {
        self.memory_cache.as_ref().map_or(0, |memory_cache| memory_cache.arena().held_bytes())
    }

    /// Read a part of a version through the cache, together with all others that want the same part.
    async fn window(
        self: &Arc<Self>,
        name: &str,
        object_bytes: u64,
        range: Range<u64>,
        waits: bool,
    ) -> S3Result<Bytes> {
        match self.begin_window(name, object_bytes, range, waits) {
            Some(window) => window.await.map_err(|error| copy(&error)),
            None => Err(overloaded()),
        }
    }

    /// Begin to read a part of a version. Returns None if it must not wait for memory, and there is none.
    pub fn begin_window(
        self: &Arc<Self>,
        name: &str,
        object_bytes: u64,
        range: Range<u64>,
        waits: bool,
    ) -> Option<Fetched<Bytes>> {
        let key = (name.to_owned(), range.start, range.end);
        if let Some(window) = self.windows.get(&key) {
            return Some(window);
        }
        let taken = self.memory.try_take(range.end - range.start);
        if taken.is_none() && !waits {
            return None;
        }
        // The cache itself has what was just read.
        Some(self.windows.join(
            &key,
            || None,
            || {
                let (cached_objects, name) = (self.clone(), name.to_owned());
                async move { cached_objects.fetch(&name, object_bytes, range, taken).await }
            },
        ))
    }

    async fn fetch(
        self: &Arc<Self>,
        name: &str,
        object_bytes: u64,
        range: Range<u64>,
        taken: Option<Taken>,
    ) -> S3Result<Bytes> {
        let taken = match taken {
            Some(taken) => taken,
            None => self.memory.take(range.end - range.start).await?,
        };
        let _waits = Counted::begin(&self.metrics.cold_waits);
        let plain = || RangeRequest::plain(name, range.start, range.end - range.start, Some(object_bytes));
        let request = plain();
        // Pages that are there but cannot be read, or no longer, are fetched as others are.
        if self.cached.has(name, object_bytes, range.clone())
            && let Some(bytes) =
                self.in_turn(&READS, move |cached_objects| cached_objects.cached.stored(request)).await?
        {
            return Ok(taken.with(bytes));
        }
        let version = Version::parse(name).ok_or_else(no_version)?;
        let (request, own) = (plain(), version.clone());
        let fetched = self.in_turn(&FETCHES, move |cached_objects| {
            let fetched = cached_objects.cached.fetch(vec![request]).pop();
            // A server that starts again finds the version beside these pages.
            cached_objects.states.note(&own);
            fetched
        });
        let fetched = fetched.await?.unwrap_or_else(|| Ok(Vec::new())).map_err(|error| answer(&error));
        if fetched.as_ref().is_err_and(is_gone)
            && self.states.get(&version.object).is_none_or(|meta| Version::new(&version.object, &meta) == version)
        {
            // The next reader asks for the version that is there now.
            self.forget(&version.object).await;
        }
        Ok(taken.with(fetched?.pop().ok_or_else(|| s3_error!(InternalError, "a read returned nothing"))?))
    }

    /// Read when one of these turns is free, in a thread that may wait.
    async fn in_turn<T: Send + 'static>(
        self: &Arc<Self>,
        turns: &'static Semaphore,
        read: impl FnOnce(&Self) -> T + Send + 'static,
    ) -> S3Result<T> {
        let turn = turns.acquire().await.map_err(S3Error::internal_error)?;
        let cached_objects = self.clone();
        let done = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            read(&cached_objects)
        });
        done.await.map_err(S3Error::internal_error)
    }
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

/// Return whether the cold store no longer has the version that was known.
pub fn is_gone(error: &S3Error) -> bool {
    matches!(error.code(), S3ErrorCode::PreconditionFailed | S3ErrorCode::NoSuchKey)
}

pub fn no_version() -> S3Error {
    s3_error!(NotImplemented, "the cold store sent no ETag or length for this object")
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

    use penstock_cache::Spec;
    use s3s::dto::{ETag, GetObjectOutput, StreamingBlob};
    use s3s::{S3Request, S3Response};

    use super::*;

    /// A cold store of objects of four bytes, and how many reads it has answered.
    struct Cold(AtomicUsize);

    #[async_trait::async_trait]
    impl S3 for Cold {
        async fn get_object(&self, _: S3Request<GetObjectInput>) -> S3Result<S3Response<GetObjectOutput>> {
            self.0.fetch_add(1, SeqCst);
            Ok(S3Response::new(GetObjectOutput {
                body: Some(StreamingBlob::from(s3s::Body::from(Bytes::from_static(b"body")))),
                content_length: Some(4),
                content_range: Some("bytes 0-3/4".into()),
                e_tag: Some(ETag::Strong("one".into())),
                ..GetObjectOutput::default()
            }))
        }
    }

    fn cached_objects(cold: &Arc<Cold>, folder: &std::path::Path) -> Result<Arc<CachedObjects>> {
        let metrics = Arc::new(Metrics::new());
        let reading = Reading {
            memory: Memory::new(1 << 26),
            memory_cache: None,
            states_bytes: 1 << 20,
            revalidate: Revalidate::Always,
            stale_if_error: Duration::ZERO,
            immutable: Immutable::new(cold.clone(), |_| None, Vec::new(), metrics.clone()),
        };
        let drives = Drives::open(&Spec::parse(&format!("{}:50MB", folder.display()))?)?;
        Ok(Arc::new(CachedObjects::new(cold.clone(), "s3://cold".into(), drives, reading, metrics)?))
    }

    /// A reader finds nothing in memory, and its drive is slow. Meanwhile another one asks the cold store, has the answer before this reader began, and
    /// the bytes after that.
    #[tokio::test]
    async fn what_came_while_a_reader_looked_is_not_asked_for_again() -> Result<()> {
        let (folder, cold, object) =
            (tempfile::tempdir().unwrap(), Arc::new(Cold(0.into())), Object::new("bucket", "key"));
        let cached_objects = cached_objects(&cold, folder.path())?;
        for _ in 0..3 {
            let (meta, _) = cached_objects.discovered(&object, None).await.unwrap();
            assert_eq!((meta.bytes, cold.0.load(SeqCst)), (4, 1));
        }
        // What a drive has may be old.
        let noted = Arc::new(Meta::of_note(&cached_objects.states.get(&object).unwrap().note(), true).unwrap());
        cached_objects.states.keep(&object, cached_objects.states.generation(&object), &noted);
        cached_objects.discovered(&object, None).await.unwrap();
        assert_eq!(cold.0.load(SeqCst), 2);
        Ok(())
    }
}
