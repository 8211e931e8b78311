//! Tests of plans: the bytes that they fetch are those of Belady's choice, and a cache that holds everything is filled once.

use std::collections::BTreeMap;
use std::path::Path;

use penstock_storage::{Memory, RangeRequest, Storage};

use super::*;
use crate::cache::{Drives, Policy};
use crate::place::mix;
use crate::spec::Spec;

const SAMPLES: u32 = 64;
/// Five pages.
const SAMPLE_BYTES: u64 = 20_480;
const OBJECTS: u32 = 4;
const BATCH: u64 = 4;

/// Samples of five pages, 16 in each of four objects, in another order each epoch.
struct Shuffled;

fn place(sample: u32) -> (u32, u64) {
    let per_object = SAMPLES / OBJECTS;
    (sample / per_object, u64::from(sample % per_object) * SAMPLE_BYTES)
}

fn order(epoch: u64) -> Vec<u32> {
    let mut samples: Vec<u32> = (0..SAMPLES).collect();
    samples.sort_by_key(|sample| mix(epoch << 32 | u64::from(*sample)));
    samples
}

impl Future for Shuffled {
    fn samples(&self) -> u32 {
        SAMPLES
    }

    fn needs(&self) -> Result<(Vec<Object>, Vec<Need>)> {
        let bytes = u64::from(SAMPLES / OBJECTS) * SAMPLE_BYTES;
        let objects = (0..OBJECTS).map(|object| Object { name: name(object).into(), bytes }).collect();
        let need = |sample| {
            let (object, begin) = place(sample);
            Need { sample, object, begin, end: begin + SAMPLE_BYTES }
        };
        Ok((objects, (0..SAMPLES).map(need).collect()))
    }

    fn epoch_steps(&self) -> u64 {
        u64::from(SAMPLES) / BATCH
    }

    fn samples_of(&self, step: u64) -> Vec<u32> {
        order(step / self.epoch_steps()).chunks(BATCH as usize).nth((step % self.epoch_steps()) as usize).unwrap_or_default().to_vec()
    }
}

fn name(object: u32) -> String {
    format!("d/{object}")
}

fn body(object: u32) -> Vec<u8> {
    (0..u64::from(SAMPLES / OBJECTS) * SAMPLE_BYTES).map(|at| (mix(at ^ u64::from(object) << 40) >> 8) as u8).collect()
}

const POLICY: Policy = Policy { keeps: |name| name.starts_with("d/"), memory_bytes: || 0, changed: || {} };

fn cache(folder: &Path, budget_bytes: u64) -> Result<Cached> {
    let objects: BTreeMap<String, bytes::Bytes> = (0..OBJECTS).map(|object| (name(object), body(object).into())).collect();
    let spec = Spec::parse(&format!("{}:{budget_bytes}", folder.display()))?;
    Ok(Cached::over(Box::new(Memory::holding(objects)), Drives::open(&spec)?, None, POLICY))
}

/// Start a plan, and wait until it knows the order.
fn started(cached: &Cached) -> Result<Plan> {
    let plan = Plan::start(cached.clone(), Arc::new(Shuffled))?;
    while !plan.has_started() {
        std::thread::yield_now();
    }
    Ok(plan)
}

/// Read epochs through a loader, and return the cold bytes of each one.
fn epochs(cached: &Cached, count: u64) -> Result<Vec<u64>> {
    let mut before = cached.cold.counters().counts().range_bytes;
    let plan = started(cached)?;
    let mut cold = Vec::new();
    for epoch in 0..count {
        for step in epoch * Shuffled.epoch_steps()..(epoch + 1) * Shuffled.epoch_steps() {
            plan.before(step);
            for sample in Shuffled.samples_of(step) {
                let (object, begin) = place(sample);
                let range = RangeRequest::plain(&name(object), begin, SAMPLE_BYTES, Some(body(object).len() as u64));
                let found = cached.fetch(vec![range]).remove(0)?;
                assert!(found[0] == body(object)[begin as usize..(begin + SAMPLE_BYTES) as usize]);
            }
            plan.after(step);
        }
        let now = cached.cold.counters().counts().range_bytes;
        cold.push(now - std::mem::replace(&mut before, now));
    }
    Ok(cold)
}

fn folder() -> Result<tempfile::TempDir> {
    tempfile::tempdir().map_err(|error| Error::new("internal", error.to_string()))
}

