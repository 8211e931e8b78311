//! Fuzzes the files of a cache: whatever they hold, each read returns the bytes of the store, and the cache can be opened again or refuses.
#![no_main]
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use libfuzzer_sys::fuzz_target;
use penstock_cache::{Cached, Drives, Policy, Spec};
use penstock_storage::{Memory, RangeRequest, Read as _};

const BYTES: u64 = 40_000;
const POLICY: Policy = Policy { keeps: |_| true, memory_bytes: || 0, changed: || {} };

fn body() -> Vec<u8> {
    (0..BYTES).map(|at| (at.wrapping_mul(2_654_435_761) >> 8) as u8).collect()
}

/// Read all of the object through a cache, if the folder can be used as one.
fn read(folder: &Path) {
    let spec = Spec::parse(&format!("{}:1MB", folder.display())).expect("the text is right");
    let Ok(drives) = Drives::open(&spec) else { return };
    let store = Memory::holding(BTreeMap::from([("a".to_owned(), Bytes::from(body()))]));
    let cached = Cached::over(Arc::new(store), drives, None, POLICY);
    for (begin, bytes) in [(0, BYTES), (4096, 4096), (39_000, 1000)] {
        let found = cached.fetch(vec![RangeRequest::plain("a", begin, bytes, Some(BYTES))]).remove(0).expect("the store has it");
        assert!(found.concat() == body()[begin as usize..(begin + bytes) as usize]);
    }
}

fn files(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if entry.path().is_dir() { files(&entry.path(), found) } else { found.push(entry.path()) }
    }
}

fuzz_target!(|data: &[u8]| {
    let folder = tempfile::tempdir().expect("a folder");
    read(folder.path());
    let mut found = Vec::new();
    files(folder.path(), &mut found);
    found.sort();
    // Each edit has the number of a file, what is done, and bytes: they replace the file, or are written at an offset.
    for edit in data.chunks(64) {
        let [file, kind, low, high, bytes @ ..] = edit else { continue };
        let path = &found[usize::from(*file) % found.len()];
        let mut content = std::fs::read(path).unwrap_or_default();
        let at = (usize::from(*low) | usize::from(*high) << 8) % content.len().max(1);
        match kind % 3 {
            0 => content = bytes.to_vec(),
            1 => content.truncate(at),
            _ => content.iter_mut().skip(at).zip(bytes).for_each(|(old, new)| *old ^= new),
        }
        std::fs::write(path, content).expect("the file is written");
    }
    read(folder.path());
    read(folder.path());
});
