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

/// All counts of a server.
#[derive(Debug)]
pub struct Metrics {
    pub registry: Registry,
    pub requests: Family<OperationLabels, Count>,
    pub latency: Family<LatencyLabels, Histogram>,
    pub sent_bytes: Count,
    pub received_bytes: Count,
    pub hits: Count,
    pub hit_bytes: Count,
    pub memory_hits: Count,
    pub memory_bytes: Level,
    pub warm_gets: Count,
    pub cold_gets: Count,
    pub cold_requests: Count,
    pub stale_answers: Count,
    pub missed_removals: Count,
    /// Files of a served folder that cannot be objects.
    pub left_out_files: Level,
    pub refused: Count,
    pub lost_lines: Count,
    /// Objects that were acknowledged and are not in the cold store yet, and their bytes.
    pub pending_objects: Level,
    pub pending_bytes: Level,
    pub sent_back: Count,
    pub send_failures: Count,
    /// Bytes that came from the cold store.
    pub cold_bytes: Count,
    pub cold_waits: Level,
    pub cold_running: Level,
    pub connections: Level,
    pub running: Level,
    /// 1 while the server ends.
    pub draining: Level,
    pub quota_used_bytes: Family<QuotaLabels, Level>,
    pub quota_limit_bytes: Family<QuotaLabels, Level>,
    pub quota_refusals: Family<QuotaLabels, Count>,
    pub quota_listings: Family<QuotaLabels, Count>,
    pub quota_failures: Family<QuotaLabels, Count>,
    pub rate_refusals: Count,
    pub rate_waits: Count,
    pub certificate_expires: Family<CertificateLabels, Level>,
    /// Of each drive, refreshed when they are read.
    pub drive_hits: Family<DriveLabels, Count>,
    pub drive_misses: Family<DriveLabels, Count>,
    pub drive_cold_bytes: Family<DriveLabels, Count>,
    pub drive_corrupt_pages: Family<DriveLabels, Count>,
    pub drive_bytes: Family<DriveLabels, Level>,
    pub drive_budget_bytes: Family<DriveLabels, Level>,
    pub drive_usable: Family<DriveLabels, Level>,
    /// Of the device of each drive, by all programs.
    pub drive_reads: Family<DriveLabels, Count>,
    pub drive_read_seconds: Family<DriveLabels, Counter<f64, AtomicU64>>,
}

impl Metrics {
    pub fn new() -> Metrics {
        let mut metrics = Metrics {
            registry: Registry::with_prefix("penstock"),
            requests: Family::default(),
            latency: Family::new_with_constructor(|| Histogram::new(exponential_buckets(0.0001, 2.0, 20))),
            sent_bytes: Count::default(),
            received_bytes: Count::default(),
            hits: Count::default(),
            hit_bytes: Count::default(),
            memory_hits: Count::default(),
            memory_bytes: Level::default(),
            warm_gets: Count::default(),
            cold_gets: Count::default(),
            cold_requests: Count::default(),
            stale_answers: Count::default(),
            missed_removals: Count::default(),
            left_out_files: Level::default(),
            refused: Count::default(),
            lost_lines: Count::default(),
            pending_objects: Level::default(),
            pending_bytes: Level::default(),
            sent_back: Count::default(),
            send_failures: Count::default(),
            cold_bytes: Count::default(),
            cold_waits: Level::default(),
            cold_running: Level::default(),
            connections: Level::default(),
            running: Level::default(),
            draining: Level::default(),
            quota_used_bytes: Family::default(),
            quota_limit_bytes: Family::default(),
            quota_refusals: Family::default(),
            quota_listings: Family::default(),
            quota_failures: Family::default(),
            rate_refusals: Count::default(),
            rate_waits: Count::default(),
            certificate_expires: Family::default(),
            drive_hits: Family::default(),
            drive_misses: Family::default(),
            drive_cold_bytes: Family::default(),
            drive_corrupt_pages: Family::default(),
            drive_bytes: Family::default(),
            drive_budget_bytes: Family::default(),
            drive_usable: Family::default(),
            drive_reads: Family::default(),
            drive_read_seconds: Family::default(),
        };
        let registry = &mut metrics.registry;
        registry.register("requests", "Requests that were answered", metrics.requests.clone());
        registry.register_with_unit("latency", "Time until a response begins", Unit::Seconds, metrics.latency.clone());
        registry.register_with_unit("sent", "Bytes of response bodies", Unit::Bytes, metrics.sent_bytes.clone());
        registry.register_with_unit("received", "Bytes of request bodies", Unit::Bytes, metrics.received_bytes.clone());
        registry.register("hits", "Pieces that were read from the cache without waiting", metrics.hits.clone());
        registry.register_with_unit("hit", "Bytes of these pieces", Unit::Bytes, metrics.hit_bytes.clone());
        registry.register("memory_hits", "Those of these pieces that the server held in its own memory", metrics.memory_hits.clone());
        registry.register_with_unit(
            "memory",
            "Bytes of pieces that the server holds in its own memory",
            Unit::Bytes,
            metrics.memory_bytes.clone(),
        );
        registry.register("warm_gets", "GET requests whose first bytes were cached", metrics.warm_gets.clone());
        registry.register("cold_gets", "GET requests whose first bytes were not", metrics.cold_gets.clone());
        registry.register(
            "refused",
            "Connections and requests that were refused with 503 because of --connections, --requests or --memory-bytes",
            metrics.refused.clone(),
        );
        registry.register("lost_lines", "Lines of the access log that were dropped", metrics.lost_lines.clone());
        registry.register("connections", "Open connections", metrics.connections.clone());
        registry.register("running", "Requests that are being answered or whose responses are being sent", metrics.running.clone());
        registry.register("draining", "1 while the server ends and takes no connections", metrics.draining.clone());
        metrics.register_cold();
        metrics.register_limits();
        metrics.register_drives();
        metrics
    }

