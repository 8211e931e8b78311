//! This process's cache of decoded blocks. All open datasets share one byte budget.

use std::sync::LazyLock;
use std::time::Duration;

use bytes::Bytes;
use penstock_error::Result;
use penstock_format::Id;
use penstock_storage::process::PerProcess;
use quick_cache::sync::{Cache, GuardResult, PlaceholderGuard};
use quick_cache::{OptionsBuilder, Weighter};

use crate::config::Config;

/// Bytes per cache shard. The largest entries must fit: tails of about 1 MiB, and blocks of a few MiB.
const SHARD_BYTES: u64 = 32 << 20;

#[derive(Clone)]
pub struct ByLength;

impl<K> Weighter<K, Bytes> for ByLength {
    fn weight(&self, _key: &K, block: &Bytes) -> u64 {
        block.len() as u64 + 128
    }
}

/// The key of a decoded block: data file id, tail checksum, chunk, block, and checksum unit (`u32::MAX` for the whole block).
pub type BlockKey = (Id, u32, u32, u32, u32);

/// The duty to read a block. Other threads may wait for the block until it is inserted or the duty is dropped.
pub type Duty = PlaceholderGuard<
    'static,
    BlockKey,
    Bytes,
    ByLength,
    quick_cache::DefaultHashBuilder,
    quick_cache::sync::DefaultLifecycle<BlockKey, Bytes>,
>;

/// Decoded blocks of all open datasets, which share the process's budget. Ids are random, so two datasets share a key only if one was
/// copied from the other. The tail contains the checksums of all blocks, so equal keys mean equal bytes.
static BLOCKS: PerProcess<Cache<BlockKey, Bytes, ByLength>> = PerProcess::new(|| {
    let block_bytes = free_bytes();
    cache((block_bytes / (64 << 10)) as usize, block_bytes, ByLength)
});

/// To ask for it takes some reads of files, and opening a dataset creates several caches.
static CORES: LazyLock<usize> = LazyLock::new(|| std::thread::available_parallelism().map_or(1, usize::from));

/// Create a cache of `bytes` bytes. Each shard has its own lock and an equal share of the bytes. `SHARD_BYTES` limits the number
/// of shards, because each shard must have room for the largest entries even with many cores and a small budget.
pub fn cache<K: Eq + std::hash::Hash, V: Clone, W: Weighter<K, V> + Clone>(
    items: usize,
    bytes: u64,
    weighter: W,
) -> Cache<K, V, W> {
    let shards = (bytes / SHARD_BYTES).clamp(1, 4 * *CORES as u64) as usize;
    let options = OptionsBuilder::new().estimated_items_capacity(items).weight_capacity(bytes).shards(shards).build();
    match options {
        Ok(options) => Cache::with_options(options, weighter, Default::default(), Default::default()),
        Err(_) => Cache::with_weighter(items, bytes, weighter),
    }
}

/// Return how many bytes cached decoded blocks may occupy.
pub fn budget_bytes() -> u64 {
    Config::memory_bytes() / 2
}

/// Apply a changed budget. An open dataset's file cache keeps the budget that was set when the dataset was opened.
pub fn fit_budget() {
    BLOCKS.get().set_capacity(free_bytes());
}

/// Return how many bytes whole data files of a cache leave for blocks.
pub fn free_bytes() -> u64 {
    budget_bytes().saturating_sub(penstock_cache::held_bytes())
}

/// Return a decoded block from the cache, or create the block with `decode`.
pub fn get_or_decode(key: BlockKey, decode: impl FnOnce() -> Result<Bytes>) -> Result<Bytes> {
    BLOCKS.get().get_or_insert_with(&key, decode)
}

/// Return a block, or the duty to read the block. Returns None if another thread still has that duty after `patience`.
pub fn get_or_duty(key: BlockKey, patience: Duration) -> Option<std::result::Result<Bytes, Duty>> {
    match BLOCKS.get().get_value_or_guard(&key, Some(patience)) {
        GuardResult::Value(block) => Some(Ok(block)),
        GuardResult::Guard(duty) => Some(Err(duty)),
        GuardResult::Timeout => None,
    }
}

pub fn get(key: BlockKey) -> Option<Bytes> {
    BLOCKS.get().get(&key)
}

pub fn keep(key: BlockKey, block: Bytes) {
    BLOCKS.get().insert(key, block);
}
