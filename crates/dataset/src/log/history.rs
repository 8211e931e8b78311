//! The ancestors of a commit: its parents, their parents, and so on. `History` visits all of them, `Ancestry` only finds out which they are.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use penstock_error::{Error, Result};
use penstock_format::cursor::malformed;
use penstock_format::ids::record_name;
use penstock_format::record::{Parent, Record, RecordKind};
use penstock_storage::Store;

use super::records::{LogEntry, read_record};

/// A commit and its ancestors, newest first. No commit comes before one of its descendants.
pub struct History {
    /// By time, branch and number. A child is later than its parents.
    waiting: BTreeMap<(i64, u64, u64), LogEntry>,
    seen: HashSet<(u64, u64)>,
    last: Option<Arc<Record>>,
}

impl History {
    pub fn new(from: LogEntry) -> History {
        let mut history = History { waiting: BTreeMap::new(), seen: HashSet::new(), last: None };
        history.add(from);
        history
    }

    fn add(&mut self, entry: LogEntry) {
        let Record { time_us, branch, number, .. } = *entry.record;
        self.waiting.insert((time_us, branch, number), entry);
    }

    /// Return the next commit, or None at the end. Cost: one read for each parent of the commit before.
    pub fn next(&mut self, storage: &dyn Store) -> Result<Option<LogEntry>> {
        if let Some(child) = self.last.take() {
            for parent in &child.parents {
                if self.seen.insert((parent.branch, parent.number)) {
                    self.add(read_parent(storage, &child, parent)?);
                }
            }
        }
        let next = self.waiting.pop_last().map(|(_, entry)| entry);
        self.last = next.as_ref().map(|entry| entry.record.clone());
        Ok(next)
    }
}

/// Read a parent of a record, which must match the CRC, commit id, counters and time that its child implies.
fn read_parent(storage: &dyn Store, child: &Record, link: &Parent) -> Result<LogEntry> {
    let entry = read_record(storage, link.branch, link.number)?;
    let (parent, name) = (&entry.record, record_name(link.branch, link.number));
    if entry.crc != link.crc || parent.uuid() != link.uuid {
        let text = format!(
            "cannot read `{name}`: crc32c {:#010x}, expected {:#010x} (recorded by its child)",
            entry.crc, link.crc
        );
        return Err(Error::new("object-checksum", text));
    }
    let invalid =
        |what: &str| Err(malformed(format!("the commit {} {what} its parent {}", child.snapshot(), parent.snapshot())));
    let predecessor = (parent.branch, parent.number.checked_add(1)) == (child.branch, Some(child.number));
    if parent.dataset != child.dataset || parent.time_us >= child.time_us {
        return invalid("belongs to a different dataset from, or is not later than,");
    }
    if predecessor && parent.kind == RecordKind::Close {
        return invalid("follows the end of its branch:");
    }
    let second =
        child.parents.get(1).is_some_and(|second| (second.branch, second.number) == (parent.branch, parent.number));
    let takes_its_state = child.kind == RecordKind::Branch || child.kind == RecordKind::Reset && second;
    if takes_its_state && (child.samples, child.live) != (parent.samples, parent.live) {
        return invalid("has a different number of samples from");
    }
    if predecessor && (parent.lineage != child.lineage || child.landmark != parent.next_landmark()) {
        return invalid("disagrees on the lineage or the landmark with");
    }
    if predecessor && child.transactions.iter().any(|transaction| transaction.first_counter < parent.next_counter) {
        return invalid("assigns row ids already assigned by");
    }
    Ok(entry)
}

/// The newest ancestor of a commit in each log, with the commit itself. All earlier records of that log are ancestors, too.
#[derive(Debug, Default)]
pub struct Ancestry(HashMap<u64, u64>);

/// Landmarks and merged commits that were read, by branch and number.
struct KnownEntries(HashMap<(u64, u64), LogEntry>);

impl KnownEntries {
    fn get_or_read(&mut self, key: (u64, u64), read: impl FnOnce() -> Result<LogEntry>) -> Result<LogEntry> {
        Ok(match self.0.entry(key) {
            Entry::Occupied(known) => known.get().clone(),
            Entry::Vacant(free) => free.insert(read()?).clone(),
        })
    }
}

impl Ancestry {
    /// Cost: one read for each merge, reset and schema change among the ancestors, and for each branch, unless they are known.
    fn of(storage: &dyn Store, entry: &LogEntry, known_entries: &mut KnownEntries) -> Result<Ancestry> {
        let mut ancestry = Ancestry::default();
        let mut waiting = vec![entry.clone()];
        while let Some(LogEntry { record: mut at, .. }) = waiting.pop() {
            let known = ancestry.0.get(&at.branch).copied();
            if known >= Some(at.number) {
                continue;
            }
            ancestry.0.insert(at.branch, at.number);
            loop {
                for parent in at
                    .parents
                    .iter()
                    .filter(|parent| parent.branch != at.branch && !ancestry.has(parent.branch, parent.number))
                {
                    waiting.push(
                        known_entries
                            .get_or_read((parent.branch, parent.number), || read_parent(storage, &at, parent))?,
                    );
                }
                if at.number == 0 || known >= Some(at.landmark) {
                    break;
                }
                let landmark = known_entries
                    .get_or_read((at.branch, at.landmark), || read_record(storage, at.branch, at.landmark))?;
                at = landmark.record;
            }
        }
        Ok(ancestry)
    }

    /// Return whether a record is the commit or one of its ancestors.
    pub fn has(&self, branch: u64, number: u64) -> bool {
        self.0.get(&branch).is_some_and(|newest| number <= *newest)
    }

    /// Return the newest common ancestor in each log.
    fn common(&self, other: &Ancestry) -> Vec<(u64, u64)> {
        self.0.iter().filter_map(|(branch, number)| Some((*branch, *other.0.get(branch)?.min(number)))).collect()
    }
}

/// Return the merge bases of two commits: the common ancestors that are not ancestors of another one, latest first. There are several if each
/// side merged an older commit of the other one. Cost: one read for each merge, reset, schema change and branch among the ancestors.
pub fn merge_bases(storage: &dyn Store, one: &LogEntry, other: &LogEntry) -> Result<Vec<LogEntry>> {
    let both = [one, other].map(|entry| ((entry.record.branch, entry.record.number), entry.clone()));
    let known = &mut KnownEntries(HashMap::from(both));
    let common = Ancestry::of(storage, one, known)?.common(&Ancestry::of(storage, other, known)?);
    let mut candidates = Vec::new();
    for (branch, number) in common {
        let entry = known.get_or_read((branch, number), || read_record(storage, branch, number))?;
        let ancestry = Ancestry::of(storage, &entry, known)?;
        candidates.push((entry, ancestry));
    }
    let is_base = |(entry, _): &&(LogEntry, Ancestry)| {
        let Record { branch, number, .. } = *entry.record;
        !candidates.iter().any(|(other, ancestry)| other.record.branch != branch && ancestry.has(branch, number))
    };
    let mut bases: Vec<LogEntry> = candidates.iter().filter(is_base).map(|(entry, _)| entry.clone()).collect();
    bases.sort_by_key(|entry| std::cmp::Reverse(entry.record.time_us));
    if bases.is_empty() { Err(malformed("two commits of one dataset have no common ancestor")) } else { Ok(bases) }
}
