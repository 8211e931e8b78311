//! The units of a plan: runs of pages that the same samples use, and the order in which an epoch uses them. Pure functions without I/O.
//!
//! Samples share pages at their borders. Cutting objects there gives units that are used as a whole, so that one sample's pages can
//! be evicted while its neighbour's stay.

use std::ops::Range;
use std::sync::Arc;

use penstock_error::Result;

use super::belady::NEVER;
use crate::extent::{EXTENT_BYTES, PAGE_BYTES};
use crate::place::mix;

/// What a loader will read. Steps are numbered from 0 and continue in the next epoch without end; how many of them are read is known elsewhere.
pub trait Future: Send + Sync {
    /// Return the number of samples. They are numbered from 0.
    fn samples(&self) -> u32;

    /// Return the objects and the bytes of them that each sample needs. Cost: reads the tails of data files.
    fn needs(&self) -> Result<(Vec<Object>, Vec<Need>)>;

    /// Return the number of steps in an epoch.
    fn epoch_steps(&self) -> u64;

    /// Return which steps this loader reads.
    fn member(&self) -> Member;

    /// Return the samples of a step for a rank. Cost: computes the step's part of the order.
    fn samples_of(&self, step: u64, rank: u64) -> Vec<u32>;
}

/// The steps that one loader of an order reads: a rank's part of every `stride`-th step from `begin` on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    pub rank: u64,
    pub begin: u64,
    pub stride: u64,
}

impl Member {
    pub fn reads(&self, step: u64) -> bool {
        step >= self.begin && (step - self.begin).is_multiple_of(self.stride)
    }
}

/// The bytes that a sample needs of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Need {
    pub sample: u32,
    /// The number of the object in the list of objects.
    pub object: u32,
    pub begin: u64,
    pub end: u64,
}

/// An object that a loader reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    pub name: Arc<str>,
    pub bytes: u64,
}

/// A run of pages of one extent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit {
    pub object: u32,
    pub extent: u32,
    /// Pages of the extent.
    pub pages: Range<u32>,
}

impl Unit {
    pub fn bytes(&self) -> u64 {
        self.pages.len() as u64 * PAGE_BYTES
    }
}

/// The units that each sample uses.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Units {
    pub units: Vec<Unit>,
    /// For each sample, where its runs begin in `runs`.
    first_run: Vec<u32>,
    /// Runs of units.
    runs: Vec<Range<u32>>,
}

impl Units {
    /// Cut the objects into units. Cost: sorts the needs.
    pub fn new(samples: u32, mut needs: Vec<Need>) -> Units {
        needs.retain(|need| need.begin < need.end);
        let page = |byte: u64| byte / PAGE_BYTES;
        // Where a unit begins or ends: the borders of needs in whole pages, and those of extents inside of needs.
        let mut cuts: Vec<(u32, u64)> = Vec::with_capacity(2 * needs.len());
        for need in &needs {
            cuts.extend([(need.object, page(need.begin)), (need.object, page(need.end - 1) + 1)]);
            let extents = need.begin / EXTENT_BYTES + 1..(need.end - 1) / EXTENT_BYTES + 1;
            cuts.extend(extents.map(|extent| (need.object, page(extent * EXTENT_BYTES))));
        }
        cuts.sort_unstable();
        cuts.dedup();
        needs.sort_unstable_by_key(|need| (need.sample, need.object, need.begin));
        // A unit lies between two cuts of an object. Those that no sample uses are numbered, too, but never used.
        let unit = |pair: &[(u32, u64)]| {
            let ((object, begin), (next, end)) = (pair[0], pair[1]);
            let per_extent = EXTENT_BYTES / PAGE_BYTES;
            let (extent, first) = (begin / per_extent, (begin % per_extent) as u32);
            let pages = if next == object { first..first + (end - begin).min(per_extent) as u32 } else { first..first };
            Unit { object, extent: extent as u32, pages }
        };
        let units = cuts.windows(2).map(unit).collect();
        let at = |object: u32, page: u64| cuts.partition_point(|cut| *cut < (object, page)) as u32;
        let (mut first_run, mut runs) = (Vec::with_capacity(samples as usize + 1), Vec::with_capacity(needs.len()));
        let mut rest = needs.into_iter().peekable();
        for sample in 0..=samples {
            first_run.push(runs.len() as u32);
            while let Some(need) = rest.next_if(|need| need.sample == sample) {
                runs.push(at(need.object, page(need.begin))..at(need.object, page(need.end - 1) + 1));
            }
        }
        Units { units, first_run, runs }
    }

    /// Return for each unit whether any sample uses it.
    pub fn is_needed(&self) -> Vec<bool> {
        let mut needed = vec![false; self.units.len()];
        self.runs.iter().flat_map(Clone::clone).for_each(|unit| needed[unit as usize] = true);
        needed
    }

    pub fn bytes(&self, units: &[u32]) -> u64 {
        units.iter().map(|unit| self.units[*unit as usize].bytes()).sum()
    }

    /// Return the units that samples use, each one once, in ascending order.
    pub fn of(&self, samples: impl Iterator<Item = u32>) -> Vec<u32> {
        let runs = samples.flat_map(|sample| {
            let sample = sample as usize;
            &self.runs[self.first_run[sample] as usize..self.first_run[sample + 1] as usize]
        });
        let mut units: Vec<u32> = runs.flat_map(Clone::clone).collect();
        units.sort_unstable();
        units.dedup();
        units
    }
}

