//! Blocks of object stores that a loader keeps in its own memory, if all that it reads fits there (docs/design/0020-cache.md). Each block is
//! fetched once, together with its neighbours.
//!
//! The memory is private to the process and a part of the loader's budget. A read that finds no block here fetches it on its own.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use penstock_dataset::{BlockAt, Held, block_cache_bytes, fetch_blocks, file_cache_bytes, ranges_of};
use penstock_error::Result;
use penstock_format::schema::ColumnSpec;
use penstock_storage::{Access, process};

use crate::caught::caught;
use crate::engine::ahead::each_part;
use crate::engine::recipe::Recipe;
use crate::order::mixture::Place;
use crate::source::window::Steps;

/// Blocks are fetched with their neighbours in windows of this length. Stores send one long range faster than many short ones.
const WINDOW_BYTES: u64 = 1 << 20;
/// Each thread fetches so many bytes of windows at a time, but at most this part of the budget.
const GROUP_BYTES: u64 = 8 << 20;
const GROUP_PART: u64 = 64;
/// Batches have at least this part of the budget, or room for so many of them. What is fetched and not decoded yet has this part.
const BATCHES_PART: u64 = 4;
const BATCHES: u64 = 4;
const ENCODED_PART: u64 = 8;
/// What must be known of samples may take this part of the budget.
const KNOWN_PART: u64 = 16;
/// What must be known of a block, in bytes.
const BLOCK_BYTES: u64 = 128;
/// How often a waiting thread looks whether it should stop.
const LOOK: Duration = Duration::from_millis(50);

/// The blocks that the samples of some sources need.
struct Layout {
    /// Blocks in the order in which they are stored, each with its source and its window.
    blocks: Vec<(BlockAt, usize, usize)>,
    windows: Vec<Range<usize>>,
    /// For each source, the number of its first sample, or None if it is not kept.
    base: Vec<Option<usize>>,
    /// For each sample, where its blocks begin in `list`.
    first: Vec<u32>,
    list: Vec<u32>,
}

impl Layout {
    /// Look up the blocks of these columns of each source. Cost: reads the tails of all their data files.
    fn new(recipe: &Recipe, columns: &[Vec<u64>]) -> Result<Layout> {
        let (mut numbers, mut blocks): (HashMap<_, u32>, Vec<(BlockAt, usize, usize)>) = Default::default();
        let (mut base, mut first, mut list) = (Vec::new(), vec![0], Vec::new());
        for (source, ids) in columns.iter().enumerate() {
            base.push((!ids.is_empty()).then_some(first.len() - 1));
            if ids.is_empty() {
                continue;
            }
            each_part(recipe, source, |_, reader, specs| {
                let specs: Vec<&ColumnSpec> = specs.iter().copied().filter(|spec| ids.contains(&spec.id)).collect();
                let mut pairs = Vec::new();
                reader.each_block(&specs, |place, block| {
                    let number = *numbers.entry(block.place()).or_insert_with(|| {
                        blocks.push((block, source, 0));
                        blocks.len() as u32 - 1
                    });
                    pairs.push((place, number));
                })?;
                pairs.sort_unstable();
                let mut pairs = pairs.into_iter().peekable();
                for place in 0..reader.plan.len() as u32 {
                    list.extend(std::iter::from_fn(|| pairs.next_if(|(of, _)| *of == place)).map(|(_, number)| number));
                    first.push(list.len() as u32);
                }
                Ok(())
            })?;
        }
        let mut order: Vec<usize> = (0..blocks.len()).collect();
        order.sort_by_cached_key(|number| blocks[*number].0.place());
        let mut sorted = vec![0; order.len()];
        order.iter().enumerate().for_each(|(at, number)| sorted[*number] = at as u32);
        list.iter_mut().for_each(|number| *number = sorted[*number as usize]);
        let mut blocks: Vec<(BlockAt, usize, usize)> = order.into_iter().map(|number| blocks[number].clone()).collect();
        let mut windows: Vec<Range<usize>> = Vec::new();
        let mut last = None;
        for (at, (block, _, window)) in blocks.iter_mut().enumerate() {
            let (file, offset, ..) = block.place();
            let own = (file, offset / WINDOW_BYTES);
            if last.replace(own) != Some(own) {
                windows.push(at..at);
            }
            *window = windows.len() - 1;
            windows[*window].end = at + 1;
        }
        Ok(Layout { blocks, windows, base, first, list })
    }

