//! Which blocks a loader keeps if not all of them fit. Pure functions without I/O.
//!
//! Of the blocks that were used, those whose next use is the latest give way, which costs the fewest fetches possible (Belady 1966). A block that
//! the next epoch uses too late to fit is not kept at all. The room that this leaves is for neighbours, which are fetched before they are used.

use std::collections::BinaryHeap;

use penstock_cache::{NEVER, Uses};

/// The room for neighbours is known for each of so many parts of an epoch.
const PARTS: u64 = 64;

/// The blocks that were used and are kept.
#[derive(Clone, Default)]
struct Used {
    /// For each block, the step of its next use if it is kept, or NEVER.
    next_use: Vec<u64>,
    /// Kept blocks by their next use. Some entries are outdated.
    by_next_use: BinaryHeap<(u64, u32)>,
    bytes: u64,
}

impl Used {
    /// Keep a block for its next use, as far as there is room. Returns the blocks that are not kept any more.
    fn put(&mut self, block: u32, next_use: u64, sizes: &[u64], room_bytes: u64) -> Vec<u32> {
        let before = std::mem::replace(&mut self.next_use[block as usize], next_use);
        if before != NEVER {
            self.bytes -= sizes[block as usize];
        }
        if next_use == NEVER {
            return vec![block];
        }
        self.bytes += sizes[block as usize];
        self.by_next_use.push((next_use, block));
        let mut gone = Vec::new();
        while self.bytes > room_bytes
            && let Some((next_use, block)) = self.by_next_use.pop()
        {
            let found = &mut self.next_use[block as usize];
            if *found == next_use {
                *found = NEVER;
                self.bytes -= sizes[block as usize];
                gone.push(block);
            }
        }
        if self.by_next_use.len() > 64 + 2 * self.next_use.len() {
            self.by_next_use.retain(|(next_use, block)| self.next_use[*block as usize] == *next_use);
        }
        gone
    }
}

/// What is kept of blocks whose uses are known for this epoch and the next one.
pub struct Choice {
    sizes: Vec<u64>,
    room_bytes: u64,
    used: Used,
    current: Uses,
    later: Uses,
    /// For each use in this epoch, the step of the block's next use, or NEVER if it comes too late to keep the block.
    next_uses: Vec<u64>,
    /// How many of these uses have happened.
    at: usize,
    /// For each block, the step of its next use.
    upcoming: Vec<u64>,
    /// Whether a block was fetched before its use.
    is_early: Vec<bool>,
    /// The room for such blocks in each part of this epoch.
    early_bytes: Vec<u64>,
}

impl Choice {
    /// Begin with blocks of these sizes, none of which is kept.
    pub fn new(sizes: Vec<u64>, room_bytes: u64) -> Choice {
        let used = Used { next_use: vec![NEVER; sizes.len()], ..Used::default() };
        let (upcoming, is_early) = (vec![NEVER; sizes.len()], vec![false; sizes.len()]);
        let (current, later) = (Uses::new(0, 0, std::iter::empty()), Uses::new(0, 0, std::iter::empty()));
        Choice {
            sizes,
            room_bytes,
            used,
            current,
            later,
            next_uses: Vec::new(),
            at: 0,
            upcoming,
            is_early,
            early_bytes: Vec::new(),
        }
    }

    /// Return the memory that is needed to choose among so many blocks with so many uses in an epoch.
    pub fn known_bytes(blocks: u64, uses: u64) -> u64 {
        // Lists of blocks, two heaps at their largest, and the uses of two epochs.
        blocks * (8 * 6 + 2 * 2 * 16) + uses * (2 * 4 + 8)
    }

    pub fn room_bytes(&self) -> u64 {
        self.room_bytes
    }

