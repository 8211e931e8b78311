//! The commit protocol as a state machine without I/O, which takes events and returns requests (spec section 12). `drive` runs
//! the machine against a store, and tests run it with responses in random order.

use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use penstock_error::{Error, Result};
use penstock_format::Id;
use penstock_format::ids::{ObjectRef, Run, row_id};
use penstock_format::record::{Change, ChangeKind, Delta, RECORD_BYTES, RECORD_DELTAS, Record, Transaction};
use penstock_format::rows::{RowIds, RowIdsRef, RowSet};

use super::changes::Proposal;
use super::conflict::{self, AGAIN, Verdict, columns_meet};
use crate::log::records::LogEntry;

/// Maximum number of uncertain responses for one record; one more fails with `commit-state-unknown`.
const UNCERTAIN_TRIES: u32 = 20;

/// Maximum number of lost races; one more fails with `conflict`.
const REBASES: u32 = 10_000;

/// The next operation that the machine requests. Each variant lists the events that may answer the request.
#[derive(Debug, Clone)]
pub enum Request {
    /// Read the newest record and its snapshot's word counts. Answered by `Newest`.
    ReadNewest,
    /// Read the records from `first` up to the parent's predecessor. Answered by `Span`.
    ReadSpan { first: u64, end: u64 },
    /// Read these sets of row ids, which other commits changed or which this transaction needs. Answered by `RowIds`.
    ReadRowIds(Vec<RowIdsRef>),
    /// Look for this transaction's keys in these rows of the parent, and for its stages in the parent. Answered by `Appended`.
    CheckAppended { keys: Vec<RowSet>, stages: bool },
    /// Write a root for the parent's state, with the new schema if there is one. Answered by `RootWritten`.
    WriteRoot,
    /// Write a root for the state of this record, which is too large, with the new schema if there is one. Answered by `WholeWritten`.
    WriteWhole(Box<Record>),
    /// Put a record whose name must not exist yet. Answered by `Created`, `Exists` or `Unknown`.
    Create { record: Arc<Record>, body: Vec<u8> },
    /// Read the existing record with this number. Answered by `Found` or `Unreadable`.
    Read { number: u64 },
    /// The commit succeeded with this record.
    Done(Arc<Record>),
}

/// The result of a request. `Begin` starts the machine.
#[derive(Debug, Clone)]
pub enum Event {
    Begin,
    Newest { parent: Box<LogEntry>, words: Vec<(u64, u64)>, now_us: i64 },
    Span(Vec<LogEntry>),
    RowIds(Vec<(RowIdsRef, Arc<RowIds>)>),
    Appended(Option<Taken>),
    RootWritten(ObjectRef),
    WholeWritten(ObjectRef),
    Created,
    Exists,
    Unknown,
    Found(Box<LogEntry>),
    Unreadable,
}

/// Something unique that another commit has as well.
#[derive(Debug, Clone)]
pub enum Taken {
    /// A row that has one of the keys, the key as text, and its column.
    Key { row_id: u64, key: String, column: String },
    /// A data file of a stage.
    Stage(Id),
}

/// Where the deltas of the next record are.
#[derive(Clone, Copy)]
enum Deltas {
    /// In the record, after those of the parent.
    Joined,
    /// In the record. This root has the parent's state.
    Alone(ObjectRef),
    /// This root has them, and the parent's state.
    InRoot(ObjectRef),
}

/// One commit in progress.
#[derive(Clone)]
pub struct Machine {
    proposal: Proposal,
    parent: Option<Box<LogEntry>>,
    words: Vec<(u64, u64)>,
    now_us: i64,
    /// Records that have not been checked for conflicts, oldest first.
    unseen: Vec<LogEntry>,
    sent: Option<Arc<Record>>,
    /// The number of the last record that was checked for conflicts.
    checked: u64,
    uncertain: u32,
    rebases: u32,
}

/// Shows what distinguishes two states of one commit.
impl fmt::Debug for Machine {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Machine { parent, unseen, sent, checked, uncertain, rebases, .. } = self;
        let number = |entry: &LogEntry| (entry.record.number, entry.crc);
        let unseen: Vec<(u64, u32)> = unseen.iter().map(number).collect();
        let (parent, sent) = (
            parent.as_deref().map(number),
            sent.as_deref().map(|sent| (sent.number, sent.parents.first().map(|parent| parent.crc))),
        );
        write!(
            out,
            "{} parent {parent:?} unseen {unseen:?} sent {sent:?} checked {checked} tries {uncertain} {rebases}",
            self.uuid()
        )
    }
}

