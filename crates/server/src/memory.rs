//! The memory that requests may use for bodies, counted together.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use s3s::{S3Error, S3Result, s3_error};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// How long a request waits for memory.
const PATIENCE: Duration = Duration::from_secs(20);
/// The bytes for which one permit of the semaphore is taken.
const PERMIT_BYTES: u64 = 4096;

/// A budget of memory. Clones share it.
#[derive(Debug, Clone)]
pub struct Memory {
    permits: Arc<Semaphore>,
    total: usize,
}

/// A part of the budget, until it is dropped.
#[derive(Debug)]
pub struct Taken {
    _permit: OwnedSemaphorePermit,
}

struct Held {
    bytes: Bytes,
    _taken: Taken,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Memory {
    pub fn new(bytes: u64) -> Memory {
        let total = (bytes / PERMIT_BYTES) as usize;
        Memory { permits: Arc::new(Semaphore::new(total)), total }
    }

    /// Take memory for what is not needed yet, if half of the budget stays free. So clients that read slowly cannot hold up all others.
    pub fn try_take(&self, bytes: u64) -> Option<Taken> {
        if self.permits.available_permits() < self.total / 2 + permits(bytes) as usize {
            return None;
        }
        self.permits.clone().try_acquire_many_owned(permits(bytes)).ok().map(|permit| Taken { _permit: permit })
    }

    /// Wait for memory. Fails with 503 after a time.
    pub async fn take(&self, bytes: u64) -> S3Result<Taken> {
        match tokio::time::timeout(PATIENCE, self.permits.clone().acquire_many_owned(permits(bytes))).await {
            Ok(Ok(permit)) => Ok(Taken { _permit: permit }),
            _ => Err(overloaded()),
        }
    }
}

fn permits(bytes: u64) -> u32 {
    bytes.div_ceil(PERMIT_BYTES).min(u64::from(u32::MAX)) as u32
}

impl Taken {
    /// Add a part of the same budget.
    pub fn merge(&mut self, other: Taken) {
        self._permit.merge(other._permit);
    }
    /// Count these bytes until the last copy of the result is dropped.
    pub fn with(self, bytes: Bytes) -> Bytes {
        Bytes::from_owner(Held { bytes, _taken: self })
    }
}

/// The message to a request that the server has no room for.
pub const NO_ROOM: &str = "the server has no memory for this request at the moment; try again later";

/// The response to a request that the server has no room for.
pub fn overloaded() -> S3Error {
    let mut error = s3_error!(SlowDown, "{NO_ROOM}");
    let mut headers = hyper::HeaderMap::new();
    headers.insert(hyper::header::RETRY_AFTER, hyper::header::HeaderValue::from_static("1"));
    error.set_headers(headers);
    error
}
