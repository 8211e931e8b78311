//! What happens to every request before and after its operation: its number, the limit on requests, counts, and the access log.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{HeaderName, HeaderValue, RETRY_AFTER};
use hyper::{Method, Request, Response, StatusCode};
use s3s::service::S3Service;
use s3s::{HttpError, StdError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::authentication::{self, Form, Refusal, Taken};
use crate::hosts::Domains;
use crate::memory::Memory;
use crate::metrics::{Counted, LatencyLabels, Metrics, OperationLabels};
use crate::read::ranges::drop_odd_range;
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
    domains: Arc<Domains>,
    taken: Taken,
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
        domains: Arc<Domains>,
        taken: Taken,
    ) -> Front {
        let mut process = [0; 8];
        // Without random bytes, numbers of two processes may be equal.
        let _ = getrandom::fill(&mut process);
        let room = Arc::new(Semaphore::new(limits.requests));
        Front { service, metrics, log, limits, room, domains, taken, process: u64::from_le_bytes(process), requests: AtomicU64::new(0) }
    }

    /// Open the access log again.
    pub fn reopen_log(&self) {
        self.log.iter().for_each(AccessLog::reopen);
    }

    /// Answer a request.
    pub async fn answer(self: Arc<Front>, peer: SocketAddr, mut request: Request<Incoming>) -> Result<Response<Answer>, HttpError> {
        let began = Instant::now();
        let id = RequestId(format!("{:016X}", self.process ^ self.requests.fetch_add(1, Relaxed)).into());
        let operation = self.operation(&request);
        // Clients that sent `Expect` before an empty body may wait for the 100 of a later request on the same connection.
        let closes = request.headers().contains_key(hyper::header::EXPECT) && request.body().size_hint().exact() == Some(0);
        let mut line = self.log.as_ref().map(|_| Line::of(&request, peer, &id.0, operation));
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
                let response = match self.form_of(&request) {
                    Err((status, code, text)) => with_error(status, code, &text),
                    Ok(form) => self.called(request, &form).await?,
                };
                (response, Some((room, running)))
            }
        };
        self.metrics.latency.get_or_create(&LatencyLabels { operation }).observe(began.elapsed().as_secs_f64());
        let status = response.status().as_u16();
        if closes {
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
        Ok(response.map(|body| Answer { body, front: self, line, began, sent_bytes: 0, is_whole: false, _held: room }))
    }
}

impl Front {
    /// Call the operation. A read that takes too long is answered with 503, and memory for the list of a POST is counted.
    async fn called(&self, mut request: Request<Incoming>, form: &Form) -> Result<s3s::HttpResponse, HttpError> {
        let (is_read, is_head) = (matches!(*request.method(), Method::GET | Method::HEAD), *request.method() == Method::HEAD);
        let taken = if *request.method() == Method::POST {
            let bytes = request.body().size_hint().exact().unwrap_or(LIST_BYTES).min(LIST_BYTES);
            match self.limits.memory.take(bytes).await {
                Ok(taken) => Some(taken),
                Err(_) => return Ok(overloaded()),
            }
        } else {
            None
        };
        if self.taken == Taken::Unverified {
            request.headers_mut().remove(hyper::header::AUTHORIZATION);
            if let Some(uri) = authentication::without_signature(request.uri()) {
                *request.uri_mut() = uri;
            }
        }
        drop_odd_range(&mut request, form.covers("range"));
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
        response.map(|mut response| {
            // The library of the protocol knows no ranges of HEAD.
            if is_head && response.status() == StatusCode::OK && response.headers().contains_key(hyper::header::CONTENT_RANGE) {
                *response.status_mut() = StatusCode::PARTIAL_CONTENT;
            }
            explained(response)
        })
    }

    /// Return how a request is signed, or why this server never answers it: the status, the code of S3 and a message.
    fn form_of(&self, request: &Request<Incoming>) -> Result<Form, (StatusCode, &'static str, String)> {
        let header = |name| text(request, name);
        if header("content-type").trim_start().to_ascii_lowercase().starts_with("multipart/form-data") {
            return Err((StatusCode::NOT_IMPLEMENTED, "NotImplemented", "This server takes no forms. Use PUT.".into()));
        }
        if self.taken != Taken::Unverified {
            let refused = |(code, text): Refusal| {
                let is_denied = matches!(code, "AccessDenied" | "RequestTimeTooSkewed");
                (if is_denied { StatusCode::FORBIDDEN } else { StatusCode::BAD_REQUEST }, code, text)
            };
            let form = authentication::form_of(request).map_err(refused)?;
            authentication::check(&form, request, self.taken, time::OffsetDateTime::now_utc()).map_err(refused)?;
            return Ok(form);
        }
        if !self.domains.is_own(host(request)) || request.headers().contains_key(hyper::header::ORIGIN) {
            // A page in a browser may send requests to this machine.
            let text = "Without keys, this server answers only requests of this machine, by its address.";
            return Err((StatusCode::FORBIDDEN, "AccessDenied", text.into()));
        }
        let is_in_chunks = header("x-amz-content-sha256").starts_with("STREAMING-") || header("content-encoding").contains("aws-chunked");
        if is_in_chunks {
            let text = "This server was started with --anonymous and cannot verify signed bodies. Do not sign, or start it with --keys.";
            return Err((StatusCode::BAD_REQUEST, "InvalidRequest", text.into()));
        }
        Ok(Form::Unsigned)
    }