    fn register_cold(&mut self) {
        let registry = &mut self.registry;
        registry.register("cold_requests", "Requests to the cold store for the state of an object", self.cold_requests.clone());
        registry.register("stale_answers", "Answers from what was known, because the cold store failed", self.stale_answers.clone());
        registry.register("missed_removals", "Old states of objects that could not be removed from a drive", self.missed_removals.clone());
        let files = "Files of a served folder that lists left out since the start, because they cannot be objects";
        registry.register("left_out_files", files, self.left_out_files.clone());
        let objects = "Objects that were acknowledged and are not in the cold store yet";
        registry.register("pending_objects", objects, self.pending_objects.clone());
        registry.register_with_unit("pending", "Bytes of these objects, with 4 KiB more for each", Unit::Bytes, self.pending_bytes.clone());
        registry.register("sent_back", "Objects that were sent to the cold store after they were acknowledged", self.sent_back.clone());
        registry.register("send_failures", "Tries to do so that failed", self.send_failures.clone());
        registry.register_with_unit(
            "cold",
            "Bytes from the cold store since its cache was made, each second",
            Unit::Bytes,
            self.cold_bytes.clone(),
        );
        registry.register(
            "cold_waits",
            "Reads and questions to the cold store, or reads of a drive, that requests wait for",
            self.cold_waits.clone(),
        );
        registry.register("cold_running", "Requests to the cold store that have no response yet", self.cold_running.clone());
    }

    fn register_limits(&mut self) {
        let registry = &mut self.registry;
        let used = "Bytes that count for a quota: of objects, open uploads and running writes";
        registry.register_with_unit("quota_used", used, Unit::Bytes, self.quota_used_bytes.clone());
        registry.register_with_unit("quota_limit", "Bytes that a quota allows", Unit::Bytes, self.quota_limit_bytes.clone());
        registry.register("quota_refusals", "Writes that a quota refused", self.quota_refusals.clone());
        registry.register("quota_listings", "Listings for quotas", self.quota_listings.clone());
        registry.register("quota_failures", "Listings for quotas that failed", self.quota_failures.clone());
        registry.register("rate_refusals", "Requests that were refused because of the rate of their key", self.rate_refusals.clone());
        registry.register("rate_waits", "Waits of bodies because of the rate of their key", self.rate_waits.clone());
        let expires = "When the first certificate of the chain expires, in seconds since 1970";
        registry.register_with_unit("certificate_expires", expires, Unit::Seconds, self.certificate_expires.clone());
    }

    fn register_drives(&mut self) {
        let registry = &mut self.registry;
        registry.register("drive_hits", "Reads that were cached, since the drive's cache was made", self.drive_hits.clone());
        registry.register("drive_misses", "Reads that were not cached, since the drive's cache was made", self.drive_misses.clone());
        registry.register_with_unit("drive_cold", "Bytes from the cold store", Unit::Bytes, self.drive_cold_bytes.clone());
        registry.register("drive_corrupt_pages", "Pages that did not match their checksums", self.drive_corrupt_pages.clone());
        registry.register_with_unit("drive_used", "Bytes that are cached", Unit::Bytes, self.drive_bytes.clone());
        registry.register_with_unit("drive_budget", "Bytes that may be cached", Unit::Bytes, self.drive_budget_bytes.clone());
        registry.register(
            "drive_usable",
            "1 if the drive works, 0 while it is left alone or its folder is gone",
            self.drive_usable.clone(),
        );
        registry.register("drive_reads", "Reads that the drive's device has answered, of all programs", self.drive_reads.clone());
        registry.register_with_unit("drive_read", "Time that these reads took together", Unit::Seconds, self.drive_read_seconds.clone());
    }
}
