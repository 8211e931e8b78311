//! What all snapshots of one open dataset share: the store, and this process's caches of what it read and verified.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use penstock_error::{Context as _, Error, Kind, Result};
use penstock_format::cursor::Strings;
use penstock_format::ids::{ObjectRef, data_name, page_name, words_name};
use penstock_format::manifest::{FileRef, Fragment, PageRef, WordsSegment, parse_page, parse_words};
use penstock_format::{Id, ids};
use penstock_storage::Storage;
use quick_cache::sync::{Cache, GuardResult, PlaceholderGuard};
use quick_cache::{OptionsBuilder, Weighter};

use crate::config::Config;
use crate::datafile::DataFile;
use crate::{fetch, log};
use penstock_storage::process::PerProcess;

/// Data files mapped at once; Linux allows 65,530 maps a process.
const MAPPED_FILES: usize = 4096;
/// Manifest pages held: at 64 KiB each at most 64 MiB, and far less as they are.
const PAGES: usize = 1024;
const WORDS: usize = 4096;
/// Tails take about 1 MiB, the largest blocks a few.
const SHARD_BYTES: u64 = 32 << 20;

#[derive(Clone)]
pub struct ByLength;

impl<K> Weighter<K, Bytes> for ByLength {
    fn weight(&self, _key: &K, block: &Bytes) -> u64 {
        block.len() as u64 + 128
    }
}

/// A decoded block: data file, and the checksum of its tail; chunk, block; and which checksum unit of it, or `u32::MAX` for all.
pub type BlockKey = (Id, u32, u32, u32, u32);

/// Files are counted, and the memory that each holds.
#[derive(Clone)]
pub struct ByHeld {
    mapped: bool,
    least: u64,
}

impl Weighter<Id, Arc<DataFile>> for ByHeld {
    fn weight(&self, _id: &Id, file: &Arc<DataFile>) -> u64 {
        self.least + file.held_bytes(self.mapped)
    }
}

/// To be fulfilled with a block that others may be waiting for, or dropped.
pub type Duty = PlaceholderGuard<
    'static,
    BlockKey,
    Bytes,
    ByLength,
    quick_cache::DefaultHashBuilder,
    quick_cache::sync::DefaultLifecycle<BlockKey, Bytes>,
>;

/// To be fulfilled with a data file that others may be waiting for, or dropped.
pub type FileDuty<'a> = PlaceholderGuard<
    'a,
    Id,
    Arc<DataFile>,
    ByHeld,
    quick_cache::DefaultHashBuilder,
    quick_cache::sync::DefaultLifecycle<Id, Arc<DataFile>>,
>;

struct Caches {
    pages: Cache<PageRef, Arc<Vec<Fragment>>>,
    files: Cache<Id, Arc<DataFile>, ByHeld>,
    words: Cache<WordsSegment, Arc<Strings>>,
}

/// Decoded blocks of all open datasets: the budget is the process's. Ids are random, so keys of two datasets meet only where somebody made one
/// dataset from another: the tail has the checksums of all blocks, so one key means the same bytes in both.
static BLOCKS: PerProcess<Cache<BlockKey, Bytes, ByLength>> = PerProcess::new(|| {
    let block_bytes = Context::block_cache_bytes();
    cache((block_bytes / (64 << 10)) as usize, block_bytes, ByLength)
});

/// A cache of so many bytes. It is cut into shards, each with a lock and a part of the bytes of its own: one must be able to hold what comes
/// together, on a machine of many cores and with a small budget too.
fn cache<K: Eq + std::hash::Hash, V: Clone, W: Weighter<K, V> + Clone>(items: usize, bytes: u64, weighter: W) -> Cache<K, V, W> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let shards = (bytes / SHARD_BYTES).clamp(1, 4 * cores as u64) as usize;
    let options = OptionsBuilder::new().estimated_items_capacity(items).weight_capacity(bytes).shards(shards).build();
    match options {
        Ok(options) => Cache::with_options(options, weighter, Default::default(), Default::default()),
        Err(_) => Cache::with_weighter(items, bytes, weighter),
    }
}

fn caches(mapped: bool) -> Caches {
    let held_bytes = Context::file_cache_bytes();
    let weigher = ByHeld { mapped, least: held_bytes / MAPPED_FILES as u64 };
    let files = cache(MAPPED_FILES, held_bytes, weigher);
    Caches { pages: Cache::new(PAGES), files, words: Cache::new(WORDS) }
}

