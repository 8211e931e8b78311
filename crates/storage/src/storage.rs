//! The operations of a store of named objects.

use std::any::Any;
use std::fmt::Debug;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use penstock_error::{Error, Result};

use crate::access::{Access, Pattern};
use crate::counters::Counters;
use crate::kernel;
use crate::listing::{Entry, Page};
use crate::ranges::{RangeRequest, RequestCost, Then};

/// The result of a create-only put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Created {
    /// This body is now stored under the name.
    Created,
    /// The name was already taken. Only a read can show whether an earlier attempt by the same writer created the object.
    Exists,
    /// The reply was lost, so the object may or may not have been created.
    Unknown,
}

/// A turn, which ends when this is dropped.
#[derive(Default)]
pub struct Turn {
    pub(crate) lock: Option<std::fs::File>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        // A forked child may have the file open, so closing it here would not unlock it.
        self.lock.iter().for_each(|lock| drop(kernel::flock(lock, false)));
    }
}

/// A store of named objects below one root. Names are relative, with `/` between parts.
pub trait Storage: Send + Sync + Debug {
    /// Return the root, as shown in messages.
    fn uri(&self) -> &str;

    /// Return a text that differs between two stores of different objects, without secrets. A cache uses it in its keys.
    fn identity(&self) -> String {
        self.uri().to_owned()
    }

    /// Return the cache through which reads go, or None. The crate `cache` knows its type.
    fn cache(&self) -> Option<&(dyn Any + Send + Sync)> {
        None
    }

    /// Report that a read of these bytes returned damaged ones, so that the next read does not return a cached copy of them.
    fn distrust(&self, _name: &str, _begin: u64, _bytes: u64) {}

    /// Read a whole object. Cost: one request.
    fn read(&self, name: &str) -> Result<Bytes>;

    /// Return the best way to read an object. It may differ between objects only if `access_of_all` returns None.
    fn access(&self, _name: &str) -> Access {
        self.access_of_all().unwrap_or(Access::Ranged)
    }

    /// Return the access mode if all objects have the same one, so that callers need not check each object. Cost: no requests.
    fn access_of_all(&self) -> Option<Access> {
        Some(Access::Mapped)
    }

    /// Return the maximum length of one request. Longer reads are split into concurrent requests.
    fn range_bytes(&self) -> u64 {
        u64::MAX
    }

    /// Return the cost of a request. The default suits a local disk, which handles many cheap requests at once.
    fn request_cost(&self) -> RequestCost {
        RequestCost { gap_bytes: 8 << 10, waste: 1 }
    }

    /// Return whether `fetch` writes pieces into the slots of a range.
    fn fills_slots(&self) -> bool {
        false
    }

    /// Return whether the root path may later lead to a different folder, because of links in the path or renamed folders.
    fn moves(&self) -> bool {
        false
    }

    /// Return the same store with its root folder held open. Names resolve below that folder, even if its path later leads elsewhere.
    /// Returns None if the root cannot move or cannot be held open.
    fn held(&self) -> Result<Option<Box<dyn Storage>>> {
        Ok(None)
    }

    /// Return whether the path of a held root still leads to it.
    fn in_place(&self) -> bool {
        true
    }

    /// Return how long one operation may take before it fails.
    fn deadline(&self) -> Duration {
        Duration::from_secs(60)
    }

    /// Return the difference between this machine's clock and the store's, or None if the store has not reported its time.
    fn clock_skew(&self) -> Option<Duration> {
        None
    }

    /// Read many ranges and return the pieces of each. Cost: one request per range; the store chooses how many run at once.
    fn fetch(&self, ranges: Vec<RangeRequest>) -> Vec<Result<Vec<Bytes>>> {
        self.fetch_then(ranges, Arc::new(|_, _, _| {}))
    }

    /// Like `fetch`, but pass each piece to `then` as soon as it arrives, while it is still in the CPU cache.
    fn fetch_then(&self, ranges: Vec<RangeRequest>, then: Then) -> Vec<Result<Vec<Bytes>>>;

    /// Return the maximum length of a streamed range, or 0 if the store does not support streams.
    fn stream_bytes(&self) -> u64 {
        0
    }

