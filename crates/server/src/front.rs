//! What happens to every request before and after its operation: its number, the limit on requests, counts, and the access log.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{HeaderName, HeaderValue, RETRY_AFTER};
use hyper::{Method, Request, Response, StatusCode};
use s3s::service::S3Service;
use s3s::{HttpError, StdError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::hosts::Domains;
use crate::memory::Memory;
use crate::metrics::{Counted, LatencyLabels, Metrics, OperationLabels};
use crate::requests;
use crate::tier::RequestId;
use crate::watch::access_log::{AccessLog, Line};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-amz-request-id");

/// The version of batches, by which clients see that the server has them.
const BATCH: HeaderName = HeaderName::from_static("x-penstock-batch");

/// The longest list in the body of a request, such as the parts of an upload.
pub const LIST_BYTES: u64 = 8 << 20;

/// Limits of requests.
pub struct Limits {
    /// Requests that are answered at once.
    pub requests: usize,
    /// How long a client may send nothing of its body, and how long it waits for a response to a read.
    pub idle: Duration,
    pub memory: Memory,
}

/// What all connections share.
pub struct Front {
    service: S3Service,
    metrics: Arc<Metrics>,
    log: Option<AccessLog>,
    limits: Limits,
    room: Arc<Semaphore>,
    /// If everybody may use the server: the domains that it is known by.
    anonymous: Option<Arc<Domains>>,
    /// Distinguishes the numbers of requests of this process from those of others.
    process: u64,
    requests: AtomicU64,
}

impl Front {
    pub fn new(
        service: S3Service,
        metrics: Arc<Metrics>,
        log: Option<AccessLog>,
        limits: Limits,
        anonymous: Option<Arc<Domains>>,
    ) -> Front {
        let mut process = [0; 8];
        // Without random bytes, numbers of two processes may be equal.
        let _ = getrandom::fill(&mut process);
        let room = Arc::new(Semaphore::new(limits.requests));
        Front { service, metrics, log, limits, room, anonymous, process: u64::from_le_bytes(process), requests: AtomicU64::new(0) }
    }

    /// Open the access log again.
    pub fn reopen_log(&self) {
        self.log.iter().for_each(AccessLog::reopen);
    }

    /// Answer a request.
    pub async fn answer(self: Arc<Front>, peer: SocketAddr, mut request: Request<Incoming>) -> Result<Response<Answer>, HttpError> {
        let began = Instant::now();
        let id = RequestId(format!("{:016X}", self.process ^ self.requests.fetch_add(1, Relaxed)).into());
        let operation = operation(&request);
        let mut line = self.log.as_ref().map(|_| Line::of(&request, peer, &id.0));
        let room = self.room.clone().try_acquire_owned();
        if let Some(bytes) = request.body().size_hint().exact() {
            self.metrics.received_bytes.inc_by(bytes);
        }
        let (mut response, room) = match room {
            Err(_) => {
                self.metrics.refused.inc();
                (overloaded(), None)
            }
            Ok(_) if request.method() == Method::OPTIONS => (no_cors(&request), None),
            Ok(room) => {
                request.extensions_mut().insert(id.clone());
                let running = Counted::begin(&self.metrics.running);
                let response = match self.refusal(&request) {
                    Some(refusal) => refusal,
                    None => self.called(request).await?,
                };
                (response, Some((room, running)))
            }
        };
        self.metrics.latency.get_or_create(&LatencyLabels { operation }).observe(began.elapsed().as_secs_f64());
        let status = response.status().as_u16();
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
            line.first_ms = began.elapsed().as_secs_f64() * 1e3;
        }
        Ok(response.map(|body| Answer { body, front: self, line, began, sent_bytes: 0, is_whole: false, _held: room }))
    }
}

impl Front {
    /// Call the operation. A read that takes too long is answered with 503, and memory for the list of a POST is counted.
    async fn called(&self, mut request: Request<Incoming>) -> Result<s3s::HttpResponse, HttpError> {
        let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
        let taken = if *request.method() == Method::POST {
            let bytes = request.body().size_hint().exact().unwrap_or(LIST_BYTES).min(LIST_BYTES);
            match self.limits.memory.take(bytes).await {
                Ok(taken) => Some(taken),
                Err(_) => return Ok(overloaded()),
            }
        } else {
            None
        };
        if self.anonymous.is_some() {
            request.headers_mut().remove(hyper::header::AUTHORIZATION);
            if let Some(uri) = requests::without_signature(request.uri()) {
                *request.uri_mut() = uri;
            }
        }
        requests::drop_odd_range(&mut request);
        let idle = self.limits.idle;
        let body = |body: Incoming| match body.is_end_stream() {
            true => s3s::Body::empty(),
            false => s3s::Body::http_body_unsync(Patient::new(body, idle)),
        };
        let call = self.service.call(request.map(body));
        let response = match is_read {
            false => call.await,
            true => tokio::time::timeout(idle, call).await.unwrap_or_else(|_| Ok(late())),
        };
        drop(taken);
        response
    }

