//! Many ranges of many objects in one request: `POST /bucket/any/key?batch`, with a list of ranges in JSON.
//!
//! The response has an answer for each range, in order: a status (4 bytes, 200 or that of an error), the length of the object (8 bytes), that of
//! the answer (8 bytes, all little-endian), and the answer: the range, or a message. A range that ends behind its object is answered with 416.
//! With an error, the length of the object is 0 if it is not known.

use std::sync::Arc;

use bytes::{BufMut as _, Bytes, BytesMut};
use futures::{Stream, StreamExt as _};
use hyper::header::{CONTENT_TYPE, HOST, HeaderValue};
use hyper::http::Extensions;
use hyper::{HeaderMap, Method, Uri};
use s3s::dto::{GetObjectInput, Range as HttpRange};
use s3s::route::S3Route;
use s3s::{Body, S3Error, S3Request, S3Response, S3Result, StdError, s3_error};
use serde::Deserialize;

use crate::access_keys::{Keys, Rights};
use crate::cold::request as new_request;
use crate::hosts::{Domains, is_bucket_name};
use crate::ops;
use crate::ops::tier::Tier;

/// The longest list, in bytes of JSON.
const LIST_BYTES: usize = 8 << 20;
/// Ranges that are read ahead of the one that is sent.
const RANGES_AHEAD: usize = 16;
/// Answers are sent together up to this length.
const FRAME_BYTES: usize = 128 << 10;
const HEAD_BYTES: usize = 20;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct List {
    ranges: Vec<Wanted>,
}

/// A range of an object.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    key: String,
    begin: u64,
    end: u64,
}

/// Return whether an address is that of a batch.
pub fn is_batch(uri: &Uri) -> bool {
    uri.query().is_some_and(|query| query.split('&').any(|part| part == "batch" || part == "batch="))
}

/// The route of batches.
pub struct Batch {
    pub tier: Arc<Tier>,
    /// None if everything is allowed to everybody.
    pub keys: Option<Keys>,
    pub domains: Arc<Domains>,
}

#[async_trait::async_trait]
impl S3Route for Batch {
    fn is_match(&self, method: &Method, uri: &Uri, _headers: &HeaderMap, _extensions: &mut Extensions) -> bool {
        *method == Method::POST && is_batch(uri)
    }

    async fn check_access(&self, request: &mut S3Request<Body>) -> S3Result<()> {
        let rights = match &self.keys {
            None => Arc::new(Rights::ALL),
            Some(keys) => keys.admit(
                request.credentials.as_ref().map(|credentials| credentials.access_key.as_str()),
                &request.extensions,
            )?,
        };
        request.extensions.insert(rights);
        Ok(())
    }

