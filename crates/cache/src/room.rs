//! Room on a drive: bytes are reserved within budgets, and old stretches make room for new ones.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use penstock_storage::private;

use crate::drive::{Drive, PENDING};
use crate::evict;
use crate::extent::{Extent, Key};
use crate::flight::{FILE, Flight};

/// A process waits this long for another one that creates or removes the same file.
const FILE_PATIENCE: Duration = Duration::from_secs(2);

/// Evict what exceeds the budget, which may have been reduced. What running plans read is left to them, and nothing is added meanwhile.
pub fn shrink(drive: &Drive) -> io::Result<()> {
    loop {
        let total = drive.usage.total()?;
        let excess_bytes = total.bytes.saturating_sub(total.budget_bytes);
        if excess_bytes == 0 || evict::from_all(drive, excess_bytes)? == 0 {
            return Ok(());
        }
    }
}

/// Set the budget of a store, and evict what exceeds it.
pub fn limit_store(drive: &Drive, store: &str, bytes: u64) -> io::Result<()> {
    drive.usage.set_budget(Some(store), bytes)?;
    loop {
        let excess_bytes = drive.store_bytes(store)?.saturating_sub(bytes);
        if excess_bytes == 0 || evict::from_store(drive, store, excess_bytes)? == 0 {
            return Ok(());
        }
    }
}

/// Return an extent, and create its file if it is missing. Returns None if it does not fit. The caller holds no lock.
pub fn make(drive: &Drive, key: &Key, object_bytes: u64) -> io::Result<Option<Arc<Extent>>> {
    if let Some(extent) = drive.find(key, Some(object_bytes))?.filter(|extent| extent.is_linked()) {
        return Ok(Some(extent));
    }
    drive.forget(key);
    // Another version of the object gives way, unless somebody uses it.
    if key.is_versioned()
        && let Some((other, _)) = drive.find_any(key)?.filter(|(other, _)| other.key != *key)
    {
        evict::remove(drive, &other, |_| true)?;
    }
    let overhead = Extent::overhead_bytes(object_bytes, key);
    let Some(flight) = drive.flight()? else { return Ok(None) };
    if !reserve(drive, key.store(), overhead)? {
        return Ok(None);
    }
    let made = make_file(drive, key, object_bytes, &flight);
    if !matches!(made, Ok(Some((_, true)))) {
        drive.usage.release(key.store(), overhead, 0)?;
    }
    let Some((extent, _)) = made? else { return Ok(None) };
    let extent = Arc::new(extent);
    drive.keep_open(&extent);
    Ok(Some(extent))
}

/// Create an extent's file, and return whether this call created it. Returns None if another process holds its lock for too long.
fn make_file(drive: &Drive, key: &Key, object_bytes: u64, flight: &Flight) -> io::Result<Option<(Extent, bool)>> {
    let path = drive.path(key);
    // Versions of an object share their place, but not their locks.
    if !flight.lock(key.hash(), FILE, FILE_PATIENCE)? || key.is_versioned() && !flight.try_lock(key.place(), FILE)? {
        return Ok(None);
    }
    match Extent::open_any(&path)? {
        Some(extent) if extent.key == *key && extent.object_bytes == object_bytes => return Ok(Some((extent, false))),
        // Another version that somebody uses.
        Some(other) if key.is_versioned() && other.key != *key && other.key.place() == key.place() => return Ok(None),
        _ => {}
    }
    // A damaged file, or that of another object with the same hash, gives way. A mark without a process makes the next one count again.
    if path.exists() {
        private::create_folders(&drive.part(PENDING))?;
        std::fs::write(drive.part(PENDING).join("damage"), "")?;
    }
    match Extent::create(&path, key, object_bytes) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            path.parent().map_or(Ok(()), private::create_folders)?;
            Ok(Some((Extent::create(&path, key, object_bytes)?, true)))
        }
        other => Ok(Some((other?, true))),
    }
}

/// Write a note beside an extent. Returns whether it fits. The caller holds no lock.
pub fn annotate(drive: &Drive, extent: &Extent, note: &[u8]) -> io::Result<bool> {
    let Some(flight) = drive.flight()? else { return Ok(false) };
    let growth = extent.growth_of_note(note.len())?;
    if growth > 0 && !reserve(drive, extent.key.store(), growth)? {
        return Ok(false);
    }
    let locked = flight.lock(extent.hash, FILE, FILE_PATIENCE);
    let written = locked.and_then(|locked| Ok(locked && extent.is_linked() && extent.set_note(note).map(|()| true)?));
    if growth > 0 && !matches!(written, Ok(true)) {
        drive.usage.release(extent.key.store(), growth, 0)?;
    }
    written
}

/// Reserve bytes for a store, and evict as much as needed. Returns false if they do not fit.
pub fn reserve(drive: &Drive, store: &str, bytes: u64) -> io::Result<bool> {
    // Another process may take the room that this one made.
    for _ in 0..3 {
        match drive.usage.reserve(store, bytes)? {
            Some((0, 0)) => return Ok(true),
            None => return Ok(false),
            Some((of_drive, of_store)) => {
                let freed = if of_store > 0 {
                    evict::from_store(drive, store, of_store.max(of_drive))?
                } else {
                    evict::from_all(drive, of_drive)?
                };
                if freed == 0 {
                    return Ok(false);
                }
            }
        }
    }
    Ok(false)
}
