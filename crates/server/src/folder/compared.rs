//! Files that were compared with their ETags, because something about them was changed by other means: a mode, a name, or all of a copied folder.
//!
//! What was found is kept in memory, and never in the file: a record that is written again would change the time of the file, which others compare. It would
//! also hide a rewrite at the same time. So the file is read again after a restart.

use std::error::Error;
use std::fs::{self, File};
use std::hash::{BuildHasher as _, RandomState};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};
use std::time::Duration;
use std::{fmt, io};

use s3s::crypto::{Checksum as _, Md5};
use tokio::sync::{Mutex, Semaphore};
use tokio::task::JoinSet;

use crate::meta::since_1970;
use crate::upload::hex;

/// How much later a file may change because its record is written, and because it comes to its place. It is more than a step of the clock of file systems.
pub const SLACK: Duration = Duration::from_millis(20);

/// What is read of a file at once.
const READ_BYTES: u64 = 1 << 20;
/// Files that are remembered: 8 MiB, if there are so many.
const REMEMBERED: usize = 1 << 20;
/// Smaller files are compared where their records are read. Others take so long that requests wait without a thread, and clients may give up.
const LARGE_BYTES: u64 = 16 << 20;
/// Large files that are compared at once.
static TURNS: Semaphore = Semaphore::const_new(2);
/// One of these is held while a file is compared. Few large files share one.
static FILES: LazyLock<Vec<Arc<Mutex<()>>>> =
    LazyLock::new(|| std::iter::repeat_with(Arc::default).take(4096).collect());

/// Whether the bytes of a file have the ETag of its record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compared {
    Same,
    Other,
    /// The record does not have enough to say it.
    Unknown,
    /// The file was changed meanwhile.
    Changed,
}

/// What was found of files in some state, as hashes of the state and what was found. Another state may take the place of one.
static KNOWN: LazyLock<Known> = LazyLock::new(|| Known {
    seed: RandomState::new(),
    found: std::iter::repeat_with(AtomicU64::default).take(REMEMBERED).collect(),
});

struct Known {
    seed: RandomState,
    found: Vec<AtomicU64>,
}

/// The bit of a remembered hash that says whether the file has its ETag. The lowest bit is 1, because an empty place has 0.
const SAME: u64 = 2;

impl Known {
    /// Return the hash of the state of a file, and its place.
    fn place(&self, found: &fs::Metadata, etag: &str) -> (u64, &AtomicU64) {
        let state = (found.dev(), found.ino(), changed_ns(found), modified_ns(found), found.len(), etag);
        let hash = self.seed.hash_one(state);
        (hash & !SAME | 1, &self.found[(hash >> 2) as usize % REMEMBERED])
    }

    fn get(&self, found: &fs::Metadata, etag: &str) -> Option<Compared> {
        let (hash, place) = self.place(found, etag);
        match place.load(Relaxed) {
            value if value == hash => Some(Compared::Other),
            value if value == hash | SAME => Some(Compared::Same),
            _ => None,
        }
    }

    fn keep(&self, found: &fs::Metadata, etag: &str, is_same: bool) {
        let (hash, place) = self.place(found, etag);
        place.store(hash | if is_same { SAME } else { 0 }, Relaxed);
    }
}

/// An error that names a large file whose record cannot be believed before the file was compared. `settled` waits for that.
#[derive(Debug, Clone)]
pub struct Unsettled(Arc<Claim>);

/// A file, and what its record says of it.
#[derive(Debug)]
struct Claim {
    file: File,
    etag: String,
    parts: Option<Vec<u64>>,
}

impl fmt::Display for Unsettled {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a large file was changed and is being compared with its ETag; try again")
    }
}

impl Error for Unsettled {}

