//! Test a location before storing a dataset there: which operations are allowed, how fast the operations are, and whether
//! create-only puts work.

use std::time::{Duration, Instant};

use penstock_error::{Error, Result};
use penstock_format::ids::data_name;
use penstock_storage::{RangeRequest, Store};

use crate::snapshot::Snapshot;
use crate::store::context::Context;

/// Size of the object used to measure rates.
const PROBE_BYTES: usize = 32 << 20;

const RANGE_BYTES: u64 = 128 << 10;

const SMALL_READS: usize = 20;

/// Largest accepted clock skew. Services refuse signed requests if the skew exceeds 15 minutes. Comparing commit times from
/// several machines requires a smaller skew.
const SKEW: Duration = Duration::from_secs(60);

/// The result of one check.
#[derive(Debug, Clone)]
pub struct Finding {
    pub name: &'static str,
    /// Whether the check passed. None if the check was skipped.
    pub good: Option<bool>,
    /// The measured value with its unit.
    pub measured: Option<(f64, &'static str)>,
    /// The result in words.
    pub finding: String,
    pub advice: String,
}

/// A store under test and the findings so far, in order.
struct Doctor<'a> {
    store: &'a dyn Store,
    findings: Vec<Finding>,
}

/// Try every operation that a dataset needs. The probe object is removed afterwards. Cost: about 300 requests and 100 to 170 MB.
pub fn examine(context: &std::sync::Arc<Context>) -> Result<Vec<Finding>> {
    let mut doctor = Doctor { store: context.storage.as_ref(), findings: Vec::new() };
    if !doctor.reach() {
        return Ok(doctor.findings);
    }
    let mut random = [0u8; 8];
    getrandom::fill(&mut random).map_err(|error| Error::new("internal", format!("cannot name the probe: {error}")))?;
    let probe = format!("probe-{:016x}", u64::from_le_bytes(random));
    doctor.note_result(
        "create-only put",
        doctor.store.prove(),
        "one of several concurrent puts wins, and a later put is refused",
    );
    let written = doctor.write(&probe);
    let readable = match written {
        true => Some((probe.clone(), PROBE_BYTES as u64)),
        false => largest_file(context),
    };
    match readable {
        Some((name, bytes)) => doctor.measure_reads(&name, bytes),
        None => doctor.skip("read", "writing is not allowed here, and there is no dataset to read from"),
    }
    if written {
        doctor.note_result("delete", doctor.store.delete(&probe), "allowed");
    }
    doctor.clock();
    Ok(doctor.findings)
}

/// Return the largest data file of the dataset at this location, if any.
fn largest_file(context: &std::sync::Arc<Context>) -> Option<(String, u64)> {
    let snapshot = Snapshot::open(context.clone(), 0).ok()?;
    let mut found: Option<(String, u64)> = None;
    let looked = snapshot.each_file(None, |file, _| {
        if file.is_object() && found.as_ref().is_none_or(|(_, bytes)| file.file_bytes > *bytes) {
            found = Some((data_name(file.id), file.file_bytes));
        }
        Ok(())
    });
    looked.ok().and(found)
}

