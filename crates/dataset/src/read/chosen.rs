//! Choose samples of a view by their row ids: splits, and random samples. Row ids are read in chunks, and each part is a mask.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use penstock_error::Result;

use super::plan::Plan;
use crate::parallel;
use crate::selection::spread::{Bound, GROUP, SAMPLE, hash, mixed, turn_of_class};
use crate::selection::{Bits, Selection, Split, Stride};
use crate::snapshot::Snapshot;

/// Samples whose row ids are looked up at a time: a whole number of words of a mask.
const CHUNK: u64 = 1 << 16;
/// Bytes that a sample's row id takes while it is looked up.
const LOOKED_UP_BYTES: u64 = 40;

/// Call `visit` for each chunk of a selection, with the index of its first sample and the row ids, and return the results in order.
fn each_chunk<T: Send>(snapshot: &Snapshot, selection: &Selection, visit: impl Fn(u64, Vec<i64>) -> T + Sync) -> Result<Vec<T>> {
    let len = selection.len();
    let of_chunk = |number: usize| {
        let first = number as u64 * CHUNK;
        let positions = selection.positions(Stride { first, step: 1, count: CHUNK.min(len - first) });
        Ok(visit(first, Plan::new(snapshot, positions)?.row_ids()))
    };
    parallel::map(len.div_ceil(CHUNK) as usize, (len * LOOKED_UP_BYTES) as usize, of_chunk)?.into_iter().collect()
}

/// Divide a selection into `parts` masks. `part_of` gets the index of a sample and its row id.
fn masks(snapshot: &Snapshot, selection: &Selection, parts: usize, part_of: impl Fn(u64, i64) -> usize + Sync) -> Result<Vec<Selection>> {
    let chunks = each_chunk(snapshot, selection, |first, ids| {
        let mut words = vec![vec![0u64; ids.len().div_ceil(64)]; parts];
        (0..).zip(ids).for_each(|(place, id)| words[part_of(first + place, id)][(place / 64) as usize] |= 1 << (place % 64));
        words
    })?;
    let mask = |part: usize| {
        let words = chunks.iter().flat_map(|words| words[part].iter().copied()).collect();
        selection.mask(Bits::new(selection.len(), words))
    };
    Ok((0..parts).map(mask).collect())
}

/// Split a selection at random, at ascending bounds from 0 to 1. Returns one part more than there are bounds.
///
/// Cost: as for `Split::all` if nothing was selected before. Otherwise, reads all row ids, and holds a bit for each sample and part.
pub fn split(snapshot: &Snapshot, selection: &Selection, seed: u64, bounds: &[f64]) -> Result<Vec<Selection>> {
    if selection.is_all() {
        return Ok(Split::all(snapshot, seed, bounds)?.into_iter().map(Selection::split).collect());
    }
    let bounds: Vec<Bound> = bounds.iter().map(|value| Bound::new(seed, *value)).collect();
    let part_of = |_, id| bounds.iter().position(|bound| bound.is_below(id)).unwrap_or(bounds.len());
    masks(snapshot, selection, bounds.len() + 1, part_of)
}

/// Select the `count` samples with the smallest hashes, in the order of hashes. Cost: reads all row ids; holds 32 bytes for each sample.
pub fn sample(snapshot: &Snapshot, selection: &Selection, seed: u64, count: u64) -> Result<Selection> {
    let (begin, count) = (hash(&[SAMPLE, seed]), count as usize);
    let least = |mut found: Vec<(u64, u64)>| {
        if found.len() > count {
            found.select_nth_unstable(count);
            found.truncate(count);
        }
        found
    };
    let mut all = Vec::new();
    // Some chunks at a time, so that few samples are held that others turn out to be less than.
    for first in (0..selection.len()).step_by((CHUNKS * CHUNK) as usize) {
        let part = selection.part(&[Stride { first, step: 1, count: (CHUNKS * CHUNK).min(selection.len() - first) }]);
        let hashed = |begins: u64, ids: Vec<i64>| {
            least((first + begins..).zip(ids).map(|(index, id)| (mixed(begin, id.cast_unsigned()), index)).collect())
        };
        all.extend(each_chunk(snapshot, &part, hashed)?.into_iter().flatten());
        all = least(all);
    }
    all.sort_unstable();
    Ok(selection.pick(all.into_iter().map(|(_, index)| index).collect()))
}

/// Chunks that `sample` looks at together.
const CHUNKS: u64 = 64;

/// The classes of samples: a code for each sample, and the class of each code.
pub struct Classes<'a, C> {
    pub codes: &'a [C],
    pub class_of: &'a [u32],
    /// A number for each class, from which its turn is drawn.
    pub numbers: &'a [i64],
}

