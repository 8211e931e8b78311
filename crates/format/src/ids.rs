//! Object ids, snapshot ids, row ids and object names (spec sections 2 and 5).

use std::fmt;

use bytes::Bytes;
use penstock_error::{Error, Result};

use crate::cursor::{Cursor, Magic, Writer, crc, malformed};
use crate::id::Id;

/// The permanent name of a commit: its branch, its number, and the uuid of its first transaction.
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
        let (branch, number, digits) = divide_snapshot_id(text).ok_or_else(|| no_snapshot_id(text))?;
        let uuid = Id::parse(digits).ok_or_else(|| no_snapshot_id(text))?;
        Ok(SnapshotId { branch, number, uuid })
    }

    /// Parse the beginning of a snapshot id: the branch, the number, and some or none of the digits of the uuid.
    /// Returns the branch and the number.
    pub fn parse_beginning(text: &str) -> Result<(u64, u64)> {
        let (branch, number, digits) = divide_snapshot_id(text).ok_or_else(|| no_snapshot_id(text))?;
        let is_hex = digits.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
        if is_hex && digits.len() <= 32 { Ok((branch, number)) } else { Err(no_snapshot_id(text)) }
    }

    pub fn read(cursor: &mut Cursor) -> Result<SnapshotId> {
        Ok(SnapshotId { branch: cursor.u64()?, number: cursor.u64()?, uuid: cursor.id()? })
    }

    pub fn write(&self, writer: &mut Writer) {
        writer.u64(self.branch);
        writer.u64(self.number);
        writer.id(self.uuid);
    }
}

/// Return the branch, the number and the digits of the uuid in the text of a snapshot id. The digits may be missing.
fn divide_snapshot_id(text: &str) -> Option<(u64, u64, &str)> {
    let mut parts = text.splitn(3, '-');
    let branch = u64::from_str_radix(parts.next()?, 16).ok()?;
    Some((branch, parts.next()?.parse().ok()?, parts.next().unwrap_or("")))
}

fn no_snapshot_id(text: &str) -> Error {
    let wanted = "expected <branch>-<number>-<32 hex digits>, or a prefix that includes the number";
    Error::new("invalid-argument", format!("cannot read snapshot id `{text}`: {wanted}"))
        .hint("take it from ds.snapshot, receipt.snapshot or ds.log()")
}

/// Return the crc that a parent stores for a sealed object. It excludes the object's own trailing crc, because the CRC of any message
/// followed by its CRC is the same constant.
pub fn sealed_crc(body: &[u8]) -> u32 {
    crc(&body[..body.len().saturating_sub(4)])
}

/// A parent's reference to a child object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ObjectRef {
    pub id: Id,
    pub bytes: u64,
    pub crc: u32,
}

impl ObjectRef {
    /// The size of the shortest reference.
    pub const LEAST_BYTES: usize = 21;

    pub fn of(id: Id, body: &[u8]) -> ObjectRef {
        ObjectRef { id, bytes: body.len() as u64, crc: sealed_crc(body) }
    }

    pub fn parse(cursor: &mut Cursor) -> Result<ObjectRef> {
        Ok(ObjectRef { id: cursor.id()?, bytes: cursor.varint()?, crc: cursor.u32()? })
    }

    pub fn write(&self, writer: &mut Writer) {
        writer.id(self.id);
        writer.varint(self.bytes);
        writer.u32(self.crc);
    }

    /// Check that these bytes are the object that the parent refers to.
    pub fn check(&self, name: &str, body: &Bytes) -> Result<()> {
        if body.len() as u64 != self.bytes {
            let text = format!("cannot read `{name}`: {} bytes, expected {}", body.len(), self.bytes);
            return Err(Error::new("object-truncated", text).object(name));
        }
        // The damage may be in the trailing crc itself, so check it too.
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

/// A run of `count` row ids: `first`, `first + 1`, …
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    pub first: u64,
    pub count: u64,
}

impl Run {
    /// Return the row id after the last one. Parsers check that it does not overflow.
    pub fn end(&self) -> u64 {
        self.first + self.count
    }

