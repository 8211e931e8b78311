//! Find a log's newest record, either by listing the log or with a hint and look-ups. Also find gaps in the record numbers, and remember the record that
//! this process committed last.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use penstock_error::{Error, Result};
use penstock_format::ids::{hint_name, log_folder, numbered, read_hint, record_number, write_hint};
use penstock_format::manifest::Root;
use penstock_format::{Id, SnapshotId};
use penstock_storage::Store;
use penstock_storage::process::PerProcess;

use super::records::{LogEntry, read_record};

/// The log of one branch: a local folder, or else a handle. Handles of one bucket may have different credentials or servers.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct LogKey {
    pub uri: String,
    pub place: Option<u64>,
    /// 0 if there is a place.
    pub handle: usize,
    pub dataset: Id,
    pub branch: u64,
}

/// The last snapshot that this process committed to a log, which is likely to be the newest one.
#[derive(Clone)]
pub struct Seen {
    pub entry: LogEntry,
    pub root: Arc<Root>,
}

/// At most this many logs are remembered.
const MOST_LOGS: usize = 64;

static SEEN: PerProcess<Mutex<HashMap<LogKey, Seen>>> = PerProcess::new(Mutex::default);

fn all_seen() -> MutexGuard<'static, HashMap<LogKey, Seen>> {
    SEEN.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Return the last snapshot that this process committed to a log, if its number is at least `from`.
pub fn seen(log: &LogKey, from: u64) -> Option<Seen> {
    all_seen().get(log).filter(|seen| seen.entry.record.number >= from).cloned()
}

/// Remember the snapshot that this process has committed to a log. None if other processes commit as well: then the newest one is looked for each time.
pub fn note(log: LogKey, committed: Option<Seen>) {
    let mut all = all_seen();
    match committed {
        None => drop(all.remove(&log)),
        Some(committed) => {
            if all.len() >= MOST_LOGS {
                all.clear();
            }
            all.insert(log, committed);
        }
    }
}

/// The end of a log.
#[derive(Debug, Clone, Copy)]
pub struct Newest {
    pub number: u64,
    /// The folder in which the hint was written, if the hint was read.
    pub written_in: Option<u64>,
    /// The number of a later record, if such a record exists although record `number + 1` is missing.
    beyond: Option<u64>,
}

impl Newest {
    /// Return the number. Fails with `log-incomplete` if a later record exists: an append would reuse an earlier commit's number.
    pub fn whole(&self, storage: &dyn Store, folder: &str) -> Result<u64> {
        self.beyond.map_or(Ok(self.number), |beyond| Err(incomplete(storage, folder, self.number + 1, beyond)))
    }
}

/// Return the newest record, which is `known` or later. Returns None if the log is empty. Costs one more read than
/// `newest_number`.
pub fn newest(storage: &dyn Store, branch: u64, known: Option<u64>) -> Result<Option<LogEntry>> {
    let folder = log_folder(branch);
    newest_number(storage, &folder, known)?
        .map(|newest| read_record(storage, branch, newest.whole(storage, &folder)?))
        .transpose()
}

/// Return the number of a log's newest record. If `known` is set, that record is known to exist. Cost: a listing of a few names
/// if the store lists in order; otherwise a read of the hint and about three look-ups.
pub fn newest_number(storage: &dyn Store, folder: &str, known: Option<u64>) -> Result<Option<Newest>> {
    if let Some(number) =
        storage.newest(folder)?.and_then(|names| first_listed(&names)).filter(|number| Some(*number) >= known)
    {
        return Ok(Some(Newest { number, written_in: None, beyond: None }));
    }
    let exists = |number: u64| storage.exists(&numbered(folder, number));
    let (hinted, written_in) = hint(storage, folder)?.unzip();
    let mut number = match hinted.max(known) {
        Some(number) if Some(number) == known || exists(number)? => number,
        _ if known.is_some() => known.unwrap_or_default(),
        _ if exists(0)? => 0,
        _ => return Ok(None),
    };
    loop {
        number = search(number, exists)?;
        let next = number.checked_add(2).map(|next| Ok(exists(next)?.then_some(next))).transpose()?.flatten();
        // In a copied dataset, the hint may be newer than the records.
        let is_hint_of_this_folder = || storage.place().is_none_or(|here| written_in == Some(here));
        let beyond = next.or_else(|| hinted.filter(|hinted| *hinted > number && is_hint_of_this_folder()));
        // Two commits made since the search look like a gap, so check again.
        if beyond.is_some() && exists(number + 1)? {
            number += 1;
            continue;
        }
        return Ok(Some(Newest { number, written_in, beyond }));
    }
}

/// Find the last record number. The search starts at `newest`, which must exist, with steps that first double and then halve.
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

/// Read the hint: the newest record number when the hint was written, and the folder in which it was written. Without it, the search only
/// takes longer, so errors are ignored, except for that of a store that cannot be reached.
pub fn hint(storage: &dyn Store, folder: &str) -> Result<Option<(u64, u64)>> {
    match storage.read(&hint_name(folder)) {
        Ok(body) => Ok(read_hint(&body)),
        Err(error) if error.code() == "storage-unreachable" => Err(error),
        Err(_) => Ok(None),
    }
}

/// If the store lists records in order, the hint is written for every so many records. Stores that cannot list need it.
const HINT_EVERY: u64 = 16;

/// Write the hint. A failure is ignored: without a hint, the next search takes a few more look-ups.
pub fn leave_hint(storage: &dyn Store, folder: &str, number: u64) {
    // In a local folder, the hint also shows whether the folder is a copy.
    if storage.place().is_none() && !number.is_multiple_of(HINT_EVERY) {
        return;
    }
    let _ = storage.overwrite(&hint_name(folder), &write_hint(number, storage.place().unwrap_or(0)));
}

/// Return an error for each gap in the log's record numbers up to a snapshot's number. The result is empty if the store cannot
/// list.
pub fn gaps(storage: &dyn Store, snapshot: &SnapshotId) -> Result<Vec<Error>> {
    if !storage.lists() {
        return Ok(Vec::new());
    }
    let folder = log_folder(snapshot.branch);
    let mut numbers: Vec<u64> = storage.list(&folder)?.iter().filter_map(|entry| record_number(&entry.name)).collect();
    numbers.push(snapshot.number); // Some stores return stale listings.
    numbers.sort_unstable();
    let mut expected = 0;
    let mut gaps = Vec::new();
    for number in numbers {
        // A listing may omit a record that was put while the store was listing.
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

/// Make the error for a missing record that precedes an existing one. An append into the gap would reuse the number of an earlier commit.
pub fn incomplete(storage: &dyn Store, folder: &str, missing: u64, beyond: u64) -> Error {
    let text = format!(
        "cannot use the log `{}/{folder}`: record {missing} is missing, but record {beyond} was written",
        storage.uri()
    );
    Error::new("log-incomplete", text).hint(
        "if this is an incomplete copy, copy it again (`log` and `refs` first, then the rest), or add the missing objects \
             with `cp -rn`; `penstock verify` lists them",
    )
}

/// Return the newest number among the first listed names. Returns None unless the numbers descend in steps of one, because some
/// stores list names in a different order.
fn first_listed(names: &[String]) -> Option<u64> {
    let numbers: Vec<u64> = names.iter().filter_map(|name| record_number(name)).collect();
    let dense = numbers.windows(2).all(|two| two[0].checked_sub(1) == Some(two[1]));
    numbers.first().copied().filter(|_| dense)
}
