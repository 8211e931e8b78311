//! The access log: a line of JSON for each request, written by a thread of its own.

use std::io::Write as _;
use std::net::SocketAddr;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::time::SystemTime;

use hyper::Request;
use penstock_error::{Error, Result};
use s3s::dto::{Timestamp, TimestampFormat};
use serde::Serialize;

use crate::authentication::parameter;
use crate::metrics::Metrics;

/// Lines that wait for the disk. More are dropped and counted, so that a full disk does not stop requests.
const WAITING_LINES: usize = 10_000;

/// One request.
#[derive(Debug, Serialize)]
pub struct Line {
    pub time: String,
    pub id: String,
    pub peer: String,
    /// The access key, or empty.
    pub key: String,
    pub operation: &'static str,
    pub method: String,
    /// The header `Host`, whose subdomain may be the bucket.
    pub host: String,
    /// Without the query, which may have a signature.
    pub path: String,
    /// Of a listing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
    pub range: Option<String>,
    pub status: u16,
    /// The code of an error, such as `AccessDenied`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    pub sent_bytes: u64,
    /// Whether the whole body was sent.
    pub is_whole: bool,
    pub first_ms: f64,
    pub total_ms: f64,
}

impl Line {
    pub fn of<B>(request: &Request<B>, peer: SocketAddr, id: &str, operation: &'static str) -> Line {
        let header =
            |name: hyper::header::HeaderName| request.headers().get(name).and_then(|value| value.to_str().ok());
        let signed = header(hyper::header::AUTHORIZATION).or_else(|| request.uri().query()).unwrap_or_default();
        let credential = signed.split_once("Credential=").map_or("", |(_, rest)| rest);
        let mut time = Vec::new();
        // The format allows every time that clocks have.
        let _ = Timestamp::from(SystemTime::now()).format(TimestampFormat::DateTime, &mut time);
        Line {
            time: String::from_utf8(time).unwrap_or_default(),
            id: id.to_owned(),
            peer: peer.to_string(),
            key: credential.split(['/', '%']).next().unwrap_or_default().to_owned(),
            operation,
            method: request.method().to_string(),
            host: header(hyper::header::HOST).unwrap_or_default().to_owned(),
            path: request.uri().path().to_owned(),
            prefix: parameter(request.uri(), "prefix").map(String::from),
            range: header(hyper::header::RANGE).map(str::to_owned),
            status: 0,
            error: None,
            sent_bytes: 0,
            is_whole: false,
            first_ms: 0.0,
            total_ms: 0.0,
        }
    }
}

/// A file that gets lines.
pub struct AccessLog {
    lines: SyncSender<Vec<u8>>,
    reopens: Arc<AtomicBool>,
    metrics: Arc<Metrics>,
}

impl AccessLog {
    /// Append to a file. `-` is the standard output.
    pub fn open(path: &Path, metrics: Arc<Metrics>) -> Result<AccessLog> {
        let mut file = open(path)?;
        let (lines, waiting) = sync_channel::<Vec<u8>>(WAITING_LINES);
        let reopens = Arc::new(AtomicBool::new(false));
        let (path, own): (PathBuf, _) = (path.into(), reopens.clone());
        let write = move || {
            for line in waiting {
                if own.swap(false, Relaxed) {
                    // The old file stays in use if the new one cannot be opened.
                    file = open(&path).unwrap_or(file);
                }
                // A log that cannot be written must not stop requests.
                let _ = file.write_all(&line);
            }
        };
        let started = std::thread::Builder::new().name("access-log".into()).spawn(write);
        started.map_err(|error| Error::new("storage-failed", format!("cannot start the access log: {error}")))?;
        Ok(AccessLog { lines, reopens, metrics })
    }

    pub fn write(&self, line: &Line) {
        let Ok(mut text) = serde_json::to_vec(line) else { return };
        text.push(b'\n');
        if self.lines.try_send(text).is_err() {
            self.metrics.lost_lines.inc();
        }
    }

    /// Open the file again before the next line, after it was moved away.
    pub fn reopen(&self) {
        self.reopens.store(true, Relaxed);
    }
}

fn open(path: &Path) -> Result<std::fs::File> {
    let file = if path == Path::new("-") {
        // Messages of this process may go to the same file. They must not overwrite each other.
        std::io::stdout().as_fd().try_clone_to_owned().map(std::fs::File::from)
    } else {
        penstock_storage::private::options().append(true).create(true).open(path)
    };
    file.map_err(|error| Error::new("storage-failed", format!("cannot write access log `{}`: {error}", path.display())))
}
