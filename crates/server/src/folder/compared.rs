//! Files that were compared with their ETags, because something about them was changed by other means: a mode, a name, or all of a copied folder.
//!
//! What was found is kept in memory, and never in the file: a record that is written again would change the time of the file, which others compare. It would
//! also hide a rewrite at the same time. So the file is read again after a restart.

use std::fs::{self, File};
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::Duration;

use s3s::crypto::{Checksum as _, Md5};

use crate::meta::since_1970;
use crate::upload::hex;

/// How much later a file may change because its record is written, and because it comes to its place. It is more than a step of the clock of file systems.
pub const SLACK: Duration = Duration::from_millis(20);

/// What is read of a file at once.
const READ_BYTES: u64 = 1 << 20;
/// Files that are remembered: 8 MiB, if there are so many.
const REMEMBERED: usize = 1 << 20;
/// Number of locks that readers of files share.
const LOCKS: usize = 4096;
/// Comparing a file of this size takes so long that clients give up.
const LONG_BYTES: u64 = if cfg!(test) { 1 << 20 } else { 1 << 30 };
/// Requests that compare such files, or wait for that. More are refused, so that there are threads for others.
const LONG: usize = 16;

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

/// The states of files that were found to have their ETags, as hashes. Another state may take the place of one.
static KNOWN: LazyLock<Known> = LazyLock::new(|| Known {
    seed: RandomState::new(),
    same: std::iter::repeat_with(AtomicU64::default).take(REMEMBERED).collect(),
    turns: std::iter::repeat_with(Mutex::default).take(LOCKS).collect(),
});

struct Known {
    seed: RandomState,
    same: Vec<AtomicU64>,
    /// Readers of one file wait for the first of them.
    turns: Vec<Mutex<()>>,
}

static LONG_NOW: AtomicUsize = AtomicUsize::new(0);

/// One of the requests that compare large files.
struct Long;

impl Long {
    fn of(bytes: u64) -> io::Result<Option<Long>> {
        if bytes < LONG_BYTES {
            return Ok(None);
        }
        let now = Long;
        match LONG_NOW.fetch_add(1, Relaxed) {
            before if before < LONG => Ok(Some(now)),
            _ => Err(io::Error::new(io::ErrorKind::WouldBlock, "large files are being compared with their ETags; try again")),
        }
    }
}

impl Drop for Long {
    fn drop(&mut self) {
        LONG_NOW.fetch_sub(1, Relaxed);
    }
}

/// Compare a file, as it was found, with the ETag of an object that has these parts. Cost: reads the file, unless it was compared in this state before.
pub fn compare(file: &File, found: &fs::Metadata, etag: &str, parts: Option<&[u64]>) -> io::Result<Compared> {
    let state = (found.dev(), found.ino(), changed_ns(found), modified_ns(found), found.len(), etag);
    // An empty place has 0.
    let hash = KNOWN.seed.hash_one(state) | 1;
    let place = &KNOWN.same[(hash >> 1) as usize % REMEMBERED];
    if place.load(Relaxed) == hash {
        return Ok(Compared::Same);
    }
    let _long = Long::of(found.len())?;
    let _turn = KNOWN.turns[found.ino() as usize % LOCKS].lock().unwrap_or_else(PoisonError::into_inner);
    if place.load(Relaxed) == hash {
        return Ok(Compared::Same);
    }
    wait_for_clock(found);
    let own = match (etag.split_once('-'), parts) {
        (None, _) if etag.len() == 32 => hex(&md5_of(file, 0, found.len())?),
        (Some((_, count)), Some(parts)) if count.parse() == Ok(parts.len()) => {
            let (mut all, mut begin) = (Md5::new(), 0);
            for bytes in parts {
                all.update(&md5_of(file, begin, *bytes)?);
                begin += bytes;
            }
            format!("{}-{}", hex(all.finalize().as_ref()), parts.len())
        }
        _ => return Ok(Compared::Unknown),
    };
    if changed_ns(&file.metadata()?) != changed_ns(found) {
        return Ok(Compared::Changed);
    }
    if own != etag {
        return Ok(Compared::Other);
    }
    place.store(hash, Relaxed);
    Ok(Compared::Same)
}

/// Wait until a later change would give a file another time: clocks of file systems have steps of some milliseconds.
fn wait_for_clock(found: &fs::Metadata) {
    let changed = Duration::from_nanos(u64::try_from(changed_ns(found)).unwrap_or_default());
    std::thread::sleep(SLACK.saturating_sub(since_1970().saturating_sub(changed)));
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

#[cfg(test)]
pub mod tests {
    use super::*;

    /// The requests that compare large files are counted for the whole process, so tests take turns.
    pub static TURN: Mutex<()> = Mutex::new(());

    /// Let as many requests compare large files as may.
    pub fn all_busy() -> io::Result<Vec<impl Sized>> {
        (0..LONG).map(|_| Long::of(LONG_BYTES)).collect()
    }

    #[test]
    fn large_files_do_not_take_all_requests() -> io::Result<()> {
        let _turn = TURN.lock();
        let large = all_busy()?;
        assert!(Long::of(LONG_BYTES).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock));
        assert!(Long::of(LONG_BYTES - 1)?.is_none());
        drop(large);
        assert!(Long::of(LONG_BYTES)?.is_some());
        Ok(())
    }
}
