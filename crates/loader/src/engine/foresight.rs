//! What to fetch for an order that is known, and when, so that a loader keeps blocks in its own memory. Pure functions, except that the
//! blocks of samples are looked up (docs/design/0020-cache.md). `kept` carries the plan out.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use penstock_cache::{Belady, Fetch, NEVER, Uses};
use penstock_dataset::{BlockAt, OnCorrupt, Reader, count_requests};
use penstock_error::{Error, Result};
use penstock_format::schema::ColumnSpec;

use crate::engine::recipe::Recipe;
use crate::order::mixture::Place;

/// Samples whose bytes are looked up at a time.
const LOOKED_UP: u64 = 4096;
/// If everything fits, blocks are fetched with their neighbours in windows of this length. Stores send one long range faster than many short
/// ones. Groups of windows have this size.
const WINDOW_BYTES: u64 = 1 << 20;
const WINDOWS_BYTES: u64 = 8 << 20;
/// Otherwise, the size of the first groups, for which the first batch waits, and of the largest ones.
const FIRST_BYTES: u64 = 1 << 20;
const MOST_BYTES: u64 = 4 << 20;
/// This part of the memory is for blocks that are not worth keeping until their next use. They are fetched ahead into it.
const PASSING_PART: u64 = 8;

/// Call `visit` for some thousand samples of a source at a time: the first of them, their reader, and the columns that are stored in data files.
pub fn each_part(recipe: &Recipe, source: usize, mut visit: impl FnMut(u64, &mut Reader, &[&ColumnSpec]) -> Result<()>) -> Result<()> {
    let of = &recipe.sources[source];
    let columns: Vec<&ColumnSpec> = recipe.specs[source].iter().filter(|spec| of.files_of(spec).is_none()).collect();
    for first in (0..of.len()).step_by(LOOKED_UP as usize) {
        if penstock_storage::process::interrupted() {
            return Err(Error::new("interrupted", "the loader was closed"));
        }
        let positions = (first..of.len().min(first + LOOKED_UP)).map(|position| of.absolute(position)).collect();
        visit(first, &mut Reader::new(of.snapshot.clone(), positions, OnCorrupt::Raise)?, &columns)?;
    }
    Ok(())
}

/// The blocks that the samples of some sources need.
pub struct Layout {
    recipe: Arc<Recipe>,
    /// Blocks in the order in which they are stored, and a source that has each one.
    pub blocks: Vec<BlockAt>,
    source_of: Vec<u16>,
    /// For each source, the number of its first sample, or None if nothing is planned for it.
    base: Vec<Option<u32>>,
    /// For each sample, where its blocks begin in `list`.
    first: Vec<u32>,
    list: Vec<u32>,
    /// The engine makes every `stride`-th step from `begin` on.
    begin: u64,
    stride: u64,
}

impl Layout {
    /// Look up the blocks of the sources that `planned` names. Cost: reads the tails of all their data files.
    pub fn new(recipe: &Arc<Recipe>, planned: &[bool], (begin, stride): (u64, u64)) -> Result<Layout> {
        let (mut files, mut samples) = (HashMap::new(), 0u32);
        let (mut base, mut found) = (Vec::new(), Vec::new());
        for (source, is_planned) in planned.iter().enumerate() {
            base.push(is_planned.then_some(samples));
            if !is_planned {
                continue;
            }
            each_part(recipe, source, |first, reader, columns| {
                reader.each_block(columns, |place, block| {
                    let (id, offset, ..) = block.place();
                    let count = files.len() as u32;
                    let file = *files.entry(id).or_insert(count);
                    found.push((file, offset, samples + first as u32 + place, source as u16, block));
                })
            })?;
            samples += recipe.sources[source].len() as u32;
        }
        found.sort_unstable_by_key(|(file, offset, sample, ..)| (*file, *offset, *sample));
        let (mut blocks, mut source_of, mut pairs): (Vec<BlockAt>, Vec<u16>, Vec<(u32, u32)>) = Default::default();
        let mut last = None;
        for (file, offset, sample, source, block) in found {
            if last.replace((file, offset)) != Some((file, offset)) {
                blocks.push(block);
                source_of.push(source);
            }
            pairs.push((sample, blocks.len() as u32 - 1));
        }
        pairs.sort_unstable();
        let mut first = vec![0; samples as usize + 1];
        pairs.iter().for_each(|(sample, _)| first[*sample as usize + 1] += 1);
        (1..first.len()).for_each(|at| first[at] += first[at - 1]);
        let list = pairs.into_iter().map(|(_, block)| block).collect();
        Ok(Layout { recipe: recipe.clone(), blocks, source_of, base, first, list, begin, stride })
    }

    /// Return the size of all blocks.
    pub fn bytes(&self) -> u64 {
        self.blocks.iter().map(BlockAt::bytes).sum()
    }

