//! A transaction: check and write samples, then commit all of them or none.

use std::collections::HashSet;
use std::sync::Arc;

use penstock_error::{Error, Result};
use penstock_format::ids::{ObjectRef, PROVISIONAL, data_name, log_folder, row_id, words_name};
use penstock_format::manifest::{Fragment, WordsSegment, encode_words};
use penstock_format::record::{Delta, RecordKind};
use penstock_format::schema::{ColumnKind, ColumnSpec, Schema};
use penstock_format::{Id, SnapshotId};
use penstock_storage::process;

use super::changes::{ChangeSet, Proposal};
use super::drive::Driver;
use super::machine::{self, Machine};
use super::root::{INLINE_BYTES, write_pages};
use crate::log::newest;
use crate::snapshot::Snapshot;
use crate::store::context::Context;
use crate::write::check::{self, Input, check_lengths};
use crate::write::column::Stored;
use crate::write::fragment::FragmentWriter;
use crate::write::media::Validate;
use crate::write::tails::TailLimit;
use crate::write::vocabulary::Words;

/// The result of a commit.
#[derive(Debug, Clone)]
pub struct Receipt {
    pub snapshot: SnapshotId,
    pub first_row_id: i64,
    pub samples: u64,
}

/// Collects samples that will become one commit.
pub struct Transaction {
    /// The handle's context. The handle's path may be redirected during the transaction.
    home: Arc<Context>,
    /// The snapshot at which the transaction began. The snapshot's context keeps the root open.
    base: Arc<Snapshot>,
    uuid: Id,
    writer: Option<FragmentWriter>,
    fragments: Vec<Fragment>,
    samples: u64,
    /// The words of category columns.
    words: Words,
    tails: TailLimit,
    touched: HashSet<u64>,
    /// Feature bits required to read the written files.
    features: u64,
    /// Names of the words objects, pages and roots written for this commit.
    puts: Vec<String>,
    /// Identifies the process that began the transaction. A forked child must not use the transaction or delete its files.
    generation: u64,
    state: State,
}

#[derive(PartialEq)]
enum State {
    Open,
    /// A write failed, so the transaction can no longer be committed.
    Failed,
    /// The commit succeeded or may have succeeded, so the files must not be deleted.
    Closed,
}

impl Transaction {
    pub fn begin(base: Arc<Snapshot>) -> Result<Transaction> {
        base.record().check_writable()?;
        let uuid = base.context.new_id()?;
        let home = base.context.clone();
        let base = match home.held()? {
            Some(held) => {
                let base = base.within(held);
                base.check_log(None)?; // Records never change, so one check is enough until the commit.
                Arc::new(base)
            }
            None => base,
        };
        Ok(Transaction {
            home,
            base,
            uuid,
            writer: None,
            fragments: Vec::new(),
            samples: 0,
            words: Words::default(),
            tails: TailLimit::default(),
            touched: HashSet::new(),
            features: 0,
            puts: Vec::new(),
            generation: process::generation(),
            state: State::Open,
        })
    }

    pub fn samples(&self) -> u64 {
        self.samples
    }

    /// Add samples. All values are checked before any are stored. If a check fails, the transaction is unchanged.
    pub fn append(&mut self, inputs: Vec<Input>, validate: Validate) -> Result<()> {
        self.check_open()?;
        let schema = self.base.schema.clone();
        let samples = check_lengths(&inputs)?;
        let before = self.words.mark();
        let columns = self.check(&schema, inputs, validate).inspect_err(|_| self.words.return_to(&before))?;
        if samples == 0 {
            return Ok(());
        }
        self.touched.extend(schema.columns.iter().zip(&columns).filter(|(_, column)| column.is_some()).map(|(spec, _)| spec.id));
        self.write(columns, samples).inspect_err(|_| self.state = State::Failed)
    }

    /// Check all inputs. Returns the stored form of each column in the schema, or None if the input lacks the column.
    fn check(&mut self, schema: &Schema, inputs: Vec<Input>, validate: Validate) -> Result<Vec<Option<Stored>>> {
        let mut columns: Vec<Option<Stored>> = schema.columns.iter().map(|_| None).collect();
        for input in inputs {
            let (index, _) = schema.column(&input.name).ok_or_else(|| {
                let names: Vec<&str> = schema.columns.iter().map(|column| column.name.as_str()).collect();
                Error::new("column-not-found", format!("cannot append column `{}`: the dataset has no such column", input.name))
                    .hint(format!("columns: {}", names.join(", ")))
            })?;
            let spec = &schema.columns[index];
            if columns[index].is_some() {
                return Err(Error::new("invalid-argument", format!("cannot append column `{}`: it is given twice", spec.name)));
            }
            columns[index] = Some(
                self.prepare(spec, input, validate)
                    .map_err(|error| error.column(&spec.name).context(format!("cannot append to column `{}`", spec.name)))?,
            );
        }
        // All words are known now, so the word lists are final.
        for (spec, column) in schema.columns.iter().zip(&mut columns) {
            if let Some(stored) = column {
                stored.words = self.words.of(spec.id);
            }
        }
        Ok(columns)
    }

    fn prepare(&mut self, spec: &ColumnSpec, input: Input, validate: Validate) -> Result<Stored> {
        let column = match &spec.kind {
            ColumnKind::Category => self.words.category(&self.base, spec, input.column, input.words)?,
            kind => check::stored(kind, input.column, input.words, validate)?,
        };
        Ok(Stored { column, words: None })
    }

