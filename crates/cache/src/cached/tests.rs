//! Tests of the cache as a store: it returns what the store has, fetches each byte once, and survives damage and failing drives.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;

use penstock_error::{Error, Result};
use penstock_storage::{Counts as Traffic, Memory, Piece, RangeRequest, Read, Recycled, conformance};

use super::*;
use crate::{Drives, Policy, Spec};

const OBJECT_BYTES: u64 = 3_000_000;

const POLICY: Policy = Policy { keeps: |name| name.starts_with("d/"), memory_bytes: || 10_000_000, changed: || {} };

fn body(seed: u64) -> Vec<u8> {
    (0..OBJECT_BYTES).map(|at| (crate::place::mix(at / 8 ^ seed << 40) >> (at % 8 * 8)) as u8).collect()
}

/// A cache over a store in memory with two objects. Stores in one folder have the same identity.
fn cache(folder: &Path, budget: &str) -> Result<Cached> {
    let objects: BTreeMap<String, Bytes> =
        [("d/one", 1), ("d/two", 2)].map(|(name, seed)| (name.to_owned(), body(seed).into())).into();
    let spec = Spec::parse(&format!("{}:{budget}", folder.display()))?;
    Ok(Cached::over(Arc::new(Memory::holding(objects)), Drives::open(&spec)?, None, POLICY))
}

fn traffic(cached: &Cached) -> Traffic {
    cached.cold.counters().counts()
}

fn totals(cached: &Cached) -> crate::Counts {
    cached.drives().drives[0].usage.total().unwrap()
}

/// Read ranges and compare them with the bodies.
fn check(cached: &Cached, ranges: &[(u64, u64)]) -> Result<()> {
    for (seed, name) in [(1, "d/one"), (2, "d/two")] {
        let plain = |(begin, bytes): &(u64, u64)| RangeRequest::plain(name, *begin, *bytes, Some(OBJECT_BYTES));
        let whole = body(seed);
        for (answer, (begin, bytes)) in cached.fetch(ranges.iter().map(plain).collect()).into_iter().zip(ranges) {
            let pieces = answer?;
            assert_eq!(pieces.len(), 1);
            assert!(pieces[0] == whole[*begin as usize..(begin + bytes) as usize], "{name} {begin} {bytes}");
        }
    }
    Ok(())
}

/// Return the files of all extents.
fn extents(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![folder.join("stores")];
    while let Some(path) = open.pop() {
        for entry in std::fs::read_dir(path).into_iter().flatten().flatten() {
            if entry.path().is_dir() { open.push(entry.path()) } else { found.push(entry.path()) }
        }
    }
    found
}

fn random(state: &mut u64, below: u64) -> u64 {
    *state = crate::place::mix(*state);
    *state % below
}

#[test]
fn the_cache_passes_the_conformance_suite() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let spec = Spec::parse(&format!("{}:100MB", folder.path().display()))?;
    for _ in 0..2 {
        // A new store in the old folder must not return what the old store had.
        let cold = Arc::new(Memory::holding(BTreeMap::new()));
        conformance::check(&*cold, &Cached::over(cold.clone(), Drives::open(&spec)?, None, POLICY))?;
    }
    Ok(())
}

#[test]
fn each_byte_is_fetched_once() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let cached = cache(folder.path(), "100MB")?;
    let ranges = [(0, 1), (100, 5000), (4096, 4096), (OBJECT_BYTES - 1, 1), (1_000_000, 1_234_567), (0, 0)];
    check(&cached, &ranges)?;
    let first = traffic(&cached);
    check(&cached, &ranges)?;
    assert_eq!(traffic(&cached).ranges, first.ranges);
    check(&cached, &[(0, OBJECT_BYTES)])?;
    // The rest was fetched in whole pages, so each byte was fetched exactly once.
    assert_eq!(traffic(&cached).range_bytes, 2 * OBJECT_BYTES);
    let counts = totals(&cached);
    assert_eq!(
        (counts.cold_bytes, counts.corrupt_pages, counts.bypassed_bytes, counts.evicted_bytes),
        (2 * OBJECT_BYTES, 0, 0, 0)
    );
    // Another process finds everything.
    let again = cache(folder.path(), "100MB")?;
    check(&again, &[(0, OBJECT_BYTES), (5, 7)])?;
    assert_eq!(traffic(&again).ranges, 0);
    assert_eq!(again.read("d/one")?, body(1));
    assert_eq!((traffic(&again).reads, again.map("d/two", OBJECT_BYTES)? == body(2)), (0, true));
    Ok(())
}

