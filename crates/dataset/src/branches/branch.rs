//! Create, list and delete branches (spec section 10).

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use penstock_error::{Error, Kind, Result};
use penstock_format::SnapshotId;
use penstock_format::ids::{LINEAGES, NAMES_FOLDER, log_folder, numbered, record_name};
use penstock_format::manifest::Root;
use penstock_format::names::NameKind;
use penstock_format::record::{RECORD_BYTES, Record, RecordKind, Transaction};
use penstock_storage::{Created, create_certainly};

use crate::commit::changes::transaction_entry;
use crate::commit::manifest::root::write_root;
use crate::commit::written::{Texts, Written};
use crate::config::now_us;
use crate::log::records::{self, LogEntry};
use crate::log::refs::MAIN;
use crate::log::{newest, refs};
use crate::snapshot::Snapshot;
use crate::snapshot::open::branch_id;
use crate::store::context::Context;

/// Lineages have this many bits. The bits above them are random if a log with the number of a lineage already exists.
const LINEAGE_BITS: u32 = LINEAGES.trailing_zeros();

/// Create a branch that begins at this snapshot, and return its first snapshot. Cost: two small creates, and as for `refs::names`.
pub fn create_branch(at: &Snapshot, name: &str, author: &str) -> Result<Snapshot> {
    at.record().check_writable()?;
    let context = &at.context;
    let (mut made, mut puts): (Option<Snapshot>, Vec<String>) = Default::default();
    // Nobody knows this log and its root.
    let remove = |here: &Context, made: &mut Option<Snapshot>, puts: &mut Vec<String>| {
        puts.extend(made.take().map(|first| record_name(first.id().branch, 0)));
        for name in puts.drain(..).rev() {
            let _ = here.delete(&name);
        }
    };
    let created = refs::create_name(context, NameKind::Branch, name, |here, number| {
        remove(here, &mut made, &mut puts);
        here.storage.prove()?;
        // Nothing may fail after the name is set, so the snapshot is opened before.
        let first = put_first(here, at, number + 1, (name, author), &mut puts)?;
        let target = first.id();
        made = Some(first);
        Ok(target)
    });
    let first = match created {
        Ok(first) => {
            made.filter(|made| made.id() == first).ok_or_else(|| Error::new("internal", "a branch has no log"))?
        }
        Err(error) => {
            if error.code() != "commit-state-unknown" {
                remove(context, &mut made, &mut puts);
            }
            return Err(error);
        }
    };
    newest::leave_hint(context.storage.as_ref(), &log_folder(first.id().branch), 0);
    Ok(first)
}

/// Put record 0 of a log that does not exist, and return its snapshot.
fn put_first(
    here: &Context,
    at: &Snapshot,
    lineage: u64,
    (name, author): (&str, &str),
    puts: &mut Vec<String>,
) -> Result<Snapshot> {
    if lineage >= LINEAGES {
        let text = format!("after {} operations on names, no lineage is left for another branch", lineage - 1);
        return Err(Error::new("invalid-argument", text).hint("copy the snapshot into a new dataset"));
    }
    let storage = here.storage.as_ref();
    // A branch has commits only after it was named.
    let is_used = at.record().lineage >= lineage || storage.exists(&record_name(lineage, 1))?;
    // A listing may be older than the snapshot, which then may have row ids of this lineage already: those of a branch that was named and merged since.
    if storage.exists(&numbered(NAMES_FOLDER, lineage - 1))? {
        return Err(Error::new("conflict", "another writer was faster"));
    }
    if is_used {
        let text =
            format!("cannot create a branch of `{}`: `refs` has fewer records than there are branches", storage.uri());
        return Err(Error::new("log-incomplete", text).hint("if this is an incomplete copy, copy `refs` again"));
    }
    let (mut record, root) = first_record(here, at, lineage, (name, author), puts)?;
    loop {
        let body = record.encode();
        let stored = create_certainly(storage, &record_name(record.branch, 0), &body)?;
        let is_ours = stored == Created::Created
            || match records::read_record(storage, record.branch, 0) {
                Err(error) if error.kind() == Kind::NotFound => false, // Another writer lost the race for the name, and deleted it.
                found => found?.record.uuid() == record.uuid(),
            };
        match is_ours {
            false => {
                // Another writer, or an earlier attempt that did not finish, uses this log.
                let random = here.new_id()?.0.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
                record.branch = random << LINEAGE_BITS | lineage;
            }
            true => {
                return Snapshot::with_root(at.context.clone(), LogEntry::parse(&body.into(), record.branch, 0)?, root);
            }
        }
    }
}

