//! Crash tests on the simulated disk: whenever the power fails, the dataset passes verification. It contains exactly the
//! acknowledged commits, and possibly a commit that was in flight.

use std::path::Path;
use std::sync::Arc;

use penstock_dataset::{OnCorrupt, Purpose, Reader, Snapshot, create, verify};
use penstock_error::{Context as _, Error, Result};
use penstock_storage::{FileSystem as _, Io, Local};
use penstock_testkit::crash::CrashDisk;
use penstock_testkit::random::{Random, is_soak, slice};
use penstock_testkit::samples;

const SEEDS: u64 = 10_000;

fn local(disk: &CrashDisk) -> Result<Local> {
    Local::open(Path::new("/data/set"), Arc::new(disk.clone()), Io::Auto)
}

fn open(disk: &CrashDisk) -> Result<Arc<Snapshot>> {
    samples::open(local(disk)?)
}

/// The commits acknowledged to the writer: the contents of each committed snapshot, oldest first.
struct Told {
    contents: Vec<Vec<String>>,
    created: bool,
}

/// Create a dataset and append to it until all commits are made or the power fails.
fn write(disk: &CrashDisk, random: &mut Random, told: &mut Told) -> Result<()> {
    let mut snapshot = Arc::new(create(Arc::new(local(disk)?), samples::schema(), "create", "crash")?);
    told.created = true;
    told.contents.push(samples::contents(&snapshot)?);
    // Some runs make enough commits to write roots and pages.
    let commits = if random.chance(20) { 40 } else { 1 + random.below(4) };
    for _ in 0..commits {
        let count = random.below(6) as usize;
        let (_, next) = samples::append(&snapshot, random.number(), count)?;
        // The commit is acknowledged at this point. Reading its contents may still fail if the power is off by then.
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
        Err(error) if !told.created && error.kind() == penstock_error::Kind::NotFound => return Ok(0),
        Err(error) => return Err(fail(format!("cannot open after the crash: {error}"))),
    };
    samples::check_verified(&snapshot).context(|| format!("seed {seed}"))?;
    let numbers = samples::commits(&snapshot)?;
    let (held, acknowledged) = (numbers.len(), told.contents.len());
    if held < acknowledged || held > acknowledged + 1 || (outcome.is_ok() && held != acknowledged) {
        return Err(fail(format!("found {held} commits, but {acknowledged} were acknowledged")));
    }
    for record in numbers.iter().rev().take(acknowledged) {
        let expected = &told.contents[record.number as usize];
        let then = Snapshot::open_at(snapshot.context.clone(), &record.snapshot().to_string())?;
        if !expected.is_empty() && samples::contents(&then)? != *expected {
            return Err(fail(format!("commit {} has changed since it was acknowledged", record.number)));
        }
    }
    // The recovered dataset must accept another commit.
    let (_, next) = samples::append(&snapshot, seed, 3)?;
    if next.len() != snapshot.len() + 3 {
        return Err(fail("the commit after the crash is incomplete".into()));
    }
    samples::check_verified(&*open(&back)?).context(|| format!("seed {seed}, after another commit"))?;
    Ok(held as u64)
}

#[test]
fn every_crash_leaves_exactly_the_acknowledged_commits() -> Result<()> {
    let (mut commits, own) = (0, slice(SEEDS, 5));
    let count = own.end - own.start;
    for seed in own {
        commits += check(seed)?;
    }
    println!("{count} crashes, {commits} commits found");
    assert!(commits > count, "the seeds must get past the first commit");
    Ok(())
}

/// One operation fails, or its reply is lost and a few more operations fail; then the disk works again. Acknowledged commits exist,
/// rejected ones do not, and no object that a commit needs is deleted.
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
    println!("{operations} operations, each tested with a failure and with a lost reply; {refused} runs saw an error");
    assert!(refused > operations / 2);
    Ok(())
}

