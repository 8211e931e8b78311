//! What happens to every request before and after its operation: its number, the limit on requests, the checks of `authentication`, counts, and
//! the access log.

mod answers;
mod patient;
mod unknown_operations;

use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use answers::{attributes, code_of, explained, late, no_cors, overloaded, readable, with_error};
pub use patient::LIST_BYTES;
use patient::{Patient, Received};

use bytes::Bytes;
use futures::StreamExt as _;
use http_body_util::{BodyDataStream, StreamBody};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE, HOST, HeaderName, HeaderValue, RETRY_AFTER};
use hyper::{Method, Request, Response, StatusCode};
use s3s::service::S3Service;
use s3s::{HttpError, StdError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::access_keys::Keys;
use crate::authentication::chunks::{self, Signed};
use crate::authentication::query_headers::move_to_headers;
use crate::authentication::resign::mend_and_sign;
use crate::authentication::{self, Form, Refusal, Taken};
use crate::hosts::Domains;
use crate::limits::rate::{Pace, Slot};
use crate::memory::Memory;
use crate::metrics::{Counted, LatencyLabels, Metrics, OperationLabels};
use crate::ops::dispatch::RequestId;
use crate::watch::access_log::{AccessLog, Line};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-amz-request-id");

/// The version of batches, by which clients see that the server has them.
const BATCH: HeaderName = HeaderName::from_static("x-penstock-batch");
const CONTENT_SHA256: HeaderName = HeaderName::from_static("x-amz-content-sha256");

/// Limits of requests.
pub struct Limits {
    /// Requests that are answered at once.
    pub requests: usize,
    /// How long a client may send nothing of its body, and how long it waits for a response to a read.
    pub idle: Duration,
    pub memory: Memory,
}

/// Why a request is never answered: the status, the code of S3 and a message.
type Refused = (StatusCode, &'static str, String);

/// What all connections share.
pub struct Middleware {
    service: S3Service,
    metrics: Arc<Metrics>,
    log: Option<AccessLog>,
    limits: Limits,
    room: Arc<Semaphore>,
    gate: Gate,
    /// Distinguishes the numbers of requests of this process from those of others.
    process: u64,
    requests: AtomicU64,
}

/// What a request must have to be answered.
pub struct Gate {
    pub domains: Arc<Domains>,
    pub taken: Taken,
    /// None if everybody may do everything.
    pub keys: Option<Keys>,
}

impl Middleware {
    pub fn new(
        service: S3Service,
        metrics: Arc<Metrics>,
        log: Option<AccessLog>,
        limits: Limits,
        gate: Gate,
    ) -> Middleware {
        let mut process = [0; 8];
        // Without random bytes, numbers of two processes may be equal.
        let _ = getrandom::fill(&mut process);
        let room = Arc::new(Semaphore::new(limits.requests));
        Middleware {
            service,
            metrics,
            log,
            limits,
            room,
            gate,
            process: u64::from_le_bytes(process),
            requests: AtomicU64::new(0),
        }
    }

    /// Open the access log again.
    pub fn reopen_log(&self) {
        self.log.iter().for_each(AccessLog::reopen);
    }

    /// Answer a request.
    pub async fn answer(
        self: Arc<Middleware>,
        peer: SocketAddr,
        mut request: Request<Incoming>,
    ) -> Result<Response<Answer>, HttpError> {
        let began = Instant::now();
        let id = RequestId(format!("{:016X}", self.process ^ self.requests.fetch_add(1, Relaxed)).into());
        let operation = self.operation(&request);
        let received = Received::of(&request);
        let mut line = self.log.as_ref().map(|_| Line::of(&request, peer, &id.0, operation));
        let room = self.room.clone().try_acquire_owned();
        let slot = self.gate.keys.as_ref().filter(|keys| keys.have_rates()).map(|_| Slot::new(&self.metrics));
        if let Some(bytes) = request.body().size_hint().exact() {
            self.metrics.received_bytes.inc_by(bytes);
        }
        let (mut response, room) = match room {
            Err(_) => {
                self.metrics.refused.inc();
                patient::refuse(request);
                (overloaded(), None)
            }
            Ok(_) if request.method() == Method::OPTIONS => (no_cors(&request), None),
            Ok(room) => {
                request.extensions_mut().insert(id.clone());
                slot.iter().for_each(|slot| drop(request.extensions_mut().insert(slot.clone())));
                let running = Counted::begin(&self.metrics.running);
                let response = match self.form_of(&mut request) {
                    Err((status, code, text)) => {
                        patient::refuse(request);
                        with_error(status, code, &text)
                    }
                    Ok(form) => self.called(request, &form, &received).await?,
                };
                (response, Some((room, running)))
            }
        };
        self.metrics.latency.get_or_create(&LatencyLabels { operation }).observe(began.elapsed().as_secs_f64());
        let status = response.status().as_u16();
        if received.may_never_come() {
            response.headers_mut().insert(hyper::header::CONNECTION, HeaderValue::from_static("close"));
        }
        if status == 503 {
            response.headers_mut().entry(RETRY_AFTER).or_insert(HeaderValue::from_static("1"));
        }
        self.metrics.requests.get_or_create(&OperationLabels { operation, status }).inc();
        response.headers_mut().insert(BATCH, HeaderValue::from_static("1"));
        if let Ok(value) = HeaderValue::from_str(&id.0) {
            response.headers_mut().insert(REQUEST_ID, value);
        }
        if let Some(line) = &mut line {
            line.status = status;
            line.error = code_of(&response);
            line.first_ms = began.elapsed().as_secs_f64() * 1e3;
        }
        let pace = slot.as_ref().and_then(Slot::of_response);
        Ok(response.map(|body| Answer {
            body,
            middleware: self,
            pace,
            line,
            began,
            sent_bytes: 0,
            is_whole: false,
            _held: room,
        }))
    }
}

impl Middleware {
    /// Call the operation. A read that takes too long is answered with 503, and memory for the list of a POST is counted.
    async fn called(
        &self,
        mut request: Request<Incoming>,
        form: &Form,
        received: &Received,
    ) -> Result<s3s::HttpResponse, HttpError> {
        let (is_read, is_head) =
            (matches!(*request.method(), Method::GET | Method::HEAD), *request.method() == Method::HEAD);
        let taken = if *request.method() == Method::POST {
            let bytes = request.body().size_hint().exact().unwrap_or(LIST_BYTES).min(LIST_BYTES);
            match self.limits.memory.take(bytes).await {
                Ok(taken) => Some(taken),
                Err(_) => {
                    patient::refuse(request);
                    return Ok(overloaded());
                }
            }
        } else {
            None
        };
        if self.gate.taken == Taken::Unverified {
            request.headers_mut().remove(hyper::header::AUTHORIZATION);
            if let Some(uri) = authentication::without_signature(request.uri()) {
                *request.uri_mut() = uri;
            }
        }
        let again = mend_and_sign(&mut request, form, |key| self.gate.keys.as_ref()?.secret_of(key));
        let signed = Signed::of(&request, again);
        let idle = self.limits.idle;
        let pace = request.extensions().get::<Slot>().cloned().map(Pace::new);
        let own = received.clone();
        let body = |body: Incoming| match (signed, body.is_end_stream()) {
            (None, true) => s3s::Body::empty(),
            (None, false) => s3s::Body::http_body_unsync(Patient::new(body, idle, own, pace)),
            (Some(signed), _) => {
                let parts = BodyDataStream::new(Patient::new(body, idle, own, pace));
                let parts = chunks::checked(parts, signed, self.limits.memory.clone());
                s3s::Body::http_body_unsync(StreamBody::new(parts.map(|part| part.map(Frame::data))))
            }
        };
        let asks_attributes =
            is_read && authentication::parameters(request.uri()).any(|(name, _)| name == "attributes");
        let has_body = !request.body().is_end_stream();
        // It is large, and must not be moved.
        let call = pin!(self.service.call(request.map(body)));
        let response = match is_read {
            false => call.await,
            true => tokio::time::timeout(idle, call).await.unwrap_or_else(|_| Ok(late())),
        };
        drop(taken);
        response.map(|mut response| {
            // The library of the protocol knows no ranges of HEAD.
            if is_head
                && response.status() == StatusCode::OK
                && response.headers().contains_key(hyper::header::CONTENT_RANGE)
            {
                *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            }
            let response = if asks_attributes { attributes(response) } else { response };
            readable(explained(response, has_body, received))
        })
    }

    /// Return how a request is signed, or why this server never answers it. Headers in its address become headers before anything else reads them.
    fn form_of(&self, request: &mut Request<Incoming>) -> Result<Form, Refused> {
        let refused = |(code, text): Refusal| {
            let is_denied = matches!(code, "AccessDenied" | "RequestTimeTooSkewed");
            (if is_denied { StatusCode::FORBIDDEN } else { StatusCode::BAD_REQUEST }, code, text)
        };
        let form = match self.gate.taken {
            Taken::Unverified => Form::Unsigned,
            taken => {
                let form = authentication::form_of(request).map_err(refused)?;
                authentication::check(&form, request, taken, time::OffsetDateTime::now_utc()).map_err(refused)?;
                form
            }
        };
        move_to_headers(request).map_err(refused)?;
        self.check(request, &form).map(|()| form)
    }

    /// Fail if this server never answers a request.
    fn check(&self, request: &Request<Incoming>, form: &Form) -> Result<(), Refused> {
        let header = |name| text(request, name);
        if header(CONTENT_TYPE).trim_start().to_ascii_lowercase().starts_with("multipart/form-data") {
            return Err((
                StatusCode::NOT_IMPLEMENTED,
                "NotImplemented",
                "This server does not accept form uploads. Use PUT.".into(),
            ));
        }
        if request.uri().path_and_query().is_some_and(|text| text.as_str().contains("%00")) {
            return Err((
                StatusCode::BAD_REQUEST,
                "InvalidArgument",
                "Names cannot contain the character U+0000, which listings cannot represent.".into(),
            ));
        }
        if let Some(name) =
            unknown_operations::unknown(request.method(), request.uri(), !self.key_of(request).is_empty())
        {
            let text = format!("This server does not support the operation `{name}`.");
            return Err((StatusCode::NOT_IMPLEMENTED, "NotImplemented", text));
        }
        let is_in_chunks =
            header(CONTENT_SHA256).starts_with("STREAMING-") || header(CONTENT_ENCODING).contains("aws-chunked");
        if self.gate.taken != Taken::Unverified {
            let is_list = || {
                crate::batch::is_batch(request.uri())
                    || authentication::parameters(request.uri()).any(|(name, _)| name == "delete")
            };
            let is_version_2 = matches!(form, Form::Version2 { .. });
            if is_version_2 && is_in_chunks {
                let text = "A chunked body requires a version 4 signature.";
                return Err((StatusCode::BAD_REQUEST, "InvalidRequest", text.into()));
            }
            if is_version_2 && *request.method() == Method::POST && is_list() {
                // Somebody who sees such a request could send it again with another list.
                let text = "A version 2 signature does not cover the body. Lists require version 4.";
                return Err((StatusCode::FORBIDDEN, "AccessDenied", text.into()));
            }
            return Ok(());
        }
        if !self.gate.domains.is_own(host(request)) || request.headers().contains_key(hyper::header::ORIGIN) {
            // A page in a browser may send requests to this machine.
            let text = "Without keys, this server answers only requests from this machine that use its address.";
            return Err((StatusCode::FORBIDDEN, "AccessDenied", text.into()));
        }
        if is_in_chunks {
            let text = "This server was started with --anonymous and cannot verify signed bodies. Do not sign, or start it with --keys.";
            return Err((StatusCode::BAD_REQUEST, "InvalidRequest", text.into()));
        }
        Ok(())
    }

    /// Return the key that a request names, as it was sent, or an empty text.
    fn key_of<'r>(&self, request: &'r Request<Incoming>) -> &'r str {
        let path = request.uri().path().trim_start_matches('/');
        if self.gate.domains.bucket_of(host(request)).is_some() {
            path
        } else {
            path.split_once('/').map_or("", |(_, key)| key)
        }
    }

    /// Return the name under which a request is counted.
    fn operation(&self, request: &Request<Incoming>) -> &'static str {
        match (request.method().as_str(), !self.key_of(request).is_empty()) {
            ("GET", true) => "get",
            ("GET", false) => "list",
            ("HEAD", _) => "head",
            ("PUT", _) => "put",
            ("POST", _) if crate::batch::is_batch(request.uri()) => "batch",
            ("POST", true) => "multipart",
            ("POST", false) => "post",
            ("DELETE", _) => "delete",
            _ => "other",
        }
    }
}

