//! A cold store as the cache sees it: byte ranges of versions of objects, which never change.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::{Bytes, BytesMut};
use futures::StreamExt as _;
use penstock_error::{Error, Result};
use penstock_storage::{Access, Counters, Features, RangeRequest, Read, RequestCost, Then};
use s3s::dto::{ETagCondition, GetObjectInput, Range as HttpRange};
use s3s::{S3, S3Error, S3ErrorCode, s3_error};
use tokio::runtime::Handle;

use super::request;
use crate::meta::{Object, Version};

/// Ranges of one read that are requested together.
const REQUESTS_AT_ONCE: usize = 8;
/// A body that ends early is continued this many times.
const CONTINUATIONS: usize = 3;

/// Bytes that arrived before their version was known, by the name of the version: where they begin, and the bytes.
pub type Early = Arc<Mutex<HashMap<String, (u64, Bytes)>>>;

/// A cold store below a cache. Threads that read from it wait, so they must not be those of the runtime.
pub struct Source {
    cold: Arc<dyn S3>,
    identity: String,
    runtime: Handle,
    early: Early,
    counters: Counters,
}

impl std::fmt::Debug for Source {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Source").field("identity", &self.identity).finish_non_exhaustive()
    }
}

impl Source {
    pub fn new(cold: Arc<dyn S3>, identity: String, runtime: Handle, early: Early) -> Source {
        Source { cold, identity, runtime, early, counters: Counters::default() }
    }

    async fn range(&self, request: &RangeRequest) -> Result<Bytes> {
        let (name, range) = (&request.name, request.begin..request.end());
        if let Some((begin, bytes)) = self.early.lock().unwrap_or_else(PoisonError::into_inner).get(name)
            && *begin <= range.start
            && range.end <= begin + bytes.len() as u64
        {
            return Ok(bytes.slice((range.start - begin) as usize..(range.end - begin) as usize));
        }
        let version =
            Version::parse(name).ok_or_else(|| Error::new("internal", format!("`{name}` does not name a version")))?;
        let bytes = request.object_bytes.unwrap_or_default();
        read(&*self.cold, &version, bytes, range).await.map_err(|error| failure(&version.object, &error))
    }

    fn refused<T>(&self) -> Result<T> {
        Err(Error::new("internal", format!("`{}` is read only through a cache", self.identity)))
    }
}

/// Read a range of a version. A body that ends early is continued.
pub async fn read(cold: &dyn S3, version: &Version, object_bytes: u64, range: Range<u64>) -> s3s::S3Result<Bytes> {
    let mut body = BytesMut::with_capacity((range.end - range.start) as usize);
    let mut last = None;
    for _ in 0..=CONTINUATIONS {
        let begin = range.start + body.len() as u64;
        let input = GetObjectInput {
            bucket: version.object.bucket.clone(),
            key: version.object.key.clone(),
            if_match: Some(ETagCondition::ETag(version.etag())),
            range: Some(HttpRange::Int { first: begin, last: Some(range.end - 1) }),
            ..GetObjectInput::default()
        };
        let output = cold.get_object(request(input)).await?.output;
        // A store that ignores the range or the condition would otherwise give bytes of another place or version.
        let expected = format!("bytes {begin}-{}/{}", range.end - 1, object_bytes);
        let is_whole = output.content_range.is_none() && begin == 0 && range.end == object_bytes;
        if output.e_tag.as_ref() != Some(&version.etag())
            || !(is_whole || output.content_range.as_deref() == Some(expected.as_str()))
        {
            return Err(s3_error!(PreconditionFailed, "the cold store returned another version or range"));
        }
        match receive(output.body, &mut body, (range.end - range.start) as usize).await {
            Ok(()) => return Ok(body.freeze()),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| s3_error!(ServiceUnavailable, "the cold store sent too few bytes")))
}

/// Append a body to `out`, up to a length. Fails if it is shorter or longer.
pub async fn receive(body: Option<s3s::dto::StreamingBlob>, out: &mut BytesMut, bytes: usize) -> s3s::S3Result<()> {
    let mut body = body.ok_or_else(|| s3_error!(ServiceUnavailable, "the cold store sent no body"))?;
    while let Some(part) = body.next().await {
        let part = part.map_err(|error| S3Error::with_source(S3ErrorCode::ServiceUnavailable, error))?;
        if out.len() + part.len() > bytes {
            return Err(s3_error!(ServiceUnavailable, "the cold store sent too many bytes"));
        }
        out.extend_from_slice(&part);
    }
    if out.len() < bytes { Err(s3_error!(ServiceUnavailable, "the cold store sent too few bytes")) } else { Ok(()) }
}

/// Turn an error of a cold store into one that passes through the cache. `code_of` finds the code again.
fn failure(object: &Object, error: &S3Error) -> Error {
    let code = match error.code() {
        S3ErrorCode::NoSuchKey | S3ErrorCode::NoSuchBucket => "object-not-found",
        S3ErrorCode::PreconditionFailed => "conflict",
        S3ErrorCode::AccessDenied | S3ErrorCode::InvalidAccessKeyId | S3ErrorCode::SignatureDoesNotMatch => {
            "permission-denied"
        }
        _ => "storage-failed",
    };
    Error::new(code, format!("cannot read `{}/{}`: {error}", object.bucket, object.key))
}

/// Turn an error that passed through the cache into one of S3.
pub fn answer(error: &Error) -> S3Error {
    let code = match error.code() {
        "object-not-found" => S3ErrorCode::NoSuchKey,
        "conflict" => S3ErrorCode::PreconditionFailed,
        "permission-denied" => S3ErrorCode::AccessDenied,
        _ => S3ErrorCode::ServiceUnavailable,
    };
    S3Error::with_message(code, error.message().to_owned())
}

impl Read for Source {
    fn uri(&self) -> &str {
        &self.identity
    }

    fn features(&self) -> Features {
        let request_cost = RequestCost { gap_bytes: 256 << 10, waste: 1 };
        Features { access: Some(Access::Ranged), request_cost, ..Features::default() }
    }

    fn counters(&self) -> &Counters {
        &self.counters
    }

    fn read(&self, _name: &str) -> Result<Bytes> {
        self.refused()
    }

    fn fetch_then(&self, ranges: Vec<RangeRequest>, then: Then) -> Vec<Result<Vec<Bytes>>> {
        let each = ranges.iter().map(|range| async move { self.range(range).await });
        let bodies: Vec<Result<Bytes>> =
            self.runtime.block_on(futures::stream::iter(each).buffered(REQUESTS_AT_ONCE).collect());
        let cut = |(index, (range, body)): (usize, (RangeRequest, Result<Bytes>))| {
            let (body, mut at) = (body?, 0);
            let pieces = range.pieces.iter().enumerate().map(|(number, piece)| {
                at += piece.skip as usize;
                let bytes = body.slice(at..at + piece.bytes);
                at += piece.bytes;
                then(index, number, &bytes);
                bytes
            });
            Ok(pieces.collect())
        };
        ranges.into_iter().zip(bodies).enumerate().map(cut).collect()
    }

    fn map(&self, _name: &str, _bytes: u64) -> Result<Bytes> {
        self.refused()
    }
}