    /// Return the blocks of samples, each one once, in ascending order.
    pub fn of(&self, samples: impl Iterator<Item = (usize, u64)>) -> Vec<u32> {
        let numbers = samples.filter_map(|(source, position)| Some((self.base[source]? as u64 + position) as usize));
        let blocks = numbers.flat_map(|sample| &self.list[self.first[sample] as usize..self.first[sample + 1] as usize]);
        let mut blocks: Vec<u32> = blocks.copied().collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks
    }

    /// Divide blocks by source, so that each part can be fetched from its store.
    pub fn by_source(&self, blocks: &[u32]) -> Vec<(usize, Vec<u32>)> {
        let mut parts: Vec<(usize, Vec<u32>)> = Vec::new();
        for block in blocks {
            let source = usize::from(self.source_of[*block as usize]);
            match parts.iter_mut().find(|(of, _)| *of == source) {
                Some((_, part)) => part.push(*block),
                None => parts.push((source, vec![*block])),
            }
        }
        parts
    }

    /// Collect what the steps of an epoch use, from `begin` on.
    fn uses(&self, begin: u64) -> Uses {
        let of_step = |step: u64| {
            let is_own = step >= self.begin && (step - self.begin).is_multiple_of(self.stride);
            let places: Vec<Place> = if is_own { self.recipe.places(step).2 } else { Vec::new() };
            self.of(places.into_iter().map(|place| (place.source, place.position)))
        };
        Uses::new(self.blocks.len(), begin, (begin..self.recipe.end_of_epoch(begin)).map(of_step))
    }

    /// Add a block and its window to a group, except for blocks that were `taken` before or that are not used.
    fn add_window(&self, group: &mut Group, taken: &mut [bool], block: u32, is_used: impl Fn(usize) -> bool) {
        let window = |block: u32| {
            let (file, offset, ..) = self.blocks[block as usize].place();
            (file, offset / WINDOW_BYTES)
        };
        let own = window(block);
        let before = (0..block).rev().take_while(|other| window(*other) == own);
        let after = (block + 1..self.blocks.len() as u32).take_while(|other| window(*other) == own);
        for block in std::iter::once(block).chain(before).chain(after) {
            if is_used(block as usize) && !std::mem::replace(&mut taken[block as usize], true) {
                group.add(block, self.blocks[block as usize].bytes());
            }
        }
    }
}

/// Why a plan ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The loader has ended.
    Stopped,
    /// There is less memory than before.
    Shrunk,
}

/// Blocks that are fetched together.
#[derive(Debug, Default)]
pub struct Group {
    pub blocks: Vec<u32>,
    pub bytes: u64,
    /// Blocks that give way first. They are not used in the steps from `from` on.
    pub victims: Vec<u32>,
    pub from: u64,
}

impl Group {
    fn add(&mut self, block: u32, bytes: u64) {
        self.blocks.push(block);
        self.bytes += bytes;
    }

    fn add_fetch(&mut self, fetch: Fetch, bytes: u64) {
        self.add(fetch.unit, bytes);
        self.victims.extend(fetch.victims);
        self.from = self.from.max(fetch.from);
    }
}

/// Carries a plan out.
pub trait Dispatch {
    /// Fetch a group, after which all steps below `ready` are ready. May wait.
    fn put(&mut self, group: Group, ready: u64) -> std::result::Result<(), Ended>;
    /// Return whether the loader will read this step.
    fn is_wanted(&self, step: u64) -> bool;
    /// Wait until the loader will read this step.
    fn wait_until_wanted(&mut self, step: u64) -> std::result::Result<(), Ended>;
}

/// Plan one epoch after the other, from step `begin` on, with so much memory. Returns when everything is in memory.
pub fn plan(layout: &Layout, begin: u64, capacity_bytes: u64, out: &mut dyn Dispatch) -> std::result::Result<(), Ended> {
    let current = layout.uses(begin);
    let later = layout.uses(current.steps().end);
    if layout.bytes() <= capacity_bytes {
        plan_all(layout, current, later, out)
    } else {
        plan_part(layout, (current, later), capacity_bytes, out)
    }
}

/// Fetch each block once, when it or a neighbour is first used.
fn plan_all(layout: &Layout, mut current: Uses, mut later: Uses, out: &mut dyn Dispatch) -> std::result::Result<(), Ended> {
    let mut taken = vec![false; layout.blocks.len()];
    loop {
        let (mut group, mut has_fetched) = (Group::default(), false);
        // Nothing is fetched for an epoch that the loader may not read.
        let reads_later = out.is_wanted(later.begin);
        let is_used = |block: usize| current.first_use[block] != NEVER || reads_later && later.first_use[block] != NEVER;
        for step in current.steps() {
            if !out.is_wanted(step) {
                out.put(std::mem::take(&mut group), step)?;
                out.wait_until_wanted(step)?;
            }
            for block in current.of(step).iter().filter(|block| !taken[**block as usize]).copied().collect::<Vec<u32>>() {
                if group.bytes >= WINDOWS_BYTES {
                    out.put(std::mem::take(&mut group), step)?;
                }
                layout.add_window(&mut group, &mut taken, block, is_used);
                has_fetched = true;
            }
            // A step that is ready must not wait for a group to fill.
            if group.bytes >= WINDOWS_BYTES || group.blocks.is_empty() || step + 1 == current.steps().end {
                out.put(std::mem::take(&mut group), step + 1)?;
            }
        }
        if !has_fetched {
            return Ok(());
        }
        let end = later.steps().end;
        current = std::mem::replace(&mut later, layout.uses(end));
    }
}