    /// Continue with the epoch of this step. `uses` returns the uses in the epoch of a step, from this step on.
    pub fn continue_with(&mut self, step: u64, uses: impl Fn(u64) -> Uses) {
        if self.current.steps().contains(&step) {
            return;
        }
        self.current = std::mem::take(&mut self.later);
        if !self.current.steps().contains(&step) {
            self.current = uses(step);
        }
        self.later = uses(self.current.steps().end);
        // Of the next epoch, the blocks that are used first are worth keeping, as many as fit.
        let mut first: Vec<(u64, usize)> =
            self.later.first_use.iter().copied().zip(0..).filter(|(step, _)| *step != NEVER).collect();
        first.sort_unstable();
        let mut room_bytes = self.room_bytes;
        let fits = first.iter().take_while(|(_, block)| {
            let rest = room_bytes.checked_sub(self.sizes[*block]);
            room_bytes = rest.unwrap_or(0);
            rest.is_some()
        });
        let horizon = first.get(fits.count()).map_or(NEVER, |(step, _)| *step);
        self.next_uses = self.current.next_uses(&self.later.first_use);
        self.next_uses.iter_mut().filter(|next_use| **next_use >= horizon).for_each(|next_use| *next_use = NEVER);
        self.at = 0;
        let both = self.current.first_use.iter().zip(&self.later.first_use);
        self.upcoming = both.map(|(one, other)| *one.min(other)).collect();
        let (mut used, mut next_uses) = (self.used.clone(), self.next_uses.iter());
        let mut most_bytes = vec![0; PARTS as usize];
        for step in self.current.steps() {
            let most = &mut most_bytes[self.part(step)];
            *most = used.bytes.max(*most);
            for (block, next_use) in self.current.of(step).iter().zip(&mut next_uses) {
                used.put(*block, *next_use, &self.sizes, self.room_bytes);
                *most = used.bytes.max(*most);
            }
        }
        self.early_bytes = most_bytes.into_iter().map(|most| self.room_bytes - most).collect();
    }

    fn part(&self, step: u64) -> usize {
        let steps = self.current.steps();
        ((step - steps.start) * PARTS / (steps.end - steps.start).max(1)) as usize
    }

    /// Return the blocks of a step of this epoch.
    pub fn of(&self, step: u64) -> Vec<u32> {
        self.current.of(step).to_vec()
    }

    /// Use the blocks of a step, the steps in their order. Returns blocks that are not kept any more.
    pub fn has_used(&mut self, step: u64) -> Vec<u32> {
        let mut gone = Vec::new();
        for block in self.current.of(step) {
            let next_use = self.next_uses[self.at];
            self.at += 1;
            self.is_early[*block as usize] = false;
            self.upcoming[*block as usize] = next_use;
            gone.extend(self.used.put(*block, next_use, &self.sizes, self.room_bytes));
        }
        gone
    }

    /// Return whether a block is fetched at this step for a later one, below `end`, because there is room until then.
    pub fn may_fetch_early(&mut self, block: u32, step: u64, end: u64) -> bool {
        let (upcoming, bytes) = (self.upcoming[block as usize], self.sizes[block as usize]);
        if upcoming >= end.min(self.current.steps().end) || upcoming < step || self.keeps(block) {
            return false;
        }
        let parts = self.part(step)..self.part(upcoming) + 1;
        let fits = self.early_bytes[parts.clone()].iter().all(|room| *room >= bytes);
        if fits {
            self.early_bytes[parts].iter_mut().for_each(|room| *room -= bytes);
            self.is_early[block as usize] = true;
        }
        fits
    }

