//! A transaction: check and write samples, new values and deletions, then commit all of them or none.

mod appended;
mod changed;
mod reads;
mod state;

use std::sync::Arc;

use penstock_error::{Error, Result};
use penstock_format::files::FileRef;
use penstock_format::ids::{PROVISIONAL, row_id};
use penstock_format::record::{Delta, FEATURE_INLINE, FEATURE_OVERLAYS, RecordKind};
use penstock_format::schema::{ColumnSpec, Schema};
use penstock_format::transit::journal::Verb;
use penstock_format::{Id, SnapshotId};

use self::appended::AppendedSamples;
use self::changed::ChangedSamples;
use self::reads::TransactionReads;
pub use self::reads::{Isolation, ReadSet};
use self::state::TransactionState;
use super::changes::{Altered, ChangeSet, Member, NO_COLUMN, NewSchema, Proposal, transaction_entry};
use super::drive;
use super::manifest::objects::{folders_of, write_words};
use super::manifest::overlays::{WrittenOverlays, summary};
use crate::config::Config;
use crate::snapshot::Snapshot;
use crate::snapshot::own::Own;
use crate::store::context::Context;
use crate::store::journal::{JournalCall, TransactionJournal};
use crate::write::check::{self, Input, check_lengths};
use crate::write::column::Stored;
use crate::write::fragments::FragmentsWriter;
use crate::write::media::Validate;
use crate::write::vocabulary::Words;

/// The result of a commit.
#[derive(Debug, Clone)]
pub struct Receipt {
    pub snapshot: SnapshotId,
    pub first_row_id: i64,
    pub samples: u64,
}

/// Collects changes that will become one commit.
pub struct Transaction {
    /// The handle's context. The handle's path may be redirected during the transaction.
    home: Arc<Context>,
    /// The snapshot at which the transaction began. The snapshot's context keeps the root open.
    pub(super) base: Arc<Snapshot>,
    pub(super) uuid: Id,
    pub(super) state: TransactionState,
    pub(super) appended: AppendedSamples,
    pub(super) changed: ChangedSamples,
    /// The words of category columns.
    pub(super) words: Words,
    /// Changes of the schema. `base` has the new one.
    pub(super) altered: Option<Altered>,
    pub(super) reads: TransactionReads,
    /// A part of the properties that no other commit may have.
    once: Option<Arc<str>>,
    /// What reads see, less values in memory, and the numbers of changes of which it consists.
    seen: Option<([usize; 5], Arc<Snapshot>)>,
    /// Names of the words objects, row ids, pages, roots and fill values written for this commit.
    pub(super) puts: Vec<String>,
    /// The lowest GC epoch of the snapshot and the stages.
    pub(super) gc_epoch: u64,
    /// A local file with the changes so far.
    pub(super) journal: Option<TransactionJournal>,
}

impl Transaction {
    pub fn begin(base: Arc<Snapshot>, isolation: Isolation) -> Result<Transaction> {
        base.record().check_writable()?;
        let uuid = base.context.new_id()?;
        let (gc_epoch, (home, base)) = (base.record().gc_epoch, drive::held(&base)?);
        Ok(Transaction {
            home,
            uuid,
            state: TransactionState::begin(),
            appended: AppendedSamples::new(&base),
            changed: ChangedSamples::default(),
            words: Words::default(),
            altered: None,
            reads: TransactionReads::new(isolation),
            once: None,
            seen: None,
            puts: Vec::new(),
            gc_epoch,
            journal: None,
            base,
        })
    }

    /// Return the number of samples appended so far.
    pub fn samples(&self) -> u64 {
        self.appended.samples()
    }

    /// Add samples. All values are checked before any are stored. If a check fails, the transaction is unchanged. Returns the
    /// provisional row id of the first sample, which `update` and `delete` accept.
    pub fn append(&mut self, inputs: Vec<Input>, validate: Validate) -> Result<i64> {
        self.keeping(
            &JournalCall { verb: Verb::Append, row_ids: &[], decode: validate == Validate::Decode },
            inputs,
            |transaction, inputs| {
                let samples = check_lengths(&inputs).map_err(|error| error.context("cannot append"))?;
                let columns = transaction.check(inputs, validate, "append to")?;
                let keys = transaction.new_keys(&columns)?;
                let first = PROVISIONAL | transaction.samples();
                if samples > 0 {
                    transaction.append_stored(columns, samples)?;
                }
                transaction.insert_keys(keys, first);
                Ok(first.cast_signed())
            },
        )
    }