/// Return a header, or an empty text.
fn text(request: &Request<Incoming>, name: HeaderName) -> &str {
    request.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Return the host that a request names.
fn host(request: &Request<Incoming>) -> &str {
    request.uri().host().unwrap_or_else(|| text(request, HOST))
}

/// The body of a response. When it ends, its bytes are counted and logged.
pub struct Answer {
    body: s3s::Body,
    middleware: Arc<Middleware>,
    pace: Option<Pace>,
    line: Option<Line>,
    began: Instant,
    sent_bytes: u64,
    is_whole: bool,
    /// The request counts until its response is sent.
    _held: Option<(OwnedSemaphorePermit, Counted)>,
}

impl Body for Answer {
    type Data = Bytes;
    type Error = StdError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, StdError>>> {
        if let Some(pace) = &mut self.pace {
            std::task::ready!(pace.poll_turn(context));
        }
        let next = Pin::new(&mut self.body).poll_frame(context);
        match &next {
            Poll::Ready(Some(Ok(frame))) => {
                let bytes = frame.data_ref().map_or(0, Bytes::len) as u64;
                self.pace.iter_mut().for_each(|pace| pace.took(bytes as usize));
                self.sent_bytes += bytes;
                self.middleware.metrics.sent_bytes.inc_by(bytes);
                self.is_whole = self.body.is_end_stream();
            }
            Poll::Ready(None) => self.is_whole = true,
            _ => {}
        }
        next
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if let (Some(mut line), Some(log)) = (self.line.take(), &self.middleware.log) {
            line.sent_bytes = self.sent_bytes;
            line.total_ms = self.began.elapsed().as_secs_f64() * 1e3;
            line.is_whole = self.is_whole || self.body.is_end_stream() || line.method == "HEAD";
            log.write(&line);
        }
    }
}
