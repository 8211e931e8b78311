//! Where bytes lie: named, immutable objects, one create-only put with three answers, and one overwrite for hints.
//!
//! Knows no format. [`Local`] is a folder on disk, [`Memory`] one process; object stores come beside them, file by file.
//! `conformance` holds every one of them to the same promises.

mod allocator;
mod buffer;
pub mod conformance;
mod counters;
mod direct;
mod disk;
mod local;
mod memory;
mod options;
pub mod process;
mod remote;
mod write_behind;

use std::fmt::Debug;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use penstock_error::{Error, Result};

pub use allocator::Returning;
pub use buffer::{Frozen, Recycled, Slot};
pub use counters::{Counters, Counts};
pub use disk::{Disk, File, FileSystem, check_length};
pub use local::Local;
pub use memory::Memory;
pub use options::{Io, Options};
pub use remote::Remote;

/// The answer to a create-only put.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Created {
    /// This body now stands under the name.
    Created,
    /// Something stood there already; only reading it tells whose it is.
    Exists,
    /// The reply was lost: it may stand there or not.
    Unknown,
}

/// Part of an object: pieces of it, one after the other, with gaps that nobody wants between them.
#[derive(Debug)]
pub struct RangeRequest {
    pub name: String,
    pub begin: u64,
    pub pieces: Vec<Piece>,
    /// What the whole object must measure, where that is known: another length is `object-truncated`.
    pub object_bytes: Option<u64>,
    /// Pieces may be parts of larger buffers: cheaper, but they hold on to more memory than they measure.
    pub shared: bool,
    /// Where each piece may be put, by a store that `fills_slots`; without a slot it gets memory of its own.
    pub slots: Vec<Option<Slot>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Bytes before it that are not wanted.
    pub skip: u64,
    pub bytes: usize,
}

impl RangeRequest {
    /// One piece.
    pub fn plain(name: &str, begin: u64, bytes: u64, object_bytes: Option<u64>) -> RangeRequest {
        let pieces = vec![Piece { skip: 0, bytes: bytes as usize }];
        RangeRequest { name: name.into(), begin, pieces, object_bytes, shared: false, slots: Vec::new() }
    }

    /// The same pieces, in memory of their own.
    pub fn twin(&self) -> RangeRequest {
        let (name, pieces) = (self.name.clone(), self.pieces.clone());
        RangeRequest { name, begin: self.begin, pieces, object_bytes: self.object_bytes, shared: self.shared, slots: Vec::new() }
    }

    pub fn end(&self) -> u64 {
        self.begin + self.pieces.iter().map(|piece| piece.skip + piece.bytes as u64).sum::<u64>()
    }
}

/// What one more request costs, said in bytes: those that come in the same time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestCost {
    /// A gap up to this long is read along.
    pub gap_bytes: u64,
    /// Bytes of gaps to bytes wanted, at most.
    pub waste: u64,
}

/// Called with the number of a range, the number of a piece in it, and the piece, on whatever thread it arrived.
pub type Then = Arc<dyn Fn(usize, usize, &Bytes) + Send + Sync>;

/// A store of named objects below one root. Names are relative, with `/` between parts.
pub trait Storage: Send + Sync + Debug {
    /// The root, for messages.
    fn uri(&self) -> &str;

    /// Whole object. Cost: one request.
    fn read(&self, name: &str) -> Result<Bytes>;

    /// Whether objects are best read by `map`; else by `fetch`, which knows what it needs before it asks.
    fn mapped(&self) -> bool {
        true
    }

    /// The longest range that is worth asking for at once: longer reads run side by side.
    fn range_bytes(&self) -> u64 {
        u64::MAX
    }

    /// What a request costs here. A local disk has many in flight and little to do for each.
    fn request_cost(&self) -> RequestCost {
        RequestCost { gap_bytes: 8 << 10, waste: 1 }
    }

    /// Whether pieces are put into slots where a range has them.
    fn fills_slots(&self) -> bool {
        false
    }

    /// Whether the root may come to lead elsewhere while it is used: paths with links in them, folders that are renamed.
    fn moves(&self) -> bool {
        false
    }

    /// The same store, its root held: names stay below what the root is now, wherever the path comes to lead. None where a root does not
    /// move, or cannot be held.
    fn held(&self) -> Result<Option<Box<dyn Storage>>> {
        Ok(None)
    }

    /// Whether the path of a held root still leads to it.
    fn in_place(&self) -> bool {
        true
    }

    /// How long one operation may take before it fails.
    fn deadline(&self) -> Duration {
        Duration::from_secs(60)
    }

    /// How far this machine's clock is from the store's, where the store told its time.
    fn clock_skew(&self) -> Option<Duration> {
        None
    }

    /// Read many ranges at once: for each, its pieces as buffers of their own. Cost: one request a range, as many at once as do good.
    fn fetch(&self, ranges: Vec<RangeRequest>) -> Vec<Result<Vec<Bytes>>> {
        self.fetch_then(ranges, Arc::new(|_, _, _| {}))
    }

    /// As `fetch`; `then` sees each piece as soon as it is there, while the processor's cache holds it.
    fn fetch_then(&self, ranges: Vec<RangeRequest>, then: Then) -> Vec<Result<Vec<Bytes>>>;

    /// The longest range that `stream` reads; 0 where it reads none.
    fn stream_bytes(&self) -> u64 {
        0
    }

    /// Read ranges into memory that the store uses again, or into a target for each, and show all bytes of each to `see` when they
    /// are there, in any order: for what goes to its place at once and is not kept. Cost: one request a range, many at
    /// once; a copy into the target only where a device cannot write there itself.
    fn stream(&self, ranges: &[RangeRequest], _targets: Option<&mut [&mut [u8]]>, _see: &mut dyn FnMut(usize, &[u8])) -> Vec<Result<()>> {
        ranges.iter().map(|_| Err(Error::new("internal", format!("`{}` has no streams", self.uri())))).collect()
    }

