//! The bytes of a version as a stream: pieces from the cache, and windows from the cold store ahead of them.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use s3s::S3Result;
use s3s::dto::StreamingBlob;

use super::cached_objects::{CachedObjects, FIRST_BYTES, Resolved};
use super::flights::{Fetched, copy};
use super::memory_cache::PIECE_BYTES;
use crate::body::with_length;
use crate::memory::overloaded;
use crate::meta::{Object, Version};

/// Other cold requests are this long.
const WINDOW_BYTES: u64 = 4 << 20;
/// Cold windows of one response that are fetched ahead.
const WINDOWS_AHEAD: usize = 8;

/// Return a range of a version. The first bytes are read before this returns, so that errors become responses.
pub async fn body(
    cached_objects: &Arc<CachedObjects>,
    object: &Object,
    resolved: Resolved,
    range: Range<u64>,
) -> S3Result<StreamingBlob> {
    let Resolved { meta, early: first, .. } = resolved;
    let version = Version::new(object, &meta);
    let mut reader = Reader {
        cached_objects: cached_objects.clone(),
        name: version.name().into(),
        object_bytes: meta.bytes,
        at: range.start,
        end: range.end,
        was_cold: first.is_some(),
        arrived: first,
        ahead: VecDeque::new(),
    };
    let first = reader.next().await.transpose()?.unwrap_or_default();
    let status = if reader.was_cold { &cached_objects.metrics.cold_gets } else { &cached_objects.metrics.warm_gets };
    status.inc();
    if reader.at == reader.end {
        return Ok(StreamingBlob::from(s3s::Body::from(first)));
    }
    let length = (range.end - range.start) as usize;
    let rest = futures::stream::unfold(reader, |mut reader| async move {
        let next = reader.next().await?;
        Some((next.map_err(|error| s3s::StdError::from(Box::new(error))), reader))
    });
    let whole = futures::StreamExt::chain(futures::stream::once(async move { Ok(first) }), rest);
    Ok(with_length(whole, length))
}

/// One response that is being sent.
struct Reader {
    cached_objects: Arc<CachedObjects>,
    name: Arc<str>,
    object_bytes: u64,
    at: u64,
    end: u64,
    /// Bytes that were read but not yet sent, and where they begin.
    arrived: Option<(u64, Bytes)>,
    /// Windows that are being fetched, in order.
    ahead: VecDeque<(Range<u64>, Fetched<Bytes>)>,
    was_cold: bool,
}

impl Reader {
    /// Return the next bytes, or None at the end.
    async fn next(&mut self) -> Option<S3Result<Bytes>> {
        if self.at == self.end {
            return None;
        }
        if let Some((begin, bytes)) = self.arrived.take() {
            let until = begin + bytes.len() as u64;
            if begin <= self.at && self.at < until {
                return Some(Ok(
                    self.advance(bytes.slice((self.at - begin) as usize..(until.min(self.end) - begin) as usize))
                ));
            }
        }
        if self.ahead.is_empty() {
            let piece = self.at..self.end.min((self.at / PIECE_BYTES + 1) * PIECE_BYTES);
            if let Some(bytes) = self.cached_objects.read_now(&self.name, self.object_bytes, piece) {
                self.cached_objects.metrics.hits.inc();
                self.cached_objects.metrics.hit_bytes.inc_by(bytes.len() as u64);
                return Some(Ok(self.advance(bytes)));
            }
            self.was_cold = true;
        }
        self.fetch_ahead();
        let fetched = match self.ahead.pop_front() {
            Some((_, window)) => window.await.map_err(|error| copy(&error)),
            None => Err(overloaded()),
        };
        // Nothing follows an error.
        self.end = if fetched.is_ok() { self.end } else { self.at };
        Some(fetched.map(|bytes| self.advance(bytes)))
    }

    /// Begin to fetch the next windows.
    fn fetch_ahead(&mut self) {
        let begin = self.ahead.back().map_or(self.at, |(range, _)| range.end);
        for window in windows(begin..self.end).take(WINDOWS_AHEAD - self.ahead.len().min(WINDOWS_AHEAD)) {
            // Only the window that is sent next waits for memory.
            let waits = self.ahead.is_empty();
            match self.cached_objects.begin_window(&self.name, self.object_bytes, window.clone(), waits) {
                Some(fetch) => self.ahead.push_back((window, fetch)),
                None => break,
            }
        }
    }

    fn advance(&mut self, bytes: Bytes) -> Bytes {
        self.at += bytes.len() as u64;
        bytes
    }
}

/// Cut a range into the parts that are fetched by one request each.
fn windows(range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let end = if at < FIRST_BYTES { FIRST_BYTES } else { (at / WINDOW_BYTES + 1) * WINDOW_BYTES };
        let window = at..end.min(range.end);
        at = window.end;
        (!window.is_empty()).then_some(window)
    })
}
