//! The order of one source: a pure function that maps each draw of an epoch to a sample. Only the user's weights are stored.

use std::cell::RefCell;
use std::sync::Arc;

use penstock_error::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::order::permutation::Permutation;
use crate::order::random::{Draws, Purpose, key};

/// The order of samples, as stored in loader states. Sizes are in samples. Callers convert sizes in bytes to numbers of
/// samples.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Order {
    /// Samples are visited in the order of their positions.
    Sequential,
    /// All samples are permuted.
    Full,
    /// Runs of `run_samples` neighbours are permuted. The result is cut into lanes, each lane is cut into windows, and each window
    /// is permuted.
    Window { run_samples: u64, window_samples: u64, lanes: u64 },
    /// Each epoch consists of `samples` independent draws. `weights` is the hash of the weights, or None for equal weights.
    Replacement { samples: u64, weights: Option<String> },
}

/// An order with all its inputs: a pure function of (epoch, draw).
#[derive(Debug, Clone)]
pub struct Sequence {
    pub order: Order,
    seed: u64,
    count: u64,
    /// Draws per block. Each lane gets an equal share of a block.
    block: u64,
    weights: Option<Arc<Alias>>,
}

/// One epoch of a sequence.
pub struct Epoch<'a> {
    sequence: &'a Sequence,
    epoch: u64,
    permutation: Option<Permutation>,
    lanes: Option<Lanes>,
}

impl Sequence {
    pub fn new(order: Order, seed: u64, count: u64, block: u64, weights: Option<Arc<Alias>>) -> Result<Sequence> {
        let invalid = |text: String| Err(Error::new("invalid-argument", text));
        match &order {
            Order::Window { run_samples, window_samples, lanes }
                if *run_samples == 0 || *window_samples == 0 || *lanes == 0 =>
            {
                return invalid("run_samples, window_samples and lanes of a window order must be at least 1".into());
            }
            Order::Window { lanes, .. } if !block.is_multiple_of(*lanes) => {
                return invalid(format!("{lanes} lanes do not divide order_block_samples={block}"));
            }
            Order::Replacement { weights: Some(_), .. }
                if weights.as_ref().is_none_or(|alias| alias.len() != count) =>
            {
                return invalid(format!("{} weights for {count} samples", weights.map_or(0, |alias| alias.len())));
            }
            Order::Replacement { samples, .. } if *samples > 0 && count == 0 => {
                return invalid("no samples to draw from".into());
            }
            _ => {}
        }
        Ok(Sequence { order, seed, count, block, weights })
    }

    /// Count the draws in an epoch.
    pub fn len(&self) -> u64 {
        match self.order {
            Order::Replacement { samples, .. } => samples,
            _ => self.count,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn epoch(&self, epoch: u64) -> Epoch<'_> {
        // A single window that contains all samples is a full permutation.
        let full = match self.order {
            Order::Full => true,
            Order::Window { window_samples, lanes, .. } => {
                window_samples >= self.count && (lanes == 1 || self.count < self.block)
            }
            _ => false,
        };
        let permutation = full.then(|| Permutation::new(self.count, key(&[self.seed, Purpose::Order as u64, epoch])));
        let lanes = match self.order {
            Order::Window { run_samples, window_samples, lanes } if !full => {
                Some(Lanes::new(self.count, self.block, [run_samples, window_samples, lanes], self.seed, epoch))
            }
            _ => None,
        };
        Epoch { sequence: self, epoch, permutation, lanes }
    }
}

impl Epoch<'_> {
    /// Return the sample that `draw` visits.
    #[inline]
    pub fn position(&self, draw: u64) -> u64 {
        match (&self.permutation, &self.lanes, &self.sequence.weights) {
            (Some(permutation), ..) => permutation.at(draw),
            (_, Some(lanes), _) => lanes.position(draw),
            (_, _, weights) => match &self.sequence.order {
                Order::Replacement { .. } => {
                    let mut draws =
                        Draws::new(key(&[self.sequence.seed, Purpose::Replacement as u64]), self.epoch, draw);
                    let place = draws.below(self.sequence.count);
                    weights.as_ref().map_or(place, |weights| weights.choose(place, draws.unit()))
                }
                _ => draw,
            },
        }
    }

