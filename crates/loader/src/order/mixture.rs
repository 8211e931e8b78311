//! Maps each draw of an epoch to a source and a position, for a single source, several that are joined, or a mixture of several. The
//! mapping is a pure function.

use std::sync::{Mutex, PoisonError};

use penstock_error::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::order::permutation::Permutation;
use crate::order::quota::{Cursor, Quota};
use crate::order::random::{Purpose, key};
use crate::order::sequence::{Epoch, Sequence};

/// How to continue when all samples of a source in a mixture have been drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exhausted {
    /// The source starts its next pass, in a new order. The next epoch resumes each source where this epoch ends.
    Repeat,
    /// The epoch ends before any source would repeat.
    Stop,
    /// An epoch is refused if it needs more samples from a source than the source has.
    Raise,
}

/// A mixture, as stored in loader states.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mix {
    /// The share of each source, as an integer. The shares may have any sum.
    pub shares: Vec<u64>,
    pub epoch_samples: u64,
    pub exhausted: Exhausted,
}

/// Return the seed for a source's order. The sources of a mixture are ordered independently. The first source uses the loader's
/// own seed.
pub fn source_seed(seed: u64, source: usize) -> u64 {
    if source == 0 { seed } else { key(&[seed, source as u64]) }
}

pub struct Program {
    seed: u64,
    sources: Vec<Sequence>,
    mix: Option<(Mix, Quota)>,
    /// If sources are joined, the number of samples up to the end of each. They share one sequence.
    ends: Vec<u64>,
    block: u64,
    len: u64,
    /// The mixture's schedule after the most recent block. The next batch usually continues from there.
    counted: Mutex<Option<Cursor>>,
}

/// The source and position that a draw maps to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct SamplePlace {
    pub source: usize,
    pub position: u64,
}

impl Program {
    /// Combine sources. `block` is the number of draws within which the sources are shuffled. `names` are used in error
    /// messages.
    pub fn new(seed: u64, sources: Vec<Sequence>, names: &[String], mix: Option<Mix>, block: u64) -> Result<Program> {
        let invalid = |text: String| Err(Error::new("invalid-argument", text));
        let counted = Mutex::new(None);
        let Some(mix) = mix else {
            let [source] = &sources[..] else { return invalid("several sources need a mixture".into()) };
            let len = source.len();
            return Ok(Program { seed, sources, mix: None, ends: Vec::new(), block, len, counted });
        };
        let name = |source: usize| {
            names.get(source).map_or_else(|| format!("source {source}"), |name| format!("source `{name}`"))
        };
        if mix.shares.len() != sources.len() {
            return invalid(format!("{} shares for {} sources", mix.shares.len(), sources.len()));
        }
        if let Some(empty) = sources.iter().zip(&mix.shares).position(|(source, share)| source.is_empty() && *share > 0)
        {
            return invalid(format!("cannot mix the sources: {} has no samples", name(empty)));
        }
        let quota = Quota::new(&mix.shares).map_err(|error| {
            match mix.shares.iter().enumerate().filter(|(_, share)| **share > 0).min_by_key(|(_, share)| **share) {
                Some((rarest, _)) => {
                    error.context(format!("cannot mix the sources (check the weight of {})", name(rarest)))
                }
                None => error.context("cannot mix the sources"),
            }
        })?;
        let mut len = mix.epoch_samples;
        let short = match mix.exhausted {
            Exhausted::Repeat => None,
            Exhausted::Stop | Exhausted::Raise => first_short(&quota, &mix.shares, &sources, len),
        };
        match (mix.exhausted, short) {
            (Exhausted::Raise, Some((_, source))) => {
                let (count, has) = (quota.counts(len)[source], sources[source].len());
                return Err(Error::new(
                    "invalid-argument",
                    format!(
                        "cannot mix the sources: an epoch of {len} samples needs {count} from {}, which has only {has}",
                        name(source)
                    ),
                )
                .hint("use a smaller epoch_samples, or exhausted=\"repeat\""));
            }
            (_, Some((draw, _))) => len = draw,
            _ => {}
        }
        Ok(Program { seed, sources, mix: Some((mix, quota)), ends: Vec::new(), block, len, counted })
    }

    /// Join sources: `sequence` visits the samples of all of them, one source after the other. `lens` are their sizes.
    pub fn joined(seed: u64, sequence: Sequence, lens: impl Iterator<Item = u64>, block: u64) -> Program {
        let ends = lens.scan(0, |end, len| {
            *end += len;
            Some(*end)
        });
        let (ends, len) = (ends.collect(), sequence.len());
        Program { seed, sources: vec![sequence], mix: None, ends, block, len, counted: Mutex::new(None) }
    }

    /// Return the place of a position in a single source, or in those that are joined.
    fn place(&self, position: u64) -> SamplePlace {
        let source = self.ends.partition_point(|end| *end <= position);
        let begin = source.checked_sub(1).map_or(0, |before| self.ends[before]);
        SamplePlace { source, position: position - begin }
    }

