//! What limits the server, from what it did in the last second.

use std::collections::HashMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use serde::Serialize;

use crate::limits::quota::Quotas;
use crate::metrics::{DriveLabels, Metrics};
use crate::read::cached_objects::CachedObjects;

/// A resource that is used more than this is the limit.
const BUSY: f64 = 0.85;

/// What a server did in the last second, and in all.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Sample {
    pub uptime_seconds: f64,
    /// `idle`, `processor`, `drive`, `network`, `cold store` or `clients`.
    pub verdict: String,
    pub why: String,
    pub connections: i64,
    pub running: i64,
    pub cold_waits: i64,
    /// Requests to the cold store that have no response yet.
    pub cold_running: i64,
    /// Acknowledged objects that are not in the cold store yet.
    pub pending_objects: i64,
    pub pending_bytes: i64,
    pub sent_bytes_per_second: f64,
    pub received_bytes_per_second: f64,
    pub cold_bytes_per_second: f64,
    pub warm_gets: u64,
    pub cold_gets: u64,
    pub sent_bytes: u64,
    pub cold_bytes: u64,
    pub refused: u64,
    /// Shares of 1.
    pub processor: f64,
    pub network: Option<f64>,
    pub drives: Vec<DriveSample>,
    pub quotas: Vec<QuotaSample>,
}

/// A quota, and what counts for it.
#[derive(Debug, Clone, Default, Serialize)]
pub struct QuotaSample {
    pub name: String,
    pub used_bytes: u64,
    pub limit_bytes: u64,
}

/// One drive of the cache.
#[derive(Debug, Clone, Default, Serialize)]
pub struct DriveSample {
    pub folder: String,
    pub is_usable: bool,
    pub bytes: u64,
    pub budget_bytes: u64,
    pub hits: u64,
    pub misses: u64,
    pub cold_bytes: u64,
    pub corrupt_pages: u64,
    /// Share of the last second in which the device was busy, if the system reports it.
    pub busy: Option<f64>,
}

/// What was counted at one moment.
#[derive(Default)]
struct Counted {
    processor_seconds: f64,
    sent: u64,
    received: u64,
    cold: u64,
    busy_ms: HashMap<String, u64>,
}

/// Compares moments.
pub struct Sampler {
    metrics: Arc<Metrics>,
    cached_objects: Option<Arc<CachedObjects>>,
    quotas: Arc<Quotas>,
    began: Instant,
    last: Mutex<(Instant, Counted)>,
    sample: Mutex<Sample>,
}

impl Sampler {
    pub fn new(metrics: Arc<Metrics>, cached_objects: Option<Arc<CachedObjects>>, quotas: Arc<Quotas>) -> Sampler {
        let now = Instant::now();
        // What the process used before is not of the first second.
        let counted = Counted { processor_seconds: processor_seconds(), ..Counted::default() };
        Sampler {
            metrics,
            cached_objects,
            quotas,
            began: now,
            last: Mutex::new((now, counted)),
            sample: Mutex::default(),
        }
    }

