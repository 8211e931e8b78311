//! What an epoch visits, over one source or a mixture of several: draw → (source, sample of it). Pure.

use penstock_error::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::order::Sequence;
use crate::permutation::Permutation;
use crate::random::{Purpose, key};

/// What happens when a source of a mixture has given all its samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Exhausted {
    /// It begins again, in its next order; sources go on where they were in the next epoch.
    Repeat,
    /// The epoch ends before the first source would repeat.
    Stop,
    /// An epoch that needs more is refused.
    Raise,
}

/// A mixture, as states hold it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mix {
    /// Shares of the sources: of 2^32 together.
    pub shares: Vec<u64>,
    pub epoch_samples: u64,
    pub exhausted: Exhausted,
}

pub struct Program {
    seed: u64,
    sources: Vec<Sequence>,
    mix: Option<Mix>,
    block: u64,
    len: u64,
}

/// Where a draw leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub source: usize,
    pub position: u64,
}

impl Program {
    /// `block`: draws inside which sources are shuffled.
    pub fn new(seed: u64, sources: Vec<Sequence>, mix: Option<Mix>, block: u64) -> Result<Program> {
        let wrong = |text: String| Err(Error::new("invalid-argument", text));
        let Some(mix) = mix else {
            let [source] = &sources[..] else { return wrong("several sources need a mixture".into()) };
            let len = source.len();
            return Ok(Program { seed, sources, mix: None, block, len });
        };
        if mix.shares.len() != sources.len() || mix.shares.iter().sum::<u64>() == 0 {
            return wrong(format!("{} shares for {} sources", mix.shares.len(), sources.len()));
        }
        if let Some(empty) = sources.iter().zip(&mix.shares).position(|(source, share)| source.is_empty() && *share > 0) {
            return wrong(format!("source {empty} of the mixture has no samples"));
        }
        let over = |total: u64| {
            let counts = counts_of(&mix.shares, total);
            sources.iter().zip(counts).position(|(source, count)| count > source.len())
        };
        let mut len = mix.epoch_samples;
        if let (Exhausted::Raise, Some(source)) = (mix.exhausted, over(len)) {
            let (count, has) = (counts_of(&mix.shares, len)[source], sources[source].len());
            return Err(Error::new(
                "invalid-argument",
                format!("cannot mix: {len} samples an epoch need {count} of source {source}, which has {has}"),
            )
            .hint("take fewer, or exhausted=\"repeat\""));
        }
        if mix.exhausted == Exhausted::Stop && over(len).is_some() {
            let (mut low, mut high) = (0, len); // The most that fits lies in low..high.
            while high - low > 1 {
                let middle = low + (high - low) / 2;
                if over(middle).is_some() { high = middle } else { low = middle }
            }
            len = low;
        }
        Ok(Program { seed, sources, mix: Some(mix), block, len })
    }

    /// Draws of an epoch.
    pub fn len(&self) -> u64 {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// How many of these samples of the only source are drawn by draws that `mine` says. In a mixture it is not known; at most all of them
    /// in a pass.
    pub fn drawn(&self, epoch: u64, positions: std::ops::Range<u64>, mine: impl Fn(u64) -> bool) -> u64 {
        match &self.mix {
            Some(_) => positions.end - positions.start,
            None => {
                let epoch = self.sources[0].epoch(epoch);
                positions.filter(|position| epoch.draw_of(*position).is_none_or(&mine)).count() as u64
            }
        }
    }

    /// Where draws of an epoch lead.
    pub fn places(&self, epoch: u64, draws: impl IntoIterator<Item = u64>) -> Vec<Place> {
        let Some(mix) = &self.mix else {
            let epoch = self.sources[0].epoch(epoch);
            return draws.into_iter().map(|draw| Place { source: 0, position: epoch.position(draw) }).collect();
        };
        let mut mixing = Mixing { program: self, mix, epoch, block: None, passes: Vec::new() };
        draws.into_iter().map(|draw| mixing.place(draw)).collect()
    }
}

/// How many of the first `total` draws come from each source: exact shares of them, nested floors, so that no count ever falls as
/// `total` grows and all of them sum to it. Source: the idea of Grain's `mix`, with a chain instead of a tree.
pub fn counts_of(shares: &[u64], total: u64) -> Vec<u64> {
    let (mut left, mut weight) = (total, shares.iter().sum::<u64>());
    let mut counts = Vec::with_capacity(shares.len());
    for share in shares {
        let count = if weight == 0 { 0 } else { (u128::from(left) * u128::from(*share) / u128::from(weight)) as u64 };
        counts.push(count);
        left -= count;
        weight -= share;
    }
    counts
}

struct Mixing<'a> {
    program: &'a Program,
    mix: &'a Mix,
    epoch: u64,
    block: Option<Block>,
    /// Open passes of the sources: (source, pass) with the epoch of its sequence.
    passes: Vec<((usize, u64), crate::order::Epoch<'a>)>,
}

/// One block of the mixture: how its places are shared out.
struct Block {
    number: u64,
    permutation: Permutation,
    /// Per source: draws before this block, and where its share of the block ends.
    before: Vec<u64>,
    ends: Vec<u64>,
}

impl Mixing<'_> {
    fn place(&mut self, draw: u64) -> Place {
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
        Place { source, position: self.passes[known].1.position(nth) }
    }

