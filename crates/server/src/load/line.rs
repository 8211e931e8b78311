//! What a load is made of, and what its workers measure.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;
use serde::Deserialize;

/// What a load is made of.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Load {
    pub storage_options: BTreeMap<String, String>,
    pub bucket: String,
    /// The beginning of the keys that are written and read.
    pub prefix: String,
    /// Share of puts, from 0 to 1.
    pub puts: f64,
    pub object_bytes: usize,
    pub objects: usize,
    pub workers: usize,
    pub seconds: f64,
    /// Seconds between lines.
    pub interval_seconds: f64,
    /// Whether the checksum of each body that is read is compared with that of the body that was written.
    pub verifies: bool,
    /// Whether the objects are there from an earlier run with the same numbers.
    pub reuses: bool,
    /// Whether the objects are deleted at the end.
    pub cleans_up: bool,
}

/// What one kind of request did in an interval.
#[derive(Debug, Clone, Default)]
pub struct Line {
    pub operation: &'static str,
    pub workers: usize,
    /// Since the load began, and how long the interval was.
    pub at_seconds: f64,
    pub seconds: f64,
    pub requests: u64,
    pub bytes: u64,
    pub errors: u64,
    pub least_ms: f64,
    pub mean_ms: f64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub most_ms: f64,
}

impl Line {
    pub fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.seconds.max(1e-9)
    }
}

/// Counts of one kind of request.
#[derive(Debug, Clone)]
pub struct Counts {
    /// In microseconds.
    pub latency: Histogram<u64>,
    pub bytes: u64,
    pub errors: u64,
}

impl Counts {
    pub fn new() -> Counts {
        // Latencies from 1 microsecond to an hour, to three digits.
        let latency = Histogram::new_with_bounds(1, 3_600_000_000, 3);
        Counts {
            latency: latency.unwrap_or_else(|_| Histogram::new(3).expect("three digits are allowed")),
            bytes: 0,
            errors: 0,
        }
    }

    pub fn add(&mut self, other: &Counts) {
        // Both have the same bounds.
        let _ = self.latency.add(&other.latency);
        self.bytes += other.bytes;
        self.errors += other.errors;
    }

    pub fn line(&self, operation: &'static str, workers: usize, at_seconds: f64, seconds: f64) -> Line {
        let ms = |microseconds: f64| microseconds / 1e3;
        Line {
            operation,
            workers,
            at_seconds,
            seconds,
            requests: self.latency.len(),
            bytes: self.bytes,
            errors: self.errors,
            least_ms: ms(self.latency.min() as f64),
            mean_ms: ms(self.latency.mean()),
            p50_ms: ms(self.latency.value_at_quantile(0.5) as f64),
            p99_ms: ms(self.latency.value_at_quantile(0.99) as f64),
            most_ms: ms(self.latency.max() as f64),
        }
    }
}
