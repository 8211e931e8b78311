//! Which blocks the samples of a loader need, and which of these are neighbours.

use std::collections::HashMap;
use std::ops::Range;

use penstock_dataset::BlockAt;
use penstock_error::Result;
use penstock_format::schema::ColumnSpec;

use crate::engine::ahead::each_part;
use crate::engine::recipe::Recipe;
use crate::order::mixture::SamplePlace;

/// Blocks are fetched with their neighbours in windows of this length. Stores send one long range faster than many short ones.
const WINDOW_BYTES: u64 = 1 << 20;
/// What must be known of a block, in bytes.
const BLOCK_BYTES: u64 = 128;

/// The blocks that the samples of some sources need.
pub struct Layout {
    /// Blocks in the order in which they are stored, each with its source and its window.
    pub blocks: Vec<(BlockAt, usize, usize)>,
    pub windows: Vec<Range<usize>>,
    /// For each source, the number of its first sample, or None if it is not kept.
    base: Vec<Option<usize>>,
    /// For each sample, where its blocks begin in `list`.
    first: Vec<u32>,
    list: Vec<u32>,
}

impl Layout {
    /// Look up the blocks of these columns of each source. Cost: reads the tails of all their data files.
    pub fn new(recipe: &Recipe, columns: &[Vec<u64>]) -> Result<Layout> {
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

    /// Return the memory that all blocks need.
    pub fn bytes(&self) -> u64 {
        self.blocks.iter().map(|(block, ..)| block.bytes()).sum()
    }

    /// Return the memory for what must be known of the blocks.
    pub fn known_bytes(&self) -> u64 {
        self.blocks.len() as u64 * BLOCK_BYTES + 4 * (self.first.len() + self.list.len()) as u64
    }

    /// Return how often samples use blocks.
    pub fn uses(&self) -> u64 {
        self.list.len() as u64
    }

    /// Return the blocks of samples, each one once, in ascending order.
    pub fn of(&self, places: &[SamplePlace]) -> Vec<u32> {
        let samples = places.iter().filter_map(|place| Some(self.base[place.source]? + place.position as usize));
        let blocks =
            samples.flat_map(|sample| &self.list[self.first[sample] as usize..self.first[sample + 1] as usize]);
        let mut blocks: Vec<u32> = blocks.copied().collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks
    }

    /// Return the blocks of a step's samples.
    pub fn of_step(&self, recipe: &Recipe, step: u64) -> Vec<u32> {
        self.of(&recipe.samples(step).places)
    }

    /// Return blocks of a group, and their source.
    pub fn group(&self, group: &[u32]) -> (usize, Vec<BlockAt>) {
        (self.blocks[group[0] as usize].1, group.iter().map(|block| self.blocks[*block as usize].0.clone()).collect())
    }
}
