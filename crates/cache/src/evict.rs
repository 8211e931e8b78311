//! Eviction of blocks that no plan needs: the oldest of a sample of blocks, by the time of their last use.
//!
//! A sample instead of a list, because no process knows all blocks of a shared cache. With 64 candidates, the victims are among the oldest
//! twentieth of all blocks, except one time in thirty (0.95^64).

use std::collections::hash_map::RandomState;
use std::fs::DirEntry;
use std::hash::{BuildHasher as _, Hasher as _};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::drive::Drive;
use crate::extent::{BLOCK_PAGES, Extent, PAGE_BYTES};
use crate::flight::WHOLE;
use crate::place::mix;
use crate::registry::Registered;
use crate::usage::{Record, cut};

/// Number of blocks from which the oldest are chosen.
const CANDIDATES: usize = 64;
/// Rounds without success after which a drive counts as having no room.
const ROUNDS: usize = 4;
/// At least this much is evicted at a time, so that eviction costs little for each page.
const LEAST_BYTES: u64 = 4 << 20;

/// A block that may be evicted.
struct Candidate {
    stamp: u32,
    extent: usize,
    block: u32,
}

/// Evict bytes of one store, unless it is pinned or a running plan reads it. Returns how many were freed.
pub fn from_store(drive: &Drive, store: &str, bytes: u64) -> io::Result<u64> {
    let is_guarded = drive.guarded()?;
    if drive.usage.stores()?.iter().any(|record| record.store == cut(store) && is_guarded(record)) {
        return Ok(0);
    }
    evict(drive, bytes, |_| Ok(Some(drive.store_folder(store))))
}

/// Evict bytes of stores that are not pinned and that no running plan reads. Returns how many were freed.
pub fn from_all(drive: &Drive, bytes: u64) -> io::Result<u64> {
    let is_guarded = drive.guarded()?;
    let is_idle = |record: &Record| record.counts.bytes > 0 && !is_guarded(record);
    if !drive.usage.stores()?.iter().any(is_idle) {
        return Ok(0);
    }
    evict(drive, bytes, |random| {
        let stores: Vec<Record> = drive.usage.stores()?.into_iter().filter(is_idle).collect();
        // A store is chosen as often as it has bytes.
        let total: u64 = stores.iter().map(|store| store.counts.bytes).sum();
        let mut left = if total == 0 { 0 } else { random % total };
        let chosen = stores.iter().find(|store| {
            left < store.counts.bytes || {
                left -= store.counts.bytes;
                false
            }
        });
        Ok(chosen.map(|store| drive.store_folder(&store.store)))
    })
}

/// Evict bytes from the folders that `choose` returns for random numbers.
fn evict(drive: &Drive, bytes: u64, choose: impl Fn(u64) -> io::Result<Option<PathBuf>>) -> io::Result<u64> {
    let budget = drive.usage.total()?.budget_bytes;
    let wanted = bytes.max(LEAST_BYTES.min(budget / 16));
    let (mut freed, mut failed, mut random) = (0, 0, seed());
    while freed < wanted && failed < ROUNDS {
        let (extents, mut candidates) = sample(&choose, &mut random)?;
        candidates.sort_unstable_by_key(|candidate| candidate.stamp);
        // Only the older half of a sample is evicted. The next sample has others.
        candidates.truncate(candidates.len().div_ceil(2));
        let before = freed;
        for candidate in candidates {
            if freed >= wanted {
                break;
            }
            freed += clear_block(drive, &extents[candidate.extent], candidate.block)?;
        }
        failed = if freed == before { failed + 1 } else { 0 };
    }
    Ok(freed)
}

