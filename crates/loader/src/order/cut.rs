//! Pure functions that map steps to draws: they cut an epoch into batches, and each batch into one part per rank.

use std::ops::Range;

use penstock_error::{Error, Result};
use serde::{Deserialize, Serialize};

/// How to handle the last batch of an epoch if the samples do not fill it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LastBatch {
    /// The batch is short. Every rank gets the same number of samples. Surplus samples repeat others and are marked as invalid.
    Short,
    /// The batch is dropped.
    Drop,
    /// The batch is padded to full size with repeated samples, which are marked as invalid.
    Pad,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchCut {
    /// Draws per epoch.
    pub draws: u64,
    pub global_batch: u64,
    pub last: LastBatch,
    pub rank: u64,
    pub world_size: u64,
}

/// The samples that a rank gets in a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankDraws {
    /// Draws that are not repeated, one per sample.
    pub draws: Range<u64>,
    /// Samples that repeat draws of this step and are marked as invalid: (place, draw).
    pub surplus: Vec<(usize, u64)>,
}

impl RankDraws {
    pub fn all_draws(&self) -> impl Iterator<Item = u64> {
        self.draws.clone().chain(self.surplus.iter().map(|(_, draw)| *draw))
    }
}

impl BatchCut {
    pub fn new(draws: u64, global_batch: u64, last: LastBatch, rank: u64, world_size: u64) -> Result<BatchCut> {
        let invalid = |text: String| Error::new("invalid-argument", text);
        if world_size == 0 || rank >= world_size {
            return Err(invalid(format!(
                "rank={rank} with world_size={world_size}: expected a rank from 0 to world_size - 1"
            )));
        }
        if global_batch == 0 {
            return Err(invalid("global_batch_size=0, expected at least 1".into()));
        }
        if !global_batch.is_multiple_of(world_size) {
            let (below, above) = (global_batch / world_size * world_size, global_batch.next_multiple_of(world_size));
            let nearest = if below > 0 && global_batch - below < above - global_batch { below } else { above };
            return Err(invalid(format!("global_batch_size={global_batch} is not divisible by {world_size} ranks"))
                .hint(format!("the nearest multiple is {nearest}")));
        }
        Ok(BatchCut { draws, global_batch, last, rank, world_size })
    }

    pub fn batch(&self) -> u64 {
        self.global_batch / self.world_size
    }

    /// Count the steps in an epoch.
    pub fn steps(&self) -> u64 {
        self.steps_from(0)
    }

    /// Count the remaining steps in an epoch whose next draw is `draw`.
    pub fn steps_from(&self, draw: u64) -> u64 {
        let left = self.draws.saturating_sub(draw);
        match self.last {
            LastBatch::Drop => left / self.global_batch,
            _ => left.div_ceil(self.global_batch),
        }
    }

    /// Return whether this rank gets draw `draw` of an epoch whose first global batch begins with draw `base`.
    pub fn is_mine(&self, draw: u64, base: u64) -> bool {
        let Some(behind) = draw.checked_sub(base) else { return false };
        if behind / self.global_batch >= self.steps_from(base) {
            return false;
        }
        let begin = base + behind / self.global_batch * self.global_batch;
        let (_, each) = self.shares(begin);
        (draw - begin) / each == self.rank
    }

    /// Return the size of the global batch that begins with draw `begin`, and the number of samples per rank.
    fn shares(&self, begin: u64) -> (u64, u64) {
        let there = (self.draws - begin).min(self.global_batch);
        match self.last {
            LastBatch::Short => (there, there.div_ceil(self.world_size)),
            _ => (there, self.batch()),
        }
    }

    /// Return this rank's part of the global batch that begins with draw `begin` of an epoch.
    pub fn part(&self, begin: u64) -> RankDraws {
        let (there, each) = self.shares(begin);
        let (first, end) = (self.rank * each, (self.rank + 1) * each);
        let (low, high) = (first.min(there), end.min(there));
        let surplus = (high.max(first)..end).map(|slot| ((slot - first) as usize, begin + slot % there)).collect();
        RankDraws { draws: begin + low..begin + high, surplus }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranks_share_every_step_without_gap_or_double(draws in 1u64..500, each in 1u64..20, world in 1u64..7, last in 0usize..3) {
            let last = [LastBatch::Short, LastBatch::Drop, LastBatch::Pad][last];
            let cuts: Vec<BatchCut> = (0..world).map(|rank| BatchCut::new(draws, each * world, last, rank, world).unwrap()).collect();
            let mut next = 0;
            for step in 0..cuts[0].steps() {
                let parts: Vec<RankDraws> = cuts.iter().map(|cut| cut.part(step * each * world)).collect();
                prop_assert!(parts.iter().all(|part| part.all_draws().count() == parts[0].all_draws().count()), "ranks differ: {:?}", parts);
                for (part, cut) in parts.iter().zip(&cuts) {
                    prop_assert!(part.draws.clone().all(|draw| cut.is_mine(draw, 0)));
                    if !part.draws.is_empty() {
                        prop_assert_eq!(part.draws.start, next);
                        next = part.draws.end;
                    }
                    prop_assert!(part.surplus.iter().all(|(place, draw)| *place < part.all_draws().count() && *draw < draws));
                }
                if last == LastBatch::Pad {
                    prop_assert_eq!(parts[0].all_draws().count() as u64, each);
                }
            }
            prop_assert_eq!(next, if last == LastBatch::Drop { draws / (each * world) * each * world } else { draws });
        }
    }

    #[test]
    fn the_nearest_batch_that_divides_is_named() {
        let error = BatchCut::new(100, 10, LastBatch::Short, 0, 3).unwrap_err();
        assert_eq!(error.hint_text(), Some("the nearest multiple is 9"));
        assert_eq!(
            BatchCut::new(100, 2, LastBatch::Short, 0, 3).unwrap_err().hint_text(),
            Some("the nearest multiple is 3")
        );
        assert!(BatchCut::new(100, 6, LastBatch::Short, 3, 3).is_err());
    }
}
