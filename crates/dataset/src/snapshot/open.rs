//! Open the newest snapshot, a given snapshot, or another snapshot of an open dataset. Check that the log still contains an open
//! snapshot's record.

use std::sync::Arc;

use penstock_error::{Context as _, Error, Kind, Result};
use penstock_format::SnapshotId;
use penstock_format::ids::{log_folder, record_name, root_name};
use penstock_format::manifest::Root;
use penstock_format::names::NameKind;
use penstock_storage::Store;

use super::{Snapshot, copies};
use crate::config::now_us;
use crate::log::records::LogEntry;
use crate::log::refs::{self, MAIN};
use crate::log::{newest, records};
use crate::store::context::{Context, Incomplete, replaced};

impl Snapshot {
    /// Open the newest snapshot of a branch. Cost on local disk: a call to `copies::check`, and reads of the hint, the record and
    /// the root.
    pub fn open(context: Arc<Context>, branch: u64) -> Result<Snapshot> {
        let store = context.storage.as_ref();
        let newest =
            newest::newest_number(store, &log_folder(branch), None)?.ok_or_else(|| without_log(store, branch))?;
        let number = if context.incomplete == Incomplete::Permit {
            newest.number
        } else {
            newest.whole(store, &log_folder(branch))?
        };
        let entry = records::read_record(store, branch, number)?;
        entry.check_open()?;
        Snapshot::at_whole(context.clone(), entry, newest.written_in)
    }

    /// Open the newest snapshot of the branch with this name, or the newest one at a time. `warn` is called with a text if later commits may
    /// be as old. Cost: as for `open` or `open_as_of`, and `branch_id`.
    pub fn open_branch(
        context: Arc<Context>,
        name: &str,
        time_us: Option<i64>,
        warn: impl FnOnce(String),
    ) -> Result<Snapshot> {
        let branch = branch_id(&context, name).map_err(|error| absent(&context, error))?;
        match time_us {
            Some(time_us) => Snapshot::open_as_of(context, branch, time_us, warn),
            None => Snapshot::open(context, branch),
        }
    }

    /// Open the newest snapshot of a branch, or the snapshot of a tag. Costs the same as `open_branch` or `open_tag`.
    pub fn open_name(context: Arc<Context>, name: &str) -> Result<Snapshot> {
        let place = context.storage.uri().to_owned();
        match branch_id(&context, name) {
            Ok(branch) => Snapshot::open(context, branch),
            Err(error) if error.code() == "branch-not-found" => {
                Snapshot::open_tag(context, name).map_err(|error| match error.code() {
                    "name-not-found" => {
                        let text = format!("`{}` has no branch or tag `{name}`", place);
                        Error::new("name-not-found", text).hint("see ds.branches(), ds.tags() or `penstock branch`")
                    }
                    _ => error,
                })
            }
            Err(error) => Err(error),
        }
    }

    /// Open the newest snapshot of this branch. Costs the same as `open`, except that an unchanged root is not read.
    pub fn refreshed(&self) -> Result<Snapshot> {
        let SnapshotId { branch, number, .. } = self.id();
        let store = self.context.storage.as_ref();
        let entry = newest::newest(store, branch, Some(number))
            .and_then(|entry| entry.ok_or_else(|| without_log(store, branch)));
        let entry = entry.map_err(|error| self.context.or_replaced(error))?;
        self.context.hold_to(entry.record.dataset)?;
        self.check_log(Some(&entry))?;
        entry.check_open()?;
        self.near(entry)
    }

    /// Open the snapshot of a tag. Cost: finding the newest names record, and reading it, its object, the commit record and the root.
    pub fn open_tag(context: Arc<Context>, name: &str) -> Result<Snapshot> {
        let target = refs::tagged(&context, name).map_err(|error| absent(&context, error))?;
        let entry = records::named(context.storage.as_ref(), &target)?;
        let written_in = written_in(context.storage.as_ref(), target.branch);
        Snapshot::at_whole(context, entry, written_in)
    }

