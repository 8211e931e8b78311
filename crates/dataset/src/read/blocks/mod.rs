//! The blocks that a take must fetch, and the blocks that were fetched for it.

pub mod fill;
pub mod lent;
pub mod ranges;
pub mod share;
pub mod stream;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use bytes::Bytes;
use penstock_error::{Error, Result};
use penstock_format::Id;
use penstock_format::datafile::{Codec, Layout};
use penstock_format::ids::data_name;
use penstock_storage::{Recycled, Slot};

use crate::config::Config;
use crate::store::blocks::{self, BlockKey};
use crate::store::datafile::DataFile;

/// Alignment of columns that share one allocation, sufficient for any element type.
const COLUMN_ALIGN: usize = 64;

/// Which gaps between blocks are read, because this is cheaper than another request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Gaps {
    /// As many as the store recommends.
    #[default]
    All,
    /// Those that are short compared with the blocks.
    Few,
}

/// A block to read, or a checksum unit of an uncompressed block.
#[derive(Clone)]
pub struct Wanted {
    pub key: BlockKey,
    pub file: Arc<DataFile>,
    pub chunk: usize,
    pub block: usize,
    pub unit: Option<usize>,
    pub offset: u64,
    pub bytes: u64,
    /// Whether only some of the block's rows are requested.
    pub partial: bool,
    /// Whether this call must read the block because other threads may be waiting for it. The block is then added to the cache.
    pub awaited: bool,
    /// Whether the block is read only because it is a neighbour of a requested block.
    pub beside: bool,
}

impl Wanted {
    pub fn new(file: &Arc<DataFile>, chunk: usize, block: usize, unit: Option<usize>) -> Wanted {
        let entry = &file.tail.chunks[chunk];
        let (offset, end) = match unit {
            Some(unit) => file.unit(chunk, block, unit),
            None => (entry.offset.get(block), entry.offset.get(block) + entry.stored_bytes.get(block)),
        };
        Wanted {
            key: file.key(chunk, block, unit),
            file: file.clone(),
            chunk,
            block,
            unit,
            offset,
            bytes: end - offset,
            partial: false,
            awaited: false,
            beside: false,
        }
    }

    fn column(&self) -> u64 {
        self.file.tail.chunks[self.chunk].column
    }

    /// Return whether the block is stored uncompressed.
    pub fn is_plain(&self) -> bool {
        self.file.tail.chunks[self.chunk].codec == Codec::None
    }

    /// Return whether the block is exactly one uncompressed sample.
    pub fn is_sample(&self) -> bool {
        let entry = &self.file.tail.chunks[self.chunk];
        self.is_plain() && entry.rows_per_block == 1 && matches!(entry.layout, Layout::Fixed | Layout::Single)
    }
}

/// A take's data files and their decoded blocks, with an error for each block that could not be read.
#[derive(Default)]
pub struct Fetched {
    /// Open files are kept here, so that each file is opened once even if the cache is small.
    pub files: Files,
    pub blocks: HashMap<BlockKey, Result<Bytes>>,
    /// Memory for samples that the cache does not keep, stored column by column in the order requested.
    pub memory: Option<Arc<Recycled>>,
    /// Memory reserved for blocks that have not arrived yet.
    pub slots: HashMap<BlockKey, Slot>,
    /// Blocks that are stored in their group's allocation. See `set_apart`.
    pub apart: HashSet<BlockKey>,
    /// Which gaps between blocks are read.
    pub gaps: Gaps,
}

fn separate_memory(bytes: usize) -> Result<Slot> {
    let memory = Recycled::mapped(bytes)
        .map_err(|error| Error::new("storage-failed", format!("cannot allocate {bytes} bytes: {error}")))?;
    Ok(memory.slot())
}

impl Fetched {
    /// Add the data files and blocks of a `HeldBlocks`.
    pub fn lend(&mut self, held: &HeldBlocks) {
        self.files.extend(held.files.iter().map(|(id, file)| (*id, file.clone())));
        self.blocks.extend(held.blocks.iter().map(|(key, block)| (*key, Ok(block.clone()))));
    }

    pub fn file(&self, id: Id) -> Option<&Arc<DataFile>> {
        self.files.get(&id)?.as_ref().ok()
    }