/// Create a dataset and append three times, continuing after errors; return whether any of these calls failed.
fn faulty(disk: &CrashDisk) -> Result<bool> {
    let mut failed = 0;
    if create(Arc::new(local(disk)?), samples::schema(), "create", "fault").is_err() {
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
    disk.fail_for_a_while(0, 0, false); // Check without faults.
    let snapshot = open(disk)?;
    samples::check_verified(&snapshot)?;
    // The only other commits that may exist are those whose state is unknown or that could not be read back.
    let most = told + failed;
    assert!(unknown <= failed);
    assert!(
        snapshot.len() >= told * 4 && snapshot.len() <= most * 4,
        "{} samples, {told} acknowledged, {unknown} unknown",
        snapshot.len()
    );
    Ok(failed > 0)
}

/// Which samples to append: the testkit's plain samples, or wide samples, whose commits write pages and words.
#[derive(Clone, Copy, Debug)]
enum Kind {
    Plain,
    Wide,
}

impl Kind {
    fn create(self, disk: &CrashDisk) -> Result<Snapshot> {
        let schema = match self {
            Kind::Plain => samples::schema(),
            Kind::Wide => samples::wide_schema(),
        };
        create(Arc::new(local(disk)?), schema, "create", "fault")
    }

    fn append(self, snapshot: &Arc<Snapshot>, seed: u64) -> Result<Snapshot> {
        let (_, next) = match self {
            Kind::Plain => samples::append(snapshot, seed, 4)?,
            Kind::Wide => samples::append_wide(snapshot, seed, 4, false)?,
        };
        Ok(next)
    }
}

/// Make zero to three commits with a fault among their operations, then cut the power and check that the acknowledged commits survive.
/// A later commit may sync the data that the fault left unsynced, so the number of commits varies with the seed. Return the
/// number of operations before the power loss.
fn fault_then_power(kind: Kind, first: u64, last: u64, done: bool, seed: u64) -> Result<u64> {
    let commits = seed % 4;
    let fail = |text: String| {
        Error::new("internal", format!("{kind:?}, operations {first}..={last}, done {done}, seed {seed}: {text}"))
    };
    let disk = CrashDisk::new();
    disk.fail_for_a_while(first, last, done);
    let (mut told, mut unknown) = (0, 0);
    let created = kind.create(&disk);
    let lost = |error: &Error| u64::from(error.code() == "commit-state-unknown");
    match &created {
        Err(error) => unknown += lost(error),
        Ok(_) => {
            for seed in 0..commits {
                match open(&disk).and_then(|snapshot| kind.append(&snapshot, seed)) {
                    Ok(_) => told += 1,
                    Err(error) => unknown += lost(&error),
                }
            }
        }
    }
    let operations = disk.operations();
    let back = disk.after_crash(seed);
    let snapshot = match open(&back) {
        Ok(snapshot) => snapshot,
        Err(error) if created.is_err() && error.kind() == penstock_error::Kind::NotFound => return Ok(operations),
        Err(error) => return Err(fail(format!("cannot open after the power loss: {error}"))),
    };
    samples::check_verified(&snapshot).map_err(|error| fail(error.to_string()))?;
    if snapshot.len() < told * 4 || snapshot.len() > (told + unknown) * 4 {
        return Err(fail(format!(
            "found {} samples, but {told} commits were acknowledged and {unknown} are unknown",
            snapshot.len()
        )));
    }
    samples::contents(&snapshot)?;
    Ok(operations)
}

/// Inject a fault at one operation, then cut the power: a commit acknowledged despite the fault must not depend on unsynced data.
#[test]
fn one_fault_and_then_power_loss_keeps_the_acknowledged_commits() -> Result<()> {
    let whole = is_soak();
    let mut tries = 0;
    for (kind, step, seeds) in [
        (Kind::Plain, 1, if whole { 40 } else { 4 }),
        (Kind::Wide, if whole { 1 } else { 3 }, if whole { 10 } else { 1 }),
    ] {
        let operations = fault_then_power(kind, u64::MAX, 0, false, 3)?;
        for number in (1..=operations).step_by(step) {
            for (length, done) in [(1, false), (1, true), (2, true), (3, false), (6, true)] {
                for seed in 0..seeds {
                    fault_then_power(kind, number, number + length - 1, done, seed * 7919 + number + 31 * length)?;
                    tries += 1;
                }
            }
        }
    }
    println!("{tries} faults, each followed by a power loss");
    assert!(tries > 1000);
    Ok(())
}

/// One writer dies after creating a folder but before syncing it. Another writer's commits still survive a power loss.
#[test]
fn a_folder_that_another_made_is_made_durable_before_a_commit_rests_on_it() -> Result<()> {
    for seed in 0..200 {
        let disk = CrashDisk::new();
        let snapshot = Kind::Wide.create(&disk)?;
        drop(snapshot);
        for folder in ["d", "p", "w"] {
            disk.create_folder(&Path::new("/data/set").join(folder))
                .map_err(|error| Error::new("internal", error.to_string()))?;
        }
        Kind::Wide.append(&open(&disk)?, 1)?;
        let back = open(&disk.after_crash(seed))?;
        assert_eq!((back.len(), verify(back.as_ref(), |_| {})?.problems.len()), (4, 0), "seed {seed}");
    }
    Ok(())
}

/// A root collects the fragments of many records into pages. The pages are as durable as the commit that refers to the root.
#[test]
fn a_folder_above_the_dataset_may_refuse_a_sync_but_not_fail_it() -> Result<()> {
    const EACCES: i32 = 13;
    const ENOSPC: i32 = 28;
    let create_with = |errno: i32| {
        let disk = CrashDisk::new();
        disk.fail_sync(Path::new("/"), errno);
        create(Arc::new(local(&disk)?), samples::schema(), "create", "crash").map(|_| ())
    };
    create_with(EACCES)?;
    assert_eq!(create_with(ENOSPC).map_err(|error| error.code()), Err("no-space"));
    Ok(())
}

#[test]
fn the_pages_of_a_root_outlive_a_power_loss() -> Result<()> {
    let disk = CrashDisk::new();
    let mut snapshot = Arc::new(Kind::Plain.create(&disk)?);
    let mut roots = 0;
    for seed in 0..140 {
        let before = snapshot.record().root;
        snapshot = Arc::new(samples::append(&snapshot, seed, 2)?.1);
        if snapshot.record().root != before {
            roots += 1;
            for seed in 0..40 {
                let back = open(&disk.after_crash(seed))?;
                assert_eq!(
                    (back.len(), verify(back.as_ref(), |_| {})?.problems.len()),
                    (snapshot.len(), 0),
                    "seed {seed}"
                );
            }
        }
    }
    assert!(roots >= 2, "{roots} roots");
    Ok(())
}

/// Commits alternate between storing fragments in pages and in records. A root written between them keeps their order.
#[test]
fn commits_of_pages_and_of_fragments_keep_their_order() -> Result<()> {
    let disk = CrashDisk::new();
    let mut snapshot = Arc::new(Kind::Wide.create(&disk)?);
    for seed in 0..80 {
        snapshot = Arc::new(samples::append_wide(&snapshot, seed, 2, seed % 2 == 1)?.1);
    }
    for snapshot in [snapshot, open(&disk)?] {
        let mut reader = Reader::new(snapshot.clone(), (0..160).collect(), OnCorrupt::Raise)?;
        let column = snapshot.column("n0")?.clone();
        reader.fetch(&[&column], Purpose::Take)?;
        let mut out = vec![0; 320];
        reader.fixed(&column, &mut out)?;
        let found: Vec<i16> = out.chunks(2).map(|two| i16::from_le_bytes([two[0], two[1]])).collect();
        assert_eq!(found, (0..80i16).flat_map(|seed| [seed * 100, seed * 100 + 1]).collect::<Vec<_>>());
        samples::check_verified(&snapshot)?;
    }
    Ok(())
}
