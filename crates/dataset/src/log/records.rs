//! Read the records of a branch's commit log: one record, a span, or all ancestors of a record.

use std::ops::Range;

use bytes::Bytes;
use penstock_error::{Context as _, Error, Kind, Result};
use penstock_format::SnapshotId;
use penstock_format::ids::{record_name, sealed_crc};
use penstock_format::record::Record;
use penstock_storage::Storage;

/// A record and its CRC. Each record also contains its parent's CRC.
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
pub fn read_record(storage: &dyn Storage, branch: u64, number: u64) -> Result<LogEntry> {
    let read = || LogEntry::parse(&storage.read(&record_name(branch, number))?, branch, number);
    match read() {
        Err(error) if error.kind() == Kind::Corrupt => read(), // The network may have damaged the first response.
        other => other,
    }
}

/// Return the record identified by a snapshot id.
pub fn named(storage: &dyn Storage, snapshot: &SnapshotId) -> Result<LogEntry> {
    let missing = || {
        Error::new("snapshot-not-found", format!("cannot open snapshot `{snapshot}` of `{}`: no such commit exists", storage.uri()))
            .hint("see `penstock log`")
    };
    match read_record(storage, snapshot.branch, snapshot.number) {
        Ok(entry) if entry.record.uuid() == snapshot.uuid => Ok(entry),
        Ok(_) => Err(missing()),
        Err(error) if error.kind() == Kind::NotFound => Err(missing()),
        Err(error) => Err(error),
    }
}

/// Return whether a commit succeeded whose state was unknown, given the snapshot that it would be. Fails with `commit-state-unknown` if it
/// still may succeed, because no later commit has been made. Cost: one read.
pub fn resolve(storage: &dyn Storage, snapshot: &SnapshotId) -> Result<bool> {
    match read_record(storage, snapshot.branch, snapshot.number) {
        Ok(entry) => Ok(entry.record.transactions.iter().any(|transaction| transaction.uuid == snapshot.uuid)),
        Err(error) if error.kind() == Kind::NotFound => {
            let text = format!("snapshot {snapshot} does not exist yet, but a delayed request may still create it");
            Err(Error::new("commit-state-unknown", text).hint("the next commit decides: make it, and ask again"))
        }
        Err(error) => Err(error),
    }
}

/// Visit the ancestors of `from`, newest first. Each must match the CRC and commit id recorded by its child.
pub fn walk(storage: &dyn Storage, from: &Record, mut visit: impl FnMut(&LogEntry) -> Result<()>) -> Result<()> {
    let mut parent = from.parents.first().cloned();
    while let Some(link) = parent {
        let entry = read_record(storage, link.branch, link.number)?;
        if entry.crc != link.crc || entry.record.uuid() != link.uuid {
            let name = record_name(link.branch, link.number);
            return Err(Error::new(
                "object-checksum",
                format!("cannot read `{name}`: crc32c {:#010x}, expected {:#010x} (recorded by its child)", entry.crc, link.crc),
            ));
        }
        visit(&entry)?;
        parent = entry.record.parents.first().cloned();
    }
    Ok(())
}

/// Read the records with these numbers, in order. Cost: one request per record.
pub fn span(storage: &dyn Storage, branch: u64, numbers: Range<u64>) -> Result<Vec<LogEntry>> {
    numbers.map(|number| read_record(storage, branch, number)).collect()
}
