//! Tests of plans: the bytes that they fetch are those of Belady's choice, and a cache that holds everything is filled once.

use std::collections::BTreeMap;
use std::path::Path;

use penstock_storage::{Memory, RangeRequest, Read};

use super::belady::{Belady, NEVER};
use super::page_runs::{Future, Member, Need, Object};
use super::*;
use crate::cache::Policy;
use crate::drives::Drives;
use crate::extent::Extent;
use crate::place::mix;
use crate::spec::Spec;

const SAMPLES: u32 = 64;
/// Five pages.
const SAMPLE_BYTES: u64 = 20_480;
const ALL_BYTES: u64 = SAMPLES as u64 * SAMPLE_BYTES;
const OBJECTS: u32 = 4;
const BATCH: u64 = 4;

/// Samples of five pages, 16 in each of four objects, in another order each epoch.
#[derive(Clone, Copy)]
struct Shuffled {
    member: Member,
    ranks: u64,
    /// The steps below this are read.
    end: u64,
}

const ALONE: Shuffled = Shuffled { member: Member { rank: 0, begin: 0, stride: 1 }, ranks: 1, end: 100 * EPOCH_STEPS };
const EPOCH_STEPS: u64 = SAMPLES as u64 / BATCH;

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

    fn member(&self) -> Member {
        self.member
    }

    fn samples_of(&self, step: u64, rank: u64) -> Vec<u32> {
        let begin = (step % self.epoch_steps() * BATCH + rank * BATCH / self.ranks) as usize;
        order(step / self.epoch_steps())[begin..begin + (BATCH / self.ranks) as usize].to_vec()
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
    let objects: BTreeMap<String, bytes::Bytes> =
        (0..OBJECTS).map(|object| (name(object), body(object).into())).collect();
    let spec = Spec::parse(&format!("{}:{budget_bytes}", folder.display()))?;
    Ok(Cached::over(Arc::new(Memory::holding(objects)), Drives::open(&spec)?, None, POLICY))
}

/// Start a plan, and wait until it knows the order.
fn started(cached: &Cached, future: Shuffled) -> Result<Plan> {
    let plan = Plan::start(cached.clone(), Arc::new(future), future.end)?;
    while !plan.has_started() {
        std::thread::yield_now();
    }
    Ok(plan)
}

/// Read the steps below `end` of a loader.
fn read(cached: &Cached, plan: &Plan, future: Shuffled, from: u64, end: u64) -> Result<()> {
    for step in (from..end).filter(|step| future.member.reads(*step)) {
        plan.before(step);
        for sample in future.samples_of(step, future.member.rank) {
            let (object, begin) = place(sample);
            let range = RangeRequest::plain(&name(object), begin, SAMPLE_BYTES, Some(body(object).len() as u64));
            let found = cached.fetch(vec![range]).remove(0)?;
            assert!(found[0] == body(object)[begin as usize..(begin + SAMPLE_BYTES) as usize]);
        }
        plan.after(step);
    }
    Ok(())
}

fn cold_bytes(cached: &Cached) -> u64 {
    cached.cold.counters().counts().range_bytes
}

/// Read epochs through a loader, and return the cold bytes of each one.
fn epochs(cached: &Cached, count: u64) -> Result<Vec<u64>> {
    let mut before = cold_bytes(cached);
    let future = Shuffled { end: count * EPOCH_STEPS, ..ALONE };
    let plan = started(cached, future)?;
    let mut cold = Vec::new();
    for epoch in 0..count {
        read(cached, &plan, future, epoch * EPOCH_STEPS, (epoch + 1) * EPOCH_STEPS)?;
        let now = cold_bytes(cached);
        cold.push(now - std::mem::replace(&mut before, now));
    }
    Ok(cold)
}

/// Return the bytes of a cache that holds a part of all samples, in per cent.
fn part_of_all(part: u64) -> u64 {
    let bytes = body(0).len() as u64;
    let overhead = (0..OBJECTS)
        .map(|object| Extent::overhead_bytes(bytes, &crate::extent::Key::new("memory://", &name(object), "", 0)))
        .sum::<u64>();
    u64::from(SAMPLES) * part / 100 * SAMPLE_BYTES + overhead
}

#[test]
fn a_cache_that_holds_everything_is_filled_once() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let cached = cache(folder.path(), 4_000_000)?;
    let cold = epochs(&cached, 3)?;
    assert_eq!(cold.iter().sum::<u64>(), ALL_BYTES);
    assert_eq!((cold[1], cold[2]), (0, 0));
    // Another plan of another process finds it.
    let again = cache(folder.path(), 4_000_000)?;
    assert_eq!(epochs(&again, 1)?, [0]);
    Ok(())
}

