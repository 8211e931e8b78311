//! Blocks of object stores that a loader keeps in its own memory (docs/design/0020-cache.md). If all that it reads fits, each block is fetched
//! once, together with its neighbours. If not, those that it uses first are kept (`choice`).
//!
//! The memory is private to the process and a part of the loader's budget. A read that finds no block here fetches it on its own.

use std::collections::VecDeque;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use penstock_cache::Uses;
use penstock_dataset::{HeldBlocks, block_cache_bytes, fetch_blocks, file_cache_bytes, ranges_of};
use penstock_error::Result;
use penstock_format::schema::ColumnSpec;
use penstock_storage::{Access, Sparse, process};

use crate::caught::caught;
use crate::engine::choice::Choice;
use crate::engine::layout::Layout;
use crate::engine::recipe::Recipe;
use crate::order::mixture::SamplePlace;
use crate::source::window::Steps;

/// Each thread fetches so many bytes of windows at a time, but at most this part of the budget.
const GROUP_BYTES: u64 = 8 << 20;
const GROUP_PART: u64 = 64;
/// Batches have at least this part of the budget, or room for so many of them. What is fetched and not decoded yet has this part.
const BATCHES_PART: u64 = 4;
const BATCHES: u64 = 4;
const ENCODED_PART: u64 = 8;
/// What must be known of samples may take this part of the budget.
const KNOWN_PART: u64 = 16;
/// Nothing is kept if less than this part of the blocks fits.
const LEAST_PART: u64 = 8;
/// How often a waiting thread looks whether it should stop.
const LOOK: Duration = Duration::from_millis(50);

#[derive(Clone)]
enum Slot {
    Absent,
    Coming,
    Here(Bytes),
    /// The block could not be fetched. A read of its samples reports why.
    Failed,
}

#[derive(Default)]
struct KeptState {
    slots: Vec<Slot>,
    /// Whether each block is used in the steps below `known`. If not all blocks fit, `choice` knows their uses instead.
    is_used: Vec<bool>,
    known: u64,
    /// What the steps below this need is lined up, or has been fetched.
    claimed: u64,
    /// Blocks to fetch together, in the order in which steps need them.
    groups: VecDeque<Vec<u32>>,
    bytes: u64,
    chosen: Option<Chosen>,
    has_ended: bool,
}

/// What is known if not all blocks fit.
struct Chosen {
    choice: Choice,
    /// For each block, how many steps need it that are lined up and not lent yet.
    waiting: Vec<u32>,
    memory: Arc<Sparse>,
}

impl KeptState {
    fn put(&mut self, group: &[u32], fetched: Vec<Option<Bytes>>) {
        if self.has_ended {
            return;
        }
        let mut fetched = fetched.into_iter();
        for block in group {
            let bytes = fetched.next().flatten();
            // Blocks that were fetched together are freed one by one.
            let bytes = bytes.map(|bytes| match &self.chosen {
                Some(chosen) => chosen.memory.put(*block as usize, &bytes),
                None => bytes,
            });
            self.bytes += bytes.as_ref().map_or(0, |bytes| bytes.len() as u64);
            self.slots[*block as usize] = bytes.map_or(Slot::Failed, Slot::Here);
        }
        self.release(group);
    }

    /// Free those of these blocks that no step needs any more, or too late.
    fn release(&mut self, blocks: &[u32]) {
        let Some(Chosen { choice, waiting, .. }) = &self.chosen else { return };
        for block in blocks {
            let slot = &mut self.slots[*block as usize];
            if let Slot::Here(bytes) = slot
                && waiting[*block as usize] == 0
                && !choice.keeps(*block)
            {
                self.bytes -= bytes.len() as u64;
                *slot = Slot::Absent;
            }
        }
    }

