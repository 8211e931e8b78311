//! Read data files that are not mapped. A take first collects the blocks that all its columns need, then requests them together
//! (docs/design/0004-stores.md).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use penstock_error::{Error, Kind, Result};
use penstock_format::Id;
use penstock_format::datafile::{Chunk, Codec, FOOTER_BYTES, Layout, UNIT_BYTES};
use penstock_format::ids::data_name;
use penstock_format::manifest::FileRef;
use penstock_format::schema::ColumnSpec;
use penstock_storage::{Frozen, Piece, RangeRequest, Recycled, RequestCost, Slot, Storage};

use crate::config::Config;
use crate::context::{BlockKey, Context, Duty};
use crate::datafile::DataFile;
use crate::parallel;
use crate::plan::Plan;
use crate::snapshot::Snapshot;

/// Streamed ranges of a local device include gaps up to this length.
const STREAM_GAP_BYTES: u64 = 16 << 10;
/// Blocks are joined into ranges of at most this length.
const JOINED_BYTES: u64 = 8 << 20;
/// Data files up to this size are read whole, together with their tail.
const WHOLE_FILE_BYTES: u64 = 256 << 10;

/// The purpose of a read, which decides how blocks are shared and cached. Groups of a scan may be read concurrently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Purpose {
    Take,
    /// A batch of an epoch. Other batches need the neighbouring blocks, so these are read too if the cache can hold them all.
    Epoch,
    /// A pass over all samples. `keep` is whether the cache keeps the blocks.
    Scan {
        keep: bool,
    },
}

/// Columns in one memory are aligned to this, which is enough for any element.
const COLUMN_ALIGN: usize = 64;

/// The data files of a take, and their decoded blocks, with an error for each block that could not be read.
#[derive(Default)]
pub struct Fetched {
    /// Kept here, so that each file is opened once even if the cache is small.
    files: HashMap<Id, Arc<DataFile>>,
    blocks: HashMap<BlockKey, Result<Bytes>>,
    /// Memory for samples that the cache does not keep: column by column, in the order requested.
    pub memory: Option<Arc<Recycled>>,
    /// Places for blocks that have not arrived yet.
    slots: HashMap<BlockKey, Slot>,
    /// Blocks with places in the memory of their group; see `set_apart`.
    apart: HashSet<BlockKey>,
}

fn memory_of_its_own(bytes: usize) -> Result<Slot> {
    let memory =
        Recycled::mapped(bytes).map_err(|error| Error::new("storage-failed", format!("cannot allocate {bytes} bytes: {error}")))?;
    Ok(memory.slot())
}

/// The blocks of some samples, and their data files. `Fetched::lend` reuses them in any number of takes.
pub struct Held {
    files: HashMap<Id, Arc<DataFile>>,
    blocks: Vec<(BlockKey, Bytes)>,
}

impl Held {
    /// Hold the fetched blocks of one group. Blocks that are not set apart are copied into one memory.
    fn new(fetched: &Fetched, files: HashMap<Id, Arc<DataFile>>, wanted: &[Wanted]) -> Result<Held> {
        // A block that could not be read is left out: the take that needs it reports the error.
        let mut blocks: Vec<(BlockKey, Bytes)> =
            wanted.iter().filter_map(|wanted| Some((wanted.key, fetched.get(wanted.key).ok()?))).collect();
        // One memory for all blocks: separate long-lived allocations among short-lived ones would fragment the allocator's heap.
        let placed = |(key, _): &&mut (BlockKey, Bytes)| !fetched.apart.contains(key);
        let bytes = blocks.iter_mut().filter(placed).map(|(_, block)| block.len()).sum();
        let mut memory = memory_of_its_own(bytes)?;
        blocks.iter_mut().filter(placed).for_each(|(_, block)| memory.push(block));
        let mut whole = memory.freeze();
        blocks.iter_mut().filter(placed).for_each(|(_, block)| *block = whole.split_to(block.len()));
        Ok(Held { files, blocks })
    }

    /// Return the bytes of all held blocks.
    pub fn bytes(&self) -> u64 {
        self.blocks.iter().map(|(_, block)| block.len() as u64).sum()
    }

