//! Blocks that a loader fetches and keeps on its own, and lends to the reads of its batches.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use penstock_error::Result;
use penstock_format::Id;
use penstock_storage::RangeRequest;

use super::fill::BlockCaching;
use super::ranges::plan_ranges;
use super::{Fetched, Files, Gaps, HeldBlocks, Wanted};
use crate::store::context::Context;
use crate::store::datafile::DataFile;

/// A block of a data file that is not mapped.
#[derive(Clone)]
pub struct BlockAt {
    file: Arc<DataFile>,
    chunk: u32,
    block: u32,
}

impl BlockAt {
    pub fn new(file: &Arc<DataFile>, chunk: usize, block: usize) -> BlockAt {
        BlockAt { file: file.clone(), chunk: chunk as u32, block: block as u32 }
    }

    /// Return the data file and the block's place in it. Blocks with the same place are the same.
    pub fn place(&self) -> (Id, u64, u32, u32) {
        (
            self.file.id,
            self.file.tail.chunks[self.chunk as usize].offset.get(self.block as usize),
            self.chunk,
            self.block,
        )
    }

    /// Return the size of the decoded block in bytes.
    pub fn bytes(&self) -> u64 {
        let entry = &self.file.tail.chunks[self.chunk as usize];
        entry.decoded_bytes().get(self.block as usize)
    }

    fn wanted(&self) -> Wanted {
        Wanted::new(&self.file, self.chunk as usize, self.block as usize, None)
    }
}

impl HeldBlocks {
    /// Hold blocks that are in memory already. Cost: no copies.
    pub fn of<'a>(blocks: impl Iterator<Item = (&'a BlockAt, Bytes)>) -> HeldBlocks {
        let (mut files, mut held) = (Files::new(), Vec::new());
        for (BlockAt { file, chunk, block }, bytes) in blocks {
            files.entry(file.id).or_insert_with(|| Ok(file.clone()));
            held.push((file.key(*chunk as usize, *block as usize, None), bytes));
        }
        HeldBlocks { files, blocks: held }
    }
}

/// Return the ranges that `fetch_blocks` would request.
pub fn ranges_of(context: &Context, blocks: &[BlockAt]) -> Vec<RangeRequest> {
    let mut wanted: Vec<Wanted> = blocks.iter().map(BlockAt::wanted).collect();
    wanted.sort_by_key(|wanted| (wanted.key.0, wanted.offset));
    plan_ranges(&wanted, context.reads(), Gaps::Few).1
}

/// Fetch, verify and decode blocks, bypassing the cache of blocks. They share memory, which is freed with the last of them. A block that is
/// damaged is None. Cost: one request per run of neighbouring blocks.
pub fn fetch_blocks(context: &Context, blocks: &[BlockAt]) -> Result<Vec<Option<Bytes>>> {
    let wanted: Vec<Wanted> = blocks.iter().map(BlockAt::wanted).collect();
    // What lies between these blocks may be fetched later.
    let mut fetched = Fetched { gaps: Gaps::Few, ..Fetched::default() };
    fetched.set_apart(wanted.iter().filter(|wanted| wanted.is_plain()))?;
    fetched.fill(context, wanted.clone(), BlockCaching::Bypass)?;
    let mut held: HashMap<_, Bytes> = HeldBlocks::new(&fetched, Files::new(), &wanted)?.blocks.into_iter().collect();
    Ok(wanted.iter().map(|wanted| held.remove(&wanted.key)).collect())
}
