//! Object storage on a real MinIO server: the conformance suite, then commits and reads through a proxy that injects network faults.

use std::sync::{Arc, Mutex, PoisonError};

use penstock_dataset::{Snapshot, create};
use penstock_error::{Context as _, Error, Kind, Result};
use penstock_storage::{Memory, Remote, Store, conformance};
use penstock_testkit::minio::{BUCKET, Minio, SERVER};
use penstock_testkit::proxy::{Faults, Proxy, schedules};
use penstock_testkit::random::{Random, slice};
use penstock_testkit::samples;

const SCHEDULES: u64 = 10_000;
/// There are more workers than cores, because schedules spend most of their time waiting.
const WORKERS: u64 = 16;
const MEMORY_BYTES: u64 = 512 << 20;

fn start() -> Result<Minio> {
    Minio::start().map_err(|error| Error::new("internal", error.to_string()))
}

#[test]
fn a_long_folder_is_listed_page_by_page() -> Result<()> {
    let minio = start()?;
    let store = Remote::open(&format!("s3://{BUCKET}/long"), &Minio::options(minio.address, &[])?)?;
    let names: Vec<String> = (0..1005).map(|number| format!("{number:04}")).collect();
    names
        .iter()
        .chain(["below/deeper"].map(String::from).iter())
        .try_for_each(|name| store.overwrite(&format!("d/{name}"), b"x"))?;
    let first = store.list_page("d", None)?;
    assert!(first.entries.len() == 1000 && first.next.is_some(), "{} entries", first.entries.len());
    let mut listed: Vec<String> = store.list("d")?.into_iter().map(|entry| entry.name).collect();
    listed.sort();
    assert_eq!(listed, names, "objects in deeper folders must be left out");
    Ok(())
}

#[test]
fn a_bucket_conforms() -> Result<()> {
    let minio = start()?;
    let store = Remote::open(&format!("s3://{BUCKET}/some/prefix"), &Minio::options(minio.address, &[])?)?;
    conformance::check(&store, &store)?;
    let root = Remote::open(&format!("s3://{BUCKET}"), &Minio::options(minio.address, &[("hedge", "true")])?)?;
    assert!(root.exists("some/prefix/d/one")?, "a store at the root of a bucket must find the object");
    Ok(())
}

/// The commits that a schedule attempted, by outcome, and the error codes it saw.
#[derive(Default)]
struct Told {
    acknowledged: Vec<u64>,
    unknown: Vec<u64>,
    refused: Vec<u64>,
    codes: Vec<&'static str>,
}

/// Return the expected contents of a dataset with these batches, without the snapshot id.
fn reference(seeds: &[u64]) -> Result<Vec<String>> {
    let mut snapshot = Arc::new(create(Arc::new(Memory::default()), samples::schema(), "create", "testkit")?);
    for seed in seeds {
        snapshot = Arc::new(samples::append(&snapshot, *seed, count_of(*seed))?.1);
    }
    without_id(samples::contents(&snapshot)?)
}

fn without_id(mut contents: Vec<String>) -> Result<Vec<String>> {
    contents[0] = contents[0].split_once(' ').map_or(String::new(), |(_, rows)| rows.to_owned());
    Ok(contents)
}

fn same(found: Vec<String>, expected: Vec<String>) -> std::result::Result<(), String> {
    match found.iter().zip(&expected).find(|(found, expected)| found != expected) {
        None => Ok(()),
        Some((found, expected)) => {
            let at = found.bytes().zip(expected.bytes()).take_while(|(one, other)| one == other).count();
            let around = |text: &str| text.chars().skip(at.saturating_sub(30)).take(90).collect::<String>();
            Err(format!("wrong contents: …{}…, expected …{}…", around(found), around(expected)))
        }
    }
}

fn count_of(seed: u64) -> usize {
    (seed % 7) as usize
}

/// Return the seeds of the batches that a snapshot's commits appended, oldest first.
fn seeds_of(snapshot: &Snapshot) -> Result<Vec<u64>> {
    let commits = samples::commits(snapshot)?;
    let seeds =
        commits.iter().rev().filter_map(|commit| commit.transactions[0].message.strip_prefix("seed ")?.parse().ok());
    Ok(seeds.collect())
}

