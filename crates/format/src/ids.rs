//! Object ids, snapshot ids, row ids and the names of objects (spec section 2).

use std::fmt;

use bytes::Bytes;
use penstock_error::{Error, Result};

use crate::cursor::{Cursor, Writer, crc};

/// 128 random bits that name an object, a dataset or a transaction.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Id(pub [u8; 16]);

impl fmt::Display for Id {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(out, "{byte:02x}"))
    }
}

impl fmt::Debug for Id {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{self}")
    }
}

impl Id {
    pub fn parse(text: &str) -> Option<Id> {
        if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return None;
        }
        let value = u128::from_str_radix(text, 16).ok()?;
        Some(Id(value.to_be_bytes()))
    }
}

/// Names a commit for ever: branch, number, and the uuid of its first transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SnapshotId {
    pub branch: u64,
    pub number: u64,
    pub uuid: Id,
}

impl fmt::Display for SnapshotId {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:x}-{}-{}", self.branch, self.number, self.uuid)
    }
}

impl SnapshotId {
    pub fn parse(text: &str) -> Result<SnapshotId> {
        let mut parts = text.split('-');
        let parsed = (|| {
            let branch = u64::from_str_radix(parts.next()?, 16).ok()?;
            let number = parts.next()?.parse().ok()?;
            let uuid = Id::parse(parts.next()?)?;
            parts.next().is_none().then_some(SnapshotId { branch, number, uuid })
        })();
        parsed.ok_or_else(|| {
            Error::new("invalid-argument", format!("cannot read snapshot id `{text}`: expected <branch>-<number>-<32 hex digits>"))
                .hint("take it from ds.snapshot, receipt.snapshot or ds.log()")
        })
    }
}

/// What a parent stores of a sealed object: the crc of all but the crc it ends with. Over the whole it would be the same
/// number for every object, as a CRC of a message with its own CRC behind it is a constant.
pub fn sealed_crc(body: &[u8]) -> u32 {
    crc(&body[..body.len().saturating_sub(4)])
}

/// A child object as its parent knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ObjectRef {
    pub id: Id,
    pub bytes: u64,
    pub crc: u32,
}

impl ObjectRef {
    pub fn of(id: Id, body: &[u8]) -> ObjectRef {
        ObjectRef { id, bytes: body.len() as u64, crc: sealed_crc(body) }
    }

    pub fn read(cursor: &mut Cursor) -> Result<ObjectRef> {
        Ok(ObjectRef { id: cursor.id()?, bytes: cursor.varint()?, crc: cursor.u32()? })
    }

    pub fn write(&self, writer: &mut Writer) {
        writer.id(self.id);
        writer.varint(self.bytes);
        writer.u32(self.crc);
    }

    /// Check that these bytes are the object the parent meant.
    pub fn check(&self, name: &str, body: &Bytes) -> Result<()> {
        if body.len() as u64 != self.bytes {
            let text = format!("cannot read `{name}`: {} bytes, expected {}", body.len(), self.bytes);
            return Err(Error::new("object-truncated", text).object(name));
        }
        // The one that it ends with may be what is damaged.
        let own = body.last_chunk().map_or(0, |own| u32::from_le_bytes(*own));
        match [sealed_crc(body), own].into_iter().find(|found| *found != self.crc) {
            None => Ok(()),
            Some(found) => {
                let text = format!("cannot read `{name}`: crc32c {found:#010x}, expected {:#010x}", self.crc);
                Err(Error::new("object-checksum", text).object(name))
            }
        }
    }
}

/// A run of row ids: `first`, `first + 1`, … `count` of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    pub first: u64,
    pub count: u64,
}

impl Run {
    pub fn read(cursor: &mut Cursor) -> Result<Run> {
        Ok(Run { first: cursor.u64()?, count: cursor.varint()? })
    }

    pub fn write(&self, writer: &mut Writer) {
        writer.u64(self.first);
        writer.varint(self.count);
    }
}