#[test]
fn one_version_of_an_object_is_cached_with_its_note() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let open = || {
        let objects =
            [("d/a?1?x", 1), ("d/a?2?y", 2)].map(|(name, seed)| (name.to_owned(), Bytes::from(body(seed)))).into();
        let spec = Spec::parse(&format!("{}:100MB", folder.path().display()))?;
        Cached::over(Arc::new(Memory::holding(objects)), Drives::open(&spec)?, None, POLICY).with_notes()
    };
    let read = |cached: &Cached, name: &str, seed| {
        let range = RangeRequest::plain(name, 5000, 1_500_000, Some(OBJECT_BYTES));
        let found = cached.fetch(vec![range]).remove(0)?;
        assert!(found[0] == body(seed)[5000..1_505_000], "{name}");
        Ok::<(), Error>(())
    };
    let cached = open()?;
    assert!(cached.noted("d/a").is_none() && !cached.annotate("d/a?1?x", b"one"));
    read(&cached, "d/a?1?x", 1)?;
    assert!(cached.noted("d/a").is_none() && cached.annotate("d/a?1?x", b"one") && !cached.annotate("d/a?2?y", b"two"));
    let one = totals(&cached).bytes;
    // Another process finds it by the name of the object.
    let found = |is_believed| Some(Noted { name: "d/a?1?x".to_owned(), note: b"one".to_vec(), is_believed });
    assert_eq!((open()?.noted("d/a"), cached.noted("d/a")), (found(false), found(true)));
    assert!(open()?.noted("d/b").is_none());
    read(&cached, "d/a?2?y", 2)?;
    assert!(cached.noted("d/a").is_none() && totals(&cached).bytes == one);
    assert!(cached.annotate("d/a?2?y", &[b'n'; 9000]) && totals(&cached).bytes > one);
    read(&cached, "d/a?1?x", 1)?;
    assert_eq!(totals(&cached).bytes, one);
    assert!(cached.annotate("d/a?1?x", b"again"));
    assert!(cached.forget("d/a").is_ok());
    assert!(cached.noted("d/a").is_none() && totals(&cached).bytes == 0 && extents(folder.path()).is_empty());
    read(&cached, "d/a?1?x", 1)?;
    assert_eq!(cached.clear(|name| name.starts_with("d/b")).ok(), Some(0));
    assert!(
        cached.clear(|name| name.starts_with("d/a")).is_ok_and(|freed| freed > 1_500_000) && totals(&cached).bytes == 0
    );
    Ok(())
}

#[test]
fn random_reads_return_the_bytes_of_the_store() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let mut state = 7;
    // The second budget holds a sixth of the objects, so pages are evicted all the time.
    for budget in ["100MB", "1MB"] {
        let cached = cache(folder.path(), budget)?;
        for _ in 0..150 {
            let count = 1 + random(&mut state, 6);
            let range = |state: &mut u64| {
                let bytes = [1, 300, 5000, 70_000, 400_000][random(state, 5) as usize];
                (random(state, OBJECT_BYTES - bytes), bytes)
            };
            let ranges: Vec<(u64, u64)> = (0..count).map(|_| range(&mut state)).collect();
            check(&cached, &ranges)?;
            let counts = totals(&cached);
            assert!(counts.bytes <= counts.budget_bytes, "{counts:?}");
        }
    }
    Ok(())
}

#[test]
fn pieces_with_gaps_fill_their_slots() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let (cached, whole) = (cache(folder.path(), "100MB")?, body(1));
    let pieces =
        vec![Piece { skip: 10, bytes: 20_000 }, Piece { skip: 0, bytes: 1 }, Piece { skip: 8192, bytes: 4096 }];
    for _ in 0..2 {
        let memory = Recycled::fresh(24_097).unwrap();
        let mut rest = memory.slot();
        let slots = pieces.iter().map(|piece| Some(rest.split_to(piece.bytes))).collect();
        let range =
            RangeRequest { pieces: pieces.clone(), slots, ..RangeRequest::plain("d/one", 5000, 0, Some(OBJECT_BYTES)) };
        let found = cached.fetch(vec![range]).remove(0)?;
        let expected = [&whole[5010..25_010], &whole[25_010..25_011], &whole[33_203..37_299]];
        assert!(found.iter().zip(expected).all(|(found, expected)| found == expected));
        assert_eq!(found[1].as_ptr() as usize, found[0].as_ptr() as usize + 20_000);
    }
    Ok(())
}

