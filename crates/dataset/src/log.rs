//! The commit log of a branch: find the newest record, read one, walk back.

use bytes::Bytes;
use penstock_error::{Context as _, Error, Kind, Result};
use penstock_format::SnapshotId;
use penstock_format::ids::{hint_name, log_folder, numbered, read_hint, record_name, record_number, sealed_crc, write_hint};
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
    let read = || LogEntry::parse(&storage.read(&record_name(branch, number))?, branch, number);
    match read() {
        Err(error) if error.kind() == Kind::Corrupt => read(), // The network may have damaged the first answer.
        other => other,
    }
}

/// The end of a log.
#[derive(Debug, Clone, Copy)]
pub struct Newest {
    pub number: u64,
    /// The folder that the hint was written in, if the hint was read.
    pub written_in: Option<u64>,
    /// A later record, if the one after `number` is missing.
    beyond: Option<u64>,
}

impl Newest {
    /// Return the number, or `log-incomplete` if a later record exists: an append would take the number of an earlier commit.
    pub fn whole(&self, storage: &dyn Storage, folder: &str) -> Result<u64> {
        self.beyond.map_or(Ok(self.number), |beyond| Err(incomplete(storage, folder, self.number + 1, beyond)))
    }
}

/// The newest record, which is `known` or later, or nothing where there is no log. Cost: that of `newest_number`, and the record.
pub fn newest(storage: &dyn Storage, branch: u64, known: Option<u64>) -> Result<Option<LogEntry>> {
    let folder = log_folder(branch);
    newest_number(storage, &folder, known)?.map(|newest| read(storage, branch, newest.whole(storage, &folder)?)).transpose()
}

/// The number of the newest record of a log, of which record `known` was seen before. Cost: a listing of a few names where the store lists
/// in order; else hint, and about three look-ups.
pub fn newest_number(storage: &dyn Storage, folder: &str, known: Option<u64>) -> Result<Option<Newest>> {
    if let Some(number) = storage.newest(folder)?.and_then(|names| first_listed(&names)).filter(|number| Some(*number) >= known) {
        return Ok(Some(Newest { number, written_in: None, beyond: None }));
    }
    let exists = |number: u64| storage.exists(&numbered(folder, number));
    // Without a hint the search is longer, and that is all.
    let (hinted, written_in) = hint(storage, folder).unzip();
    let mut number = match hinted.max(known) {
        Some(number) if Some(number) == known || exists(number)? => number,
        _ if known.is_some() => known.unwrap_or_default(),
        _ if exists(0)? => 0,
        _ => return Ok(None),
    };
    loop {
        number = search(number, exists)?;
        let next = number.checked_add(2).map(|next| Ok(exists(next)?.then_some(next))).transpose()?.flatten();
        // In a copy, the hint may be newer than the copied records.
        let here = || storage.place().is_none_or(|here| written_in == Some(here));
        let beyond = next.or_else(|| hinted.filter(|hinted| *hinted > number && here()));
        // Two commits since the search look like a hole.
        if beyond.is_some() && exists(number + 1)? {
            number += 1;
            continue;
        }
        return Ok(Some(Newest { number, written_in, beyond }));
    }
}

/// Find the last number that exists, from `newest`, which exists, in steps that double and then halve.
fn search(mut newest: u64, exists: impl Fn(u64) -> Result<bool>) -> Result<u64> {
    let mut step = 1u64;
    let mut absent = loop {
        let Some(next) = newest.checked_add(step) else { break u64::MAX };
        if !exists(next)? {
            break next;
        }
        newest = next;
        step = step.saturating_mul(2);
    };
    while absent - newest > 1 {
        let middle = newest + (absent - newest) / 2;
        if exists(middle)? { newest = middle } else { absent = middle }
    }
    Ok(newest)
}

/// Read the hint: a number that was the newest, and the folder that the hint was written in.
pub fn hint(storage: &dyn Storage, folder: &str) -> Option<(u64, u64)> {
    storage.read(&hint_name(folder)).ok().and_then(|body| read_hint(&body))
}

/// Write the hint. A failure is ignored: without a hint, the next search takes a few more look-ups.
pub fn leave_hint(storage: &dyn Storage, folder: &str, number: u64) {
    let _ = storage.overwrite(&hint_name(folder), &write_hint(number, storage.place().unwrap_or(0)));
}

/// Return an error for each gap in the numbers of the log up to a snapshot. Empty if the store does not list.
pub fn gaps(storage: &dyn Storage, snapshot: &SnapshotId) -> Result<Vec<Error>> {
    if !storage.lists() {
        return Ok(Vec::new());
    }
    let folder = log_folder(snapshot.branch);
    let mut numbers: Vec<u64> = storage.list(&folder)?.iter().filter_map(|(name, _)| record_number(name)).collect();
    numbers.push(snapshot.number); // Some stores list an earlier state.
    numbers.sort_unstable();
    let mut expected = 0;
    let mut gaps = Vec::new();
    for number in numbers {
        // A listing may lack a record that was put during the listing.
        while expected < number && storage.exists(&numbered(&folder, expected))? {
            expected += 1;
        }
        if number > expected {
            gaps.push(incomplete(storage, &folder, expected, number));
        }
        expected = expected.max(number.saturating_add(1));
    }
    Ok(gaps)
}

/// A record that must have been there once is not: to append after the hole would take the number of a commit that exists.
pub fn incomplete(storage: &dyn Storage, folder: &str, missing: u64, beyond: u64) -> Error {
    let text = format!("cannot use the log `{}/{folder}`: record {missing} is missing, though there was a record {beyond}", storage.uri());
    Error::new("log-incomplete", text)
        .hint("an incomplete copy? copy it again, `log` and `refs` first and the rest after, or add the missing objects with `cp -rn`; `penstock verify` names them")
}

/// The newest of the first names of a log, if they come in order: numbers then go down one by one. In another order the first says nothing.
fn first_listed(names: &[String]) -> Option<u64> {
    let numbers: Vec<u64> = names.iter().filter_map(|name| record_number(name)).collect();
    let dense = numbers.windows(2).all(|two| two[0].checked_sub(1) == Some(two[1]));
    numbers.first().copied().filter(|_| dense)
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