    /// Return the response to a request that this server never answers.
    fn refusal(&self, request: &Request<Incoming>) -> Option<s3s::HttpResponse> {
        let header = |name: &str| request.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
        if header("content-type").trim_start().to_ascii_lowercase().starts_with("multipart/form-data") {
            return Some(with_error(StatusCode::NOT_IMPLEMENTED, "NotImplemented", "This server takes no forms. Use PUT."));
        }
        if let Some(name) = requests::unsigned_header(request).filter(|_| self.anonymous.is_none()) {
            let text = format!("The signature does not cover the header {name}. Sign all headers that begin with x-amz-.");
            return Some(with_error(StatusCode::FORBIDDEN, "AccessDenied", &text));
        }
        let domains = self.anonymous.as_ref()?;
        let host = request.uri().host().unwrap_or_else(|| header("host"));
        if !domains.is_own(host) || request.headers().contains_key(hyper::header::ORIGIN) {
            // A page in a browser may send requests to this machine.
            let text = "Without keys, this server answers only requests of this machine, by its address.";
            return Some(with_error(StatusCode::FORBIDDEN, "AccessDenied", text));
        }
        let is_in_chunks = header("x-amz-content-sha256").starts_with("STREAMING-") || header("content-encoding").contains("aws-chunked");
        if is_in_chunks {
            let text = "This server was started with --anonymous and cannot verify signed bodies. Do not sign, or start it with --keys.";
            return Some(with_error(StatusCode::BAD_REQUEST, "InvalidRequest", text));
        }
        None
    }
}

/// A body whose sender may be silent only for a time.
struct Patient {
    body: Incoming,
    idle: Duration,
    until: Pin<Box<tokio::time::Sleep>>,
}

impl Patient {
    fn new(body: Incoming, idle: Duration) -> Patient {
        Patient { body, idle, until: Box::pin(tokio::time::sleep(idle)) }
    }
}

impl Body for Patient {
    type Data = Bytes;
    type Error = StdError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, StdError>>> {
        let next = Pin::new(&mut self.body).poll_frame(context);
        if next.is_ready() {
            let until = tokio::time::Instant::now() + self.idle;
            self.until.as_mut().reset(until);
            return next.map(|frame| frame.map(|frame| frame.map_err(StdError::from)));
        }
        match self.until.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Some(Err("the client sent nothing for too long".into()))),
            Poll::Pending => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The response to a read for which the cold store or a drive takes too long.
fn late() -> s3s::HttpResponse {
    with_error(StatusCode::SERVICE_UNAVAILABLE, "SlowDown", "The object could not be read in time. Try again later.")
}

/// Return the name under which a request is counted.
fn operation(request: &Request<Incoming>) -> &'static str {
    let is_object = request.uri().path().trim_start_matches('/').split_once('/').is_some_and(|(_, key)| !key.is_empty());
    match (request.method().as_str(), is_object) {
        ("GET", true) => "get",
        ("GET", false) => "list",
        ("HEAD", _) => "head",
        ("PUT", _) => "put",
        ("POST", true) => "multipart",
        ("POST", false) => "post",
        ("DELETE", _) => "delete",
        _ => "other",
    }
}

fn with_error(status: StatusCode, code: &str, message: &str) -> s3s::HttpResponse {
    let text = format!("<?xml version=\"1.0\" encoding=\"UTF-8\"?><Error><Code>{code}</Code><Message>{message}</Message></Error>");
    let mut response = Response::new(s3s::Body::http_body(http_body_util::BodyExt::map_err(Full::from(Bytes::from(text)), StdError::from)));
    *response.status_mut() = status;
    response.headers_mut().insert(hyper::header::CONTENT_TYPE, HeaderValue::from_static("application/xml"));
    response
}

fn overloaded() -> s3s::HttpResponse {
    let mut response = with_error(StatusCode::SERVICE_UNAVAILABLE, "SlowDown", "The server answers as many requests as it may.");
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    response
}

/// Browsers ask whether pages of others may use the server.
fn no_cors(request: &Request<Incoming>) -> s3s::HttpResponse {
    if request.headers().contains_key(hyper::header::ORIGIN) {
        with_error(StatusCode::FORBIDDEN, "AccessForbidden", "This server has no rules for other origins.")
    } else {
        with_error(StatusCode::BAD_REQUEST, "BadRequest", "The header Origin is missing.")
    }
}

/// The body of a response. When it ends, its bytes are counted and logged.
pub struct Answer {
    body: s3s::Body,
    front: Arc<Front>,
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
        let next = Pin::new(&mut self.body).poll_frame(context);
        match &next {
            Poll::Ready(Some(Ok(frame))) => {
                let bytes = frame.data_ref().map_or(0, Bytes::len) as u64;
                self.sent_bytes += bytes;
                self.front.metrics.sent_bytes.inc_by(bytes);
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
        if let (Some(mut line), Some(log)) = (self.line.take(), &self.front.log) {
            line.sent_bytes = self.sent_bytes;
            line.total_ms = self.began.elapsed().as_secs_f64() * 1e3;
            line.is_whole = self.is_whole || self.body.is_end_stream();
            log.write(&line);
        }
    }
}
