//! Choose samples of a view by their row ids: splits, and random samples. Row ids are read in chunks, and each part is a mask.

use std::sync::{Mutex, PoisonError};

use penstock_error::{Error, Result};

use super::coded::{CHUNK, Coder, each_chunk, joined, mask_of};
use crate::selection::spread::{Bound, GROUP, SAMPLE, below, hash, mixed, turn_of_class};
use crate::selection::{Selection, Split, Stride};
use crate::snapshot::Snapshot;

/// Divide a selection into `parts` masks. `part_of` gets the index of a sample and its row id.
fn masks(
    snapshot: &Snapshot,
    selection: &Selection,
    parts: usize,
    part_of: impl Fn(u64, i64) -> usize + Sync,
) -> Result<Vec<Selection>> {
    let chunks = each_chunk(snapshot, selection, |first, ids| {
        let mut words = vec![vec![0u64; ids.len().div_ceil(64)]; parts];
        (0..)
            .zip(ids)
            .for_each(|(place, id)| words[part_of(first + place, id)][(place / 64) as usize] |= 1 << (place % 64));
        words
    })?;
    Ok(joined(chunks.iter(), parts).into_iter().map(|words| mask_of(selection, words)).collect())
}

/// Split a selection at random, at ascending bounds from 0 to 1. Returns one part more than there are bounds.
///
/// Cost: as for `Split::all` if nothing was selected before. Otherwise, reads all row ids, and holds a bit for each sample and part.
pub fn split(snapshot: &Snapshot, selection: &Selection, seed: u64, bounds: &[f64]) -> Result<Vec<Selection>> {
    if selection.is_all() {
        return Ok(Split::all(snapshot, seed, bounds)?.into_iter().map(Selection::split).collect());
    }
    let bounds: Vec<Bound> = bounds.iter().map(|value| Bound::new(seed, *value)).collect();
    let part_of = |_, id| {
        let digit = bounds.first().map_or(0, |bound| bound.first_digit(id));
        bounds.iter().position(|bound| bound.is_below(id, digit)).unwrap_or(bounds.len())
    };
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
const CHUNKS: u64 = 256;

/// The classes of samples: a code for each sample, and the class of each code.
pub struct Classes<'a> {
    pub codes: &'a dyn Coder,
    pub class_of: &'a [u32],
    /// A number for each class, from which its turn is drawn.
    pub numbers: &'a [i64],
}

/// Bounds of ranks are sought this many standard deviations around where they are expected.
const DEVIATIONS: f64 = 8.0;

/// Where the hashes at one bound of a class may be. Those below are below the bound, and those from the end on are not.
#[derive(Clone, Copy)]
struct Window {
    begin: u64,
    end: u64,
}

/// A sample whose part is found by sorting.
type Undecided = (usize, u64, u64);

/// Split each class at ascending bounds from 0 to 1. The samples of a class are ordered by the hashes of their row ids.
///
/// The samples of a class have places from 0 to 1 in that order. Each class begins at a random part of a sample, so that parts of small classes
/// are as large on average as their fractions. Cost: the codes, and reads all row ids; holds a bit for each sample and part, and 24 bytes for each
/// sample near a bound: about 16 √n of a class of n. A sample that a selection has several times is in one part.
pub fn by_class(
    snapshot: &Snapshot,
    selection: &Selection,
    classes: &Classes<'_>,
    seed: u64,
    bounds: &[f64],
) -> Result<Vec<Selection>> {
    let mut counts = vec![0u64; classes.numbers.len()];
    classes
        .codes
        .counts(classes.class_of.len())
        .into_iter()
        .zip(classes.class_of)
        .for_each(|(count, class)| counts[*class as usize] += count);
    let turns = classes.numbers.iter().map(|number| turn_of_class(seed, *number));
    // How many samples of each class are below each bound.
    let ranks: Vec<u64> = counts
        .iter()
        .zip(turns)
        .flat_map(|(count, turn)| {
            bounds.iter().map(move |bound| below(*count, |rank| (rank as f64 + turn) / (*count as f64) < *bound))
        })
        .collect();
    let divided = Divided { classes, seed, ranks: &ranks, bounds: bounds.len() };
    for deviations in [DEVIATIONS, f64::INFINITY] {
        if let Some(words) = divided.parts(snapshot, selection, &windows(&counts, &ranks, bounds.len(), deviations))? {
            return Ok(words.into_iter().map(|words| mask_of(selection, words)).collect());
        }
    }
    Err(Error::new("internal", "samples have no order"))
}

