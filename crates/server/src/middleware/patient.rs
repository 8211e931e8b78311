//! Bodies of requests, whose senders must not be too slow.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::Request;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::EXPECT;
use s3s::StdError;

use crate::limits::rate::Pace;

/// The longest list in the body of a request, such as the parts of an upload.
pub const LIST_BYTES: u64 = 8 << 20;

/// How many bytes of a body came, which its readers in the library of the protocol do not say.
#[derive(Debug, Clone)]
pub struct Received {
    bytes: Arc<AtomicU64>,
    /// As the head of the request says.
    least_bytes: u64,
    /// Whether the client waits for 100 before it sends the body.
    is_awaited: bool,
}

impl Received {
    pub fn of(request: &Request<Incoming>) -> Received {
        let is_awaited = request.headers().contains_key(EXPECT);
        Received { bytes: Arc::default(), least_bytes: request.body().size_hint().lower(), is_awaited }
    }

    /// Return whether the body is longer than a list may be.
    pub fn is_too_long(&self) -> bool {
        self.bytes.load(Relaxed).max(self.least_bytes) > LIST_BYTES
    }

    /// Return whether the client may send what it announced, or the next request instead: it was answered while it waited for 100. Also a client
    /// that waited before an empty body may read the 100 of a later request as the answer to it.
    pub fn may_never_come(&self) -> bool {
        self.is_awaited && self.bytes.load(Relaxed) == 0
    }
}

/// How long the rest of a body is received and dropped that is not wanted. Its sender would not see the response otherwise, but a broken connection.
const LINGER: Duration = Duration::from_secs(5);

/// Drop a request whose body is not wanted.
pub fn refuse(request: Request<Incoming>) {
    let is_awaited = request.headers().contains_key(EXPECT);
    receive(request.into_body(), is_awaited);
}

/// Receive the rest of a body, unless its sender waits for 100 to send it.
fn receive(body: Incoming, is_awaited: bool) {
    if is_awaited || body.is_end_stream() {
        return;
    }
    // Without a runtime, the server ends.
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        runtime.spawn(tokio::time::timeout(LINGER, async move {
            let mut body = body;
            while let Some(Ok(_)) = body.frame().await {}
        }));
    }
}

/// A body whose sender must send this much in each `idle` time, or the rest. One that sends a byte now and then would hold a connection for ever.
pub struct Patient {
    /// None after it was dropped.
    body: Option<Incoming>,
    /// Whether its sender waits for 100, which the first poll sends.
    is_awaited: bool,
    idle: Duration,
    until: Pin<Box<tokio::time::Sleep>>,
    /// Bytes that came since `until` was set.
    bytes: usize,
    received: Received,
    pace: Option<Pace>,
}

impl Patient {
    const LEAST_BYTES: usize = 64 << 10;

    pub fn new(body: Incoming, idle: Duration, received: Received, pace: Option<Pace>) -> Patient {
        let is_awaited = received.is_awaited;
        Patient {
            body: Some(body),
            is_awaited,
            idle,
            until: Box::pin(tokio::time::sleep(idle)),
            bytes: 0,
            received,
            pace,
        }
    }
}

impl Body for Patient {
    type Data = Bytes;
    type Error = StdError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, StdError>>> {
        if let Some(pace) = &mut self.pace {
            // The client cannot send while the server waits.
            let waited = std::task::ready!(pace.poll_turn(context));
            let until = self.until.deadline() + waited;
            if !waited.is_zero() {
                self.until.as_mut().reset(until);
            }
        }
        self.is_awaited = false;
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        let next = Pin::new(body).poll_frame(context);
        if let Poll::Ready(frame) = &next {
            let bytes = frame.iter().flatten().filter_map(Frame::data_ref).map(Bytes::len).sum::<usize>();
            self.pace.iter_mut().for_each(|pace| pace.took(bytes));
            self.bytes += bytes;
            self.received.bytes.fetch_add(bytes as u64, Relaxed);
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
        self.body.as_ref().is_none_or(Incoming::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map_or_else(SizeHint::default, Incoming::size_hint)
    }
}

impl Drop for Patient {
    fn drop(&mut self) {
        self.body.take().into_iter().for_each(|body| receive(body, self.is_awaited));
    }
}