#[test]
fn a_small_cache_fetches_what_belady_fetches() -> Result<()> {
    for part in [10, 20, 50] {
        let folder = tempfile::tempdir().unwrap();
        let budget_bytes = part_of_all(part);
        let cached = cache(folder.path(), budget_bytes)?;
        let epoch_count = 6;
        let cold: u64 = epochs(&cached, epoch_count)?.iter().sum();
        // The same choice, computed over whole samples of five pages.
        let uses: Vec<u32> = (0..epoch_count).flat_map(order).collect();
        let capacity = (budget_bytes - part_of_all(0)) / SAMPLE_BYTES;
        let mut belady = Belady::new((0..SAMPLES).map(|_| 1), capacity, 0);
        let mut misses = 0;
        for (at, sample) in uses.iter().enumerate() {
            let next = uses[at + 1..]
                .iter()
                .position(|next| next == sample)
                .map_or(NEVER, |ahead| (at + 1 + ahead) as u64 / BATCH);
            misses += u64::from(belady.access(*sample, at as u64 / BATCH, next).is_some());
        }
        let all = epoch_count * EPOCH_STEPS * BATCH;
        let (hits, expected) = (1.0 - cold as f64 / (all * SAMPLE_BYTES) as f64, 1.0 - misses as f64 / all as f64);
        // What is in memory for a while may be needed twice.
        assert!((-0.01..0.03).contains(&(hits - expected)), "{part} %: {hits:.3}, Belady {expected:.3}");
        assert!(cached.drives().drives[0].usage.total().is_ok_and(|total| total.bytes <= total.budget_bytes));
    }
    Ok(())
}

#[test]
fn nothing_is_fetched_for_steps_that_are_not_read() -> Result<()> {
    for part in [10, 50, 90] {
        let folder = tempfile::tempdir().unwrap();
        let cached = cache(folder.path(), part_of_all(part))?;
        let future = Shuffled { end: EPOCH_STEPS, ..ALONE };
        let plan = started(&cached, future)?;
        read(&cached, &plan, future, 0, EPOCH_STEPS)?;
        // Another epoch follows, of which the plan keeps what is read first.
        plan.set_until(2 * EPOCH_STEPS);
        read(&cached, &plan, future, EPOCH_STEPS, 2 * EPOCH_STEPS)?;
        drop(plan);
        let two = cold_bytes(&cached);
        assert!(two < 2 * ALL_BYTES - ALL_BYTES * part / 200, "{part} %: {two} of {}", 2 * ALL_BYTES);
        // A plan that knows of one epoch fetches one.
        let cached = cache(&folder.path().join("other"), part_of_all(part))?;
        let plan = started(&cached, future)?;
        read(&cached, &plan, future, 0, EPOCH_STEPS)?;
        std::thread::sleep(std::time::Duration::from_millis(50)); // Time enough to fetch early what is not wanted.
        drop(plan);
        assert_eq!(cold_bytes(&cached), ALL_BYTES, "{part} %");
    }
    Ok(())
}

#[test]
fn a_job_that_has_read_all_holds_up_no_other_one() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let (one, other) = (Shuffled { end: EPOCH_STEPS, ..ALONE }, Shuffled { end: 3 * EPOCH_STEPS, ..ALONE });
    let [ends, continues] = [cache(folder.path(), part_of_all(20))?, cache(folder.path(), part_of_all(20))?];
    let plans = (started(&ends, one)?, started(&continues, other)?);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| read(&ends, &plans.0, one, 0, one.end));
        let second = read(&continues, &plans.1, other, 0, one.end);
        first.join().unwrap().and(second)
    })?;
    let before = cold_bytes(&ends) + cold_bytes(&continues);
    // The first one stays open.
    read(&continues, &plans.1, other, one.end, other.end)?;
    let cold = cold_bytes(&ends) + cold_bytes(&continues) - before;
    // As much as if both read on, of which one fetches.
    let both = together(&folder.path().join("both"), 20, &[other, other], 3)? - ALL_BYTES;
    assert!(cold <= both * 11 / 10, "{cold} of {both}");
    Ok(())
}