#[test]
fn threads_that_want_the_same_bytes_fetch_them_once() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let caches = (0..4).map(|_| cache(folder.path(), "100MB")).collect::<Result<Vec<_>>>()?;
    std::thread::scope(|scope| {
        for cached in &caches {
            for thread in 0..2 {
                scope.spawn(move || {
                    let ranges: Vec<(u64, u64)> =
                        (0..30).map(|range| ((range * 7 + thread) % 30 * 100_000, 100_000)).collect();
                    assert!(ranges.chunks(5).all(|some| check(cached, some).is_ok()));
                });
            }
        }
    });
    let fetched: u64 = caches.iter().map(|cached| traffic(cached).range_bytes).sum();
    assert_eq!(fetched, 2 * OBJECT_BYTES);
    assert_eq!(totals(&caches[0]).cold_bytes, fetched);
    Ok(())
}

#[test]
fn flipped_bits_are_misses() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let cached = cache(folder.path(), "100MB")?;
    check(&cached, &[(0, OBJECT_BYTES)])?;
    let mut state = 3;
    for round in 0..40 {
        let fetched = traffic(&cached).cache_cold_bytes;
        for path in extents(folder.path()) {
            let whole = std::fs::read(&path).unwrap_or_default();
            let file = File::options().write(true).open(&path).unwrap();
            for _ in 0..16 {
                // A flip in the footer loses the whole extent.
                let at = random(&mut state, whole.len() as u64 - if round % 2 == 0 { 200 } else { 0 });
                let _ = file.write_all_at(&[whole[at as usize] ^ 1 << random(&mut state, 8)], at);
            }
        }
        // Every other round, a process that has not opened the extents reads them.
        let other = cache(folder.path(), "100MB")?;
        check(if round % 2 == 0 { &cached } else { &other }, &[(0, OBJECT_BYTES)])?;
        if round % 2 == 0 {
            // At most 16 pages of each object were fetched again.
            let again = traffic(&cached).cache_cold_bytes - fetched;
            assert!(again <= 2 * 16 * PAGE_BYTES, "{round}: {again} {:?}", totals(&cached));
        }
        let counts = totals(&cached);
        assert!(counts.bytes <= counts.budget_bytes);
    }
    assert!(totals(&cached).corrupt_pages > 100);
    Ok(())
}

#[test]
fn what_is_stored_is_read_without_the_store() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let cached = cache(folder.path(), "100MB")?;
    let plain = |begin: u64, bytes: u64| RangeRequest::plain("d/one", begin, bytes, Some(OBJECT_BYTES));
    only(cached.fetch(vec![plain(0, 1_000_000)]))?;
    let before = traffic(&cached).ranges;
    assert_eq!(cached.stored(plain(5, 900_000)).as_deref(), Some(&body(1)[5..900_005]));
    assert_eq!(cached.stored(plain(999_000, 100_000)), None);
    let [path] = &extents(folder.path())[..] else { panic!("one object is cached") };
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(&[0; 10], 300_000).unwrap();
    assert_eq!(cached.stored(plain(5, 900_000)), None);
    assert_eq!(traffic(&cached).ranges, before);
    assert_eq!(only(cached.fetch(vec![plain(5, 900_000)]))?, body(1)[5..900_005]);
    let counts = totals(&cached);
    assert_eq!((counts.hits, counts.misses, counts.corrupt_pages), (1, 2, 1));
    Ok(())
}

#[test]
fn damaged_bytes_from_the_network_are_not_kept() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let cached = cache(folder.path(), "100MB")?;
    check(&cached, &[(0, OBJECT_BYTES)])?;
    let before = totals(&cached).bytes;
    cached.distrust("d/one", 10_000, 5000);
    cached.distrust("log/one", 0, 1);
    // The two pages that have these bytes.
    assert_eq!(before - totals(&cached).bytes, 2 * PAGE_BYTES);
    let fetched = traffic(&cached).range_bytes;
    check(&cached, &[(0, OBJECT_BYTES)])?;
    assert_eq!(traffic(&cached).range_bytes - fetched, 2 * PAGE_BYTES);
    Ok(())
}