    /// Return the draw that visits a sample. Returns None for draws with replacement, which may visit the sample many times or
    /// never.
    pub fn draw_of(&self, position: u64) -> Option<u64> {
        match (&self.permutation, &self.lanes, &self.sequence.order) {
            (Some(permutation), ..) => Some(permutation.place_of(position)),
            (_, Some(lanes), _) => Some(lanes.draw_of(position)),
            (_, _, Order::Sequential) => Some(position),
            _ => None,
        }
    }
}

/// The geometry of a window order in one epoch.
///
/// The *line* is the sequence of samples after runs are permuted, including the last, shorter run. It is rotated by a random number of
/// samples, so that each sample is equally likely to be at each place. Lane l is the stretch [l · lane_samples, (l + 1) · lane_samples)
/// of the line. A block of `block` draws consists of `block / lanes` draws from each lane, one lane after another. Fewer than
/// `block` samples follow the last lane, and they are permuted as one window.
struct Lanes {
    count: u64,
    run: u64,
    runs: Permutation,
    /// The start of the last, shorter run on the line before rotation, or `count` if all runs have full length.
    short_at: u64,
    short: u64,
    turn: u64,
    block: u64,
    /// Draws per lane in a block.
    share: u64,
    lane_samples: u64,
    lanes: u64,
    /// Samples per window of a lane.
    window: u64,
    seed: u64,
    epoch: u64,
    /// The most recently used window of each lane, then the window of the samples after the last lane, each as (number, begin,
    /// permutation).
    open: RefCell<Vec<Option<(u64, u64, Permutation)>>>,
}

impl Lanes {
    fn new(count: u64, block: u64, [run, window, lanes]: [u64; 3], seed: u64, epoch: u64) -> Lanes {
        let number = count.div_ceil(run).max(1);
        let runs = Permutation::new(number, key(&[seed, Purpose::Blocks as u64, epoch]));
        let short = count % run;
        let short_at = if short == 0 { count } else { runs.place_of(number - 1) * run };
        let turn = Draws::new(key(&[seed, Purpose::Blocks as u64, epoch, number]), epoch, 0).below(count.max(1));
        let share = block / lanes;
        let lane_samples = count / block * share;
        let open = RefCell::new(vec![None; lanes as usize + 1]);
        Lanes {
            count,
            run,
            runs,
            short_at,
            short,
            turn,
            block,
            share,
            lane_samples,
            lanes,
            window: (window / lanes).max(1),
            seed,
            epoch,
            open,
        }
    }

    /// Map a place on the line to a sample.
    fn on_line(&self, place: u64) -> u64 {
        let place = (place + self.turn) % self.count;
        let run_and_inner = if place < self.short_at {
            (place / self.run, place % self.run)
        } else if place < self.short_at + self.short {
            (self.short_at / self.run, place - self.short_at)
        } else {
            // Runs after the short one begin earlier, by the number of samples that the short run lacks.
            let place = place + self.run - self.short;
            (place / self.run, place % self.run)
        };
        self.runs.at(run_and_inner.0) * self.run + run_and_inner.1
    }

    fn place_of(&self, position: u64) -> u64 {
        let begin = self.runs.place_of(position / self.run) * self.run;
        let begin = if begin > self.short_at { begin - (self.run - self.short) } else { begin };
        (begin + position % self.run + self.count - self.turn) % self.count
    }

    /// Call `work` with the start and the permutation of the window that contains place `inner` of a lane. Windows of different
    /// lanes are staggered, so that not all lanes need new blocks at the same time.
    fn in_window<T>(&self, lane: u64, inner: u64, work: impl FnOnce(u64, &Permutation) -> T) -> T {
        let rest = lane == self.lanes;
        let shift = (u128::from(lane % self.lanes) * u128::from(self.window) / u128::from(self.lanes)) as u64;
        let number = if rest { 0 } else { (inner + shift) / self.window };
        let mut open = self.open.borrow_mut();
        let (_, begin, permutation) = match &mut open[lane as usize] {
            Some(open) if open.0 == number => open,
            stale => {
                let (begin, end) = match rest {
                    true => (0, self.count - self.lane_samples * self.lanes),
                    false => (
                        (number * self.window).saturating_sub(shift),
                        ((number + 1) * self.window - shift).min(self.lane_samples),
                    ),
                };
                let permutation =
                    Permutation::new(end - begin, key(&[self.seed, Purpose::Window as u64, self.epoch, lane, number]));
                stale.insert((number, begin, permutation))
            }
        };
        work(*begin, permutation)
    }