impl Machine {
    pub fn new(proposal: Proposal) -> Machine {
        let checked = proposal.base;
        Machine {
            proposal,
            parent: None,
            words: Vec::new(),
            now_us: 0,
            unseen: Vec::new(),
            sent: None,
            checked,
            uncertain: 0,
            rebases: 0,
        }
    }

    pub fn uuid(&self) -> Id {
        self.proposal.uuid()
    }

    pub fn step(&mut self, event: Event) -> Result<Request> {
        match event {
            Event::Begin => Ok(Request::ReadNewest),
            Event::Newest { parent, words, now_us } => {
                parent.check_open()?;
                self.parent = Some(parent);
                self.words = words;
                self.now_us = now_us;
                let parent = &self.parent()?.record;
                let (first, end) = (self.checked + 1, parent.number);
                // Appends commute with everything except landmarks.
                let bare = self.proposal.members().all(|member| member.changes.is_bare_append());
                match (parent.next_landmark() > self.checked || !bare || self.proposal.may_exist) && first < end {
                    true => Ok(Request::ReadSpan { first, end }),
                    false => self.rebase(Vec::new()),
                }
            }
            Event::Span(between) => self.rebase(between),
            Event::RowIds(sets) => {
                self.proposal.row_ids.extend(sets);
                self.check()
            }
            Event::Appended(None) => {
                self.unseen.clear();
                self.propose(Deltas::Joined)
            }
            Event::Appended(Some(Taken::Stage(file))) => Err(self
                .taken(None, &format!("added the stage with data file `{file}`"))
                .hint(format!("{AGAIN}; tx.add then returns the row ids of that commit"))),
            Event::Appended(Some(Taken::Key { row_id, key, column })) => {
                let error =
                    self.taken(Some(row_id), &format!("added the key {key} in column `{column}` (row id {row_id})"));
                Err(error
                    .column(column)
                    .row_ids(vec![row_id.cast_signed()])
                    .hint(format!("{AGAIN}, which then updates that sample")))
            }
            Event::RootWritten(root) => self.propose(Deltas::Alone(root)),
            Event::WholeWritten(root) => self.propose(Deltas::InRoot(root)),
            Event::Created => self.done(),
            Event::Exists => {
                let number = self.sent()?.number;
                Ok(Request::Read { number })
            }
            Event::Found(entry) if entry.record.uuid() == self.uuid() => match entry.record == *self.sent()? {
                true => self.done(),
                false => Err(committed_elsewhere(&entry.record)), // A copy of the journal had other changes.
            },
            Event::Found(_) => {
                self.uncertain = 0;
                self.rebases += 1;
                if self.rebases > REBASES {
                    return Err(Error::new(
                        "conflict",
                        format!("cannot commit: lost more than {REBASES} races in a row"),
                    )
                    .hint("commit less often, with more samples per commit"));
                }
                Ok(Request::ReadNewest)
            }
            // Put the same body under the same number again, to learn the outcome.
            Event::Unknown | Event::Unreadable => {
                self.uncertain += 1;
                if self.uncertain > UNCERTAIN_TRIES {
                    return Err(self.unknown(""));
                }
                let record = self.sent()?.clone();
                Ok(Request::Create { body: record.encode(), record })
            }
        }
    }

    /// Make the error for a put whose outcome is not known. It names the snapshot that the commit would be, for `resolve`, and `cause`.
    pub fn unknown(&self, cause: &str) -> Error {
        let snapshot =
            self.sent.as_ref().map_or_else(|| self.uuid().to_string(), |record| record.snapshot().to_string());
        Error::new(
            "commit-state-unknown",
            format!("cannot determine whether the commit succeeded as snapshot {snapshot}{cause}"),
        )
        .hint(format!("nothing was deleted; ds.resolve(\"{snapshot}\") finds out once the storage responds again"))
    }

    /// Make the error for something that another commit has taken. It names the commit that changed the row, or that appended anything, if
    /// there is only one.
    fn taken(&self, row_id: Option<u64>, what: &str) -> Error {
        let may_be = |change: &Change| match row_id {
            Some(row_id) => change.rows.range().contains(&row_id),
            None => change.kind == ChangeKind::Append,
        };
        let mut commits = self.unseen.iter().filter(|entry| entry.record.changes.iter().any(may_be));
        match (commits.next(), commits.next()) {
            (Some(entry), None) => {
                let snapshot = entry.record.snapshot();
                let text = format!("cannot commit: commit {snapshot}, made in the meantime, {what}");
                Error::new("conflict", text).commit(snapshot)
            }
            _ => Error::new("conflict", format!("cannot commit: another commit, made in the meantime, {what}")),
        }
    }