/// Return a number that is equal for loaders which read the same bytes in the same order, whatever part of it each one reads. Cost: computes
/// a few steps.
pub fn order_of(future: &dyn Future, objects: &[Object], units: &Units, place: &str) -> u64 {
    let text = |hash: u64, text: &str| text.bytes().fold(mix(hash ^ text.len() as u64), |hash, byte| mix(hash ^ u64::from(byte)));
    let mut hash = objects.iter().fold(text(0, place), |hash, object| text(mix(hash ^ object.bytes), &object.name));
    let runs = units.runs.iter().flat_map(|run| [run.start, run.end]).chain(units.first_run.iter().copied());
    hash = runs.fold(hash, |hash, number| mix(hash ^ u64::from(number)));
    for step in (0..COMPARED_STEPS).map(|part| part * COMPARED_EPOCHS * future.epoch_steps() / COMPARED_STEPS) {
        hash = future.samples_of(step, 0).into_iter().fold(mix(hash ^ step), |hash, sample| mix(hash ^ u64::from(sample)));
    }
    hash
}

/// Orders are the same if these many steps of these many epochs are.
const COMPARED_STEPS: u64 = 32;
const COMPARED_EPOCHS: u64 = 3;

/// The uses of units in consecutive steps, such as those of an epoch.
#[derive(Debug, Default)]
pub struct Uses {
    pub begin: u64,
    /// For each step, where its units begin in `units`.
    first: Vec<u32>,
    units: Vec<u32>,
    /// The step of the first use of each unit.
    pub first_use: Vec<u64>,
}

impl Uses {
    /// Collect the units of the steps from `begin` on.
    pub fn new(units: usize, begin: u64, steps: impl Iterator<Item = Vec<u32>>) -> Uses {
        let mut uses = Uses { begin, first: vec![0], units: Vec::new(), first_use: vec![NEVER; units] };
        for (step, units) in (begin..).zip(steps) {
            for unit in &units {
                let first = &mut uses.first_use[*unit as usize];
                *first = (*first).min(step);
            }
            uses.units.extend(units);
            uses.first.push(uses.units.len() as u32);
        }
        uses
    }

    pub fn steps(&self) -> Range<u64> {
        self.begin..self.begin + self.first.len() as u64 - 1
    }

    /// Return the units of a step.
    pub fn of(&self, step: u64) -> &[u32] {
        let at = (step - self.begin) as usize;
        &self.units[self.first[at] as usize..self.first[at + 1] as usize]
    }

    /// Return, for each use in order, the step of the next use of the same unit. `later` has the first uses after these steps.
    pub fn next_uses(&self, later: &[u64]) -> Vec<u64> {
        let mut seen = later.to_vec();
        let mut next = vec![NEVER; self.units.len()];
        for step in self.steps().rev() {
            let at = (step - self.begin) as usize;
            for index in self.first[at] as usize..self.first[at + 1] as usize {
                next[index] = std::mem::replace(&mut seen[self.units[index] as usize], step);
            }
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn need(sample: u32, object: u32, begin: u64, end: u64) -> Need {
        Need { sample, object, begin, end }
    }

    #[test]
    fn neighbours_share_the_page_at_their_border() {
        let needs = vec![
            need(1, 0, 10_000, 30_000),
            need(0, 0, 24, 10_000),
            need(2, 1, 0, 1),
            need(2, 0, 50_000, 50_000),
            need(3, 0, 90_000, 98_304),
        ];
        let units = Units::new(4, needs);
        let pages = |samples: &[u32]| -> Vec<(u32, Range<u32>)> {
            units
                .of(samples.iter().copied())
                .into_iter()
                .map(|unit| (units.units[unit as usize].object, units.units[unit as usize].pages.clone()))
                .collect()
        };
        assert_eq!(pages(&[0]), [(0, 0..2), (0, 2..3)]);
        assert_eq!(pages(&[1]), [(0, 2..3), (0, 3..8)]);
        assert_eq!(pages(&[1, 0, 1]), [(0, 0..2), (0, 2..3), (0, 3..8)]);
        assert_eq!(pages(&[2]), [(1, 0..1)]);
        assert_eq!(pages(&[3]), [(0, 21..24)]);
    }

    #[test]
    fn units_end_with_their_extents() {
        let units = Units::new(1, vec![need(0, 0, EXTENT_BYTES - 1, 2 * EXTENT_BYTES + 1)]);
        let found: Vec<(u32, Range<u32>)> = units
            .of([0].into_iter())
            .into_iter()
            .map(|unit| (units.units[unit as usize].extent, units.units[unit as usize].pages.clone()))
            .collect();
        assert_eq!(found, [(0, 262_143..262_144), (1, 0..262_144), (2, 0..1)]);
    }

    #[test]
    fn next_uses_continue_in_the_next_epoch() {
        let one = Uses::new(4, 10, [vec![0, 1], vec![1], vec![2]].into_iter());
        let two = Uses::new(4, 13, [vec![2], vec![0], vec![1, 3]].into_iter());
        assert_eq!((one.steps(), one.of(11), one.of(12)), (10..13, &[1][..], &[2][..]));
        assert_eq!(one.next_uses(&two.first_use), [14, 11, 15, 13]);
        assert_eq!(two.next_uses(&[NEVER; 4]), [NEVER; 4]);
        assert_eq!(one.first_use, [10, 10, 12, NEVER]);
    }
}