    /// Read each range into the store's reusable memory, or into its target if given, and pass its bytes to `see` as they arrive.
    /// Ranges arrive in any order. Use this for bytes that are consumed immediately and not kept. Cost: one request per range,
    /// many of them concurrent. Bytes are copied into a target only if the device cannot write there directly.
    fn stream(&self, ranges: &[RangeRequest], _targets: Option<&mut [&mut [u8]]>, _see: &mut dyn FnMut(usize, &[u8])) -> Vec<Result<()>> {
        ranges.iter().map(|_| Err(Error::new("internal", format!("`{}` does not support streams", self.uri())))).collect()
    }

    /// Return the first few names below a folder in ascending order, or None if the store does not list in order.
    fn newest(&self, _folder: &str) -> Result<Option<Vec<String>>> {
        Ok(None)
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

    /// Return whether the object exists.
    fn exists(&self, name: &str) -> Result<bool>;

    /// Return a page of the objects directly below a folder. `after` is `next` from the previous page, or None for the first page.
    /// A missing folder is treated as empty. Cost: one request.
    fn list_page(&self, folder: &str, after: Option<&str>) -> Result<Page>;

    /// Return all objects directly below a folder. Cost: one request per page, and memory for all entries.
    fn list(&self, folder: &str) -> Result<Vec<Entry>> {
        let mut page = self.list_page(folder, None)?;
        let mut entries = page.entries;
        while let Some(after) = page.next {
            page = self.list_page(folder, Some(&after))?;
            entries.append(&mut page.entries);
        }
        Ok(entries)
    }

    /// Write an immutable object under a random name that no other writer uses. The object is durable once its folder is synced.
    fn put(&self, name: &str, body: &[u8]) -> Result<()> {
        let mut writer = self.writer(name)?;
        writer.write(body.to_vec())?;
        writer.finish()
    }

    /// Begin an immutable object that is written in pieces. Dropping the writer before `finish` discards the object.
    fn writer(&self, name: &str) -> Result<Box<dyn ObjectWriter>>;

    /// Return a nonzero number that differs between this root and any copy of it. Renames and writes do not change it.
    /// Returns None if the store has no such number.
    fn place(&self) -> Option<u64> {
        None
    }

    /// Return whether `list` works. Plain web servers have no listings.
    fn lists(&self) -> bool {
        true
    }

    /// Make all names created in these folders durable, so that they survive a power loss.
    fn sync(&self, folders: &[&str]) -> Result<()>;

    /// Wait for a turn to create objects in a folder, if other processes of this machine do so as well. The turn ends when the guard is
    /// dropped. It only saves attempts that fail: nothing depends on it, and after a short time the caller does not wait longer.
    fn turn(&self, _folder: &str) -> Turn {
        Turn::default()
    }

    /// Create an object durably, but only if its name is free.
    fn create(&self, name: &str, body: &[u8]) -> Result<Created>;

    /// Overwrite a hint. The new body is not durable, and a reader may see a mixture of both.
    fn overwrite(&self, name: &str, body: &[u8]) -> Result<()>;

    /// Remove an object. A missing object is not an error.
    fn delete(&self, name: &str) -> Result<()>;

    /// Pass the names of all objects to `see`, in no particular order, until `see` breaks. Folder names, if any, end with `/`.
    fn survey(&self, see: &mut dyn FnMut(&str) -> ControlFlow<()>) -> Result<()>;

    /// Create the root, and on a local disk check it with `prove`. Existing objects are kept.
    fn initialise(&self) -> Result<()>;

    /// Check create-only puts, once per opened store or process. Fails with `unsupported-storage` unless exactly one of several
    /// creates of a name succeeds. Writers also check existing datasets, which may have been copied to an unsupported store.
    fn prove(&self) -> Result<()>;

    /// Fail with `read-only` if the store never accepts writes. Cost: no requests.
    fn writable(&self) -> Result<()> {
        Ok(())
    }

    /// Return the counters of requests and bytes.
    fn counters(&self) -> &Counters;
}

/// An object being written.
pub trait ObjectWriter: Send {
    /// Append bytes. The write may happen later, and a later call may report its failure.
    fn write(&mut self, bytes: Vec<u8>) -> Result<()>;
    /// Make the content durable. The name is durable after `Storage::sync`.
    fn finish(self: Box<Self>) -> Result<()>;
}