    fn sent(&self) -> Result<&Arc<Record>> {
        self.sent.as_ref().ok_or_else(|| Error::new("internal", "a response arrived before anything was put"))
    }

    fn done(&mut self) -> Result<Request> {
        self.sent
            .take()
            .map(Request::Done)
            .ok_or_else(|| Error::new("internal", "a response arrived before anything was put"))
    }

    fn parent(&self) -> Result<&LogEntry> {
        self.parent.as_deref().ok_or_else(|| Error::new("internal", "a response arrived before any parent was read"))
    }

    /// Begin to check the records that this transaction has not seen: those in between, and the parent.
    fn rebase(&mut self, between: Vec<LogEntry>) -> Result<Request> {
        let newest = self.parent()?.clone();
        self.unseen = between;
        self.unseen.extend((newest.record.number > self.checked).then_some(newest));
        let own =
            |entry: &&LogEntry| entry.record.transactions.iter().any(|transaction| transaction.uuid == self.uuid());
        if let Some(entry) = self.unseen.iter().filter(|_| self.proposal.may_exist).find(own) {
            return Err(committed_elsewhere(&entry.record));
        }
        self.check()
    }

    /// Check the unseen records, then propose the next record.
    fn check(&mut self) -> Result<Request> {
        let Proposal { own, row_ids, columns, .. } = &self.proposal;
        let mut missing = Vec::new();
        if let Some(entry) = self.unseen.iter().find(|entry| own.changes.is_repeated_by(&entry.record)) {
            let snapshot = entry.record.snapshot();
            let text = format!("cannot commit: commit {snapshot}, made in the meantime, imported the same source");
            return Err(Error::new("conflict", text).commit(snapshot).hint(AGAIN));
        }
        for (entry, member) in
            self.unseen.iter().flat_map(|entry| self.proposal.members().map(move |member| (entry, member)))
        {
            match conflict::judge(&member.changes, &entry.record.changes, row_ids) {
                Verdict::Follows => {}
                Verdict::Conflict(found) => return Err(conflict::error(&found, &entry.record, columns)),
                Verdict::Depends(sets) => {
                    missing.extend(sets.into_iter().filter(|set| !missing.contains(set)).collect::<Vec<_>>())
                }
            }
        }
        if !missing.is_empty() {
            return Ok(Request::ReadRowIds(missing));
        }
        let keys: Vec<RowSet> =
            self.unseen.iter().flat_map(|entry| own.changes.rows_with_keys(&entry.record.changes)).cloned().collect();
        let stages = self.unseen.iter().any(|entry| own.changes.may_share_stage(&entry.record.changes));
        // A merge lists samples that it brings back as appended.
        let theirs = self.unseen.iter().flat_map(|entry| &entry.record.changes);
        let theirs = theirs.filter(|change| matches!(change.kind, ChangeKind::Value | ChangeKind::Append));
        for delta in &mut self.proposal.own.deltas {
            let Delta::Attachment(attachment) = delta else { continue };
            let covered = attachment.rows.range();
            let changes_covered_rows = |change: &&Change| {
                let rows = change.rows.range();
                rows.start < covered.end
                    && covered.start < rows.end
                    && columns_meet(&attachment.columns, &change.columns)
            };
            let meeting =
                theirs.clone().filter(|change| !attachment.columns.is_empty() && changes_covered_rows(change));
            attachment.changed.extend(meeting.map(|change| change.rows.clone()));
        }
        self.checked = self.parent()?.record.number;
        if !keys.is_empty() || stages {
            return Ok(Request::CheckAppended { keys, stages });
        }
        self.unseen.clear();
        self.propose(Deltas::Joined)
    }