/// Bit that marks a row id as provisional: relative to the base its commit gave out.
pub const PROVISIONAL: u64 = 1 << 63;
const COUNTER_BITS: u32 = 40;

/// The first lineage, and the first counter, that no row id can have.
pub const LINEAGES: u64 = 1 << 23;
pub const COUNTERS: u64 = 1 << COUNTER_BITS;

/// Row id of `counter` in `lineage`.
pub fn row_id(lineage: u64, counter: u64) -> u64 {
    debug_assert!(lineage < LINEAGES && counter <= COUNTERS);
    lineage << COUNTER_BITS | counter
}

/// Folder of the records that name branches, tags and pins.
pub const NAMES_FOLDER: &str = "refs";

/// Folder of the commit records of a branch: in ascending order of names the newest comes first, and the hint last.
pub fn log_folder(branch: u64) -> String {
    format!("log/{branch:016x}")
}

/// Name of commit record `number` of a branch.
pub fn record_name(branch: u64, number: u64) -> String {
    numbered(&log_folder(branch), number)
}

/// Name of record `number` of a log.
pub fn numbered(folder: &str, number: u64) -> String {
    format!("{folder}/{:020}", u64::MAX - number)
}

/// The number of the record with this name in its folder, or nothing if it is no record.
pub fn record_number(name: &str) -> Option<u64> {
    let digits = name.len() == 20 && name.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| name.parse::<u64>().ok()).flatten().map(|rest| u64::MAX - rest)
}

/// What stands under a name below the root of a dataset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A commit record: a dataset is here.
    Commit,
    /// A folder or an object of a dataset, a temporary file, or a probe.
    Ours,
    Foreign,
}

/// Read a name: what an unfinished create leaves is ours, what anybody else put there is not. Folders end in `/`.
pub fn place_of(name: &str) -> Place {
    let temporary = |last: &str| last.starts_with("tmp-") || last.starts_with("probe-");
    let in_log = |last: &str| record_number(last).is_some() || last == "hint" || temporary(last);
    let parts: Vec<&str> = name.split('/').collect();
    let ours = match parts[..] {
        [last] => temporary(last),
        ["log" | "refs" | "d" | "p" | "r" | "w" | "c" | "x" | "o" | "s" | "a", ""] => true,
        ["log", branch, last] if branch.len() == 16 && u64::from_str_radix(branch, 16).is_ok() => {
            if record_number(last).is_some() {
                return Place::Commit;
            }
            last.is_empty() || in_log(last)
        }
        ["refs", last] => in_log(last),
        ["d" | "p" | "r" | "w" | "c" | "x" | "o" | "s" | "a", last] => Id::parse(last).is_some() || temporary(last),
        _ => false,
    };
    if ours { Place::Ours } else { Place::Foreign }
}

/// Name of the hint of a log.
pub fn hint_name(folder: &str) -> String {
    format!("{folder}/hint")
}

pub fn data_name(id: Id) -> String {
    format!("d/{id}")
}

pub fn page_name(id: Id) -> String {
    format!("p/{id}")
}

pub fn root_name(id: Id) -> String {
    format!("r/{id}")
}

pub fn words_name(id: Id) -> String {
    format!("w/{id}")
}

/// Body of a hint object: the newest record, and the place that it was written in (0: none).
pub fn write_hint(number: u64, place: u64) -> Vec<u8> {
    let mut writer = Writer(b"PNSH".to_vec());
    writer.u64(number);
    writer.u64(place);
    let sum = crc(&writer.0);
    writer.u32(sum);
    writer.0
}

/// The number and the place in a hint, or nothing when it is not one: hints are never trusted.
pub fn read_hint(body: &[u8]) -> Option<(u64, u64)> {
    if body.len() != 24 || &body[..4] != b"PNSH" || crc(&body[..20]).to_le_bytes() != body[20..] {
        return None;
    }
    let number = |at: usize| Some(u64::from_le_bytes(body[at..at + 8].try_into().ok()?));
    Some((number(4)?, number(12)?))
}
