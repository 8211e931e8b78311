//! The order of one source: which of its samples a draw of an epoch is. Pure; nothing is stored but the weights a user gave.

use std::sync::Arc;

use penstock_error::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::permutation::Permutation;
use crate::random::{Draws, Purpose, key};

/// How samples are ordered, as states hold it. Sizes are samples; whoever has bytes turns them into samples once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Order {
    /// As they lie.
    Sequential,
    /// A full permutation.
    Full,
    /// Runs of `run_samples` neighbours are permuted; the sequence is cut into lanes, each into windows, permuted inside.
    Window { run_samples: u64, window_samples: u64, lanes: u64 },
    /// Each draw for itself, `samples` of them an epoch, by weights where `weights` names some (their hash).
    Replacement { samples: u64, weights: Option<String> },
}

/// An order with all that it needs: pure functions of (epoch, draw).
#[derive(Debug, Clone)]
pub struct Sequence {
    pub order: Order,
    seed: u64,
    count: u64,
    /// Draws that are dealt out to lanes at a time.
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
        let wrong = |text: String| Err(Error::new("invalid-argument", text));
        match &order {
            Order::Window { run_samples, window_samples, lanes } if *run_samples == 0 || *window_samples == 0 || *lanes == 0 => {
                return wrong("a window order needs runs, windows and lanes of at least one".into());
            }
            Order::Window { lanes, .. } if !block.is_multiple_of(*lanes) => {
                return wrong(format!("{lanes} lanes do not divide order_block_samples={block}"));
            }
            Order::Replacement { weights: Some(_), .. } if weights.as_ref().is_none_or(|alias| alias.len() != count) => {
                return wrong(format!("{} weights for {count} samples", weights.map_or(0, |alias| alias.len())));
            }
            Order::Replacement { samples, .. } if *samples > 0 && count == 0 => {
                return wrong("no samples to draw from".into());
            }
            _ => {}
        }
        Ok(Sequence { order, seed, count, block, weights })
    }

    /// Draws of an epoch.
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
        let of = |purpose: Purpose| key(&[self.seed, purpose as u64, epoch]);
        let permutation = matches!(self.order, Order::Full).then(|| Permutation::new(self.count, of(Purpose::Order)));
        let lanes = match self.order {
            Order::Window { run_samples, window_samples, lanes } => {
                Some(Lanes::new(self.count, self.block, [run_samples, window_samples, lanes], self.seed, epoch))
            }
            _ => None,
        };
        Epoch { sequence: self, epoch, permutation, lanes }
    }
}

impl Epoch<'_> {
    /// Which sample draw `draw` is.
    #[inline]
    pub fn position(&self, draw: u64) -> u64 {
        match (&self.permutation, &self.lanes, &self.sequence.weights) {
            (Some(permutation), ..) => permutation.at(draw),
            (_, Some(lanes), _) => lanes.position(draw),
            (_, _, weights) => match &self.sequence.order {
                Order::Replacement { .. } => {
                    let mut draws = Draws::new(key(&[self.sequence.seed, Purpose::Replacement as u64]), self.epoch, draw);
                    let place = draws.below(self.sequence.count);
                    weights.as_ref().map_or(place, |weights| weights.choose(place, draws.unit()))
                }
                _ => draw,
            },
        }
    }

    /// When a sample is drawn; nothing where it may be drawn many times, or never.
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
/// The *line* is the samples with their runs permuted, the last, shorter run at its end. Each block of `block` draws takes
/// `block / lanes` draws from each lane, one lane after the other; lane l is the stretch [l · lane_samples, (l + 1) · lane_samples) of the line. What is left
/// over behind the last lane is less than a block, and comes last as it stands on the line, so that ranks read runs of their own there too.
struct Lanes {
    count: u64,
    run: u64,
    runs: Permutation,
    block: u64,
    /// Draws of one lane in a block.
    share: u64,
    lane_samples: u64,
    lanes: u64,
    /// Samples of one window of one lane.
    window: u64,
    seed: u64,
    epoch: u64,
}

impl Lanes {
    fn new(count: u64, block: u64, [run, window, lanes]: [u64; 3], seed: u64, epoch: u64) -> Lanes {
        let runs = Permutation::new((count / run).max(1), key(&[seed, Purpose::Blocks as u64, epoch]));
        let share = block / lanes;
        let lane_samples = count / block * share;
        Lanes { count, run, runs, block, share, lane_samples, lanes, window: (window / lanes).max(1), seed, epoch }
    }

