//! Run the commit machine against a store.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_error::{Error, Result};
use penstock_format::Id;
use penstock_format::ids::{ObjectRef, log_folder, record_name, sealed_crc};
use penstock_format::manifest::Root;
use penstock_format::record::Record;
use penstock_format::rows::RowSet;
use penstock_format::schema::ColumnSpec;
use penstock_storage::{Created, process};

use super::changes::{NewSchema, Proposal};
use super::group_commit;
use super::keys::Keys;
use super::machine::{Event, Machine, Request, Taken};
use super::manifest::layout::Layout;
use super::manifest::root::write_root;
use crate::config::now_us;
use crate::log::newest::Seen;
use crate::log::records::LogEntry;
use crate::log::{newest, records};
use crate::snapshot::Snapshot;
use crate::store::context::Context;

/// Delete the last objects that were written, which belong to a root that no record refers to, because another commit was first. A
/// leftover object is harmless.
fn delete_last(context: &Context, puts: &mut Vec<String>, count: usize) {
    for name in puts.drain(puts.len() - count..) {
        let _ = context.delete(&name);
    }
}

/// Return the context of a handle, and its snapshot with a root that is kept open, to which all puts go. Records never change, so one check
/// of the log is enough until the commit.
pub fn held(base: &Arc<Snapshot>) -> Result<(Arc<Context>, Arc<Snapshot>)> {
    let home = base.context.clone();
    let Some(held) = home.held()? else { return Ok((home, base.clone())) };
    let base = base.within(held);
    base.check_log(None)?;
    Ok((home, Arc::new(base)))
}

/// Commit a proposal that was made at `base` on the handle `home`, and return the new snapshot. `puts` has the objects that were written for it,
/// and gets those that are written now. After success, nothing can fail.
pub fn commit(
    home: &Arc<Context>,
    base: &Arc<Snapshot>,
    puts: &mut Vec<String>,
    keys: &[Keys],
    proposal: Proposal,
) -> Result<Snapshot> {
    base.context.storage.prove()?;
    let snapshot = group_commit::commit(base, proposal, |proposal| commit_now(home, base, puts, keys, proposal))?;
    home.keep_files(snapshot.record());
    Ok(snapshot.within(home.clone()))
}

/// Commit a proposal, whatever other threads do.
fn commit_now(
    home: &Arc<Context>,
    base: &Arc<Snapshot>,
    puts: &mut Vec<String>,
    keys: &[Keys],
    proposal: Proposal,
) -> Result<Snapshot> {
    let store = base.context.storage.as_ref();
    let _turn = store.turn(&log_folder(base.id().branch));
    let (home, base, schema, staged) =
        (home.clone(), base.clone(), proposal.schema.clone(), proposal.own.changes.staged.clone());
    let layout = proposal.layout.clone();
    let mut driver = Driver {
        home,
        base,
        parent: None,
        root: None,
        next: None,
        puts,
        root_puts: 0,
        keys,
        staged,
        schema,
        layout,
        uncertain: false,
    };
    let snapshot = driver.drive(Machine::new(proposal))?;
    let record = snapshot.record();
    // If another process has committed in between, others may follow, so the newest record is looked for each time.
    let before = record.parents.first().map(|parent| parent.uuid);
    let (log, base) = (snapshot.log_key(), driver.base.id());
    let last = newest::seen(&log, base.number).map_or(base.uuid, |seen| seen.entry.record.uuid());
    let committed = || Seen { entry: snapshot.entry.clone(), root: snapshot.root.clone() };
    newest::note(log, (before == Some(last)).then(committed));
    newest::leave_hint(store, &log_folder(record.branch), record.number);
    Ok(snapshot)
}

/// Carries out the commit machine's requests.
struct Driver<'a> {
    home: Arc<Context>,
    /// The snapshot at which the transaction began.
    base: Arc<Snapshot>,
    /// The newest snapshot, which the commit will follow.
    parent: Option<Snapshot>,
    /// The root that this driver wrote for the parent's state.
    root: Option<(ObjectRef, Arc<Root>)>,
    /// The snapshot of the proposed commit, completed before the put so that nothing can fail afterwards.
    next: Option<Snapshot>,
    puts: &'a mut Vec<String>,
    /// The last `root_puts` of `puts` belong to that root.
    root_puts: usize,
    /// The unique keys that the transaction added.
    keys: &'a [Keys],
    /// The data files of the stages that the transaction added.
    staged: Arc<HashSet<Id>>,
    /// The new schema, if it changed.
    schema: Option<NewSchema>,
    /// How fragments are replaced, if they are.
    layout: Option<Arc<Layout>>,
    /// Whether the record may exist although no response has confirmed this. A failure then leaves the commit's state unknown.
    uncertain: bool,
}

