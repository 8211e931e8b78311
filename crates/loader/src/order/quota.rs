//! Counts how many of the first draws of a mixture belong to each source. At any draw and for any number of sources, each count
//! differs from the exact share by less than one draw. The cost of a seek does not depend on the number of draws before it.
//!
//! The j-th draw of a source is eligible once the source's exact share exceeds j - 1. It is due when the share reaches j. Always
//! choosing the eligible draw with the earliest deadline meets every deadline. Sources: Tijdeman 1980, "The chairman assignment
//! problem"; Baruah et al. 1996, "Proportionate progress". A seek starts the schedule one `horizon` earlier, with the most
//! urgent draws already done. Schedules with different starts agree after one `horizon`, as a test verifies.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use penstock_error::{Error, Result};

/// Every source must be drawn at least once in this many draws. A rarer source would make seeks slow.
const RAREST: u64 = 1 << 20;

/// Shares of the sources, as integers.
#[derive(Debug, Clone)]
pub struct Quota {
    shares: Vec<u64>,
    total: u64,
    /// The number of draws within which every source is drawn at least once.
    horizon: u64,
}

/// The schedule at one draw, ready to advance.
#[derive(Debug, Clone)]
pub struct Cursor {
    pub at: u64,
    /// Draws from each source before `at`.
    pub counts: Vec<u64>,
    /// Sources whose next draw is eligible: (deadline, source).
    ready: BinaryHeap<Reverse<(u64, usize)>>,
    /// Sources whose next draw is eligible later: (first eligible draw, source).
    waiting: BinaryHeap<Reverse<(u64, usize)>>,
}

impl Quota {
    pub fn new(shares: &[u64]) -> Result<Quota> {
        let invalid = |text: String| Err(Error::new("invalid-argument", text));
        let total = shares.iter().try_fold(0u64, |sum, share| sum.checked_add(*share)).filter(|total| *total < 1 << 62);
        let Some(total) = total.filter(|total| *total > 0) else {
            return invalid(format!(
                "the shares of {} sources sum to 0 or to at least 2^62, expected a sum in between",
                shares.len()
            ));
        };
        let least = shares.iter().copied().filter(|share| *share > 0).min().unwrap_or(total);
        let horizon = total.div_ceil(least);
        if horizon > RAREST {
            let source = shares.iter().position(|share| *share == least).unwrap_or(0);
            return invalid(format!("source {source} gets one in {horizon} draws, expected at least one in {RAREST}"));
        }
        Ok(Quota { shares: shares.to_vec(), total, horizon })
    }

    /// Count the draws from each source before draw `at`. Simulates at most `horizon` draws.
    pub fn counts(&self, at: u64) -> Vec<u64> {
        self.cursor(at).counts
    }

    /// Seek to draw `at`.
    pub fn cursor(&self, at: u64) -> Cursor {
        let mut cursor = self.begin(at.saturating_sub(self.horizon));
        self.advance(&mut cursor, at);
        cursor
    }

    /// Return whether advancing a cursor to `at` is cheaper than a seek.
    pub fn is_near(&self, cursor: &Cursor, at: u64) -> bool {
        (cursor.at..=cursor.at.saturating_add(self.horizon)).contains(&at)
    }

    /// Start a schedule at `at`, with the most urgent draws already done.
    fn begin(&self, at: u64) -> Cursor {
        let weighted = |share: u64| u128::from(at) * u128::from(share);
        let whole_samples = |share: &u64| (weighted(*share) / u128::from(self.total)) as u64;
        let mut counts: Vec<u64> = self.shares.iter().map(whole_samples).collect();
        let ahead = (at - counts.iter().sum::<u64>()) as usize;
        let mut begun: Vec<(u64, usize)> = (0..counts.len())
            .filter(|source| weighted(self.shares[*source]) % u128::from(self.total) != 0)
            .map(|source| (self.end_of(source, counts[source] + 1), source))
            .collect();
        begun.sort_unstable();
        begun.iter().take(ahead).for_each(|(_, source)| counts[*source] += 1);
        let mut cursor = Cursor { at, counts, ready: BinaryHeap::new(), waiting: BinaryHeap::new() };
        (0..self.shares.len())
            .filter(|source| self.shares[*source] > 0)
            .for_each(|source| self.offer(&mut cursor, source));
        cursor
    }

    /// Advance to draw `to` and call `each` with every draw and its source.
    pub fn advance_with(&self, cursor: &mut Cursor, to: u64, mut each: impl FnMut(u64, usize)) {
        while cursor.at < to {
            while let Some(Reverse((_, source))) =
                cursor.waiting.peek().copied().filter(|Reverse((from, _))| *from <= cursor.at)
            {
                cursor.waiting.pop();
                cursor.ready.push(Reverse((self.end_of(source, cursor.counts[source] + 1), source)));
            }
            // Exact shares sum to the number of draws, so at least one source is always eligible.
            let Some(Reverse((_, source))) = cursor.ready.pop() else { return };
            each(cursor.at, source);
            cursor.counts[source] += 1;
            cursor.at += 1;
            self.offer(cursor, source);
        }
    }