/// Keep the blocks that are used next, by Belady's choice.
fn plan_part(
    layout: &Layout,
    (mut current, mut later): (Uses, Uses),
    capacity_bytes: u64,
    out: &mut dyn Dispatch,
) -> std::result::Result<(), Ended> {
    let step_bytes = |step| current.of(step).iter().map(|block| layout.blocks[*block as usize].bytes()).sum::<u64>();
    let largest = current.steps().map(step_bytes).max().unwrap_or(0);
    let reserve = (capacity_bytes / PASSING_PART).max(2 * largest).min(capacity_bytes / 2);
    let mut belady = Belady::new(layout.blocks.iter().map(BlockAt::bytes), capacity_bytes, reserve);
    belady.look_ahead(later.begin, &later.first_use);
    let most = (capacity_bytes / PASSING_PART).clamp(FIRST_BYTES / 4, MOST_BYTES);
    let (mut bytes, mut ready) = (FIRST_BYTES.min(most), current.begin);
    loop {
        let next_uses = current.next_uses(&later.first_use);
        let (mut next_uses, mut group) = (next_uses.into_iter(), Group::default());
        for step in current.steps() {
            if !out.is_wanted(step) {
                out.put(std::mem::take(&mut group), step)?;
                out.wait_until_wanted(step)?;
                ready = step;
            }
            // Those that are worth keeping come first: the others have the room that is left.
            let mut uses: Vec<(u32, u64)> = current.of(step).iter().copied().zip(next_uses.by_ref()).collect();
            uses.sort_by_key(|(block, next_use)| !belady.is_worth(*block, *next_use));
            for (block, next_use) in uses {
                // The loader reads on its own what has no room.
                let Some(fetch) = belady.access(block, step, next_use).filter(|fetch| fetch.keep) else { continue };
                // The loader must be able to read the steps that this fetch waits for.
                if fetch.from > ready || group.bytes >= bytes {
                    out.put(std::mem::take(&mut group), step)?;
                    (bytes, ready) = ((2 * bytes).min(most), step);
                }
                group.add_fetch(fetch, layout.blocks[block as usize].bytes());
            }
            if group.bytes >= bytes || group.blocks.is_empty() || step + 1 == current.steps().end {
                out.put(std::mem::take(&mut group), step + 1)?;
                (bytes, ready) = ((2 * bytes).min(most), step + 1);
            }
        }
        let end = later.steps().end;
        current = std::mem::replace(&mut later, layout.uses(end));
        belady.look_ahead(later.begin, &later.first_use);
    }
}

/// What a plan fetches in one epoch.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fetches {
    pub requests: u64,
    pub bytes: u64,
}

/// Counts the fetches of consecutive epochs instead of making them.
struct Counting<'a> {
    layout: &'a Layout,
    fits: bool,
    epochs: Vec<Range<u64>>,
    counted: Vec<Fetches>,
}

impl Dispatch for Counting<'_> {
    fn put(&mut self, group: Group, ready: u64) -> std::result::Result<(), Ended> {
        let at = self.epochs.iter().position(|epoch| ready <= epoch.end).unwrap_or(0);
        let snapshot = |source: usize| &self.layout.recipe.sources[source].snapshot;
        for (source, part) in self.layout.by_source(&group.blocks) {
            let blocks: Vec<BlockAt> = part.iter().map(|block| self.layout.blocks[*block as usize].clone()).collect();
            self.counted[at].requests += count_requests(snapshot(source), &blocks, self.fits) as u64;
        }
        self.counted[at].bytes += group.bytes;
        Ok(())
    }

    fn is_wanted(&self, step: u64) -> bool {
        self.epochs.last().is_none_or(|epoch| step < epoch.end)
    }

    fn wait_until_wanted(&mut self, _step: u64) -> std::result::Result<(), Ended> {
        Err(Ended::Stopped)
    }
}

/// Return what a plan would fetch in the epoch from `begin` on, and in the next one.
pub fn foresee(layout: &Layout, begin: u64, capacity_bytes: u64) -> [Fetches; 2] {
    let end = |begin| layout.recipe.end_of_epoch(begin);
    let epochs = vec![begin..end(begin), end(begin)..end(end(begin))];
    let mut counting = Counting { layout, fits: layout.bytes() <= capacity_bytes, epochs, counted: vec![Fetches::default(); 2] };
    let _ = plan(layout, begin, capacity_bytes, &mut counting);
    [counting.counted[0], counting.counted[1]]
}