#[test]
fn a_job_that_is_dropped_ends_at_once() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let cached = cache(folder.path(), 300_000)?;
    for steps in 0..20 {
        let plan = if steps % 2 == 0 {
            started(&cached, ALONE)?
        } else {
            Plan::start(cached.clone(), Arc::new(ALONE), ALONE.end)?
        };
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
fn a_plan_waits_for_reads_that_keep_what_they_fetch() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let cached = cache(folder.path(), 300_000)?;
    let (read, has_ended) = (cached.may_keep(), std::sync::atomic::AtomicBool::new(false));
    assert!(read.is_some());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while cached.may_keep().is_some() {
                std::thread::yield_now(); // Until the plan waits.
            }
            has_ended.store(true, std::sync::atomic::Ordering::SeqCst);
            drop(read);
        });
        let plan = cached.planned();
        cached.settle(std::time::Duration::from_secs(60));
        assert!(has_ended.load(std::sync::atomic::Ordering::SeqCst));
        assert!(cached.may_keep().is_none());
        drop(plan);
    });
    let _stalled = cached.may_keep();
    cached.settle(std::time::Duration::ZERO); // A read that hangs does not hold a plan up for ever.
    Ok(())
}

#[test]
fn reads_without_a_plan_do_not_displace_a_running_job() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let budget_bytes = ALL_BYTES + 100_000;
    let cached = cache(folder.path(), budget_bytes)?;
    let plan = started(&cached, ALONE)?;
    for step in 0..2 * EPOCH_STEPS {
        plan.before(step);
        plan.after(step);
    }
    // Another store wants the same room.
    let objects: BTreeMap<String, bytes::Bytes> = [("d/0".to_owned(), vec![1; 1_000_000].into())].into();
    let spec = Spec::parse(&format!("{}:{budget_bytes}", folder.path().display()))?;
    let other = Memory::holding(objects);
    let mut other = Cached::over(Arc::new(other), Drives::open(&spec)?, None, POLICY);
    other.store = "memory://other".into();
    let whole = RangeRequest::plain("d/0", 0, 1_000_000, Some(1_000_000));
    assert_eq!(other.fetch(vec![whole.twin()]).remove(0)?[0].len(), 1_000_000);
    let before = cached.cold.counters().counts().range_bytes;
    for step in 2 * EPOCH_STEPS..3 * EPOCH_STEPS {
        plan.before(step);
        plan.after(step);
    }
    assert_eq!(cached.cold.counters().counts().range_bytes, before);
    drop(plan);
    // Without a running plan, the older pages give way.
    assert_eq!(other.fetch(vec![whole]).remove(0)?[0].len(), 1_000_000);
    let counts = other.drives().drives[0].usage.total().unwrap();
    assert!(counts.evicted_bytes > 0 && counts.bytes <= counts.budget_bytes);
    Ok(())
}

/// Let loaders read epochs at the same time, each through a handle of its own, as processes would. Returns the cold bytes of all of them.
fn together(folder: &Path, part: u64, loaders: &[Shuffled], epoch_count: u64) -> Result<u64> {
    let end = epoch_count * EPOCH_STEPS;
    let jobs: Vec<(Cached, Shuffled)> = loaders
        .iter()
        .map(|future| Ok((cache(folder, part_of_all(part))?, Shuffled { end, ..*future })))
        .collect::<Result<_>>()?;
    let plans: Vec<Plan> = jobs.iter().map(|(cached, future)| started(cached, *future)).collect::<Result<_>>()?;
    std::thread::scope(|scope| {
        let work = |((cached, future), plan): ((Cached, Shuffled), Plan)| {
            scope.spawn(move || {
                read(&cached, &plan, future, 0, epoch_count * EPOCH_STEPS)?;
                Ok(cold_bytes(&cached))
            })
        };
        let threads: Vec<_> = jobs.into_iter().zip(plans).map(work).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    })
}

#[test]
fn jobs_of_one_order_read_each_byte_once() -> Result<()> {
    for part in [10, 20, 50] {
        let (alone, shared) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let one = together(alone.path(), part, &[ALONE], 6)?;
        let two = together(shared.path(), part, &[ALONE, ALONE], 6)?;
        // Two steps of the cache, an eighth of it at 50 %, are for what passes.
        println!("{part} %: {two} of {one}");
        assert!(two as f64 <= 1.3 * one as f64, "{part} %: two jobs read {two} bytes, one reads {one}");
    }
    Ok(())
}

