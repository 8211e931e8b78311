//! Which version of an object is current: what is known of it, and when the cold store is asked.

use std::sync::Arc;
use std::time::Duration;

use hyper::header::{AGE, HeaderValue, WARNING};
use s3s::dto::{ChecksumMode, HeadObjectInput, Range as HttpRange};
use s3s::{S3Error, S3ErrorCode, S3Response, S3Result, s3_error};

use super::cached_objects::{CachedObjects, NOTES, Resolved, no_version};
use super::flights::copy;
use super::states::Revalidate;
use crate::cold::{check_is_object, is_failure, request};
use crate::meta::{Meta, Object, Version};
use crate::metrics::Counted;

/// An object that never changes may be deleted. The cold store is asked again after this time.
const DELETED_AFTER: Duration = Duration::from_secs(3600);
/// A cold store that takes longer than this counts as failed, if what is known may be served.
const PATIENCE: Duration = Duration::from_secs(5);

/// A state, and how old it is if the cold store could not be asked.
pub type Current = (Arc<Meta>, Option<Duration>);

impl CachedObjects {
    fn is_fresh(&self, meta: &Meta, is_immutable: bool) -> bool {
        let is_younger = |most: Duration| meta.age().is_some_and(|age| age < most);
        let is_fresh = match self.revalidate {
            Revalidate::Never => true,
            Revalidate::After(time) => is_younger(time),
            Revalidate::Always => false,
        };
        meta.is_believed && (is_fresh || is_immutable && is_younger(DELETED_AFTER))
    }

    /// Return what is known of an object, and whether it needs no question.
    async fn known(self: &Arc<Self>, object: &Object) -> (Option<Arc<Meta>>, bool, bool) {
        let known = match self.states.get(object) {
            Some(known) => Some(known),
            None => self.on_drive(object).await,
        };
        let Some(known) = known else { return (None, false, false) };
        if matches!(self.revalidate, Revalidate::Never) && known.is_believed {
            return (Some(known), true, false);
        }
        // What was proven once stays true, also if the cold store fails after a restart.
        let proof = async || tokio::time::timeout(PATIENCE, self.immutable.is_proven(object)).await.unwrap_or(false);
        let is_named = self.immutable.is_named(object);
        let is_proven = !is_named && (known.is_proven() || proof().await);
        if is_proven && known.prove() && known.is_noted() {
            self.note_again(object, &known);
        }
        let is_immutable = is_named || is_proven;
        let is_fresh = self.is_fresh(&known, is_immutable);
        (Some(known), is_fresh, is_immutable)
    }

    /// Return the state of an object that a drive has, and keep it in memory.
    async fn on_drive(self: &Arc<Self>, object: &Object) -> Option<Arc<Meta>> {
        let generation = self.states.generation(object);
        let known = || self.states.get(object).map(Some);
        let flight = self.on_drive.join(&(object.clone(), generation), known, || {
            let (cached_objects, object) = (self.clone(), object.clone());
            async move {
                // A drive that hangs must not hold up the runtime.
                let looked = tokio::task::spawn_blocking(move || {
                    let meta = Arc::new(cached_objects.states.find(&object)?);
                    cached_objects.states.keep_noted(&object, generation, &meta);
                    Some(meta)
                });
                looked.await.map_err(S3Error::internal_error)
            }
        });
        let meta = flight.await.ok()??;
        // A write that began in the meantime has removed it.
        (self.states.generation(object) == generation).then(|| self.states.get(object).unwrap_or(meta))
    }

    /// Return the current version of an object. Cost: nothing if it is known and fresh, otherwise one cold request, which also returns the first
    /// bytes of `wanted` if the version was not known.
    pub async fn resolve(self: &Arc<Self>, object: &Object, wanted: Option<HttpRange>) -> S3Result<Resolved> {
        let meta = match self.known(object).await {
            (Some(meta), true, _) => (meta, None),
            (Some(meta), false, is_immutable) => self.asked(object, Some((meta, is_immutable))).await?,
            (None, ..) => {
                let (meta, early) = self.discovered(object, wanted).await?;
                return Ok(Resolved { meta, early, age: None });
            }
        };
        Ok(Resolved { meta: meta.0, early: None, age: meta.1 })
    }

    /// Return the current state of an object. Cost: nothing if it is known and fresh, otherwise one cold request.
    pub async fn state(self: &Arc<Self>, object: &Object) -> S3Result<Current> {
        match self.known(object).await {
            (Some(meta), true, _) => Ok((meta, None)),
            (known, _, is_immutable) => self.asked(object, known.map(|meta| (meta, is_immutable))).await,
        }
    }