    /// The first few names below a folder in ascending order; nothing at all where the store does not list in order.
    fn newest(&self, _folder: &str) -> Result<Option<Vec<String>>> {
        Ok(None)
    }

    /// Make an immutable object of known length readable at memory speed, without copying where that can be.
    fn map(&self, name: &str, bytes: u64) -> Result<Bytes>;

    /// Tell that a part of what `map` gave will be read soon. Costs nothing where that means nothing.
    fn will_need(&self, _part: &[u8]) {}

    /// Tell whether all of what `map` gave will be read in order, or at random. Costs nothing where that means nothing.
    fn will_read(&self, _whole: &[u8], _in_order: bool) {}

    /// Whether the object is there.
    fn exists(&self, name: &str) -> Result<bool>;

    /// Names and sizes directly below a folder, in no order; a folder that is not there is empty.
    fn list(&self, folder: &str) -> Result<Vec<(String, u64)>>;

    /// Write an immutable object whose random name nobody else uses. Durable after `sync` of its folder.
    fn put(&self, name: &str, body: &[u8]) -> Result<()> {
        let mut writer = self.writer(name)?;
        writer.write(body.to_vec())?;
        writer.finish()
    }

    /// Begin an immutable object that is written piece by piece; it vanishes when dropped unfinished.
    fn writer(&self, name: &str) -> Result<Box<dyn ObjectWriter>>;

    /// Return a number that differs between this root and a copy of it, never 0. It survives renames and writes. None if the store has no such number.
    fn place(&self) -> Option<u64> {
        None
    }

    /// Whether `list` works at all: plain web servers have none.
    fn lists(&self) -> bool {
        true
    }

    /// Make the names that were put below these folders survive a power loss.
    fn sync(&self, folders: &[&str]) -> Result<()>;

    /// Put an object only if the name is free, durably.
    fn create(&self, name: &str, body: &[u8]) -> Result<Created>;

    /// Overwrite a hint; not durable, but never half-written for a reader.
    fn overwrite(&self, name: &str, body: &[u8]) -> Result<()>;

    /// Remove an object; one that is not there is no error.
    fn delete(&self, name: &str) -> Result<()>;

    /// Show the names of all objects, in no order, until `see` has enough; of folders, where there are such, with `/` at the end.
    fn survey(&self, see: &mut dyn FnMut(&str) -> ControlFlow<()>) -> Result<()>;

    /// Make the root, and prove the store. What is there stays.
    fn initialise(&self) -> Result<()>;

    /// Hold the store to create-only puts, once a process: `unsupported-storage` where one of several creates of a name does not win, or
    /// a later one does. A dataset may have been copied to a store that could not have held it from the beginning.
    fn prove(&self) -> Result<()>;

    /// `read-only` where nothing can be written, whoever asks. Costs no request.
    fn writable(&self) -> Result<()> {
        Ok(())
    }

    /// Requests and bytes so far.
    fn counters(&self) -> &Counters;
}

/// Answers without certainty before a create is given up.
pub const CERTAIN_TRIES: u32 = 20;

/// A create whose answer is certain: the same body again after each lost answer; `commit-state-unknown` if none comes, or if a later try
/// fails, as an earlier one may have been carried out. Under a name that nobody else uses, `Exists` is then an own earlier try.
pub fn create_certainly(store: &dyn Storage, name: &str, body: &[u8]) -> Result<Created> {
    let began = std::time::Instant::now();
    let mut why = String::new();
    for tries in 0..CERTAIN_TRIES {
        match store.create(name, body) {
            Ok(Created::Unknown) => {}
            Ok(certain) => return Ok(certain),
            Err(error) if tries == 0 => return Err(error),
            Err(error) => {
                why = format!(": {}", error.message());
                break;
            }
        }
        if began.elapsed() > store.deadline() || process::interrupted() {
            break;
        }
        std::thread::sleep(Duration::from_millis(10)); // Let a passing fault pass.
    }
    let text = format!("cannot tell whether `{}/{name}` was created, after {:.1?}{why}", store.uri(), began.elapsed());
    Err(Error::new("commit-state-unknown", text).hint("look whether it is there when the storage answers again"))
}

/// An object being written.
pub trait ObjectWriter: Send {
    /// Add bytes at the end. They may travel later, and a failure may come with a later call.
    fn write(&mut self, bytes: Vec<u8>) -> Result<()>;
    /// Make the content durable. The name is durable after `Storage::sync`.
    fn finish(self: Box<Self>) -> Result<()>;
}

/// Open the store that a URI names: a path, `file://`, `memory://`, `s3://`, `gs://`, `az://`, `http://` or `https://`.
pub fn open(uri: &str, options: &Options) -> Result<Box<dyn Storage>> {
    let path = match uri.split_once("://") {
        Some(("memory", name)) => return Ok(Box::new(Memory::named(name))),
        Some(("s3" | "gs" | "az" | "http" | "https", _)) => return Ok(Box::new(Remote::open(uri, options)?)),
        None => uri.to_owned(),
        Some(("file", path)) => path.to_owned(),
        Some((scheme, _)) => {
            return Err(Error::new("unsupported-storage", format!("cannot open `{uri}`: no storage for `{scheme}://` in this release"))
                .hint("use a local path, file://, memory://, s3://, gs://, az://, http:// or https://"));
        }
    };
    if path.is_empty() || path.contains('\0') {
        return Err(Error::new("invalid-uri", format!("cannot open `{uri}`: not a path")));
    }
    Ok(Box::new(Local::open(std::path::Path::new(&path), Arc::new(Disk), options.io)?))
}