    /// Blocks begin with their epoch, whose last one may be short: so every epoch has its exact shares. Repeating sources go on where
    /// the last epoch left them; else every epoch begins anew.
    fn block(&self, number: u64) -> Block {
        let (shares, len) = (&self.mix.shares, self.program.len);
        let base = if self.mix.exhausted == Exhausted::Repeat { self.epoch * len } else { 0 };
        let (begin, end) = (number * self.program.block, ((number + 1) * self.program.block).min(len));
        let before = counts_of(shares, base + begin);
        let mut sum = 0;
        let ends = counts_of(shares, base + end).into_iter().zip(&before).map(|(after, before)| {
            sum += after - before;
            sum
        });
        let ends = ends.collect();
        let permutation = Permutation::new(end - begin, key(&[self.program.seed, Purpose::Mix as u64, self.epoch, number]));
        Block { number, permutation, before, ends }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::Order;
    use proptest::prelude::*;

    fn sources(sizes: &[u64]) -> Vec<Sequence> {
        sizes.iter().enumerate().map(|(i, size)| Sequence::new(Order::Full, i as u64, *size, 12, None).unwrap()).collect()
    }

    fn mixed(sizes: &[u64], shares: &[u64], epoch_samples: u64, exhausted: Exhausted) -> Result<Program> {
        Program::new(5, sources(sizes), Some(Mix { shares: shares.to_vec(), epoch_samples, exhausted }), 12)
    }

    proptest! {
        #[test]
        fn counts_never_fall_and_sum_to_the_total(shares in prop::collection::vec(0u64..1000, 1..6), total in 0u64..10_000) {
            prop_assume!(shares.iter().sum::<u64>() > 0);
            let (now, next) = (counts_of(&shares, total), counts_of(&shares, total + 1));
            prop_assert_eq!(now.iter().sum::<u64>(), total);
            prop_assert!(now.iter().zip(&next).all(|(now, next)| now <= next));
        }

        #[test]
        fn each_source_is_visited_in_its_own_order(sizes in prop::collection::vec(1u64..50, 1..4), epoch_samples in 1u64..200) {
            let shares: Vec<u64> = (1..=sizes.len() as u64).collect();
            let program = mixed(&sizes, &shares, epoch_samples, Exhausted::Repeat).unwrap();
            let mut visited: Vec<Vec<u64>> = vec![Vec::new(); sizes.len()];
            for epoch in 0..3 {
                let places = program.places(epoch, 0..program.len());
                places.into_iter().for_each(|place| visited[place.source].push(place.position));
                let counts = counts_of(&shares, (epoch + 1) * epoch_samples);
                prop_assert!(visited.iter().zip(counts).all(|(visited, count)| visited.len() as u64 == count));
            }
            let counts = counts_of(&shares, epoch_samples * 3);
            for (source, visited) in visited.iter_mut().enumerate() {
                prop_assert_eq!(visited.len() as u64, counts[source]);
                // Whole passes see every sample as often as every other, up to one.
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
        assert_ne!(places[..12].iter().map(|p| p.source).collect::<Vec<_>>(), places[12..24].iter().map(|p| p.source).collect::<Vec<_>>());
    }

    #[test]
    fn exhausted_sources_stop_or_raise() {
        let stopped = mixed(&[10, 100], &[1, 1], 100, Exhausted::Stop).unwrap();
        assert_eq!(stopped.len(), 21);
        let mut of_first: Vec<u64> =
            stopped.places(1, 0..21).into_iter().filter(|place| place.source == 0).map(|place| place.position).collect();
        of_first.sort();
        assert_eq!(of_first, (0..10).collect::<Vec<_>>());
        let error = mixed(&[10, 100], &[1, 1], 100, Exhausted::Raise).err().unwrap();
        assert!(error.message().contains("50 of source 0, which has 10"), "{error}");
    }
}
