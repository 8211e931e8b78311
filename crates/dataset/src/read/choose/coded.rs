//! Codes of the values of a column: equal ones for equal values. Splits by value and by group are made from them.

use std::sync::{Mutex, PoisonError};

use penstock_error::{Error, Result};
use rustc_hash::FxHashMap;

use crate::parallel;
use crate::read::plan::Plan;
use crate::read::reader::Nulls;
use crate::selection::{Bits, Selection, Stride};
use crate::snapshot::Snapshot;

/// Samples that are looked up at a time: a whole number of words of a mask, and so few that all about them stays in the cache of a core.
pub const CHUNK: u64 = 1 << 14;
/// Bytes that a sample's row id takes while it is looked up.
const LOOKED_UP_BYTES: u64 = 40;

/// Call `visit` for each chunk of a selection, with the index of its first sample and the row ids, and return the results in order.
pub fn each_chunk<T: Send>(
    snapshot: &Snapshot,
    selection: &Selection,
    visit: impl Fn(u64, Vec<i64>) -> T + Sync,
) -> Result<Vec<T>> {
    each_part(selection, |first| {
        let ids = match selection.is_all() {
            true => snapshot.row_ids_in(first..selection.len().min(first + CHUNK))?,
            false => Plan::new(snapshot, positions(selection, first, CHUNK))?.row_ids(),
        };
        Ok(visit(first, ids))
    })
}

/// Call `visit` with the index of the first sample of each chunk of a selection, and return the results in order.
fn each_part<T: Send>(selection: &Selection, visit: impl Fn(u64) -> Result<T> + Sync) -> Result<Vec<T>> {
    let of_chunk = |number: usize| visit(number as u64 * CHUNK);
    parallel::map(selection.len().div_ceil(CHUNK) as usize, (selection.len() * LOOKED_UP_BYTES) as usize, of_chunk)?
        .into_iter()
        .collect()
}

/// Return the positions in the snapshot of up to `count` samples.
fn positions(selection: &Selection, first: u64, count: u64) -> Vec<u64> {
    selection.positions(Stride { first, step: 1, count: count.min(selection.len() - first) })
}

/// Join the words of each part, given those of all chunks.
pub fn joined<'a>(chunks: impl Iterator<Item = &'a Vec<Vec<u64>>> + Clone, parts: usize) -> Vec<Vec<u64>> {
    (0..parts).map(|part| chunks.clone().flat_map(|words| words[part].iter().copied()).collect()).collect()
}

/// Return the samples of a selection whose bits are set.
pub fn mask_of(selection: &Selection, words: Vec<u64>) -> Selection {
    selection.mask(Bits::new(selection.len(), words))
}

/// Values below this are looked up in a list.
const SMALL: usize = 1 << 11;
/// Pairs of a group and a class that are counted in a list.
const PAIRS: usize = 1 << 22;

/// Gives the samples of a selection codes: equal ones to equal values, and 0 to nulls.
pub trait Coder: Sync {
    /// Return the codes of so many samples, beginning with this one.
    fn codes(&self, first: u64, count: usize) -> Result<Vec<u32>>;

    /// Return how many samples have each of so many codes.
    fn counts(&self, codes: usize) -> Vec<u64>;
}

impl<C: Copy + Into<u32> + Sync> Coder for &[C] {
    fn codes(&self, first: u64, count: usize) -> Result<Vec<u32>> {
        Ok(self[first as usize..][..count].iter().map(|code| (*code).into()).collect())
    }

    fn counts(&self, codes: usize) -> Vec<u64> {
        let mut counts = vec![0; codes];
        self.iter().for_each(|code| counts[(*code).into() as usize] += 1);
        counts
    }
}

/// Reads the values of samples as numbers, and says which of them are null.
pub type ReadNumbers = Box<dyn Fn(Vec<u64>) -> Result<(Vec<u64>, Nulls)> + Send + Sync>;

/// Codes of the values of a column. They are not held: the column is read again for them, which takes less time than memory for a code of each sample.
pub struct Numbered {
    selection: Selection,
    read: ReadNumbers,
    /// The value of each code after 0.
    pub values: Vec<u64>,
    counts: Vec<u64>,
    small: Vec<u32>,
    others: FxHashMap<u64, u32>,
}

