//! A snapshot: the immutable state at one commit. It maps positions and row ids to fragments and rows.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use penstock_error::{Context as _, Error, Kind, Result};
use penstock_format::datafile::Chunk;
use penstock_format::ids::{log_folder, root_name};
use penstock_format::manifest::{FileRef, Fragment, PageRef, Root, WordsSegment};
use penstock_format::record::{Delta, Record};
use penstock_format::schema::{ColumnSpec, Schema};
use penstock_format::{Id, SnapshotId};
use penstock_storage::Storage;

use crate::context::{Context, replaced};
use crate::copies;
use crate::fetch;
use crate::log::{self, LogEntry};
use crate::words::{FileCodes, Vocabulary};
use penstock_storage::process::PerProcess;

/// Sizes of a set of columns.
#[derive(Debug, Clone, Copy)]
pub struct ColumnBytes {
    /// As stored in data files.
    pub stored: u64,
    /// From the first to the last block of each column in each file, including blocks of other columns in between.
    pub spanned: u64,
    pub decoded: u64,
    /// One decoded block of each column whose samples share blocks: the memory to read one sample.
    pub blocks: u64,
    /// The decoded values of one sample. Each column counts by its mean in the fragments that have it, as a read may need only those.
    pub decoded_of_sample: f64,
}

/// How many tails an estimate of column sizes reads at most.
const TAILS_READ: usize = 16;
/// Memory of an open data file per column, in addition to the tail.
const COLUMN_BYTES: u64 = (size_of::<Chunk>() + 64) as u64;

/// A page or a fragment: a stretch of samples in manifest order.
#[derive(Debug, Clone)]
pub enum Part {
    Page(PageRef),
    Fragment(Arc<Fragment>),
}

#[derive(Default)]
struct CodeTables {
    vocabularies: HashMap<u64, Arc<Vocabulary>>,
    files: HashMap<(Id, u64), Arc<FileCodes>>,
    files_bytes: u64,
}

pub struct Snapshot {
    pub context: Arc<Context>,
    pub entry: LogEntry,
    pub root: Arc<Root>,
    pub schema: Arc<Schema>,
    pub parts: Vec<Part>,
    /// Position of the first sample of each part, followed by the number of all samples.
    starts: Vec<u64>,
    words: HashMap<u64, Vec<WordsSegment>>,
    /// Vocabularies of category columns, and per data file and column: local code → code of this snapshot's vocabulary.
    codes: PerProcess<Mutex<CodeTables>>,
    /// Sorted (first row id, count, position). The first look-up by row id builds it.
    row_index: PerProcess<OnceLock<Vec<(u64, u64, u64)>>>,
}

impl Snapshot {
    /// Open the newest snapshot of a branch. Cost on local disk: hint, record and root; in a copy, also that of `copies::check`.
    pub fn open(context: Arc<Context>, branch: u64) -> Result<Snapshot> {
        let store = context.storage.as_ref();
        let newest = log::newest_number(store, &log_folder(branch), None)?.ok_or_else(|| not_found(store))?;
        let number = if context.incomplete { newest.number } else { newest.whole(store, &log_folder(branch))? };
        let entry = log::read(store, branch, number)?;
        Snapshot::at_whole(context.clone(), entry, newest.written_in)
    }

    /// Open the newest snapshot of this branch. Cost: as `open`, without the root if it is unchanged.
    pub fn refreshed(&self) -> Result<Snapshot> {
        let SnapshotId { branch, number, .. } = self.id();
        let store = self.context.storage.as_ref();
        let entry = log::newest(store, branch, Some(number)).and_then(|entry| entry.ok_or_else(|| not_found(store)));
        let entry = entry.map_err(|error| self.context.or_replaced(error))?;
        self.context.hold_to(entry.record.dataset)?;
        self.check_log(Some(&entry))?;
        self.near(entry)
    }