impl Driver<'_> {
    fn drive(&mut self, mut machine: Machine) -> Result<Snapshot> {
        self.answer_all(&mut machine).map_err(|error| match self.uncertain && error.code() != "commit-state-unknown" {
            false => error,
            true => machine.unknown(&format!(": {}", error.message())),
        })
    }

    fn answer_all(&mut self, machine: &mut Machine) -> Result<Snapshot> {
        let base = self.base.clone();
        let store = base.context.storage.as_ref();
        let branch = base.id().branch;
        let mut event = Event::Begin;
        let mut lost: Option<Instant> = None;
        let mut asked = Instant::now();
        let mut known = base.id().number;
        loop {
            match &event {
                Event::Unknown | Event::Unreadable => {
                    let since = lost.get_or_insert(asked).elapsed();
                    if since > store.features().deadline {
                        return Err(Error::new(
                            "storage-failed",
                            format!("no definite response for {:.1} s", since.as_secs_f64()),
                        ));
                    }
                    if process::interrupted() {
                        return Err(Error::new("interrupted", "interrupted before the outcome was certain"));
                    }
                    std::thread::sleep(Duration::from_millis(10)); // Wait for a transient fault to pass.
                }
                Event::Exists => {} // The outcome is uncertain until the record is read.
                _ => lost = None,
            }
            let request = machine.step(event)?;
            asked = Instant::now();
            event = match request {
                Request::ReadNewest => self.read_newest(known).map_err(|error| base.context.or_replaced(error))?,
                Request::ReadSpan { first, end } => {
                    let between =
                        records::span(store, branch, first..end).map_err(|error| base.context.or_replaced(error))?;
                    Event::Span(between)
                }
                Request::ReadRowIds(sets) => {
                    let stored: Vec<RowSet> = sets.iter().map(|set| RowSet::Object(*set)).collect();
                    let found = base.context.row_ids(&stored)?;
                    Event::RowIds(sets.into_iter().zip(found).collect())
                }
                Request::CheckAppended { keys, stages } => Event::Appended(self.taken(&keys, stages)?),
                Request::WriteRoot => Event::RootWritten(self.write_root(None)?),
                Request::WriteWhole(record) => Event::WholeWritten(self.write_root(Some(*record))?),
                Request::Create { record, body } => {
                    let name = record_name(branch, record.number);
                    self.next = Some(self.snapshot_of(record, &body)?);
                    match store.create(&name, &body)? {
                        Created::Created => Event::Created,
                        Created::Exists => Event::Exists,
                        Created::Unknown => {
                            self.uncertain = true;
                            Event::Unknown
                        }
                    }
                }
                Request::Read { number } => match records::read_record(store, branch, number) {
                    Ok(entry) => {
                        base.context.hold_to(entry.record.dataset)?;
                        known = known.max(number);
                        // If another record has this number, our record can no longer be stored under it.
                        self.uncertain &= entry.record.uuid() == machine.uuid();
                        Event::Found(Box::new(entry))
                    }
                    Err(_) => {
                        self.uncertain = true;
                        Event::Unreadable
                    }
                },
                Request::Done(record) => {
                    if self.root.as_ref().is_some_and(|(object, _)| *object != record.root) {
                        delete_last(&self.base.context, self.puts, self.root_puts);
                    }
                    let next = self.next.take().filter(|next| next.id() == record.snapshot());
                    return next
                        .ok_or_else(|| Error::new("internal", "the machine reported a commit that was never put"));
                }
            };
        }
    }

    /// Write a root for the parent's state, or for that of a record which follows it. Delete the one that was written before, because another
    /// commit was first.
    fn write_root(&mut self, of: Option<Record>) -> Result<ObjectRef> {
        let parent =
            self.parent.as_ref().ok_or_else(|| Error::new("internal", "a root was requested without a parent"))?;
        delete_last(&self.base.context, self.puts, self.root_puts);
        let before = self.puts.len();
        let of = match of.map(|record| LogEntry { record: Arc::new(record), crc: 0 }) {
            None => Ok(None),
            Some(entry) => match &self.layout {
                None => parent.near(entry).map(Some),
                Some(layout) => layout.applied(parent, entry, self.puts).map(Some),
            },
        };
        self.root_puts = self.puts.len() - before;
        let of = of?;
        let parent = of.as_ref().unwrap_or(parent);
        let written = match &self.schema {
            Some(schema) => write_root(&parent.with_schema(schema.following(&parent.schema)?, &[]), self.puts),
            None => write_root(parent, self.puts),
        };
        self.root_puts = self.puts.len() - before;
        let (object, root) = written?;
        self.root = Some((object, root));
        Ok(object)
    }

    /// Return one of the transaction's keys that is in these rows of the parent, or one of its stages that the parent has.
    fn taken(&self, keys: &[RowSet], stages: bool) -> Result<Option<Taken>> {
        let parent = self
            .parent
            .as_ref()
            .ok_or_else(|| Error::new("internal", "keys were checked before any parent was read"))?;
        let parent = Arc::new(parent.within(parent.context.clone()));
        for ids in parent.context.row_ids(keys)? {
            for keys in self.keys {
                if let Some((row_id, key)) = keys.other_with_key(&parent, &ids)? {
                    return Ok(Some(Taken::Key { row_id, key, column: keys.column.name.clone() }));
                }
            }
        }
        let files = self.staged.iter().filter(|_| stages).copied().collect();
        let found = parent.rows_of_files(Some(&self.base), &files)?;
        Ok(found.into_iter().next().map(|(file, _)| Taken::Stage(file)))
    }

    /// Use the newest snapshot as the parent. Its number is at least `known`.
    fn read_newest(&mut self, known: u64) -> Result<Event> {
        let store = self.base.context.storage.as_ref();
        if self.parent.is_none()
            && let Some(seen) = newest::seen(&self.base.log_key(), self.base.id().number)
            && self.is_newest(&seen.entry)?
        {
            self.base.context.check_place(&self.home)?;
            return Ok(self.follow(Snapshot::with_root(self.base.context.clone(), seen.entry, seen.root)?));
        }
        let entry = newest::newest(store, self.base.id().branch, Some(known))?.ok_or_else(|| {
            Error::new("dataset-not-found", format!("cannot commit to `{}`: it is no longer a dataset", store.uri()))
        })?;
        self.base.context.check_place(&self.home)?;
        self.base.context.hold_to(entry.record.dataset)?;
        if self.parent.is_none() && Arc::ptr_eq(&self.home, &self.base.context) {
            self.base.check_log(Some(&entry))?;
        }
        let snapshot = self.parent.as_ref().unwrap_or(&self.base).near(entry)?;
        Ok(self.follow(snapshot))
    }

    /// Return whether the log has this record, which this process committed, and seems to have no later one. If it has, the put of the next
    /// record shows that. Cost: one read, and two look-ups on a local disk.
    fn is_newest(&self, entry: &LogEntry) -> Result<bool> {
        let (store, branch, number) = (self.base.context.storage.as_ref(), entry.record.branch, entry.record.number);
        if entry.record.uuid() != self.base.id().uuid && Arc::ptr_eq(&self.home, &self.base.context) {
            self.base.check_log(None)?;
        }
        let later = |ahead: u64| Ok(store.place().is_some() && store.exists(&record_name(branch, number + ahead))?);
        Ok(records::is_there(store, entry)? && !later(1)? && !later(2)?)
    }

    /// Use a snapshot as the parent.
    fn follow(&mut self, snapshot: Snapshot) -> Event {
        let count = |column: &ColumnSpec| (column.id, snapshot.word_count(column.id));
        let words = snapshot.schema.columns.iter().map(count).filter(|(_, count)| *count > 0).collect();
        let parent = Box::new(snapshot.entry.clone());
        self.parent = Some(snapshot);
        Event::Newest { parent, words, now_us: now_us() }
    }

    /// Return the snapshot of a record that is encoded as `body`, before it is put. What this commit adds to the parent's deltas is parsed
    /// as a reader would.
    fn snapshot_of(&self, record: Arc<Record>, body: &[u8]) -> Result<Snapshot> {
        let parent = self
            .parent
            .as_ref()
            .ok_or_else(|| Error::new("internal", "a record was proposed before any parent was read"))?;
        let new = record.deltas.strip_prefix(&parent.record().deltas[..]).unwrap_or(&record.deltas);
        let new = Record { deltas: new.to_vec(), ..Record::clone(&record) };
        if Record::parse(&new.encode().into(), record.branch, record.number)? != new {
            return Err(Error::new("internal", "the record of this commit cannot be read back as it was written"));
        }
        let entry = LogEntry { record, crc: sealed_crc(body) };
        match &self.root {
            Some((object, root)) if entry.record.root == *object => {
                Snapshot::with_root(self.base.context.clone(), entry, root.clone())
            }
            _ => parent.near(entry),
        }
    }
}