#[test]
fn ranks_and_workers_share_one_plan() -> Result<()> {
    let (alone, shared) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // What passes takes a step of the cache, a sixteenth of the data. A loader alone gets it in memory.
    let one = together(alone.path(), 44, &[ALONE], 6)?;
    // Two ranks, each with two workers that read every other step.
    let loader = |(rank, begin)| Shuffled { member: Member { rank, begin, stride: 2 }, ranks: 2, ..ALONE };
    let four = together(shared.path(), 50, &[(0, 0), (0, 1), (1, 0), (1, 1)].map(loader), 6)?;
    println!("{four} of {one}");
    // Each one that comes or goes can cost what was fetched ahead.
    assert!(four as f64 <= 1.5 * one as f64, "four loaders read {four} bytes, one reads {one}");
    Ok(())
}

#[test]
fn jobs_go_on_when_the_leader_ends_or_stands_still() -> Result<()> {
    for is_dropped in [true, false] {
        let folder = tempfile::tempdir().unwrap();
        let (one, two) = (cache(folder.path(), part_of_all(20))?, cache(folder.path(), part_of_all(20))?);
        let leads = started(&one, ALONE)?;
        let follows = started(&two, ALONE)?;
        // The leader may only lead as far as the follower reads, and the other way round.
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| read(&one, &leads, ALONE, 0, 3));
            read(&two, &follows, ALONE, 0, 3)?;
            thread.join().unwrap()
        })?;
        let kept = (!is_dropped).then_some(leads);
        let before = cold_bytes(&two);
        read(&two, &follows, ALONE, 3, 4 * EPOCH_STEPS)?;
        // It leads now, so that its pages come through the cache.
        assert!(cold_bytes(&two) - before < ALL_BYTES * 4);
        if let Some(leads) = kept {
            read(&one, &leads, ALONE, 3, EPOCH_STEPS)?;
        }
    }
    Ok(())
}

#[test]
fn jobs_that_are_far_apart_do_not_wait_for_each_other() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let later = Shuffled { member: Member { begin: 40 * EPOCH_STEPS, ..ALONE.member }, ..ALONE };
    let (one, two) = (cache(folder.path(), part_of_all(20))?, cache(folder.path(), part_of_all(20))?);
    let first = started(&one, ALONE)?;
    let second = started(&two, later)?;
    read(&two, &second, later, 40 * EPOCH_STEPS, 42 * EPOCH_STEPS)?;
    read(&one, &first, ALONE, 0, 2 * EPOCH_STEPS)?;
    Ok(())
}

/// Wait until a plan fetches nothing more.
fn settled(cached: &Cached) -> u64 {
    let (mut last, mut same) = (cold_bytes(cached), 0);
    while same < 20 {
        std::thread::sleep(std::time::Duration::from_millis(10));
        let now = cold_bytes(cached);
        same = if now == last { same + 1 } else { 0 };
        last = now;
    }
    last
}

fn passes(cached: &Cached) -> usize {
    let here = |sample: &u32| {
        let (object, begin) = place(*sample);
        cached.prefetched().find(&cached.key(&name(object), 0), begin).is_some()
    };
    (0..SAMPLES).filter(here).count()
}

#[test]
fn fetches_run_ahead_of_the_room_for_them() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let budget_bytes = part_of_all(10);
    let cached = cache(folder.path(), budget_bytes)?;
    let plan = started(&cached, ALONE)?;
    let fetched = settled(&cached);
    // What fits, 100 KiB in memory, and at most a step more.
    let room = budget_bytes - part_of_all(0);
    assert!(
        (room + (80 << 10)..=room + (100 << 10) + 2 * BATCH * SAMPLE_BYTES).contains(&fetched),
        "{fetched} bytes with room for {room}"
    );
    read(&cached, &plan, ALONE, 0, 3 * EPOCH_STEPS)?;
    drop(plan);
    assert_eq!(passes(&cached), 0);
    Ok(())
}

#[test]
fn a_cache_smaller_than_a_step_passes_it_through_memory() -> Result<()> {
    for budget_bytes in [40_000, part_of_all(2), part_of_all(5)] {
        let folder = tempfile::tempdir().unwrap();
        let cached = cache(folder.path(), budget_bytes)?;
        let future = Shuffled { end: 3 * EPOCH_STEPS, ..ALONE };
        let plan = started(&cached, future)?;
        settled(&cached);
        assert!(passes(&cached) >= 2, "{} samples are in memory", passes(&cached));
        read(&cached, &plan, future, 0, 3 * EPOCH_STEPS)?;
        let cold = cold_bytes(&cached);
        assert!(cold <= 3 * ALL_BYTES, "{cold} bytes were fetched");
        drop(plan);
        assert_eq!(passes(&cached), 0);
        assert!(cached.drives().drives[0].usage.total().is_ok_and(|total| total.bytes <= total.budget_bytes));
    }
    Ok(())
}
