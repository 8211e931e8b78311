//! A transaction: check and write samples, new values and deletions, then commit all of them or none.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use penstock_error::{Error, Result};
use penstock_format::files::FileRef;
use penstock_format::ids::{PROVISIONAL, row_id};
use penstock_format::manifest::Fragment;
use penstock_format::record::{Delta, FEATURE_INLINE, FEATURE_OVERLAYS, RecordKind};
use penstock_format::schema::{ColumnSpec, Schema};
use penstock_format::transit::journal::Verb;
use penstock_format::{Id, SnapshotId};
use penstock_storage::process;

use super::changes::{Altered, ChangeSet, Member, NO_COLUMN, NewSchema, Proposal, Read, ReadSet, Theirs};
use super::drive;
use super::keys::Keys;
use super::machine;
use super::manifest::objects::{INLINE_BYTES, folders_of, write_pages, write_words};
use super::manifest::overlays::{Written, summary, unwritten};
use crate::config::Config;
use crate::snapshot::Snapshot;
use crate::snapshot::own::Own;
use crate::store::context::Context;
use crate::store::journal::{Call, Kept};
use crate::write::check::{self, Input, check_lengths};
use crate::write::column::Stored;
use crate::write::fragments::FragmentsWriter;
use crate::write::fresh::Fresh;
use crate::write::media::Validate;
use crate::write::pending::{Changed, Pending};
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
    /// New samples: those that are in memory, and those that are written, oldest first.
    fresh: Fresh,
    pub(super) writer: FragmentsWriter,
    /// New values of samples: those that wait, and those that are written, oldest first.
    pub(super) pending: Arc<Pending>,
    changed: Vec<Changed>,
    pub(super) deleted: HashSet<u64>,
    pub(super) isolation: Isolation,
    pub(super) reads: ReadSet,
    /// The keys that were added, matched or looked for.
    pub(super) keys: Vec<Keys>,
    /// The column in which all appended samples have unique keys.
    pub(super) unique: Option<ColumnSpec>,
    /// A part of the properties that no other commit may have.
    once: Option<Arc<str>>,
    /// What reads see, less `pending`, and the numbers of changes of which it consists.
    seen: Option<([usize; 5], Arc<Snapshot>)>,
    /// The words of category columns.
    pub(super) words: Words,
    /// The columns in which new samples have values.
    pub(super) touched: HashSet<u64>,
    /// Changes of the schema. `base` has the new one.
    pub(super) altered: Option<Altered>,
    /// The columns with fill values that the last new samples gave.
    pub(super) filled: Vec<u64>,
    /// Names of the words objects, row ids, pages, roots and fill values written for this commit.
    pub(super) puts: Vec<String>,
    /// Identifies the process that began the transaction. A forked child must not use the transaction or delete its files.
    generation: u64,
    pub(super) state: State,
    /// The lowest GC epoch of the snapshot and the stages.
    pub(super) gc_epoch: u64,
    /// Reads since the last frame of the journal.
    pub(super) unkept: ReadSet,
    /// A local file with the changes so far.
    pub(super) journal: Option<Kept>,
    began: Instant,
}

/// Nobody presses Ctrl-C to end a transaction that takes less time.
const SOON: Duration = Duration::from_millis(5);

/// Whether a transaction's reads count when it is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    /// The result is as if the transactions had run one after another: a commit fails if another commit changed what was read.
    Serializable,
    /// Only writes count.
    Snapshot,
}

#[derive(PartialEq)]
pub(super) enum State {
    Open,
    /// A write failed, so the transaction can no longer be committed.
    Failed,
    /// The commit succeeded or may have succeeded, so the files must not be deleted.
    Closed,
}

impl Transaction {
    pub fn begin(base: Arc<Snapshot>, isolation: Isolation) -> Result<Transaction> {
        base.record().check_writable()?;
        let uuid = base.context.new_id()?;
        let (gc_epoch, (home, base)) = (base.record().gc_epoch, drive::held(&base)?);
        let writer = FragmentsWriter::new(base.context.clone(), base.schema.columns.clone()).keeping(Config::inline_bytes());
        Ok(Transaction {
            home,
            base,
            uuid,
            fresh: Fresh::default(),
            writer,
            pending: Arc::default(),
            changed: Vec::new(),
            deleted: HashSet::new(),
            isolation,
            reads: ReadSet::default(),
            keys: Vec::new(),
            unique: None,
            once: None,
            seen: None,
            words: Words::default(),
            touched: HashSet::new(),
            altered: None,
            filled: Vec::new(),
            puts: Vec::new(),
            generation: process::generation(),
            state: State::Open,
            gc_epoch,
            unkept: ReadSet::default(),
            journal: None,
            began: Instant::now(),
        })
    }