    /// Let the commit fail if another commit, made in the meantime, has this text in its properties.
    pub fn only_once(&mut self, text: &str) {
        self.once = Some(text.into());
    }

    pub(super) fn append_stored(&mut self, columns: Vec<Option<Stored>>, samples: usize) -> Result<()> {
        self.appended.push(&self.base.schema, &self.words, columns, samples).inspect_err(|_| self.state.fail())
    }

    /// Change the schema of the transaction. The samples so far are written, because files and calls list columns in the schema's order.
    pub(super) fn set_schema(&mut self, schema: Schema) -> Result<()> {
        self.close_fragment()?;
        self.appended.writer.set_columns(schema.columns.clone());
        self.base = Arc::new(self.base.with_schema(Arc::new(schema), &[]));
        self.seen = None;
        Ok(())
    }

    /// Write the new samples so far. Those that follow are in another fragment.
    pub(super) fn close_fragment(&mut self) -> Result<()> {
        self.appended.close_fragment(&self.base.schema, &self.words).inspect_err(|_| self.state.fail())
    }

    /// Return what the transaction sees: the snapshot at which it began with its own changes, and the values that are only in memory, those of
    /// updates first. Its row ids are provisional. Cost: closes the data file of the last append that was too large for memory.
    pub fn view(&mut self) -> Result<(Arc<Snapshot>, Vec<Own>)> {
        self.state.check_open()?;
        self.appended.writer.finish().inspect_err(|_| self.state.fail())?;
        let words: usize = self.words.added().map(|(_, words)| words.len()).sum();
        let fragments = self.appended.writer.fragments.len();
        let changes =
            [self.samples() as usize, self.changed.written.len(), self.changed.deleted.len(), words, fragments];
        let seen = match &self.seen {
            Some((known, seen)) if *known == changes => seen.clone(),
            before => {
                let before = before.as_ref().map(|(_, seen)| seen.as_ref());
                let overlays = self.changed.overlays(&self.base.context)?;
                let words =
                    self.words.added().map(|(column, new)| Ok((column, self.base.vocabulary_with(column, new)?)));
                let seen =
                    self.base.with_changes(before, self.appended.fragments(), overlays, words.collect::<Result<_>>()?);
                self.seen.insert((changes, Arc::new(seen))).1.clone()
            }
        };
        Ok((seen, self.changed.own().into_iter().chain(self.appended.own(&self.base.schema)).collect()))
    }

    /// Record that the transaction read these samples, or all samples, in these columns. The commit fails if another commit changes them in
    /// the meantime, unless the isolation is `Snapshot`.
    pub fn note_read(&mut self, columns: &[String], row_ids: Option<&[i64]>) -> Result<()> {
        let ids =
            columns.iter().map(|name| self.base.column(name).map(|spec| spec.id)).collect::<Result<Vec<u64>>>()?;
        self.note(ids, row_ids.map(|row_ids| row_ids.iter().map(|row_id| row_id.cast_unsigned()).collect()));
        Ok(())
    }

    /// Record a read, as `note_read` does. Without columns, only the existence of the rows was read.
    pub(super) fn note(&mut self, columns: Vec<u64>, row_ids: Option<Vec<u64>>) {
        if self.journal.is_some() && self.reads.isolation == Isolation::Serializable {
            self.reads.unkept.note(columns.clone(), row_ids.clone());
        }
        self.reads.all.note(columns, row_ids);
    }

    /// Write the new values that wait.
    pub(super) fn write_pending(&mut self) -> Result<()> {
        // New samples in memory hide stored values, so those that have newer ones must be stored before.
        let written = match self.changed.pending.has_appended() {
            true => self.appended.write_fresh(&self.base.schema, &self.words),
            false => Ok(()),
        };
        written.and_then(|()| self.changed.write_pending(&self.base, &self.words)).inspect_err(|_| self.state.fail())
    }

