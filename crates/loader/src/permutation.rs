//! A permutation of 0..n that is computed, not stored: a keyed xor-Feistel network with cycle walking.
//!
//! Bijective for every n, the inverse exact, O(1) for any place. What it gives is frozen: states of loaders rely on it
//! (`permutation: 1` there, golden vectors in `tests/golden`). Source: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002.

use crate::random::key;

/// Half-rounds: each changes one half of the bits. Fewer show in the differences of neighbours.
const ROUNDS: usize = 8;
/// Halves of few bits mix slowly.
const ROUNDS_SMALL: usize = 12;
const SMALL_BITS: u32 = 16;

#[derive(Debug, Clone)]
pub struct Permutation {
    n: u64,
    /// Bits of the low half; the high half has as many, or one less.
    low_bits: u32,
    high_bits: u32,
    rounds: usize,
    keys: [u64; ROUNDS_SMALL],
}

impl Permutation {
    pub fn new(n: u64, seed: u64) -> Permutation {
        let bits = (u64::BITS - n.saturating_sub(1).leading_zeros()).max(2);
        let rounds = if bits <= SMALL_BITS { ROUNDS_SMALL } else { ROUNDS };
        let keys = std::array::from_fn(|round| key(&[seed, n, round as u64]));
        Permutation { n, low_bits: bits - bits / 2, high_bits: bits / 2, rounds, keys }
    }

    /// Where place `place` < n goes.
    #[inline]
    pub fn at(&self, place: u64) -> u64 {
        debug_assert!(place < self.n);
        let mut value = place;
        loop {
            value = (0..self.rounds).fold(value, |value, round| self.half_round(value, round));
            if value < self.n {
                return value;
            }
        }
    }

    /// The place that goes to `value` < n.
    #[inline]
    pub fn place_of(&self, value: u64) -> u64 {
        debug_assert!(value < self.n);
        let mut place = value;
        loop {
            place = (0..self.rounds).rev().fold(place, |place, round| self.half_round(place, round));
            if place < self.n {
                return place;
            }
        }
    }

    /// Xor one half with a function of the other: its own inverse.
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
                assert!(value < n && !std::mem::replace(&mut seen[value as usize], true), "{value} twice for n = {n}");
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

    /// Chi squared of the differences of neighbours in 64 bins: 63 degrees of freedom, 103.4 at p = 0.001.
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
                assert!(surprise < 120.0, "{surprise} for n = {n}, seed {seed}");
            }
        }
    }

    /// Over many keys, every element of a small set comes to every place about equally often.
    #[test]
    fn small_sets_are_shuffled_evenly() {
        for n in [2u64, 3, 5, 10, 64] {
            let (mut counts, keys) = (vec![0f64; (n * n) as usize], 20_000);
            for seed in 0..keys {
                let permutation = Permutation::new(n, seed);
                (0..n).for_each(|place| counts[(place * n + permutation.at(place)) as usize] += 1.0);
            }
            let (expected, freedom) = (keys as f64 / n as f64, ((n - 1) * (n - 1)) as f64);
            let surprise: f64 = counts.iter().map(|count| (count - expected).powi(2) / expected).sum();
            assert!(surprise < freedom + 5.0 * (2.0 * freedom).sqrt() + 8.0, "{surprise} of {freedom} for n = {n}");
        }
    }
}