impl Doctor<'_> {
    fn note(
        &mut self,
        name: &'static str,
        good: bool,
        measured: Option<(f64, &'static str)>,
        finding: impl Into<String>,
        advice: &str,
    ) {
        let advice = if good && measured.is_none() { String::new() } else { advice.to_owned() };
        self.findings.push(Finding { name, good: Some(good), measured, finding: finding.into(), advice });
    }

    /// Note the result of an operation. `finding` describes a success.
    fn note_result(&mut self, name: &'static str, result: Result<()>, finding: &str) {
        match result {
            Ok(()) => self.note(name, true, None, finding, ""),
            Err(error) => self.failed(name, &error),
        }
    }

    /// Note the rate at which `bytes` bytes were transferred since `began`. `advice` is for rates below `least` MB/s.
    fn note_rate(
        &mut self,
        name: &'static str,
        (bytes, began): (u64, Instant),
        finding: &str,
        least: f64,
        advice: &str,
    ) {
        let rate = bytes as f64 / 1e6 / began.elapsed().as_secs_f64().max(1e-9);
        self.note(name, true, Some((rate, "MB/s")), finding, if rate < least { advice } else { "" });
    }

    fn skip(&mut self, name: &'static str, why: &str) {
        self.findings.push(Finding { name, good: None, measured: None, finding: why.into(), advice: String::new() });
    }

    fn failed(&mut self, name: &'static str, error: &Error) {
        let advice = match error.hint_text() {
            _ if error.code() == "permission-denied" => "grant these credentials permission for this operation",
            hint => hint.unwrap_or("see the message"),
        };
        self.note(name, false, None, error.message(), advice);
    }

    /// Return whether the store can be reached. Also check whether the store can list objects.
    fn reach(&mut self) -> bool {
        let began = Instant::now();
        // Read the object instead of looking it up, because the error from a refused look-up does not include the reason.
        match self.store.read("log/0000000000000000/hint") {
            Err(error) if error.code() != "object-not-found" => {
                self.failed("reach", &error);
                return false;
            }
            _ => self.note(
                "reach",
                true,
                None,
                format!("responds after {:.0} ms, including the connection time", millis(began)),
                "",
            ),
        }
        match self.store.lists() {
            false => {
                self.skip("list", "this store cannot list objects; readers use the hint to find the newest commit")
            }
            true => self.note_result("list", self.store.list_page("log/0000000000000000", None).map(drop), "allowed"),
        }
        true
    }

    fn write(&mut self, probe: &str) -> bool {
        // Use random bytes, which the storage cannot compress.
        let mut word = 0x9e37_79b9_7f4a_7c15u64;
        let body: Vec<u8> = (0..PROBE_BYTES / 8)
            .flat_map(|_| {
                word ^= word << 13;
                word ^= word >> 7;
                word ^= word << 17;
                word.to_le_bytes()
            })
            .collect();
        let began = Instant::now();
        match self.store.put(probe, &body).and_then(|()| self.store.sync(&["."])) {
            Ok(()) => {
                let advice = "writing is slow: import from a machine closer to the store";
                self.note_rate("write", (PROBE_BYTES as u64, began), "one 32 MiB object, made durable", 50.0, advice);
                true
            }
            Err(error) => {
                self.failed("write", &error);
                false
            }
        }
    }

    fn measure_reads(&mut self, name: &str, bytes: u64) {
        let checked_range =
            |begin: u64, count: u64| RangeRequest::plain(name, begin, count.min(bytes - begin), Some(bytes));
        let mut times = Vec::with_capacity(SMALL_READS);
        for index in 0..SMALL_READS as u64 {
            let began = Instant::now();
            let begin = (index * 1_000_003) % bytes.saturating_sub(64).max(1);
            match self.store.fetch(vec![checked_range(begin, 64)]).remove(0) {
                Ok(_) => times.push(millis(began)),
                Err(error) => return self.failed("read", &error),
            }
        }
        times.sort_by(f64::total_cmp);
        let (median, slowest) = (times[SMALL_READS / 2], times[SMALL_READS - 1]);
        let advice = if median > 50.0 {
            "the store is far away: read many samples at once; import and train in its region"
        } else {
            ""
        };
        let finding = format!("median of {SMALL_READS} reads of 64 bytes; the slowest took {slowest:.1} ms");
        self.note("latency", true, Some((median, "ms")), finding, advice);
        let count = (PROBE_BYTES as u64).min(bytes) / RANGE_BYTES;
        let spread = bytes.saturating_sub(RANGE_BYTES).max(1);
        let ranges =
            (0..count.max(1)).map(|index| checked_range((index * 0x9e37_79b9 * 4096) % spread, RANGE_BYTES)).collect();
        self.fetch("ranged reads", "concurrent random reads of 128 KiB each", ranges);
        let most = bytes.min(4 * PROBE_BYTES as u64);
        let ranges =
            (0..most).step_by(8 << 20).map(|begin| checked_range(begin, (8 << 20).min(most - begin))).collect();
        self.fetch("sequential reads", "concurrent reads of 8 MiB each", ranges);
    }

    fn fetch(&mut self, name: &'static str, finding: &str, ranges: Vec<RangeRequest>) {
        let total: u64 = ranges.iter().map(|range| range.end() - range.begin).sum();
        let began = Instant::now();
        let advice = "this is slow for training: copy the dataset to a local disk, or shuffle with ps.Window";
        match self.store.fetch(ranges).into_iter().find_map(Result::err) {
            Some(error) => self.failed(name, &error),
            None => self.note_rate(name, (total, began), finding, 100.0, advice),
        }
    }

    fn clock(&mut self) {
        match self.store.clock_skew() {
            None => self.skip("clock", "the store does not report its time"),
            Some(skew) => {
                let good = skew < SKEW;
                let advice = if good { "" } else { "set this machine's clock with NTP" };
                self.note("clock", good, Some((skew.as_secs_f64(), "s")), "difference from the store's clock", advice);
            }
        }
    }
}

fn millis(began: Instant) -> f64 {
    began.elapsed().as_secs_f64() * 1e3
}
