//! Which objects never change: those of datasets, and those that the operator names. A name alone proves nothing: any program may use hex digits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::StreamExt as _;
use quick_cache::sync::Cache;
use s3s::dto::{GetObjectInput, Range as HttpRange};
use s3s::{S3, S3Error, S3ErrorCode, S3Result};

use super::flights::Flights;
use crate::cold::request;
use crate::meta::Object;
use crate::metrics::Metrics;

/// How long it is known that a folder is a dataset, and that it is none.
const KNOWN: (Duration, Duration) = (Duration::from_secs(3600), Duration::from_secs(60));
/// Folders of which that is known.
const FOLDERS: usize = 10_000;

/// Finds the key of a dataset's first object, and how that one begins. The argument is the key of an object that never changes if it is in a dataset.
pub type MarkerOf = fn(&str) -> Option<(String, &'static [u8])>;

/// Decides whether objects never change.
pub struct Immutable {
    cold: Arc<dyn S3>,
    marker_of: MarkerOf,
    /// Beginnings of `bucket/key` of objects that never change.
    prefixes: Vec<String>,
    /// Whether markers exist, and when that was found.
    known: Arc<Cache<Object, (bool, Instant)>>,
    running: Flights<Object, bool>,
    metrics: Arc<Metrics>,
}

impl Immutable {
    pub fn new(cold: Arc<dyn S3>, marker_of: MarkerOf, prefixes: Vec<String>, metrics: Arc<Metrics>) -> Immutable {
        Immutable {
            cold,
            marker_of,
            prefixes,
            known: Arc::new(Cache::new(FOLDERS)),
            running: Flights::default(),
            metrics,
        }
    }

    /// Return whether the operator says that an object never changes.
    pub fn is_named(&self, object: &Object) -> bool {
        self.prefixes.iter().any(|prefix| object.begins_with(prefix))
    }

    /// Return whether an object is one of a dataset that never changes. Cost: nothing, or one cold request for each dataset and hour.
    pub async fn is_proven(&self, object: &Object) -> bool {
        let Some((key, magic)) = (self.marker_of)(&object.key) else { return false };
        let marker = Object::new(&object.bucket, &key);
        let is_recent = |(is, at): &(bool, Instant)| at.elapsed() < if *is { KNOWN.0 } else { KNOWN.1 };
        let recent = || self.known.get(&marker).filter(is_recent).map(|(is, _)| is);
        if let Some(is) = recent() {
            return is;
        }
        let looked = self.running.join(&marker, recent, || {
            let (cold, known, marker) = (self.cold.clone(), self.known.clone(), marker.clone());
            self.metrics.cold_requests.inc();
            async move {
                let is = begins_with(&*cold, &marker, magic).await?;
                known.insert(marker, (is, Instant::now()));
                Ok(is)
            }
        });
        // A cold store that does not answer disproves nothing.
        looked.await.unwrap_or_else(|_| self.known.get(&marker).is_some_and(|(is, _)| is))
    }
}

/// Return whether an object exists and begins with these bytes.
async fn begins_with(cold: &dyn S3, object: &Object, magic: &[u8]) -> S3Result<bool> {
    let input = GetObjectInput {
        bucket: object.bucket.clone(),
        key: object.key.clone(),
        range: Some(HttpRange::Int { first: 0, last: Some(magic.len() as u64 - 1) }),
        ..GetObjectInput::default()
    };
    let mut body = match cold.get_object(request(input)).await {
        Ok(response) => response.output.body,
        Err(error)
            if error
                .status_code()
                .or_else(|| error.code().status_code())
                .is_some_and(|status| status.is_client_error()) =>
        {
            return Ok(false);
        }
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    while let Some(part) = match &mut body {
        Some(body) => body.next().await,
        None => None,
    } {
        found.extend_from_slice(&part.map_err(|error| S3Error::with_source(S3ErrorCode::ServiceUnavailable, error))?);
        if found.len() >= magic.len() {
            break;
        }
    }
    Ok(found.starts_with(magic))
}