    pub fn advance(&self, cursor: &mut Cursor, to: u64) {
        self.advance_with(cursor, to, |_, _| {});
    }

    /// Add the next draw from a source to `ready` if it is already eligible, or to `waiting` if not.
    fn offer(&self, cursor: &mut Cursor, source: usize) {
        let done = cursor.counts[source];
        // The first draw after which the exact share exceeds `done`.
        let from = (u128::from(done) * u128::from(self.total) / u128::from(self.shares[source])) as u64;
        match from <= cursor.at {
            true => cursor.ready.push(Reverse((self.end_of(source, done + 1), source))),
            false => cursor.waiting.push(Reverse((from, source))),
        }
    }

    /// Return the deadline of a source's draw `number`, counted from 1.
    fn end_of(&self, source: usize, number: u64) -> u64 {
        (u128::from(number) * u128::from(self.total)).div_ceil(u128::from(self.shares[source])) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Generate shares of several kinds: equal, random, powers of two, or one large share and many small ones.
    fn shares() -> impl Strategy<Value = Vec<u64>> {
        prop_oneof![
            (1usize..200).prop_map(|count| vec![1; count]),
            prop::collection::vec(1u64..1000, 1..200),
            prop::collection::vec(20_000u64..2_000_000, 1..60),
            prop::collection::vec((0u32..9).prop_map(|power| 1u64 << power), 1..200),
            (1u64..200, any::<bool>()).prop_map(|(count, first)| {
                let mut shares = vec![1; count as usize];
                shares.insert(if first { 0 } else { count as usize }, count);
                shares
            }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]
        #[test]
        fn counts_stay_within_a_draw_of_exact(shares in shares(), begin in prop_oneof![0u64..10, 0u64..1 << 40]) {
            let quota = Quota::new(&shares).unwrap();
            let total = shares.iter().sum::<u64>();
            let mut cursor = quota.cursor(begin);
            prop_assert_eq!(cursor.counts.iter().sum::<u64>(), begin);
            for at in begin..begin + (3 * quota.horizon).min(5_000) {
                for (count, share) in cursor.counts.iter().zip(&shares) {
                    let error = (u128::from(*count) * u128::from(total)).abs_diff(u128::from(at) * u128::from(*share));
                    prop_assert!(error < u128::from(total), "count {} for share {} of {} at draw {}", count, share, total, at);
                }
                quota.advance(&mut cursor, at + 1);
                prop_assert_eq!(cursor.at, at + 1, "no draw is eligible");
            }
        }

        #[test]
        fn a_seek_gives_what_going_there_gives(shares in shares(), begin in 0u64..1 << 40) {
            let quota = Quota::new(&shares).unwrap();
            let mut walked = quota.begin(begin);
            quota.advance(&mut walked, begin + quota.horizon);
            for _ in 0..4 {
                let next = walked.at + quota.horizon / 3 + 1;
                quota.advance(&mut walked, next);
                prop_assert_eq!(&quota.counts(walked.at), &walked.counts, "at {}", walked.at);
            }
        }

        #[test]
        fn a_schedule_does_not_depend_on_its_beginning(shares in shares(), begin in 1u64..1 << 40, seed in 0u64..100) {
            let quota = Quota::new(&shares).unwrap();
            let mut one = quota.begin(begin);
            // Mark arbitrary draws as done in advance, instead of the most urgent ones.
            let mut counts: Vec<u64> = shares.iter().map(|share| (u128::from(begin) * u128::from(*share) / u128::from(quota.total)) as u64).collect();
            let ahead = (begin - counts.iter().sum::<u64>()) as usize;
            let mut begun: Vec<usize> = (0..shares.len()).filter(|s| u128::from(begin) * u128::from(shares[*s]) % u128::from(quota.total) != 0).collect();
            begun.sort_by_key(|source| crate::order::random::key(&[seed, *source as u64]));
            begun[..ahead].iter().for_each(|source| counts[*source] += 1);
            let mut other = Cursor { at: begin, counts, ready: BinaryHeap::new(), waiting: BinaryHeap::new() };
            (0..shares.len()).for_each(|source| quota.offer(&mut other, source));
            for cursor in [&mut one, &mut other] {
                quota.advance(cursor, begin + quota.horizon);
            }
            prop_assert_eq!(one.counts, other.counts);
        }
    }

    #[test]
    fn shares_beyond_range_are_refused() {
        for (shares, text) in [
            (vec![0, 0], "sum to 0"),
            (vec![u64::MAX, 1], "2^62"),
            (vec![1 << 61, 1 << 61], "2^62"),
            (vec![1 << 30, 1], "source 1"),
        ] {
            assert!(Quota::new(&shares).unwrap_err().message().contains(text), "{shares:?}");
        }
        assert_eq!(Quota::new(&[3, 0, 1]).unwrap().counts(8), [6, 0, 2]);
    }
}
