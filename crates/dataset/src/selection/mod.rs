//! What samples of a snapshot a view has, and in which order: a description that takes as little memory as it says, and maps each index in the
//! view to a position of the snapshot.
//!
//! Selections compose: a range of a range is a range, and a range of runs is runs. A mask is runs, a bitmap or a list, whichever is smallest.
//! Views, scans and loaders pass selections along. They never make a list of a selection, only of the samples that they read next.

mod bits;
mod described;
mod split;
pub mod spread;
mod strides;

use std::sync::Arc;

use penstock_error::Error;

pub use self::bits::Bits;
pub use self::split::Split;
pub use self::strides::Stride;
use self::strides::Strides;
use crate::snapshot::Snapshot;

/// Bytes that a stride takes, and a position in a list.
const STRIDE_BYTES: u64 = 24;
const LISTED_BYTES: u64 = 8;
/// Samples that are less than so many apart are found by passing over those between them.
const NEAR: u64 = 32;

/// Samples of a snapshot in an order.
#[derive(Debug, Clone)]
pub struct Selection {
    of: Source,
    within: Within,
    /// What a person would call the selection, such as the text of a query.
    origin: Option<Arc<str>>,
}

/// What a selection chooses from. Only in a list may a sample be more than once.
#[derive(Debug, Clone)]
enum Source {
    /// All samples of a snapshot that has so many.
    All(u64),
    Split(Arc<Split>),
    Bitmap(Arc<Bitmap>),
    /// Positions of the snapshot. A selection of a list is always whole.
    List(Arc<Vec<u64>>),
}

/// What a selection chooses from its source.
#[derive(Debug, Clone)]
enum Within {
    Whole,
    Range(Stride),
    Runs(Arc<Strides>),
}

/// The samples of another selection that have a set bit, in its order.
#[derive(Debug)]
struct Bitmap {
    of: Selection,
    bits: Bits,
}

impl Source {
    fn len(&self) -> u64 {
        match self {
            Source::All(samples) => *samples,
            Source::Split(split) => split.count(),
            Source::Bitmap(bitmap) => bitmap.bits.count(),
            Source::List(list) => list.len() as u64,
        }
    }

    fn at(&self, index: u64) -> u64 {
        match self {
            Source::All(_) => index,
            Source::Split(split) => split.at(index),
            Source::Bitmap(bitmap) => bitmap.of.at(bitmap.bits.nth(index)),
            Source::List(list) => list[index as usize],
        }
    }

    /// Return the index of a position. Cost: that of `at`; looks at the whole of a list.
    fn index_of(&self, position: u64) -> Option<u64> {
        match self {
            Source::All(samples) => (position < *samples).then_some(position),
            Source::Split(split) => split.index_of(position),
            Source::Bitmap(bitmap) => {
                let (index, is_set) = bitmap.bits.rank(bitmap.of.index_of(position)?);
                is_set.then_some(index)
            }
            Source::List(list) => list.iter().position(|one| *one == position).map(|index| index as u64),
        }
    }

    /// Add the positions of a stride of indices to a list. Neighbours cost less than calls of `at`.
    fn extend(&self, stride: Stride, positions: &mut Vec<u64>) {
        let begin = positions.len();
        let each = stride.step.unsigned_abs();
        let (first, is_near) =
            (if stride.step < 0 { stride.at(stride.count - 1) } else { stride.first }, (1..=NEAR).contains(&each));
        let (count, each) = (stride.count as usize, each as usize);
        match self {
            Source::All(_) if stride.step == 1 => positions.extend(stride.first..stride.first + stride.count),
            Source::Split(split) if is_near => positions.extend(split.from(first).step_by(each).take(count)),
            Source::Bitmap(bitmap) if is_near => {
                let places = bitmap.bits.from(first).step_by(each).take(count);
                match bitmap.of.is_all() {
                    true => positions.extend(places),
                    false => positions.extend(places.map(|place| bitmap.of.at(place))),
                }
            }
            _ => return positions.extend((0..stride.count).map(|index| self.at(stride.at(index)))),
        }
        if stride.step < 0 {
            positions[begin..].reverse();
        }
    }
}

impl Selection {
    /// Select all samples of a snapshot.
    pub fn all(snapshot: &Snapshot) -> Selection {
        Selection::of(Source::All(snapshot.len()))
    }

    fn of(of: Source) -> Selection {
        Selection { of, within: Within::Whole, origin: None }
    }

    /// Select one part of a split.
    pub fn split(split: Split) -> Selection {
        Selection::of(Source::Split(Arc::new(split)))
    }

