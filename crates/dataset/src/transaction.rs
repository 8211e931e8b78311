//! A transaction: check and write samples, then commit all of them or none.

use std::collections::{HashMap, HashSet};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use penstock_error::{Error, Result};
use penstock_format::ids::{ObjectRef, PROVISIONAL, Place, data_name, log_folder, page_name, place_of, record_name, root_name, words_name};
use penstock_format::manifest::{Fragment, PAGE_BYTES, PAGE_FRAGMENTS, PageRef, Root, WordsSegment, encode_pages, encode_words};
use penstock_format::record::{Change, ChangeKind, Delta, Record, RecordKind};
use penstock_format::schema::{ColumnKind, ColumnSpec, Schema};
use penstock_format::{Id, SnapshotId};
use penstock_storage::{CERTAIN_TRIES, Created, Storage, create_certainly, process};
use penstock_tensor::{Column, Ragged};

use crate::commit::{self, Event, Machine, Request};
use crate::context::Context;
use crate::log;
use crate::media::Validate;
use crate::parallel;
use crate::snapshot::{Part, Snapshot};
use crate::values::{check_lengths, check_media, check_text, check_values, codes_of, label_codes, texts_of};
use crate::writer::{FragmentWriter, Stored};

/// Values of a named column. Labels and categories are int64 codes (`Fixed`) or words (`Ragged`). With `words`, they are int64 places
/// in that list.
pub struct Input {
    pub name: String,
    pub column: Column,
    pub words: Option<Arc<Ragged>>,
}

/// The result of a commit.
#[derive(Debug, Clone)]
pub struct Receipt {
    pub snapshot: SnapshotId,
    pub first_row_id: i64,
    pub samples: u64,
}

/// Encoded fragments beyond this size go into manifest pages before the commit. The record then has room for them, whatever
/// it contains already, and a retry stays one small put.
const INLINE_BYTES: usize = 1024;

/// Memory touched to look up a word: one cache line.
const LINE_BYTES: usize = 64;
/// How many words a thread looks up at a time.
const LOOKED_UP: usize = 4096;

/// Make a dataset: its root and commit 0. Objects left by an unfinished create do not prevent a new one.
pub fn create(storage: Box<dyn Storage>, columns: Vec<ColumnSpec>, message: &str, author: &str) -> Result<Snapshot> {
    let schema = Schema::create(columns)?;
    let context = Context::new(storage);
    let store = context.storage.as_ref();
    store.writable()?;
    check_free(store)?;
    store.initialise()?;
    let held = store.held()?;
    let store = held.as_deref().unwrap_or(store);
    let dataset = context.new_id()?;
    let root = Root { dataset, branch: 0, number: 0, schema: schema.to_json()?, pages: Vec::new(), words: Vec::new() };
    let root_id = context.new_id()?;
    let root_body = root.encode();
    let record = Record {
        kind: RecordKind::Create,
        dataset,
        branch: 0,
        number: 0,
        features_read: 0,
        features_write: 0,
        features_ignorable: 0,
        time_us: now_us(),
        gc_epoch: 0,
        parents: Vec::new(),
        transactions: vec![commit::entry(context.new_id()?, message, author, "{}", 0)?],
        lineage: 0,
        next_counter: 0,
        samples: 0,
        live: 0,
        root: ObjectRef::of(root_id, &root_body),
        deltas: Vec::new(),
        changes: vec![Change { kind: ChangeKind::Schema, columns: Vec::new(), rows: Vec::new() }],
        attachments: Vec::new(),
    };
    let body = record.encode();
    let entry = log::LogEntry::parse(&body.clone().into(), 0, 0)?;
    let snapshot = Snapshot::with_root(context.clone(), entry, Arc::new(root))?;
    context.hold_to(dataset)?;
    let root_name = root_name(root_id);
    let created = store.put(&root_name, &root_body).and_then(|()| store.sync(&["r"])).and_then(|()| create_first(store, &body, &record));
    if let Err(error) = created {
        if error.code() != "commit-state-unknown" {
            let _ = store.delete(&root_name); // An orphan is harmless.
        }
        return Err(error);
    }
    log::leave_hint(store, &log_folder(0), 0);
    Ok(snapshot)
}