    /// Return the newest sample.
    pub fn sample(&self) -> Sample {
        self.sample.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Take a sample. Call it each second.
    pub fn take(&self) {
        let (now, metrics) = (Instant::now(), &self.metrics);
        let drives = self.drives();
        let cold = drives.iter().map(|drive| drive.cold_bytes).sum();
        metrics.cold_bytes.inner().store(cold, Relaxed);
        let counted = Counted {
            processor_seconds: processor_seconds(),
            sent: metrics.sent_bytes.get(),
            received: metrics.received_bytes.get(),
            cold,
            busy_ms: drives
                .iter()
                .filter_map(|drive| Some((drive.folder.clone(), device(&drive.folder)?.busy_ms)))
                .collect(),
        };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let seconds = now.duration_since(last.0).as_secs_f64().max(0.001);
        let per_second = |new: u64, old: u64| new.saturating_sub(old) as f64 / seconds;
        if let Some(cached_objects) = &self.cached_objects {
            cached_objects.cached.note_hits();
            metrics.memory_bytes.set(i64::try_from(cached_objects.held_bytes()).unwrap_or(i64::MAX));
        }
        let threads = std::thread::available_parallelism().map_or(1, usize::from) as f64;
        let (sent, received) = (per_second(counted.sent, last.1.sent), per_second(counted.received, last.1.received));
        let mut sample = Sample {
            uptime_seconds: now.duration_since(self.began).as_secs_f64(),
            connections: metrics.connections.get(),
            running: metrics.running.get(),
            cold_waits: metrics.cold_waits.get(),
            cold_running: metrics.cold_running.get(),
            pending_objects: metrics.pending_objects.get(),
            pending_bytes: metrics.pending_bytes.get(),
            sent_bytes_per_second: sent,
            received_bytes_per_second: received,
            cold_bytes_per_second: per_second(counted.cold, last.1.cold),
            warm_gets: metrics.warm_gets.get(),
            cold_gets: metrics.cold_gets.get(),
            sent_bytes: counted.sent,
            cold_bytes: cold,
            refused: metrics.refused.get(),
            processor: (counted.processor_seconds - last.1.processor_seconds) / seconds / threads,
            network: link_bytes().map(|bytes| sent.max(received) / bytes),
            drives,
            quotas: self
                .quotas
                .levels()
                .map(|(name, used_bytes, limit_bytes)| QuotaSample { name, used_bytes, limit_bytes })
                .collect(),
            ..Sample::default()
        };
        for drive in &mut sample.drives {
            let busy = counted.busy_ms.get(&drive.folder).zip(last.1.busy_ms.get(&drive.folder));
            drive.busy = busy.map(|(new, old)| (new.saturating_sub(*old) as f64 / seconds / 1e3).min(1.0));
        }
        (sample.verdict, sample.why) = verdict(&sample);
        *last = (now, counted);
        *self.sample.lock().unwrap_or_else(PoisonError::into_inner) = sample;
    }

    fn drives(&self) -> Vec<DriveSample> {
        let Some(cached_objects) = &self.cached_objects else { return Vec::new() };
        let mut drives = Vec::new();
        for drive in &cached_objects.cached.drives().drives {
            let total = drive.usage.total().unwrap_or_default();
            let sample = DriveSample {
                folder: drive.folder().display().to_string(),
                is_usable: drive.is_usable() && drive.is_there(),
                bytes: total.bytes,
                budget_bytes: total.budget_bytes,
                hits: total.hits,
                misses: total.misses,
                cold_bytes: total.cold_bytes,
                corrupt_pages: total.corrupt_pages,
                busy: None,
            };
            let label = DriveLabels { drive: sample.folder.clone() };
            let device = device(&sample.folder).unwrap_or_default();
            let metrics = &self.metrics;
            for (family, value) in [
                (&metrics.drive_hits, sample.hits),
                (&metrics.drive_misses, sample.misses),
                (&metrics.drive_cold_bytes, sample.cold_bytes),
                (&metrics.drive_corrupt_pages, sample.corrupt_pages),
                (&metrics.drive_reads, device.reads),
            ] {
                family.get_or_create(&label).inner().store(value, Relaxed);
            }
            let seconds = device.read_ms as f64 / 1e3;
            metrics.drive_read_seconds.get_or_create(&label).inner().store(seconds.to_bits(), Relaxed);
            for (family, value) in [
                (&metrics.drive_bytes, sample.bytes),
                (&metrics.drive_budget_bytes, sample.budget_bytes),
                (&metrics.drive_usable, u64::from(sample.is_usable)),
            ] {
                family.get_or_create(&label).set(i64::try_from(value).unwrap_or(i64::MAX));
            }
            drives.push(sample);
        }
        drives
    }
}

/// Say which resource is the limit, and why.
fn verdict(sample: &Sample) -> (String, String) {
    let percent = |share: f64| format!("{:.0} %", share * 100.0);
    let busiest = sample
        .drives
        .iter()
        .filter_map(|drive| Some((drive.busy?, &drive.folder)))
        .max_by(|one, other| one.0.total_cmp(&other.0));
    let is_still = sample.sent_bytes_per_second + sample.received_bytes_per_second < 1.0;
    let (name, why) = if sample.processor >= BUSY {
        ("processor", format!("this server uses {} of all processors", percent(sample.processor)))
    } else if let Some(share) = sample.network.filter(|share| *share >= BUSY) {
        ("network", format!("{} of the link's bandwidth is used", percent(share)))
    } else if let Some((share, folder)) = busiest.filter(|(share, _)| *share >= BUSY) {
        ("drive", format!("{folder} is busy {} of the time", percent(share)))
    } else if sample.cold_waits > 0 && sample.cold_waits * 2 >= sample.running.max(1) {
        ("cold store", format!("{} reads are waiting for it", sample.cold_waits))
    } else if sample.cold_running > 0 && is_still {
        (
            "cold store",
            format!("{} requests to it have no response yet, and nothing was sent or received", sample.cold_running),
        )
    } else if is_still {
        ("idle", "nothing was sent or received in the last second".to_owned())
    } else {
        ("clients", "the server is idle".to_owned())
    };
    (name.to_owned(), why)
}

/// Return the seconds that this process has used on all processors.
fn processor_seconds() -> f64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: the call fills the structure, which is large enough, and zeros are valid if it fails.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}

