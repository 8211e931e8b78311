//! Read data files that are not mapped. A take first collects the blocks that all its columns need, then requests them together
//! (docs/design/0004-stores.md).

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use penstock_error::Result;
use penstock_format::Id;
use penstock_format::datafile::Layout;
use penstock_format::files::FileRef;
use penstock_format::schema::ColumnSpec;
use penstock_storage::RangeRequest;

use super::blocks::fill::BlockCaching;
use super::blocks::lent::BlockAt;
use super::blocks::ranges::plan_ranges;
use super::blocks::share::{share_out, span_bytes, with_neighbours};
use super::blocks::stream::streams;
use super::blocks::{Gaps, HeldBlocks, Wanted};
use super::reader::{ColumnRows, OnCorrupt, Reader};
use crate::parallel;
use crate::snapshot::Snapshot;
use crate::store::blocks::{self, budget_bytes, get_or_duty};
use crate::store::context::file_cache_bytes;
use crate::store::datafile::DataFile;

/// The purpose of a read, which determines how blocks are shared and cached. Groups of a scan may be read concurrently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Take,
    /// A batch of an epoch. Other batches need the neighbouring blocks, so those are also read if they all fit into the cache.
    Epoch,
    /// A pass over all samples, or over a run in a window order. `keep` determines whether the cache may keep the blocks.
    Scan {
        keep: bool,
    },
}

impl Reader {
    /// Fetch the blocks that a take of these columns needs. For mapped files, only the tails are read. Otherwise, the cost is at
    /// most one request per unopened tail and one per run of uncached blocks.
    pub fn fetch(&mut self, columns: &[&ColumnSpec], purpose: Purpose) -> Result<()> {
        if !self.any_ranged(columns) {
            return self.open_mapped(columns);
        }
        self.open(columns)?;
        let blocks = self.blocks(columns);
        let context = self.snapshot.context.clone();
        let storage = context.reads();
        let mut fetched = std::mem::take(&mut self.fetched);
        let mut wanted: Vec<Wanted> = blocks.iter().filter(|block| !fetched.found(block.key)).cloned().collect();
        let (mut duties, mut others) = (Vec::new(), Vec::new());
        let around = purpose == Purpose::Epoch && span_bytes(&wanted) <= budget_bytes() / 2;
        if around {
            wanted = with_neighbours(wanted, storage.features().request_cost.gap_bytes);
        }
        if around || matches!(purpose, Purpose::Scan { .. }) {
            (wanted, others) = share_out(wanted, around, &mut duties, &mut fetched);
        }
        let cache = match purpose {
            Purpose::Scan { keep: false } => BlockCaching::Bypass,
            _ => BlockCaching::of(wanted.iter().map(|wanted| wanted.bytes).sum()),
        };
        if cache == BlockCaching::Bypass
            && fetched.slots.is_empty()
            && storage.features().fills_slots
            && self.plan.positions.is_sorted_by(|one, next| one < next)
        {
            fetched.place(blocks.iter().filter(|block| block.is_sample()).collect());
        }
        fetched.fill(&context, wanted, cache)?;
        for (wanted, duty) in duties {
            if let Some(Ok(block)) = fetched.blocks.get(&wanted.key) {
                // A block that the cache does not keep may share its memory with other blocks, so waiting callers get a copy.
                let _ = duty.insert(if cache == BlockCaching::Keep {
                    block.clone()
                } else {
                    Bytes::copy_from_slice(block)
                });
            }
            if wanted.beside {
                fetched.blocks.remove(&wanted.key);
            }
        }
        let missing = others.into_iter().filter(|wanted| match get_or_duty(wanted.key, storage.features().deadline) {
            Some(Ok(block)) => fetched.blocks.insert(wanted.key, Ok(block)).is_some(),
            _ => true, // The thread that was reading the block failed or is too slow.
        });
        let missing = missing.collect();
        fetched.fill(&context, missing, BlockCaching::Bypass)?;
        self.fetched = fetched;
        Ok(())
    }

    /// Return the ranges that `fetch` would now request for a take if no blocks were lent. This opens the tails first.
    pub fn ranges(&mut self, columns: &[&ColumnSpec]) -> Result<Vec<RangeRequest>> {
        self.open(columns)?;
        let mut wanted = self.blocks(columns);
        wanted.retain(|block| blocks::get(block.key).is_none());
        wanted.sort_by_key(|wanted| (wanted.key.0, wanted.offset));
        Ok(plan_ranges(&wanted, self.snapshot.context.reads(), Gaps::All).1)
    }

