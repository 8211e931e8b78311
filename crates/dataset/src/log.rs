//! The commit log of a branch: find the newest record, read one, walk back.

use bytes::Bytes;
use penstock_error::{Context as _, Error, Kind, Result};
use penstock_format::SnapshotId;
use penstock_format::ids::{hint_name, log_folder, numbered, read_hint, record_name, record_number, sealed_crc};
use penstock_format::record::Record;
use penstock_storage::Storage;

/// A record and the crc of its bytes, which its children carry.
#[derive(Debug, Clone)]
pub struct LogEntry {
    pub record: Record,
    pub crc: u32,
}

impl LogEntry {
    pub fn parse(body: &Bytes, branch: u64, number: u64) -> Result<LogEntry> {
        let record = Record::parse(body, branch, number).context(|| format!("cannot read `{}`", record_name(branch, number)))?;
        Ok(LogEntry { record, crc: sealed_crc(body) })
    }
}

/// Read record `number`.
pub fn read(storage: &dyn Storage, branch: u64, number: u64) -> Result<LogEntry> {
    LogEntry::parse(&storage.read(&record_name(branch, number))?, branch, number)
}

/// The newest record, or nothing where there is no log. Cost: that of `newest_number`, and the record.
pub fn newest(storage: &dyn Storage, branch: u64) -> Result<Option<LogEntry>> {
    newest_number(storage, &log_folder(branch))?.map(|number| read(storage, branch, number)).transpose()
}

/// The number of the newest record of a log. Cost: a listing of one name where the store lists in order; else hint, about two look-ups.
pub fn newest_number(storage: &dyn Storage, folder: &str) -> Result<Option<u64>> {
    let first = storage.newest(folder)?.unwrap_or_default();
    if let Some(number) = first.iter().find_map(|name| record_number(name)) {
        return Ok(Some(number));
    }
    let exists = |number: u64| storage.exists(&numbered(folder, number));
    let hinted = match storage.read(&hint_name(folder)) {
        Ok(body) => read_hint(&body),
        Err(error) if error.kind() == Kind::NotFound => None,
        Err(error) => return Err(error),
    };
    let mut known = match hinted {
        Some(number) if exists(number)? => number,
        _ if exists(0)? => 0,
        _ => return Ok(None),
    };
    let mut step = 1u64;
    let mut absent = loop {
        let Some(next) = known.checked_add(step) else { break u64::MAX };
        if !exists(next)? {
            break next;
        }
        known = next;
        step = step.saturating_mul(2);
    };
    while absent - known > 1 {
        let middle = known + (absent - known) / 2;
        if exists(middle)? { known = middle } else { absent = middle }
    }
    Ok(Some(known))
}

/// The record that a snapshot id names.
pub fn named(storage: &dyn Storage, snapshot: &SnapshotId) -> Result<LogEntry> {
    let missing = || {
        Error::new("snapshot-not-found", format!("cannot open snapshot `{snapshot}` of `{}`: there is no such commit", storage.uri()))
            .hint("see `penstock log`")
    };
    match read(storage, snapshot.branch, snapshot.number) {
        Ok(entry) if entry.record.uuid() == snapshot.uuid => Ok(entry),
        Ok(_) => Err(missing()),
        Err(error) if error.kind() == Kind::NotFound => Err(missing()),
        Err(error) => Err(error),
    }
}

/// Records from `from` back to the first, newest first. Each is held to the crc its child carries.
pub fn walk(storage: &dyn Storage, from: &Record, mut visit: impl FnMut(&LogEntry) -> Result<()>) -> Result<()> {
    let mut parent = from.parents.first().cloned();
    while let Some(link) = parent {
        let entry = read(storage, link.branch, link.number)?;
        if entry.crc != link.crc || entry.record.uuid() != link.uuid {
            let name = record_name(link.branch, link.number);
            return Err(Error::new(
                "object-checksum",
                format!("cannot read `{name}`: crc32c {:#010x}, its child expects {:#010x}", entry.crc, link.crc),
            ));
        }
        visit(&entry)?;
        parent = entry.record.parents.first().cloned();
    }
    Ok(())
}
