//! A stream of bytes of known length, as a body.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures::Stream;
use s3s::StdError;
use s3s::dto::StreamingBlob;
use s3s::stream::{ByteStream, RemainingLength};

type Parts = Pin<Box<dyn Stream<Item = Result<Bytes, StdError>> + Send + Sync>>;

struct Sized {
    parts: Parts,
    left: usize,
}

/// Return a stream as a body of this length.
pub fn with_length(
    parts: impl Stream<Item = Result<Bytes, StdError>> + Send + Sync + 'static,
    bytes: usize,
) -> StreamingBlob {
    StreamingBlob::new(Sized { parts: Box::pin(parts), left: bytes })
}

impl Stream for Sized {
    type Item = Result<Bytes, StdError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = self.parts.as_mut().poll_next(context);
        if let Poll::Ready(Some(Ok(bytes))) = &next {
            self.left = self.left.saturating_sub(bytes.len());
        }
        next
    }
}

impl ByteStream for Sized {
    fn remaining_length(&self) -> RemainingLength {
        RemainingLength::new_exact(self.left)
    }
}
