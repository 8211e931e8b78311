//! The HTTP service beneath `object_store`: counts what passes, and notes for the task at hand how its last request ended.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures::StreamExt as _;
use http_body_util::BodyExt as _;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody, HttpService, ReqwestConnector,
};

use crate::counters::{Counters, add};

/// How the last request of a task ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Ending {
    /// No request was made: credentials could not be had, or a name was refused.
    #[default]
    None,
    /// The server answered with success; its body may still break off.
    Success,
    /// The server answered otherwise: status, and its own code where it gave one.
    Refused { status: u16, code: String },
    /// Nothing reached the server.
    Unsent(String),
    /// It may have reached the server, but no answer came.
    Lost(String),
}

impl Ending {
    /// Whether the server refused a create because the name is taken: S3 and Google say 412, others 304, Azure 409 with a code of its own
    /// (409 of S3 is two creates at once, of which nothing is known).
    pub fn says_taken(&self) -> bool {
        match self {
            Ending::Refused { status: 412 | 304, .. } => true,
            Ending::Refused { status: 409, code } => code == "BlobAlreadyExists",
            _ => false,
        }
    }
}

tokio::task_local! {
    /// Set by `patience` around each attempt.
    pub static ENDING: RefCell<Ending>;
}

fn note(ending: Ending) {
    let _ = ENDING.try_with(|cell| cell.replace(ending)); // Outside of an attempt nobody asks.
}

/// Where the machines of the clouds tell their credentials.
const METADATA_HOST: &str = "169.254.169.254";

/// Bodies of refusals are read this far; what they say is short.
const REFUSAL_BYTES: usize = 16 << 10;

/// What a service tells: its counters, and the time of the server's last answer.
#[derive(Debug)]
pub struct Told {
    pub counters: Counters,
    /// Milliseconds between the server's clock and ours; none yet at `u64::MAX`.
    skew_ms: AtomicU64,
}

impl Told {
    pub fn new() -> Told {
        Told { counters: Counters::default(), skew_ms: AtomicU64::new(u64::MAX) }
    }

    pub fn skew(&self) -> Option<Duration> {
        Some(self.skew_ms.load(Relaxed)).filter(|skew| *skew != u64::MAX).map(Duration::from_millis)
    }

    fn see_date(&self, date: &str) {
        if let Ok(theirs) = httpdate::parse_http_date(date) {
            let ours = SystemTime::now();
            let skew = ours.duration_since(theirs).or_else(|_| theirs.duration_since(ours)).unwrap_or_default();
            self.skew_ms.store(skew.as_millis() as u64, Relaxed);
        }
    }
}

/// Makes services that tell.
#[derive(Debug)]
pub struct Connector(pub Arc<Told>);

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Service { inner: ReqwestConnector::default().connect(options)?, told: self.0.clone() }))
    }
}

#[derive(Debug)]
struct Service {
    inner: HttpClient,
    told: Arc<Told>,
}

#[async_trait::async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        if request.uri().host() == Some(METADATA_HOST) {
            return self.inner.execute(request).await; // Credentials of the machine: no request to the store.
        }
        add(&self.told.counters.requests, 1);
        note(Ending::Lost("the request was given up".into())); // Stands if this future is dropped at a deadline.
        let response = self.inner.execute(request).await.inspect_err(|error| {
            note(match error.kind() {
                HttpErrorKind::Connect => Ending::Unsent(chain(error)),
                _ => Ending::Lost(chain(error)),
            });
        })?;
        let status = response.status();
        if let Some(date) = response.headers().get("date").and_then(|date| date.to_str().ok()) {
            self.told.see_date(date);
        }
        let (parts, body) = response.into_parts();
        if status.is_success() {
            note(Ending::Success);
            let told = self.told.clone();
            let counted = body.map_frame(move |frame| {
                add(&told.counters.received_bytes, frame.data_ref().map_or(0, Bytes::len) as u64);
                frame
            });
            return Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(counted)));
        }
        let mut refusal = Vec::new();
        let mut stream = body.bytes_stream();
        while let Some(Ok(chunk)) = stream.next().await {
            refusal.extend_from_slice(&chunk[..chunk.len().min(REFUSAL_BYTES - refusal.len())]);
            if refusal.len() == REFUSAL_BYTES {
                break;
            }
        }
        note(Ending::Refused { status: status.as_u16(), code: code_of(&String::from_utf8_lossy(&refusal)) });
        Ok(HttpResponse::from_parts(parts, Bytes::from(refusal).into()))
    }
}

/// What stands in `<Code>…</Code>`.
fn code_of(body: &str) -> String {
    let inside = body.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>"));
    inside.map_or(String::new(), |(code, _)| code.chars().take(80).collect())
}

/// An error and its causes in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let more = cause.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        source = cause.source();
    }
    text
}