/// What the device of a folder did since the machine started.
#[derive(Default)]
struct Device {
    reads: u64,
    read_ms: u64,
    busy_ms: u64,
}

/// Return what the device of a folder did, if the system reports it.
fn device(folder: &str) -> Option<Device> {
    use std::os::unix::fs::MetadataExt as _;
    let device = std::fs::metadata(folder).ok()?.dev();
    let name = [libc::major(device).to_string(), libc::minor(device).to_string()];
    let statistics = std::fs::read_to_string("/proc/diskstats").ok()?;
    let fields = statistics
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .find(|fields| fields[..2] == name)?;
    let number = |at: usize| fields.get(at)?.parse().ok();
    Some(Device { reads: number(3)?, read_ms: number(6)?, busy_ms: number(12)? })
}

/// Return the speed of the fastest network link in bytes per second, if the system reports it.
fn link_bytes() -> Option<f64> {
    let links = std::fs::read_dir("/sys/class/net").ok()?.flatten();
    let speed =
        |link: std::fs::DirEntry| std::fs::read_to_string(link.path().join("speed")).ok()?.trim().parse::<f64>().ok();
    links
        .filter_map(speed)
        .filter(|megabits| *megabits > 0.0)
        .max_by(f64::total_cmp)
        .map(|megabits| megabits * 1e6 / 8.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdict_names_the_resource_that_is_used_up() {
        let busy = Sample { connections: 4, running: 4, sent_bytes_per_second: 1e9, ..Sample::default() };
        let drive = |busy| DriveSample { folder: "/nvme".into(), busy: Some(busy), ..DriveSample::default() };
        let cases = [
            (Sample::default(), "idle"),
            (busy.clone(), "clients"),
            (Sample { processor: 0.95, ..busy.clone() }, "processor"),
            (Sample { network: Some(0.9), ..busy.clone() }, "network"),
            (Sample { network: Some(0.2), drives: vec![drive(0.1), drive(0.99)], ..busy.clone() }, "drive"),
            (Sample { cold_waits: 3, ..busy.clone() }, "cold store"),
            (Sample { cold_running: 1, ..busy.clone() }, "clients"),
            (Sample { cold_running: 1, sent_bytes_per_second: 0.0, ..busy }, "cold store"),
        ];
        for (sample, expected) in cases {
            assert_eq!(verdict(&sample).0, expected);
        }
    }
}
