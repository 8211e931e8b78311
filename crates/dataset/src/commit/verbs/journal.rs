//! The journal of a transaction: each change is durable in a local file before the call returns (docs/design/0014-journal.md).

use std::path::Path;
use std::sync::Arc;

use penstock_error::{Error, Kind, Result};
use penstock_format::Id;
use penstock_format::ids::log_folder;
use penstock_format::transit::journal::{Began, Frame, JournaledColumn, Verb};
use penstock_storage::Journal;
use penstock_tensor::{Column, Dtype, Ragged};
use rustc_hash::FxHashSet;

use crate::commit::transaction::{Isolation, ReadSet, Transaction};
use crate::log::{newest, records};
use crate::snapshot::Snapshot;
use crate::store::journal::{JournalCall, TransactionJournal, unable};
use crate::write::check::Input;
use crate::write::media::Validate;

impl Transaction {
    /// Begin a transaction whose changes are kept in the local file `path` until it is committed. If the file has changes of an earlier
    /// process, the transaction begins at the snapshot at which that process began it, and repeats them. Cost: reads the file.
    pub fn begin_with_journal(base: &Arc<Snapshot>, isolation: Isolation, path: &Path) -> Result<Transaction> {
        let mut journal = Journal::open(path)?;
        let refuse = |why: String| {
            Error::new("invalid-argument", format!("cannot use the journal `{}`: {why}", path.display()))
                .hint("give another path, or delete the file to discard its changes")
        };
        let Some(body) = journal.read_frame()? else {
            let mut transaction = Transaction::begin(base.clone(), isolation)?;
            let (dataset, snapshot) = (base.record().dataset, base.id());
            let began =
                Began { dataset, snapshot, uuid: transaction.uuid, serializable: isolation == Isolation::Serializable };
            journal.add(&[&began.encode()])?;
            journal.sync()?;
            transaction.journal = Some(TransactionJournal::new(journal, 0));
            return Ok(transaction);
        };
        let began = Began::parse(body)?;
        if began.dataset != base.record().dataset {
            return Err(refuse(format!("it belongs to a dataset other than `{}`", base.context.storage.uri())));
        }
        if began.snapshot.branch != base.id().branch {
            return Err(refuse("its transaction began on another branch".into()));
        }
        if began.serializable != (isolation == Isolation::Serializable) {
            return Err(refuse("its transaction has a different isolation".into()));
        }
        // That process may have ended after the commit. So may one with a copy of the journal.
        if is_committed(base, began.snapshot.number, began.uuid)? {
            journal.remove()?;
            return Transaction::begin_with_journal(&Arc::new(base.refreshed()?), isolation, path);
        }
        let store = base.context.storage.as_ref();
        let at = if began.snapshot == base.id() {
            base.clone()
        } else {
            Arc::new(base.near(records::named(store, &began.snapshot)?)?)
        };
        let mut transaction = Transaction::begin(at, isolation)?;
        transaction.uuid = began.uuid;
        let mut restored = 0;
        while let Some(body) = journal.read_frame()? {
            let frame = Frame::parse(body)?;
            restored += u64::from(frame.verb != Verb::Commit);
            transaction.repeat(frame).map_err(|error| {
                error.context(format!("cannot repeat call {restored} of the journal `{}`", path.display()))
            })?;
        }
        transaction.journal = Some(TransactionJournal::new(journal, restored));
        Ok(transaction)
    }

    /// Make the changes of a frame.
    fn repeat(&mut self, frame: Frame) -> Result<()> {
        let Frame { verb, decode, row_ids, columns, reads } = frame;
        reads.into_iter().for_each(|(columns, row_ids)| self.reads.all.note(columns, row_ids));
        let input = |(name, column, words)| Input { name, column, words: Option::map(words, Arc::new) };
        let inputs: Vec<Input> = columns.into_iter().map(input).collect();
        let row_ids: Vec<i64> = row_ids.into_iter().map(u64::cast_signed).collect();
        let validate = if decode { Validate::Decode } else { Validate::Header };
        match verb {
            Verb::Append => self.append(inputs, validate).map(drop),
            Verb::Update => self.update(&row_ids, inputs, validate),
            Verb::Upsert { key } => self.upsert(&key, inputs, validate).map(drop),
            Verb::UpdateOn { key } => self.update_on(&key, inputs, validate).map(drop),
            Verb::Delete => self.delete(&row_ids),
            Verb::Commit => Ok(()),
        }
    }

