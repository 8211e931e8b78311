//! What happens to every request before and after its operation: its number, the limit on requests, counts, and the access log.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Instant;

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{HeaderName, HeaderValue, RETRY_AFTER};
use hyper::{Method, Request, Response, StatusCode};
use s3s::service::S3Service;
use s3s::{HttpError, StdError};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::metrics::{LatencyLabels, Metrics, OperationLabels};
use crate::tier::RequestId;
use crate::watch::access_log::{AccessLog, Line};

const REQUEST_ID: HeaderName = HeaderName::from_static("x-amz-request-id");

/// The version of batches, by which clients see that the server has them.
const BATCH: HeaderName = HeaderName::from_static("x-penstock-batch");

/// What all connections share.
pub struct Front {
    service: S3Service,
    metrics: Arc<Metrics>,
    log: Option<AccessLog>,
    room: Arc<Semaphore>,
    /// Whether signatures are removed, because nothing can verify them.
    is_anonymous: bool,
    /// Distinguishes the numbers of requests of this process from those of others.
    process: u64,
    requests: AtomicU64,
}

impl Front {
    pub fn new(service: S3Service, metrics: Arc<Metrics>, log: Option<AccessLog>, requests: usize, is_anonymous: bool) -> Front {
        let mut process = [0; 8];
        // Without random bytes, numbers of two processes may be equal.
        let _ = getrandom::fill(&mut process);
        let room = Arc::new(Semaphore::new(requests));
        Front { service, metrics, log, room, is_anonymous, process: u64::from_le_bytes(process), requests: AtomicU64::new(0) }
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
                if self.is_anonymous {
                    request.headers_mut().remove(hyper::header::AUTHORIZATION);
                }
                self.metrics.running.inc();
                let response = self.service.call(request.map(s3s::Body::from)).await;
                self.metrics.running.dec();
                (response?, Some(room))
            }
        };
        self.metrics.latency.get_or_create(&LatencyLabels { operation }).observe(began.elapsed().as_secs_f64());
        let status = response.status().as_u16();
        self.metrics.requests.get_or_create(&OperationLabels { operation, status }).inc();
        response.headers_mut().insert(BATCH, HeaderValue::from_static("1"));
        if let Ok(value) = HeaderValue::from_str(&id.0) {
            response.headers_mut().insert(REQUEST_ID, value);
        }
        if let Some(line) = &mut line {
            line.status = status;
            line.first_ms = began.elapsed().as_secs_f64() * 1e3;
        }
        Ok(response.map(|body| Answer { body, front: self, line, began, sent_bytes: 0, is_whole: false, _room: room }))
    }
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
    _room: Option<OwnedSemaphorePermit>,
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