    /// Ask the cold store for the state of an object. If it does not answer, what is known is returned with its age, unless it is too old for that.
    async fn asked(self: &Arc<Self>, object: &Object, known: Option<(Arc<Meta>, bool)>) -> S3Result<Current> {
        let generation = self.states.generation(object);
        let spare = known.as_ref().and_then(|(meta, is_immutable)| {
            let age = meta.age().unwrap_or_default();
            // A note that is not believed may be older than a write that was acknowledged.
            (*is_immutable || meta.is_believed && age < self.stale_if_error).then(|| (meta.clone(), Some(age)))
        });
        let asked = match &spare {
            Some(spare) if !self.outage.may_ask(object) => {
                self.metrics.stale_answers.inc();
                return Ok(spare.clone());
            }
            Some(_) => tokio::time::timeout(PATIENCE, self.head(object)).await.unwrap_or_else(|_| Err(slow())),
            None => self.head(object).await,
        };
        if !asked.as_ref().is_err_and(is_failure) {
            self.outage.answered(object);
        }
        let meta = match (asked, spare) {
            (Ok(meta), _) => meta,
            (Err(error), Some(spare)) if is_failure(&error) => {
                self.outage.failed(object);
                self.metrics.stale_answers.inc();
                return Ok(spare);
            }
            (Err(error), _) => {
                if *error.code() == S3ErrorCode::NoSuchKey && known.is_some() {
                    self.forget(object).await;
                }
                return Err(error);
            }
        };
        if let Some((known, _)) = known {
            match Version::new(object, &known) == Version::new(object, &meta) {
                true => meta.is_noted_as(&known),
                false => self.forget_pages(object, Some(known)).await,
            }
        }
        self.keep(object, generation, &meta);
        Ok((meta, None))
    }

    /// Return the state of an object with its checksums, if it is still this version. Cost: one cold request if they are not known.
    pub async fn with_sums(self: &Arc<Self>, object: &Object, meta: Arc<Meta>) -> S3Result<Arc<Meta>> {
        if meta.knows_sums {
            return Ok(meta);
        }
        let generation = self.states.generation(object);
        let is_same = |known: &Meta| known.etag == meta.etag && known.bytes == meta.bytes;
        // Another request may have asked in the meantime.
        let known = || self.states.get(object).filter(|known| known.knows_sums && is_same(known));
        let flight = self.heads.join(&(object.clone(), generation), known, || {
            let (cached_objects, object, meta) = (self.clone(), object.clone(), meta.clone());
            async move {
                let full = cached_objects.head(&object).await?;
                if full.etag == meta.etag && full.bytes == meta.bytes {
                    full.is_noted_as(&meta);
                    cached_objects.states.keep(&object, generation, &full);
                    cached_objects.note_again(&object, &full);
                }
                Ok(full)
            }
        });
        let full = flight.await.map_err(|error| copy(&error))?;
        Ok(if is_same(&full) { full } else { meta })
    }

    /// Keep the state of an object in memory, and soon beside its pages, if there are some: their fetch may have had no state that could be kept.
    pub(super) fn keep(self: &Arc<Self>, object: &Object, generation: u64, meta: &Arc<Meta>) {
        self.states.keep(object, generation, meta);
        if meta.needs_note() {
            self.note_again(object, meta);
        }
    }

    /// Write a state beside its pages again. Nobody waits for it. While many others wait for a drive, it is left for another time.
    fn note_again(self: &Arc<Self>, object: &Object, meta: &Meta) {
        let (cached_objects, version) = (self.clone(), Version::new(object, meta));
        let Ok(turn) = NOTES.try_acquire() else { return };
        if !self.states.will_note(&version) {
            return;
        }
        drop(tokio::task::spawn_blocking(move || {
            let _turn = turn;
            cached_objects.states.note(&version);
        }));
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
            Err(error)
                if error.status_code().is_some_and(|status| status == 404)
                    && *error.code() != S3ErrorCode::NoSuchBucket =>
            {
                return Err(s3_error!(NoSuchKey, "the object does not exist"));
            }
            other => other?.output,
        };
        check_is_object(output.e_tag.as_ref(), output.content_type.as_ref())?;
        Meta::of_head(output).map(Arc::new).ok_or_else(no_version)
    }
}

/// Say in the headers of a response how old the state is, if the cold store could not be asked. Source: RFC 9111, sections 5.1 and 5.5.
pub fn with_age<T>(mut response: S3Response<T>, age: Option<Duration>) -> S3Response<T> {
    if let Some(age) = age {
        response.headers.insert(AGE, age.as_secs().into());
        response.headers.insert(WARNING, HeaderValue::from_static("111 penstock \"Revalidation Failed\""));
    }
    response
}

fn slow() -> S3Error {
    s3_error!(ServiceUnavailable, "the cold store does not respond")
}