fn schedule(seed: u64, minio: &Minio, proxy: &Proxy) -> Result<Told> {
    let fail = |text: String| Error::new("internal", format!("schedule {seed}: {text}"));
    let mut random = Random(seed);
    let uri = format!("s3://{BUCKET}/schedule-{seed}");
    let mut faults = Faults { seed, late_ms: 5, in_a_row: 3, ..Faults::default() };
    faults.per_mille.iter_mut().for_each(|rate| *rate = random.below(60));
    let hard = random.chance(4); // Some schedules have more faults than retries can handle.
    if hard {
        faults.per_mille.iter_mut().for_each(|rate| *rate *= 3);
        faults.in_a_row = 0;
    }
    proxy.set(faults);
    let hedge = if random.chance(3) { "true" } else { "false" };
    let options =
        Minio::options(proxy.address, &[("timeout_seconds", if hard { "0.5" } else { "120" }), ("hedge", hedge)])?;
    let told = Mutex::new(Told::default());
    let has_own_server = std::env::var_os(SERVER).is_some();
    let note = |error: &Error| {
        told.lock().unwrap_or_else(PoisonError::into_inner).codes.push(error.code());
        match error.kind() {
            // The user can act on these errors: retry, or check whether the commit exists. Another server may have faults of its own, so that a
            // read takes longer than its deadline.
            Kind::Unavailable | Kind::Conflict if hard => Ok(()),
            Kind::Unavailable if has_own_server => Ok(()),
            _ => Err(fail(format!("unexpected error: {} ({})", error, error.code()))),
        }
    };
    let made = create(Arc::new(Remote::open(&uri, &options)?), samples::schema(), "create", "testkit");
    if let Err(error) = &made {
        note(error)?;
    }
    drop(made);
    let writers = 1 + random.below(2);
    let commits = 1 + random.below(3);
    let outcome: Vec<Result<()>> = std::thread::scope(|scope| {
        let writer = |number: u64| {
            for commit in 0..commits {
                let batch = seed * 100 + number * 10 + commit;
                let snapshot = match Remote::open(&uri, &options).and_then(samples::open) {
                    Ok(snapshot) => snapshot,
                    Err(error) if hard && error.kind() == Kind::NotFound => return Ok(()), // The dataset could not be created.
                    Err(error) => {
                        note(&error)?;
                        continue;
                    }
                };
                match samples::append(&snapshot, batch, count_of(batch)) {
                    Ok((_, next)) => {
                        told.lock().unwrap_or_else(PoisonError::into_inner).acknowledged.push(batch);
                        let read = samples::contents(&next).and_then(|contents| Ok((contents, seeds_of(&next)?)));
                        match read {
                            Ok((contents, seeds)) => {
                                same(without_id(contents)?, reference(&seeds)?).map_err(&fail)?;
                            }
                            Err(error) => note(&error)?,
                        }
                    }
                    Err(error) => {
                        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
                        match error.code() {
                            "commit-state-unknown" => told.unknown.push(batch),
                            _ => told.refused.push(batch),
                        }
                        drop(told);
                        note(&error)?;
                    }
                }
            }
            Ok(())
        };
        let threads: Vec<_> = (0..writers).map(|number| scope.spawn(move || writer(number))).collect();
        threads
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|_| Err(fail("a writer panicked".into()))))
            .collect()
    });
    outcome.into_iter().collect::<Result<()>>()?;
    // Check the result without the proxy.
    let told = told.into_inner().unwrap_or_else(PoisonError::into_inner);
    let store = Remote::open(&uri, &Minio::options(minio.address, &[])?)?;
    let snapshot = match samples::open(store) {
        Ok(snapshot) => snapshot,
        Err(error) if hard && error.kind() == Kind::NotFound && told.acknowledged.is_empty() => return Ok(told),
        Err(error) => return Err(fail(format!("cannot open after the schedule: {error}"))),
    };
    let mut held = seeds_of(&snapshot)?;
    same(without_id(samples::contents(&snapshot)?)?, reference(&held)?)
        .map_err(|told| fail(format!("after the schedule: {told}")))?;
    samples::check_verified(&snapshot).context(|| format!("schedule {seed}"))?;
    held.sort_unstable();
    let doubled = held.windows(2).any(|two| two[0] == two[1]);
    let lost = told.acknowledged.iter().any(|batch| held.binary_search(batch).is_err());
    let ghost = told.refused.iter().any(|batch| held.binary_search(batch).is_ok());
    let surplus = held.iter().any(|batch| !told.acknowledged.contains(batch) && !told.unknown.contains(batch));
    if doubled || lost || ghost || surplus {
        return Err(fail(format!(
            "held {held:?}, acknowledged {:?}, unknown {:?}, refused {:?}",
            told.acknowledged, told.unknown, told.refused
        )));
    }
    Ok(told)
}

#[test]
fn every_schedule_of_faults_keeps_every_promise() -> Result<()> {
    let minio = start()?;
    let seeds = slice(SCHEDULES, 50);
    let sums = Mutex::new((0, 0, 0, Vec::<u64>::new()));
    schedules(minio.address, seeds.clone(), WORKERS, |seed, proxy| {
        let told = schedule(seed, &minio, proxy)?;
        let (commits, unknown, errors, struck) = &mut *sums.lock().unwrap_or_else(PoisonError::into_inner);
        *commits += told.acknowledged.len() as u64;
        *unknown += told.unknown.len() as u64;
        *errors += told.codes.len() as u64;
        let counts = proxy.counts();
        struck.resize(counts.len(), 0);
        counts.iter().zip(struck).for_each(|((_, count), sum)| *sum += count);
        Ok(())
    })?;
    let (commits, unknown, errors, struck) = sums.into_inner().unwrap_or_else(PoisonError::into_inner);
    let schedules = seeds.end - seeds.start;
    let peak_bytes = peak_bytes();
    println!(
        "{schedules} schedules: {commits} commits acknowledged, {unknown} unknown, {errors} errors with a code; requests and faults {struck:?}; peak {} MiB",
        peak_bytes >> 20
    );
    assert!(struck.iter().all(|count| *count > 0), "every kind of fault must have occurred");
    assert!(commits > schedules && peak_bytes <= MEMORY_BYTES);
    Ok(())
}

/// Return the peak resident memory of this process.
fn peak_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<u64>().ok()).map_or(0, |kib| kib << 10)
}
