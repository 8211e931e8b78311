//! The file system calls that `Local` uses, as a trait, so that `testkit` can run the same code on a simulated disk that crashes.

use std::fmt::Debug;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use bytes::Bytes;

use crate::listing::ListedObject;
use crate::ranges::RangeRequest;
use crate::read::Pattern;

/// A file system. Paths are absolute.
pub trait FileSystem: Send + Sync + Debug {
    /// Create a file. Fails if the path exists.
    fn create(&self, path: &Path) -> io::Result<Box<dyn File>>;
    fn read(&self, path: &Path) -> io::Result<Bytes>;
    /// Return whether the files are real operating-system files, which `ring` can read.
    fn is_real(&self) -> bool {
        false
    }
    /// Read the pieces of a range. Fails with `UnexpectedEof` if the file has an unexpected length.
    fn read_range(&self, path: &Path, range: &RangeRequest) -> io::Result<Vec<Bytes>>;
    /// Map a file of exactly `bytes` bytes. Fails with `UnexpectedEof` if the file has a different length.
    fn map(&self, path: &Path, bytes: u64) -> io::Result<Bytes>;
    /// Hint that part of a mapped file will be read soon.
    fn will_need(&self, _part: &[u8]) {}
    /// Return whether a short part of a mapped file is in the page cache, or true if the system does not know.
    fn is_resident(&self, _part: &[u8]) -> bool {
        true
    }
    /// Hint how a whole mapped file will be read.
    fn will_read(&self, _whole: &[u8], _pattern: Pattern) {}
    fn exists(&self, path: &Path) -> io::Result<bool>;
    /// Give a file its final name. Returns whether the first one remains, because the file system can only link. Fails with
    /// `AlreadyExists` if the name is taken.
    fn publish(&self, from: &Path, to: &Path) -> io::Result<bool>;
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Overwrite the bytes of a file. Returns false, without any effect, unless the file has the same length and no other name.
    fn overwrite(&self, path: &Path, body: &[u8]) -> io::Result<bool>;
    fn remove(&self, path: &Path) -> io::Result<()>;
    fn create_folder(&self, path: &Path) -> io::Result<()>;
    fn sync_folder(&self, path: &Path) -> io::Result<()>;
    /// Return the files in a folder.
    fn list(&self, path: &Path) -> io::Result<Vec<ListedObject>>;
    /// Return the names of all entries in a folder, and whether each entry is a folder.
    fn entries(&self, path: &Path) -> io::Result<Vec<(String, bool)>>;
    /// Return how many names (hard links) a file has.
    fn links(&self, path: &Path) -> io::Result<u64>;
    /// Hold a folder open. The returned path leads to the folder even after a rename. Returns None if unsupported.
    fn hold(&self, _folder: &Path) -> io::Result<Option<HeldFolder>> {
        Ok(None)
    }
    /// Return a nonzero number that identifies a folder, or None if the number is unknown.
    fn place(&self, _folder: &Path) -> Option<u64> {
        None
    }
}

/// A folder that is held open.
#[derive(Debug)]
pub struct HeldFolder {
    pub path: PathBuf,
    /// The folder's `place` number.
    pub place: u64,
    pub(super) _folder: fs::File,
}

/// An open file.
pub trait File: Send {
    /// Append bytes. The write may happen later, and a later call may report its failure. `sync` waits for all writes.
    fn write(&mut self, bytes: Vec<u8>) -> io::Result<()>;
    fn sync(&mut self) -> io::Result<()>;
}
