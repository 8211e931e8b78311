//! Eviction of stretches that no plan needs: the oldest of a sample of stretches, by the time of their last use.
//!
//! A sample instead of a list, because no process knows all stretches of a shared cache. With 64 candidates, the victims are among the oldest
//! twentieth of all stretches, except one time in thirty (0.95^64).

use std::collections::hash_map::RandomState;
use std::fs::DirEntry;
use std::hash::{BuildHasher as _, Hasher as _};
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::drive::{Drive, PENDING};
use crate::extent::pages::stored_bytes;
use crate::extent::{Extent, STRETCH_PAGES};
use crate::flight::WHOLE;
use crate::place::mix;
use crate::registry::Registered;
use crate::usage::{UsageRecord, cut};

/// Number of stretches from which the oldest are chosen.
const CANDIDATES: usize = 64;
/// Rounds without success after which a drive counts as having no room.
const ROUNDS: usize = 4;
/// At least this much is evicted at a time, so that eviction costs little for each page.
const LEAST_BYTES: u64 = 4 << 20;

/// A stretch that may be evicted.
struct Candidate {
    stamp: u32,
    extent: usize,
    stretch: u32,
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
    let is_idle = |record: &UsageRecord| record.counts.bytes > 0 && !is_guarded(record);
    if !drive.usage.stores()?.iter().any(is_idle) {
        return Ok(0);
    }
    evict(drive, bytes, |random| {
        let stores: Vec<UsageRecord> = drive.usage.stores()?.into_iter().filter(is_idle).collect();
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
            let (extent, first) = (&extents[candidate.extent], candidate.stretch * STRETCH_PAGES);
            freed += clear(drive, extent, first..first + STRETCH_PAGES, Duration::ZERO)?;
            // The file goes with its last page.
            if stored_bytes(&extent.whole_table()?) == 0 {
                freed += remove(drive, extent, |crcs| stored_bytes(crcs) == 0)?;
            }
        }
        failed = if freed == before { failed + 1 } else { 0 };
    }
    Ok(freed)
}

/// Choose stretches at random.
fn sample(
    choose: &impl Fn(u64) -> io::Result<Option<PathBuf>>,
    random: &mut u64,
) -> io::Result<(Vec<Extent>, Vec<Candidate>)> {
    let (mut extents, mut candidates) = (Vec::new(), Vec::new());
    for _ in 0..CANDIDATES {
        let Some(store) = choose(next(random))? else { continue };
        let Some(folder) = one_of(&store, next(random))? else { continue };
        let Some(path) = one_of(&folder, next(random))? else { continue };
        let Some(extent) = Extent::open_any(&path)? else { continue };
        let (Ok(stamps), Ok(table)) = (extent.stamps(), extent.whole_table()) else { continue };
        let tables = (0u32..).zip(table.chunks(STRETCH_PAGES as usize));
        let stretches: Vec<u32> =
            tables.filter(|(_, table)| stored_bytes(table) > 0).map(|(stretch, _)| stretch).collect();
        let at = extents.len();
        // A few stretches of each extent, so that one large extent does not fill the sample.
        let most = (CANDIDATES / 8).min(stretches.len());
        let begin = if stretches.is_empty() { 0 } else { next(random) as usize % stretches.len() };
        candidates.extend((0..most).map(|step| {
            let stretch = stretches[(begin + step) % stretches.len()];
            Candidate { stamp: stamps[stretch as usize], extent: at, stretch }
        }));
        if stretches.is_empty() {
            // An extent without pages still uses space.
            candidates.push(Candidate { stamp: 0, extent: at, stretch: 0 });
        }
        extents.push(extent);
        if candidates.len() >= CANDIDATES {
            break;
        }
    }
    Ok((extents, candidates))
}

/// Remove pages. Returns the bytes that were freed: none if another operation uses the pages for longer than `patience`. A caller that holds
/// locks must not wait.
pub fn clear(drive: &Drive, extent: &Extent, pages: Range<u32>, patience: Duration) -> io::Result<u64> {
    let Some(flight) = drive.flight()? else { return Ok(0) };
    let pages = pages.start..pages.end.min(extent.pages());
    if !flight.lock(extent.hash, pages.clone(), patience)? || !extent.is_linked() {
        return Ok(0);
    }
    let bytes = stored_bytes(&extent.table(pages.clone())?);
    if bytes > 0 {
        extent.clear(pages)?;
        drive.usage.release(extent.key.store(), bytes, bytes)?;
    }
    Ok(bytes)
}

/// Remove an extent's file if no operation uses it and `when` agrees. Returns the bytes that were freed.
pub fn remove(drive: &Drive, extent: &Extent, when: impl Fn(&[u32]) -> bool) -> io::Result<u64> {
    let Some(flight) = drive.flight()? else { return Ok(0) };
    if !flight.try_lock(extent.hash, WHOLE)? || !extent.is_linked() {
        return Ok(0);
    }
    let crcs = extent.whole_table()?;
    if !when(&crcs) {
        return Ok(0);
    }
    let pages = stored_bytes(&crcs);
    let overhead = extent.overhead_now()?;
    let _mark = Registered::new(&drive.part(PENDING), extent.key.store().as_bytes())?;
    drive.unlink(extent)?;
    drive.usage.release(extent.key.store(), pages + overhead, pages)?;
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
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        other => other?.collect::<io::Result<_>>()?,
    };
    Ok(if entries.is_empty() { None } else { Some(entries[random as usize % entries.len()].path()) })
}
