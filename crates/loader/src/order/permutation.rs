//! A permutation of 0..n determined by a seed. Small permutations use a shuffled table; large ones use a keyed xor-Feistel
//! network with cycle walking, which needs no table.
//!
//! Every permutation is a bijection with an exact inverse. Each look-up takes O(1) time, except an inverse look-up in a table,
//! which is a linear search. The output never changes, because loader states rely on it (they record it as `permutation: 2`).
//! `tests/golden` contains the expected values. A network with few bits cannot produce most orders and produces some far more
//! often than others. A table produces each order equally often. Sources: the Fisher-Yates shuffle, Durstenfeld 1964; Black and
//! Rogaway, "Ciphers with arbitrary finite domains", 2002.

use std::sync::Arc;

use crate::order::random::{Draws, key};

/// Maximum number of elements in a shuffled table. The largest table occupies 4 KiB and takes about 20 µs to build.
const TABLE: u64 = 2048;
/// Number of half-rounds. Each half-round changes half of the bits. With fewer half-rounds, differences between neighbours are
/// visibly uneven.
const ROUNDS: usize = 8;
/// Number of half-rounds for values of at most `SMALL_BITS` bits, which mix more slowly.
const ROUNDS_SMALL: usize = 12;
const SMALL_BITS: u32 = 16;

#[derive(Debug, Clone)]
pub struct Permutation(Kind);

#[derive(Debug, Clone)]
enum Kind {
    Table(Arc<[u16]>),
    Network(Network),
}

impl Permutation {
    pub fn new(n: u64, seed: u64) -> Permutation {
        Permutation(if n <= TABLE { Kind::Table(table(n, seed)) } else { Kind::Network(Network::new(n, seed)) })
    }

    /// Return the value at `place`, which must be less than n.
    #[inline]
    pub fn at(&self, place: u64) -> u64 {
        match &self.0 {
            Kind::Table(table) => table[place as usize].into(),
            Kind::Network(network) => network.at(place),
        }
    }

    /// Return the place of `value`, which must be less than n. A table is searched linearly.
    #[inline]
    pub fn place_of(&self, value: u64) -> u64 {
        match &self.0 {
            Kind::Table(table) => table.iter().position(|found| u64::from(*found) == value).unwrap_or(0) as u64,
            Kind::Network(network) => network.place_of(value),
        }
    }
}

/// Shuffle 0..n, with every order equally likely.
fn table(n: u64, seed: u64) -> Arc<[u16]> {
    let mut draws = Draws::new(key(&[seed, n, u64::MAX]), 0, 0);
    let mut table: Vec<u16> = (0..n as u16).collect();
    for last in (1..table.len()).rev() {
        table.swap(last, draws.below(last as u64 + 1) as usize);
    }
    table.into()
}

#[derive(Debug, Clone)]
struct Network {
    n: u64,
    /// Number of bits in the low half. The high half has the same number of bits or one bit fewer.
    low_bits: u32,
    high_bits: u32,
    rounds: usize,
    keys: [u64; ROUNDS_SMALL],
}

impl Network {
    fn new(n: u64, seed: u64) -> Network {
        let bits = (u64::BITS - n.saturating_sub(1).leading_zeros()).max(2);
        let rounds = if bits <= SMALL_BITS { ROUNDS_SMALL } else { ROUNDS };
        let keys = std::array::from_fn(|round| key(&[seed, n, round as u64]));
        Network { n, low_bits: bits - bits / 2, high_bits: bits / 2, rounds, keys }
    }

    /// Return the value at `place`, which must be less than n.
    #[inline]
    fn at(&self, place: u64) -> u64 {
        debug_assert!(place < self.n);
        let mut value = place;
        loop {
            value = (0..self.rounds).fold(value, |value, round| self.half_round(value, round));
            if value < self.n {
                return value;
            }
        }
    }

    /// Return the place of `value`, which must be less than n.
    #[inline]
    fn place_of(&self, value: u64) -> u64 {
        debug_assert!(value < self.n);
        let mut place = value;
        loop {
            place = (0..self.rounds).rev().fold(place, |place, round| self.half_round(place, round));
            if place < self.n {
                return place;
            }
        }
    }

    /// Xor one half with a function of the other half. The operation is its own inverse.
    #[inline]
    fn half_round(&self, value: u64, round: usize) -> u64 {
        let (low, high) = (value & ((1 << self.low_bits) - 1), value >> self.low_bits);
        match round % 2 {
            0 => value ^ (scramble(low ^ self.keys[round]) >> (u64::BITS - self.high_bits)) << self.low_bits,
            _ => value ^ scramble(high ^ self.keys[round]) >> (u64::BITS - self.low_bits),
        }
    }
}