/// Put commit 0. Nothing may fail afterwards. After a lost answer, only a certain answer is a success.
fn create_first(store: &dyn Storage, body: &[u8], record: &Record) -> Result<()> {
    let name = record_name(0, 0);
    for _ in 0..CERTAIN_TRIES {
        match create_certainly(store, &name, body)? {
            Created::Exists => match log::read(store, 0, 0) {
                Ok(entry) if entry.record.uuid() == record.uuid() => return Ok(()),
                Ok(_) => return Err(exists(store)),
                Err(_) => std::thread::sleep(Duration::from_millis(10)), // Wait out a brief fault; then put the same body again.
            },
            _ => return Ok(()),
        }
    }
    let text = format!("cannot tell whether dataset `{}` was created: `{name}` exists but cannot be read", store.uri());
    Err(Error::new("commit-state-unknown", text).hint("open it, or create it again elsewhere"))
}

/// Refuse a place that holds a dataset, or an object that does not belong to one.
fn check_free(store: &dyn Storage) -> Result<()> {
    if store.exists(&record_name(0, 0))? {
        return Err(exists(store));
    }
    let mut taken = None;
    store.survey(&mut |name| {
        taken = match place_of(name) {
            Place::Ours => return ControlFlow::Continue(()),
            Place::Commit => Some(exists(store)),
            Place::Foreign => {
                let text = format!("cannot create dataset `{}`: it holds `{name}`, which is not part of a dataset", store.uri());
                Some(Error::new("folder-not-empty", text).hint("choose a new folder or prefix"))
            }
        };
        ControlFlow::Break(())
    })?;
    taken.map_or(Ok(()), Err)
}

fn exists(store: &dyn Storage) -> Error {
    Error::new("dataset-exists", format!("cannot create dataset `{}`: a dataset already exists there", store.uri()))
        .hint("open it with ps.open, or choose another place")
}

pub fn now_us() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as i64)
}

/// Samples that will become one commit.
pub struct Transaction {
    /// The context of the handle. Its path may be redirected during the transaction.
    home: Arc<Context>,
    /// The snapshot at which the transaction began. Its context holds the root.
    base: Arc<Snapshot>,
    uuid: Id,
    writer: Option<FragmentWriter>,
    fragments: Vec<Fragment>,
    samples: u64,
    /// Words of category columns.
    vocabularies: HashMap<u64, Vocabulary>,
    touched: HashSet<u64>,
    /// Feature bits that readers of the written files need.
    features: u64,
    /// Words, pages and roots written for this commit.
    puts: Vec<String>,
    /// The process that began the transaction. A forked child must not use it, and must not delete its files.
    generation: u64,
    state: State,
}

#[derive(PartialEq)]
enum State {
    Open,
    /// A write failed: the transaction can no longer be committed.
    Failed,
    /// Committed, or possibly committed: the files must not be deleted.
    Closed,
}

/// The words of a category: those of the base snapshot, then new ones in order of first use. A word's place in the list is its code.
struct Vocabulary {
    words: Arc<Vec<Arc<str>>>,
    codes: HashMap<Arc<str>, u32>,
    base: usize,
    /// The word list of the last append, and the code of each word used so far. Slices of one column share the list.
    given: Option<(Arc<Ragged>, Vec<Option<u32>>)>,
}

impl Vocabulary {
    fn code_of(&mut self, word: &str) -> u32 {
        if let Some(code) = self.codes.get(word) {
            return *code;
        }
        let (word, code): (Arc<str>, u32) = (word.into(), self.words.len() as u32);
        Arc::make_mut(&mut self.words).push(word.clone()); // Copies nothing: others hold the list only during a call.
        self.codes.insert(word, code);
        code
    }

    /// Forget all words except the first `count`.
    fn shorten(&mut self, count: usize) {
        for word in Arc::make_mut(&mut self.words).drain(count..) {
            self.codes.remove(&word);
        }
        self.given = None;
    }
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
            vocabularies: HashMap::new(),
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

    /// Add samples. All values are checked before any is stored; a failed check leaves the transaction unchanged.
    pub fn append(&mut self, inputs: Vec<Input>, validate: Validate) -> Result<()> {
        self.check_open()?;
        let schema = self.base.schema.clone();
        let samples = check_lengths(&inputs)?;
        let before: Vec<(u64, usize)> = self.vocabularies.iter().map(|(column, known)| (*column, known.words.len())).collect();
        let checked = self.check(&schema, inputs, validate).inspect_err(|_| {
            for (column, known) in &mut self.vocabularies {
                known.shorten(before.iter().find(|(known, _)| known == column).map_or(known.base, |(_, count)| *count));
            }
        });
        let columns = checked?;
        if samples == 0 {
            return Ok(());
        }
        self.touched.extend(schema.columns.iter().zip(&columns).filter(|(_, column)| column.is_some()).map(|(spec, _)| spec.id));
        self.write(columns, samples).inspect_err(|_| self.state = State::Failed)
    }