    /// Return the run with final row ids if it is provisional.
    pub fn resolved(&self, base: u64) -> Run {
        match self.first & PROVISIONAL {
            0 => *self,
            _ => Run { first: base.wrapping_add(self.first & !PROVISIONAL), ..*self },
        }
    }

    pub fn parse(cursor: &mut Cursor) -> Result<Run> {
        Ok(Run { first: cursor.u64()?, count: cursor.varint()? })
    }

    /// Parse runs in any order, each of which begins relative to the end of the one before. They are not empty, and do not touch.
    pub fn parse_list(cursor: &mut Cursor) -> Result<Vec<Run>> {
        let count = cursor.count(2)?;
        let mut runs: Vec<Run> = Vec::with_capacity(count);
        for _ in 0..count {
            let first = match runs.last() {
                None => Some(cursor.u64()?),
                Some(last) => last.end().checked_add_signed(cursor.signed()?).filter(|first| *first != last.end()),
            };
            let run = Run { first: first.unwrap_or(u64::MAX), count: cursor.varint()? };
            if run.count == 0 || run.first.checked_add(run.count).is_none() {
                return Err(malformed(format!(
                    "run {} of {count} runs of row ids is empty, touches another one, or is out of range",
                    runs.len()
                )));
            }
            runs.push(run);
        }
        Ok(runs)
    }

    /// Write what `parse_list` reads.
    pub fn write_list(runs: &[Run], writer: &mut Writer) {
        writer.varint(runs.len() as u64);
        let mut end = None;
        for run in runs {
            match end {
                None => writer.u64(run.first),
                Some(end) => writer.signed(run.first.wrapping_sub(end).cast_signed()),
            }
            writer.varint(run.count);
            end = Some(run.end());
        }
    }

    pub fn write(&self, writer: &mut Writer) {
        writer.u64(self.first);
        writer.varint(self.count);
    }
}

/// The bit that marks a row id as provisional, that is, relative to the base that its commit will allocate.
pub const PROVISIONAL: u64 = 1 << 63;
const COUNTER_BITS: u32 = 40;

/// Number of lineages that a row id can encode.
pub const LINEAGES: u64 = 1 << 23;
/// Maximum number of bytes in a commit record. Because of this limit, a commit needs only one small put.
pub const RECORD_BYTES: usize = 4096;
/// Number of counters that a row id can encode.
pub const COUNTERS: u64 = 1 << COUNTER_BITS;

/// Return the row id of `counter` in `lineage`.
pub fn row_id(lineage: u64, counter: u64) -> u64 {
    debug_assert!(lineage < LINEAGES && counter <= COUNTERS);
    lineage << COUNTER_BITS | counter
}

/// Return the lineage of a row id that is not provisional.
pub fn lineage_of(row_id: u64) -> u64 {
    row_id >> COUNTER_BITS
}

/// The folder of the names log, which records branches, tags, pins and decisions.
pub const NAMES_FOLDER: &str = "refs";

/// Return the folder of a branch's commit records. In name order, the newest record is first and the hint is last.
pub fn log_folder(branch: u64) -> String {
    format!("log/{branch:016x}")
}

/// Return the name of commit record `number` of a branch.
pub fn record_name(branch: u64, number: u64) -> String {
    numbered(&log_folder(branch), number)
}

/// Return the name of record `number` in a log.
pub fn numbered(folder: &str, number: u64) -> String {
    format!("{folder}/{:020}", u64::MAX - number)
}

/// Return the number that a record's name encodes, or None for any other name.
pub fn record_number(name: &str) -> Option<u64> {
    let digits = name.len() == 20 && name.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| name.parse::<u64>().ok()).flatten().map(|rest| u64::MAX - rest)
}