    /// Build the record that follows the parent, and request that it be put. If its deltas exceed the limits, request a root
    /// first.
    fn propose(&mut self, deltas: Deltas) -> Result<Request> {
        let parent = self.parent()?;
        parent.record.check_writable()?;
        if parent.record.gc_epoch > self.proposal.gc_epoch {
            return Err(Error::new(
                "transaction-expired",
                "cannot commit: a garbage collection began after this transaction and may have removed its files",
            )
            .hint("run the transaction again"));
        }
        let state = self.proposal.theirs.state.as_ref();
        if state.is_some() && parent.record.number != self.proposal.base {
            let text = format!("cannot commit: commit {} was made in the meantime", parent.record.snapshot());
            return Err(Error::new("conflict", text).hint("refresh the handle and repeat the call"));
        }
        let is_first = matches!(deltas, Deltas::Joined) && state.is_none();
        let mut record = self.record(parent, deltas);
        record.take_data();
        let body = record.encode();
        let exceeds = |deltas: usize, body: &[u8]| deltas > RECORD_DELTAS || body.len() > RECORD_BYTES;
        if is_first && self.proposal.layout.is_some() {
            return Ok(Request::WriteWhole(Box::new(record)));
        }
        // A root contains the schema.
        if exceeds(record.deltas.len(), &body) || is_first && self.proposal.schema.is_some() {
            if !is_first {
                let text = format!(
                    "cannot commit: the record has {} bytes and {} deltas, but the limits are {RECORD_BYTES} and {RECORD_DELTAS}",
                    body.len(),
                    record.deltas.len()
                );
                return Err(Error::new("invalid-argument", text).hint(
                    "update columns of the same samples in one call, commit in parts, or shorten the message, author or properties",
                ));
            }
            let mut alone = self.record(parent, Deltas::Alone(parent.record.root));
            alone.take_data();
            return Ok(match exceeds(alone.deltas.len(), &alone.encode()) {
                true => Request::WriteWhole(Box::new(self.record(parent, Deltas::Joined))),
                false => Request::WriteRoot,
            });
        }
        let record = Arc::new(record);
        self.sent = Some(record.clone());
        Ok(Request::Create { record, body })
    }

    /// Build the record that follows the parent. Its small data files are still in memory.
    fn record(&self, parent: &LogEntry, place: Deltas) -> Record {
        let (before, proposal) = (&parent.record, &self.proposal);
        let first_code =
            |column: u64| self.words.iter().find(|(known, _)| *known == column).map_or(0, |(_, count)| *count);
        let (mut root, mut deltas) = match place {
            Deltas::Joined => (before.root, before.deltas.clone()),
            Deltas::Alone(root) | Deltas::InRoot(root) => (root, Vec::new()),
        };
        let (mut transactions, mut changes, mut next_counter) = (Vec::new(), Vec::new(), before.next_counter);
        for member in proposal.members() {
            let (base, assigned) = (row_id(before.lineage, next_counter), member.transaction.assigned);
            if !matches!(place, Deltas::InRoot(_)) {
                deltas.extend(member.deltas.iter().map(|delta| delta.resolved(base, first_code)));
            }
            changes
                .extend(member.changes.resolved(base, (assigned > 0).then_some(Run { first: base, count: assigned })));
            transactions.push(Transaction { first_counter: next_counter, ..member.transaction.clone() });
            next_counter += assigned;
        }
        let added: u64 = transactions.iter().map(|transaction| transaction.samples_added).sum();
        let deleted: u64 = transactions.iter().map(|transaction| transaction.samples_deleted).sum();
        let (theirs, later) = proposal.theirs.parent.clone().unzip();
        let physical = proposal.theirs.physical.unwrap_or(added.cast_signed());
        let (mut samples, mut live) =
            (before.samples.saturating_add_signed(physical), (before.live + added).saturating_sub(deleted));
        if let Some(state) = &proposal.theirs.state {
            (root, deltas, samples, live) = (state.root, Vec::new(), state.samples, state.live);
        }
        let (number, earlier) = (before.number + 1, before.time_us.max(later.unwrap_or(i64::MIN)));
        Record {
            kind: proposal.kind,
            dataset: before.dataset,
            branch: before.branch,
            number,
            features_read: before.features_read | proposal.features,
            features_write: before.features_write | proposal.features,
            time_us: self.now_us.max(earlier + 1),
            gc_epoch: before.gc_epoch.max(proposal.fence_epoch),
            landmark: before.next_landmark(),
            parents: [parent.as_parent()].into_iter().chain(theirs).collect(),
            transactions,
            lineage: before.lineage,
            next_counter,
            samples,
            live,
            root,
            deltas,
            changes,
            data: Bytes::new(),
        }
    }
}

/// Make the error for a transaction that the log has already.
fn committed_elsewhere(record: &Record) -> Error {
    let text = format!("cannot commit: another process committed this transaction as {}", record.snapshot());
    Error::new("conflict", text).hint("begin the transaction again")
}