    /// Count the draws in an epoch.
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Count the samples at `positions` whose draws `mine` accepts. With several sources, this number is unknown, so return the number
    /// of positions, which is the maximum.
    pub fn drawn(&self, epoch: u64, positions: std::ops::Range<u64>, mine: impl Fn(u64) -> bool) -> u64 {
        match &self.mix {
            Some(_) => positions.end - positions.start,
            None if !self.ends.is_empty() => positions.end - positions.start,
            None => {
                let epoch = self.sources[0].epoch(epoch);
                positions.filter(|position| epoch.draw_of(*position).is_none_or(&mine)).count() as u64
            }
        }
    }

    /// Return the places that the given draws of an epoch map to.
    pub fn places(&self, epoch: u64, draws: impl IntoIterator<Item = u64>) -> Vec<SamplePlace> {
        let Some((mix, quota)) = &self.mix else {
            let epoch = self.sources[0].epoch(epoch);
            return draws.into_iter().map(|draw| self.place(epoch.position(draw))).collect();
        };
        let mut mixing = Mixing { program: self, mix, quota, epoch, block: None, passes: Vec::new() };
        draws.into_iter().map(|draw| mixing.place(draw)).collect()
    }
}

/// Find the first draw before `len` that needs more samples than its source has. Returns the draw and the source, or None if
/// no draw does.
fn first_short(quota: &Quota, shares: &[u64], sources: &[Sequence], len: u64) -> Option<(u64, usize)> {
    let total: u128 = shares.iter().map(|share| u128::from(*share)).sum();
    // Up to this draw, no exact share exceeds the size of its source, so no count does either.
    let safe = |(source, share): (&Sequence, &u64)| {
        (*share > 0).then(|| u128::from(source.len()) * total / u128::from(*share))
    };
    let safe = sources.iter().zip(shares).filter_map(safe).min().unwrap_or(0).min(u128::from(len)) as u64;
    let mut cursor = quota.cursor(safe);
    while cursor.at < len {
        let (at, mut drawn) = (cursor.at, 0);
        quota.advance_with(&mut cursor, at + 1, |_, source| drawn = source);
        if cursor.counts[drawn] > sources[drawn].len() {
            return Some((at, drawn));
        }
    }
    None
}

struct Mixing<'a> {
    program: &'a Program,
    mix: &'a Mix,
    quota: &'a Quota,
    epoch: u64,
    block: Option<OrderBlock>,
    /// The open passes, each as (source, pass) with the matching epoch of the source's sequence.
    passes: Vec<((usize, u64), Epoch<'a>)>,
}

/// One block of the mixture, and how its places are divided among sources.
struct OrderBlock {
    number: u64,
    permutation: Permutation,
    /// For each source, the number of draws before this block. `ends` contains the end of each source's share of the block.
    before: Vec<u64>,
    ends: Vec<u64>,
}