    /// Note that a step has these blocks. A later step fetches those again that failed.
    fn has_lent(&mut self, blocks: &[u32]) {
        for block in blocks {
            let slot = &mut self.slots[*block as usize];
            if matches!(slot, Slot::Failed) {
                *slot = Slot::Absent;
            }
        }
        if let Some(Chosen { waiting, .. }) = &mut self.chosen {
            blocks.iter().for_each(|block| waiting[*block as usize] = waiting[*block as usize].saturating_sub(1));
        }
        self.release(blocks);
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
    known_bytes: u64,
    group_bytes: u64,
    /// Bytes that batches must leave to the blocks.
    reserved_bytes: AtomicU64,
    /// Bytes of all blocks that are here, for those that must not wait for `state`.
    bytes: AtomicU64,
    layout: OnceLock<Option<Layout>>,
    state: Mutex<KeptState>,
    arrived: Condvar,
}

impl Kept {
    /// Return what a loader with this budget keeps for these steps below `end`. None if that would be nothing, or too little.
    pub fn of(recipe: &Arc<Recipe>, memory_bytes: u64, steps: Steps, end: u64) -> Result<Option<Kept>> {
        let batch_bytes = recipe.least_bytes().max(recipe.fetched_bytes.load(Relaxed));
        let mut room_bytes =
            memory_bytes.saturating_sub((memory_bytes / BATCHES_PART).max(BATCHES * batch_bytes) + recipe.window_bytes);
        // The room beside what is fetched and not decoded yet.
        let beside_encoded_bytes =
            memory_bytes.saturating_sub(memory_bytes / BATCHES_PART + memory_bytes / ENCODED_PART);
        let (mut columns, mut bytes, mut known, mut tails) = (Vec::new(), 0, 0, 0);
        for number in 0..recipe.sources.len() {
            let (source, mut kept) = (&recipe.sources[number], columns_of(recipe, number));
            let (snapshot, part) = (&source.snapshot, source.len() as f64 / source.snapshot.len().max(1) as f64);
            let sizes = snapshot.column_bytes(&kept)?;
            // A source that the cache of blocks can hold is left to it, because all reads of the process share it.
            if sizes.spanned <= block_cache_bytes() / 2 {
                kept.clear();
            }
            if !kept.is_empty() {
                bytes += (sizes.decoded as f64 * part) as u64;
                known += source.len() * 4 * (kept.len() as u64 + 1);
                tails += snapshot.kept_bytes(&kept)?.0;
                if sizes.stored != sizes.decoded {
                    room_bytes = room_bytes.min(beside_encoded_bytes);
                }
            }
            columns.push(kept);
        }
        let is_known = bytes > 0 && known <= memory_bytes / KNOWN_PART && tails <= file_cache_bytes();
        let fits = bytes + known <= room_bytes;
        if !fits {
            room_bytes = room_bytes.min(beside_encoded_bytes);
        }
        let is_worth = fits || room_bytes >= (bytes / LEAST_PART + known).max(block_cache_bytes() / 2);
        Ok((is_known && is_worth && recipe.cut.steps() > 0).then(|| Kept {
            recipe: recipe.clone(),
            columns,
            steps,
            end: AtomicU64::new(end),
            room_bytes,
            group_bytes: (memory_bytes / GROUP_PART).min(GROUP_BYTES),
            known_bytes: memory_bytes / KNOWN_PART,
            reserved_bytes: AtomicU64::new((bytes + known).min(room_bytes)),
            bytes: AtomicU64::new(0),
            layout: OnceLock::new(),
            state: Mutex::new(KeptState { known: steps.begin, claimed: steps.begin, ..KeptState::default() }),
            arrived: Condvar::new(),
        }))
    }

    fn lock(&self) -> MutexGuard<'_, KeptState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return the layout, or None if too little fits or the blocks cannot be looked up. Reads report why.
    fn layout(&self) -> Option<&Layout> {
        let look_up = || {
            let layout = caught(|| Layout::new(&self.recipe, &self.columns)).ok();
            let chosen = layout.as_ref().and_then(|layout| self.choose(layout));
            let layout =
                layout.filter(|layout| chosen.is_some() || layout.bytes() + layout.known_bytes() <= self.room_bytes);
            let reserved = match (&layout, &chosen) {
                (Some(_), Some(_)) => self.room_bytes,
                (Some(layout), None) => layout.bytes() + layout.known_bytes(),
                (None, _) => 0,
            };
            self.reserved_bytes.store(reserved, Relaxed);
            let count = layout.as_ref().map_or(0, |layout| layout.blocks.len());
            let mut state = self.lock();
            (state.slots, state.is_used, state.chosen) = (vec![Slot::Absent; count], vec![false; count], chosen);
            layout
        };
        self.layout.get_or_init(look_up).as_ref()
    }