    /// Return the decoded size in bytes of the blocks that a plan reads, not counting tiles. Cost: reads unopened tails.
    pub fn decoded_bytes(&mut self, columns: &[&ColumnSpec]) -> Result<u64> {
        self.open(columns)?;
        let mut bytes = 0;
        self.each_readable(columns, |column, source| {
            let entry = source.entry();
            // Values of an earlier dtype are converted.
            let size = column.kind.stored().map_or(1, |(dtype, _)| dtype.size() as u64);
            if entry.layout != Layout::Tiled {
                let mut blocks = blocks_of(source, &[]);
                // A fill value is one block, but each of its rows is copied.
                if source.file.tail.samples > 1 {
                    blocks.dedup();
                }
                bytes += blocks.into_iter().map(|block| entry.decoded_bytes().get(block)).sum::<u64>()
                    / entry.dtype.size() as u64
                    * size;
            }
        });
        Ok(bytes)
    }

    /// Run `visit` for the rows of every file that can be opened. Reading a column reports the errors of the others.
    pub(super) fn each_readable(&self, columns: &[&ColumnSpec], mut visit: impl FnMut(&ColumnSpec, &ColumnRows<'_>)) {
        for group in &self.plan.groups {
            for column in columns {
                for located in self.located(group, column).into_iter().flatten() {
                    if let Ok(Some(source)) = self.rows_of(&located, column) {
                        visit(column, &source);
                    }
                }
            }
        }
    }

    /// Return the data files that store these columns of a plan's samples, each with its number of samples. A file may be repeated.
    /// If the row ids of an overlay cannot be read, reading the column reports the error.
    pub(super) fn files<'a>(&'a self, columns: &[&'a ColumnSpec]) -> Vec<(&'a FileRef, u64)> {
        let elsewhere = |column: &&ColumnSpec| self.snapshot.overlays.changes(column.id) || column.fill.is_some();
        let (changed, plain): (Vec<&ColumnSpec>, Vec<&ColumnSpec>) = columns.iter().copied().partition(elsewhere);
        let mut files = Vec::with_capacity(self.plan.groups.len());
        for group in &self.plan.groups {
            let fragment = group.fragment();
            let of_plain = fragment
                .files
                .iter()
                .filter(|file| file.columns.iter().any(|column| plain.iter().any(|spec| spec.id == *column)));
            files.extend(of_plain.map(|file| (file, fragment.samples)));
            let located = changed.iter().flat_map(|column| self.located(group, column).into_iter().flatten());
            files.extend(located.filter_map(|located| Some((located.file?, located.samples))));
        }
        files
    }

    /// Return whether any of the data files is not mapped.
    fn any_ranged(&self, columns: &[&ColumnSpec]) -> bool {
        !self.snapshot.is_mapped()
            && self.snapshot.context.any_ranged(self.files(columns).into_iter().map(|(file, _)| file))
    }

    /// Open the data files of a plan concurrently and keep them in the reader, unless all of them are mapped. A damaged file is skipped,
    /// because reading its columns reports the error.
    pub fn open(&mut self, columns: &[&ColumnSpec]) -> Result<()> {
        if !self.any_ranged(columns) {
            return Ok(());
        }
        let closed: Vec<_> =
            self.files(columns).into_iter().filter(|(file, _)| self.fetched.file(file.id).is_none()).collect();
        let opened = self.snapshot.context.open_tails(closed.iter().copied())?;
        let mut files: HashMap<Id, Result<Arc<DataFile>>> =
            opened.into_iter().map(|file| (file.id, Ok(file))).collect();
        for (file, samples) in closed {
            // The network may have damaged the tail, so try again. Keep any error: if the file were opened later, its blocks would
            // not have been fetched.
            files.entry(file.id).or_insert_with(|| self.snapshot.context.file(file, samples));
        }
        self.fetched.files.extend(files);
        Ok(())
    }

    /// Open mapped data files on all threads if there are several with large tails. A file that cannot be opened is skipped,
    /// because reading its columns reports the error.
    fn open_mapped(&self, columns: &[&ColumnSpec]) -> Result<()> {
        if self.plan.groups.len() < 2 {
            return Ok(());
        }
        let context = &self.snapshot.context;
        // Overlays are opened when they are read, because finding them takes as long as reading.
        let mut closed: Vec<(&FileRef, u64)> = Vec::new();
        let ids: Vec<u64> = columns.iter().map(|column| column.id).collect();
        for fragment in self.plan.groups.iter().map(|group| group.fragment()) {
            let files = fragment.files.iter().filter(|file| file.columns.iter().any(|column| ids.contains(column)));
            closed.extend(files.filter(|file| !context.is_open(file.id)).map(|file| (file, fragment.samples)));
        }
        let tails = closed.iter().map(|(file, _)| file.tail_bytes).fold(0, u64::saturating_add);
        // For a few bytes, one thread is just as fast. If the files did not fit into the cache, they would be opened twice.
        if closed.len() > 1 && (2 * parallel::WORTH_A_THREAD_BYTES as u64..file_cache_bytes() / 2).contains(&tails) {
            parallel::map(closed.len(), tails as usize, |index| drop(context.file(closed[index].0, closed[index].1)))?;
        }
        Ok(())
    }

    /// Call `visit` with each stored block that a sample needs: the sample's place in the plan, the data file and its length, and the
    /// block's first and last byte. Whole small files, and large samples of columns that are read `in_parts`, are left out. Cost: reads
    /// unopened tails.
    pub fn each_need(
        &mut self,
        columns: &[&ColumnSpec],
        in_parts: impl Fn(&ColumnSpec) -> bool,
        mut visit: impl FnMut(u32, Id, u64, u64, u64),
    ) -> Result<()> {
        self.open(columns)?;
        self.each_readable(columns, |column, source| {
            let (entry, file, in_parts) = (source.entry(), &source.file, in_parts(column));
            if file.in_memory() {
                return;
            }
            for (row, place) in
                source.rows.iter().filter(|(row, _)| entry.is_valid(*row) && !(in_parts && entry.is_divisible(*row)))
            {
                for block in entry.blocks_of(*row) {
                    let begin = entry.offset.get(block);
                    visit(*place, file.id, file.file_bytes, begin, begin + entry.stored_bytes.get(block));
                }
            }
        });
        Ok(())
    }

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
                    visit(*place, BlockAt::new(file, source.chunk, block));
                }
            }
        });
        Ok(())
    }

    /// Return the data files that a plan reads from memory, with their lengths. Cost: reads unopened tails.
    pub fn files_in_memory(&mut self, columns: &[&ColumnSpec]) -> Result<HashMap<Id, u64>> {
        self.open(columns)?;
        let mut files = HashMap::new();
        self.each_readable(columns, |_, source| {
            if source.file.in_memory() {
                files.insert(source.file.id, source.file.file_bytes);
            }
        });
        Ok(files)
    }

    /// Return the blocks that a plan reads, by fragment and column. Tiles, streamed samples and those that `slices` reads are left out,
    /// because other functions read them.
    pub(super) fn blocks(&self, columns: &[&ColumnSpec]) -> Vec<Wanted> {
        let mut wanted = Vec::new();
        self.each_readable(columns, |column, source| {
            let (entry, chunk) = (source.entry(), source.chunk);
            if source.file.in_memory() || entry.layout == Layout::Tiled || streams(&source.file, entry) {
                return;
            }
            for rows in blocks_of(source, self.left_out_of(column)).chunk_by(|one, other| one == other) {
                let partial = (rows.len() as u64) < entry.rows_of(rows[0]);
                wanted.push(Wanted { partial, ..Wanted::new(&source.file, chunk, rows[0], None) });
            }
        });
        wanted
    }
}