    fn position(&self, draw: u64) -> u64 {
        let (block, inner) = (draw / self.block, draw % self.block);
        let end = self.lane_samples * self.lanes;
        let (lane, begin, inner) = match draw < end {
            true => {
                (inner / self.share, inner / self.share * self.lane_samples, block * self.share + inner % self.share)
            }
            false => (self.lanes, end, draw - end),
        };
        self.on_line(begin + self.in_window(lane, inner, |first, permutation| first + permutation.at(inner - first)))
    }

    fn draw_of(&self, position: u64) -> u64 {
        let place = self.place_of(position);
        let end = self.lane_samples * self.lanes;
        let (lane, inner) = if place < end {
            (place / self.lane_samples, place % self.lane_samples)
        } else {
            (self.lanes, place - end)
        };
        let inner = self.in_window(lane, inner, |first, permutation| first + permutation.place_of(inner - first));
        match place < end {
            true => inner / self.share * self.block + lane * self.share + inner % self.share,
            false => end + inner,
        }
    }
}

/// An alias table, which prepares weights for weighted draws in O(1) time. Sources: Walker 1977; Vose 1991 for the construction.
#[derive(Debug)]
pub struct Alias {
    /// For each place, the probability that a draw of this place stays there, and the place to which it otherwise moves.
    table: Vec<(f32, u32)>,
}

impl Alias {
    pub fn new(weights: &[f64]) -> Result<Alias> {
        let invalid = |text: String| Err(Error::new("invalid-argument", format!("cannot draw by weights: {text}")));
        if let Some(at) = weights.iter().position(|weight| !weight.is_finite() || *weight < 0.0) {
            return invalid(format!("weight {at} is {}, expected a finite number of at least 0", weights[at]));
        }
        let sum = weights.iter().sum::<f64>() + 0.0; // The sum of an empty slice is -0.
        if weights.len() > u32::MAX as usize {
            return invalid(format!("{} weights, expected fewer than 2^32", weights.len()));
        }
        if sum <= 0.0 || !sum.is_finite() {
            return invalid(format!("they sum to {sum}, expected a finite sum above 0"));
        }
        let mut scaled: Vec<f64> = weights.iter().map(|weight| weight / sum * weights.len() as f64).collect();
        let mut table: Vec<(f32, u32)> = (0..weights.len()).map(|place| (1.0, place as u32)).collect();
        let (mut small, mut large): (Vec<usize>, Vec<usize>) =
            (0..weights.len()).partition(|place| scaled[*place] < 1.0);
        while let (Some(less), Some(more)) = (small.pop(), large.last().copied()) {
            table[less] = (scaled[less] as f32, more as u32);
            scaled[more] -= 1.0 - scaled[less];
            if scaled[more] < 1.0 {
                large.pop();
                small.push(more);
            }
        }
        Ok(Alias { table })
    }

    fn len(&self) -> u64 {
        self.table.len() as u64
    }