    /// Check all inputs. Returns the stored form of each column of the schema, None for columns that are left out.
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
                self.stored(spec, input.column, input.words, validate)
                    .map_err(|error| error.column(&spec.name).context(format!("cannot append to column `{}`", spec.name)))?,
            );
        }
        // All words are known now, so the lists are final.
        for (spec, column) in schema.columns.iter().zip(&mut columns) {
            if let (Some(stored), Some(known)) = (column, self.vocabularies.get(&spec.id)) {
                stored.words = Some(known.words.clone());
            }
        }
        Ok(columns)
    }

    fn check_open(&self) -> Result<()> {
        if self.generation != process::generation() {
            let text = "cannot use this transaction: it belongs to the process that began it, and this process is a fork of it";
            return Err(Error::new("transaction-closed", text).hint("begin a new transaction in this process"));
        }
        match self.state {
            State::Open => Ok(()),
            State::Failed => Err(Error::new("transaction-closed", "cannot use this transaction: an earlier write failed")
                .hint("begin another transaction; nothing was committed")),
            State::Closed => Err(Error::new("transaction-closed", "cannot use this transaction: it is already committed or aborted")),
        }
    }

    fn write(&mut self, columns: Vec<Option<Stored>>, samples: usize) -> Result<()> {
        if let Some(writer) = self.writer.take_if(|writer| writer.wants_new_fragment(&columns, samples)) {
            self.close_fragment(writer)?;
        }
        let mut writer = match self.writer.take() {
            Some(writer) => writer,
            None => FragmentWriter::new(self.base.context.clone(), &self.base.schema.columns)?,
        };
        writer.push(columns, samples)?;
        self.samples += samples as u64;
        match writer.is_full() {
            true => self.close_fragment(writer),
            false => {
                self.writer = Some(writer);
                Ok(())
            }
        }
    }

    fn close_fragment(&mut self, writer: FragmentWriter) -> Result<()> {
        let first: u64 = self.fragments.iter().map(|fragment| fragment.samples).sum();
        let (fragment, features) = writer.close(first)?;
        self.fragments.push(fragment);
        self.features |= features;
        Ok(())
    }

    /// Check values and convert them to their stored form.
    fn stored(&mut self, spec: &ColumnSpec, column: Column, words: Option<Arc<Ragged>>, validate: Validate) -> Result<Stored> {
        let plain = |column| Ok(Stored { column, words: None });
        match &spec.kind {
            ColumnKind::Label { names } => plain(label_codes(names, column, words)?),
            ColumnKind::Category => plain(self.category(spec, column, words)?),
            ColumnKind::Text | ColumnKind::Json => plain(check_text(column)?),
            ColumnKind::Image { .. } | ColumnKind::Mask { .. } => {
                let mask = matches!(spec.kind, ColumnKind::Mask { .. });
                plain(check_media(column, mask, validate)?)
            }
            _ => {
                let (dtype, shape) = spec.kind.stored()?;
                let tile = match &spec.kind {
                    ColumnKind::Tensor { tile, .. } => tile.as_deref(),
                    _ => None,
                };
                plain(check_values(column, dtype, &shape, tile)?)
            }
        }
    }

    fn vocabulary(&mut self, column: u64) -> Result<&mut Vocabulary> {
        if !self.vocabularies.contains_key(&column) {
            let words: Vec<Arc<str>> = self.base.vocabulary(column)?.iter().map(Arc::from).collect();
            let codes = words.iter().cloned().zip(0..).collect();
            self.vocabularies.insert(column, Vocabulary { base: words.len(), words: Arc::new(words), codes, given: None });
        }
        self.vocabularies.get_mut(&column).ok_or_else(|| Error::new("internal", "a vocabulary vanished"))
    }

    /// Convert words, places in a word list, or codes of the base snapshot to codes of this transaction's vocabulary. The writer maps
    /// these codes to its dictionary.
    fn category(&mut self, spec: &ColumnSpec, column: Column, words: Option<Arc<Ragged>>) -> Result<Column> {
        let known = self.vocabulary(spec.id)?;
        let (codes, validity): (Vec<u32>, _) = match column {
            Column::Ragged(_) if words.is_some() => return Err(Error::new("invalid-value", "words are given twice")),
            Column::Pulled(_) => return Err(Error::new("invalid-value", "a tensor, expected words")),
            Column::Ragged(words) => {
                let texts = texts_of(&words)?;
                // Most words are known, and look-ups wait for memory, so all threads share them. New words get codes in order.
                let parts: Vec<&[&str]> = texts.chunks(LOOKED_UP).collect();
                let look = |part: usize| parts[part].iter().map(|text| known.codes.get(*text).copied()).collect::<Vec<_>>();
                let found = parallel::map(parts.len(), texts.len() * LINE_BYTES, look)?.concat();
                let code = |(row, (text, found)): (usize, (&str, Option<u32>))| match found {
                    _ if words.is_null(row) => 0,
                    Some(code) => code,
                    None => known.code_of(text),
                };
                (texts.into_iter().zip(found).enumerate().map(code).collect(), words.validity)
            }
            Column::Fixed { data, validity, samples } => {
                let (places, valid) = (codes_of(&data, samples)?, |row: usize| validity.as_ref().is_none_or(|validity| validity[row]));
                let out_of_range = |row: usize, place: i64, count: usize| {
                    let text = format!("holds code {place}, but the vocabulary has {count} words");
                    Error::new("invalid-value", text).hint("append the words themselves").at_row(row as u64)
                };
                let place_of = |place: i64, count: usize| usize::try_from(place).ok().filter(|place| *place < count);
                let codes = match words {
                    None => {
                        let code = |(row, place): (usize, i64)| match place_of(place, known.base) {
                            _ if !valid(row) => Ok(0),
                            Some(place) => Ok(place as u32),
                            None => Err(out_of_range(row, place, known.base)),
                        };
                        places.enumerate().map(code).collect::<Result<_>>()?
                    }
                    Some(words) => {
                        let texts = texts_of(&words)?;
                        // Each word of the list is looked up at most once, however often it occurs.
                        let seen = known.given.take().filter(|(given, _)| Arc::ptr_eq(given, &words)).map(|(_, seen)| seen);
                        let mut seen = seen.unwrap_or_else(|| vec![None; texts.len()]);
                        let code = |(row, place): (usize, i64)| match place_of(place, texts.len()) {
                            _ if !valid(row) => Ok(0),
                            Some(place) => Ok(*seen[place].get_or_insert_with(|| known.code_of(texts[place]))),
                            None => Err(out_of_range(row, place, texts.len())),
                        };
                        let codes = places.enumerate().map(code).collect::<Result<_>>()?;
                        known.given = Some((words.clone(), seen));
                        codes
                    }
                };
                (codes, validity)
            }
        };
        let samples = codes.len();
        Ok(Column::Fixed { data: codes.into_iter().flat_map(u32::to_le_bytes).collect(), validity, samples })
    }

    /// Commit all samples or none. Cost: three syncs for a small commit.
    pub fn commit(mut self, message: &str, author: &str, properties: &str) -> Result<(Receipt, Snapshot)> {
        self.check_open()?;
        if let Some(writer) = self.writer.take().filter(|writer| !writer.is_empty()) {
            self.close_fragment(writer).inspect_err(|_| self.state = State::Failed)?;
        }
        let entry = commit::entry(self.uuid, message, author, properties, self.samples)?;
        let own = self.write_metadata()?;
        let mut columns: Vec<u64> = self.touched.iter().copied().collect();
        columns.sort_unstable();
        if columns.len() > 64 {
            columns.clear(); // An empty list means all columns: the summary must fit the record.
        }
        let machine = Machine::new(entry, own, columns, self.features, self.base.record().gc_epoch);
        self.base.context.storage.prove()?;
        let (home, base) = (self.home.clone(), self.base.clone());
        let mut driver = Driver { home, base, parent: None, root: None, next: None, puts: &mut self.puts, uncertain: false };
        let snapshot = match driver.drive(machine) {
            Err(error) if error.code() == "commit-state-unknown" => {
                self.state = State::Closed; // It may be committed: nothing may be deleted.
                return Err(error);
            }
            other => other?,
        };
        // From here on nothing may fail: an error would make the caller commit the same samples again.
        self.state = State::Closed;
        let record = snapshot.record();
        let store = self.base.context.storage.as_ref();
        log::leave_hint(store, &log_folder(record.branch), record.number);
        let first_row_id = penstock_format::ids::row_id(record.lineage, record.next_counter - self.samples) as i64;
        let receipt = Receipt { snapshot: record.snapshot(), first_row_id, samples: self.samples };
        Ok((receipt, snapshot.within(self.home.clone())))
    }

    /// Write words and pages, and make all names durable. Returns the deltas of the record.
    fn write_metadata(&mut self) -> Result<Vec<Delta>> {
        let context = &self.base.context;
        let store = context.storage.as_ref();
        let mut folders = Vec::new();
        let mut own = Vec::new();
        for (column, vocabulary) in self.vocabularies.iter().filter(|(_, known)| known.words.len() > known.base) {
            let new = &vocabulary.words[vocabulary.base..];
            let (id, body) = (context.new_id()?, encode_words(*column, new));
            self.puts.push(words_name(id));
            store.put(&words_name(id), &body)?;
            folders.push("w");
            own.push(Delta::Words(WordsSegment {
                column: *column,
                first_code: 0,
                words: new.len() as u64,
                object: ObjectRef::of(id, &body),
            }));
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
            std::mem::forget(self.writer.take()); // The files belong to the parent process, which may be writing them.
            return;
        }
        if self.state != State::Closed {
            let data = self.fragments.iter().flat_map(|fragment| &fragment.files).map(|file| data_name(file.id));
            for name in data.chain(self.puts.drain(..)) {
                let _ = self.base.context.storage.delete(&name); // An orphan is harmless; the collector finds it.
            }
        }
    }
}