    /// Return the memory that all blocks need, and what must be known of them.
    fn bytes(&self) -> u64 {
        let known = self.blocks.len() as u64 * BLOCK_BYTES + 4 * (self.first.len() + self.list.len()) as u64;
        self.blocks.iter().map(|(block, ..)| block.bytes()).sum::<u64>() + known
    }

    /// Return the blocks of samples, each one once, in ascending order.
    fn of(&self, places: &[Place]) -> Vec<usize> {
        let samples = places.iter().filter_map(|place| Some(self.base[place.source]? + place.position as usize));
        let blocks = samples.flat_map(|sample| &self.list[self.first[sample] as usize..self.first[sample + 1] as usize]);
        let mut blocks: Vec<usize> = blocks.map(|block| *block as usize).collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks
    }

    /// Return blocks of a group, and their source.
    fn group(&self, group: &[usize]) -> (usize, Vec<BlockAt>) {
        (self.blocks[group[0]].1, group.iter().map(|block| self.blocks[*block].0.clone()).collect())
    }
}

#[derive(Clone)]
enum Slot {
    Absent,
    Coming,
    Here(Bytes),
    /// The block could not be fetched. A read of its samples reports why.
    Failed,
}

#[derive(Default)]
struct State {
    slots: Vec<Slot>,
    /// Whether each block is used in the steps below `known`.
    is_used: Vec<bool>,
    known: u64,
    /// What the steps below this need is lined up, or has been fetched.
    claimed: u64,
    /// Blocks to fetch together, in the order in which steps need them.
    groups: VecDeque<Vec<usize>>,
    bytes: u64,
    has_ended: bool,
}

impl State {
    fn put(&mut self, group: &[usize], fetched: Vec<Option<Bytes>>) {
        if self.has_ended {
            return;
        }
        let mut fetched = fetched.into_iter();
        for block in group {
            let bytes = fetched.next().flatten();
            self.bytes += bytes.as_ref().map_or(0, |bytes| bytes.len() as u64);
            self.slots[*block] = bytes.map_or(Slot::Failed, Slot::Here);
        }
    }
}

/// The blocks that a loader keeps.
pub struct Kept {
    recipe: Arc<Recipe>,
    /// The columns of each source that are kept.
    columns: Vec<Vec<u64>>,
    steps: Steps,
    end: AtomicU64,
    room_bytes: u64,
    group_bytes: u64,
    /// Bytes that batches must leave to the blocks.
    reserved_bytes: AtomicU64,
    layout: OnceLock<Option<Layout>>,
    state: Mutex<State>,
    arrived: Condvar,
}