    /// Return the number of samples appended so far.
    pub fn samples(&self) -> u64 {
        self.writer.samples() + self.fresh.samples()
    }

    /// Add samples. All values are checked before any are stored. If a check fails, the transaction is unchanged. Returns the
    /// provisional row id of the first sample, which `update` and `delete` accept.
    pub fn append(&mut self, inputs: Vec<Input>, validate: Validate) -> Result<i64> {
        self.check_open()?;
        self.keeping(&Call { verb: Verb::Append, row_ids: &[], decode: validate == Validate::Decode }, inputs, |transaction, inputs| {
            let samples = check_lengths(&inputs).map_err(|error| error.context("cannot append"))?;
            let columns = transaction.check(inputs, validate, "append to")?;
            let keys = transaction.new_keys(&columns)?;
            let first = PROVISIONAL | transaction.samples();
            if samples > 0 {
                transaction.append_stored(columns, samples)?;
            }
            transaction.insert_keys(keys, first);
            Ok(first.cast_signed())
        })
    }

    /// Let the commit fail if another commit, made in the meantime, has this text in its properties.
    pub fn only_once(&mut self, text: &str) {
        self.once = Some(text.into());
    }

    pub(super) fn append_stored(&mut self, columns: Vec<Option<Stored>>, samples: usize) -> Result<()> {
        self.begin_fragment(&columns)?;
        let schema = &self.base.schema;
        self.touched.extend(schema.columns.iter().zip(&columns).filter(|(_, column)| column.is_some()).map(|(spec, _)| spec.id));
        // A few samples stay in memory. Many are written at once.
        match self.fresh.bytes_with(&columns).filter(|bytes| *bytes as u64 <= Config::memory_bytes() / 32) {
            Some(_) => self.fresh.push(self.samples(), columns, samples),
            None => {
                self.write_fresh()?;
                self.writer.push(columns, samples).inspect_err(|_| self.state = State::Failed)?;
            }
        }
        Ok(())
    }

    /// Change the schema of the transaction. The samples so far are written, because files and calls list columns in the schema's order.
    pub(super) fn set_schema(&mut self, schema: Schema) -> Result<()> {
        self.close_fragment()?;
        self.writer.set_columns(schema.columns.clone());
        self.base = Arc::new(self.base.with_schema(Arc::new(schema), &[]));
        self.seen = None;
        Ok(())
    }

    /// Write the new samples so far. Those that follow are in another fragment.
    pub(super) fn close_fragment(&mut self) -> Result<()> {
        self.write_fresh()?;
        self.writer.finish().inspect_err(|_| self.state = State::Failed)
    }

    /// Write the new samples that are in memory.
    fn write_fresh(&mut self) -> Result<()> {
        self.fresh.write(&mut self.writer, &self.base.schema, &self.words).inspect_err(|_| self.state = State::Failed)
    }

    /// Return what the transaction sees: the snapshot at which it began with its own changes, and the values that are only in memory, those of
    /// updates first. Its row ids are provisional. Cost: closes the data file of the last append that was too large for memory.
    pub fn view(&mut self) -> Result<(Arc<Snapshot>, Vec<Own>)> {
        self.check_open()?;
        self.writer.finish().inspect_err(|_| self.state = State::Failed)?;
        let words: usize = self.words.added().map(|(_, words)| words.len()).sum();
        let fragments = self.writer.fragments.len();
        let changes = [self.samples() as usize, self.changed.len(), self.deleted.len(), words, fragments];
        let known = self.seen.as_ref().filter(|(known, _)| *known == changes).map(|(_, seen)| seen.clone());
        let seen = match known {
            Some(seen) => seen,
            None => {
                let overlays = unwritten(&self.base.context, &self.changed, &self.deleted)?;
                let words = self.words.added().map(|(column, new)| Ok((column, self.base.vocabulary_with(column, new)?)));
                let fragments = self.writer.fragments.iter().cloned().chain(self.fresh.fragment()).collect();
                let before = self.seen.as_ref().map(|(_, seen)| seen.as_ref());
                let seen = Arc::new(self.base.with_changes(before, fragments, overlays, words.collect::<Result<_>>()?));
                self.seen = Some((changes, seen.clone()));
                seen
            }
        };
        let pending: Option<Own> = if self.pending.is_empty() { None } else { Some(self.pending.clone()) };
        Ok((seen, pending.into_iter().chain(self.fresh.own(self.base.schema.clone())).collect()))
    }

