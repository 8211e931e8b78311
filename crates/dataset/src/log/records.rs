//! Read the records of a branch's commit log: one record, or a span.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use penstock_error::{Context as _, Error, Kind, Result};
use penstock_format::ids::{record_name, sealed_crc};
use penstock_format::record::{Parent, Record, RecordKind};
use penstock_format::{SnapshotId, crc};
use penstock_storage::Store;

/// The size of the CRC at the end of a record.
const CRC_BYTES: usize = 4;

/// A record and its CRC. Each record also contains its parent's CRC.
#[derive(Debug, Clone)]
pub struct LogEntry {
    pub record: Arc<Record>,
    pub crc: u32,
}

impl LogEntry {
    pub fn parse(body: &Bytes, branch: u64, number: u64) -> Result<LogEntry> {
        let record =
            Record::parse(body, branch, number).context(|| format!("cannot read `{}`", record_name(branch, number)))?;
        Ok(LogEntry { record: Arc::new(record), crc: sealed_crc(body) })
    }

    /// Return this entry as a parent of another record.
    pub fn as_parent(&self) -> Parent {
        let SnapshotId { branch, number, uuid } = self.record.snapshot();
        Parent { branch, number, uuid, crc: self.crc }
    }

    /// Refuse the last record of a branch that was deleted.
    pub fn check_open(&self) -> Result<()> {
        if self.record.kind != RecordKind::Close {
            return Ok(());
        }
        let text =
            format!("cannot use branch {:x}: it was deleted by commit {}", self.record.branch, self.record.snapshot());
        Err(Error::new("branch-not-found", text)
            .hint("its snapshots remain; ds.create_branch begins a new branch at any of them"))
    }
}

/// Read record `number`.
pub fn read_record(storage: &dyn Store, branch: u64, number: u64) -> Result<LogEntry> {
    let read = || LogEntry::parse(&storage.read(&record_name(branch, number))?, branch, number);
    match read() {
        Err(error) if error.kind() == Kind::Corrupt => read(), // The network may have damaged the first response.
        other => other,
    }
}

/// Return whether the log has this record, byte for byte. Cost: one read.
pub fn is_there(storage: &dyn Store, entry: &LogEntry) -> Result<bool> {
    match storage.read(&record_name(entry.record.branch, entry.record.number)) {
        Ok(body) => Ok(body.len() > CRC_BYTES
            && sealed_crc(&body) == entry.crc
            && crc(&body[..body.len() - CRC_BYTES]) == entry.crc),
        Err(error) if error.kind() == Kind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Return the record identified by a snapshot id.
pub fn named(storage: &dyn Store, snapshot: &SnapshotId) -> Result<LogEntry> {
    beginning(storage, &snapshot.to_string())
}

/// Return the record whose snapshot id begins with a text: its branch and number, which identify it, and any digits of its uuid.
pub fn beginning(storage: &dyn Store, text: &str) -> Result<LogEntry> {
    let (branch, number) = SnapshotId::parse_beginning(text)?;
    match read_record(storage, branch, number) {
        Ok(entry) if entry.record.snapshot().to_string().starts_with(text) => Ok(entry),
        Err(error) if error.kind() != Kind::NotFound => Err(error),
        _ => {
            let text = format!("cannot open snapshot `{text}` of `{}`: no such commit exists", storage.uri());
            Err(Error::new("snapshot-not-found", text).hint("see `penstock log`"))
        }
    }
}

/// Return whether a commit succeeded whose state was unknown, given the snapshot that it would be. Fails with `commit-state-unknown` if it
/// still may succeed, because no later commit has been made. Cost: one read.
pub fn resolve(storage: &dyn Store, snapshot: &SnapshotId) -> Result<bool> {
    match read_record(storage, snapshot.branch, snapshot.number) {
        Ok(entry) => Ok(entry.record.transactions.iter().any(|transaction| transaction.uuid == snapshot.uuid)),
        Err(error) if error.kind() == Kind::NotFound => {
            let text = format!("snapshot {snapshot} does not exist yet, but a delayed request may still create it");
            Err(Error::new("commit-state-unknown", text).hint("the next commit decides: make it, and ask again"))
        }
        Err(error) => Err(error),
    }
}

/// Read the records with these numbers, in order. Cost: one request per record.
pub fn span(storage: &dyn Store, branch: u64, numbers: Range<u64>) -> Result<Vec<LogEntry>> {
    numbers.map(|number| read_record(storage, branch, number)).collect()
}