    /// Return the name under which a request is counted.
    fn operation(&self, request: &Request<Incoming>) -> &'static str {
        let path = request.uri().path().trim_start_matches('/');
        let key = if self.domains.bucket_of(host(request)).is_some() { path } else { path.split_once('/').map_or("", |(_, key)| key) };
        match (request.method().as_str(), !key.is_empty()) {
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

/// A body whose sender must send this much in each `idle` time, or the rest. One that sends a byte now and then would hold a connection for ever.
struct Patient {
    body: Incoming,
    idle: Duration,
    until: Pin<Box<tokio::time::Sleep>>,
    /// Bytes that came since `until` was set.
    bytes: usize,
}

impl Patient {
    const LEAST_BYTES: usize = 64 << 10;

    fn new(body: Incoming, idle: Duration) -> Patient {
        Patient { body, idle, until: Box::pin(tokio::time::sleep(idle)), bytes: 0 }
    }
}

impl Body for Patient {
    type Data = Bytes;
    type Error = StdError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, StdError>>> {
        let next = Pin::new(&mut self.body).poll_frame(context);
        if let Poll::Ready(frame) = &next {
            self.bytes += frame.iter().flatten().filter_map(Frame::data_ref).map(Bytes::len).sum::<usize>();
            if self.bytes >= Patient::LEAST_BYTES {
                let until = tokio::time::Instant::now() + self.idle;
                self.until.as_mut().reset(until);
                self.bytes = 0;
            }
            return next.map(|frame| frame.map(|frame| frame.map_err(StdError::from)));
        }
        match self.until.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Some(Err("the client sends too slowly".into()))),
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

/// Return a header, or an empty text.
fn text<'a>(request: &'a Request<Incoming>, name: &str) -> &'a str {
    request.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Return the host that a request names.
fn host(request: &Request<Incoming>) -> &str {
    request.uri().host().unwrap_or_else(|| text(request, "host"))
}

fn with_error(status: StatusCode, code: &str, message: &str) -> s3s::HttpResponse {
    let text = format!("<?xml version=\"1.0\" encoding=\"UTF-8\"?><Error><Code>{code}</Code><Message>{message}</Message></Error>");
    let mut response = Response::new(s3s::Body::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(hyper::header::CONTENT_TYPE, HeaderValue::from_static("application/xml"));
    response
}

/// Messages of errors that the library of the protocol, or a cold store in its response to HEAD, sends without one.
const MESSAGES: [(&str, &str); 10] = [
    (
        "SignatureDoesNotMatch",
        "The signature does not fit the request. Check the secret key, and whether a proxy changes the path or headers.",
    ),
    ("InvalidURI", "The path of the request cannot be read. Encode it as a URL."),
    ("InvalidBucketName", "Names of buckets have 3 to 63 lower-case letters, digits, dots and hyphens."),
    ("KeyTooLongError", "Keys have at most 1,024 bytes."),
    ("IncompleteBody", "The body is shorter or longer than its header says. Send it again."),
    ("MethodNotAllowed", "This method cannot be used here. POST needs the bucket or the query of an operation."),
    ("NoSuchBucket", "This bucket does not exist."),
    ("NoSuchKey", "This object does not exist."),
    ("PreconditionFailed", "A condition in the headers of the request does not hold."),
    ("InvalidRange", "The range begins after the end of the object."),
];

/// Return the code of an error.
fn code_of(response: &s3s::HttpResponse) -> Option<String> {
    let text = response.body().bytes().filter(|_| !response.status().is_success())?;
    let text = String::from_utf8_lossy(&text);
    Some(text.split_once("<Code>")?.1.split_once("</Code>")?.0.to_owned())
}

/// Add a message to an error that has none.
fn explained(mut response: s3s::HttpResponse) -> s3s::HttpResponse {
    let Some(code) = code_of(&response).filter(|_| response.status().is_client_error()) else { return response };
    let has_message = response.body().bytes().is_some_and(|text| text.windows(9).any(|part| part == b"<Message>"));
    let message = MESSAGES.iter().find(|(known, _)| *known == code).filter(|_| !has_message);
    if let Some((code, message)) = message {
        *response.body_mut() = with_error(response.status(), code, message).into_body();
        response.headers_mut().remove(hyper::header::CONTENT_LENGTH);
    }
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