    /// Record that the transaction read these samples, or all samples, in these columns. The commit fails if another commit changes them in
    /// the meantime, unless the isolation is `Snapshot`.
    pub fn note_read(&mut self, columns: &[String], row_ids: Option<&[i64]>) -> Result<()> {
        let ids = columns.iter().map(|name| self.base.column(name).map(|spec| spec.id)).collect::<Result<Vec<u64>>>()?;
        self.note(ids, row_ids.map(|row_ids| row_ids.iter().map(|row_id| row_id.cast_unsigned()).collect()));
        Ok(())
    }

    /// Record a read, as `note_read` does. Without columns, only the existence of the rows was read.
    pub(super) fn note(&mut self, columns: Vec<u64>, row_ids: Option<Vec<u64>>) {
        if self.journal.is_some() && self.isolation == Isolation::Serializable {
            self.unkept.note(columns.clone(), row_ids.clone());
        }
        self.reads.note(columns, row_ids);
    }

    /// Return the reads that count.
    fn counted_reads(&self) -> Vec<Read> {
        let noted = if self.isolation == Isolation::Serializable { self.reads.existing() } else { Vec::new() };
        // Keys are unique whatever the isolation, so the samples that were updated by their keys must keep them.
        let keys = self.keys.iter().map(|keys| Read { columns: vec![keys.column.id], rows: Some(keys.existing()) });
        noted.into_iter().chain(keys).collect()
    }

