//! Crash proof on the crashing disk: whatever moment the power goes, the dataset verifies and holds exactly the
//! acknowledged commits, and perhaps the one that was in flight.

use std::path::Path;
use std::sync::Arc;

use penstock_dataset::{Context, Snapshot, create, verify, walk};
use penstock_error::{Error, Kind, Result};
use penstock_storage::{Io, Local};
use penstock_testkit::crash::CrashDisk;
use penstock_testkit::random::Random;
use penstock_testkit::samples;

const SEEDS: u64 = 10_000;

fn local(disk: &CrashDisk) -> Result<Local> {
    Local::open(Path::new("/data/set"), Arc::new(disk.clone()), Io::Auto)
}

fn open(disk: &CrashDisk) -> Result<Arc<Snapshot>> {
    Ok(Arc::new(Snapshot::open(Context::new(Box::new(local(disk)?)), 0)?))
}

/// What the writer was told: contents of each acknowledged snapshot, oldest first.
struct Told {
    contents: Vec<Vec<String>>,
    created: bool,
}

/// Create and append until done or the power goes.
fn write(disk: &CrashDisk, random: &mut Random, told: &mut Told) -> Result<()> {
    let mut snapshot = Arc::new(create(Box::new(local(disk)?), samples::schema(), "create", "crash")?);
    told.created = true;
    told.contents.push(samples::contents(&snapshot)?);
    // Enough commits that some runs write roots and pages.
    let commits = if random.chance(20) { 40 } else { 1 + random.below(4) };
    for _ in 0..commits {
        let count = random.below(6) as usize;
        let (_, next) = samples::append(&snapshot, random.number(), count)?;
        // The commit is acknowledged here; reading it back may fail after the power has gone.
        told.contents.push(Vec::new());
        snapshot = Arc::new(next);
        let last = told.contents.len() - 1;
        told.contents[last] = samples::contents(&snapshot)?;
    }
    Ok(())
}

fn check(seed: u64) -> Result<u64> {
    let fail = |text: String| Error::new("internal", format!("seed {seed}: {text}"));
    let mut random = Random(seed);
    let disk = CrashDisk::new();
    disk.fail_after(if random.chance(20) { random.below(1500) } else { random.below(160) });
    let mut told = Told { contents: Vec::new(), created: false };
    let outcome = write(&disk, &mut random, &mut told);
    let back = disk.after_crash(random.number());
    let snapshot = match open(&back) {
        Ok(snapshot) => snapshot,
        Err(error) if !told.created && error.kind() == Kind::NotFound => return Ok(0),
        Err(error) => return Err(fail(format!("cannot open after the crash: {error}"))),
    };
    let report = verify(snapshot.as_ref(), |_| {})?;
    if let Some(problem) = report.problems.first() {
        return Err(fail(format!("{}: {}", problem.object, problem.error)));
    }
    let mut numbers = vec![snapshot.record().clone()];
    walk(snapshot.context.storage.as_ref(), snapshot.record(), |entry| {
        numbers.push(entry.record.clone());
        Ok(())
    })?;
    let (held, acknowledged) = (numbers.len(), told.contents.len());
    if held < acknowledged || held > acknowledged + 1 || (outcome.is_ok() && held != acknowledged) {
        return Err(fail(format!("{held} commits are there, {acknowledged} were acknowledged")));
    }
    for record in numbers.iter().rev().take(acknowledged) {
        let expected = &told.contents[record.number as usize];
        let then = Snapshot::open_at(snapshot.context.clone(), &record.snapshot())?;
        if !expected.is_empty() && samples::contents(&then)? != *expected {
            return Err(fail(format!("commit {} reads otherwise than it did", record.number)));
        }
    }
    // Life goes on: the next commit stands on what came back.
    let (_, next) = samples::append(&snapshot, seed, 3)?;
    if next.len() != snapshot.len() + 3 || !verify(open(&back)?.as_ref(), |_| {})?.problems.is_empty() {
        return Err(fail("the commit after the crash is not whole".into()));
    }
    Ok(held as u64)
}

#[test]
fn every_crash_leaves_exactly_the_acknowledged_commits() -> Result<()> {
    let whole = std::env::var_os("PENSTOCK_SOAK").is_some();
    let seeds = if whole { SEEDS } else { SEEDS / 5 };
    let mut commits = 0;
    for seed in 0..seeds {
        commits += check(seed)?;
    }
    println!("{seeds} crashes, {commits} commits held");
    assert!(commits > seeds, "the seeds must reach past the first commit");
    Ok(())
}

/// One operation fails, or its answer is lost and a few more fail, and the disk goes on: acknowledged commits stand, refused ones do not, and
/// nothing that a commit rests on was deleted.
#[test]
fn every_single_fault_keeps_the_acknowledged_commits() -> Result<()> {
    let calm = CrashDisk::new();
    faulty(&calm)?;
    let operations = calm.operations();
    let mut refused = 0;
    for number in 1..=operations {
        for (length, done) in [(1, false), (1, true), (2, true), (3, true), (6, true)] {
            let disk = CrashDisk::new();
            disk.fail_for_a_while(number, number + length - 1, done);
            refused += u64::from(faulty(&disk)?);
        }
    }
    println!("{operations} operations, each failed and each lost; {refused} runs saw an error");
    assert!(refused > operations / 2);
    Ok(())
}

/// Create and append three times, going on after errors; whether there was one.
fn faulty(disk: &CrashDisk) -> Result<bool> {
    let mut failed = 0;
    if create(Box::new(local(disk)?), samples::schema(), "create", "fault").is_err() {
        return Ok(true);
    }
    let (mut told, mut unknown) = (0, 0);
    for seed in 0..3 {
        let outcome = open(disk).and_then(|snapshot| samples::append(&snapshot, seed, 4));
        match outcome {
            Ok(_) => told += 1,
            Err(error) => {
                failed += 1;
                unknown += u64::from(error.code() == "commit-state-unknown");
            }
        }
    }
    disk.fail_for_a_while(0, 0, false); // Now look in peace.
    let snapshot = open(disk)?;
    let report = verify(snapshot.as_ref(), |_| {})?;
    assert!(report.problems.is_empty(), "{:?}", report.problems);
    // Beyond what was told, only a commit that was said to be unknown, or one that could not be read back, may stand.
    let most = told + failed;
    assert!(unknown <= failed);
    assert!(snapshot.len() >= told * 4 && snapshot.len() <= most * 4, "{} samples, {told} told, {unknown} unknown", snapshot.len());
    Ok(failed > 0)
}