impl Kept {
    /// Return what a loader with this budget keeps of its sources for these steps below `end`, or None if not everything fits.
    pub fn of(recipe: &Arc<Recipe>, memory_bytes: u64, steps: Steps, end: u64) -> Result<Option<Kept>> {
        let batch_bytes = recipe.least_bytes().max(recipe.fetched_bytes.load(Relaxed));
        let mut room_bytes = memory_bytes.saturating_sub((memory_bytes / BATCHES_PART).max(BATCHES * batch_bytes) + recipe.window_bytes);
        let (mut columns, mut bytes, mut known, mut tails) = (Vec::new(), 0, 0, 0);
        for number in 0..recipe.sources.len() {
            let (source, mut own) = (&recipe.sources[number], columns_of(recipe, number));
            let (snapshot, part) = (&source.snapshot, source.len() as f64 / source.snapshot.len().max(1) as f64);
            let sizes = snapshot.column_bytes(&own)?;
            // A source that the cache of blocks can hold is left to it, because all reads of the process share it.
            if sizes.spanned <= block_cache_bytes() / 2 {
                own.clear();
            }
            if !own.is_empty() {
                bytes += (sizes.decoded as f64 * part) as u64;
                known += source.len() * 4 * (own.len() as u64 + 1);
                tails += snapshot.kept_bytes(&own)?.0;
                if sizes.stored != sizes.decoded {
                    room_bytes = room_bytes.min(memory_bytes.saturating_sub(memory_bytes / BATCHES_PART + memory_bytes / ENCODED_PART));
                }
            }
            columns.push(own);
        }
        let fits = bytes > 0 && bytes + known <= room_bytes && known <= memory_bytes / KNOWN_PART && tails <= file_cache_bytes();
        Ok((fits && recipe.cut.steps() > 0).then(|| Kept {
            recipe: recipe.clone(),
            columns,
            steps,
            end: AtomicU64::new(end),
            room_bytes,
            group_bytes: (memory_bytes / GROUP_PART).min(GROUP_BYTES),
            reserved_bytes: AtomicU64::new(bytes + known),
            layout: OnceLock::new(),
            state: Mutex::new(State { known: steps.begin, claimed: steps.begin, ..State::default() }),
            arrived: Condvar::new(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return the layout, or None if the blocks do not fit or cannot be looked up. Reads report why.
    fn layout(&self) -> Option<&Layout> {
        let look_up = || {
            let layout = caught(|| Layout::new(&self.recipe, &self.columns)).ok().filter(|layout| layout.bytes() <= self.room_bytes);
            self.reserved_bytes.store(layout.as_ref().map_or(0, Layout::bytes), Relaxed);
            let count = layout.as_ref().map_or(0, |layout| layout.blocks.len());
            let mut state = self.lock();
            (state.slots, state.is_used) = (vec![Slot::Absent; count], vec![false; count]);
            layout
        };
        self.layout.get_or_init(look_up).as_ref()
    }

    /// Return whether a column of a source is kept.
    pub fn has(&self, source: usize, column: &ColumnSpec) -> bool {
        self.columns[source].contains(&column.id)
    }

    /// Return the bytes of all blocks, or None if they do not fit.
    pub fn all_bytes(&self) -> Option<u64> {
        self.layout().map(|layout| layout.blocks.iter().map(|(block, ..)| block.bytes()).sum())
    }

    /// Move the end to an earlier or later step.
    pub fn set_end(&self, end: u64) {
        self.end.store(end, Relaxed);
    }

    /// Return the bytes that batches must leave to the blocks.
    pub fn reserved_bytes(&self) -> u64 {
        self.reserved_bytes.load(Relaxed)
    }

    /// Return the bytes of all blocks that are here.
    pub fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    /// Keep nothing from now on, unless there is room for two batches of this size beside the blocks.
    pub fn leave_room(&self, batch_bytes: u64, memory_bytes: u64) {
        if self.reserved_bytes() + 2 * batch_bytes + self.recipe.window_bytes > memory_bytes {
            self.end();
        }
    }

    /// Release all blocks, and keep nothing from now on.
    pub fn end(&self) {
        let mut state = self.lock();
        *state = State { has_ended: true, ..State::default() };
        self.reserved_bytes.store(0, Relaxed);
        self.arrived.notify_all();
    }

    /// Return the blocks of a step's samples. Those that are missing are fetched, together with neighbours that the loader uses later.
    pub fn lend(&self, step: u64, places: &[Place]) -> Option<Held> {
        let layout = self.layout()?;
        let wanted = layout.of(places);
        let mut state = self.lock();
        if !state.has_ended {
            self.claim(layout, &mut state, step);
        }
        while !state.has_ended && wanted.iter().any(|block| matches!(state.slots[*block], Slot::Coming)) {
            if process::interrupted() {
                return None;
            }
            // Earlier steps come first, whichever thread waits for them.
            let Some(group) = state.groups.pop_front() else {
                state = self.arrived.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            };
            drop(state);
            let (source, blocks) = layout.group(&group);
            let fetched = caught(|| fetch_blocks(&self.recipe.sources[source].snapshot.context, &blocks)).unwrap_or_default();
            state = self.lock();
            state.put(&group, fetched);
            self.arrived.notify_all();
        }
        if state.has_ended {
            return None;
        }
        let here = |block: &usize| if let Slot::Here(bytes) = &state.slots[*block] { Some(bytes.clone()) } else { None };
        Some(Held::of(wanted.iter().filter_map(|block| Some((&layout.blocks[*block].0, here(block)?)))))
    }

    /// Line up what must be fetched for the steps up to this one, in their order.
    fn claim(&self, layout: &Layout, state: &mut State, step: u64) {
        for step in (state.claimed..step + 1).filter(|step| self.steps.has(*step)) {
            // What the rest of this epoch uses, as far as the loader will read it.
            if step >= state.known {
                let until = self.recipe.end_of_epoch(step).min(self.end.load(Relaxed)).max(step + 1);
                for step in (state.known..until).filter(|step| self.steps.has(*step)) {
                    layout.of(&self.recipe.places(step).2).into_iter().for_each(|block| state.is_used[block] = true);
                }
                state.known = until;
            }
            self.line_up(layout, state, &layout.of(&self.recipe.places(step).2));
        }
        state.claimed = state.claimed.max(step + 1);
    }

    /// Divide the windows of missing blocks into groups.
    fn line_up(&self, layout: &Layout, state: &mut State, wanted: &[usize]) {
        let (mut group, mut bytes, mut of) = (Vec::new(), 0, 0);
        for block in wanted {
            if !matches!(state.slots[*block], Slot::Absent) {
                continue;
            }
            let (_, source, window) = layout.blocks[*block];
            if !group.is_empty() && (bytes >= self.group_bytes || source != of) {
                state.groups.push_back(std::mem::take(&mut group));
                bytes = 0;
            }
            of = source;
            for other in layout.windows[window].clone() {
                let is_missing = matches!(state.slots[other], Slot::Absent) && layout.blocks[other].1 == source;
                if is_missing && state.is_used[other] {
                    state.slots[other] = Slot::Coming;
                    bytes += layout.blocks[other].0.bytes();
                    group.push(other);
                }
            }
        }
        state.groups.extend(Some(group).filter(|group| !group.is_empty()));
    }

    /// Return what would be requested of each source for the steps below the end, or None if not everything fits.
    pub fn foresee(&self) -> Option<Vec<(u64, u64)>> {
        let layout = self.layout()?;
        let (mut state, mut noted) = (self.lock(), vec![(0, 0); self.columns.len()]);
        self.claim(layout, &mut state, self.end.load(Relaxed).saturating_sub(1));
        for group in std::mem::take(&mut state.groups) {
            let (source, blocks) = layout.group(&group);
            let ranges = ranges_of(&self.recipe.sources[source].snapshot.context, &blocks);
            noted[source].0 += ranges.len() as u64;
            noted[source].1 += ranges.iter().map(|range| range.end() - range.begin).sum::<u64>();
        }
        Some(noted)
    }
}

/// Return the columns of a source that can be kept: those of an object store that are read whole, and not in windows.
fn columns_of(recipe: &Recipe, number: usize) -> Vec<u64> {
    let source = &recipe.sources[number];
    if recipe.windows[number].is_some() || source.snapshot.context.storage.access_of_all() != Some(Access::Ranged) {
        return Vec::new();
    }
    let columns = recipe.specs[number].iter().filter(|spec| source.files_of(spec).is_none() && !recipe.is_in_parts(number, spec));
    columns.map(|spec| spec.id).collect()
}