impl<C: Copy + Into<u32> + Sync> Classes<'_, C> {
    fn of(&self, index: u64) -> usize {
        self.class_of[self.codes[index as usize].into() as usize] as usize
    }
}

/// Divide a selection into `parts` by the code of each sample, given the part of each code.
pub fn by_code<C: Copy + Into<u32> + Sync>(selection: &Selection, (codes, part_of): (&[C], &[u32]), parts: usize) -> Vec<Selection> {
    let mut words = vec![vec![0u64; codes.len().div_ceil(64)]; parts];
    for (index, code) in codes.iter().enumerate() {
        words[part_of[(*code).into() as usize] as usize][index / 64] |= 1 << (index % 64);
    }
    words.into_iter().map(|words| selection.mask(Bits::new(codes.len() as u64, words))).collect()
}

/// Counts of the hashes of classes by the upper bits of hashes: at most so many, or two for each class.
const MOST_COUNTS_LOG2: u32 = 18;

/// Split each class at ascending bounds from 0 to 1. The samples of a class are ordered by the hashes of their row ids.
///
/// The samples of a class have places from 0 to 1 in that order. Each class begins at a random part of a sample, so that parts of small classes
/// are as large on average as their fractions. Cost: reads all row ids three times; holds a bit for each sample and part, and 1 MiB for each
/// thread.
pub fn by_class<C: Copy + Into<u32> + Sync>(
    snapshot: &Snapshot,
    selection: &Selection,
    classes: &Classes<'_, C>,
    seed: u64,
    bounds: &[f64],
) -> Result<Vec<Selection>> {
    let begin = hash(&[GROUP, seed]);
    let hashed = |id: i64| mixed(begin, id.cast_unsigned());
    let class_bits = (classes.numbers.len() as u64).next_power_of_two().trailing_zeros();
    let bits = MOST_COUNTS_LOG2.saturating_sub(class_bits).max(1);
    let cell = |class: usize, hash: u64| class << bits | (hash >> (64 - bits)) as usize;
    // First, count hashes.
    let counts: Vec<AtomicU32> = (0..classes.numbers.len() << bits).map(|_| AtomicU32::new(0)).collect();
    each_chunk(snapshot, selection, |first, ids| {
        (first..).zip(ids).for_each(|(index, id)| {
            counts[cell(classes.of(index), hashed(id))].fetch_add(1, Relaxed);
        });
    })?;
    // Then find the cell of the first sample of each class that is not below a bound, and its rank there.
    let mut sought = vec![];
    let mut is_sought = vec![false; counts.len()];
    for (class, number) in classes.numbers.iter().enumerate() {
        let counts = &counts[class << bits..(class + 1) << bits];
        let (count, turn) = (counts.iter().map(|count| u64::from(count.load(Relaxed))).sum::<u64>(), turn_of_class(seed, *number));
        for bound in bounds {
            let mut rank = below(count, |rank| (rank as f64 + turn) / (count as f64) < *bound);
            let found = counts.iter().position(|count| {
                let count = u64::from(count.load(Relaxed));
                let is_here = rank < count;
                rank -= if is_here { 0 } else { count };
                is_here
            });
            let found = found.map(|found| class << bits | found);
            found.iter().for_each(|found| is_sought[*found] = true);
            sought.push(found.map(|found| (found, rank as usize)));
        }
    }
    // These samples are found by sorting the hashes of their cells.
    let found = each_chunk(snapshot, selection, |first, ids| {
        let of = |(index, id): (u64, i64)| (cell(classes.of(index), hashed(id)), hashed(id), index);
        (first..).zip(ids).map(of).filter(|(cell, _, _)| is_sought[*cell]).collect::<Vec<_>>()
    })?;
    let mut found: Vec<(usize, u64, u64)> = found.into_iter().flatten().collect();
    found.sort_unstable();
    let end_of = |sought: Option<(usize, usize)>| match sought {
        None => (u64::MAX, u64::MAX),
        Some((cell, rank)) => {
            let (_, hash, index) = found[found.partition_point(|(other, _, _)| *other < cell) + rank];
            (hash, index)
        }
    };
    let ends: Vec<(u64, u64)> = sought.into_iter().map(end_of).collect();
    masks(snapshot, selection, bounds.len() + 1, |index, id| {
        let ends = &ends[classes.of(index) * bounds.len()..][..bounds.len()];
        let own = (hashed(id), index);
        ends.iter().position(|end| own < *end).unwrap_or(bounds.len())
    })
}

/// Return how many of 0..count fulfil a condition that ever larger numbers do not.
fn below(count: u64, holds: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = low + (high - low) / 2;
        if holds(middle) { low = middle + 1 } else { high = middle }
    }
    low
}