    pub fn open_at(context: Arc<Context>, snapshot: &SnapshotId) -> Result<Snapshot> {
        if !context.storage.exists(&penstock_format::ids::record_name(snapshot.branch, 0))? {
            return Err(not_found(context.storage.as_ref()));
        }
        let entry = log::named(context.storage.as_ref(), snapshot)?;
        let store = context.storage.as_ref();
        let written_in = store.place().and_then(|_| log::hint(store, &log_folder(snapshot.branch))).map(|(_, place)| place);
        Snapshot::at_whole(context.clone(), entry, written_in)
    }

    /// Open the snapshot of a record as `at` does, but refuse an incomplete copy. `written_in` is the folder of the log's hint.
    fn at_whole(context: Arc<Context>, entry: LogEntry, written_in: Option<u64>) -> Result<Snapshot> {
        let root = root_name(entry.record.root.id);
        let snapshot = Snapshot::at(context.clone(), entry)
            .map_err(|error| copies::without_root(context.storage.as_ref(), written_in, root, error))?;
        copies::check(&snapshot, written_in)?;
        Ok(snapshot)
    }

    /// Open the snapshot of a record. Cost: reads its root.
    pub fn at(context: Arc<Context>, entry: LogEntry) -> Result<Snapshot> {
        context.hold_to(entry.record.dataset)?;
        let name = root_name(entry.record.root.id);
        let root = Root::parse(&context.object(&name, &entry.record.root)?).context(|| format!("cannot read `{name}`"))?;
        Snapshot::with_root(context, entry, Arc::new(root))
    }

    /// Open the snapshot of another record of this dataset. Cost: reads its root, unless it is the same.
    pub fn near(&self, entry: LogEntry) -> Result<Snapshot> {
        self.context.hold_to(entry.record.dataset)?;
        match entry.record.root == self.record().root {
            true => Snapshot::with_root(self.context.clone(), entry, self.root.clone()),
            false => Snapshot::at(self.context.clone(), entry),
        }
    }

    /// Make the snapshot of a record whose root is known. Reads nothing.
    pub fn with_root(context: Arc<Context>, entry: LogEntry, root: Arc<Root>) -> Result<Snapshot> {
        let record = &entry.record;
        if root.dataset != record.dataset || root.branch != record.branch || root.number > record.number {
            let name = root_name(record.root.id);
            return Err(penstock_format::cursor::malformed(format!("cannot read `{name}`: it is the root of another commit")));
        }
        let schema = Arc::new(Schema::parse(&root.schema)?);
        let mut parts: Vec<Part> = root.pages.iter().map(|page| Part::Page(*page)).collect();
        let mut segments = root.words.clone();
        for delta in &record.deltas {
            match delta {
                Delta::Fragment(fragment) => parts.push(Part::Fragment(Arc::new(fragment.clone()))),
                Delta::Page(page) => parts.push(Part::Page(*page)),
                Delta::Words(words) => segments.push(*words),
            }
        }
        let mut starts = vec![0u64];
        for part in &parts {
            let samples = match part {
                Part::Page(page) => page.samples,
                Part::Fragment(fragment) => fragment.samples,
            };
            let last = starts[starts.len() - 1];
            starts.push(last.checked_add(samples).ok_or_else(|| penstock_format::cursor::malformed("more samples than 2^64"))?);
        }
        if starts[starts.len() - 1] != record.samples || record.samples != record.live {
            let found = starts[starts.len() - 1];
            return Err(penstock_format::cursor::malformed(format!(
                "commit {} has {} samples ({} live), its manifest {found}",
                record.snapshot(),
                record.samples,
                record.live
            )));
        }
        let mut words: HashMap<u64, Vec<WordsSegment>> = HashMap::new();
        for segment in segments {
            words.entry(segment.column).or_default().push(segment);
        }
        Ok(Snapshot {
            context,
            entry,
            root,
            schema,
            parts,
            starts,
            words,
            codes: PerProcess::new(Mutex::default),
            row_index: PerProcess::new(OnceLock::new),
        })
    }