    /// Return whether a block is kept for a later step.
    pub fn keeps(&self, block: u32) -> bool {
        self.used.next_use[block as usize] != NEVER || self.is_early[block as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Blocks in windows of four, and the blocks of each step of each epoch.
    fn read(sizes: &[u64], room_bytes: u64, epochs: &[Vec<Vec<u32>>]) -> Vec<(u64, u64)> {
        let steps = epochs[0].len() as u64;
        let mut choice = Choice::new(sizes.to_vec(), room_bytes);
        let mut is_here = vec![false; sizes.len()];
        let mut fetched = vec![(0, 0); epochs.len()];
        for step in 0..steps * (epochs.len() as u64 - 1) {
            choice.continue_with(step, |from| {
                let epoch = &epochs[(from / steps) as usize];
                Uses::new(sizes.len(), from, epoch[(from % steps) as usize..].iter().cloned())
            });
            let wanted = choice.of(step);
            assert_eq!(wanted, epochs[(step / steps) as usize][(step % steps) as usize]);
            for block in &wanted {
                if is_here[*block as usize] {
                    continue;
                }
                let counts = &mut fetched[(step / steps) as usize];
                counts.0 += 1;
                for other in (block / 4 * 4..block / 4 * 4 + 4).filter(|other| (*other as usize) < sizes.len()) {
                    if !is_here[other as usize]
                        && (other == *block || wanted.contains(&other) || choice.may_fetch_early(other, step, u64::MAX))
                    {
                        is_here[other as usize] = true;
                        counts.1 += sizes[other as usize];
                    }
                }
            }
            choice.has_used(step);
            // What is kept is here, and nothing else remains.
            for block in 0..sizes.len() as u32 {
                assert!(is_here[block as usize] || !choice.keeps(block));
                is_here[block as usize] = choice.keeps(block);
            }
            let kept: u64 = (0..sizes.len()).filter(|block| is_here[*block]).map(|block| sizes[block]).sum();
            assert!(kept <= room_bytes, "{kept} of {room_bytes}");
        }
        fetched
    }

    /// Return the fewest bytes that must be fetched if blocks of one size may also be used without being kept.
    fn fewest(epochs: &[Vec<Vec<u32>>], room: usize) -> u64 {
        let steps: Vec<&Vec<u32>> = epochs.iter().flatten().collect();
        let next = |block: u32, after: usize| {
            (after + 1..steps.len()).find(|step| steps[*step].contains(&block)).unwrap_or(usize::MAX)
        };
        let (mut kept, mut fetched): (Vec<u32>, u64) = (Vec::new(), 0);
        for (at, wanted) in steps.iter().enumerate() {
            fetched += wanted.iter().filter(|block| !kept.contains(block)).count() as u64;
            let new: Vec<u32> = wanted.iter().copied().filter(|block| !kept.contains(block)).collect();
            kept.extend(new);
            kept.sort_by_key(|block| next(*block, at));
            kept.truncate(room);
        }
        fetched
    }

    fn shuffled(blocks: u32, batch: usize, epochs: usize, seed: u64) -> Vec<Vec<Vec<u32>>> {
        let mut state = seed | 1;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let epoch = |_| {
            let mut order: Vec<u32> = (0..blocks).collect();
            (1..order.len()).rev().for_each(|at| order.swap(at, random(at + 1)));
            let sorted = |part: &[u32]| {
                let mut part = part.to_vec();
                part.sort_unstable();
                part
            };
            order.chunks(batch).map(sorted).collect()
        };
        (0..epochs).map(epoch).collect()
    }

    #[test]
    fn shuffled_epochs_fetch_what_does_not_fit_once() {
        for room in [100, 200, 300] {
            let epochs = shuffled(400, 8, 4, room);
            let fetched = read(&vec![10; 400], room * 10, &epochs);
            assert_eq!(fetched[0].1, 4000, "each block once");
            for (requests, bytes) in &fetched[1..3] {
                assert!(*bytes <= 10 * (400 - room + 8), "{bytes} with room for {room} blocks");
                assert!(*requests < bytes / 10, "neighbours come together");
            }
            assert!(fetched[0].0 < 300, "{} requests", fetched[0].0);
            let (all, least) =
                (fetched[..3].iter().map(|(_, bytes)| bytes / 10).sum::<u64>(), fewest(&epochs, room as usize));
            assert!(all as f64 <= least as f64 * 1.15, "{all} of at least {least}");
        }
    }

    proptest! {
        #[test]
        fn all_blocks_are_here_when_they_are_used(
            sizes in proptest::collection::vec(0u64..50, 1..40), room in 0u64..600, seed: u64, batch in 1usize..9, repeats in 0usize..20,
        ) {
            let mut epochs = shuffled(sizes.len() as u32, batch, 4, seed);
            // Some blocks have several samples.
            for (at, step) in epochs.iter_mut().flatten().enumerate() {
                if at % 3 == 0 && repeats > 0 {
                    step.push((seed as usize % repeats % sizes.len()) as u32);
                    step.sort_unstable();
                    step.dedup();
                }
            }
            read(&sizes, room, &epochs);
        }
    }
}