/// Put pages of fragments. Cost: one put per page.
fn write_pages(context: &Context, fragments: &[Fragment], base: u64, puts: &mut Vec<String>) -> Result<Vec<PageRef>> {
    encode_pages(fragments)
        .into_iter()
        .map(|(body, fragments, samples, live)| {
            let id = context.new_id()?;
            puts.push(page_name(id));
            context.storage.put(&page_name(id), &body)?;
            Ok(PageRef { object: ObjectRef::of(id, &body), base, fragments, samples, live })
        })
        .collect()
}

/// Write a root for the state of a snapshot. Loose fragments are merged into a preceding page that has room, so pages stay few.
fn write_root(snapshot: &Snapshot, puts: &mut Vec<String>) -> Result<(ObjectRef, Arc<Root>)> {
    let context = &snapshot.context;
    let (mut pages, mut loose): (Vec<PageRef>, Vec<Fragment>) = (Vec::new(), Vec::new());
    let flush = |pages: &mut Vec<PageRef>, loose: &mut Vec<Fragment>, puts: &mut Vec<String>| -> Result<()> {
        if let Some(last) = pages.last().copied() {
            let room = last.fragments as usize + loose.len() <= PAGE_FRAGMENTS && last.object.bytes as usize <= PAGE_BYTES / 2;
            if room && !loose.is_empty() {
                pages.pop();
                let mut merged = context.page(&last)?.to_vec();
                merged.append(loose);
                *loose = merged;
            }
        }
        pages.extend(write_pages(context, loose, 0, puts)?);
        loose.clear();
        Ok(())
    };
    for part in &snapshot.parts {
        match part {
            Part::Fragment(fragment) => loose.push(fragment.as_ref().clone()),
            Part::Page(page) => {
                flush(&mut pages, &mut loose, puts)?;
                pages.push(*page);
            }
        }
    }
    flush(&mut pages, &mut loose, puts)?;
    let mut words: Vec<WordsSegment> = snapshot.words_segments().copied().collect();
    words.sort_by_key(|segment| (segment.column, segment.first_code));
    let SnapshotId { branch, number, .. } = snapshot.id();
    let root = Root { dataset: snapshot.record().dataset, branch, number, schema: snapshot.schema.to_json()?, pages, words };
    let (id, body) = (context.new_id()?, root.encode());
    puts.push(root_name(id));
    context.storage.put(&root_name(id), &body)?;
    context.storage.sync(if root.pages.is_empty() { &["r"] } else { &["p", "r"] })?;
    Ok((ObjectRef::of(id, &body), Arc::new(root)))
}