/// Return the windows of all classes and bounds. Those of a class ascend.
fn windows(counts: &[u64], ranks: &[u64], bounds: usize, deviations: f64) -> Vec<Window> {
    let window = |(index, rank): (usize, &u64)| {
        let count = counts[index / bounds].max(1) as f64;
        let share = *rank as f64 / count;
        let far = deviations * ((share * (1.0 - share)).sqrt() / count.sqrt() + 1.0 / count);
        let at = |share: f64| (share.clamp(0.0, 1.0) * u64::MAX as f64) as u64;
        if far.is_finite() {
            Window { begin: at(share - far), end: at(share + far) }
        } else {
            Window { begin: 0, end: u64::MAX }
        }
    };
    let mut windows: Vec<Window> = ranks.iter().enumerate().map(window).collect();
    for own in windows.chunks_mut(bounds.max(1)) {
        (1..own.len()).for_each(|bound| own[bound].end = own[bound].end.max(own[bound - 1].end));
        (1..own.len()).rev().for_each(|bound| own[bound - 1].begin = own[bound - 1].begin.min(own[bound].begin));
    }
    windows
}

/// A split by class, with the ranks of its bounds.
struct Divided<'a> {
    classes: &'a Classes<'a>,
    seed: u64,
    ranks: &'a [u64],
    bounds: usize,
}

impl Divided<'_> {
    /// Return the samples of each part as words of a mask, or None if a bound is not in its window.
    fn parts(&self, snapshot: &Snapshot, selection: &Selection, windows: &[Window]) -> Result<Option<Vec<Vec<u64>>>> {
        let (begin, parts) = (hash(&[GROUP, self.seed]), self.bounds + 1);
        let decided = Mutex::new(vec![0u64; self.classes.numbers.len() * parts]);
        let chunks = each_chunk(snapshot, selection, |first, ids| {
            let mut words = vec![vec![0u64; ids.len().div_ceil(64)]; parts];
            let (mut own, mut undecided) = (vec![0u64; self.classes.numbers.len() * parts], Vec::<Undecided>::new());
            let codes = self.classes.codes.codes(first, ids.len())?;
            for (place, (id, code)) in ids.into_iter().zip(codes).enumerate() {
                let (index, hash) = (first + place as u64, mixed(begin, id.cast_unsigned()));
                let class = self.classes.class_of[code as usize] as usize;
                let windows = &windows[class * self.bounds..][..self.bounds];
                let part = windows.iter().position(|window| hash < window.end).unwrap_or(self.bounds);
                if windows.get(part).is_none_or(|window| hash < window.begin) {
                    own[class * parts + part] += 1;
                    words[part][place / 64] |= 1 << (place % 64);
                } else {
                    undecided.push((class, hash, index));
                }
            }
            let mut decided = decided.lock().unwrap_or_else(PoisonError::into_inner);
            decided.iter_mut().zip(own).for_each(|(sum, own)| *sum += own);
            Ok((words, undecided))
        })?;
        let chunks = chunks.into_iter().collect::<Result<Vec<_>>>()?;
        let mut words = joined(chunks.iter().map(|(words, _)| words), parts);
        let mut undecided: Vec<Undecided> = chunks.into_iter().flat_map(|(_, undecided)| undecided).collect();
        undecided.sort_unstable();
        let decided = decided.into_inner().unwrap_or_else(PoisonError::into_inner);
        for class in 0..self.classes.numbers.len() {
            let own = &undecided[undecided.partition_point(|(other, ..)| *other < class)..];
            let own = &own[..own.partition_point(|(other, ..)| *other == class)];
            let (mut before, mut exact, mut done) = (0, 0, 0);
            for bound in 0..self.bounds {
                before += decided[class * parts + bound];
                let window = windows[class * self.bounds + bound];
                let end = self.ranks[class * self.bounds + bound].checked_sub(before).map(|end| end as usize);
                let Some(end) = end.filter(|end| (exact..=own.len()).contains(end)) else { return Ok(None) };
                // All that were decided are on the right side only if the bound is in its window.
                if own[..end].last().is_some_and(|last| last.1 >= window.end)
                    || own.get(end).is_some_and(|next| next.1 < window.begin)
                {
                    return Ok(None);
                }
                exact = end;
                let again = own[end..].iter().take_while(|next| end > 0 && next.1 == own[end - 1].1).count();
                let end = done.max(end + again);
                own[done..end]
                    .iter()
                    .for_each(|(_, _, index)| words[bound][(index / 64) as usize] |= 1 << (index % 64));
                done = end;
            }
            own[done..].iter().for_each(|(_, _, index)| words[self.bounds][(index / 64) as usize] |= 1 << (index % 64));
        }
        Ok(Some(words))
    }
}