#[test]
fn a_cache_that_holds_everything_is_filled_once() -> Result<()> {
    let folder = folder()?;
    let cached = cache(folder.path(), 4_000_000)?;
    let cold = epochs(&cached, 3)?;
    assert_eq!(cold.iter().sum::<u64>(), u64::from(SAMPLES) * SAMPLE_BYTES);
    assert_eq!((cold[1], cold[2]), (0, 0));
    // Another plan of another process finds it.
    let again = cache(folder.path(), 4_000_000)?;
    assert_eq!(epochs(&again, 1)?, [0]);
    Ok(())
}

#[test]
fn a_small_cache_fetches_what_belady_fetches() -> Result<()> {
    for part in [10, 20, 50] {
        let folder = folder()?;
        let bytes = body(0).len() as u64;
        let overhead = (0..OBJECTS)
            .map(|object| Extent::overhead_bytes(bytes, &crate::extent::Key::new("memory://", &name(object), "", 0)))
            .sum::<u64>();
        let budget_bytes = u64::from(SAMPLES) * part / 100 * SAMPLE_BYTES + overhead;
        let cached = cache(folder.path(), budget_bytes)?;
        let epoch_count = 6;
        let cold: u64 = epochs(&cached, epoch_count)?.iter().sum();
        // The same choice, computed over whole samples of five pages.
        let steps = Shuffled.epoch_steps();
        let uses: Vec<u32> = (0..epoch_count + 2).flat_map(order).collect();
        let mut belady = Belady::new((0..SAMPLES).map(|_| 1), budget_bytes.saturating_sub(overhead) / SAMPLE_BYTES);
        let mut misses = 0;
        for (at, sample) in uses.iter().enumerate().take((epoch_count * u64::from(SAMPLES)) as usize) {
            let next = uses[at + 1..].iter().position(|next| next == sample).map_or(NEVER, |ahead| (at + 1 + ahead) as u64 / BATCH);
            misses += u64::from(belady.access(*sample, at as u64 / BATCH, next).is_some());
        }
        let all = epoch_count * steps * BATCH;
        let (hits, expected) = (1.0 - cold as f64 / (all * SAMPLE_BYTES) as f64, 1.0 - misses as f64 / all as f64);
        assert!((hits - expected).abs() < 0.01, "{part} %: {hits:.3}, Belady {expected:.3}");
        assert!(cached.drives().drives[0].usage.total().is_ok_and(|total| total.bytes <= total.budget_bytes));
    }
    Ok(())
}

#[test]
fn a_job_that_is_dropped_ends_at_once() -> Result<()> {
    let folder = folder()?;
    let cached = cache(folder.path(), 300_000)?;
    for steps in 0..20 {
        let plan = if steps % 2 == 0 { started(&cached)? } else { Plan::start(cached.clone(), Arc::new(Shuffled))? };
        for step in 0..steps {
            plan.before(step);
            plan.after(step);
        }
        drop(plan);
        assert!(cached.keeps_reads());
    }
    Ok(())
}

#[test]
fn reads_without_a_plan_do_not_displace_a_running_job() -> Result<()> {
    let folder = folder()?;
    let budget_bytes = u64::from(SAMPLES) * SAMPLE_BYTES + 100_000;
    let cached = cache(folder.path(), budget_bytes)?;
    let plan = started(&cached)?;
    for step in 0..2 * Shuffled.epoch_steps() {
        plan.before(step);
        plan.after(step);
    }
    // Another store wants the same room.
    let objects: BTreeMap<String, bytes::Bytes> = [("d/0".to_owned(), vec![1; 1_000_000].into())].into();
    let spec = Spec::parse(&format!("{}:{budget_bytes}", folder.path().display()))?;
    let other = Memory::holding(objects);
    let mut other = Cached::over(Box::new(other), Drives::open(&spec)?, None, POLICY);
    other.store = "memory://other".into();
    let whole = RangeRequest::plain("d/0", 0, 1_000_000, Some(1_000_000));
    assert_eq!(other.fetch(vec![whole.twin()]).remove(0)?[0].len(), 1_000_000);
    let before = cached.cold.counters().counts().range_bytes;
    for step in 2 * Shuffled.epoch_steps()..3 * Shuffled.epoch_steps() {
        plan.before(step);
        plan.after(step);
    }
    assert_eq!(cached.cold.counters().counts().range_bytes, before);
    drop(plan);
    // Without a running plan, the older pages give way.
    assert_eq!(other.fetch(vec![whole]).remove(0)?[0].len(), 1_000_000);
    let counts = other.drives().drives[0].usage.total().map_err(|error| Error::new("internal", error.to_string()))?;
    assert!(counts.evicted_bytes > 0 && counts.bytes <= counts.budget_bytes);
    Ok(())
}