    /// Let `origin` say where the selection came from.
    pub fn named(self, origin: &str) -> Selection {
        Selection { origin: Some(origin.into()), ..self }
    }

    /// Return whether nothing was selected, so that the selection has all samples of its snapshot.
    pub fn is_all(&self) -> bool {
        matches!((&self.of, &self.within), (Source::All(_), Within::Whole))
    }

    pub fn len(&self) -> u64 {
        match &self.within {
            Within::Whole => self.of.len(),
            Within::Range(range) => range.count,
            Within::Runs(runs) => runs.count(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Return how many bytes the selection holds, beside what all selections of the snapshot share.
    pub fn held_bytes(&self) -> u64 {
        let within = if let Within::Runs(runs) = &self.within { runs.held_bytes() } else { 0 };
        within
            + match &self.of {
                Source::All(_) => 0,
                Source::Split(split) => split.held_bytes(),
                Source::Bitmap(bitmap) => bitmap.of.held_bytes() + bitmap.bits.held_bytes(),
                Source::List(list) => size_of_val(&list[..]) as u64,
            }
    }

    /// Return the position of a sample in the snapshot. Time: logarithmic in the number of runs, of words of a bitmap, or of thousands of a split.
    #[inline]
    pub fn at(&self, index: u64) -> u64 {
        match (&self.within, &self.of) {
            (Within::Whole, Source::All(_)) => index,
            (Within::Whole, of) => of.at(index),
            (Within::Range(range), of) => of.at(range.at(index)),
            (Within::Runs(runs), of) => of.at(runs.at(index)),
        }
    }

    /// Return the positions of several samples in the snapshot.
    pub fn positions(&self, indices: Stride) -> Vec<u64> {
        let mut positions = Vec::with_capacity(indices.count as usize);
        self.extend(indices, &mut positions);
        positions
    }

    /// Add the positions of several samples in the snapshot to a list.
    pub fn extend(&self, indices: Stride, positions: &mut Vec<u64>) {
        self.strides(indices)
            .into_iter()
            .filter(|stride| stride.count > 0)
            .for_each(|stride| self.of.extend(stride, positions));
    }

    /// Return which indices of the source these are.
    fn strides(&self, indices: Stride) -> Vec<Stride> {
        match &self.within {
            Within::Whole => vec![indices],
            Within::Range(range) => vec![range.part(indices)],
            Within::Runs(runs) => runs.part(indices),
        }
    }

    /// Return the index of a position of the snapshot, or None if the selection lacks it.
    fn index_of(&self, position: u64) -> Option<u64> {
        let index = self.of.index_of(position)?;
        match &self.within {
            Within::Whole => Some(index),
            Within::Range(range) => range.index_of(index),
            Within::Runs(runs) => runs.index_of(index),
        }
    }

    /// Return the place of the first of these positions that the selection lacks. Cost: a search for each position; reads the whole of a list.
    pub fn first_outside(&self, positions: &[u64]) -> Option<usize> {
        let Source::List(list) = &self.of else {
            return positions.iter().position(|position| self.index_of(*position).is_none());
        };
        let mut sought: Vec<u64> = positions.to_vec();
        sought.sort_unstable();
        sought.dedup();
        let mut is_found = vec![false; sought.len()];
        list.iter().filter_map(|one| sought.binary_search(one).ok()).for_each(|place| is_found[place] = true);
        positions.iter().position(|position| sought.binary_search(position).is_ok_and(|place| !is_found[place]))
    }

    /// Return whether no sample can be in the selection more than once.
    fn is_distinct(&self) -> bool {
        let is_distinct = match &self.within {
            Within::Whole => true,
            Within::Range(range) => range.step != 0 || range.count < 2,
            Within::Runs(runs) => runs.is_distinct(),
        };
        is_distinct && !matches!(self.of, Source::List(_))
    }

    /// Select a part of the samples: those with these indices. Time: that of the runs that are described.
    pub fn part(&self, indices: &[Stride]) -> Selection {
        let strides = Strides::joined(indices.iter().flat_map(|indices| self.strides(*indices)));
        let count: u64 = strides.iter().map(|stride| stride.count).sum();
        let takes = match &self.of {
            // A part of a list is a shorter list.
            Source::List(_) => u64::MAX,
            // The few samples of a part should not keep a large bitmap.
            Source::Bitmap(bitmap) => bitmap.bits.end() / 64 + strides.len() as u64 * STRIDE_BYTES,
            _ => strides.len() as u64 * STRIDE_BYTES,
        };
        let made = match &strides[..] {
            [] => Selection { within: Within::Range(Stride::of(0)), ..Selection::of(Source::All(self.of.len())) },
            [one] if !matches!(self.of, Source::List(_)) && takes <= (LISTED_BYTES * count).max(STRIDE_BYTES) => {
                Selection { within: Within::Range(*one), ..Selection::of(self.of.clone()) }
            }
            many if takes <= LISTED_BYTES * count => {
                Selection { within: Within::Runs(Arc::new(Strides::new(many))), ..Selection::of(self.of.clone()) }
            }
            _ => {
                let mut positions = Vec::with_capacity(count as usize);
                strides.iter().for_each(|stride| self.of.extend(*stride, &mut positions));
                Selection::of(Source::List(Arc::new(positions)))
            }
        };
        made.from(self)
    }

    /// Select the samples with a set bit. `bits` has a place for each sample.
    pub fn mask(&self, bits: Bits) -> Selection {
        let (as_list, as_runs) = (LISTED_BYTES * bits.count(), STRIDE_BYTES * bits.runs());
        let as_bits = if self.is_distinct() { bits.end() / 8 } else { u64::MAX };
        if as_runs <= as_list.min(as_bits) {
            return self.part(&Strides::joined(bits.from(0).map(|first| Stride { first, step: 1, count: 1 })));
        }
        if as_list < as_bits {
            let positions = bits.from(0).map(|index| self.at(index)).collect();
            return Selection::of(Source::List(Arc::new(positions))).from(self);
        }
        let bitmap = match (&self.of, &self.within) {
            (Source::Bitmap(own), Within::Whole) => own.narrowed(Stride::of(own.bits.count()), &bits),
            (Source::Bitmap(own), Within::Range(range)) if range.step > 0 => own.narrowed(*range, &bits),
            _ => Bitmap { of: self.clone(), bits },
        };
        Selection::of(Source::Bitmap(Arc::new(bitmap))).from(self)
    }

    /// Select samples by index, in the given order. The indices must exist.
    pub fn pick(&self, mut indices: Vec<u64>) -> Selection {
        // Runs are not smaller if there are more of them than a third of the indices.
        let most = indices.len() / (STRIDE_BYTES / LISTED_BYTES) as usize + 1;
        let strides = Strides::of_places(&indices, most);
        if let Some(strides) = strides {
            return self.part(&strides);
        }
        let end = indices.last().map_or(0, |last| last + 1);
        if self.is_distinct() && indices.len() as u64 * 64 > end && indices.is_sorted_by(|one, next| one < next) {
            let mut words = vec![0; self.len().div_ceil(64) as usize];
            indices.iter().for_each(|index| words[(index / 64) as usize] |= 1 << (index % 64));
            return self.mask(Bits::new(self.len(), words));
        }
        if !self.is_all() {
            indices.iter_mut().for_each(|index| *index = self.at(*index));
        }
        Selection::of(Source::List(Arc::new(indices))).from(self)
    }

    /// Note that this selection was made from another one.
    fn from(self, base: &Selection) -> Selection {
        let origin = base.origin.as_ref().map(|origin| {
            if origin.starts_with(PART_OF) { origin.clone() } else { format!("{PART_OF}{origin}").into() }
        });
        Selection { origin, ..self }
    }
}

/// How origins of parts begin.
const PART_OF: &str = "a part of ";

impl Bitmap {
    /// Return the bitmap of those set bits in a range of them that have a set bit in `bits`.
    fn narrowed(&self, range: Stride, bits: &Bits) -> Bitmap {
        let mut words = vec![0; self.bits.words().len()];
        let places = self.bits.from(range.first).step_by(range.step as usize).take(range.count as usize);
        let mut kept = bits.from(0).peekable();
        for place in (0..).zip(places).filter(|(index, _)| kept.next_if_eq(index).is_some()).map(|(_, place)| place) {
            words[(place / 64) as usize] |= 1 << (place % 64);
        }
        Bitmap { of: self.of.clone(), bits: Bits::new(self.bits.places(), words) }
    }
}

/// Make the error for a position outside a snapshot or view.
pub fn out_of_range(position: i64, len: u64) -> Error {
    Error::new(
        "position-out-of-range",
        match len {
            0 => format!("cannot take position {position}: there are no samples"),
            _ => format!("cannot take position {position}: there are {len} samples, at positions 0 to {}", len - 1),
        },
    )
}