#[test]
fn reads_go_on_without_the_drive() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let cached = cache(folder.path(), "100MB")?;
    check(&cached, &[(0, 1_000_000)])?;
    for path in extents(folder.path()) {
        assert!(std::fs::remove_file(path).is_ok());
    }
    check(&cached, &[(0, 1_200_000)])?;
    assert!(std::fs::remove_dir_all(folder.path()).is_ok());
    check(&cached, &[(0, 1_500_000)])?;
    assert!(std::fs::write(folder.path(), "a file").is_ok());
    check(&cached, &[(0, 2_000_000)])?;
    assert!(std::fs::remove_file(folder.path()).is_ok());
    check(&cached, &[(0, 2_000_000)])
}

#[test]
fn requests_beyond_the_object_are_errors_of_the_store() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let cached = cache(folder.path(), "100MB")?;
    for (name, begin, bytes, object_bytes, code) in [
        ("d/one", OBJECT_BYTES - 1, 2, Some(OBJECT_BYTES), "object-truncated"),
        ("d/one", 0, 1, Some(OBJECT_BYTES + 1), "object-truncated"),
        ("d/none", 0, 1, Some(OBJECT_BYTES), "object-not-found"),
        ("d/none", 0, 1, None, "object-not-found"),
    ] {
        for _ in 0..2 {
            let answer = cached.fetch(vec![RangeRequest::plain(name, begin, bytes, object_bytes)]).remove(0);
            assert_eq!(answer.err().map(|error| error.code()), Some(code), "{name} {begin}");
        }
    }
    // What failed uses only the overhead of its extents.
    assert!(totals(&cached).bytes < 100_000 && traffic(&cached).range_bytes > 0);
    Ok(())
}

#[test]
fn all_parts_of_an_object_are_forgotten() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let cached = cache(folder.path(), "100MB")?;
    check(&cached, &[(0, OBJECT_BYTES)])?;
    assert!(cached.forget("d/one").is_ok() && cached.forget("d/two").is_ok());
    assert_eq!((extents(folder.path()).len(), totals(&cached).bytes), (0, 0));
    Ok(())
}

#[test]
fn other_folders_are_refused() -> Result<()> {
    let outer = tempfile::tempdir().unwrap();
    let code = |folder: &Path, size: &str| cache(folder, size).err().map(|error| error.code());
    let foreign = outer.path().join("foreign");
    assert!(std::fs::create_dir(&foreign).is_ok() && std::fs::write(foreign.join("thesis.tex"), "x").is_ok());
    assert_eq!(code(&foreign, "1MB"), Some("invalid-argument"));
    assert_eq!(std::fs::read_dir(&foreign).into_iter().flatten().count(), 1);
    let newer = outer.path().join("newer");
    assert!(
        std::fs::create_dir(&newer).is_ok()
            && std::fs::write(newer.join("penstock-cache"), "penstock cache, format 2 2 2\n").is_ok()
    );
    assert_eq!(code(&newer, "1MB"), Some("invalid-argument"));
    // Damaged bits of a marker are mended.
    assert!(std::fs::write(newer.join("penstock-cache"), b"pen\xfftock cache, format 1 0 1\n").is_ok());
    assert_eq!(code(&newer, "1MB"), None);
    assert!(
        std::fs::read(newer.join("penstock-cache")).is_ok_and(|found| found.ends_with(b"stock cache, format 1 1 1\n"))
    );
    assert_eq!(code(&foreign.join("thesis.tex"), "1MB"), Some("storage-failed"));
    // The size is written once, and may be left out later.
    let spec = |text: String| Spec::parse(&text).and_then(|spec| Drives::open(&spec));
    let plain = outer.path().join("plain");
    assert!(spec(plain.display().to_string()).is_err());
    assert!(spec(format!("{}:5MB", plain.display())).is_ok());
    assert_eq!(
        spec(plain.display().to_string())?.drives[0].usage.total().map(|total| total.budget_bytes).ok(),
        Some(5_000_000)
    );
    assert_eq!(cache(&plain, "1MB")?.cold.counters().reads.load(Relaxed), 0);
    Ok(())
}