    /// Check all inputs. Returns the stored form of each column in the schema, or None if the input lacks the column. If a check
    /// fails, the words are those of before.
    pub(super) fn check(&mut self, inputs: Vec<Input>, validate: Validate, verb: &str) -> Result<Vec<Option<Stored>>> {
        let before = self.words.mark();
        let base = self.base.clone();
        let mut columns: Vec<Option<Stored>> = base.schema.columns.iter().map(|_| None).collect();
        let check_all = || {
            for input in inputs {
                let (index, spec) = base.schema.column(&input.name).ok_or_else(|| {
                    let names: Vec<&str> = base.schema.columns.iter().map(|column| column.name.as_str()).collect();
                    Error::new(
                        "column-not-found",
                        format!("cannot {verb} column `{}`: the dataset has no such column", input.name),
                    )
                    .hint(format!("columns: {}", names.join(", ")))
                })?;
                if columns[index].is_some() {
                    return Err(Error::new(
                        "invalid-argument",
                        format!("cannot {verb} column `{}`: it is given twice", spec.name),
                    ));
                }
                let stored = prepare(&mut self.words, &base, spec, input, validate);
                columns[index] = Some(stored.map_err(|error| {
                    error.column(&spec.name).context(format!("cannot {verb} column `{}`", spec.name))
                })?);
            }
            Ok(())
        };
        check_all().inspect_err(|_| self.words.return_to(&before))?;
        // All words are known now, so the word lists are final.
        for (spec, column) in self.base.schema.columns.iter().zip(&mut columns) {
            if let Some(stored) = column {
                stored.words = self.words.of(spec.id);
            }
        }
        Ok(columns)
    }

    /// Commit all changes or none. Cost on a local disk: two syncs for up to 2 KiB of data, otherwise four for a small append.
    pub fn commit(mut self, message: &str, author: &str, properties: &str) -> Result<(Receipt, Snapshot)> {
        self.state.check_open()?;
        self.close_fragment()?;
        self.write_pending()?;
        self.store_small()?;
        let proposal = self.proposal(message, author, properties)?;
        self.state.check_interrupted()?;
        let unkept = self.reads.unkept.all();
        self.journal.as_mut().map_or(Ok(()), |kept| kept.will_commit(&unkept))?;
        let samples = self.samples();
        let snapshot = match drive::commit(&self.home, &self.base, &mut self.puts, &self.reads.keys, proposal) {
            Err(error) if error.code() == "commit-state-unknown" => {
                self.state.close(); // The transaction may have been committed, so nothing may be deleted.
                return Err(error);
            }
            other => other.map_err(|error| self.with_journal(error))?,
        };
        // Nothing may fail after this point: after an error, the caller would commit the same changes again.
        self.state.close();
        let _ = self.journal.take().map(TransactionJournal::remove);
        let record = snapshot.record();
        let first = record.transactions.iter().find(|transaction| transaction.uuid == self.uuid);
        let first_row_id =
            row_id(record.lineage, first.map_or(0, |transaction| transaction.first_counter)).cast_signed();
        Ok((Receipt { snapshot: record.snapshot(), first_row_id, samples }, snapshot))
    }

