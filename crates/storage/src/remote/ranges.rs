//! Reads one range. Its pieces are filled as bytes arrive. After an interrupted response, only the missing bytes are requested. A
//! request that takes unusually long may be sent twice.

use std::sync::PoisonError;
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use futures::StreamExt as _;
use futures::future::{Either, select};
use object_store::path::Path;
use object_store::{GetOptions, GetRange};
use penstock_error::{Error, Result};
use tokio::time::Instant;

use super::concurrency::Permit;
use super::connect::service::chain;
use super::live::Live;
use super::retry::{Tries, attempt, ended_well};
use crate::Slot;
use crate::counters::{Counters, add};
use crate::ranges::{Piece, RangeRequest};

/// The part of a piece that has arrived.
enum Growing {
    Own(Vec<u8>),
    Placed(Slot),
    /// The whole piece, in a network buffer.
    Shared(Bytes),
}

impl Growing {
    fn len(&self) -> usize {
        match self {
            Growing::Own(bytes) => bytes.len(),
            Growing::Placed(slot) => slot.filled(),
            Growing::Shared(whole) => whole.len(),
        }
    }

    fn push(&mut self, bytes: &[u8]) {
        match self {
            Growing::Own(own) => own.extend_from_slice(bytes),
            Growing::Placed(slot) => slot.push(bytes),
            Growing::Shared(_) => {} // The piece is already complete.
        }
    }

    fn freeze(self) -> Bytes {
        match self {
            Growing::Own(bytes) => bytes.into(),
            Growing::Placed(slot) => slot.freeze(),
            Growing::Shared(whole) => whole,
        }
    }
}

/// The progress of one range, kept across its requests, so that a retry requests only the missing bytes.
pub struct Filling<'a> {
    /// Where the range begins, where it ends, and how long its object is, if this is known.
    begin: u64,
    end: u64,
    object_bytes: Option<u64>,
    pieces: Vec<Piece>,
    /// Destinations for the pieces that have not begun to arrive. A piece without a slot gets newly allocated memory.
    slots: std::vec::IntoIter<Option<Slot>>,
    shared: bool,
    then: Seen<'a>,
    done: Vec<Bytes>,
    /// The next piece, if some of its bytes have arrived.
    piece: Option<Growing>,
    /// Bytes still to skip before the next piece.
    skip: u64,
    /// Bytes received so far, including gaps.
    taken: u64,
}

impl<'a> Filling<'a> {
    pub fn new(plan: RangeRequest, then: Seen<'a>) -> Filling<'a> {
        let (begin, end, object_bytes) = (plan.begin, plan.end(), plan.object_bytes);
        let skip = plan.pieces.first().map_or(0, |piece| piece.skip);
        let done = Vec::with_capacity(plan.pieces.len());
        Filling {
            begin,
            end,
            object_bytes,
            done,
            pieces: plan.pieces,
            slots: plan.slots.into_iter(),
            shared: plan.shared,
            then,
            piece: None,
            skip,
            taken: 0,
        }
    }

    /// Return how many bytes are missing.
    pub fn missing(&self) -> u64 {
        self.end - self.begin - self.taken
    }

    pub fn take(&mut self, mut chunk: Bytes) {
        self.taken += chunk.len() as u64;
        while let Some(wanted) = self.pieces.get(self.done.len()).map(|piece| piece.bytes) {
            let skipped = self.skip.min(chunk.len() as u64);
            self.skip -= skipped;
            chunk.advance(skipped as usize);
            if self.skip > 0 {
                return;
            }
            let mut piece = match self.piece.take() {
                Some(begun) => begun,
                None => match self.slots.next().flatten() {
                    Some(slot) => Growing::Placed(slot),
                    None if self.shared && chunk.len() >= wanted => Growing::Shared(chunk.split_to(wanted)),
                    None => Growing::Own(Vec::with_capacity(wanted)),
                },
            };
            piece.push(&chunk.split_to(chunk.len().min(wanted - piece.len())));
            if piece.len() < wanted {
                self.piece = Some(piece);
                return;
            }
            let piece = piece.freeze();
            (self.then)(self.done.len(), &piece);
            self.done.push(piece);
            self.skip = self.pieces.get(self.done.len()).map_or(0, |piece| piece.skip);
        }
    }
}

/// A callback that receives the index of a piece in its range, and the piece.
pub type Seen<'a> = &'a (dyn Fn(usize, &Bytes) + Send + Sync);

/// State shared by all requests for one range.
pub struct Asked<'a> {
    pub counters: &'a Counters,
    pub path: Path,
    /// The operation as shown in messages, such as "read `name`".
    pub what: String,
    pub then: Seen<'a>,
}

impl Live {
    /// Read one range, and retry until it is complete or fails permanently.
    pub async fn range(&self, asked: &Asked<'_>, plan: RangeRequest, permit: Permit<'_>) -> Result<Vec<Bytes>> {
        self.rest(asked, Filling::new(plan, asked.then), permit).await
    }