/// Carries out the requests of the commit machine.
struct Driver<'a> {
    home: Arc<Context>,
    /// The snapshot at which the transaction began.
    base: Arc<Snapshot>,
    /// The newest snapshot, which the commit will follow.
    parent: Option<Snapshot>,
    /// The root that was written for the parent's state.
    root: Option<(ObjectRef, Arc<Root>)>,
    /// The snapshot of the proposed commit. It is complete before the put, so that nothing can fail afterwards.
    next: Option<Snapshot>,
    puts: &'a mut Vec<String>,
    /// Once an answer was lost, every failure leaves the commit's state unknown.
    uncertain: bool,
}

impl Driver<'_> {
    fn drive(&mut self, machine: Machine) -> Result<Snapshot> {
        let uuid = machine.uuid();
        self.answer_all(machine).map_err(|error| match self.uncertain && error.code() != "commit-state-unknown" {
            false => error,
            true => {
                let text = format!("cannot tell whether the commit succeeded: transaction {uuid}: {}", error.message());
                Error::new("commit-state-unknown", text)
                    .hint("nothing was deleted; look for the transaction in `penstock log` when the storage answers again")
            }
        })
    }

    fn answer_all(&mut self, mut machine: Machine) -> Result<Snapshot> {
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
                    if since > store.deadline() {
                        return Err(Error::new("storage-failed", format!("no certain answer for {:.1} s", since.as_secs_f64())));
                    }
                    if process::interrupted() {
                        return Err(Error::new("interrupted", "interrupted before a certain answer arrived"));
                    }
                    std::thread::sleep(Duration::from_millis(10)); // Wait out a brief fault.
                }
                Event::Exists => {} // Uncertain until the record is read.
                _ => lost = None,
            }
            let request = machine.step(event)?;
            asked = Instant::now();
            event = match request {
                Request::ReadNewest => self.read_newest(known).map_err(|error| base.context.or_replaced(error))?,
                Request::WriteRoot => {
                    let parent = self.parent.as_ref().ok_or_else(|| Error::new("internal", "a root was requested before any parent"))?;
                    let (object, root) = write_root(parent, self.puts)?;
                    self.root = Some((object, root));
                    Event::RootWritten(object)
                }
                Request::Create { number, body } => {
                    self.next = Some(self.snapshot_of(branch, number, &body)?);
                    match store.create(&record_name(branch, number), &body)? {
                        Created::Created => Event::Created,
                        Created::Exists => Event::Exists,
                        Created::Unknown => {
                            self.uncertain = true;
                            Event::Unknown
                        }
                    }
                }
                Request::Read { number } => match log::read(store, branch, number) {
                    Ok(entry) => {
                        base.context.hold_to(entry.record.dataset)?;
                        known = known.max(number);
                        Event::Found(Box::new(entry))
                    }
                    Err(_) => {
                        self.uncertain = true;
                        Event::Unreadable
                    }
                },
                Request::Done(record) => {
                    let next = self.next.take().filter(|next| next.id() == record.snapshot());
                    return next.ok_or_else(|| Error::new("internal", "a commit that was never put is reported as done"));
                }
            };
        }
    }

    /// Make the newest snapshot the parent. Its number is at least `known`.
    fn read_newest(&mut self, known: u64) -> Result<Event> {
        let store = self.base.context.storage.as_ref();
        let entry = log::newest(store, self.base.id().branch, Some(known))?
            .ok_or_else(|| Error::new("dataset-not-found", format!("cannot commit to `{}`: it is no longer a dataset", store.uri())))?;
        self.base.context.check_place(&self.home)?;
        self.base.context.hold_to(entry.record.dataset)?;
        if self.parent.is_none() && Arc::ptr_eq(&self.home, &self.base.context) {
            self.base.check_log(Some(&entry))?;
        }
        let snapshot = self.parent.as_ref().unwrap_or(&self.base).near(entry)?;
        let count = |column: &ColumnSpec| (column.id, snapshot.word_count(column.id));
        let words = snapshot.schema.columns.iter().map(count).filter(|(_, count)| *count > 0).collect();
        let parent = Box::new(snapshot.entry.clone());
        self.parent = Some(snapshot);
        Ok(Event::Newest { parent, words, now_us: now_us() })
    }

    /// Parse a record as readers will, before it is put.
    fn snapshot_of(&self, branch: u64, number: u64, body: &[u8]) -> Result<Snapshot> {
        let entry = log::LogEntry::parse(&Bytes::copy_from_slice(body), branch, number)?;
        let parent = self.parent.as_ref().ok_or_else(|| Error::new("internal", "a record was proposed before any parent was read"))?;
        match &self.root {
            Some((object, root)) if entry.record.root == *object => Snapshot::with_root(self.base.context.clone(), entry, root.clone()),
            _ => parent.near(entry),
        }
    }
}