/// How many samples have each value, of those that have a small one, and of others.
struct Counted {
    nulls: u64,
    small: Vec<u64>,
    others: FxHashMap<u64, u64>,
}

impl Counted {
    fn new() -> Counted {
        Counted { nulls: 0, small: vec![0; SMALL], others: FxHashMap::default() }
    }

    fn add(&mut self, value: u64, count: u64) {
        match self.small.get_mut(value as usize) {
            Some(known) => *known += count,
            None => *self.others.entry(value).or_default() += count,
        }
    }
}

impl Numbered {
    /// Find the different values of a column, as `read` returns them. Cost: reads the column; holds 16 bytes for each different value.
    pub fn of(selection: &Selection, read: ReadNumbers) -> Result<Numbered> {
        let all = Mutex::new(Counted::new());
        let of_chunk = |first| {
            let (values, nulls) = read(positions(selection, first, CHUNK))?;
            let mut own = Counted::new();
            match &nulls {
                None => values.iter().for_each(|value| own.add(*value, 1)),
                Some(nulls) => values.iter().zip(nulls).for_each(|(value, is_null)| match is_null {
                    true => own.nulls += 1,
                    false => own.add(*value, 1),
                }),
            }
            let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
            all.nulls += own.nulls;
            all.small.iter_mut().zip(own.small).for_each(|(sum, count)| *sum += count);
            own.others.into_iter().for_each(|(value, count)| all.add(value, count));
            Ok(())
        };
        each_part(selection, of_chunk)?;
        let Counted { nulls, small, others } = all.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut found: Vec<(u64, u64)> = (0..).zip(small).filter(|(_, count)| *count > 0).chain(others).collect();
        found.sort_unstable();
        if u32::try_from(found.len()).is_err() {
            return Err(Error::new(
                "out-of-memory",
                format!("a column with {} different values cannot be split by value", found.len()),
            ));
        }
        let mut numbered = Numbered {
            selection: selection.clone(),
            read,
            values: found.iter().map(|(value, _)| *value).collect(),
            counts: std::iter::once(nulls).chain(found.iter().map(|(_, count)| *count)).collect(),
            small: Vec::new(),
            others: FxHashMap::default(),
        };
        for (code, value) in (1..).zip(&numbered.values) {
            match usize::try_from(*value).ok().filter(|value| *value < SMALL) {
                Some(value) => {
                    numbered.small.resize(value + 1, 0);
                    numbered.small[value] = code;
                }
                None => drop(numbered.others.insert(*value, code)),
            }
        }
        Ok(numbered)
    }

    fn code(&self, value: u64) -> u32 {
        self.small.get(value as usize).or_else(|| self.others.get(&value)).copied().unwrap_or(0)
    }
}

impl Coder for &Numbered {
    fn codes(&self, first: u64, count: usize) -> Result<Vec<u32>> {
        let (values, nulls) = (self.read)(positions(&self.selection, first, count as u64))?;
        Ok(match nulls {
            None => values.into_iter().map(|value| self.code(value)).collect(),
            Some(nulls) => values
                .into_iter()
                .zip(nulls)
                .map(|(value, is_null)| if is_null { 0 } else { self.code(value) })
                .collect(),
        })
    }

    fn counts(&self, _: usize) -> Vec<u64> {
        self.counts.clone()
    }
}

/// Divide a selection into `parts` by the code of each sample, given the part of each code. The samples without a value have parts of their own: `nulls` has
/// their places, which ascend, and their parts.
///
/// Cost: the codes; holds a bit for each sample and part.
pub fn by_code(
    selection: &Selection,
    (codes, part_of): (&dyn Coder, &[u32]),
    nulls: (&[i64], &[u32]),
    parts: usize,
) -> Result<Vec<Selection>> {
    let chunks = each_part(selection, |first| {
        let codes = codes.codes(first, CHUNK.min(selection.len() - first) as usize)?;
        let mut words = vec![vec![0u64; codes.len().div_ceil(64)]; parts];
        for (place, code) in codes.into_iter().enumerate().filter(|(_, code)| *code > 0) {
            words[part_of[code as usize] as usize][place / 64] |= 1 << (place % 64);
        }
        Ok(words)
    })?;
    let mut all = joined(chunks.iter(), parts);
    for (place, part) in nulls.0.iter().zip(nulls.1) {
        all[*part as usize][*place as usize / 64] |= 1 << (place % 64);
    }
    Ok(all.into_iter().map(|words| mask_of(selection, words)).collect())
}

