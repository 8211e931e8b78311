//! Let the concurrent reads of a scan or an epoch share blocks, so that each block is read only once. A loader that knows its order fetches and
//! keeps blocks on its own, and lends them to the reads of its batches.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use penstock_error::Result;
use penstock_format::Id;
use penstock_format::datafile::Layout;
use penstock_format::schema::ColumnSpec;

use super::blocks::{Fetched, Held, Wanted, separate_memory};
use super::fill::Cache;
use super::ranges::plan_ranges;
use super::reader::Reader;
use super::stream::streams;
use crate::snapshot::Snapshot;
use crate::store::blocks::{Duty, get_or_duty};
use crate::store::datafile::DataFile;

/// Divide blocks among concurrent groups of a scan, or batches of an epoch, so that each shared block is read once. If `all` is
/// set, every block is shared. Otherwise, only partially needed blocks are shared. Returns the blocks to read here and the blocks
/// that other threads are reading.
pub(super) fn share_out(
    wanted: Vec<Wanted>,
    all: bool,
    duties: &mut Vec<(Wanted, Duty)>,
    fetched: &mut Fetched,
) -> (Vec<Wanted>, Vec<Wanted>) {
    let (mut ours, mut others) = (Vec::new(), Vec::new());
    for block in wanted {
        if !all && !block.partial {
            ours.push(block);
            continue;
        }
        match get_or_duty(block.key, Duration::ZERO) {
            Some(Ok(_)) | None if block.beside => {}
            Some(Ok(bytes)) => drop(fetched.blocks.insert(block.key, Ok(bytes))),
            Some(Err(duty)) => {
                let block = Wanted { awaited: true, ..block };
                duties.push((block.clone(), duty));
                ours.push(block);
            }
            None => others.push(block),
        }
    }
    (ours, others)
}

/// Return these blocks and their neighbours in the same stretch of the file. A stretch has `stretch` bytes, which take about as
/// long to read as a request.
pub(super) fn with_neighbours(mut wanted: Vec<Wanted>, stretch: u64) -> Vec<Wanted> {
    wanted.sort_by_key(|wanted| (wanted.key.0, wanted.chunk, wanted.block));
    let mut all: Vec<Wanted> = Vec::with_capacity(wanted.len());
    for (index, block) in wanted.iter().enumerate() {
        let entry = &block.file.tail.chunks[block.chunk];
        let in_stretch = |other: usize| entry.offset.get(other) / stretch == block.offset / stretch && entry.stored_bytes.get(other) > 0;
        let same = |other: &&Wanted| other.key.0 == block.key.0 && other.chunk == block.chunk;
        let first = all.last().filter(same).map_or(0, |last| last.block + 1);
        let end = wanted.get(index + 1).filter(same).map_or(entry.blocks(), |next| next.block);
        let beside = |other: usize| Wanted { beside: true, ..Wanted::new(&block.file, block.chunk, other, None) };
        let before = (first..block.block).rev().take_while(|other| in_stretch(*other)).count();
        all.extend((block.block - before..block.block).map(beside));
        all.push(block.clone());
        all.extend((block.block + 1..end).take_while(|other| in_stretch(*other)).map(beside));
    }
    all
}

/// Return the number of bytes from the first to the last block, summed over the chunks of these blocks.
pub(super) fn span_bytes(wanted: &[Wanted]) -> u64 {
    let mut seen = HashSet::new();
    let chunks = wanted.iter().filter(|wanted| seen.insert((wanted.key.0, wanted.chunk)));
    chunks.map(|wanted| wanted.file.tail.chunks[wanted.chunk].span_bytes()).sum()
}

/// Blocks from this size on get memory of their own, which is returned when they are dropped. Smaller ones come from the allocator.
const OWN_BYTES: u64 = 64 << 10;

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
        let (mut files, mut held) = (HashMap::new(), Vec::new());
        for (BlockAt { file, chunk, block }, bytes) in blocks {
            files.entry(file.id).or_insert_with(|| Ok(file.clone()));
            held.push((file.key(*chunk as usize, *block as usize, None), bytes));
        }
        Held::with(files, held)
    }
}

/// Return how many requests `fetch_blocks` would send.
pub fn count_requests(snapshot: &Snapshot, blocks: &[BlockAt], together: bool) -> usize {
    let mut wanted: Vec<Wanted> = blocks.iter().map(BlockAt::wanted).collect();
    wanted.sort_by_key(|wanted| (wanted.key.0, wanted.offset));
    plan_ranges(&wanted, snapshot.context.storage.as_ref(), together).1.len()
}

/// Fetch, verify and decode blocks, bypassing the cache of blocks. Blocks that are kept together share memory, which is freed with the last
/// of them. A block that cannot be read is None: a read of its samples reports why. Cost: one request per run of neighbouring blocks.
pub fn fetch_blocks(snapshot: &Snapshot, blocks: &[BlockAt], together: bool) -> Vec<Option<Bytes>> {
    let wanted: Vec<Wanted> = blocks.iter().map(BlockAt::wanted).collect();
    // What lies between blocks that are kept one by one may be fetched later.
    let mut fetched = Fetched { skips_gaps: !together, ..Fetched::default() };
    let placed = place(&mut fetched, &wanted, together);
    let filled = placed.and_then(|()| fetched.fill(&snapshot.context, wanted.clone(), Cache::Bypass));
    let take = |wanted: &Wanted| {
        let block = fetched.blocks.remove(&wanted.key)?.ok()?;
        // Without memory of its own, a plain block may be a part of a network buffer.
        let is_part = !together && wanted.is_plain() && wanted.bytes < OWN_BYTES;
        Some(if is_part { Bytes::copy_from_slice(&block) } else { block })
    };
    // Blocks that arrived before another one failed are good.
    drop(filled);
    wanted.iter().map(take).collect()
}

/// Reserve memory for plain blocks, into which the store writes.
fn place(fetched: &mut Fetched, wanted: &[Wanted], together: bool) -> Result<()> {
    let plain = || wanted.iter().filter(|wanted| wanted.is_plain());
    if together {
        let mut rest = separate_memory(plain().map(|wanted| wanted.bytes as usize).sum())?;
        for block in plain() {
            fetched.slots.insert(block.key, rest.split_to(block.bytes as usize));
        }
        return Ok(());
    }
    for block in plain().filter(|block| block.bytes >= OWN_BYTES) {
        fetched.slots.insert(block.key, separate_memory(block.bytes as usize)?);
    }
    Ok(())
}
