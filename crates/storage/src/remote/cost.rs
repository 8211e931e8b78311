//! Estimates the cost of a request on this network, in bytes, by timing regular reads.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::ranges::RequestCost;

/// The estimate before any measurement. It assumes a network that handles 1 GB and 8,000 requests per second.
const FIRST_GAP_BYTES: f64 = (128 << 10) as f64;
const LEAST_GAP_BYTES: f64 = (16 << 10) as f64;
const MOST_GAP_BYTES: f64 = (512 << 10) as f64;
/// Maximum ratio of gap bytes to wanted bytes. This maximum limits the cost of a wrong estimate. We measured twelve takes of 1,000
/// random rows of three small columns from MinIO, with 20 ms on each reply. With 64, they received 1,650 bytes for each byte needed, in
/// 1.6 s. With 16, 1,520 in 1.8 s. With 8, 1,050 in 1.8 s. With 4, 680 in 3.0 s. With 1, 270 in 5.9 s.
const WASTE: u64 = 8;
/// Minimum number of requests in a measured read. A read with fewer requests mostly waits for one response, whatever its size.
const LEAST_REQUESTS: usize = 16;
/// Each new observation multiplies the weight of all older ones by this factor.
const FADING: f64 = 0.95;

/// A least-squares fit of `seconds = requests · a + bytes · b` to the reads so far. The latest reads have the most weight. Only
/// the ratio `a / b` is used, which does not change if concurrent reads slow each other down.
#[derive(Debug, Default)]
pub struct Cost(Mutex<Sums>);

#[derive(Debug, Default)]
struct Sums {
    requests_squared: f64,
    bytes_squared: f64,
    both: f64,
    requests_seconds: f64,
    bytes_seconds: f64,
}

impl Cost {
    /// Record how long a read took.
    pub fn note(&self, requests: usize, bytes: u64, took: Duration) {
        if requests < LEAST_REQUESTS {
            return;
        }
        // Dividing by the time gives all reads equal weight, whatever their size, because relative errors matter here.
        let seconds = took.as_secs_f64().max(1e-9);
        let (requests, bytes) = (requests as f64 / seconds, bytes as f64 / FIRST_GAP_BYTES / seconds);
        let mut sums = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Sums { requests_squared, bytes_squared, both, requests_seconds, bytes_seconds } = &mut *sums;
        for (sum, more) in [
            (requests_squared, requests * requests),
            (bytes_squared, bytes * bytes),
            (both, requests * bytes),
            (requests_seconds, requests),
            (bytes_seconds, bytes),
        ] {
            *sum = *sum * FADING + more;
        }
    }

    pub fn of_request(&self) -> RequestCost {
        let sums = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        // Reads that are all alike cannot determine both coefficients, so a weak prior favours the first estimate.
        let belief = 0.003 * (sums.requests_squared + sums.bytes_squared);
        let (requests, bytes) = (sums.requests_squared + belief, sums.bytes_squared + belief);
        let both = sums.both - belief;
        let a = sums.requests_seconds * bytes - sums.bytes_seconds * both;
        let b = sums.bytes_seconds * requests - sums.requests_seconds * both;
        let ratio = if a + b > 0.0 { a.max(0.0) / b.max(1e-3 * (a + b).abs()) } else { 1.0 };
        RequestCost { gap_bytes: (FIRST_GAP_BYTES * ratio).clamp(LEAST_GAP_BYTES, MOST_GAP_BYTES) as u64, waste: WASTE }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn learnt(requests_per_second: f64, bytes_per_second: f64, reads: &[(usize, u64)]) -> f64 {
        let cost = Cost::default();
        for _ in 0..20 {
            for (requests, bytes) in reads {
                let seconds = *requests as f64 / requests_per_second + *bytes as f64 / bytes_per_second;
                cost.note(*requests, *bytes, Duration::from_secs_f64(seconds));
            }
        }
        cost.of_request().gap_bytes as f64
    }

    #[test]
    fn a_request_costs_what_it_was_measured_to_cost() {
        let reads = [(100, 400 << 10), (20, 100 << 20), (70, 90 << 20), (1000, 4 << 20)];
        assert_eq!(Cost::default().of_request().gap_bytes, 128 << 10);
        for (requests, bytes) in [(3_000.0, 1e9), (10_000.0, 1e9), (2_000.0, 1e8), (10_000.0, 3e8)] {
            let expected: f64 = bytes / requests;
            let found = learnt(requests, bytes, &reads);
            assert!((0.5..2.0).contains(&(found / expected)), "{found} for {expected}");
        }
        assert_eq!(learnt(1e6, 1e8, &reads), LEAST_GAP_BYTES);
        assert_eq!(learnt(100.0, 1e9, &reads), MOST_GAP_BYTES);
    }

    #[test]
    fn few_requests_and_reads_of_one_kind_move_it_little() {
        assert_eq!(learnt(3_000.0, 1e9, &[(4, 1 << 20)]), FIRST_GAP_BYTES);
        for one in [(64, 4 << 10), (64, 8 << 20)] {
            assert!((FIRST_GAP_BYTES / 3.0..FIRST_GAP_BYTES * 3.0).contains(&learnt(8_000.0, 1e9, &[one])));
        }
    }
}
