//! The page runs of a plan: consecutive pages that the same samples use, and the order in which an epoch uses them. Pure functions without I/O.
//!
//! Samples share pages at their borders. Cutting objects there gives runs that are used as a whole, so that one sample's pages can
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

/// Consecutive pages of one extent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PageRun {
    pub object: u32,
    pub extent: u32,
    /// Pages of the extent.
    pub pages: Range<u32>,
}

impl PageRun {
    pub fn bytes(&self) -> u64 {
        self.pages.len() as u64 * PAGE_BYTES
    }
}

/// The page runs that each sample uses.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct PageRuns {
    pub runs: Vec<PageRun>,
    /// For each sample, where its ranges begin in `ranges`.
    first_range: Vec<u32>,
    /// Ranges of runs.
    ranges: Vec<Range<u32>>,
}

impl PageRuns {
    /// Cut the objects into runs. Cost: sorts the needs.
    pub fn new(samples: u32, mut needs: Vec<Need>) -> PageRuns {
        needs.retain(|need| need.begin < need.end);
        let page = |byte: u64| byte / PAGE_BYTES;
        // Where a run begins or ends: the borders of needs in whole pages, and those of extents inside of needs.
        let mut cuts: Vec<(u32, u64)> = Vec::with_capacity(2 * needs.len());
        for need in &needs {
            cuts.extend([(need.object, page(need.begin)), (need.object, page(need.end - 1) + 1)]);
            let extents = need.begin / EXTENT_BYTES + 1..(need.end - 1) / EXTENT_BYTES + 1;
            cuts.extend(extents.map(|extent| (need.object, page(extent * EXTENT_BYTES))));
        }
        cuts.sort_unstable();
        cuts.dedup();
        needs.sort_unstable_by_key(|need| (need.sample, need.object, need.begin));
        // A run lies between two cuts of an object. Those that no sample uses are numbered, too, but never used.
        let run = |pair: &[(u32, u64)]| {
            let ((object, begin), (next, end)) = (pair[0], pair[1]);
            let per_extent = EXTENT_BYTES / PAGE_BYTES;
            let (extent, first) = (begin / per_extent, (begin % per_extent) as u32);
            let pages = if next == object { first..first + (end - begin).min(per_extent) as u32 } else { first..first };
            PageRun { object, extent: extent as u32, pages }
        };
        let runs = cuts.windows(2).map(run).collect();
        let at = |object: u32, page: u64| cuts.partition_point(|cut| *cut < (object, page)) as u32;
        let (mut first_range, mut ranges) = (Vec::with_capacity(samples as usize + 1), Vec::with_capacity(needs.len()));
        let mut rest = needs.into_iter().peekable();
        for sample in 0..=samples {
            first_range.push(ranges.len() as u32);
            while let Some(need) = rest.next_if(|need| need.sample == sample) {
                ranges.push(at(need.object, page(need.begin))..at(need.object, page(need.end - 1) + 1));
            }
        }
        PageRuns { runs, first_range, ranges }
    }

    /// Return for each run whether any sample uses it.
    pub fn is_needed(&self) -> Vec<bool> {
        let mut needed = vec![false; self.runs.len()];
        self.ranges.iter().flat_map(Clone::clone).for_each(|run| needed[run as usize] = true);
        needed
    }

    pub fn bytes(&self, runs: &[u32]) -> u64 {
        runs.iter().map(|run| self.runs[*run as usize].bytes()).sum()
    }

    /// Return the runs that samples use, each one once, in ascending order.
    pub fn of(&self, samples: impl Iterator<Item = u32>) -> Vec<u32> {
        let ranges = samples.flat_map(|sample| {
            let sample = sample as usize;
            &self.ranges[self.first_range[sample] as usize..self.first_range[sample + 1] as usize]
        });
        let mut runs: Vec<u32> = ranges.flat_map(Clone::clone).collect();
        runs.sort_unstable();
        runs.dedup();
        runs
    }
}