/// What a name below a dataset's root refers to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NameOwner {
    /// A commit record, which shows that a dataset exists.
    Commit,
    /// A folder or an object of a dataset, a temporary file, or a probe.
    Ours,
    /// A name that Penstock never creates.
    Foreign,
}

/// Classify a name. Folder names end in `/`. Leftovers from interrupted creates are `Ours`. Files from other programs
/// are `Foreign`.
pub fn owner_of(name: &str) -> NameOwner {
    let is_temporary = |last: &str| last.starts_with("tmp-") || last.starts_with("probe-");
    let is_in_log = |last: &str| record_number(last).is_some() || last == "hint" || is_temporary(last);
    let parts: Vec<&str> = name.split('/').collect();
    let ours = match parts[..] {
        [last] => is_temporary(last),
        ["log" | "refs", ""] => true,
        ["log", branch, last] if branch.len() == 16 && u64::from_str_radix(branch, 16).is_ok() => {
            if record_number(last).is_some() {
                return NameOwner::Commit;
            }
            last.is_empty() || is_in_log(last)
        }
        ["refs", last] => is_in_log(last),
        [folder, last] if ID_FOLDERS.contains(&folder) => {
            last.is_empty() || Id::parse(last).is_some() || is_temporary(last)
        }
        _ => false,
    };
    if ours { NameOwner::Ours } else { NameOwner::Foreign }
}

/// Return whether an object has a random id as its name. Such objects never change.
pub fn is_immutable(name: &str) -> bool {
    name.split_once('/').is_some_and(|(folder, id)| ID_FOLDERS.contains(&folder) && Id::parse(id).is_some())
}

/// Return the name of the first record of `main`, which proves that an object is in a dataset, and how each record begins. `key` is the object's name in
/// its bucket. Returns None if no object of a dataset that never changes has this name.
pub fn marker_of(key: &str) -> Option<(String, &'static [u8])> {
    let root = key.rmatch_indices('/').nth(1).map_or(0, |(at, _)| at + 1);
    is_immutable(&key[root..])
        .then(|| (format!("{}{}", &key[..root], record_name(0, 0)), Magic::Record.bytes().as_slice()))
}

/// Return the name of a log's hint.
pub fn hint_name(folder: &str) -> String {
    format!("{folder}/hint")
}

/// Define functions that return the names of objects with random ids, and `ID_FOLDERS`, which lists the folders of these objects.
macro_rules! object_names {
    ($($(#[$doc:meta])? $function:ident: $folder:literal,)*) => {
        /// The folders of objects that have random ids as names. No release writes the change sets in `c`.
        const ID_FOLDERS: &[&str] = &[$($folder,)* "c"];

        $($(#[$doc])? pub fn $function(id: Id) -> String {
            format!(concat!($folder, "/{}"), id)
        })*
    };
}

object_names! {
    data_name: "d",
    page_name: "p",
    root_name: "r",
    names_name: "n",
    rows_name: "o",
    stages_name: "g",
    words_name: "w",
    statistics_name: "s",
    attachment_name: "a",
    /// Return the name of the object that says which file takes the place of a data file.
    forwarding_name: "f",
}

/// Encode a hint: the number of the newest record, and the identity of the folder that contains the hint. The identity is 0 if the
/// folder has none.
pub fn write_hint(number: u64, place: u64) -> Vec<u8> {
    let mut writer = Writer(b"PNSH".to_vec());
    writer.u64(number);
    writer.u64(place);
    let sum = crc(&writer.0);
    writer.u32(sum);
    writer.0
}

/// Return the number and the folder identity in a hint, or None if the hint is invalid. Readers never trust a hint.
pub fn read_hint(body: &[u8]) -> Option<(u64, u64)> {
    if body.len() != 24 || &body[..4] != b"PNSH" || crc(&body[..20]).to_le_bytes() != body[20..] {
        return None;
    }
    let number = |at: usize| Some(u64::from_le_bytes(body[at..at + 8].try_into().ok()?));
    Some((number(4)?, number(12)?))
}