impl Mixing<'_> {
    fn place(&mut self, draw: u64) -> SamplePlace {
        let (number, inner) = (draw / self.program.block, draw % self.program.block);
        let block = match self.block.take() {
            Some(block) if block.number == number => block,
            _ => self.block(number),
        };
        let slot = block.permutation.at(inner);
        let source = block.ends.partition_point(|end| *end <= slot);
        let begin = if source == 0 { 0 } else { block.ends[source - 1] };
        let nth = block.before[source] + (slot - begin);
        self.block = Some(block);
        let sequence = &self.program.sources[source];
        let (pass, nth) = match self.mix.exhausted {
            Exhausted::Repeat => (nth / sequence.len(), nth % sequence.len()),
            _ => (self.epoch, nth),
        };
        let known = self.passes.iter().position(|(key, _)| *key == (source, pass));
        let known = known.unwrap_or_else(|| {
            if self.passes.len() > 2 * self.program.sources.len() {
                self.passes.clear();
            }
            self.passes.push(((source, pass), sequence.epoch(pass)));
            self.passes.len() - 1
        });
        SamplePlace { source, position: self.passes[known].1.position(nth) }
    }

    /// Build a block. The first block starts with the epoch, and the last block may be short, so every epoch has exact
    /// shares. With `Exhausted::Repeat`, each source resumes where the previous epoch ended. Otherwise, every epoch starts
    /// over.
    fn block(&self, number: u64) -> OrderBlock {
        let len = self.program.len;
        let base = if self.mix.exhausted == Exhausted::Repeat { self.epoch * len } else { 0 };
        let (begin, end) = (number * self.program.block, ((number + 1) * self.program.block).min(len));
        let mut counted = self.program.counted.lock().unwrap_or_else(PoisonError::into_inner);
        let mut cursor = match counted.take() {
            Some(cursor) if self.quota.is_near(&cursor, base + begin) => cursor,
            _ => self.quota.cursor(base + begin),
        };
        self.quota.advance(&mut cursor, base + begin);
        let before = cursor.counts.clone();
        self.quota.advance(&mut cursor, base + end);
        let mut sum = 0;
        let ends = cursor.counts.iter().zip(&before).map(|(after, before)| {
            sum += after - before;
            sum
        });
        let ends = ends.collect();
        *counted = Some(cursor);
        drop(counted);
        let permutation =
            Permutation::new(end - begin, key(&[self.program.seed, Purpose::Mix as u64, self.epoch, number]));
        OrderBlock { number, permutation, before, ends }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::sequence::Order;
    use proptest::prelude::*;

    fn sources(sizes: &[u64]) -> Vec<Sequence> {
        sizes
            .iter()
            .enumerate()
            .map(|(i, size)| Sequence::new(Order::Full, i as u64, *size, 12, None).unwrap())
            .collect()
    }

    fn mixed(sizes: &[u64], shares: &[u64], epoch_samples: u64, exhausted: Exhausted) -> Result<Program> {
        Program::new(
            5,
            sources(sizes),
            &["one".into()],
            Some(Mix { shares: shares.to_vec(), epoch_samples, exhausted }),
            12,
        )
    }

    proptest! {
        #[test]
        fn each_source_is_visited_in_its_own_order(sizes in prop::collection::vec(1u64..50, 1..4), epoch_samples in 1u64..200) {
            let shares: Vec<u64> = (1..=sizes.len() as u64).collect();
            let program = mixed(&sizes, &shares, epoch_samples, Exhausted::Repeat).unwrap();
            let mut visited: Vec<Vec<u64>> = vec![Vec::new(); sizes.len()];
            for epoch in 0..3 {
                let places = program.places(epoch, 0..program.len());
                places.into_iter().for_each(|place| visited[place.source].push(place.position));
                let counts = Quota::new(&shares).unwrap().counts((epoch + 1) * epoch_samples);
                prop_assert!(visited.iter().zip(counts).all(|(visited, count)| visited.len() as u64 == count));
            }
            let counts = Quota::new(&shares).unwrap().counts(epoch_samples * 3);
            for (source, visited) in visited.iter_mut().enumerate() {
                prop_assert_eq!(visited.len() as u64, counts[source]);
                // The visit counts of any two samples differ by at most one.
                let mut times = vec![0u64; sizes[source] as usize];
                visited.iter().for_each(|position| times[*position as usize] += 1);
                let (least, most) = (times.iter().min().unwrap(), times.iter().max().unwrap());
                prop_assert!(most - least <= 1, "{:?}", times);
            }
        }
    }

    #[test]
    fn blocks_hold_exact_shares_and_seeking_is_free() {
        let program = mixed(&[1000, 1000], &[3, 1], 960, Exhausted::Repeat).unwrap();
        let places = program.places(0, 0..960);
        for block in places.chunks(12) {
            assert_eq!(block.iter().filter(|place| place.source == 1).count(), 3);
        }
        assert_eq!(program.places(0, [500, 13, 959]), [places[500], places[13], places[959]]);
        assert_ne!(
            places[..12].iter().map(|p| p.source).collect::<Vec<_>>(),
            places[12..24].iter().map(|p| p.source).collect::<Vec<_>>()
        );
    }

    #[test]
    fn joined_sources_are_visited_as_one() {
        let sequence = |order| Sequence::new(order, 7, 9, 12, None).unwrap();
        let joined = |order| Program::joined(7, sequence(order), [4, 0, 3, 2].into_iter(), 12);
        let all: Vec<SamplePlace> = [(0, 4), (2, 3), (3, 2)]
            .into_iter()
            .flat_map(|(source, len)| (0..len).map(move |position| SamplePlace { source, position }))
            .collect();
        assert_eq!(joined(Order::Sequential).places(3, 0..9), all);
        let (shuffled, whole) = (joined(Order::Full).places(3, 0..9), sequence(Order::Full));
        let alone = whole.epoch(3);
        assert_eq!(shuffled, (0..9).map(|draw| all[alone.position(draw) as usize]).collect::<Vec<_>>());
        assert_eq!(joined(Order::Full).drawn(0, 2..4, |_| false), 2);
    }

    #[test]
    fn exhausted_sources_stop_or_raise() {
        let stopped = mixed(&[10, 100], &[1, 1], 100, Exhausted::Stop).unwrap();
        assert_eq!(stopped.len(), 20);
        let mut of_first: Vec<u64> = stopped
            .places(1, 0..20)
            .into_iter()
            .filter(|place| place.source == 0)
            .map(|place| place.position)
            .collect();
        of_first.sort();
        assert_eq!(of_first, (0..10).collect::<Vec<_>>());
        let error = mixed(&[10, 100], &[1, 1], 100, Exhausted::Raise).err().unwrap();
        assert!(error.message().contains("50 from source `one`, which has only 10"), "{error}");
    }
}