    /// Return the same snapshot with another context of the same dataset. Reads nothing.
    pub fn within(&self, context: Arc<Context>) -> Snapshot {
        Snapshot {
            context,
            entry: self.entry.clone(),
            root: self.root.clone(),
            schema: self.schema.clone(),
            parts: self.parts.clone(),
            starts: self.starts.clone(),
            words: self.words.clone(),
            codes: PerProcess::new(Mutex::default),
            row_index: PerProcess::new(OnceLock::new),
        }
    }

    /// Refuse a log that differs from the log of this snapshot, as a copy with other commits does. `found` is a record just read from
    /// the log. Cost: a read, unless `found` has the number of this snapshot.
    pub fn check_log(&self, found: Option<&LogEntry>) -> Result<()> {
        let SnapshotId { branch, number, .. } = self.id();
        let store = self.context.storage.as_ref();
        let read = match found.filter(|found| found.record.number == number) {
            Some(found) => Some(found.crc),
            None => match log::read(store, branch, number) {
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
        Err(replaced(&format!("snapshot {} of `{}`: its log has a different record {number}, or none", self.id(), store.uri())))
    }

    pub fn record(&self) -> &Record {
        &self.entry.record
    }

    pub fn id(&self) -> SnapshotId {
        self.entry.record.snapshot()
    }

    /// Return the number of samples.
    pub fn len(&self) -> u64 {
        self.entry.record.live
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn column(&self, name: &str) -> Result<&ColumnSpec> {
        let found = self.schema.column(name).map(|(_, column)| column);
        found.ok_or_else(|| {
            let names: Vec<&str> = self.schema.columns.iter().map(|column| column.name.as_str()).collect();
            Error::new("column-not-found", format!("cannot read column `{name}`: `{}` has no such column", self.context.storage.uri()))
                .hint(format!("columns: {}", names.join(", ")))
        })
    }

    /// Return the part that holds a position, and the place in that part. The position must be in range.
    #[inline]
    pub fn part_of(&self, position: u64) -> (usize, u64) {
        let part = self.starts.partition_point(|start| *start <= position) - 1;
        (part, position - self.starts[part])
    }

    /// Return the fragment of a snapshot that has no other part, else None.
    pub fn only_fragment(&self) -> Option<PartFragments> {
        match &self.parts[..] {
            [Part::Fragment(fragment)] => Some(PartFragments::One(fragment.clone())),
            _ => None,
        }
    }

    /// Return all fragments of a part, and the position of its first sample.
    pub fn fragments(&self, part: usize) -> Result<(u64, PartFragments)> {
        let fragments = match &self.parts[part] {
            Part::Page(page) => PartFragments::Page(self.context.page(page)?),
            Part::Fragment(fragment) => PartFragments::One(fragment.clone()),
        };
        Ok((self.starts[part], fragments))
    }

    /// Visit every fragment with the position of its first sample.
    pub fn each_fragment(&self, mut visit: impl FnMut(u64, &Fragment) -> Result<()>) -> Result<()> {
        for part in 0..self.parts.len() {
            let (mut start, fragments) = self.fragments(part)?;
            for fragment in fragments.as_slice() {
                visit(start, fragment)?;
                start += fragment.samples;
            }
        }
        Ok(())
    }

    /// Return the sizes of these columns over all samples, estimated if they are in more than `TAILS_READ` data files.
    /// Cost: reads the manifest, and at most `TAILS_READ` tails. The result is deterministic, because window orders depend on it.
    pub fn column_bytes(&self, columns: &[u64]) -> Result<ColumnBytes> {
        let mut files: Vec<(FileRef, u64)> = Vec::new();
        self.each_fragment(|_, fragment| {
            let read = fragment.files.iter().filter(|file| file.columns.iter().any(|column| columns.contains(column)));
            files.extend(read.map(|file| (file.clone(), fragment.samples)));
            Ok(())
        })?;
        let count = files.len().min(TAILS_READ);
        let looked: Vec<&(FileRef, u64)> = (0..count).map(|index| &files[index * files.len() / count]).collect();
        // A damaged file is left out of the estimate. Reading one of its samples reports the damage, and the caller decides what it means.
        let passable = |error: &Error| error.kind() == Kind::Corrupt && looked.len() > 1;
        if !self.context.storage.mapped() {
            self.open_tails(looked.iter().map(|(file, samples)| (file, *samples)))?;
        }
        let (mut spanned, mut of_those) = (0u128, 0u128);
        let (mut blocks, mut sizes): (HashMap<u64, u64>, HashMap<u64, (u128, u128)>) = Default::default();
        let mut damage = None;
        for (file, samples) in &looked {
            let opened = match self.context.file(file, *samples) {
                Err(error) if passable(&error) => {
                    damage = Some(error);
                    continue;
                }
                other => other?,
            };
            let tail = &opened.tail;
            of_those += u128::from(file.file_bytes);
            for chunk in tail.chunks.iter().filter(|chunk| columns.contains(&chunk.column)) {
                let raw: u128 = chunk.raw_bytes.as_ref().unwrap_or(&chunk.stored_bytes).iter().map(u128::from).sum();
                let (stored, decoded) = sizes.entry(chunk.column).or_default();
                *stored += chunk.stored_bytes.iter().map(u128::from).sum::<u128>();
                *decoded += raw;
                spanned += u128::from(chunk.span_bytes());
                if chunk.rows_per_block != 1 {
                    let mean = (raw / chunk.blocks().max(1) as u128) as u64;
                    blocks.entry(chunk.column).and_modify(|most| *most = mean.max(*most)).or_insert(mean);
                }
            }
        }
        if let Some(error) = damage.filter(|_| of_those == 0) {
            return Err(error);
        }
        let total: u128 = files.iter().map(|(file, _)| u128::from(file.file_bytes)).sum();
        let of_all = |read: u128| (total * read / of_those.max(1)) as u64;
        let mut samples: HashMap<u64, u64> = HashMap::new();
        for (file, of_file) in &files {
            file.columns.iter().for_each(|column| *samples.entry(*column).or_default() += of_file);
        }
        let of_sample = |column: &u64, bytes: u128| of_all(bytes) as f64 / samples.get(column).map_or(1.0, |samples| *samples as f64);
        // Sum in the order of the columns, because sums of floats depend on the order.
        let each = columns.iter().filter_map(|column| sizes.get(column).map(|(stored, decoded)| (column, *stored, *decoded)));
        Ok(ColumnBytes {
            stored: of_all(each.clone().map(|(_, stored, _)| stored).sum()),
            spanned: of_all(spanned),
            decoded: of_all(each.clone().map(|(_, _, decoded)| decoded).sum()),
            blocks: blocks.into_values().sum(),
            decoded_of_sample: each.map(|(column, _, decoded)| of_sample(column, decoded)).sum(),
        })
    }

    /// Return how many bytes reading these columns keeps of unmapped data files: of all, and of the largest. Cost: reads the manifest.
    pub fn kept_bytes(&self, columns: &[u64]) -> Result<(u64, u64)> {
        let (mut all, mut largest, mut whole) = (0, 0, 0);
        self.each_fragment(|_, fragment| {
            for file in fragment.files.iter().filter(|file| file.columns.iter().any(|column| columns.contains(column))) {
                // A quarter of the tail bounds the offset marks of its word lists; `COLUMN_BYTES` covers the parsed chunk of a column.
                let kept = file.tail_bytes + file.tail_bytes / 4 + file.columns.len() as u64 * COLUMN_BYTES;
                (all, largest, whole) = (all + kept, kept.max(largest), whole + fetch::whole_bytes(file));
            }
            Ok(())
        })?;
        // Small files are kept whole if all of them fit in the cache.
        let fits = all + whole <= Context::file_cache_bytes();
        Ok((all + if fits { whole } else { 0 }, largest))
    }

    /// Return the positions of row ids. Cost: reads all manifest pages the first time, then a binary search per row id.
    pub fn positions_of(&self, row_ids: &[i64]) -> Result<Vec<u64>> {
        let index = match self.row_index.get().get() {
            Some(index) => index,
            None => {
                let mut index = Vec::new();
                self.each_fragment(|mut start, fragment| {
                    for run in &fragment.runs {
                        index.push((run.first, run.count, start));
                        start += run.count;
                    }
                    Ok(())
                })?;
                index.sort_unstable();
                self.row_index.get().get_or_init(|| index)
            }
        };
        row_ids
            .iter()
            .map(|row_id| {
                let wanted = *row_id as u64;
                let at = index.partition_point(|(first, _, _)| *first <= wanted).checked_sub(1);
                let found = at.map(|at| index[at]).filter(|(first, count, _)| wanted - first < *count);
                found.map(|(first, _, position)| position + (wanted - first)).ok_or_else(|| {
                    Error::new("row-id-not-found", format!("cannot find row id {row_id}: snapshot {} has no such sample", self.id()))
                        .hint("row ids come from `_row_id` or receipt.row_ids")
                })
            })
            .collect()
    }

    /// Return the words of a category column, by code. A word that two writers added concurrently keeps its first code. Cost: reads the
    /// words once.
    pub fn vocabulary(&self, column: u64) -> Result<Arc<Vocabulary>> {
        let lock = || self.codes.get().lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().vocabularies.get(&column) {
            return Ok(known.clone());
        }
        let (mut vocabulary, mut listed) = (Vocabulary::default(), 0);
        for segment in self.words.get(&column).into_iter().flatten() {
            if segment.first_code != listed {
                return Err(penstock_format::cursor::malformed(format!(
                    "the words of column {column} continue at {}, expected {listed}",
                    segment.first_code,
                )));
            }
            let words = self.context.words(segment)?;
            listed += words.len() as u64;
            vocabulary.push(words)?;
        }
        let vocabulary = Arc::new(vocabulary);
        lock().vocabularies.insert(column, vocabulary.clone());
        Ok(vocabulary)
    }

    /// Return the vocabulary, and the translation of a data file's codes to its codes. Cost: reads the vocabulary the first time, then
    /// looks up each word on its first use.
    pub fn codes_of_file(&self, file: Id, column: u64, words: usize) -> Result<(Arc<Vocabulary>, Arc<FileCodes>)> {
        let vocabulary = self.vocabulary(column)?;
        let mut tables = self.codes.get().lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(codes) = tables.files.get(&(file, column)) {
            return Ok((vocabulary, codes.clone()));
        }
        let codes = Arc::new(FileCodes::new(words));
        tables.files_bytes += codes.bytes();
        if tables.files_bytes > Context::file_cache_bytes() / 2 {
            (tables.files, tables.files_bytes) = (HashMap::new(), codes.bytes()); // Dropped codes are looked up again on use.
        }
        tables.files.insert((file, column), codes.clone());
        Ok((vocabulary, codes))
    }

    pub fn words_segments(&self) -> impl Iterator<Item = &WordsSegment> {
        self.words.values().flatten()
    }

    /// Return how many words are listed for a category column, including words that are listed twice.
    pub fn word_count(&self, column: u64) -> u64 {
        self.words.get(&column).into_iter().flatten().map(|segment| segment.words).sum()
    }
}

pub enum PartFragments {
    Page(Arc<Vec<Fragment>>),
    One(Arc<Fragment>),
}

impl PartFragments {
    pub fn as_slice(&self) -> &[Fragment] {
        match self {
            PartFragments::Page(fragments) => fragments,
            PartFragments::One(fragment) => std::slice::from_ref(fragment),
        }
    }
}

fn not_found(storage: &dyn Storage) -> Error {
    Error::new("dataset-not-found", format!("cannot open `{}`: it is not a dataset", storage.uri()))
        .hint("check the path, or create a dataset with ps.create or `penstock create`")
}
