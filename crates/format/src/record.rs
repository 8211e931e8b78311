//! The commit record of spec section 3.

use bytes::Bytes;
use penstock_error::{Error, Result};

use crate::cursor::{Cursor, Magic, Writer, malformed, seal, unseal};
pub use crate::delta::{Change, ChangeKind, Delta};
use crate::files::{FilePlace, FileRef};
use crate::id::Id;
pub use crate::ids::RECORD_BYTES;
use crate::ids::{COUNTERS, LINEAGES, ObjectRef, PROVISIONAL, Run, SnapshotId, lineage_of, row_id};
use crate::overlay::Overlay;
use crate::rows::RowSet;

/// The offset of a record's data files: after the envelope's head, the fields of fixed size, and the length of the data.
const DATA_OFFSET: u64 = 8 + 65 + 2;
/// Maximum number of deltas in a record, in addition to its root.
pub const RECORD_DELTAS: usize = 64;
/// Valid commit times: from year 1 to year 9999, in microseconds since 1970 UTC.
pub const TIMES_US: std::ops::Range<i64> = -62_135_596_800_000_000..253_402_300_800_000_000;
/// Feature bit for datasets whose data files have tiled chunks.
pub const FEATURE_TILED: u64 = 1;
/// Feature bit for datasets with overlays: changed values or deleted samples.
pub const FEATURE_OVERLAYS: u64 = 1 << 1;
/// Feature bit for datasets with data files inside commit records, pages or roots.
pub const FEATURE_INLINE: u64 = 1 << 4;
/// Feature bit for branches with merges: commits with more than one parent.
pub const FEATURE_MERGES: u64 = 1 << 5;
/// Data files with an earlier dtype of a column.
pub const FEATURE_WIDENED: u64 = 1 << 7;

/// A label column whose classes have codes.
pub const FEATURE_CLASSES: u64 = 1 << 8;

/// Statistics in the tails of data files.
pub const FEATURE_STATISTICS: u64 = 1 << 9;

/// Attachments of a snapshot.
pub const FEATURE_ATTACHMENTS: u64 = 1 << 10;

/// Features that this release supports when reading.
pub const KNOWN_READ: u64 = FEATURE_TILED
    | FEATURE_OVERLAYS
    | FEATURE_INLINE
    | FEATURE_MERGES
    | FEATURE_WIDENED
    | FEATURE_CLASSES
    | FEATURE_STATISTICS
    | FEATURE_ATTACHMENTS;
/// Features that this release supports when writing.
pub const KNOWN_WRITE: u64 = KNOWN_READ;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum RecordKind {
    Create = 0,
    Data = 1,
    Layout = 2,
    Schema = 3,
    Merge = 4,
    Fence = 5,
    Reset = 6,
    /// The first record of a branch other than `main`.
    Branch = 7,
    /// The last record of a deleted branch.
    Close = 8,
}

impl RecordKind {
    fn from_code(code: u8) -> Result<RecordKind> {
        use RecordKind::*;
        [Create, Data, Layout, Schema, Merge, Fence, Reset, Branch, Close].get(code as usize).copied().ok_or_else(
            || {
                Error::new("unknown-feature", format!("a commit record has unknown kind {code}"))
                    .hint("upgrade Penstock")
            },
        )
    }

