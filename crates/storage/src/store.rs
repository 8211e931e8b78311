//! Changes and listings of a store of named objects.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use penstock_error::Result;

use crate::kernel;
use crate::listing::{ListedObject, Listing};
use crate::read::Read;

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

/// A store of named objects below one root.
pub trait Store: Read {
    /// Return whether the root path may later lead to a different folder, because of links in the path or renamed folders.
    fn moves(&self) -> bool {
        false
    }

    /// Return the same store with its root folder held open. Names resolve below that folder, even if its path later leads elsewhere.
    /// Returns None if the root cannot move or cannot be held open.
    fn held(&self) -> Result<Option<Arc<dyn Store>>> {
        Ok(None)
    }

    /// Return whether the path of a held root still leads to it.
    fn in_place(&self) -> bool {
        true
    }

    /// Return the difference between this machine's clock and the store's, or None if the store has not reported its time.
    fn clock_skew(&self) -> Option<Duration> {
        None
    }

    /// Return the first few names below a folder in ascending order, or None if the store does not list in order.
    fn newest(&self, _folder: &str) -> Result<Option<Vec<String>>> {
        Ok(None)
    }

    /// Return whether the object exists.
    fn exists(&self, name: &str) -> Result<bool>;

    /// Return a page of the objects directly below a folder. `after` is `next` from the previous page, or None for the first page.
    /// A missing folder is treated as empty. Cost: one request.
    fn list_page(&self, folder: &str, after: Option<&str>) -> Result<Listing>;

    /// Return all objects directly below a folder. Cost: one request per page, and memory for all entries.
    fn list(&self, folder: &str) -> Result<Vec<ListedObject>> {
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
}

/// An object being written.
pub trait ObjectWriter: Send {
    /// Append bytes. The write may happen later, and a later call may report its failure.
    fn write(&mut self, bytes: Vec<u8>) -> Result<()>;
    /// Make the content durable. The name is durable after `Store::sync`.
    fn finish(self: Box<Self>) -> Result<()>;
}