    /// Read what is missing of a range.
    pub async fn rest(
        &self,
        asked: &Asked<'_>,
        mut filling: Filling<'_>,
        mut permit: Permit<'_>,
    ) -> Result<Vec<Bytes>> {
        let (begin, end, object_bytes) = (filling.begin, filling.end, filling.object_bytes);
        if filling.missing() == 0 {
            filling.take(Bytes::new());
            return Ok(filling.done);
        }
        let until = Instant::now() + self.retry.deadline;
        let mut tries = Tries::default();
        loop {
            let before = filling.taken;
            let (result, ending) =
                attempt(until, self.stream(&asked.path, begin, end, object_bytes, &mut filling)).await;
            permit.bytes += filling.taken - before;
            let error = match result {
                Ok(None) => return Ok(filling.done),
                Ok(Some(error)) => return Err(error.context(format!("cannot {}", asked.what))),
                // The response was cut short, but only after the last piece.
                Err(_) if filling.done.len() == filling.pieces.len() => return Ok(filling.done),
                Err(error) => error,
            };
            if filling.taken > before {
                tries.count = 0; // The read is making progress, so wait only as long as after a first failure.
            }
            permit = self
                .retry
                .again(asked.counters, self.retry.verdict(&asked.what, &error, &ending), &mut tries, until, permit)
                .await?;
        }
    }

    /// Send one request for the missing bytes. An error inside `Ok` is final: a retry would not help.
    async fn stream(
        &self,
        path: &Path,
        begin: u64,
        end: u64,
        object_bytes: Option<u64>,
        filling: &mut Filling<'_>,
    ) -> object_store::Result<Option<Error>> {
        let options =
            GetOptions { range: Some(GetRange::Bounded(begin + filling.taken..end)), ..GetOptions::default() };
        let answer = match self.client.store.get_opts(path, options).await {
            Err(error) if ended_well() => {
                let text = format!("the server violates HTTP: {}", chain(&error));
                return Ok(Some(Error::new("unsupported-storage", text).hint(
                    "it must answer range requests with status 206 and the requested range; choose another server, or check for proxies",
                )));
            }
            other => other?,
        };
        if let Some(expected) = object_bytes
            && answer.meta.size != expected
        {
            let text = format!("the object has {} bytes, expected {expected}", answer.meta.size);
            return Ok(Some(
                Error::new("object-truncated", text)
                    .hint("the object has changed: run `penstock verify`; restore the object from a copy"),
            ));
        }
        let mut stream = answer.into_stream();
        while let Some(chunk) = stream.next().await {
            let mut chunk = chunk?;
            chunk.truncate((end - begin - filling.taken) as usize);
            filling.take(chunk);
        }
        match filling.taken == end - begin {
            true => Ok(None),
            false => {
                let text = format!("received {} of {} bytes", filling.taken, end - begin);
                Err(object_store::Error::Generic { store: "remote", source: text.into() })
            }
        }
    }

    /// Like `range`, but send a second request if the first one takes unusually long.
    pub async fn hedged(&self, asked: &Asked<'_>, plan: RangeRequest, permit: Permit<'_>) -> Result<Vec<Bytes>> {
        let (began, twin) = (Instant::now(), plan.twin());
        let first = self.range(asked, plan, permit);
        let answer = match self.patience() {
            None => first.await,
            Some(patience) => {
                tokio::pin!(first);
                match tokio::time::timeout(patience, &mut first).await {
                    Ok(answer) => answer,
                    Err(_) => {
                        add(&asked.counters.hedges, 1);
                        let second = async {
                            let permit = self.retry.concurrency.permit().await;
                            self.range(asked, twin, permit).await
                        };
                        tokio::pin!(second);
                        // If one request fails, the other may still succeed.
                        match select(first, second).await {
                            Either::Left((Err(_), second)) => second.await,
                            Either::Right((Err(_), first)) => first.await,
                            Either::Left((answer, _)) | Either::Right((answer, _)) => answer,
                        }
                    }
                }
            }
        };
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        recent.push_back(began.elapsed().as_secs_f64());
        if recent.len() > 64 {
            recent.pop_front();
        }
        answer
    }

    /// Return how long a request may take before it is sent again, or None if too few have been measured.
    fn patience(&self) -> Option<Duration> {
        let mut sorted: Vec<f64> = self.recent.lock().unwrap_or_else(PoisonError::into_inner).iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        (sorted.len() >= 16).then(|| Duration::from_secs_f64((3.0 * sorted[sorted.len() / 2]).max(0.002)))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::{Frozen, Recycled};

    #[test]
    fn pieces_are_filled_across_chunks_of_any_size() {
        let body: Vec<u8> = (0..200u8).collect();
        let pieces = vec![
            Piece { skip: 3, bytes: 10 },
            Piece { skip: 0, bytes: 0 },
            Piece { skip: 50, bytes: 1 },
            Piece { skip: 1, bytes: 135 },
        ];
        for (size, placed, shared) in
            (1..=200).flat_map(|size| [(size, false, false), (size, false, true), (size, true, true)])
        {
            let seen = Mutex::new(Vec::new());
            let see = |index: usize, piece: &Bytes| {
                seen.lock().unwrap_or_else(PoisonError::into_inner).push((index, piece.len()))
            };
            let mut plan = RangeRequest { pieces: pieces.clone(), shared, ..RangeRequest::plain("x", 0, 0, None) };
            let mut rest = Recycled::new(146, 64 << 20).unwrap().slot();
            let memory = rest.owner();
            plan.slots = pieces.iter().filter(|_| placed).map(|piece| Some(rest.split_to(piece.bytes))).collect();
            let mut filling = Filling::new(plan, &see);
            body.chunks(size).for_each(|chunk| filling.take(Bytes::copy_from_slice(chunk)));
            assert_eq!(filling.taken, 200);
            assert_eq!(Frozen::joined(&memory, filling.done.iter().map(|piece| &piece[..])).is_some(), placed);
            assert_eq!(filling.done, [body[3..13].to_vec(), Vec::new(), body[63..64].to_vec(), body[65..200].to_vec()]);
            drop(filling);
            assert_eq!(seen.into_inner().unwrap_or_default(), [(0, 10), (1, 0), (2, 1), (3, 135)]);
        }
    }
}