    fn check_open(&self) -> Result<()> {
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

    /// Write samples, in several parts if their words need several dictionaries.
    fn write(&mut self, mut columns: Vec<Option<Stored>>, mut samples: usize) -> Result<()> {
        while samples > 0 {
            if let Some(writer) = self.writer.take_if(|writer| writer.wants_new_fragment(&columns, samples)) {
                self.close_fragment(writer)?;
            }
            let mut writer = match self.writer.take() {
                Some(writer) => writer,
                None => FragmentWriter::new(self.base.context.clone(), &self.base.schema.columns)?,
            };
            let now = writer.fitting(&columns, samples, self.tails.bytes);
            if now == 0 {
                self.close_fragment(writer)?;
                continue;
            }
            let later = match now < samples {
                true => columns.iter_mut().map(|column| column.as_mut().map(|stored| stored.split_off(now))).collect(),
                false => Vec::new(),
            };
            writer.push(std::mem::replace(&mut columns, later), now)?;
            self.samples += now as u64;
            samples -= now;
            match writer.is_full() {
                true => self.close_fragment(writer)?,
                false => self.writer = Some(writer),
            }
        }
        Ok(())
    }

    fn close_fragment(&mut self, writer: FragmentWriter) -> Result<()> {
        self.tails.note(&writer.columns);
        let first: u64 = self.fragments.iter().map(|fragment| fragment.samples).sum();
        let (fragment, features) = writer.close(first)?;
        self.fragments.push(fragment);
        self.features |= features;
        Ok(())
    }

    /// Commit all samples or none. Cost: four syncs for a small commit on a local disk.
    pub fn commit(mut self, message: &str, author: &str, properties: &str) -> Result<(Receipt, Snapshot)> {
        self.check_open()?;
        if let Some(writer) = self.writer.take().filter(|writer| !writer.is_empty()) {
            self.close_fragment(writer).inspect_err(|_| self.state = State::Failed)?;
        }
        let transaction = machine::entry(self.uuid, message, author, properties, self.samples)?;
        let deltas = self.write_metadata()?;
        let mut columns: Vec<u64> = self.touched.iter().copied().collect();
        columns.sort_unstable();
        if columns.len() > 64 {
            columns.clear(); // An empty list means all columns. The summary must fit into the record.
        }
        let machine = Machine::new(Proposal {
            kind: RecordKind::Data,
            transaction,
            deltas,
            changes: ChangeSet::append(columns),
            features: self.features,
            base: self.base.id().number,
            gc_epoch: self.base.record().gc_epoch,
        });
        self.base.context.storage.prove()?;
        let snapshot = match Driver::new(self.home.clone(), self.base.clone(), &mut self.puts).drive(machine) {
            Err(error) if error.code() == "commit-state-unknown" => {
                self.state = State::Closed; // The transaction may have been committed, so nothing may be deleted.
                return Err(error);
            }
            other => other?,
        };
        // Nothing may fail after this point: after an error, the caller would commit the same samples again.
        self.state = State::Closed;
        let record = snapshot.record();
        let store = self.base.context.storage.as_ref();
        newest::leave_hint(store, &log_folder(record.branch), record.number);
        let first_row_id = row_id(record.lineage, record.next_counter - self.samples) as i64;
        let receipt = Receipt { snapshot: record.snapshot(), first_row_id, samples: self.samples };
        Ok((receipt, snapshot.within(self.home.clone())))
    }

    /// Write words and pages, and make the names of all written objects durable. Returns the record's deltas.
    fn write_metadata(&mut self) -> Result<Vec<Delta>> {
        let context = &self.base.context;
        let store = context.storage.as_ref();
        let mut folders = Vec::new();
        let mut own = Vec::new();
        for (column, new) in self.words.added() {
            let (id, body) = (context.new_id()?, encode_words(column, new));
            self.puts.push(words_name(id));
            store.put(&words_name(id), &body)?;
            folders.push("w");
            own.push(Delta::Words(WordsSegment { column, first_code: 0, words: new.len() as u64, object: ObjectRef::of(id, &body) }));
        }
        if self.fragments.iter().any(|fragment| !fragment.files.is_empty()) {
            folders.push("d");
        }
        if self.fragments.iter().map(Fragment::encoded_bytes).sum::<usize>() > INLINE_BYTES {
            own.extend(write_pages(context, &self.fragments, PROVISIONAL, &mut self.puts)?.into_iter().map(Delta::Page));
            folders.push("p");
        } else {
            own.extend(self.fragments.iter().cloned().map(Delta::Fragment));
        }
        folders.dedup();
        store.sync(&folders)?;
        Ok(own)
    }
}

impl Drop for Transaction {
    fn drop(&mut self) {
        if self.generation != process::generation() {
            std::mem::forget(self.writer.take()); // The files belong to the parent process, which may still be writing them.
            return;
        }
        if self.state != State::Closed {
            let data = self.fragments.iter().flat_map(|fragment| &fragment.files).map(|file| data_name(file.id));
            for name in data.chain(self.puts.drain(..)) {
                let _ = self.base.context.storage.delete(&name); // A leftover file is harmless, because no snapshot refers to it.
            }
        }
    }
}