/// Return a number that is equal for loaders which read the same bytes in the same order, whatever part of it each one reads. Cost: computes
/// a few steps.
pub fn order_of(future: &dyn Future, objects: &[Object], runs: &PageRuns, place: &str) -> u64 {
    let mut hash =
        objects.iter().fold(mix_text(0, place), |hash, object| mix_text(mix(hash ^ object.bytes), &object.name));
    let ranges = runs.ranges.iter().flat_map(|range| [range.start, range.end]).chain(runs.first_range.iter().copied());
    hash = ranges.fold(hash, |hash, number| mix(hash ^ u64::from(number)));
    for step in (0..COMPARED_STEPS).map(|part| part * COMPARED_EPOCHS * future.epoch_steps() / COMPARED_STEPS) {
        hash =
            future.samples_of(step, 0).into_iter().fold(mix(hash ^ step), |hash, sample| mix(hash ^ u64::from(sample)));
    }
    hash
}

fn mix_text(hash: u64, text: &str) -> u64 {
    text.bytes().fold(mix(hash ^ text.len() as u64), |hash, byte| mix(hash ^ u64::from(byte)))
}

/// Orders are the same if these many steps of these many epochs are.
const COMPARED_STEPS: u64 = 32;
const COMPARED_EPOCHS: u64 = 3;

/// The uses of runs in consecutive steps, such as those of an epoch.
#[derive(Debug, Default)]
pub struct Uses {
    pub begin: u64,
    /// For each step, where its runs begin in `runs`.
    first: Vec<u32>,
    runs: Vec<u32>,
    /// The step of the first use of each run.
    pub first_use: Vec<u64>,
}

impl Uses {
    /// Collect the runs of the steps from `begin` on.
    pub fn new(runs: usize, begin: u64, steps: impl Iterator<Item = Vec<u32>>) -> Uses {
        let mut uses = Uses { begin, first: vec![0], runs: Vec::new(), first_use: vec![NEVER; runs] };
        for (step, runs) in (begin..).zip(steps) {
            for run in &runs {
                let first = &mut uses.first_use[*run as usize];
                *first = (*first).min(step);
            }
            uses.runs.extend(runs);
            uses.first.push(uses.runs.len() as u32);
        }
        uses
    }

    pub fn steps(&self) -> Range<u64> {
        self.begin..self.begin + self.first.len() as u64 - 1
    }

    /// Return the runs of a step.
    pub fn of(&self, step: u64) -> &[u32] {
        let at = (step - self.begin) as usize;
        &self.runs[self.first[at] as usize..self.first[at + 1] as usize]
    }

    /// Return, for each use in order, the step of the next use of the same run. `later` has the first uses after these steps.
    pub fn next_uses(&self, later: &[u64]) -> Vec<u64> {
        let mut seen = later.to_vec();
        let mut next = vec![NEVER; self.runs.len()];
        for step in self.steps().rev() {
            let at = (step - self.begin) as usize;
            for index in self.first[at] as usize..self.first[at + 1] as usize {
                next[index] = std::mem::replace(&mut seen[self.runs[index] as usize], step);
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
        let runs = PageRuns::new(4, needs);
        let pages = |samples: &[u32]| -> Vec<(u32, Range<u32>)> {
            runs.of(samples.iter().copied())
                .into_iter()
                .map(|run| (runs.runs[run as usize].object, runs.runs[run as usize].pages.clone()))
                .collect()
        };
        assert_eq!(pages(&[0]), [(0, 0..2), (0, 2..3)]);
        assert_eq!(pages(&[1]), [(0, 2..3), (0, 3..8)]);
        assert_eq!(pages(&[1, 0, 1]), [(0, 0..2), (0, 2..3), (0, 3..8)]);
        assert_eq!(pages(&[2]), [(1, 0..1)]);
        assert_eq!(pages(&[3]), [(0, 21..24)]);
    }

    #[test]
    fn runs_end_with_their_extents() {
        let runs = PageRuns::new(1, vec![need(0, 0, EXTENT_BYTES - 1, 2 * EXTENT_BYTES + 1)]);
        let found: Vec<(u32, Range<u32>)> = runs
            .of([0].into_iter())
            .into_iter()
            .map(|run| (runs.runs[run as usize].extent, runs.runs[run as usize].pages.clone()))
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
