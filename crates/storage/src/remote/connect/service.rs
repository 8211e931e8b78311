//! The HTTP service beneath `object_store`. It counts requests and bytes, and records how the last request of each task ended.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use futures::StreamExt as _;
use http_body_util::BodyExt as _;
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpResponseBody, HttpService,
    ReqwestConnector,
};

use crate::counters::{Counters, add};

/// How the last request of a task ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Ending {
    /// No request was sent: credentials were unavailable, or a name was rejected.
    #[default]
    None,
    /// The server answered with a success status. The body may still be cut short.
    Success,
    /// The server answered with another status. `code` is the server's own error code, or empty.
    Refused { status: u16, code: String },
    /// Nothing reached the server at this host.
    Unsent { host: String, why: String },
    /// The request may have reached the server, but no response arrived.
    Lost(String),
}

impl Ending {
    /// Return whether the server refused a create because the name is taken. S3 and Google send 412, some servers send 304, and
    /// Azure sends 409 with its own code. A 409 from S3 means that two creates ran concurrently, so the outcome is unknown.
    pub fn says_taken(&self) -> bool {
        match self {
            Ending::Refused { status: 412 | 304, .. } => true,
            Ending::Refused { status: 409, code } => code == "BlobAlreadyExists",
            _ => false,
        }
    }
}

tokio::task_local! {
    /// Set by `retry` around each attempt.
    pub static ENDING: RefCell<Ending>;
}

fn note(ending: Ending) {
    let _ = ENDING.try_with(|cell| cell.replace(ending)); // Outside an attempt, nothing reads the ending.
}

/// The hosts from which cloud machines get their credentials.
const METADATA_HOSTS: [&str; 3] = ["169.254.169.254", "metadata.google.internal", "metadata"];

/// A header of servers that answer batches.
const BATCHES: &str = "x-penstock-batch";

/// Parts of the queries of listings: of S3, Azure and Google.
const LISTINGS: [&str; 3] = ["list-type=2", "comp=list", "prefix="];

/// The code of an answer to a listing that is a web page. Its address is not that of a store.
pub const WEB_PAGE: &str = "a web page";

/// Maximum number of bytes read from an error response. Error bodies are short.
const REFUSAL_BYTES: usize = 16 << 10;

/// Data that a service reports: its counters and the clock skew at the server's last response.
#[derive(Debug)]
pub struct Traffic {
    pub counters: Counters,
    /// The difference between the server's clock and ours in milliseconds, or `u64::MAX` if it is not known yet.
    skew_ms: AtomicU64,
    answered: AtomicBool,
    understood: AtomicBool,
    /// Whether the newest response offered batches, and none broke off since.
    batches: AtomicBool,
}

impl Traffic {
    pub fn new() -> Traffic {
        Traffic {
            counters: Counters::default(),
            skew_ms: AtomicU64::new(u64::MAX),
            answered: AtomicBool::new(false),
            understood: AtomicBool::new(false),
            batches: AtomicBool::new(false),
        }
    }

    /// Return whether the store has ever answered a request of this process.
    pub fn answered(&self) -> bool {
        self.answered.load(Relaxed)
    }

    /// Return whether an answer of the store has ever made sense.
    pub fn understood(&self) -> bool {
        self.understood.load(Relaxed)
    }

    pub fn note_understood(&self) {
        self.understood.store(true, Relaxed);
    }

    pub fn offers_batches(&self) -> bool {
        self.batches.load(Relaxed)
    }

    pub fn note_batches(&self, offered: bool) {
        self.batches.store(offered, Relaxed);
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

/// Builds services that report to a [`Traffic`].
#[derive(Debug)]
pub struct Connector(pub Arc<Traffic>);

impl HttpConnector for Connector {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(Service { inner: ReqwestConnector::default().connect(options)?, traffic: self.0.clone() }))
    }
}

#[derive(Debug)]
struct Service {
    inner: HttpClient,
    traffic: Arc<Traffic>,
}

#[async_trait::async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        if request.uri().host().is_some_and(|host| METADATA_HOSTS.contains(&host)) {
            return self.inner.execute(request).await; // A metadata host is not part of the store.
        }
        add(&self.traffic.counters.requests, 1);
        note(Ending::Lost("the request was aborted".into())); // This ending is kept if the deadline drops the future.
        let host = request.uri().authority().map(ToString::to_string).unwrap_or_default();
        let is_listing =
            request.uri().query().is_some_and(|query| LISTINGS.iter().any(|listing| query.contains(listing)));
        let response = self.inner.execute(request).await.inspect_err(|error| {
            note(match error.kind() {
                HttpErrorKind::Connect => Ending::Unsent { host, why: chain(error) },
                _ => Ending::Lost(chain(error)),
            });
        })?;
        self.traffic.answered.store(true, Relaxed);
        let status = response.status();
        self.traffic.note_batches(response.headers().get(BATCHES).is_some_and(|version| version.as_bytes() == b"1"));
        if let Some(date) = response.headers().get("date").and_then(|date| date.to_str().ok()) {
            self.traffic.see_date(date);
        }
        let (parts, body) = response.into_parts();
        let is_page = parts.headers.get("content-type").is_some_and(|kind| kind.as_bytes().starts_with(b"text/html"));
        if status.is_success() && is_listing && is_page {
            note(Ending::Refused { status: status.as_u16(), code: WEB_PAGE.into() });
            return Ok(HttpResponse::from_parts(parts, Bytes::new().into()));
        }
        if status.is_success() {
            note(Ending::Success);
            let traffic = self.traffic.clone();
            let counted = body.map_frame(move |frame| {
                add(&traffic.counters.received_bytes, frame.data_ref().map_or(0, Bytes::len) as u64);
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

/// Return the text inside `<Code>…</Code>`, or an empty string.
fn code_of(body: &str) -> String {
    let inside = body.split_once("<Code>").and_then(|(_, rest)| rest.split_once("</Code>"));
    inside.map_or(String::new(), |(code, _)| code.chars().take(80).collect())
}

/// Format an error and its causes on one line.
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
