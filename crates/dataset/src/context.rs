//! The state that all snapshots of one open dataset share: the store, and this process's caches of verified objects.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use penstock_error::{Context as _, Error, Kind, Result};
use penstock_format::Id;
use penstock_format::cursor::Strings;
use penstock_format::ids::{ObjectRef, data_name, page_name, words_name};
use penstock_format::manifest::{FileRef, Fragment, PageRef, WordsSegment, parse_page, parse_words};
use penstock_storage::Storage;
use quick_cache::sync::{Cache, GuardResult, PlaceholderGuard};
use quick_cache::{OptionsBuilder, Weighter};

use crate::config::Config;
use crate::datafile::DataFile;
use crate::{fetch, log};
use penstock_storage::process::PerProcess;

/// Data files that may be mapped at the same time. Linux allows 65,530 maps per process.
const MAPPED_FILES: usize = 4096;
/// Cached manifest pages. A page has at most 64 KiB, so the bound is 64 MiB; typical pages are far smaller.
const PAGES: usize = 1024;
const WORDS: usize = 4096;
/// Bytes per cache shard, so that the largest entries fit: tails have about 1 MiB, the largest blocks a few MiB.
const SHARD_BYTES: u64 = 32 << 20;

#[derive(Clone)]
pub struct ByLength;

impl<K> Weighter<K, Bytes> for ByLength {
    fn weight(&self, _key: &K, block: &Bytes) -> u64 {
        block.len() as u64 + 128
    }
}

/// The key of a decoded block: data file id, checksum of its tail, chunk, block, and checksum unit (`u32::MAX` for the whole block).
pub type BlockKey = (Id, u32, u32, u32, u32);

/// Weighs a data file by the memory it holds. The minimum weight `least` also bounds the number of files.
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

/// The duty to read a block. Other threads may be waiting for it, until the block is inserted or the duty is dropped.
pub type Duty = PlaceholderGuard<
    'static,
    BlockKey,
    Bytes,
    ByLength,
    quick_cache::DefaultHashBuilder,
    quick_cache::sync::DefaultLifecycle<BlockKey, Bytes>,
>;

/// The duty to open a data file. Other threads may be waiting for it, until the file is inserted or the duty is dropped.
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

/// Decoded blocks of all open datasets, which share the budget of the process. Ids are random, so two datasets share a key only if
/// one was made from the other. The tail has the checksums of all blocks, so equal keys mean equal bytes.
static BLOCKS: PerProcess<Cache<BlockKey, Bytes, ByLength>> = PerProcess::new(|| {
    let block_bytes = Context::block_cache_bytes();
    cache((block_bytes / (64 << 10)) as usize, block_bytes, ByLength)
});

/// Make a cache of `bytes` bytes. Each of its shards has its own lock and an equal part of the bytes. `SHARD_BYTES` limits the
/// number of shards: even with many cores and a small budget, one shard must hold the largest entries.
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

/// The error for a handle whose dataset is no longer at its path.
pub fn replaced(what: &str) -> Error {
    Error::new("dataset-replaced", format!("cannot continue with {what}"))
        .hint("reopen the path, or open this dataset at its new location; nothing was committed")
}

type MakeCaches = Box<dyn Fn() -> Caches + Send + Sync>;

/// An open store with its caches.
pub struct Context {
    pub storage: Box<dyn Storage>,
    /// Whether an incomplete copy may be opened. `verify` needs this to name the missing objects.
    pub incomplete: bool,
    /// The first dataset found at this path. The handle never reads or writes another one.
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

    /// Return this context with its root held open. A change made through it stays in one folder, even if the path is redirected
    /// meanwhile. None if the root cannot move or cannot be held. Cost on local disk: a descriptor.
    pub fn held(&self) -> Result<Option<Arc<Context>>> {
        let with = |storage| Context { storage, incomplete: self.incomplete, dataset: self.dataset.clone(), caches: self.caches.clone() };
        Ok(self.storage.held()?.map(with).map(Arc::new))
    }

    /// Check, right before a change, that the path still leads to the held root. Cost: none if roots cannot move.
    pub fn check_place(&self, home: &Context) -> Result<()> {
        if self.storage.in_place() {
            return Ok(());
        }
        home.check_dataset().map_err(|error| home.or_replaced(error))?;
        Err(replaced(&format!("`{}`: the path now leads to another folder", self.storage.uri())))
    }

    /// Check that the dataset found at this path is the one that was found first.
    pub fn hold_to(&self, found: Id) -> Result<()> {
        let known = *self.dataset.get_or_init(|| found);
        if known == found {
            return Ok(());
        }
        Err(replaced(&format!("dataset {known}: `{}` now holds dataset {found}", self.storage.uri())))
    }

    /// Check that the path still holds the dataset that was opened. Needed before changes to objects that do not name their dataset.
    /// Cost: a read.
    pub fn check_dataset(&self) -> Result<()> {
        let first = log::read(self.storage.as_ref(), 0, 0)?;
        self.hold_to(first.record.dataset)
    }

    /// Return `dataset-replaced` if an object is missing or corrupt because the path now leads to another dataset. Else return `error`.
    pub fn or_replaced(&self, error: Error) -> Error {
        match error.kind() {
            Kind::NotFound | Kind::Corrupt => {
                self.check_dataset().err().filter(|found| found.code() == "dataset-replaced").unwrap_or(error)
            }
            _ => error,
        }
    }

    /// Read an object and verify it against the length and checksum that its parent recorded.
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

    /// Return the fragments of a page, with final row ids.
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

    /// Return a data file from the cache, or open it. Its tail is verified.
    pub fn file(&self, file: &FileRef, samples: u64) -> Result<Arc<DataFile>> {
        let found = self.caches.get().files.get_or_insert_with(&file.id, || Ok(Arc::new(self.open_file(file, samples)?)))?;
        if found.is(file, samples) { Ok(found) } else { self.open_file(file, samples).map(Arc::new) }
    }

    /// Open a data file without the cache.
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

    /// Return whether the cache has a data file with this id.
    pub fn is_open(&self, file: Id) -> bool {
        self.caches.get().files.peek(&file).is_some()
    }

    /// Return a cached data file, or the duty to open it. None if another thread held that duty during all of `patience`.
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

    /// Return a decoded block from the cache, or make it with `decode`.
    pub fn block(&self, key: BlockKey, decode: impl FnOnce() -> Result<Bytes>) -> Result<Bytes> {
        BLOCKS.get().get_or_insert_with(&key, decode)
    }

    /// Return how many bytes the cached data files of each open dataset may hold: tails, and whole small files that are not mapped.
    pub fn file_cache_bytes() -> u64 {
        Config::memory_bytes() / 4
    }

    /// Apply a changed budget to the block cache. The file cache of an open dataset keeps the budget it was opened with.
    pub fn fit_budget() {
        BLOCKS.get().set_capacity(Context::block_cache_bytes());
    }

    /// Return how many bytes cached decoded blocks may hold.
    pub fn block_cache_bytes() -> u64 {
        Config::memory_bytes() / 2
    }

    /// Return a block, or the duty to read it. None if another thread held that duty during all of `patience`.
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

    /// Make a random id.
    pub fn new_id(&self) -> Result<Id> {
        let mut id = [0; 16];
        getrandom::fill(&mut id).map_err(|error| penstock_error::Error::new("internal", format!("cannot make an id: {error}")))?;
        Ok(Id(id))
    }
}
