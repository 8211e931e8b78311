//! Open the newest snapshot, a given snapshot, or another snapshot of an open dataset. Check that the log still contains an open
//! snapshot's record.

use std::sync::Arc;

use penstock_error::{Context as _, Error, Kind, Result};
use penstock_format::SnapshotId;
use penstock_format::ids::{log_folder, record_name, root_name};
use penstock_format::manifest::Root;
use penstock_storage::Storage;

use super::{Snapshot, copies};
use crate::log::records::LogEntry;
use crate::log::{newest, records, refs};
use crate::store::context::{Context, Incomplete, replaced};

impl Snapshot {
    /// Open the newest snapshot of a branch. Cost on local disk: a call to `copies::check`, and reads of the hint, the record and
    /// the root.
    pub fn open(context: Arc<Context>, branch: u64) -> Result<Snapshot> {
        let store = context.storage.as_ref();
        let newest = newest::newest_number(store, &log_folder(branch), None)?.ok_or_else(|| not_found(store))?;
        let number = if context.incomplete == Incomplete::Permit { newest.number } else { newest.whole(store, &log_folder(branch))? };
        let entry = records::read_record(store, branch, number)?;
        Snapshot::at_whole(context.clone(), entry, newest.written_in)
    }

    /// Open the newest snapshot of this branch. Costs the same as `open`, except that an unchanged root is not read.
    pub fn refreshed(&self) -> Result<Snapshot> {
        let SnapshotId { branch, number, .. } = self.id();
        let store = self.context.storage.as_ref();
        let entry = newest::newest(store, branch, Some(number)).and_then(|entry| entry.ok_or_else(|| not_found(store)));
        let entry = entry.map_err(|error| self.context.or_replaced(error))?;
        self.context.hold_to(entry.record.dataset)?;
        self.check_log(Some(&entry))?;
        self.near(entry)
    }

    /// Open the snapshot of a tag. Cost: finding the newest names record, and reading it, its object, the commit record and the root.
    pub fn open_tag(context: Arc<Context>, name: &str) -> Result<Snapshot> {
        let target = refs::tagged(&context, name).map_err(|error| absent(&context, error))?;
        let entry = records::named(context.storage.as_ref(), &target)?;
        let written_in = written_in(context.storage.as_ref(), target.branch);
        Snapshot::at_whole(context, entry, written_in)
    }

    /// Open the newest snapshot of a branch that was committed at or before a time, in microseconds since 1970 UTC. Cost: as for `open`, and
    /// a search of the log, with a read for each doubling of the number of commits.
    pub fn open_as_of(context: Arc<Context>, branch: u64, time_us: i64) -> Result<Snapshot> {
        let store = context.storage.as_ref();
        let newest = newest::newest_number(store, &log_folder(branch), None)?.ok_or_else(|| not_found(store))?;
        let last = newest.whole(store, &log_folder(branch))?;
        let read = |number: u64| {
            records::read_record(store, branch, number).map(|entry| Some(entry).filter(|entry| entry.record.time_us <= time_us))
        };
        let entry = match read(last)? {
            Some(entry) => entry,
            None => {
                let mut found = read(0)?.ok_or_else(|| {
                    let text = format!("cannot open `{}` as of that time: the dataset was created later", store.uri());
                    Error::new("snapshot-not-found", text).hint("see `penstock log` for the times of commits")
                })?;
                let mut later = last;
                while later - found.record.number > 1 {
                    let middle = found.record.number + (later - found.record.number) / 2;
                    match read(middle)? {
                        Some(entry) => found = entry,
                        None => later = middle,
                    }
                }
                found
            }
        };
        Snapshot::at_whole(context.clone(), entry, newest.written_in)
    }

    pub fn open_at(context: Arc<Context>, snapshot: &SnapshotId) -> Result<Snapshot> {
        if !context.storage.exists(&record_name(snapshot.branch, 0))? {
            return Err(not_found(context.storage.as_ref()));
        }
        let entry = records::named(context.storage.as_ref(), snapshot)?;
        let written_in = written_in(context.storage.as_ref(), snapshot.branch);
        Snapshot::at_whole(context, entry, written_in)
    }

    /// Open the snapshot of a record as `at` does, but refuse an incomplete copy. `written_in` is the folder in which the log's
    /// hint was written.
    fn at_whole(context: Arc<Context>, entry: LogEntry, written_in: Option<u64>) -> Result<Snapshot> {
        let root = root_name(entry.record.root.id);
        let snapshot = Snapshot::at(context.clone(), entry)
            .map_err(|error| copies::without_root(context.storage.as_ref(), written_in, root, error))?;
        copies::check(&snapshot, written_in)?;
        Ok(snapshot)
    }

    /// Open the snapshot of a record. Cost: reads the record's root.
    pub fn at(context: Arc<Context>, entry: LogEntry) -> Result<Snapshot> {
        context.hold_to(entry.record.dataset)?;
        let name = root_name(entry.record.root.id);
        let root = Root::parse(&context.object(&name, &entry.record.root)?).context(|| format!("cannot read `{name}`"))?;
        Snapshot::with_root(context, entry, Arc::new(root))
    }

    /// Open the snapshot of another record of this dataset. Cost: reads the root, unless both snapshots share it.
    pub fn near(&self, entry: LogEntry) -> Result<Snapshot> {
        self.context.hold_to(entry.record.dataset)?;
        match entry.record.root == self.record().root {
            true => Snapshot::with_root(self.context.clone(), entry, self.root.clone()),
            false => Snapshot::at(self.context.clone(), entry),
        }
    }

    /// Refuse a log that differs from this snapshot's log, for example in a copy that has different commits. `found` is a record just
    /// read from the log. Cost: one read, unless `found` has this snapshot's number.
    pub fn check_log(&self, found: Option<&LogEntry>) -> Result<()> {
        let SnapshotId { branch, number, .. } = self.id();
        let store = self.context.storage.as_ref();
        let read = match found.filter(|found| found.record.number == number) {
            Some(found) => Some(found.crc),
            None => match records::read_record(store, branch, number) {
                Ok(found) => {
                    self.context.hold_to(found.record.dataset)?;
                    Some(found.crc)
                }
                Err(error) if error.kind() == Kind::NotFound => {
                    self.context.check_dataset()?;
                    None
                }
                Err(error) => return Err(error),
            },
        };
        if read == Some(self.entry.crc) {
            return Ok(());
        }
        Err(replaced(&format!("snapshot {} of `{}`: record {number} of its log has changed or is missing", self.id(), store.uri())))
    }
}

/// Return the folder in which a log's hint was written. Cost: a read, if folders have an identity.
fn written_in(store: &dyn Storage, branch: u64) -> Option<u64> {
    store.place().and_then(|_| newest::hint(store, &log_folder(branch))).map(|(_, place)| place)
}

/// Return `dataset-not-found` if an object is missing because the path has no dataset. If not, return `error`.
fn absent(context: &Context, error: Error) -> Error {
    let absent = error.kind() == Kind::NotFound && matches!(context.storage.exists(&record_name(0, 0)), Ok(false));
    if absent { not_found(context.storage.as_ref()) } else { error }
}

fn not_found(storage: &dyn Storage) -> Error {
    Error::new("dataset-not-found", format!("cannot open `{}`: it is not a dataset", storage.uri()))
        .hint("check the path, or create a dataset with ps.create or `penstock create`")
}