/// A sample without a value: its place, its row id and its class.
pub type Null = (i64, i64, u32);

/// The groups of a selection, by code.
pub struct Tally {
    /// How many samples each group has, and the least row id of them.
    pub sizes: Vec<u64>,
    pub first: Vec<i64>,
    /// Each pair of a group and a class, with the number of its samples. Samples without a value are not counted.
    pub pairs: Vec<(u32, u32, u64)>,
    pub nulls: Vec<Null>,
}

/// Count pairs of a group and a class in a list, if it is not too long.
struct Pairs {
    classes: usize,
    few: Vec<u64>,
    many: FxHashMap<(u32, u32), u64>,
}

impl Pairs {
    fn add(&mut self, group: u32, class: u32) {
        match self.few.get_mut(group as usize * self.classes + class as usize) {
            Some(count) => *count += 1,
            None => *self.many.entry((group, class)).or_default() += 1,
        }
    }

    fn all(self) -> Vec<(u32, u32, u64)> {
        let pair = |at: usize| ((at / self.classes) as u32, (at % self.classes) as u32);
        let few = self
            .few
            .iter()
            .enumerate()
            .filter(|(_, count)| **count > 0)
            .map(|(at, count)| (pair(at).0, pair(at).1, *count));
        few.chain(self.many.into_iter().map(|((group, class), count)| (group, class, count))).collect()
    }
}

/// Count the groups of a selection, whose samples have so many codes. `classes` has the codes of their classes, the class of each code, and how many classes
/// there are; without it, all samples have class 0.
///
/// Cost: the codes, and reads all row ids; holds 24 bytes for each group, and for each sample without a value.
pub fn tally(
    snapshot: &Snapshot,
    selection: &Selection,
    (codes, count): (&dyn Coder, usize),
    classes: Option<(&dyn Coder, &[u32], usize)>,
) -> Result<Tally> {
    let width = classes.map_or(1, |(_, _, count)| count);
    let few = if classes.is_some() && count * width <= PAIRS { vec![0; count * width] } else { Vec::new() };
    let all =
        Mutex::new((vec![0; count], vec![i64::MAX; count], Pairs { classes: width, few, many: FxHashMap::default() }));
    let chunks = each_chunk(snapshot, selection, |begins, ids| {
        let codes = codes.codes(begins, ids.len())?;
        let kinds = match classes {
            None => Vec::new(),
            Some((coder, class_of, _)) => {
                coder.codes(begins, ids.len())?.into_iter().map(|code| class_of[code as usize]).collect()
            }
        };
        let (mut nulls, mut all) = (Vec::<Null>::new(), all.lock().unwrap_or_else(PoisonError::into_inner));
        let (sizes, first, pairs) = &mut *all;
        for (place, (code, id)) in codes.into_iter().zip(ids).enumerate() {
            let kind = kinds.get(place).copied();
            if code == 0 {
                nulls.push((begins as i64 + place as i64, id, kind.unwrap_or(0)));
                continue;
            }
            sizes[code as usize] += 1;
            first[code as usize] = id.min(first[code as usize]);
            if let Some(kind) = kind {
                pairs.add(code, kind);
            }
        }
        Ok(nulls)
    })?;
    let nulls = chunks.into_iter().collect::<Result<Vec<Vec<Null>>>>()?.concat();
    let (sizes, first, pairs) = all.into_inner().unwrap_or_else(PoisonError::into_inner);
    let pairs = match classes {
        Some(_) => pairs.all(),
        None => (0..).zip(&sizes).filter(|(_, size)| **size > 0).map(|(code, size)| (code, 0, *size)).collect(),
    };
    Ok(Tally { sizes, first, pairs, nulls })
}