    pub fn name(self) -> &'static str {
        ["create", "data", "layout", "schema", "merge", "fence", "reset", "branch", "close"][self as usize]
    }

    /// Return whether a record of this kind is a landmark: later records lead to it without the records in between.
    pub fn is_landmark(self) -> bool {
        !matches!(self, RecordKind::Data | RecordKind::Layout)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parent {
    pub branch: u64,
    pub number: u64,
    pub uuid: Id,
    pub crc: u32,
}

impl Parent {
    pub fn snapshot(&self) -> SnapshotId {
        SnapshotId { branch: self.branch, number: self.number, uuid: self.uuid }
    }

    fn parse(cursor: &mut Cursor) -> Result<Parent> {
        let SnapshotId { branch, number, uuid } = SnapshotId::read(cursor)?;
        Ok(Parent { branch, number, uuid, crc: cursor.u32()? })
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Transaction {
    pub uuid: Id,
    pub message: String,
    pub author: String,
    /// A JSON object.
    pub properties: String,
    pub first_counter: u64,
    /// The number of row ids that this transaction assigned, from `first_counter` on.
    pub assigned: u64,
    /// Added samples, with those of other branches.
    pub samples_added: u64,
    pub samples_deleted: u64,
}

impl Transaction {
    pub fn write(&self, writer: &mut Writer) {
        writer.id(self.uuid);
        writer.string(&self.message);
        writer.string(&self.author);
        writer.u8(0);
        writer.string(&self.properties);
        for value in [self.first_counter, self.assigned, self.samples_added, self.samples_deleted] {
            writer.varint(value);
        }
    }

    fn parse(cursor: &mut Cursor) -> Result<Transaction> {
        let transaction = Transaction {
            uuid: cursor.id()?,
            message: cursor.string()?,
            author: cursor.string()?,
            properties: {
                read_unused(cursor)?;
                cursor.string()?
            },
            first_counter: cursor.varint()?,
            assigned: cursor.varint()?,
            samples_added: cursor.varint()?,
            samples_deleted: cursor.varint()?,
        };
        match serde_json::from_str(&transaction.properties) {
            Ok(serde_json::Value::Object(_)) => Ok(transaction),
            _ => Err(malformed("the properties of a transaction are not a JSON object")),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    pub kind: RecordKind,
    pub dataset: Id,
    pub branch: u64,
    pub number: u64,
    pub features_read: u64,
    pub features_write: u64,
    pub time_us: i64,
    /// The data files that this commit stores in its record.
    pub data: Bytes,
    pub gc_epoch: u64,
    /// The number of the newest record of this log before this one whose kind is a landmark. 0 in record 0.
    pub landmark: u64,
    pub parents: Vec<Parent>,
    pub transactions: Vec<Transaction>,
    pub lineage: u64,
    pub next_counter: u64,
    pub samples: u64,
    pub live: u64,
    pub root: ObjectRef,
    pub deltas: Vec<Delta>,
    pub changes: Vec<Change>,
}

impl Record {
    pub fn snapshot(&self) -> SnapshotId {
        SnapshotId { branch: self.branch, number: self.number, uuid: self.uuid() }
    }

    /// Return the landmark of the record after this one.
    pub fn next_landmark(&self) -> u64 {
        if self.kind.is_landmark() { self.number } else { self.landmark }
    }

    /// Return the uuid of the first transaction. A parsed record has at least one transaction.
    pub fn uuid(&self) -> Id {
        self.transactions.first().map_or(Id::default(), |transaction| transaction.uuid)
    }

    /// Move data files that are in memory into this record. The deltas of earlier commits have none.
    pub fn take_data(&mut self) {
        let (branch, number, mut data) = (self.branch, self.number, Vec::new());
        let in_memory =
            |delta: &&mut Delta| delta.files().iter().any(|file| matches!(file.place, FilePlace::Inline(_)));
        for file in self.deltas.iter_mut().filter(in_memory).flat_map(Delta::files_mut) {
            if let FilePlace::Inline(bytes) = &file.place {
                let offset = DATA_OFFSET + data.len() as u64;
                data.extend_from_slice(bytes);
                file.place = FilePlace::Record { branch, number, offset };
            }
        }
        self.data = data.into();
    }

    /// Return the bytes of a data file that this record has.
    pub fn data_of(&self, file: &FileRef) -> Option<Bytes> {
        match file.place {
            FilePlace::Record { branch, number, offset } if (branch, number) == (self.branch, self.number) => {
                let begin = offset.checked_sub(DATA_OFFSET)? as usize;
                let end = begin.checked_add(file.file_bytes as usize)?;
                (end <= self.data.len()).then(|| self.data.slice(begin..end))
            }
            _ => None,
        }
    }

    pub fn encode(&self) -> Vec<u8> {
        seal(Magic::Record, |writer| {
            writer.u8(self.kind as u8);
            writer.id(self.dataset);
            for value in [self.branch, self.number, self.features_read, self.features_write, 0, self.time_us as u64] {
                writer.u64(value);
            }
            writer.u16(self.data.len() as u16);
            writer.0.extend_from_slice(&self.data);
            writer.varint(self.gc_epoch);
            writer.varint(self.landmark);
            writer.list(&self.parents, |writer, parent| {
                parent.snapshot().write(writer);
                writer.u32(parent.crc);
            });
            writer.list(&self.transactions, |writer, transaction| transaction.write(writer));
            for value in [self.lineage, self.next_counter, self.samples, self.live] {
                writer.varint(value);
            }
            writer.u8(0);
            self.root.write(writer);
            writer.list(&self.deltas, |writer, delta| delta.write(writer));
            writer.list(&self.changes, |writer, change| change.write(writer));
            writer.u8(0);
        })
    }

    /// Parse the record found at `branch` and `number`. Fails if it needs read features that this release does not support.
    pub fn parse(bytes: &Bytes, branch: u64, number: u64) -> Result<Record> {
        if bytes.len() > RECORD_BYTES {
            return Err(malformed(format!(
                "a commit record has {} bytes, expected at most {RECORD_BYTES}",
                bytes.len()
            )));
        }
        let record = unseal(Magic::Record, bytes, |cursor| Record::read(cursor, branch, number))?;
        record.check()?;
        Ok(record)
    }

    fn read(cursor: &mut Cursor, branch: u64, number: u64) -> Result<Record> {
        let kind_code = cursor.u8()?;
        let (dataset, found_branch, found_number) = (cursor.id()?, cursor.u64()?, cursor.u64()?);
        if (found_branch, found_number) != (branch, number) {
            return Err(malformed(format!(
                "the commit record at {branch:x}-{number} identifies itself as {found_branch:x}-{found_number}"
            )));
        }
        let (features_read, features_write, _) = (cursor.u64()?, cursor.u64()?, cursor.u64()?);
        // Check the features before parsing any field whose encoding a newer release may have changed.
        if features_read & !KNOWN_READ != 0 {
            return Err(unknown_features("read", features_read & !KNOWN_READ));
        }
        let kind = RecordKind::from_code(kind_code)?;
        let record = Record {
            kind,
            dataset,
            branch,
            number,
            features_read,
            features_write,
            time_us: cursor.u64()? as i64,
            data: {
                let bytes = cursor.u16()?;
                cursor.take(bytes.into())?
            },
            gc_epoch: cursor.varint()?,
            landmark: cursor.varint()?,
            parents: cursor.list(36, Parent::parse)?,
            transactions: cursor.list(23, Transaction::parse)?,
            lineage: cursor.varint()?,
            next_counter: cursor.varint()?,
            samples: cursor.varint()?,
            live: cursor.varint()?,
            root: {
                read_unused(cursor)?;
                ObjectRef::parse(cursor)?
            },
            deltas: cursor.list(4, Delta::parse)?,
            changes: cursor.list(3, Change::parse)?,
        };
        read_unused(cursor)?;
        Ok(record)
    }

    /// Check the rules that every record must follow.
    fn check(&self) -> Result<()> {
        let invalid =
            |what: String| Err(malformed(format!("the commit record at {:x}-{} {what}", self.branch, self.number)));
        if self.transactions.is_empty() || self.deltas.len() > RECORD_DELTAS || self.live > self.samples {
            return invalid("has no transactions or has invalid counts".into());
        }
        self.check_parents().or_else(|what| invalid(what.into()))?;
        let allocated = self.transactions.iter().map(|entry| entry.first_counter.checked_add(entry.assigned));
        if self.lineage >= LINEAGES
            || self.next_counter > COUNTERS
            || !allocated.into_iter().all(|end| end.is_some_and(|end| end <= self.next_counter))
        {
            return invalid(format!("allocates row ids beyond next_counter {}", self.next_counter));
        }
        // `verify` checks the row ids of fragments in pages. Other branches assign those of other lineages.
        let next = row_id(self.lineage, self.next_counter);
        let is_assigned = |last: u64| last & PROVISIONAL == 0 && (lineage_of(last) != self.lineage || last < next);
        let is_beyond = |run: &Run| {
            let last = run.first.checked_add(run.count).map_or(u64::MAX, |end| end.saturating_sub(1));
            !is_assigned(last) || lineage_of(run.first) != lineage_of(last)
        };
        let is_allocated = |delta: &Delta| match delta {
            Delta::Fragment(fragment) => !fragment.runs.iter().any(is_beyond),
            Delta::Page(page) => page.least & PROVISIONAL == 0,
            Delta::Overlay(Overlay { rows: RowSet::Runs(runs), .. }) => !runs.iter().any(is_beyond),
            Delta::Overlay(overlay) => is_assigned(overlay.rows.range().end - 1),
            Delta::Attachment(attachment) => [&attachment.rows]
                .into_iter()
                .chain(&attachment.changed)
                .all(|rows| rows.range().end == 0 || is_assigned(rows.range().end - 1)),
            Delta::Words(_) | Delta::Detached(_) => true,
        };
        if !self.deltas.iter().all(is_allocated) {
            return invalid("has row ids that no commit allocated".into());
        }
        // Later records are not there yet. Data files of earlier records are checked when they are read.
        let is_readable = |file: &FileRef| match file.place {
            FilePlace::Record { branch, number, offset } if branch == self.branch && number >= self.number => {
                let data = DATA_OFFSET..DATA_OFFSET + self.data.len() as u64;
                number == self.number && data.contains(&offset) && file.file_bytes <= data.end - offset
            }
            FilePlace::Inline(_) => false,
            _ => file.is_object() || self.features_read & FEATURE_INLINE != 0,
        };
        if !self.deltas.iter().flat_map(Delta::files).all(is_readable) {
            return invalid("refers to data files that it does not have".into());
        }
        if !TIMES_US.contains(&self.time_us) {
            return invalid(format!(
                "has an invalid time: {} us, expected a time from year 1 to year 9999",
                self.time_us
            ));
        }
        Ok(())
    }

    /// Check that the kind, the parents and the landmark agree.
    fn check_parents(&self) -> std::result::Result<(), &'static str> {
        use RecordKind::*;
        let predecessor = self
            .parents
            .first()
            .is_some_and(|parent| (parent.branch, parent.number.checked_add(1)) == (self.branch, Some(self.number)));
        let expected = match (self.kind, self.number) {
            (Create, 0) => self.branch == 0 && self.parents.is_empty(),
            (Branch, 0) => self.branch != 0 && self.parents.len() == 1 && self.parents[0].branch != self.branch,
            (Create | Branch, _) | (_, 0) => false,
            (Merge, _) => predecessor && self.parents.len() == 2 && self.features_read & FEATURE_MERGES != 0,
            (Reset, _) => predecessor && self.parents.len() == 2,
            _ => predecessor && self.parents.len() == 1,
        };
        let is_itself_or_later = |parent: &Parent| parent.branch == self.branch && parent.number >= self.number;
        match (expected && !self.parents.iter().any(is_itself_or_later), self.landmark < self.number.max(1)) {
            (false, _) => Err("has parents that its kind cannot have"),
            (_, false) => Err("has an impossible landmark"),
            _ => Ok(()),
        }
    }

    /// Fail if this record requires write features that this release does not support.
    pub fn check_writable(&self) -> Result<()> {
        match self.features_write & !KNOWN_WRITE {
            0 => Ok(()),
            unknown => Err(unknown_features("write", unknown)),
        }
    }
}

/// Read a byte that is 0: what follows is in the record. Feature bit 6 is that of objects outside of it, which no release writes.
fn read_unused(cursor: &mut Cursor) -> Result<()> {
    if cursor.flag()? { Err(unknown_features("read", 1 << 6)) } else { Ok(()) }
}

fn unknown_features(verb: &str, bits: u64) -> Error {
    Error::new(
        "unknown-feature",
        format!("cannot {verb} this dataset: it uses features {bits:#x}, which this release does not support"),
    )
    .hint("upgrade Penstock")
}