    /// Make a change, and keep it in the journal if there is one. A change that is refused leaves nothing there.
    pub(in crate::commit) fn keeping<T>(
        &mut self,
        call: &JournalCall<'_>,
        mut inputs: Vec<Input>,
        change: impl FnOnce(&mut Transaction, Vec<Input>) -> Result<T>,
    ) -> Result<T> {
        self.state.check_open()?;
        if let Some(kept) = &mut self.journal {
            read_sources(&self.base, &mut inputs)?;
            let reads = self.reads.unkept.all();
            let given: Vec<JournaledColumn> =
                inputs.iter().map(|input| (&input.name[..], &input.column, input.words.as_deref())).collect();
            match last_of_each(call, &inputs) {
                None => kept.add(call, &given, &reads)?,
                Some((row_ids, columns)) => {
                    let given: Vec<JournaledColumn> =
                        given.iter().zip(&columns).map(|((name, _, words), column)| (*name, column, *words)).collect();
                    kept.add(
                        &JournalCall { verb: Verb::Update, row_ids: &row_ids, decode: call.decode },
                        &given,
                        &reads,
                    )?;
                }
            }
        }
        let changed = change(self, inputs);
        let Some(kept) = &mut self.journal else { return changed };
        match changed {
            Ok(changed) => {
                kept.sync().inspect_err(|_| self.state.fail())?;
                self.reads.unkept = ReadSet::default();
                Ok(changed)
            }
            Err(error) => {
                let _ = kept.undo(); // What remains is a body without a head, which does not count.
                Err(error)
            }
        }
    }

    /// Add to an error of a commit what remains.
    pub(in crate::commit) fn with_journal(&self, error: Error) -> Error {
        match &self.journal {
            Some(kept) if error.kind() == Kind::Conflict => {
                let path = kept.path().display();
                error.hint(format!(
                    "the journal `{path}` keeps the changes, which begin at the old snapshot; delete it and run the transaction again"
                ))
            }
            _ => error,
        }
    }

    /// Refuse something that a journal cannot repeat.
    pub(in crate::commit) fn check_repeatable(&self, what: &str) -> Result<()> {
        if self.journal.is_some() { Err(unable(what)) } else { Ok(()) }
    }

    /// Return a number that the journal determines, or None if there is none.
    pub fn journal_mark(&self) -> Option<u32> {
        let [first, second, third, fourth, ..] = self.uuid.0;
        self.journal.as_ref().map(|_| u32::from_be_bytes([first, second, third, fourth]))
    }

    /// Return how many calls of an earlier process were repeated from the journal.
    pub fn restored(&self) -> u64 {
        self.journal.as_ref().map_or(0, |kept| kept.restored)
    }

    /// End the transaction without a commit, and discard all changes.
    pub fn abort(mut self) -> Result<()> {
        self.journal.take().map_or(Ok(()), TransactionJournal::remove)
    }
}

/// Read bytes from their sources, because a source cannot be read again when the change is repeated.
fn read_sources(base: &Snapshot, inputs: &mut [Input]) -> Result<()> {
    for input in inputs {
        let Column::Pulled(pulled) = &input.column else { continue };
        if base.column(&input.name)?.kind.stored()?.0 != Dtype::Bytes {
            continue;
        }
        let mut values = Ragged::default();
        for row in 0..pulled.shapes.len() {
            let mut value = Vec::new();
            let valid = pulled.validity.as_ref().is_none_or(|validity| validity[row]);
            if valid {
                pulled.source.pull(row, &[], &mut |piece| {
                    value.extend_from_slice(piece);
                    Ok(())
                })?;
            }
            values.push(valid.then_some(&value[..]), &[]);
        }
        input.column = Column::Ragged(values);
    }
    Ok(())
}

/// Return the last values of an update in which row ids are repeated. Others are not kept, because only the last ones count.
fn last_of_each(call: &JournalCall<'_>, inputs: &[Input]) -> Option<(Vec<i64>, Vec<Column>)> {
    let pulled = inputs.iter().any(|input| matches!(input.column, Column::Pulled(_)));
    if call.verb != Verb::Update || pulled || inputs.iter().any(|input| input.column.len() != call.row_ids.len()) {
        return None;
    }
    let mut seen = FxHashSet::default();
    let mut rows: Vec<usize> = (0..call.row_ids.len()).rev().filter(|row| seen.insert(call.row_ids[*row])).collect();
    if rows.len() == call.row_ids.len() {
        return None;
    }
    rows.reverse();
    let columns = inputs.iter().map(|input| input.column.take(&rows)).collect();
    Some((rows.iter().map(|row| call.row_ids[*row]).collect(), columns))
}

/// Return whether a commit since record `base` has this transaction. Cost: a read per commit.
fn is_committed(snapshot: &Snapshot, base: u64, uuid: Id) -> Result<bool> {
    let (store, branch) = (snapshot.context.storage.as_ref(), snapshot.id().branch);
    let Some(newest) = newest::newest_number(store, &log_folder(branch), Some(base))? else { return Ok(false) };
    let found = records::span(store, branch, base + 1..newest.number + 1)?;
    Ok(found.iter().flat_map(|entry| &entry.record.transactions).any(|transaction| transaction.uuid == uuid))
}