/// The handle's dataset is not at its path any more.
pub fn replaced(what: &str) -> Error {
    Error::new("dataset-replaced", format!("cannot go on with {what}"))
        .hint("open the path anew, or this dataset where it is now; nothing was committed")
}

type MakeCaches = Box<dyn Fn() -> Caches + Send + Sync>;

/// An open store with its caches.
pub struct Context {
    pub storage: Box<dyn Storage>,
    /// Whether an incomplete copy may be opened, so that `verify` can name the missing objects.
    pub incomplete: bool,
    /// The dataset that was found here first: the only one that this handle ever reads or writes.
    dataset: OnceLock<Id>,
    caches: Arc<PerProcess<Caches, MakeCaches>>,
}

impl Context {
    pub fn new(storage: Box<dyn Storage>) -> Arc<Context> {
        Context::with(storage, false)
    }

    pub fn with(storage: Box<dyn Storage>, incomplete: bool) -> Arc<Context> {
        let mapped = storage.mapped();
        let caches: MakeCaches = Box::new(move || caches(mapped));
        Arc::new(Context { storage, incomplete, dataset: OnceLock::new(), caches: Arc::new(PerProcess::new(caches)) })
    }

    /// The same with its root held, for changes: all of one lands in one folder, wherever the path comes to lead meanwhile. None where a root
    /// does not move, or cannot be held. Cost on local disk: a descriptor.
    pub fn held(&self) -> Result<Option<Arc<Context>>> {
        let with = |storage| Context { storage, incomplete: self.incomplete, dataset: self.dataset.clone(), caches: self.caches.clone() };
        Ok(self.storage.held()?.map(with).map(Arc::new))
    }

    /// Hold a change to where the path leads now, right before it is made. Cost: none where roots do not move.
    pub fn check_place(&self, home: &Context) -> Result<()> {
        if self.storage.in_place() {
            return Ok(());
        }
        home.check_dataset().map_err(|error| home.or_replaced(error))?;
        Err(replaced(&format!("`{}`: the path leads to another folder by now", self.storage.uri())))
    }

    /// Hold a dataset that was found here to the one that was here before.
    pub fn hold_to(&self, found: Id) -> Result<()> {
        let known = *self.dataset.get_or_init(|| found);
        if known == found {
            return Ok(());
        }
        Err(replaced(&format!("dataset {known}: at `{}` is now dataset {found}", self.storage.uri())))
    }

    /// Look whether the dataset is still the one that was opened, before something of it is changed that does not name it. Cost: a read.
    pub fn check_dataset(&self) -> Result<()> {
        let first = log::read(self.storage.as_ref(), 0, 0)?;
        self.hold_to(first.record.dataset)
    }

    /// What a failure to find something really is: where the path leads to another dataset by now, that is what to say.
    pub fn or_replaced(&self, error: Error) -> Error {
        match error.kind() {
            Kind::NotFound | Kind::Corrupt => {
                self.check_dataset().err().filter(|found| found.code() == "dataset-replaced").unwrap_or(error)
            }
            _ => error,
        }
    }

    /// Read an object and hold it to its parent's word.
    pub fn object(&self, name: &str, object: &ObjectRef) -> Result<Bytes> {
        let read = || self.storage.read(name).map_err(|error| self.or_replaced(error.object(name)));
        let body = read()?;
        if object.check(name, &body).is_ok() {
            return Ok(body);
        }
        let body = read()?; // The network may have damaged the first answer.
        object.check(name, &body)?;
        Ok(body)
    }

    /// Fragments of a page, their row ids final.
    pub fn page(&self, page: &PageRef) -> Result<Arc<Vec<Fragment>>> {
        self.caches.get().pages.get_or_insert_with(page, || {
            let name = page_name(page.object.id);
            let fragments = parse_page(&self.object(&name, &page.object)?).context(|| format!("cannot read `{name}`"))?;
            let samples: u64 = fragments.iter().map(|fragment| fragment.samples).sum();
            if (fragments.len() as u64, samples) != (page.fragments, page.samples) {
                let found = format!("{} fragments of {samples} samples, expected {} of {}", fragments.len(), page.fragments, page.samples);
                return Err(penstock_format::cursor::malformed(format!("cannot read `{name}`: {found}")));
            }
            Ok(Arc::new(fragments.into_iter().map(|fragment| fragment.resolved(page.base)).collect()))
        })
    }