    /// Return the id and held bytes of each data file. Other holders may share a file.
    pub fn files(&self) -> impl Iterator<Item = (Id, u64)> {
        self.files.iter().map(|(id, file)| (*id, file.held_bytes(false)))
    }
}

impl Fetched {
    /// Add the data files and blocks of a `Held`.
    pub fn lend(&mut self, held: &Held) {
        self.files.extend(held.files.iter().map(|(id, file)| (*id, file.clone())));
        self.blocks.extend(held.blocks.iter().map(|(key, block)| (*key, Ok(block.clone()))));
    }

    pub fn file(&self, id: Id) -> Option<&Arc<DataFile>> {
        self.files.get(&id)
    }

    pub fn get(&self, key: BlockKey) -> Result<Bytes> {
        match self.blocks.get(&key) {
            Some(block) => block.clone(),
            None => Err(Error::new("internal", format!("block {} of data file `{}` was not fetched", key.2, data_name(key.0)))),
        }
    }

    /// Return whether a block is here or in the cache. A block from the cache is added here.
    fn found(&mut self, context: &Context, key: BlockKey) -> bool {
        if self.blocks.contains_key(&key) {
            return true;
        }
        let cached = context.cached_block(key);
        cached.is_some_and(|block| self.blocks.insert(key, Ok(block)).is_none())
    }