/// Choose blocks at random.
fn sample(choose: &impl Fn(u64) -> io::Result<Option<PathBuf>>, random: &mut u64) -> io::Result<(Vec<Extent>, Vec<Candidate>)> {
    let (mut extents, mut candidates) = (Vec::new(), Vec::new());
    for _ in 0..CANDIDATES {
        let Some(store) = choose(next(random))? else { continue };
        let Some(folder) = one_of(&store, next(random))? else { continue };
        let Some(path) = one_of(&folder, next(random))? else { continue };
        let Some(extent) = Extent::open_any(&path)? else { continue };
        let (Ok(stamps), Ok(table)) = (extent.stamps(), extent.table(0..extent.pages())) else { continue };
        let cached = |block: &u32| table[(block * BLOCK_PAGES) as usize..].iter().take(BLOCK_PAGES as usize).any(|crc| *crc != 0);
        let blocks: Vec<u32> = (0..stamps.len() as u32).filter(cached).collect();
        let at = extents.len();
        // A few blocks of each extent, so that one large extent does not fill the sample.
        let most = (CANDIDATES / 8).min(blocks.len());
        let begin = if blocks.is_empty() { 0 } else { next(random) as usize % blocks.len() };
        candidates.extend((0..most).map(|step| {
            let block = blocks[(begin + step) % blocks.len()];
            Candidate { stamp: stamps[block as usize], extent: at, block }
        }));
        if blocks.is_empty() {
            // An extent without pages still uses space.
            candidates.push(Candidate { stamp: 0, extent: at, block: 0 });
        }
        extents.push(extent);
        if candidates.len() >= CANDIDATES {
            break;
        }
    }
    Ok((extents, candidates))
}

/// Evict a block, and the file of its extent if that was the last one. Returns the bytes that were freed.
fn clear_block(drive: &Drive, extent: &Extent, block: u32) -> io::Result<u64> {
    Ok(clear(drive, extent, block * BLOCK_PAGES..(block + 1) * BLOCK_PAGES, Duration::ZERO)? + remove_if_empty(drive, extent)?)
}

/// Remove pages. Returns the bytes that were freed: none if another operation uses the pages for longer than `patience`. A caller that holds
/// locks must not wait.
pub fn clear(drive: &Drive, extent: &Extent, pages: Range<u32>, patience: Duration) -> io::Result<u64> {
    let Some(flight) = drive.flight()? else { return Ok(0) };
    let pages = pages.start..pages.end.min(extent.pages());
    if !flight.lock(extent.hash(), pages.clone(), patience)? || !extent.is_linked() {
        return Ok(0);
    }
    let cached = extent.table(pages.clone())?.iter().filter(|crc| **crc != 0).count() as u64;
    if cached > 0 {
        extent.clear(pages.clone())?;
        drive.usage.release(extent.key().store(), cached * PAGE_BYTES, cached * PAGE_BYTES)?;
    }
    Ok(cached * PAGE_BYTES)
}

/// Remove an extent's file if it has no pages. Returns the bytes that were freed.
fn remove_if_empty(drive: &Drive, extent: &Extent) -> io::Result<u64> {
    if extent.table(0..extent.pages())?.iter().any(|crc| *crc != 0) {
        return Ok(0);
    }
    remove(drive, extent, |crcs| crcs.iter().all(|crc| *crc == 0))
}

/// Remove an extent's file if no operation uses it and `when` agrees. Returns the bytes that were freed.
pub fn remove(drive: &Drive, extent: &Extent, when: impl Fn(&[u32]) -> bool) -> io::Result<u64> {
    let Some(flight) = drive.flight()? else { return Ok(0) };
    if !flight.try_lock(extent.hash(), WHOLE)? || !extent.is_linked() {
        return Ok(0);
    }
    let crcs = extent.table(0..extent.pages())?;
    if !when(&crcs) {
        return Ok(0);
    }
    let pages = crcs.iter().filter(|crc| **crc != 0).count() as u64 * PAGE_BYTES;
    let overhead = extent.overhead_now()?;
    let _mark = Registered::new(&drive.pending_folder(), extent.key().store().as_bytes())?;
    drive.unlink(extent)?;
    drive.usage.release(extent.key().store(), pages + overhead, pages)?;
    Ok(pages + overhead)
}

fn seed() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Return the next random number.
fn next(random: &mut u64) -> u64 {
    *random = mix(*random);
    *random
}

/// Return one of the entries of a folder.
fn one_of(folder: &Path, random: u64) -> io::Result<Option<PathBuf>> {
    let entries: Vec<DirEntry> = match std::fs::read_dir(folder) {
        // Other programs leave files in any folder.
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => return Ok(None),
        other => other?.collect::<io::Result<_>>()?,
    };
    Ok(if entries.is_empty() { None } else { Some(entries[random as usize % entries.len()].path()) })
}