    /// Begin to choose among blocks that do not all fit. Returns None if they do, or if too few do.
    fn choose(&self, layout: &Layout) -> Option<Chosen> {
        let bytes = layout.bytes();
        let known_bytes = layout.known_bytes() + Choice::known_bytes(layout.blocks.len() as u64, layout.uses());
        let room_bytes = self.room_bytes.checked_sub(known_bytes).filter(|_| known_bytes <= self.known_bytes)?;
        if bytes + layout.known_bytes() <= self.room_bytes || room_bytes < bytes / LEAST_PART {
            return None;
        }
        let sizes = || layout.blocks.iter().map(|(block, ..)| block.bytes());
        let choice = Choice::new(sizes().map(Sparse::room_bytes).collect(), room_bytes);
        Some(Chosen { choice, waiting: vec![0; layout.blocks.len()], memory: Sparse::new(sizes()).ok()? })
    }

    /// Return whether a column of a source is kept.
    pub fn has(&self, source: usize, column: &ColumnSpec) -> bool {
        self.columns[source].contains(&column.id)
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
        self.bytes.load(Relaxed)
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
        *state = KeptState { has_ended: true, ..KeptState::default() };
        self.reserved_bytes.store(0, Relaxed);
        self.bytes.store(0, Relaxed);
        self.arrived.notify_all();
    }

    /// Return the blocks of a step's samples. Those that are missing are fetched, together with neighbours that the loader uses later.
    pub fn lend(&self, step: u64, places: &[SamplePlace]) -> Option<HeldBlocks> {
        let layout = self.layout()?;
        let wanted = layout.of(places);
        let mut state = self.lock();
        if !state.has_ended {
            self.claim(layout, &mut state, step);
        }
        while !state.has_ended && wanted.iter().any(|block| matches!(state.slots[*block as usize], Slot::Coming)) {
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
            let fetched =
                caught(|| fetch_blocks(&self.recipe.sources[source].snapshot.context, &blocks)).unwrap_or_default();
            state = self.lock();
            state.put(&group, fetched);
            self.bytes.store(state.bytes, Relaxed);
            self.arrived.notify_all();
        }
        if state.has_ended {
            return None;
        }
        let held = HeldBlocks::of(wanted.iter().filter_map(|block| match &state.slots[*block as usize] {
            Slot::Here(bytes) => Some((&layout.blocks[*block as usize].0, bytes.clone())),
            _ => None,
        }));
        state.has_lent(&wanted);
        Some(held)
    }

    /// Line up what must be fetched for the steps up to this one, in their order.
    fn claim(&self, layout: &Layout, state: &mut KeptState, step: u64) {
        for step in (state.claimed..step + 1).filter(|step| self.steps.has(*step)) {
            if state.chosen.is_some() {
                self.claim_chosen(layout, state, step);
                continue;
            }
            // What the rest of this epoch uses, as far as the loader will read it.
            if step >= state.known {
                let until = self.recipe.end_of_epoch(step).min(self.end.load(Relaxed)).max(step + 1);
                for step in (state.known..until).filter(|step| self.steps.has(*step)) {
                    layout.of_step(&self.recipe, step).iter().for_each(|block| state.is_used[*block as usize] = true);
                }
                state.known = until;
            }
            self.line_up(layout, state, &layout.of_step(&self.recipe, step), step);
        }
        state.claimed = state.claimed.max(step + 1);
    }

    /// Line up what must be fetched for a step, if not all blocks fit.
    fn claim_chosen(&self, layout: &Layout, state: &mut KeptState, step: u64) {
        let Some(Chosen { choice, waiting, .. }) = &mut state.chosen else { return };
        choice.continue_with(step, |step| {
            let used = |step| if self.steps.has(step) { layout.of_step(&self.recipe, step) } else { Vec::new() };
            Uses::new(layout.blocks.len(), step, (step..self.recipe.end_of_epoch(step)).map(used))
        });
        let wanted = choice.of(step);
        wanted.iter().for_each(|block| waiting[*block as usize] += 1);
        self.line_up(layout, state, &wanted, step);
        let gone = state.chosen.iter_mut().flat_map(|chosen| chosen.choice.has_used(step)).collect::<Vec<u32>>();
        state.release(&gone);
    }