    /// Reserve places for plain blocks in one memory, which is freed together with them.
    fn set_apart<'a>(&mut self, blocks: impl Iterator<Item = &'a Wanted> + Clone) -> Result<()> {
        let mut rest = memory_of_its_own(blocks.clone().map(|block| block.bytes as usize).sum())?;
        for block in blocks {
            self.slots.insert(block.key, rest.split_to(block.bytes as usize));
            self.apart.insert(block.key);
        }
        Ok(())
    }

    /// Reserve places in one memory for samples, given in the order requested. Samples of one column are contiguous there, as in an
    /// array. Blocks that are already here are copied at once. No places are reserved if the allocation fails.
    fn place(&mut self, mut samples: Vec<&Wanted>) {
        let most = samples.iter().map(|sample| sample.bytes as usize + COLUMN_ALIGN).sum();
        let Some(mut rest) = Recycled::new(most, Config::memory_bytes()).ok().filter(|_| most > 0).map(Recycled::slot) else { return };
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

/// A block to be read, or a checksum unit of an uncompressed block.
#[derive(Clone)]
pub struct Wanted {
    pub key: BlockKey,
    pub file: Arc<DataFile>,
    pub chunk: usize,
    pub block: usize,
    pub unit: Option<usize>,
    offset: u64,
    bytes: u64,
    /// Only some of its rows are requested.
    partial: bool,
    /// This call has the duty to read it: other threads may be waiting, and fulfilling the duty puts it into the cache.
    awaited: bool,
    /// It was not requested, but is a neighbour of a requested block.
    beside: bool,
}

/// Checksum units of uncompressed blocks, contiguous in their file, as pairs (block, unit).
pub struct Run {
    pub file: Arc<DataFile>,
    pub chunk: usize,
    pub units: Vec<(usize, usize)>,
}

impl Run {
    /// Return the begin and end of the run in the file.
    pub fn bounds(&self) -> (u64, u64) {
        let bound = |at: Option<&(usize, usize)>| at.map_or((0, 0), |(block, unit)| self.file.unit(self.chunk, *block, *unit));
        (bound(self.units.first()).0, bound(self.units.last()).1)
    }

    fn verify(&self, bytes: &[u8]) -> Result<()> {
        let (mut rest, chunk) = (bytes, self.chunk);
        self.units.iter().try_for_each(|(block, unit)| {
            let (begin, end) = self.file.unit(chunk, *block, *unit);
            let (now, later) = rest.split_at((end - begin) as usize);
            rest = later;
            self.file.verify_stored(chunk, *block, Some(*unit), now)
        })
    }
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
    fn is_plain(&self) -> bool {
        self.file.tail.chunks[self.chunk].codec == Codec::None
    }

    /// Return whether the block is exactly one uncompressed sample.
    fn is_sample(&self) -> bool {
        let entry = &self.file.tail.chunks[self.chunk];
        self.is_plain() && entry.rows_per_block == 1 && matches!(entry.layout, Layout::Fixed | Layout::Single)
    }
}

impl Snapshot {
    /// Fetch the blocks that a take of these columns needs. Cost: if files are mapped, reads of their tails only; else at most one
    /// request per tail that is not open, and one per run of blocks that are not in the cache.
    pub fn fetch(&self, plan: &mut Plan, columns: &[&ColumnSpec], purpose: Purpose) -> Result<()> {
        if self.context.storage.mapped() {
            return self.open_mapped(plan, columns);
        }
        self.open_files(plan, columns)?;
        let blocks = self.blocks(plan, columns);
        let mut fetched = std::mem::take(&mut plan.fetched);
        let mut wanted: Vec<Wanted> = blocks.iter().filter(|block| !fetched.found(&self.context, block.key)).cloned().collect();
        let (mut duties, mut others) = (Vec::new(), Vec::new());
        let around = purpose == Purpose::Epoch && span_bytes(&wanted) <= Context::block_cache_bytes() / 2;
        if around {
            wanted = self.with_neighbours(wanted);
        }
        if around || matches!(purpose, Purpose::Scan { .. }) {
            (wanted, others) = self.share_out(wanted, around, &mut duties, &mut fetched);
        }
        // The cache does not keep a take that would fill more than half of it.
        let keep = !matches!(purpose, Purpose::Scan { keep: false });
        let cached = keep && wanted.iter().map(|wanted| wanted.bytes).sum::<u64>() <= Context::block_cache_bytes() / 2;
        if !cached && fetched.slots.is_empty() && self.context.storage.fills_slots() && plan.positions.is_sorted_by(|one, next| one < next)
        {
            fetched.place(blocks.iter().filter(|block| block.is_sample()).collect());
        }
        self.fetch_wanted(wanted, cached, &mut fetched)?;
        for (wanted, duty) in duties {
            if let Some(Ok(block)) = fetched.blocks.get(&wanted.key) {
                // A block that the cache does not keep may share its memory with others, so waiting callers get a copy.
                let _ = duty.insert(if cached { block.clone() } else { Bytes::copy_from_slice(block) });
            }
            if wanted.beside {
                fetched.blocks.remove(&wanted.key);
            }
        }
        let missing = others.into_iter().filter(|wanted| match self.context.block_or_duty(wanted.key, self.context.storage.deadline()) {
            Some(Ok(block)) => fetched.blocks.insert(wanted.key, Ok(block)).is_some(),
            _ => true, // The thread that had the duty failed or is too slow.
        });
        let missing = missing.collect();
        self.fetch_wanted(missing, false, &mut fetched)?;
        plan.fetched = fetched;
        Ok(())
    }

    /// Fetch the blocks of several groups of neighbours together, without caching them. Returns one `Held` per group.
    pub fn hold(&self, groups: Vec<Vec<u64>>, columns: &[&ColumnSpec]) -> Result<Vec<Held>> {
        let mut plan = Plan::new(self, groups.concat())?;
        self.open_files(&mut plan, columns)?;
        let mut parts = Vec::with_capacity(groups.len());
        for positions in groups {
            let mut part = Plan::new(self, positions)?;
            let files = files_of(&part, columns).filter_map(|(file, _)| Some((file.id, plan.fetched.file(file.id)?.clone()))).collect();
            part.fetched.files = files;
            let own = self.blocks(&part, columns);
            if self.context.storage.fills_slots() {
                plan.fetched.set_apart(own.iter().filter(|block| block.is_plain()))?;
            }
            parts.push((part.fetched.files, own));
        }
        self.fetch(&mut plan, columns, Purpose::Scan { keep: false })?;
        parts.into_iter().map(|(files, blocks)| Held::new(&plan.fetched, files, &blocks)).collect()
    }

    /// Divide blocks among concurrent groups of a scan, or batches of an epoch, so that each shared block is read once. `all` shares
    /// every block, else only those of which this group needs a part. Returns the blocks to read here, and those that others read.
    fn share_out(
        &self,
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
            match self.context.block_or_duty(block.key, Duration::ZERO) {
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

    /// Return these blocks and their neighbours in the same stretch of the file. Reading a stretch costs about as much as a request.
    fn with_neighbours(&self, mut wanted: Vec<Wanted>) -> Vec<Wanted> {
        let stretch = self.context.storage.request_cost().gap_bytes;
        wanted.sort_by_key(|wanted| (wanted.key.0, wanted.chunk, wanted.block));
        let mut all: Vec<Wanted> = Vec::with_capacity(wanted.len());
        for (index, block) in wanted.iter().enumerate() {
            let entry = &block.file.tail.chunks[block.chunk];
            let in_stretch =
                |other: usize| entry.offset.get(other) / stretch == block.offset / stretch && entry.stored_bytes.get(other) > 0;
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

    /// Fetch, verify and decode blocks. A damaged block leaves its error in `fetched`, where its reader finds it.
    fn fetch_wanted(&self, mut wanted: Vec<Wanted>, cached: bool, fetched: &mut Fetched) -> Result<()> {
        wanted.sort_by_key(|wanted| (wanted.key.0, wanted.offset));
        let wanted = Arc::new(wanted);
        let failed = self.fetch_blocks(&wanted, cached, fetched)?;
        // The network may have damaged a byte, so blocks that fail are requested again, once.
        let again = wanted.iter().filter(|wanted| failed.contains(&wanted.key) && !wanted.beside).cloned().collect();
        self.fetch_blocks(&Arc::new(again), cached, fetched)?;
        Ok(())
    }

    /// Fetch, verify and decode the units or blocks of tiles that are not in the cache.
    pub fn fetch_tiles(&self, wanted: impl Iterator<Item = Wanted>, cached: bool) -> Result<Fetched> {
        let mut fetched = Fetched::default();
        let mut seen = HashSet::new();
        let missing = wanted.filter(|wanted| seen.insert(wanted.key) && !fetched.found(&self.context, wanted.key)).collect();
        self.fetch_wanted(missing, cached, &mut fetched)?;
        Ok(fetched)
    }

    /// Return the ranges that `fetch` would request now, after the tails are open.
    pub fn ranges(&self, plan: &mut Plan, columns: &[&ColumnSpec]) -> Result<Vec<RangeRequest>> {
        self.open_files(plan, columns)?;
        let mut wanted = self.blocks(plan, columns);
        wanted.retain(|block| self.context.cached_block(block.key).is_none());
        wanted.sort_by_key(|wanted| (wanted.key.0, wanted.offset));
        Ok(plan_ranges(&wanted, self.context.storage.as_ref()).1)
    }

    /// Return the decoded bytes of the blocks that a plan reads, except tiles. Cost: reads the tails that are not open.
    pub fn decoded_bytes(&self, plan: &mut Plan, columns: &[&ColumnSpec]) -> Result<u64> {
        self.open_files(plan, columns)?;
        let mut bytes = 0;
        for group in &plan.groups {
            for column in columns {
                let Ok(Some(source)) = self.source(plan, group, column) else { continue }; // Reading it reports the error.
                let entry = source.entry();
                if entry.layout == Layout::Tiled {
                    continue;
                }
                let mut blocks: Vec<usize> =
                    source.rows.iter().filter(|(row, _)| entry.is_valid(*row)).map(|(row, _)| entry.locate(*row).0).collect();
                blocks.sort_unstable();
                blocks.dedup();
                bytes += blocks.into_iter().map(|block| entry.raw_bytes.as_ref().unwrap_or(&entry.stored_bytes).get(block)).sum::<u64>();
            }
        }
        Ok(bytes)
    }

    /// Open the data files of a plan concurrently, and keep them in the plan, unless files are mapped. A damaged file is skipped: the
    /// column that reads it reports the error.
    pub fn open_files(&self, plan: &mut Plan, columns: &[&ColumnSpec]) -> Result<()> {
        if self.context.storage.mapped() {
            return Ok(());
        }
        let opened = self.open_tails(files_of(plan, columns).filter(|(file, _)| plan.fetched.file(file.id).is_none()))?;
        plan.fetched.files.extend(opened.into_iter().map(|file| (file.id, file)));
        Ok(())
    }

    /// Open mapped data files on all threads if there are several with large tails. A file that cannot be opened is skipped: the column
    /// that reads it reports the error.
    fn open_mapped(&self, plan: &Plan, columns: &[&ColumnSpec]) -> Result<()> {
        if plan.groups.len() < 2 {
            return Ok(());
        }
        let closed: Vec<(&FileRef, u64)> = files_of(plan, columns).filter(|(file, _)| !self.context.is_open(file.id)).collect();
        let tails = closed.iter().map(|(file, _)| file.tail_bytes).fold(0, u64::saturating_add);
        // For few bytes one thread is as fast. Files that the cache cannot hold would be opened twice.
        if closed.len() > 1 && (2 * parallel::WORTH_A_THREAD_BYTES as u64..Context::file_cache_bytes() / 2).contains(&tails) {
            parallel::map(closed.len(), tails as usize, |index| drop(self.context.file(closed[index].0, closed[index].1)))?;
        }
        Ok(())
    }

    /// Open data files, each given with its number of samples. Damaged files are left out. Cost: one request per file, all concurrent,
    /// except for files in the cache and files that another thread is reading.
    pub fn open_tails<'a>(&self, files: impl Iterator<Item = (&'a FileRef, u64)>) -> Result<Vec<Arc<DataFile>>> {
        let (mut seen, mut opened) = (HashSet::new(), Vec::new());
        let (mut ours, mut others) = (Vec::new(), Vec::new());
        for (file, samples) in files.filter(|(file, _)| seen.insert(file.id)) {
            match self.context.file_or_duty(file.id, Duration::ZERO) {
                Some(Ok(known)) if known.is(file, samples) => opened.push(known),
                Some(Ok(_)) => {} // The cached file does not match this reference. Reading the column reports it.
                Some(Err(duty)) => ours.push((file, samples, duty)),
                None => others.push((file, samples)),
            }
        }
        let passable = |error: Error| if error.kind() == Kind::Corrupt { Ok(()) } else { Err(error) };
        // Small files are read whole, unless their total exceeds the file cache.
        let whole = ours.iter().map(|(file, ..)| whole_bytes(file)).sum::<u64>() <= Context::file_cache_bytes();
        let ranges = ours.iter().map(|(file, ..)| if whole { tail_range(file) } else { bare_tail(file) }).collect();
        for ((file, samples, duty), answer) in ours.into_iter().zip(self.context.storage.fetch(ranges)) {
            match answer.and_then(|pieces| open(file, samples, pieces)).map(Arc::new) {
                Ok(file) => {
                    let _ = duty.insert(file.clone());
                    opened.push(file);
                }
                Err(error) => passable(error)?,
            }
        }
        for (file, samples) in others {
            match self.context.file(file, samples) {
                Ok(file) => opened.push(file),
                Err(error) => passable(error)?,
            }
        }
        Ok(opened)
    }

    /// Return the blocks that a plan reads, in its order. Tiles and streamed samples are left out: other functions read them.
    fn blocks(&self, plan: &Plan, columns: &[&ColumnSpec]) -> Vec<Wanted> {
        let mut wanted = Vec::new();
        for group in &plan.groups {
            for column in columns {
                let Ok(Some(source)) = self.source(plan, group, column) else { continue }; // Reading it reports the error.
                let (entry, chunk) = (source.entry(), source.chunk);
                if !source.file.ranged || entry.layout == Layout::Tiled || self.streams(entry) {
                    continue;
                }
                let mut blocks: Vec<usize> =
                    source.rows.iter().filter(|(row, _)| entry.is_valid(*row)).map(|(row, _)| entry.locate(*row).0).collect();
                blocks.sort_unstable();
                for rows in blocks.chunk_by(|one, other| one == other) {
                    let partial = (rows.len() as u64) < entry.rows_of(rows[0]);
                    wanted.push(Wanted { partial, ..Wanted::new(&source.file, chunk, rows[0], None) });
                }
            }
        }
        wanted
    }

    /// Read uncompressed checksum units or small blocks, and pass each to `copy` once it is verified, in any order. Nothing is cached.
    /// Returns the error of each that is damaged. Requires a store that streams.
    pub fn stream(&self, wanted: &[Wanted], mut copy: impl FnMut(usize, &[u8])) -> Result<Vec<Option<Error>>> {
        let mut failed: Vec<Option<Error>> = wanted.iter().map(|_| None).collect();
        let mut order: Vec<usize> = (0..wanted.len()).collect();
        for again in [true, false] {
            order.sort_by_key(|index| (wanted[*index].key.0, wanted[*index].offset)); // Damaged ones are in order of arrival.
            let (members, ranges) = self.stream_ranges(wanted, &order);
            order.clear();
            let answers = self.context.storage.stream(&ranges, None, &mut |range, bytes| {
                for index in &members[range] {
                    let Wanted { file, chunk, block, unit, offset, bytes: length, .. } = &wanted[*index];
                    let begin = (offset - ranges[range].begin) as usize;
                    let stored = &bytes[begin..begin + *length as usize];
                    match file.verify_stored(*chunk, *block, *unit, stored) {
                        Ok(()) => copy(*index, stored),
                        Err(_) if again => order.push(*index), // The transfer may have damaged it.
                        Err(error) => failed[*index] = Some(error),
                    }
                }
            });
            answers.into_iter().collect::<Result<()>>()?;
            if order.is_empty() {
                break;
            }
        }
        Ok(failed)
    }

    /// Read runs of uncompressed checksum units into their targets, and verify them there. Returns the error of each damaged run.
    /// Requires a store that streams.
    pub fn stream_runs(&self, runs: &[Run], mut targets: Vec<&mut [u8]>) -> Result<Vec<Option<Error>>> {
        let range = |run: &Run| {
            let (begin, end) = run.bounds();
            RangeRequest::plain(&data_name(run.file.id), begin, end - begin, Some(run.file.file_bytes))
        };
        let mut failed: Vec<Option<Error>> = runs.iter().map(|_| None).collect();
        let ranges: Vec<RangeRequest> = runs.iter().map(range).collect();
        let see = &mut |index: usize, bytes: &[u8]| failed[index] = runs[index].verify(bytes).err();
        self.context.storage.stream(&ranges, Some(&mut targets), see).into_iter().collect::<Result<()>>()?;
        for index in 0..runs.len() {
            if failed[index].is_some() {
                // The transfer may have damaged it, so read it again, once.
                let see = &mut |_: usize, bytes: &[u8]| failed[index] = runs[index].verify(bytes).err();
                let answers = self.context.storage.stream(&ranges[index..index + 1], Some(&mut targets[index..index + 1]), see);
                answers.into_iter().collect::<Result<()>>()?;
            }
        }
        Ok(failed)
    }

    /// Join nearby units into ranges that the store can stream. Returns the members of each range, and the ranges.
    fn stream_ranges(&self, wanted: &[Wanted], order: &[usize]) -> (Vec<Vec<usize>>, Vec<RangeRequest>) {
        let most = self.context.storage.stream_bytes();
        let (mut members, mut ranges): (Vec<Vec<usize>>, Vec<RangeRequest>) = (Vec::new(), Vec::new());
        for index in order {
            let Wanted { key, file, offset, bytes, .. } = &wanted[*index];
            let end = offset + bytes;
            match (members.last_mut(), ranges.last_mut()) {
                (Some(members), Some(range))
                    if wanted[members[0]].key.0 == key.0
                        && offset.saturating_sub(range.end()) <= STREAM_GAP_BYTES
                        && end.max(range.end()) - range.begin <= most =>
                {
                    members.push(*index);
                    range.pieces[0].bytes = (end.max(range.end()) - range.begin) as usize;
                }
                _ => {
                    members.push(vec![*index]);
                    ranges.push(RangeRequest::plain(&data_name(key.0), *offset, *bytes, Some(file.file_bytes)));
                }
            }
        }
        (members, ranges)
    }

    /// Return whether every take streams samples of this chunk to their places: they are large and uncompressed, and the store streams.
    pub fn streams(&self, entry: &Chunk) -> bool {
        entry.layout == Layout::Fixed
            && entry.rows_per_block == 1
            && entry.codec == Codec::None
            && self.context.storage.stream_bytes() >= 2 * UNIT_BYTES
            && !entry.stored_bytes.is_empty()
            && entry.stored_bytes.get(0) >= UNIT_BYTES
    }

    /// Fetch, verify and decode blocks. Returns the keys of those that fail to verify or decode.
    fn fetch_blocks(&self, wanted: &Arc<Vec<Wanted>>, cached: bool, fetched: &mut Fetched) -> Result<HashSet<BlockKey>> {
        if wanted.is_empty() {
            return Ok(HashSet::new());
        }
        let (segments, mut ranges) = plan_ranges(wanted, self.context.storage.as_ref());
        if !cached {
            // Blocks that are not cached may share a larger buffer, if gaps are at most a fifth of it.
            for range in &mut ranges {
                let gaps: u64 = range.pieces.iter().map(|piece| piece.skip).sum();
                range.shared = 5 * gaps <= range.end() - range.begin;
            }
        }
        for (range, segments) in ranges.iter_mut().zip(segments.iter()) {
            let slot = |(piece, block): (&Piece, &usize)| fetched.slots.get_mut(&wanted[*block].key).map(|slot| slot.split_to(piece.bytes));
            range.slots = range.pieces.iter().zip(segments).map(slot).collect();
        }
        fetched.slots.clear();
        // The address of each verified buffer: a hedged request has two answers, and either may be returned.
        let verified: Arc<Vec<AtomicUsize>> = Arc::new(wanted.iter().map(|_| AtomicUsize::new(0)).collect());
        let verify = {
            let (wanted, verified, segments) = (wanted.clone(), verified.clone(), segments.clone());
            move |range: usize, piece: usize, bytes: &Bytes| {
                let index: usize = segments[range][piece];
                let block = &wanted[index];
                let good =
                    bytes.len() as u64 == block.bytes && block.file.verify_stored(block.chunk, block.block, block.unit, bytes).is_ok();
                verified[index].store(if good { bytes.as_ptr() as usize } else { 0 }, Relaxed);
            }
        };
        let mut parts: Vec<Vec<Bytes>> = wanted.iter().map(|_| Vec::with_capacity(1)).collect();
        for (answer, segments) in self.context.storage.fetch_then(ranges, Arc::new(verify)).into_iter().zip(segments.iter()) {
            for (piece, block) in answer?.into_iter().zip(segments) {
                parts[*block].push(piece);
            }
        }
        let memory = &fetched.memory;
        let work = |block: &Wanted| if block.file.tail.chunks[block.chunk].raw_bytes.is_some() { block.bytes as usize } else { 0 };
        let blocks = parallel::map(wanted.len(), wanted.iter().map(work).sum(), |index| {
            let stored = match &parts[index][..] {
                [] => Bytes::new(),
                [whole] => whole.clone(),
                several => match memory.as_ref().and_then(|memory| Frozen::joined(memory, several.iter().map(|piece| &piece[..]))) {
                    Some(joined) => Bytes::from_owner(joined),
                    None => several.concat().into(),
                },
            };
            let Wanted { file, chunk, block, unit, .. } = &wanted[index];
            if verified[index].load(Relaxed) != stored.as_ptr() as usize || stored.is_empty() {
                file.verify_stored(*chunk, *block, *unit, &stored)?;
            }
            file.decoded(*chunk, *block, stored)
        })?;
        let mut failed = HashSet::new();
        for (wanted, block) in wanted.iter().zip(blocks) {
            match &block {
                Ok(bytes) if cached && !wanted.awaited => self.context.cache_block(wanted.key, bytes.clone()),
                Ok(_) => {}
                Err(_) => {
                    failed.insert(wanted.key);
                }
            }
            fetched.blocks.insert(wanted.key, block);
        }
        Ok(failed)
    }
}

/// Join nearby blocks into ranges, and cut blocks longer than a request into pieces. Returns the block of each piece of each range,
/// and the ranges.
fn plan_ranges(wanted: &[Wanted], storage: &dyn Storage) -> (Arc<Vec<Vec<usize>>>, Vec<RangeRequest>) {
    let (gap_bytes, range_bytes) = (widest_gap(wanted, storage.request_cost()), storage.range_bytes());
    let mut segments: Vec<Vec<usize>> = Vec::new();
    let mut ranges: Vec<RangeRequest> = Vec::new();
    let mut open: Option<(Id, u64)> = None;
    for (index, block) in wanted.iter().enumerate() {
        let mut begin = 0;
        while begin < block.bytes {
            let bytes = (block.bytes - begin).min(range_bytes);
            let offset = block.offset + begin;
            match (ranges.last_mut(), segments.last_mut(), open) {
                (Some(range), Some(segments), Some((file, end)))
                    if file == block.key.0
                        && offset >= end
                        && offset - end <= gap_bytes
                        && offset + bytes - range.begin <= JOINED_BYTES =>
                {
                    range.pieces.push(Piece { skip: offset - end, bytes: bytes as usize });
                    segments.push(index);
                }
                _ => {
                    ranges.push(RangeRequest::plain(&data_name(block.key.0), offset, bytes, Some(block.file.file_bytes)));
                    segments.push(vec![index]);
                }
            }
            open = Some((block.key.0, offset + bytes));
            begin += bytes;
        }
    }
    (Arc::new(segments), ranges)
}

/// Return the widest gap, between two blocks in file order, that is cheaper to read than another request. If all such gaps together
/// exceed the allowed waste, only the narrowest ones are read.
fn widest_gap(wanted: &[Wanted], cost: RequestCost) -> u64 {
    let gap = |pair: &[Wanted]| {
        let gap = pair[1].offset.saturating_sub(pair[0].offset + pair[0].bytes);
        (pair[0].key.0 == pair[1].key.0 && gap <= cost.gap_bytes).then_some(gap)
    };
    let mut gaps: Vec<u64> = wanted.windows(2).filter_map(gap).collect();
    let mut left = wanted.iter().map(|wanted| wanted.bytes).sum::<u64>().saturating_mul(cost.waste);
    if gaps.iter().sum::<u64>() <= left {
        return cost.gap_bytes;
    }
    gaps.sort_unstable();
    // The first gap that exceeds the allowance, and all gaps at least as wide, are not read.
    let too_wide = gaps.into_iter().find(|gap| left.checked_sub(*gap).map(|rest| left = rest).is_none());
    too_wide.map_or(cost.gap_bytes, |gap| gap - 1)
}

/// Return the bytes from the first to the last block, summed over the chunks of these blocks.
fn span_bytes(wanted: &[Wanted]) -> u64 {
    let mut seen = HashSet::new();
    let chunks = wanted.iter().filter(|wanted| seen.insert((wanted.key.0, wanted.chunk)));
    chunks.map(|wanted| wanted.file.tail.chunks[wanted.chunk].span_bytes()).sum()
}

/// Return the data files that hold these columns of a plan's samples, each with its number of samples.
fn files_of<'a>(plan: &'a Plan, columns: &'a [&ColumnSpec]) -> impl Iterator<Item = (&'a FileRef, u64)> {
    let read = |file: &&FileRef| columns.iter().any(|column| file.columns.contains(&column.id));
    let fragments = plan.groups.iter().map(|group| group.fragment());
    fragments.flat_map(move |fragment| fragment.files.iter().filter(read).map(|file| (file, fragment.samples)))
}

/// Return the range of a data file's tail, or of the whole file if it is small.
pub fn tail_range(file: &FileRef) -> RangeRequest {
    match whole_bytes(file) {
        0 => bare_tail(file),
        whole => RangeRequest::plain(&data_name(file.id), 0, whole, Some(whole)),
    }
}

fn bare_tail(file: &FileRef) -> RangeRequest {
    let begin = file.file_bytes.saturating_sub(FOOTER_BYTES).saturating_sub(file.tail_bytes);
    RangeRequest::plain(&data_name(file.id), begin, file.tail_bytes.min(file.file_bytes), Some(file.file_bytes))
}

/// Return the bytes of a data file that is small enough to be read whole, else 0.
pub fn whole_bytes(file: &FileRef) -> u64 {
    if file.file_bytes <= WHOLE_FILE_BYTES { file.file_bytes } else { 0 }
}

/// Open a data file from the bytes of `tail_range` or `bare_tail`.
pub fn open(file: &FileRef, samples: u64, pieces: Vec<Bytes>) -> Result<DataFile> {
    let body = pieces.into_iter().next().unwrap_or_default();
    match body.len() as u64 == file.file_bytes {
        true => DataFile::whole(body, file, samples),
        false => DataFile::ranged(body, file, samples),
    }
}
