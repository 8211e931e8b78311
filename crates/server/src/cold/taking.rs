//! How long an upload to a cold store may take: as long as the store takes bytes. A limit for the whole would cut long uploads of slow clients, and of
//! keys with a rate.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::StreamExt as _;
use s3s::dto::StreamingBlob;
use s3s::stream::ByteStream as _;
use s3s::{S3Result, s3_error};
use tokio::time::Instant;

use crate::body::with_length;

/// What the cold store does with a body.
#[derive(Debug, Clone, Copy)]
enum State {
    /// It waits for the client's next bytes.
    Waits,
    /// It was given bytes, or the end, at this moment.
    Given(Instant),
}

/// Watches the body of an upload. Clones share it.
#[derive(Debug, Clone)]
pub struct Taking(Arc<Mutex<State>>);

impl Taking {
    pub fn new() -> Taking {
        Taking(Arc::new(Mutex::new(State::Given(Instant::now()))))
    }

    fn set(&self, state: State) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = state;
    }

    /// Return the body, watched.
    pub fn body(&self, body: StreamingBlob) -> StreamingBlob {
        let Some(bytes) = body.remaining_length().exact() else { return body };
        let parts = futures::stream::unfold((body, self.clone()), |(mut body, taking)| async move {
            taking.set(State::Waits);
            let part = body.next().await;
            taking.set(State::Given(Instant::now()));
            part.map(|part| (part, (body, taking)))
        });
        with_length(parts, bytes)
    }

    /// Wait for the response to an upload. Fails if the store neither takes bytes nor answers for this long.
    pub async fn within<T>(&self, most: Duration, call: impl Future<Output = S3Result<T>>) -> S3Result<T> {
        let mut call = std::pin::pin!(call);
        let mut until = Instant::now() + most;
        loop {
            if let Ok(done) = tokio::time::timeout_at(until, &mut call).await {
                return done;
            }
            until = match *self.0.lock().unwrap_or_else(PoisonError::into_inner) {
                State::Waits => Instant::now() + most,
                State::Given(at) if at + most > Instant::now() => at + most,
                State::Given(_) => return Err(s3_error!(ServiceUnavailable, "the cold store took no bytes for {} s", most.as_secs_f64())),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    const MOST: Duration = Duration::from_secs(60);

    fn body(pause: Duration) -> StreamingBlob {
        let parts = futures::stream::iter(0..3).then(move |_| async move {
            tokio::time::sleep(pause).await;
            Ok(Bytes::from_static(b"x"))
        });
        with_length(parts, 3)
    }

    async fn taken(mut body: StreamingBlob) -> S3Result<usize> {
        let mut bytes = 0;
        while let Some(part) = body.next().await {
            bytes += part.map_or(0, |part| part.len());
        }
        Ok(bytes)
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_client_is_not_the_fault_of_the_store() {
        let taking = Taking::new();
        let body = taking.body(body(MOST * 3));
        assert_eq!(body.remaining_length().exact(), Some(3));
        assert_eq!(taking.within(MOST, taken(body)).await.ok(), Some(3));
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_takes_nothing_or_does_not_answer_fails() {
        let taking = Taking::new();
        let held = taking.body(body(Duration::ZERO));
        let never = async {
            let _held = held;
            std::future::pending::<S3Result<()>>().await
        };
        assert!(taking.within(MOST, never).await.is_err_and(|error| error.message().is_some_and(|text| text.contains("took no bytes"))));
        let taking = Taking::new();
        let whole = taking.body(body(Duration::ZERO));
        let silent = async {
            taken(whole).await?;
            std::future::pending::<S3Result<()>>().await
        };
        assert!(taking.within(MOST, silent).await.is_err());
    }
}