    /// A data file, its tail verified.
    pub fn file(&self, file: &FileRef, samples: u64) -> Result<Arc<DataFile>> {
        let found = self.caches.get().files.get_or_insert_with(&file.id, || Ok(Arc::new(self.open_file(file, samples)?)))?;
        if found.is(file, samples) { Ok(found) } else { self.open_file(file, samples).map(Arc::new) }
    }

    /// The same, read anew.
    pub fn open_file(&self, file: &FileRef, samples: u64) -> Result<DataFile> {
        self.try_open_file(file, samples).map_err(|error| self.or_replaced(error.object(data_name(file.id))))
    }

    fn try_open_file(&self, file: &FileRef, samples: u64) -> Result<DataFile> {
        let storage = self.storage.as_ref();
        if storage.mapped() {
            return DataFile::open(storage, file, samples);
        }
        let pieces = storage.fetch(vec![fetch::tail_range(file)]).into_iter().next().unwrap_or_else(|| Ok(Vec::new()))?;
        fetch::open(file, samples, pieces)
    }

    /// Whether a data file of this id is open.
    pub fn is_open(&self, file: Id) -> bool {
        self.caches.get().files.peek(&file).is_some()
    }

    /// A data file that is open, or the duty to open it, or nothing while another thread has had that duty for all of `patience`.
    pub fn file_or_duty(&self, file: Id, patience: Duration) -> Option<std::result::Result<Arc<DataFile>, FileDuty<'_>>> {
        match self.caches.get().files.get_value_or_guard(&file, Some(patience)) {
            GuardResult::Value(file) => Some(Ok(file)),
            GuardResult::Guard(duty) => Some(Err(duty)),
            GuardResult::Timeout => None,
        }
    }

    pub fn words(&self, segment: &WordsSegment) -> Result<Arc<Strings>> {
        self.caches.get().words.get_or_insert_with(segment, || {
            let name = words_name(segment.object.id);
            let (column, words) = parse_words(&self.object(&name, &segment.object)?).context(|| format!("cannot read `{name}`"))?;
            if (column, words.len() as u64) != (segment.column, segment.words) {
                return Err(penstock_format::cursor::malformed(format!("cannot read `{name}`: {} words of column {column}", words.len())));
            }
            Ok(Arc::new(words))
        })
    }

    /// A decoded block, from the cache or made by `decode`.
    pub fn block(&self, key: BlockKey, decode: impl FnOnce() -> Result<Bytes>) -> Result<Bytes> {
        BLOCKS.get().get_or_insert_with(&key, decode)
    }

    /// What data files may take, of each open dataset: their tails, and all of small ones that are not mapped.
    pub fn file_cache_bytes() -> u64 {
        Config::memory_bytes() / 4
    }

    /// Keep to a budget that was changed. What is kept of data files goes by that of the time when their dataset was opened.
    pub fn fit_budget() {
        BLOCKS.get().set_capacity(Context::block_cache_bytes());
    }

    /// What decoded blocks may take.
    pub fn block_cache_bytes() -> u64 {
        Config::memory_bytes() / 2
    }

    /// A block, or the duty to read it, or nothing while another thread has had that duty for all of `patience`.
    pub fn block_or_duty(&self, key: BlockKey, patience: Duration) -> Option<std::result::Result<Bytes, Duty>> {
        match BLOCKS.get().get_value_or_guard(&key, Some(patience)) {
            GuardResult::Value(block) => Some(Ok(block)),
            GuardResult::Guard(duty) => Some(Err(duty)),
            GuardResult::Timeout => None,
        }
    }

    pub fn cached_block(&self, key: BlockKey) -> Option<Bytes> {
        BLOCKS.get().get(&key)
    }

    pub fn cache_block(&self, key: BlockKey, block: Bytes) {
        BLOCKS.get().insert(key, block);
    }

    /// A new random id.
    pub fn new_id(&self) -> Result<Id> {
        let mut id = [0; 16];
        getrandom::fill(&mut id).map_err(|error| penstock_error::Error::new("internal", format!("no random numbers: {error}")))?;
        Ok(ids::Id(id))
    }
}
