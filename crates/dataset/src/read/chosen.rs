//! Choose samples of a view by their row ids: splits, and random samples. Row ids are read in chunks, and each part is a mask.

use std::collections::hash_map::Entry;
use std::sync::{Mutex, PoisonError};

use penstock_error::{Error, Result};
use rustc_hash::FxHashMap;

use super::plan::Plan;
use super::reader::Nulls;
use crate::parallel;
use crate::selection::spread::{Bound, GROUP, SAMPLE, below, hash, mixed, turn_of_class};
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
        let indices = Stride { first, step: 1, count: CHUNK.min(len - first) };
        let ids = match selection.is_all() {
            true => snapshot.row_ids_in(first..first + indices.count)?,
            false => Plan::new(snapshot, selection.positions(indices))?.row_ids(),
        };
        Ok(visit(first, ids))
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
/// are as large on average as their fractions. Cost: reads all row ids; holds a bit for each sample and part, and 24 bytes for each
/// sample near a bound: about 16 √n of a class of n. A sample that a selection has several times is in one part.
pub fn by_class<C: Copy + Into<u32> + Sync>(
    snapshot: &Snapshot,
    selection: &Selection,
    classes: &Classes<'_, C>,
    seed: u64,
    bounds: &[f64],
) -> Result<Vec<Selection>> {
    let mut counts = vec![0u64; classes.numbers.len()];
    (0..classes.codes.len() as u64).for_each(|index| counts[classes.of(index)] += 1);
    let turns = classes.numbers.iter().map(|number| turn_of_class(seed, *number));
    // How many samples of each class are below each bound.
    let ranks: Vec<u64> = counts
        .iter()
        .zip(turns)
        .flat_map(|(count, turn)| bounds.iter().map(move |bound| below(*count, |rank| (rank as f64 + turn) / (*count as f64) < *bound)))
        .collect();
    let divided = Divided { classes, seed, ranks: &ranks, bounds: bounds.len() };
    for deviations in [DEVIATIONS, f64::INFINITY] {
        if let Some(words) = divided.parts(snapshot, selection, &windows(&counts, &ranks, bounds.len(), deviations))? {
            return Ok(words.into_iter().map(|words| selection.mask(Bits::new(selection.len(), words))).collect());
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
        if far.is_finite() { Window { begin: at(share - far), end: at(share + far) } } else { Window { begin: 0, end: u64::MAX } }
    };
    let mut windows: Vec<Window> = ranks.iter().enumerate().map(window).collect();
    for own in windows.chunks_mut(bounds.max(1)) {
        (1..own.len()).for_each(|bound| own[bound].end = own[bound].end.max(own[bound - 1].end));
        (1..own.len()).rev().for_each(|bound| own[bound - 1].begin = own[bound - 1].begin.min(own[bound].begin));
    }
    windows
}

/// A split by class, with the ranks of its bounds.
struct Divided<'a, C> {
    classes: &'a Classes<'a, C>,
    seed: u64,
    ranks: &'a [u64],
    bounds: usize,
}

impl<C: Copy + Into<u32> + Sync> Divided<'_, C> {
    /// Return the samples of each part as words of a mask, or None if a bound is not in its window.
    fn parts(&self, snapshot: &Snapshot, selection: &Selection, windows: &[Window]) -> Result<Option<Vec<Vec<u64>>>> {
        let (begin, parts) = (hash(&[GROUP, self.seed]), self.bounds + 1);
        let decided = Mutex::new(vec![0u64; self.classes.numbers.len() * parts]);
        let chunks = each_chunk(snapshot, selection, |first, ids| {
            let mut words = vec![vec![0u64; ids.len().div_ceil(64)]; parts];
            let (mut own, mut undecided) = (vec![0u64; self.classes.numbers.len() * parts], Vec::<Undecided>::new());
            for (place, id) in ids.into_iter().enumerate() {
                let (index, hash) = (first + place as u64, mixed(begin, id.cast_unsigned()));
                let class = self.classes.of(index);
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
            (words, undecided)
        })?;
        let mut words: Vec<Vec<u64>> =
            (0..parts).map(|part| chunks.iter().flat_map(|(words, _)| words[part].iter().copied()).collect()).collect();
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
                if own[..end].last().is_some_and(|last| last.1 >= window.end) || own.get(end).is_some_and(|next| next.1 < window.begin) {
                    return Ok(None);
                }
                exact = end;
                let again = own[end..].iter().take_while(|next| end > 0 && next.1 == own[end - 1].1).count();
                let end = done.max(end + again);
                own[done..end].iter().for_each(|(_, _, index)| words[bound][(index / 64) as usize] |= 1 << (index % 64));
                done = end;
            }
            own[done..].iter().for_each(|(_, _, index)| words[self.bounds][(index / 64) as usize] |= 1 << (index % 64));
        }
        Ok(Some(words))
    }
}

/// Codes of samples, in which a null is 0, and the value of each other code.
pub type Coded<C> = (Vec<C>, Vec<u64>);

/// Give equal values of a selection equal codes. `read` returns the values of samples as numbers, and which of them are null.
///
/// Returns None if there are more different values than codes. Cost: reads the values once, in chunks.
pub fn coded<C: Copy + Default + Send + TryFrom<u32>>(
    selection: &Selection,
    read: impl Fn(Vec<u64>) -> Result<(Vec<u64>, Nulls)> + Sync,
) -> Result<Option<Coded<C>>> {
    let len = selection.len();
    let mut codes = vec![C::default(); len as usize];
    let known = Mutex::new((FxHashMap::<u64, u32>::default(), Vec::new()));
    let chunks: Vec<Mutex<&mut [C]>> = codes.chunks_mut(CHUNK as usize).map(Mutex::new).collect();
    let of_chunk = |number: usize| {
        let mut out = chunks[number].lock().unwrap_or_else(PoisonError::into_inner);
        let (values, nulls) = read(selection.positions(Stride { first: number as u64 * CHUNK, step: 1, count: out.len() as u64 }))?;
        let mut own = FxHashMap::<u64, C>::default();
        for (place, value) in values.into_iter().enumerate() {
            if nulls.as_ref().is_some_and(|nulls| nulls[place]) {
                continue;
            }
            out[place] = match own.entry(value) {
                Entry::Occupied(found) => *found.get(),
                Entry::Vacant(place) => {
                    let (numbers, values) = &mut *known.lock().unwrap_or_else(PoisonError::into_inner);
                    let code = *numbers.entry(value).or_insert_with(|| {
                        values.push(value);
                        values.len() as u32
                    });
                    let Ok(code) = C::try_from(code) else { return Ok(false) };
                    *place.insert(code)
                }
            };
        }
        Ok(true)
    };
    let done = parallel::map(chunks.len(), (len * LOOKED_UP_BYTES) as usize, of_chunk)?;
    drop(chunks);
    let all = done.into_iter().collect::<Result<Vec<bool>>>()?.into_iter().all(|fits| fits);
    Ok(all.then(|| (codes, known.into_inner().unwrap_or_else(PoisonError::into_inner).1)))
}