    fn choose(&self, place: u64, unit: f64) -> u64 {
        let (own, other) = self.table[place as usize];
        if unit < f64::from(own) { place } else { other.into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn window(run: u64, window: u64, lanes: u64) -> Order {
        Order::Window { run_samples: run, window_samples: window, lanes }
    }

    proptest! {
        #[test]
        fn window_orders_are_bijections_with_an_exact_inverse(
            count in 1u64..3000, share in 1u64..9, lanes in 1u64..9, run in 1u64..70, size in 1u64..900, epoch in 0u64..3,
        ) {
            let sequence = Sequence::new(window(run, size, lanes), 3, count, share * lanes, None).unwrap();
            let epoch = sequence.epoch(epoch);
            let mut seen = vec![false; count as usize];
            for draw in 0..count {
                let position = epoch.position(draw);
                prop_assert!(position < count && !std::mem::replace(&mut seen[position as usize], true));
                prop_assert_eq!(epoch.draw_of(position), Some(draw));
            }
        }
    }

    /// Over many seeds, each sample occurs equally often at each draw. The samples after the last whole run or block change with
    /// the epoch.
    #[test]
    fn tails_of_window_orders_are_even() {
        for (count, run, size, lanes, block) in [
            (7u64, 2, 4, 1, 4),
            (11, 4, 4, 2, 4),
            (13, 5, 100, 1, 6),
            (10, 3, 6, 2, 4),
            (23, 8, 8, 2, 12),
            (5, 8, 8, 1, 8),
            (3, 1, 1, 1, 8),
        ] {
            let mut counts = vec![0f64; (count * count) as usize];
            let seeds = 20_000;
            for seed in 0..seeds {
                let sequence = Sequence::new(window(run, size, lanes), seed, count, block, None).unwrap();
                let epoch = sequence.epoch(seed % 3);
                (0..count).for_each(|draw| counts[(draw * count + epoch.position(draw)) as usize] += 1.0);
            }
            let (expected, freedom) = (seeds as f64 / count as f64, ((count - 1) * (count - 1)) as f64);
            let sum: f64 = counts.iter().map(|found| (found - expected).powi(2) / expected).sum();
            // Draws within one epoch are not independent: neighbours stay together, which increases the variance of the sum.
            let wide = (2.0 * freedom).sqrt() * run as f64;
            assert!(
                (sum - freedom) / wide < 5.0,
                "chi squared {sum} with {freedom} degrees of freedom for {count} samples, runs of {run}, windows of {size}, {lanes} lanes"
            );
            let sequence = Sequence::new(window(run, size, lanes), 1, count, block, None).unwrap();
            let tails: std::collections::HashSet<Vec<u64>> = (0..20)
                .map(|epoch| {
                    let epoch = sequence.epoch(epoch);
                    (count - (count % block).max(2)..count).map(|draw| epoch.position(draw)).collect()
                })
                .collect();
            assert!(tails.len() > 3, "{count} samples end in {tails:?}");
        }
    }

    #[test]
    fn lanes_of_different_ranks_touch_different_runs() {
        let sequence = Sequence::new(window(64, 64 * 32, 8), 1, 64 * 1000, 80, None).unwrap();
        let epoch = sequence.epoch(0);
        let mut runs: Vec<std::collections::HashSet<u64>> = vec![Default::default(); 4];
        for draw in 0..sequence.len() / 80 * 80 {
            runs[(draw % 80 / 20) as usize].insert(epoch.position(draw) / 64);
        }
        let read: usize = runs.iter().map(|runs| runs.len()).sum();
        assert!(read <= 1004, "4 ranks read {read} runs in total, but only 1000 exist");
    }

    #[test]
    fn weights_are_what_is_drawn() {
        let weights = [0.0, 1.0, 2.0, 5.0];
        let order = Order::Replacement { samples: 80_000, weights: Some("w".into()) };
        let sequence = Sequence::new(order, 9, 4, 1, Some(Arc::new(Alias::new(&weights).unwrap()))).unwrap();
        let epoch = sequence.epoch(2);
        let mut counts = [0f64; 4];
        (0..80_000).for_each(|draw| counts[epoch.position(draw) as usize] += 1.0);
        assert_eq!(counts[0], 0.0);
        for place in 1..4 {
            let expected = weights[place] * 10_000.0;
            assert!((counts[place] - expected).abs() < 5.0 * expected.sqrt(), "{counts:?}");
        }
    }

    #[test]
    fn bad_weights_are_named() {
        for (weights, text) in [
            (vec![1.0, f64::NAN], "weight 1"),
            (vec![-1.0], "weight 0"),
            (vec![0.0, 0.0], "sum to 0"),
            (vec![], "sum to 0"),
        ] {
            assert!(Alias::new(&weights).unwrap_err().message().contains(text));
        }
    }

    #[test]
    fn epochs_and_seeds_differ() {
        let order = |seed, epoch| {
            let sequence = Sequence::new(Order::Full, seed, 1000, 1, None).unwrap();
            let epoch = sequence.epoch(epoch);
            (0..1000).map(|draw| epoch.position(draw)).collect::<Vec<_>>()
        };
        assert_ne!(order(0, 0), order(0, 1));
        assert_ne!(order(0, 1), order(1, 0));
        assert_eq!(order(4, 2), order(4, 2));
    }
}