    /// Place on the line → sample.
    fn on_line(&self, place: u64) -> u64 {
        match place / self.run {
            run if run < self.count / self.run => self.runs.at(run) * self.run + place % self.run,
            _ => place,
        }
    }

    fn place_of(&self, position: u64) -> u64 {
        match position / self.run {
            run if run < self.count / self.run => self.runs.place_of(run) * self.run + position % self.run,
            _ => position,
        }
    }

    /// The window that place `inner` of a lane is in: its begin, and the permutation inside. Lanes begin their windows at different times,
    /// so that they do not all want new blocks at once.
    fn window(&self, lane: u64, inner: u64) -> (u64, Permutation) {
        let shift = (u128::from(lane) * u128::from(self.window) / u128::from(self.lanes)) as u64;
        let number = (inner + shift) / self.window;
        let begin = (number * self.window).saturating_sub(shift);
        let end = ((number + 1) * self.window - shift).min(self.lane_samples);
        (begin, Permutation::new(end - begin, key(&[self.seed, Purpose::Window as u64, self.epoch, lane, number])))
    }

    fn position(&self, draw: u64) -> u64 {
        let (block, inner) = (draw / self.block, draw % self.block);
        if draw >= self.lane_samples * self.lanes {
            return self.on_line(draw);
        }
        let (lane, inner) = (inner / self.share, block * self.share + inner % self.share);
        let (begin, permutation) = self.window(lane, inner);
        self.on_line(lane * self.lane_samples + begin + permutation.at(inner - begin))
    }

    fn draw_of(&self, position: u64) -> u64 {
        let place = self.place_of(position);
        if place >= self.lane_samples * self.lanes {
            return place;
        }
        let (lane, inner) = (place / self.lane_samples, place % self.lane_samples);
        let (begin, permutation) = self.window(lane, inner);
        let inner = begin + permutation.place_of(inner - begin);
        inner / self.share * self.block + lane * self.share + inner % self.share
    }
}

/// Weights ready for drawing in O(1). Source: Walker 1977, as built by Vose 1991.
#[derive(Debug)]
pub struct Alias {
    /// Up to where a place keeps its own, and whose the rest is.
    table: Vec<(f32, u32)>,
}

impl Alias {
    pub fn new(weights: &[f64]) -> Result<Alias> {
        let wrong = |text: String| Err(Error::new("invalid-argument", format!("cannot draw by weights: {text}")));
        if let Some(at) = weights.iter().position(|weight| !weight.is_finite() || *weight < 0.0) {
            return wrong(format!("weight {at} is {}, expected a finite number of at least 0", weights[at]));
        }
        let sum = weights.iter().sum::<f64>() + 0.0; // The sum of none is -0.
        if weights.len() > u32::MAX as usize {
            return wrong(format!("{} weights, at most 2^32", weights.len()));
        }
        if sum <= 0.0 || !sum.is_finite() {
            return wrong(format!("they sum to {sum}"));
        }
        let mut scaled: Vec<f64> = weights.iter().map(|weight| weight / sum * weights.len() as f64).collect();
        let mut table: Vec<(f32, u32)> = (0..weights.len()).map(|place| (1.0, place as u32)).collect();
        let (mut small, mut large): (Vec<usize>, Vec<usize>) = (0..weights.len()).partition(|place| scaled[*place] < 1.0);
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

    pub fn len(&self) -> u64 {
        self.table.len() as u64
    }

    pub fn is_empty(&self) -> bool {
        self.table.is_empty()
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

    #[test]
    fn lanes_of_different_ranks_touch_different_runs() {
        let sequence = Sequence::new(window(64, 64 * 32, 8), 1, 64 * 1000, 80, None).unwrap();
        let epoch = sequence.epoch(0);
        let mut runs: Vec<std::collections::HashSet<u64>> = vec![Default::default(); 4];
        for draw in 0..sequence.len() / 80 * 80 {
            runs[(draw % 80 / 20) as usize].insert(epoch.position(draw) / 64);
        }
        let read: usize = runs.iter().map(|runs| runs.len()).sum();
        assert!(read <= 1004, "{read} runs read by 4 ranks, of 1000");
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
        for (weights, text) in
            [(vec![1.0, f64::NAN], "weight 1"), (vec![-1.0], "weight 0"), (vec![0.0, 0.0], "sum to 0"), (vec![], "sum to 0")]
        {
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