    /// Write the new values that wait.
    pub(super) fn write_pending(&mut self) -> Result<()> {
        // New samples in memory hide stored values, so those that have newer ones must be stored before.
        if self.pending.has_appended() {
            self.write_fresh()?;
        }
        let written = Arc::make_mut(&mut self.pending).write(&self.base.context, &self.base.schema, &self.words, Config::inline_bytes());
        self.changed.extend(written.inspect_err(|_| self.state = State::Failed)?);
        Ok(())
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
                    Error::new("column-not-found", format!("cannot {verb} column `{}`: the dataset has no such column", input.name))
                        .hint(format!("columns: {}", names.join(", ")))
                })?;
                if columns[index].is_some() {
                    return Err(Error::new("invalid-argument", format!("cannot {verb} column `{}`: it is given twice", spec.name)));
                }
                let stored = prepare(&mut self.words, &base, spec, input, validate);
                columns[index] =
                    Some(stored.map_err(|error| error.column(&spec.name).context(format!("cannot {verb} column `{}`", spec.name)))?);
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

    pub(super) fn check_open(&self) -> Result<()> {
        if self.generation != process::generation() {
            let text = "cannot use this transaction: this process was forked after the transaction began";
            return Err(Error::new("transaction-closed", text).hint("begin a new transaction in this process"));
        }
        match self.state {
            State::Open => Ok(()),
            State::Failed => Err(Error::new("transaction-closed", "cannot use this transaction: an earlier write failed")
                .hint("begin another transaction; nothing was committed")),
            State::Closed => Err(Error::new("transaction-closed", "cannot use this transaction: it has already been committed or aborted")),
        }
    }

    /// Commit all changes or none. Cost on a local disk: two syncs for up to 2 KiB of data, otherwise four for a small append.
    pub fn commit(mut self, message: &str, author: &str, properties: &str) -> Result<(Receipt, Snapshot)> {
        self.check_open()?;
        self.close_fragment()?;
        self.write_pending()?;
        self.store_small()?;
        let (samples, deleted) = (self.samples(), self.deleted.len() as u64);
        let transaction = machine::entry(self.uuid, message, author, properties, (samples, deleted))?;
        let mut deltas = self.write_words()?;
        deltas.extend(self.write_fragments()?);
        let Written { overlays, writes, known, of_appended } =
            Written::write(&self.base.context, &self.changed, &self.deleted, &mut self.puts)?;
        self.touched.extend(of_appended);
        let features = if overlays.is_empty() { self.features() } else { self.features() | FEATURE_OVERLAYS };
        deltas.extend(overlays.into_iter().map(Delta::Overlay));
        self.sync()?;
        let keys: Vec<u64> = self.keys.iter().map(|keys| keys.column.id).collect();
        let filled = |key: &&u64| self.base.schema.columns.iter().any(|spec| spec.id == **key && spec.fill.is_some());
        let filled_keys = keys.iter().filter(filled).copied().collect();
        let staged = Arc::new(self.writer.linked().clone());
        let mut changes =
            ChangeSet { writes, reads: self.counted_reads(), keys, filled_keys, staged, once: self.once.clone(), detaches: false };
        changes.writes.extend(self.altered.as_ref().map(Altered::change));
        if samples > 0 || changes.writes.is_empty() {
            let touched = if self.touched.is_empty() { vec![NO_COLUMN] } else { summary(self.touched.iter().copied().collect()) };
            changes.writes.extend(ChangeSet::append(touched).writes);
        }
        let named = |spec: &ColumnSpec| (spec.id, spec.name.clone());
        let dropped = self.altered.iter().flat_map(|altered| altered.dropped.iter().cloned());
        let proposal = Proposal {
            kind: if self.altered.is_some() { RecordKind::Schema } else { RecordKind::Data },
            own: Member { transaction, deltas, changes },
            others: Vec::new(),
            row_ids: known,
            columns: self.base.schema.columns.iter().map(named).chain(dropped).collect(),
            features,
            base: self.base.id().number,
            gc_epoch: self.gc_epoch,
            schema: self.altered.as_ref().map(|altered| NewSchema { before: altered.before.clone(), after: self.base.schema.clone() }),
            fence_epoch: 0,
            layout: None,
            theirs: Theirs::default(),
            may_exist: self.journal.is_some(),
        };
        // A look at the signals needs the GIL, so a quick transaction does without.
        if self.began.elapsed() > SOON && process::interrupted() {
            return Err(Error::new("interrupted", "interrupted before the commit"));
        }
        let unkept = self.unkept.all();
        self.journal.as_mut().map_or(Ok(()), |kept| kept.will_commit(&unkept))?;
        let snapshot = match drive::commit(&self.home, &self.base, &mut self.puts, &self.keys, proposal) {
            Err(error) if error.code() == "commit-state-unknown" => {
                self.state = State::Closed; // The transaction may have been committed, so nothing may be deleted.
                return Err(error);
            }
            other => other.map_err(|error| self.with_journal(error))?,
        };
        // Nothing may fail after this point: after an error, the caller would commit the same changes again.
        self.state = State::Closed;
        let _ = self.journal.take().map(Kept::remove);
        let record = snapshot.record();
        let first = record.transactions.iter().find(|transaction| transaction.uuid == self.uuid);
        let first_row_id = row_id(record.lineage, first.map_or(0, |transaction| transaction.first_counter)).cast_signed();
        Ok((Receipt { snapshot: record.snapshot(), first_row_id, samples }, snapshot))
    }

    /// Return the feature bits required to read the written files.
    fn features(&self) -> u64 {
        let altered = self.altered.as_ref().map_or(0, |altered| altered.features);
        let inline = if self.writers().any(|writer| writer.small_bytes() > 0) { FEATURE_INLINE } else { 0 };
        self.writers().fold(altered | inline, |features, writer| features | writer.features)
    }

    fn writers(&self) -> impl Iterator<Item = &FragmentsWriter> {
        self.changed.iter().map(|changed| &changed.writer).chain([&self.writer])
    }

    /// Store small data files as objects, unless the record has room for all of them.
    fn store_small(&mut self) -> Result<()> {
        if self.writers().map(FragmentsWriter::small_bytes).sum::<u64>() <= Config::inline_bytes() {
            return Ok(());
        }
        let mut writers = self.changed.iter_mut().map(|changed| &mut changed.writer).chain([&mut self.writer]);
        writers.try_for_each(FragmentsWriter::store_small).inspect_err(|_| self.state = State::Failed)
    }

    /// Write the new words of categories.
    fn write_words(&mut self) -> Result<Vec<Delta>> {
        let (context, puts) = (&self.base.context, &mut self.puts);
        self.words.added().map(|(column, new)| write_words(context, column, new, puts).map(Delta::Words)).collect()
    }

    /// Return the deltas of new samples. Cost: one put per manifest page, unless the fragments fit into the record.
    fn write_fragments(&mut self) -> Result<Vec<Delta>> {
        let fragments = &self.writer.fragments;
        let without_data = fragments.iter().map(Fragment::encoded_bytes).sum::<usize>() as u64 - self.writer.small_bytes();
        if without_data <= INLINE_BYTES as u64 {
            return Ok(fragments.iter().cloned().map(Arc::new).map(Delta::Fragment).collect());
        }
        Ok(write_pages(&self.base.context, fragments, &mut self.puts)?.into_iter().map(Delta::Page).collect())
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
pub(super) fn prepare(words: &mut Words, base: &Snapshot, spec: &ColumnSpec, input: Input, validate: Validate) -> Result<Stored> {
    let column = match spec.kind.is_category() {
        true => words.category(base, spec, input.column, input.words)?,
        false => check::stored(&spec.kind, input.column, input.words, validate)?,
    };
    Ok(Stored { column, words: None })
}

impl Drop for Transaction {
    fn drop(&mut self) {
        if self.generation != process::generation() {
            self.writer.forget();
            return;
        }
        if self.state != State::Closed {
            self.writer.delete();
            self.changed.iter_mut().for_each(|changed| changed.writer.delete());
            for name in self.puts.drain(..) {
                let _ = self.base.context.delete(&name); // A leftover object is harmless, because no snapshot refers to it.
            }
        }
    }
}
