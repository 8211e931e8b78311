//! Reads of immutable objects: whole, by ranges, as streams, or mapped.

use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use penstock_error::{Error, Result};

use crate::counters::Counters;
use crate::ranges::{RangeRequest, RequestCost, Then};

/// The best way to read an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Use `map`: the object is mapped into memory, and reads need no further calls.
    Mapped,
    /// Use `fetch`: callers plan all ranges in advance.
    Ranged,
    /// Like `Ranged`, but `stream` reads large values straight into their destination.
    Streamed,
}

/// The order in which a mapped object will be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    InOrder,
    Random,
}

impl Access {
    pub fn is_mapped(self) -> bool {
        self == Access::Mapped
    }
}

/// What callers know of a store before they read from it. The default suits a local disk. A reader that wraps another one changes some of these, and takes
/// over the rest.
#[derive(Debug, Clone, Copy)]
pub struct Features {
    /// The best way to read each object, or None if objects differ.
    pub access: Option<Access>,
    /// The maximum length of one request. Longer reads are split into concurrent requests.
    pub range_bytes: u64,
    pub request_cost: RequestCost,
    /// The maximum length of a streamed range, or 0 if the store does not support streams.
    pub stream_bytes: u64,
    /// Whether `fetch` writes pieces into the slots of a range.
    pub fills_slots: bool,
    /// How long one operation may take before it fails.
    pub deadline: Duration,
}

impl Default for Features {
    fn default() -> Features {
        Features {
            access: Some(Access::Mapped),
            range_bytes: u64::MAX,
            // A local disk handles many cheap requests at once.
            request_cost: RequestCost { gap_bytes: 8 << 10, waste: 1 },
            stream_bytes: 0,
            fills_slots: false,
            deadline: Duration::from_secs(60),
        }
    }
}

/// Objects below one root, which are read by name. Names are relative, with `/` between parts.
pub trait Read: Send + Sync + Debug {
    /// Return the root, as shown in messages.
    fn uri(&self) -> &str;

    /// Return a text that differs between two stores of different objects, without secrets. A cache uses it in its keys.
    fn identity(&self) -> String {
        self.uri().to_owned()
    }

    /// Cost: no requests.
    fn features(&self) -> Features;

    /// Return the counters of requests and bytes.
    fn counters(&self) -> &Counters;

    /// Read a whole object. Cost: one request.
    fn read(&self, name: &str) -> Result<Bytes>;

    /// Return the best way to read an object. Cost: no requests.
    fn access(&self, _name: &str) -> Access {
        self.features().access.unwrap_or(Access::Ranged)
    }

    /// Read many ranges and return the pieces of each. Cost: one request per range; the store chooses how many run at once.
    fn fetch(&self, ranges: Vec<RangeRequest>) -> Vec<Result<Vec<Bytes>>> {
        self.fetch_then(ranges, Arc::new(|_, _, _| {}))
    }

    /// Like `fetch`, but pass each piece to `then` as soon as it arrives, while it is still in the CPU cache.
    fn fetch_then(&self, ranges: Vec<RangeRequest>, then: Then) -> Vec<Result<Vec<Bytes>>>;

    /// Read each range into the store's reusable memory, or into its target if given, and pass its bytes to `see` as they arrive.
    /// Ranges arrive in any order. Use this for bytes that are consumed immediately and not kept. Cost: one request per range,
    /// many of them concurrent. Bytes are copied into a target only if the device cannot write there directly.
    fn stream(
        &self,
        ranges: &[RangeRequest],
        _targets: Option<&mut [&mut [u8]]>,
        _see: &mut dyn FnMut(usize, &[u8]),
    ) -> Vec<Result<()>> {
        ranges
            .iter()
            .map(|_| Err(Error::new("internal", format!("`{}` does not support streams", self.uri()))))
            .collect()
    }

    /// Make an immutable object of known length readable at memory speed, without a copy if possible.
    fn map(&self, name: &str, bytes: u64) -> Result<Bytes>;

    /// Hint that part of a mapped object will be read soon. Does nothing in stores that do not map objects.
    fn will_need(&self, _part: &[u8]) {}

    /// Return whether a short part of a mapped object is in memory, or true if the store does not know.
    fn is_resident(&self, _part: &[u8]) -> bool {
        true
    }

    /// Hint how a whole mapped object will be read. Does nothing in stores that do not map objects.
    fn will_read(&self, _whole: &[u8], _pattern: Pattern) {}

    /// Report that a read of these bytes returned damaged ones, so that the next read does not return a cached copy of them.
    fn distrust(&self, _name: &str, _begin: u64, _bytes: u64) {}
}