    /// Divide the missing blocks of a step, and those of their neighbours that are fetched with them, into groups.
    fn line_up(&self, layout: &Layout, state: &mut KeptState, wanted: &[u32], step: u64) {
        let end = self.end.load(Relaxed);
        let (mut group, mut bytes, mut group_source) = (Vec::new(), 0, 0);
        for block in wanted {
            if !matches!(state.slots[*block as usize], Slot::Absent) {
                continue;
            }
            let (_, source, window) = layout.blocks[*block as usize];
            if !group.is_empty() && (bytes >= self.group_bytes || source != group_source) {
                state.groups.push_back(std::mem::take(&mut group));
                bytes = 0;
            }
            group_source = source;
            for other in layout.windows[window].clone() {
                if !matches!(state.slots[other], Slot::Absent) || layout.blocks[other].1 != source {
                    continue;
                }
                let other = other as u32;
                let is_fetched = match &mut state.chosen {
                    None => state.is_used[other as usize],
                    Some(chosen) => {
                        wanted.binary_search(&other).is_ok() || chosen.choice.may_fetch_early(other, step, end)
                    }
                };
                if is_fetched {
                    state.slots[other as usize] = Slot::Coming;
                    bytes += layout.blocks[other as usize].0.bytes();
                    group.push(other);
                }
            }
        }
        state.groups.extend(Some(group).filter(|group| !group.is_empty()));
    }

    /// Return what would be requested of each source for the steps below the end, which end an epoch, and what is kept. None if that is nothing.
    /// This loader does not fetch afterwards.
    #[allow(clippy::type_complexity)]
    pub fn foresee(&self) -> Option<(Vec<(u64, u64)>, KeptBytes)> {
        let layout = self.layout()?;
        let (mut noted, mut is_seen) = (vec![(0, 0); self.columns.len()], vec![false; layout.blocks.len()]);
        let (mut kept, mut state) = (KeptBytes { all: layout.bytes(), ..KeptBytes::default() }, self.lock());
        let end = self.end.load(Relaxed);
        kept.twice = self.foresee_steps(layout, &mut state, end, &mut noted, &mut is_seen);
        kept.room = state.chosen.as_ref().map_or(kept.all, |chosen| chosen.choice.room_bytes());
        if state.chosen.is_some() {
            let next = self.recipe.end_of_epoch(end);
            self.end.store(next, Relaxed);
            kept.again = self.foresee_steps(layout, &mut state, next, &mut noted.clone(), &mut is_seen);
        }
        Some((noted, kept))
    }

    /// Note the requests and bytes of each source for the steps below `end`. Returns the bytes of blocks that were seen before.
    fn foresee_steps(
        &self,
        layout: &Layout,
        state: &mut KeptState,
        end: u64,
        noted: &mut [(u64, u64)],
        is_seen: &mut [bool],
    ) -> u64 {
        let mut seen_bytes = 0;
        for step in (state.claimed..end).filter(|step| self.steps.has(*step)) {
            self.claim(layout, state, step);
            for group in std::mem::take(&mut state.groups) {
                let (source, blocks) = layout.group(&group);
                let ranges = ranges_of(&self.recipe.sources[source].snapshot.context, &blocks);
                noted[source].0 += ranges.len() as u64;
                noted[source].1 += ranges.iter().map(|range| range.end() - range.begin).sum::<u64>();
                state.put(&group, vec![Some(Bytes::new()); group.len()]);
                let seen = group
                    .iter()
                    .zip(&blocks)
                    .filter(|(block, _)| std::mem::replace(&mut is_seen[**block as usize], true));
                seen_bytes += seen.map(|(_, block)| block.bytes()).sum::<u64>();
            }
            state.has_lent(&layout.of_step(&self.recipe, step));
        }
        seen_bytes
    }
}

/// Bytes of decoded blocks that a loader keeps in its own memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KeptBytes {
    /// All blocks that its samples need, and the room for them.
    pub all: u64,
    pub room: u64,
    /// Blocks that are fetched again in the same epoch, and those that the next one fetches again.
    pub twice: u64,
    pub again: u64,
}

impl KeptBytes {
    /// Add what another process keeps of the same sources.
    pub fn add(&mut self, other: KeptBytes) {
        self.all = self.all.max(other.all);
        self.room += other.room;
        self.twice += other.twice;
        self.again += other.again;
    }
}

/// Return the columns of a source that can be kept: those of an object store that are read whole, and not in windows.
fn columns_of(recipe: &Recipe, number: usize) -> Vec<u64> {
    let source = &recipe.sources[number];
    if recipe.windows[number].is_some() || source.snapshot.context.reads().features().access != Some(Access::Ranged) {
        return Vec::new();
    }
    let columns =
        source.columns.iter().filter(|spec| source.files_of(spec).is_none() && !recipe.is_in_parts(number, spec));
    columns.map(|spec| spec.id).collect()
}
