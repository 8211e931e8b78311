//! An open store, its dataset's identity, and this process's caches of verified objects. All snapshots of a handle share one
//! context.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use penstock_cache::{Cached, Policy, Tiered};
use penstock_error::{Context as _, Error, Kind, Result};
use penstock_format::Id;
use penstock_format::cursor::Strings;
use penstock_format::ids::{is_immutable, record_name};
use penstock_format::manifest::{Fragment, PageRef, PageStatistics, Statistics, WordsSegment};
use penstock_format::names::Folded;
use penstock_format::record::Record;
use penstock_format::rows::{RowIds, RowIdsRef};
use penstock_format::schema::Schema;
use penstock_storage::process::PerProcess;
use penstock_storage::{Read, Store};
use quick_cache::Weighter;
use quick_cache::sync::{Cache, PlaceholderGuard};

use super::blocks::{budget_bytes, cache, fit_budget};
use super::datafile::DataFile;
use crate::config::Config;

/// Maximum number of cached data files, each of which may be mapped. Linux allows 65,530 maps per process by default.
const MAPPED_FILES: usize = 4096;
/// Maximum number of cached manifest pages. An encoded page is at most 64 KiB long, unless it consists of one large fragment.
const PAGES: usize = 1024;
const WORDS: usize = 4096;
/// Estimated number of data files whose statistics are kept until a page has them.
const WRITTEN_FILES: usize = 4096;
/// Estimated number of cached sets of row ids.
const ROW_ID_SETS: usize = 1024;

/// Weighs a data file by the memory it uses. The minimum weight `least` also bounds the number of files.
#[derive(Clone)]
pub struct ByHeld {
    least: u64,
}

impl Weighter<Id, Arc<DataFile>> for ByHeld {
    fn weight(&self, _id: &Id, file: &Arc<DataFile>) -> u64 {
        self.least + file.held_bytes()
    }
}

/// Weighs the entries of a cache by a function.
pub struct ByFunction<K, V>(fn(&K, &V) -> u64);

impl<K, V> Clone for ByFunction<K, V> {
    fn clone(&self) -> ByFunction<K, V> {
        ByFunction(self.0)
    }
}

impl<K, V> Weighter<K, V> for ByFunction<K, V> {
    fn weight(&self, key: &K, value: &V) -> u64 {
        self.0(key, value)
    }
}

/// The statistics of the columns of a data file.
type FileStatistics = Arc<Vec<(u64, Statistics)>>;

/// The duty to open a data file. Other threads may wait for the file until it is inserted or the duty is dropped.
pub type FileDuty<'a> = PlaceholderGuard<
    'a,
    Id,
    Arc<DataFile>,
    ByHeld,
    quick_cache::DefaultHashBuilder,
    quick_cache::sync::DefaultLifecycle<Id, Arc<DataFile>>,
>;

pub struct Caches {
    pub pages: Cache<PageRef, Arc<Vec<Fragment>>>,
    pub files: Cache<Id, Arc<DataFile>, ByHeld>,
    pub words: Cache<WordsSegment, Arc<Strings>>,
    pub row_ids: Cache<RowIdsRef, Arc<RowIds>, ByFunction<RowIdsRef, Arc<RowIds>>>,
    /// Statistics of the columns of data files that this process wrote, or that other pages have.
    statistics: Cache<Id, FileStatistics, ByFunction<Id, FileStatistics>>,
    /// Statistics of pages.
    pub page_statistics: Cache<Id, Arc<PageStatistics>, ByFunction<Id, Arc<PageStatistics>>>,
    /// The last schema that was parsed, and its text.
    schema: Mutex<Option<(String, Arc<Schema>)>>,
}

impl Caches {
    /// Keep the statistics of a data file's columns.
    pub fn note_statistics(&self, file: Id, columns: Vec<(u64, Statistics)>) {
        self.statistics.insert(file, Arc::new(columns));
    }

    /// Return the statistics of a data file's columns, if they are known without reading it.
    pub fn statistics_of(&self, file: Id) -> Option<FileStatistics> {
        self.statistics.get(&file)
    }

    /// Parse the schema of a root. All commits until the next change of the schema have the same text.
    pub fn schema(&self, text: &str) -> Result<Arc<Schema>> {
        let mut last = self.schema.lock().unwrap_or_else(PoisonError::into_inner);
        match last.as_ref().filter(|(known, _)| known == text) {
            Some((_, schema)) => Ok(schema.clone()),
            None => Ok(last.insert((text.to_owned(), Arc::new(Schema::parse(text)?))).1.clone()),
        }
    }
}

fn caches() -> Caches {
    let held_bytes = file_cache_bytes();
    let weigher = ByHeld { least: held_bytes / MAPPED_FILES as u64 };
    let files = cache(MAPPED_FILES, held_bytes, weigher);
    // The size of an object is about that of the set in memory.
    let row_ids = cache(ROW_ID_SETS, held_bytes / 4, ByFunction(|rows: &RowIdsRef, _| 128 + rows.object.bytes));
    let statistics = cache(
        WRITTEN_FILES,
        WRITTEN_FILES as u64 * 16,
        ByFunction(|_, columns: &FileStatistics| 1 + columns.len() as u64),
    );
    let page_bytes = |_: &Id, page: &Arc<PageStatistics>| {
        page.columns.iter().map(|(_, known)| 64 + known.len() as u64 * 128).sum::<u64>() + 64
    };
    let page_statistics = cache(PAGES, held_bytes / 4, ByFunction(page_bytes));
    Caches {
        pages: Cache::new(PAGES),
        files,
        words: Cache::new(WORDS),
        row_ids,
        statistics,
        page_statistics,
        schema: Mutex::default(),
    }
}