    pub fn get(&self, key: BlockKey) -> Result<Bytes> {
        match self.blocks.get(&key) {
            Some(block) => block.clone(),
            None => Err(Error::new(
                "internal",
                format!("block {} of data file `{}` was not fetched", key.2, data_name(key.0)),
            )),
        }
    }

    /// Return whether a block was fetched or is in the cache. A cached block is added to the fetched blocks.
    pub fn found(&mut self, key: BlockKey) -> bool {
        if self.blocks.contains_key(&key) {
            return true;
        }
        let cached = blocks::get(key);
        cached.is_some_and(|block| self.blocks.insert(key, Ok(block)).is_none())
    }

    /// Reserve memory for plain blocks in one allocation, which is freed together with the blocks.
    pub fn set_apart<'a>(&mut self, blocks: impl Iterator<Item = &'a Wanted> + Clone) -> Result<()> {
        let mut rest = separate_memory(blocks.clone().map(|block| block.bytes as usize).sum())?;
        for block in blocks {
            self.slots.insert(block.key, rest.split_to(block.bytes as usize));
            self.apart.insert(block.key);
        }
        Ok(())
    }

    /// Reserve one allocation for these samples, which are given in the order requested. Samples of the same column are
    /// contiguous, as in an array. Blocks that were already found are copied immediately. Nothing is reserved if the allocation
    /// fails.
    pub fn place(&mut self, mut samples: Vec<&Wanted>) {
        let most = samples.iter().map(|sample| sample.bytes as usize + COLUMN_ALIGN).sum();
        let Some(mut rest) = Recycled::new(most, Config::memory_bytes()).ok().filter(|_| most > 0).map(Recycled::slot)
        else {
            return;
        };
        self.memory = Some(rest.owner());
        samples.sort_by_key(|sample| sample.column());
        let (mut column, mut used) = (0, 0usize);
        for sample in samples {
            if std::mem::replace(&mut column, sample.column()) != column {
                let aligned = used.next_multiple_of(COLUMN_ALIGN);
                drop(rest.split_to(aligned - used));
                used = aligned;
            }
            let mut slot = rest.split_to(sample.bytes as usize);
            used += sample.bytes as usize;
            match self.blocks.get_mut(&sample.key) {
                Some(Ok(block)) => {
                    slot.push(block);
                    *block = slot.freeze();
                }
                _ => drop(self.slots.insert(sample.key, slot)),
            }
        }
    }
}

/// The data files of a take, by id. For a file that could not be opened, the error is kept instead.
pub type Files = HashMap<Id, Result<Arc<DataFile>>>;

/// The blocks of some samples, and the data files of those blocks. Any number of takes can reuse them through `Reader::lend`.
pub struct HeldBlocks {
    files: Files,
    blocks: Vec<(BlockKey, Bytes)>,
}

impl HeldBlocks {
    /// Hold the fetched blocks of one group. Blocks not placed by `set_apart` are copied into one allocation.
    pub fn new(fetched: &Fetched, files: Files, wanted: &[Wanted]) -> Result<HeldBlocks> {
        // A block that could not be read is left out, and the take that needs the block reports the error.
        let mut blocks: Vec<(BlockKey, Bytes)> =
            wanted.iter().filter_map(|wanted| Some((wanted.key, fetched.get(wanted.key).ok()?))).collect();
        // All blocks share one allocation, because separate long-lived allocations among short-lived ones would fragment the
        // heap.
        let placed = |(key, _): &&mut (BlockKey, Bytes)| !fetched.apart.contains(key);
        let bytes = blocks.iter_mut().filter(placed).map(|(_, block)| block.len()).sum();
        let mut memory = separate_memory(bytes)?;
        blocks.iter_mut().filter(placed).for_each(|(_, block)| memory.push(block));
        let mut whole = memory.freeze();
        blocks.iter_mut().filter(placed).for_each(|(_, block)| *block = whole.split_to(block.len()));
        Ok(HeldBlocks { files, blocks })
    }

    /// Return the total size of all held blocks in bytes.
    pub fn bytes(&self) -> u64 {
        self.blocks.iter().map(|(_, block)| block.len() as u64).sum()
    }

    /// Return each data file's id and how many bytes of memory the file uses. Several `HeldBlocks` values may share a file.
    pub fn files(&self) -> impl Iterator<Item = (Id, u64)> {
        self.files.iter().filter_map(|(id, file)| Some((*id, file.as_ref().ok()?.held_bytes())))
    }
}