impl Unsettled {
    pub fn of(error: &(dyn Error + 'static)) -> Option<Unsettled> {
        error.downcast_ref::<io::Error>()?.get_ref()?.downcast_ref::<Unsettled>().cloned()
    }

    /// Wait for a turn, and compare the file. That runs to its end even if nobody waits any more: the next request finds the result. `held` is dropped when
    /// it ends, or when nobody waits for a turn any more.
    pub async fn compare(self, held: impl Send + 'static) -> io::Result<()> {
        // A task of its own: the body of a batch may not be polled while its client reads slowly, and would keep its turn from others.
        let mut waiting = JoinSet::new();
        waiting.spawn(async move {
            let _held = held;
            // Those that wait for one file take one turn together.
            let one = alone(&self.0.file)?.lock_owned().await;
            let turn = TURNS.acquire().await.map_err(io::Error::other)?;
            let compared = tokio::task::spawn_blocking(move || {
                let _turns = (one, turn);
                let Claim { file, etag, parts } = &*self.0;
                let found = file.metadata()?;
                if KNOWN.get(&found, etag).is_none() {
                    compare_now(file, &found, etag, parts.as_deref())?;
                }
                Ok(())
            });
            compared.await.map_err(io::Error::other)?
        });
        waiting.join_next().await.map_or(Ok(()), |joined| joined.map_err(io::Error::other)?)
    }
}

/// Return what is held while a file is compared.
pub fn alone(file: &File) -> io::Result<Arc<Mutex<()>>> {
    Ok(FILES[file.metadata()?.ino() as usize % FILES.len()].clone())
}

/// Compare a file, as it was found, with the ETag of an object that has these parts. Fails with `Unsettled` if the file is large, and was not compared in this
/// state before. Cost: reads a small file, unless it was compared in this state before.
pub fn compare(file: &File, found: &fs::Metadata, etag: &str, parts: Option<&[u64]>) -> io::Result<Compared> {
    let is_comparable = match etag.split_once('-') {
        None => etag.len() == 32,
        Some((_, count)) => parts.is_some_and(|parts| count.parse() == Ok(parts.len())),
    };
    if !is_comparable {
        return Ok(Compared::Unknown);
    }
    match KNOWN.get(found, etag) {
        Some(known) => Ok(known),
        None if found.len() < LARGE_BYTES => compare_now(file, found, etag, parts),
        None => {
            let claim = Claim { file: file.try_clone()?, etag: etag.to_owned(), parts: parts.map(<[u64]>::to_vec) };
            Err(io::Error::new(io::ErrorKind::WouldBlock, Unsettled(Arc::new(claim))))
        }
    }
}

/// Read a file, and remember whether it has its ETag.
pub fn compare_now(file: &File, found: &fs::Metadata, etag: &str, parts: Option<&[u64]>) -> io::Result<Compared> {
    wait_for_clock(found);
    let own = match etag_of(file, found.len(), parts.filter(|_| etag.contains('-'))) {
        // Another program has just cut it.
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(Compared::Changed),
        own => own?,
    };
    if changed_ns(&file.metadata()?) != changed_ns(found) {
        return Ok(Compared::Changed);
    }
    KNOWN.keep(found, etag, own == etag);
    Ok(if own == etag { Compared::Same } else { Compared::Other })
}

/// Wait until a later change would give a file another time: clocks of file systems have steps of some milliseconds.
fn wait_for_clock(found: &fs::Metadata) {
    let changed = Duration::from_nanos(u64::try_from(changed_ns(found)).unwrap_or_default());
    std::thread::sleep(SLACK.saturating_sub(since_1970().saturating_sub(changed)));
}

fn etag_of(file: &File, bytes: u64, parts: Option<&[u64]>) -> io::Result<String> {
    let Some(parts) = parts else { return Ok(hex(&md5_of(file, 0, bytes)?)) };
    let (mut all, mut begin) = (Md5::new(), 0);
    for bytes in parts {
        all.update(&md5_of(file, begin, *bytes)?);
        begin += bytes;
    }
    Ok(format!("{}-{}", hex(all.finalize().as_ref()), parts.len()))
}

fn md5_of(file: &File, begin: u64, bytes: u64) -> io::Result<Vec<u8>> {
    let (mut md5, mut read) = (Md5::new(), 0);
    let mut piece = vec![0; READ_BYTES.min(bytes) as usize];
    while read < bytes {
        let piece = &mut piece[..READ_BYTES.min(bytes - read) as usize];
        file.read_exact_at(piece, begin + read)?;
        md5.update(piece);
        read += piece.len() as u64;
    }
    Ok(md5.finalize().as_ref().to_vec())
}

pub fn modified_ns(found: &fs::Metadata) -> i64 {
    found.mtime().saturating_mul(1_000_000_000).saturating_add(found.mtime_nsec())
}

pub fn changed_ns(found: &fs::Metadata) -> i64 {
    found.ctime().saturating_mul(1_000_000_000).saturating_add(found.ctime_nsec())
}
