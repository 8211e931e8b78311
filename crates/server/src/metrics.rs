//! What the server counts, in the text format of Prometheus.

use std::sync::atomic::{AtomicI64, AtomicU64};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

type Count = Counter<u64, AtomicU64>;
pub type Level = Gauge<i64, AtomicI64>;

/// Something that is counted until this is dropped. A request may be dropped at any time.
pub struct Counted(Level);

impl Counted {
    pub fn begin(level: &Level) -> Counted {
        level.inc();
        Counted(level.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OperationLabels {
    pub operation: &'static str,
    pub status: u16,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct LatencyLabels {
    pub operation: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct DriveLabels {
    pub drive: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct QuotaLabels {
    pub quota: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct CertificateLabels {
    pub file: String,
}

/// Define all counts of a server, each with its name, its unit and what `/metrics` says of it, in the order of `/metrics`.
macro_rules! metrics {
    ($($field:ident: $type:ty = $name:literal $(in $unit:ident)?, $help:literal $(, $new:expr)?;)*) => {
        #[derive(Debug)]
        pub struct Metrics {
            pub registry: Registry,
            $(pub $field: $type,)*
        }

        impl Metrics {
            pub fn new() -> Metrics {
                let mut registry = Registry::with_prefix("penstock");
                $(
                    let $field: $type = metrics!(@new $($new)?);
                    metrics!(@register registry, $name, $help, $field.clone() $(, $unit)?);
                )*
                Metrics { registry, $($field,)* }
            }
        }
    };
    (@new) => { Default::default() };
    (@new $new:expr) => { $new };
    (@register $registry:ident, $name:literal, $help:literal, $metric:expr) => { $registry.register($name, $help, $metric) };
    (@register $registry:ident, $name:literal, $help:literal, $metric:expr, $unit:ident) => {
        $registry.register_with_unit($name, $help, Unit::$unit, $metric)
    };
}

fn latencies() -> Histogram {
    Histogram::new(exponential_buckets(0.0001, 2.0, 20))
}

metrics! {
    requests: Family<OperationLabels, Count> = "requests", "Requests answered";
    latency: Family<LatencyLabels, Histogram> = "latency" in Seconds,
        "Time to the first byte of a response", Family::new_with_constructor(latencies);
    sent_bytes: Count = "sent" in Bytes, "Bytes of response bodies";
    received_bytes: Count = "received" in Bytes, "Bytes of request bodies";
    hits: Count = "hits", "Pieces read from the cache without waiting";
    hit_bytes: Count = "hit" in Bytes, "Bytes read from the cache without waiting";
    memory_hits: Count = "memory_hits", "Pieces read from the server's own memory";
    memory_bytes: Level = "memory" in Bytes, "Bytes held in the server's own memory";
    warm_gets: Count = "warm_gets", "GET requests whose first bytes were cached";
    cold_gets: Count = "cold_gets", "GET requests whose first bytes were not cached";
    refused: Count = "refused",
        "Connections and requests refused with 503 because of --connections, --requests or --memory-bytes";
    lost_lines: Count = "lost_lines", "Access log lines dropped";
    connections: Level = "connections", "Open connections";
    running: Level = "running", "Requests that are being answered or whose responses are being sent";
    draining: Level = "draining", "1 while the server is stopping and accepts no connections";
    cold_requests: Count = "cold_requests", "Requests to the cold store for the state of an object";
    stale_answers: Count = "stale_answers", "Responses from cached state because the cold store failed";
    missed_removals: Count = "missed_removals", "Outdated object states that could not be removed from a drive";
    left_out_files: Level = "left_out_files",
        "Files of a served folder that listings have left out since the start because they cannot be objects";
    pending_objects: Level = "pending_objects", "Acknowledged objects that are not in the cold store yet";
    pending_bytes: Level = "pending" in Bytes,
        "Bytes of acknowledged objects that are not in the cold store yet, plus 4 KiB for each";
    sent_back: Count = "sent_back", "Acknowledged objects sent to the cold store";
    send_failures: Count = "send_failures", "Failed attempts to send acknowledged objects";
    cold_bytes: Count = "cold" in Bytes, "Bytes from the cold store since its cache was created, updated every second";
    cold_waits: Level = "cold_waits", "Requests to the cold store and drive reads that client requests are waiting for";
    cold_running: Level = "cold_running", "Requests to the cold store that have no response yet";
    quota_used_bytes: Family<QuotaLabels, Level> = "quota_used" in Bytes,
        "Bytes that count towards a quota: objects, open uploads and running writes";
    quota_limit_bytes: Family<QuotaLabels, Level> = "quota_limit" in Bytes, "Bytes allowed by a quota";
    quota_refusals: Family<QuotaLabels, Count> = "quota_refusals", "Writes refused because of a quota";
    quota_listings: Family<QuotaLabels, Count> = "quota_listings", "Listings for quotas";
    quota_failures: Family<QuotaLabels, Count> = "quota_failures", "Listings for quotas that failed";
    rate_refusals: Count = "rate_refusals", "Requests refused because of their key's rate limit";
    rate_waits: Count = "rate_waits", "Delays of bodies because of their key's rate limit";
    certificate_expires: Family<CertificateLabels, Level> = "certificate_expires" in Seconds,
        "When the first certificate of the chain expires, in seconds since 1970";
    drive_hits: Family<DriveLabels, Count> = "drive_hits", "Cache hits since the drive's cache was created";
    drive_misses: Family<DriveLabels, Count> = "drive_misses", "Cache misses since the drive's cache was created";
    drive_cold_bytes: Family<DriveLabels, Count> = "drive_cold" in Bytes, "Bytes from the cold store";
    drive_corrupt_pages: Family<DriveLabels, Count> = "drive_corrupt_pages", "Pages that did not match their checksums";
    drive_bytes: Family<DriveLabels, Level> = "drive_used" in Bytes, "Bytes cached";
    drive_budget_bytes: Family<DriveLabels, Level> = "drive_budget" in Bytes, "Size limit of the cache in bytes";
    drive_usable: Family<DriveLabels, Level> = "drive_usable", "1 if the drive works, 0 while it is not used or its folder is missing";
    drive_reads: Family<DriveLabels, Count> = "drive_reads", "Reads that the drive's device has completed, by all programs";
    drive_read_seconds: Family<DriveLabels, Counter<f64, AtomicU64>> = "drive_read" in Seconds,
        "Total time of reads by the drive's device";
}
