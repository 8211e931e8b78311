//! Blocks that a loader fetches and keeps on its own, and lends to the reads of its batches.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use penstock_error::Result;
use penstock_format::Id;
use penstock_format::datafile::Layout;
use penstock_format::schema::ColumnSpec;
use penstock_storage::RangeRequest;

use super::fill::Cache;
use super::ranges::{Gaps, plan_ranges};
use super::stream::streams;
use super::{Fetched, Files, Held, Wanted};
use crate::read::reader::Reader;
use crate::snapshot::Snapshot;
use crate::store::datafile::DataFile;

/// A block of a data file that is not mapped.
#[derive(Clone)]
pub struct BlockAt {
    file: Arc<DataFile>,
    chunk: u32,
    block: u32,
}

impl BlockAt {
    /// Return the data file and the block's place in it. Blocks with the same place are the same.
    pub fn place(&self) -> (Id, u64, u32, u32) {
        (self.file.id, self.file.tail.chunks[self.chunk as usize].offset.get(self.block as usize), self.chunk, self.block)
    }

    /// Return the size of the decoded block in bytes.
    pub fn bytes(&self) -> u64 {
        let entry = &self.file.tail.chunks[self.chunk as usize];
        entry.raw_bytes.as_ref().unwrap_or(&entry.stored_bytes).get(self.block as usize)
    }

    fn wanted(&self) -> Wanted {
        Wanted::new(&self.file, self.chunk as usize, self.block as usize, None)
    }
}

impl Reader {
    /// Call `visit` with each block that a sample needs, and the sample's place in the plan. Whole small files, tiles and streamed samples
    /// are left out, because they cannot be lent. Cost: reads unopened tails.
    pub fn each_block(&mut self, columns: &[&ColumnSpec], mut visit: impl FnMut(u32, BlockAt)) -> Result<()> {
        self.open(columns)?;
        self.each_readable(columns, |_, source| {
            let (entry, file) = (source.entry(), &source.file);
            if file.in_memory() || entry.layout == Layout::Tiled || streams(file, entry) {
                return;
            }
            for (row, place) in source.rows.iter().filter(|(row, _)| entry.is_valid(*row)) {
                let block = entry.locate(*row).0;
                if entry.stored_bytes.get(block) > 0 {
                    visit(*place, BlockAt { file: file.clone(), chunk: source.chunk as u32, block: block as u32 });
                }
            }
        });
        Ok(())
    }
}

impl Held {
    /// Hold blocks that are in memory already. Cost: no copies.
    pub fn of<'a>(blocks: impl Iterator<Item = (&'a BlockAt, Bytes)>) -> Held {
        let (mut files, mut held) = (Files::new(), Vec::new());
        for (BlockAt { file, chunk, block }, bytes) in blocks {
            files.entry(file.id).or_insert_with(|| Ok(file.clone()));
            held.push((file.key(*chunk as usize, *block as usize, None), bytes));
        }
        Held { files, blocks: held }
    }
}

/// Return the ranges that `fetch_blocks` would request.
pub fn ranges_of(snapshot: &Snapshot, blocks: &[BlockAt]) -> Vec<RangeRequest> {
    let mut wanted: Vec<Wanted> = blocks.iter().map(BlockAt::wanted).collect();
    wanted.sort_by_key(|wanted| (wanted.key.0, wanted.offset));
    plan_ranges(&wanted, snapshot.context.storage.as_ref(), Gaps::Few).1
}

/// Fetch, verify and decode blocks, bypassing the cache of blocks. They share memory, which is freed with the last of them. A block that is
/// damaged is None. Cost: one request per run of neighbouring blocks.
pub fn fetch_blocks(snapshot: &Snapshot, blocks: &[BlockAt]) -> Result<Vec<Option<Bytes>>> {
    let wanted: Vec<Wanted> = blocks.iter().map(BlockAt::wanted).collect();
    // What lies between these blocks may be fetched later.
    let mut fetched = Fetched { gaps: Gaps::Few, ..Fetched::default() };
    fetched.set_apart(wanted.iter().filter(|wanted| wanted.is_plain()))?;
    fetched.fill(&snapshot.context, wanted.clone(), Cache::Bypass)?;
    let mut held: HashMap<_, Bytes> = Held::new(&fetched, Files::new(), &wanted)?.blocks.into_iter().collect();
    Ok(wanted.iter().map(|wanted| held.remove(&wanted.key)).collect())
}
