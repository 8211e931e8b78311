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

impl State {
    /// Return when to look again, or None if the store has done nothing for `most`.
    fn until(self, now: Instant, most: Duration) -> Option<Instant> {
        match self {
            State::Waits => Some(now + most),
            State::Given(at) => Some(at + most).filter(|until| *until > now),
        }
    }
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
            let state = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
            until = state.until(Instant::now(), most).ok_or_else(|| {
                s3_error!(
                    ServiceUnavailable,
                    "the cold store neither accepted bytes nor responded for {} s",
                    most.as_secs_f64()
                )
            })?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bytes::Bytes;

    #[test]
    fn only_a_store_that_was_given_bytes_can_be_late() {
        let (now, most) = (Instant::now(), Duration::from_secs(60));
        assert_eq!(State::Waits.until(now, most), Some(now + most));
        assert_eq!(State::Given(now).until(now, most), Some(now + most));
        assert_eq!(State::Given(now).until(now + most / 2, most), Some(now + most));
        assert_eq!(State::Given(now).until(now + most, most), None);
    }

    #[tokio::test]
    async fn a_body_says_whose_turn_it_is() {
        let (send, parts) = futures::channel::mpsc::unbounded::<Result<Bytes, s3s::StdError>>();
        let taking = Taking::new();
        let waits = || matches!(*taking.0.lock().unwrap_or_else(PoisonError::into_inner), State::Waits);
        let mut body = taking.body(with_length(parts, 2));
        assert_eq!(body.remaining_length().exact(), Some(2));
        assert!(!waits() && futures::poll!(body.next()).is_pending() && waits());
        assert!(send.unbounded_send(Ok(Bytes::from_static(b"ab"))).is_ok());
        assert!(futures::poll!(body.next()).is_ready() && !waits());
        assert!(futures::poll!(body.next()).is_pending() && waits());
        drop(send);
        assert!(body.next().await.is_none() && !waits());
    }

    #[tokio::test]
    async fn a_store_that_does_not_answer_fails() {
        let never = std::future::pending::<S3Result<()>>();
        let failed = Taking::new().within(Duration::ZERO, never).await;
        assert!(failed.is_err_and(|error| {
            error.message().is_some_and(|text| text.contains("neither accepted bytes nor responded"))
        }));
    }
}