/// Return the block of each row that is neither null nor left out, in ascending order.
fn blocks_of(source: &ColumnRows<'_>, left_out: &[bool]) -> Vec<usize> {
    let entry = source.entry();
    let is_left_out = |place: u32| left_out.get(place as usize).is_some_and(|flag| *flag);
    let valid = source.rows.iter().filter(|(row, place)| entry.is_valid(*row) && !is_left_out(*place));
    let mut blocks: Vec<usize> = valid.map(|(row, _)| entry.locate(*row).0).collect();
    blocks.sort_unstable();
    blocks
}

/// Fetch the blocks of several groups of neighbouring samples together, without caching the blocks. Returns one `HeldBlocks` per group.
pub fn hold(snapshot: &Arc<Snapshot>, groups: Vec<Vec<u64>>, columns: &[&ColumnSpec]) -> Result<Vec<HeldBlocks>> {
    let mut all = Reader::new(snapshot.clone(), groups.concat(), OnCorrupt::Raise)?;
    all.open(columns)?;
    let mut parts = Vec::with_capacity(groups.len());
    for positions in groups {
        let mut part = Reader::new(snapshot.clone(), positions, OnCorrupt::Raise)?;
        let files = part.files(columns).into_iter();
        let files = files.filter_map(|(file, _)| Some((file.id, all.fetched.files.get(&file.id)?.clone()))).collect();
        part.fetched.files = files;
        let own = part.blocks(columns);
        if snapshot.context.reads().features().fills_slots {
            all.fetched.set_apart(own.iter().filter(|block| block.is_plain()))?;
        }
        parts.push((part.fetched.files, own));
    }
    all.fetch(columns, Purpose::Scan { keep: false })?;
    parts.into_iter().map(|(files, blocks)| HeldBlocks::new(&all.fetched, files, &blocks)).collect()
}