/// Return record 0 of a branch that begins at a snapshot, whose state it has, and its root. `puts` gets the objects that are written for it.
fn first_record(
    here: &Context,
    at: &Snapshot,
    lineage: u64,
    (name, author): (&str, &str),
    puts: &mut Vec<String>,
) -> Result<(Record, Arc<Root>)> {
    let before = at.record();
    let entry = transaction_entry(here.new_id()?, &format!("create branch {name}"), author, "{}", (0, 0))?;
    let record = Record {
        kind: RecordKind::Branch,
        branch: lineage,
        number: 0,
        time_us: now_us().max(before.time_us + 1),
        landmark: 0,
        parents: vec![at.entry.as_parent()],
        transactions: vec![Transaction { first_counter: 0, ..entry }],
        lineage,
        next_counter: 0,
        changes: Vec::new(),
        data: Bytes::new(),
        ..before.clone()
    };
    if record.encode().len() <= RECORD_BYTES {
        return Ok((record, at.root.clone()));
    }
    // A long name may leave no room for the deltas.
    let (object, root) = write_root(at, puts)?;
    Ok((Record { root: object, deltas: Vec::new(), ..record }, root))
}

/// Return the newest snapshot of each branch by name, `main` included. A branch that is being deleted is left out. Cost: as for
/// `refs::names`, then for each branch a call to `newest_number` and a read.
pub fn branches(context: &Context) -> Result<BTreeMap<String, SnapshotId>> {
    let mut found = BTreeMap::new();
    let named = refs::names(context, NameKind::Branch)?.into_iter().map(|(name, first)| (name, first.branch));
    for (name, branch) in [(MAIN.to_owned(), 0)].into_iter().chain(named) {
        let entry = newest_of(context, &name, branch)?;
        if entry.check_open().is_ok() {
            found.insert(name, entry.record.snapshot());
        }
    }
    Ok(found)
}

fn newest_of(context: &Context, name: &str, branch: u64) -> Result<LogEntry> {
    newest::newest(context.storage.as_ref(), branch, None)?.ok_or_else(|| {
        Error::new("branch-not-found", format!("branch `{name}` of `{}` has no log", context.storage.uri()))
    })
}

/// Return the name of a branch, or None if it was deleted. Costs nothing for `main`; otherwise as for `refs::names`.
pub fn branch_name(context: &Context, branch: u64) -> Result<Option<String>> {
    if branch == 0 {
        return Ok(Some(MAIN.to_owned()));
    }
    Ok(refs::names(context, NameKind::Branch)?
        .into_iter()
        .find(|(_, first)| first.branch == branch)
        .map(|(name, _)| name))
}

/// Delete a branch: end its log, then remove its name. Its snapshots remain. Cost: a commit, and as for `refs::delete_tag`.
pub fn delete_branch(context: &Arc<Context>, name: &str, author: &str) -> Result<()> {
    if name == MAIN {
        let text = format!("cannot delete branch `{MAIN}` of `{}`", context.storage.uri());
        return Err(Error::new("invalid-argument", text).hint("ds.reset(snapshot) returns to an earlier state"));
    }
    context.check_dataset()?;
    let branch = branch_id(context, name)?;
    let newest = newest_of(context, name, branch)?;
    // An earlier attempt may have ended the log already.
    if newest.check_open().is_ok() {
        let mut written = Written::at(&Arc::new(Snapshot::at(context.clone(), newest)?))?;
        let texts = Texts { message: &format!("delete branch {name}"), author, properties: "{}" };
        let proposal = written.proposal(RecordKind::Close, texts, (0, 0))?;
        match written.commit(proposal) {
            Err(error) if error.code() != "branch-not-found" => return Err(error),
            _ => {} // Or another process was first.
        }
    }
    refs::remove_branch(context, name, branch)
}