/// What a cache may keep of a dataset's objects. Whole data files may use three quarters of the memory of blocks, which then have less.
pub const CACHE_POLICY: Policy =
    Policy { keeps: is_immutable, memory_bytes: || budget_bytes() / 4 * 3, changed: fit_budget };

/// Return how many bytes each open dataset's cached data files may use: tails, and whole small files that are not mapped.
pub fn file_cache_bytes() -> u64 {
    Config::memory_bytes() / 4
}

/// Build the error for a handle whose path now leads elsewhere, or nowhere.
pub fn replaced(what: &str) -> Error {
    Error::new("dataset-replaced", format!("cannot continue with {what}"))
        .hint("reopen the path, or open this dataset at its new location; nothing was committed")
}

/// Whether a copy that lacks objects may be opened. `verify` permits this in order to list the missing objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Incomplete {
    Refuse,
    Permit,
}

/// An open store with its caches.
pub struct Context {
    pub storage: Arc<dyn Store>,
    /// The cache through which immutable objects are read.
    pub cached: Option<Cached>,
    pub incomplete: Incomplete,
    /// The first dataset found at this path. The handle never reads or writes any other dataset.
    dataset: OnceLock<Id>,
    /// The names that `log::refs` has read from the names log so far.
    pub refs: Arc<PerProcess<Mutex<Folded>>>,
    pub caches: Arc<PerProcess<Caches>>,
}

impl Context {
    pub fn new(tiered: impl Into<Tiered>) -> Arc<Context> {
        Context::with(tiered, Incomplete::Refuse)
    }

    pub fn with(tiered: impl Into<Tiered>, incomplete: Incomplete) -> Arc<Context> {
        let Tiered { store, cached } = tiered.into();
        Arc::new(Context {
            storage: store,
            cached,
            incomplete,
            dataset: OnceLock::new(),
            caches: Arc::new(PerProcess::new(caches as fn() -> Caches)),
            refs: Arc::new(PerProcess::new(Mutex::default)),
        })
    }

    /// Return where immutable objects are read. Records, hints and names are read from the store itself.
    #[inline]
    pub fn reads(&self) -> &dyn Read {
        match &self.cached {
            Some(cached) => cached,
            None => &*self.storage,
        }
    }

    /// Delete an immutable object, and what the cache has of it.
    pub fn delete(&self, name: &str) -> Result<()> {
        self.storage.delete(name)?;
        // What a cache cannot forget is evicted some time.
        let _ = self.cached.as_ref().map(|cached| cached.forget(name));
        Ok(())
    }

    /// Return a copy of this context that keeps its root open. All changes made through the copy go to one folder, even if the
    /// path is redirected in the meantime. Returns None if the root cannot move or cannot be kept open. Cost on local disk: one
    /// file descriptor.
    pub fn held(&self) -> Result<Option<Arc<Context>>> {
        let with = |storage: Arc<dyn Store>| Context {
            cached: self.cached.as_ref().map(|cached| cached.with_cold(storage.clone())),
            storage,
            incomplete: self.incomplete,
            dataset: self.dataset.clone(),
            caches: self.caches.clone(),
            refs: self.refs.clone(),
        };
        Ok(self.storage.held()?.map(with).map(Arc::new))
    }

    /// Check, immediately before a change, that the path still leads to the open root. Costs nothing if roots cannot move.
    pub fn check_place(&self, home: &Context) -> Result<()> {
        if self.storage.in_place() {
            return Ok(());
        }
        home.check_dataset().map_err(|error| home.or_replaced(error))?;
        Err(replaced(&format!("`{}`: the path now leads to another folder", self.storage.uri())))
    }

    /// Check that a dataset found at this path is the first dataset that was found there.
    pub fn hold_to(&self, found: Id) -> Result<()> {
        let known = *self.dataset.get_or_init(|| found);
        if known == found {
            return Ok(());
        }
        Err(replaced(&format!("dataset {known}: `{}` now contains dataset {found}", self.storage.uri())))
    }

    /// Check that the path still leads to the opened dataset. Call this before changing objects that do not record their dataset.
    /// Cost: one read.
    pub fn check_dataset(&self) -> Result<()> {
        let name = record_name(0, 0);
        let read = || Record::parse(&self.storage.read(&name)?, 0, 0).context(|| format!("cannot read `{name}`"));
        let first = read().or_else(|error| if error.kind() == Kind::Corrupt { read() } else { Err(error) })?;
        self.hold_to(first.dataset)
    }

    /// Return `dataset-replaced` if an object is missing or corrupt because the path now leads to another dataset. If not, return `error`.
    pub fn or_replaced(&self, error: Error) -> Error {
        match error.kind() {
            Kind::NotFound | Kind::Corrupt => {
                self.check_dataset().err().filter(|found| found.code() == "dataset-replaced").unwrap_or(error)
            }
            _ => error,
        }
    }

    /// Generate a random id.
    pub fn new_id(&self) -> Result<Id> {
        let mut id = [0; 16];
        getrandom::fill(&mut id)
            .map_err(|error| penstock_error::Error::new("internal", format!("cannot make an id: {error}")))?;
        Ok(Id(id))
    }
}