    /// Open the newest snapshot of a branch that was committed at or before a time, in microseconds since 1970 UTC. If the branch began
    /// later, its parent counts. Cost: as for `open`, and a search of the log, with a read for each doubling of the number of commits.
    fn open_as_of(context: Arc<Context>, branch: u64, time_us: i64, warn: impl FnOnce(String)) -> Result<Snapshot> {
        let store = context.storage.as_ref();
        let newest =
            newest::newest_number(store, &log_folder(branch), None)?.ok_or_else(|| without_log(store, branch))?;
        let (mut at, mut last) = (branch, newest.whole(store, &log_folder(branch))?);
        let mut newest_us = i64::MIN;
        let entry = loop {
            let end = records::read_record(store, at, last)?;
            newest_us = newest_us.max(end.record.time_us);
            if let Some(found) = as_of(store, end, time_us)? {
                break found;
            }
            let first = records::read_record(store, at, 0)?;
            (at, last) =
                first.record.parents.first().map(|parent| (parent.branch, parent.number)).ok_or_else(|| {
                    let text = format!("cannot open `{}` as of that time: the dataset was created later", store.uri());
                    Error::new("snapshot-not-found", text).hint("see `penstock log` for the times of commits")
                })?;
        };
        let ahead_us = newest_us.saturating_sub(now_us());
        if ahead_us > 0 && entry.record.time_us < newest_us {
            warn(format!(
                "`{}` was opened at snapshot {}, but later commits have times up to {} ahead of this machine's clock: some of them may have been made \
                 before the given time, on a machine with a wrong clock; see `penstock log`, and open such a snapshot by its id",
                store.uri(),
                entry.record.snapshot(),
                span(ahead_us)
            ));
        }
        let written_in = if at == branch { newest.written_in } else { written_in(store, at) };
        Snapshot::at_whole(context.clone(), entry, written_in)
    }

    /// Open the snapshot whose id this is, or the beginning of it with the number.
    pub fn open_at(context: Arc<Context>, snapshot: &str) -> Result<Snapshot> {
        let storage = context.storage.as_ref();
        let entry = records::beginning(storage, snapshot).map_err(|error| absent(&context, error))?;
        let written_in = written_in(storage, entry.record.branch);
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
        let root =
            Root::parse(&context.object(&name, &entry.record.root)?).context(|| format!("cannot read `{name}`"))?;
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
    /// read from the log. Cost: one read, unless `found` has this snapshot's number, and another one before it fails.
    pub fn check_log(&self, found: Option<&LogEntry>) -> Result<()> {
        let SnapshotId { branch, number, .. } = self.id();
        let store = self.context.storage.as_ref();
        if found.is_none() && records::is_there(store, &self.entry)? {
            return Ok(());
        }
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
        Err(replaced(&format!(
            "snapshot {} of `{}`: record {number} of its log has changed or is missing",
            self.id(),
            store.uri()
        )))
    }
}

/// Return the id of the branch with this name. Costs nothing for `main`; otherwise as for `refs::find`.
pub fn branch_id(context: &Context, name: &str) -> Result<u64> {
    if name == MAIN {
        return Ok(0);
    }
    refs::find(context, NameKind::Branch, name)?.map(|first| first.branch).ok_or_else(|| {
        let text = format!("`{}` has no branch `{name}`", context.storage.uri());
        Error::new("branch-not-found", text).hint("see ds.branches() or `penstock branch`")
    })
}

/// Return a time span for messages.
fn span(us: i64) -> String {
    let (minutes, days) = (us / 60_000_000, us / 86_400_000_000);
    match days {
        0 if minutes == 0 => format!("{} seconds", us / 1_000_000),
        0 => format!("{minutes} minutes"),
        _ => format!("{days} days"),
    }
}

/// Return the newest record of a log, up to record `last`, that is not later than a time. Returns None if record 0 is later.
fn as_of(store: &dyn Store, last: LogEntry, time_us: i64) -> Result<Option<LogEntry>> {
    let (branch, number) = (last.record.branch, last.record.number);
    let read = |number: u64| {
        records::read_record(store, branch, number)
            .map(|entry| Some(entry).filter(|entry| entry.record.time_us <= time_us))
    };
    if last.record.time_us <= time_us {
        return Ok(Some(last));
    }
    let Some(mut found) = read(0)? else { return Ok(None) };
    let mut later = number;
    while later - found.record.number > 1 {
        let middle = found.record.number + (later - found.record.number) / 2;
        match read(middle)? {
            Some(entry) => found = entry,
            None => later = middle,
        }
    }
    Ok(Some(found))
}

/// Return the folder in which a log's hint was written. Cost: a read, if folders have an identity.
fn written_in(store: &dyn Store, branch: u64) -> Option<u64> {
    store.place().and_then(|_| newest::hint(store, &log_folder(branch)).ok()?).map(|(_, place)| place)
}

/// Return `dataset-not-found` if an object is missing because the path has no dataset. If not, return `error`.
fn absent(context: &Context, error: Error) -> Error {
    let absent = error.kind() == Kind::NotFound && matches!(context.storage.exists(&record_name(0, 0)), Ok(false));
    if absent { not_found(context.storage.as_ref()) } else { error }
}

/// Make the error for a branch without a log.
fn without_log(storage: &dyn Store, branch: u64) -> Error {
    match branch {
        0 => not_found(storage),
        _ => newest::incomplete(storage, &log_folder(branch), 0, 0),
    }
}

fn not_found(storage: &dyn Store) -> Error {
    Error::new("dataset-not-found", format!("cannot open `{}`: it is not a dataset", storage.uri()))
        .hint("check the path, or create a dataset with ps.create or `penstock create`")
}
