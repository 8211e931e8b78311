//! The journal of a transaction: each change is durable in a local file before the call returns (docs/design/0014-journal.md).

use std::path::Path;
use std::sync::Arc;

use penstock_error::{Error, Kind, Result};
use penstock_format::Id;
use penstock_format::ids::log_folder;
use penstock_format::transit::journal::{Began, Frame, Given, Verb};
use penstock_storage::Journal;

use crate::commit::transaction::{Isolation, State, Transaction};
use crate::log::{newest, records};
use crate::snapshot::Snapshot;
use crate::store::journal::{Call, Kept, unable};
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
            let began = Began { dataset, snapshot, uuid: transaction.uuid, serializable: isolation == Isolation::Serializable };
            journal.add(&[&began.encode()])?;
            journal.sync()?;
            transaction.journal = Some(Kept::new(journal, 0, false));
            return Ok(transaction);
        };
        let began = Began::parse(body)?;
        if began.dataset != base.record().dataset {
            return Err(refuse(format!("it is of another dataset than `{}`", base.context.storage.uri())));
        }
        if began.snapshot.branch != base.id().branch {
            return Err(refuse("its transaction began on another branch".into()));
        }
        if began.serializable != (isolation == Isolation::Serializable) {
            return Err(refuse("its transaction has the other isolation".into()));
        }
        let store = base.context.storage.as_ref();
        let at = if began.snapshot == base.id() { base.clone() } else { Arc::new(base.near(records::named(store, &began.snapshot)?)?) };
        let mut transaction = Transaction::begin(at, isolation)?;
        transaction.uuid = began.uuid;
        let (mut restored, mut may_exist) = (0, false);
        while let Some(body) = journal.read_frame()? {
            let frame = Frame::parse(body)?;
            (restored, may_exist) = if frame.verb == Verb::Commit { (restored, true) } else { (restored + 1, may_exist) };
            transaction
                .repeat(frame)
                .map_err(|error| error.context(format!("cannot repeat call {restored} of the journal `{}`", path.display())))?;
        }
        if may_exist && is_committed(base, began.snapshot.number, began.uuid)? {
            journal.remove()?;
            return Transaction::begin_with_journal(&Arc::new(base.refreshed()?), isolation, path);
        }
        transaction.journal = Some(Kept::new(journal, restored, may_exist));
        Ok(transaction)
    }

    /// Make the changes of a frame.
    fn repeat(&mut self, frame: Frame) -> Result<()> {
        let Frame { verb, decode, row_ids, columns, reads } = frame;
        reads.into_iter().for_each(|(columns, row_ids)| self.reads.note(columns, row_ids));
        let input = |(name, column, words)| Input { name, column, words: Option::map(words, Arc::new) };
        let inputs: Vec<Input> = columns.into_iter().map(input).collect();
        let row_ids: Vec<i64> = row_ids.into_iter().map(u64::cast_signed).collect();
        let validate = if decode { Validate::Decode } else { Validate::Header };
        match verb {
            Verb::Append => self.append(inputs, validate).map(drop),
            Verb::Update => self.update(&row_ids, inputs, validate),
            Verb::Upsert { key } => self.upsert(&key, inputs, validate).map(drop),
            Verb::Delete => self.delete(&row_ids),
            Verb::Commit => Ok(()),
        }
    }

    /// Make a change, and keep it in the journal if there is one. A change that is refused leaves nothing there.
    pub(in crate::commit) fn keeping<T>(
        &mut self,
        call: &Call<'_>,
        inputs: Vec<Input>,
        change: impl FnOnce(&mut Transaction, Vec<Input>) -> Result<T>,
    ) -> Result<T> {
        if let Some(kept) = &mut self.journal {
            let given: Vec<Given> = inputs.iter().map(|input| (&input.name[..], &input.column, input.words.as_deref())).collect();
            kept.add(call, &given)?;
        }
        let changed = change(self, inputs);
        let Some(kept) = &mut self.journal else { return changed };
        match changed {
            Ok(changed) => kept.sync().inspect_err(|_| self.state = State::Failed).map(|()| changed),
            Err(error) => {
                kept.undo().inspect_err(|_| self.state = State::Failed)?;
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

    /// Return how many calls of an earlier process were repeated from the journal.
    pub fn restored(&self) -> u64 {
        self.journal.as_ref().map_or(0, |kept| kept.restored)
    }

    /// End the transaction without a commit, and discard all changes.
    pub fn abort(mut self) -> Result<()> {
        self.journal.take().map_or(Ok(()), Kept::remove)
    }
}

/// Return whether a commit since record `base` has this transaction. Cost: a read per commit.
fn is_committed(snapshot: &Snapshot, base: u64, uuid: Id) -> Result<bool> {
    let (store, branch) = (snapshot.context.storage.as_ref(), snapshot.id().branch);
    let Some(newest) = newest::newest_number(store, &log_folder(branch), Some(base))? else { return Ok(false) };
    let found = records::span(store, branch, base + 1..newest.number + 1)?;
    Ok(found.iter().flat_map(|entry| &entry.record.transactions).any(|transaction| transaction.uuid == uuid))
}
