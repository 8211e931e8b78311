//! Ranges of objects, as requested from `Read::fetch` and `stream`.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::Slot;

/// A range of an object: consecutive pieces, with unwanted gaps between them.
#[derive(Debug)]
pub struct RangeRequest {
    pub name: String,
    pub begin: u64,
    pub pieces: Vec<Piece>,
    /// The expected length of the whole object, if known. Reading an object of any other length fails with `object-truncated`.
    pub object_bytes: Option<u64>,
    /// Whether pieces may be slices of larger buffers. This is cheaper, but each piece keeps its whole buffer alive.
    pub shared: bool,
    /// The destination of each piece, for a store that `fills_slots`. A piece without a slot gets newly allocated memory.
    pub slots: Vec<Option<Slot>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Unwanted bytes before the piece.
    pub skip: u64,
    pub bytes: usize,
}

impl RangeRequest {
    /// Build a range with a single piece and no gap.
    pub fn plain(name: &str, begin: u64, bytes: u64, object_bytes: Option<u64>) -> RangeRequest {
        let pieces = vec![Piece { skip: 0, bytes: bytes as usize }];
        RangeRequest { name: name.into(), begin, pieces, object_bytes, shared: false, slots: Vec::new() }
    }

    /// Build a range with the same pieces but no slots, so that the pieces get newly allocated memory.
    pub fn twin(&self) -> RangeRequest {
        let (name, pieces) = (self.name.clone(), self.pieces.clone());
        RangeRequest {
            name,
            begin: self.begin,
            pieces,
            object_bytes: self.object_bytes,
            shared: self.shared,
            slots: Vec::new(),
        }
    }

    /// Return where each piece is in the object.
    pub fn places(&self) -> impl Iterator<Item = Range<u64>> {
        self.pieces.iter().scan(self.begin, |end, piece| {
            let begin = *end + piece.skip;
            *end = begin + piece.bytes as u64;
            Some(begin..*end)
        })
    }

    pub fn end(&self) -> u64 {
        self.begin + self.pieces.iter().map(|piece| piece.skip + piece.bytes as u64).sum::<u64>()
    }
}

/// The cost of one more request, expressed as the number of bytes that could be read in the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestCost {
    /// Gaps of up to this length are read. A longer gap splits a range into two requests.
    pub gap_bytes: u64,
    /// Maximum ratio of gap bytes to wanted bytes.
    pub waste: u64,
}

/// A callback that receives the index of a range, the index of a piece in it, and the piece. The callback runs on the receiving thread.
pub type Then = Arc<dyn Fn(usize, usize, &Bytes) + Send + Sync>;