    /// Write what is left of all changes, and return them as a commit.
    fn proposal(&mut self, message: &str, author: &str, properties: &str) -> Result<Proposal> {
        let (samples, deleted) = (self.samples(), self.changed.deleted.len() as u64);
        let transaction = transaction_entry(self.uuid, message, author, properties, (samples, deleted))?;
        let mut deltas = self.write_words()?;
        deltas.extend(self.appended.write_fragments(&self.base.context, &mut self.puts)?);
        let WrittenOverlays { overlays, writes, known, of_appended } =
            WrittenOverlays::write(&self.base.context, &self.changed.written, &self.changed.deleted, &mut self.puts)?;
        self.appended.columns.extend(of_appended);
        let features = if overlays.is_empty() { self.features() } else { self.features() | FEATURE_OVERLAYS };
        deltas.extend(overlays.into_iter().map(Delta::Overlay));
        self.sync()?;
        let keys: Vec<u64> = self.reads.keys.iter().map(|keys| keys.column.id).collect();
        let filled = |key: &&u64| self.base.schema.column_by_id(**key).is_some_and(|spec| spec.fill.is_some());
        let filled_keys = keys.iter().filter(filled).copied().collect();
        let staged = Arc::new(self.appended.writer.linked().clone());
        let mut changes = ChangeSet {
            writes,
            reads: self.reads.counted(),
            keys,
            filled_keys,
            staged,
            once: self.once.clone(),
            detaches: false,
        };
        changes.writes.extend(self.altered.as_ref().map(Altered::change));
        if samples > 0 || changes.writes.is_empty() {
            let columns: Vec<u64> = self.appended.columns.iter().copied().collect();
            changes
                .writes
                .extend(ChangeSet::append(if columns.is_empty() { vec![NO_COLUMN] } else { summary(columns) }).writes);
        }
        let (row_ids, gc_epoch, may_exist) = (known, self.gc_epoch, self.journal.is_some());
        let kind = if self.altered.is_some() { RecordKind::Schema } else { RecordKind::Data };
        let own = Member { transaction, deltas, changes };
        let mut proposal = Proposal { row_ids, features, gc_epoch, may_exist, ..Proposal::new(kind, own, &self.base) };
        if let Some(altered) = &self.altered {
            proposal.schema = Some(NewSchema { before: altered.before.clone(), after: self.base.schema.clone() });
            proposal.columns.extend(altered.dropped.iter().cloned());
        }
        Ok(proposal)
    }

    /// Return the feature bits required to read the written files.
    fn features(&self) -> u64 {
        let altered = self.altered.as_ref().map_or(0, |altered| altered.features);
        let inline = if self.writers().any(|writer| writer.small_bytes() > 0) { FEATURE_INLINE } else { 0 };
        self.writers().fold(altered | inline, |features, writer| features | writer.features)
    }

    fn writers(&self) -> impl Iterator<Item = &FragmentsWriter> {
        self.changed.written.iter().map(|changed| &changed.writer).chain([&self.appended.writer])
    }

    /// Store small data files as objects, unless the record has room for all of them.
    fn store_small(&mut self) -> Result<()> {
        if self.writers().map(FragmentsWriter::small_bytes).sum::<u64>() <= Config::inline_bytes() {
            return Ok(());
        }
        let mut writers =
            self.changed.written.iter_mut().map(|changed| &mut changed.writer).chain([&mut self.appended.writer]);
        writers.try_for_each(FragmentsWriter::store_small)
    }

    /// Write the new words of categories.
    fn write_words(&mut self) -> Result<Vec<Delta>> {
        let (context, puts) = (&self.base.context, &mut self.puts);
        self.words.added().map(|(column, new)| write_words(context, column, new, puts).map(Delta::Words)).collect()
    }

    /// Make the names of all written objects durable.
    pub(super) fn sync(&self) -> Result<()> {
        let mut folders = folders_of(&self.puts);
        let mut files = self.writers().flat_map(|writer| &writer.fragments).flat_map(|fragment| &fragment.files);
        if files.any(FileRef::is_object) {
            folders.push("d");
        }
        self.base.context.storage.sync(&folders)
    }
}

/// Check the values of a column and convert them to their stored form.
pub(super) fn prepare(
    words: &mut Words,
    base: &Snapshot,
    spec: &ColumnSpec,
    input: Input,
    validate: Validate,
) -> Result<Stored> {
    let column = match spec.kind.is_category() {
        true => words.category(base, spec, input.column, input.words)?,
        false => check::stored(&spec.kind, input.column, input.words, validate)?,
    };
    Ok(Stored { column, words: None })
}

impl Drop for Transaction {
    fn drop(&mut self) {
        if self.state.is_inherited() {
            self.appended.writer.forget();
            return;
        }
        if !self.state.is_closed() {
            self.appended.writer.delete();
            self.changed.written.iter_mut().for_each(|changed| changed.writer.delete());
            for name in self.puts.drain(..) {
                let _ = self.base.context.delete(&name); // A leftover object is harmless, because no snapshot refers to it.
            }
        }
    }
}