#[inline]
fn scramble(word: u64) -> u64 {
    let once = word.wrapping_mul(0xd6e8_feb8_6659_fd93);
    (once ^ (once >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn boundaries() -> impl Iterator<Item = u64> {
        (1..64).flat_map(|power| [(1u64 << power) - 1, 1 << power, (1 << power) + 1]).filter(|n| *n < 1 << 62)
    }

    #[test]
    fn every_small_n_is_a_bijection_with_an_exact_inverse() {
        for n in (1..=4096u64).chain([65_535, 65_536, 65_537, 262_145, 1_048_577, 1_281_167]) {
            let permutation = Permutation::new(n, 7);
            let mut seen = vec![false; n as usize];
            for place in 0..n {
                let value = permutation.at(place);
                assert!(
                    value < n && !std::mem::replace(&mut seen[value as usize], true),
                    "{value} occurs twice for n = {n}"
                );
                assert_eq!(permutation.place_of(value), place);
            }
        }
    }

    #[test]
    fn large_n_have_an_exact_inverse() {
        for n in boundaries() {
            let permutation = Permutation::new(n, 11);
            for place in (0..64).map(|i| key(&[i]) % n).chain([0, n - 1]) {
                let value = permutation.at(place);
                assert!(value < n);
                assert_eq!(permutation.place_of(value), place);
            }
        }
    }

    /// Check chi squared for the differences between neighbours, in 64 bins. With 63 degrees of freedom, p = 0.001 corresponds
    /// to 103.4.
    #[test]
    fn differences_of_neighbours_are_even() {
        for n in [1 << 17, (1 << 20) + 1, 1_281_167, 400_000_000_000u64] {
            for seed in 0..3 {
                let permutation = Permutation::new(n, seed);
                let (mut bins, count) = ([0f64; 64], 100_000u64);
                for place in 0..count {
                    let difference = (permutation.at(place + 1) + n - permutation.at(place)) % n;
                    bins[(u128::from(difference) * 64 / u128::from(n)) as usize] += 1.0;
                }
                let expected = count as f64 / 64.0;
                let surprise: f64 = bins.iter().map(|bin| (bin - expected).powi(2) / expected).sum();
                assert!(surprise < 120.0, "chi squared is {surprise} for n = {n}, seed {seed}");
            }
        }
    }

    /// Return how many standard deviations chi squared of counts, each with its expected value, is above its own expected value.
    fn surprise(counts: impl Iterator<Item = (f64, f64)>) -> f64 {
        let (sum, cells) = counts.fold((0.0, 0.0), |(sum, cells), (found, expected)| {
            (sum + (found - expected).powi(2) / expected, cells + 1.0)
        });
        (sum - (cells - 1.0)) / (2.0 * (cells - 1.0)).sqrt()
    }

    const SEEDS: u64 = 100_000;

    /// Each of the n! orders of a few elements occurs equally often.
    #[test]
    fn every_order_of_few_elements_is_as_likely_as_any_other() {
        for n in 2..=8u64 {
            let orders: u64 = (1..=n).product();
            let seeds = SEEDS.max(orders * 12);
            let mut counts = vec![0f64; orders as usize];
            for seed in 0..seeds {
                let permutation = Permutation::new(n, seed);
                let order: Vec<u64> = (0..n).map(|place| permutation.at(place)).collect();
                let number = (0..n as usize).fold(0, |number, place| {
                    number * (n - place as u64)
                        + order[place + 1..].iter().filter(|later| **later < order[place]).count() as u64
                });
                counts[number as usize] += 1.0;
            }
            let found = surprise(counts.into_iter().map(|count| (count, seeds as f64 / orders as f64)));
            assert!(found < 4.5, "{found} standard deviations for n = {n}");
        }
    }

    /// Over many keys, every element occurs equally often at each place. The same applies to pairs at neighbouring places, and to
    /// steps between neighbours. The sizes cover the switch from tables to networks.
    #[test]
    fn places_pairs_and_steps_are_even() {
        for n in [9u64, 16, 31, 64, 100, 255, 2047, 2048, 2049, 3000, 4096, 4097, 10_007, 65_536, 65_537, 1_000_003] {
            let bins = n.min(64);
            let bin = |value: u64| (u128::from(value) * u128::from(bins) / u128::from(n)) as usize;
            // Number of elements per bin, which is approximate for large n.
            let mut sizes = vec![0f64; bins as usize];
            if n <= 100_000 {
                (0..n).for_each(|value| sizes[bin(value)] += 1.0);
            } else {
                sizes.fill(n as f64 / bins as f64);
            }
            for place in [0, n / 3, n - 2] {
                let (mut places, mut steps, mut pairs) =
                    (vec![0f64; bins as usize], vec![0f64; bins as usize], vec![0f64; (bins * bins) as usize]);
                for seed in 0..SEEDS {
                    let permutation = Permutation::new(n, key(&[seed, n]));
                    let (one, next) = (permutation.at(place), permutation.at(place + 1));
                    places[bin(one)] += 1.0;
                    steps[bin((next + n - one) % n)] += 1.0;
                    pairs[bin(one) * bins as usize + bin(next)] += 1.0;
                    if n > 64 && seed * n > 2_000_000_000 {
                        break;
                    }
                }
                let count: f64 = places.iter().sum();
                let even = |counts: &[f64], expected: &dyn Fn(usize) -> f64| {
                    surprise(
                        counts
                            .iter()
                            .enumerate()
                            .map(|(at, found)| (*found, expected(at)))
                            .filter(|(_, expected)| *expected > 0.0),
                    )
                };
                let total = n as f64;
                assert!(
                    even(&places, &|at| count * sizes[at] / total) < 5.0,
                    "values at place {place} are uneven for n = {n}"
                );
                // A step is never 0.
                let step = |at: usize| count * (sizes[at] - f64::from(u8::from(at == 0))) / (total - 1.0);
                assert!(even(&steps, &step) < 5.0, "steps at place {place} are uneven for n = {n}");
                let pair = |at: usize| {
                    let (one, next) = (at / bins as usize, at % bins as usize);
                    count * sizes[one] * (sizes[next] - f64::from(u8::from(one == next))) / (total * (total - 1.0))
                };
                assert!(even(&pairs, &pair) < 5.0, "pairs at place {place} are uneven for n = {n}");
            }
        }
    }
}