    async fn call(&self, mut request: S3Request<Body>) -> S3Result<S3Response<Body>> {
        let rights = crate::access_keys::rights(&request.extensions);
        let host = request.headers.get(HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
        let in_path = || request.uri.path().trim_start_matches('/').split('/').next().unwrap_or_default().to_owned();
        let bucket = self.domains.bucket_of(host).unwrap_or_else(in_path);
        if !is_bucket_name(&bucket) {
            return Err(s3_error!(InvalidBucketName, "`{bucket}` is not the name of a bucket"));
        }
        let list = request.input.store_all_limited(LIST_BYTES).await;
        let list = list.map_err(|error| s3_error!(InvalidRequest, "the list could not be read: {error}"))?;
        let list: List = serde_json::from_slice(&list)
            .map_err(|error| s3_error!(InvalidRequest, "the list is not valid: {error}"))?;
        // Nothing is sent before it is known that all of it may be.
        for wanted in &list.ranges {
            rights.check(&bucket, &wanted.key)?;
            if wanted.begin >= wanted.end {
                return Err(s3_error!(
                    InvalidRequest,
                    "the range of `{}` ends at {}, before it begins",
                    wanted.key,
                    wanted.end
                ));
            }
        }
        let tier = self.tier.clone();
        let answers = futures::stream::iter(list.ranges)
            .map(move |wanted| {
                let (tier, bucket) = (tier.clone(), bucket.clone());
                async move { open(&tier, bucket, wanted).await }
            })
            .buffered(RANGES_AHEAD);
        let mut response = S3Response::new(Body::http_body_unsync(http_body_util::StreamBody::new(
            frames(answers).map(|frame| frame.map(hyper::body::Frame::data)),
        )));
        response.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-penstock-batch"));
        Ok(response)
    }
}

/// An answer: its status, its length and its bytes.
struct Opened {
    status: u16,
    object_bytes: u64,
    bytes: u64,
    body: s3s::dto::StreamingBlob,
}

async fn open(tier: &Tier, bucket: String, wanted: Wanted) -> Opened {
    let input = GetObjectInput {
        bucket,
        key: wanted.key,
        range: Some(HttpRange::Int { first: wanted.begin, last: Some(wanted.end - 1) }),
        ..GetObjectInput::default()
    };
    let bytes = wanted.end - wanted.begin;
    let (error, object_bytes) = match ops::get::get(tier, new_request(input)).await {
        Ok(response) => {
            let total =
                response.output.content_range.as_deref().and_then(|range| range.rsplit_once('/')?.1.parse().ok());
            match (response.output.content_length, response.output.body) {
                (Some(length), Some(body)) if u64::try_from(length).ok() == Some(bytes) => {
                    return Opened { status: 200, object_bytes: total.unwrap_or(bytes), bytes, body };
                }
                _ => (s3_error!(InvalidRange, "the object ends before the range"), total.unwrap_or_default()),
            }
        }
        Err(error) => (error, 0),
    };
    let status = error.status_code().or_else(|| error.code().status_code()).map_or(500, |status| status.as_u16());
    let text = Bytes::from(format!("{}: {}", error.code().as_str(), error.message().unwrap_or_default()));
    Opened { status, object_bytes, bytes: text.len() as u64, body: Body::from(text).into() }
}

/// Put answers after each other. Short ones are copied together, and long ones are sent as they are.
fn frames(
    answers: impl Stream<Item = Opened> + Send + 'static,
) -> impl Stream<Item = Result<Bytes, StdError>> + Send + 'static {
    struct State<S> {
        answers: std::pin::Pin<Box<S>>,
        body: Option<(s3s::dto::StreamingBlob, u64)>,
        together: BytesMut,
        ready: Option<Bytes>,
    }
    let state = State { answers: Box::pin(answers), body: None, together: BytesMut::new(), ready: None };
    futures::stream::unfold(Some(state), |state| async move {
        let mut state = state?;
        loop {
            if let Some(ready) = state.ready.take() {
                return Some((Ok(ready), Some(state)));
            }
            let Some((body, left)) = &mut state.body else {
                match state.answers.next().await {
                    None if state.together.is_empty() => return None,
                    None => return Some((Ok(state.together.split().freeze()), Some(state))),
                    Some(opened) => {
                        state.together.reserve(HEAD_BYTES);
                        state.together.put_u32_le(opened.status.into());
                        state.together.put_u64_le(opened.object_bytes);
                        state.together.put_u64_le(opened.bytes);
                        state.body = Some((opened.body, opened.bytes));
                        continue;
                    }
                }
            };
            let part = match body.next().await {
                Some(Ok(part)) if part.len() as u64 <= *left => part,
                None if *left == 0 => {
                    state.body = None;
                    continue;
                }
                Some(Err(error)) => return Some((Err(error), None)),
                // The head of the answer is already on its way.
                _ => return Some((Err(Box::new(S3Error::new(s3s::S3ErrorCode::InternalError))), None)),
            };
            *left -= part.len() as u64;
            if part.len() > FRAME_BYTES / 2 {
                state.ready = Some(part);
                if !state.together.is_empty() {
                    return Some((Ok(state.together.split().freeze()), Some(state)));
                }
                continue;
            }
            state.together.extend_from_slice(&part);
            if state.together.len() >= FRAME_BYTES {
                return Some((Ok(state.together.split().freeze()), Some(state)));
            }
        }
    })
}
