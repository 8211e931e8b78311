//! A test suite that every `Store` must pass. Call [`check`] from a test with a new, empty store, and with what reads from it.

use std::ops::ControlFlow;

use penstock_error::{Error, Result};

use crate::read::Read;
use crate::store::{Created, Store};

fn ensure(holds: bool, what: &str) -> Result<()> {
    if holds { Ok(()) } else { Err(Error::new("internal", format!("conformance: {what}"))) }
}

fn fails_with<T>(result: Result<T>, code: &str, what: &str) -> Result<()> {
    ensure(result.err().is_some_and(|error| error.code() == code), what)
}

/// Run all checks. `reads` is the store itself, or a cache before it.
pub fn check(store: &dyn Store, reads: &dyn Read) -> Result<()> {
    store.initialise()?;
    reads_what_was_put(store, reads)?;
    creates_once(store)?;
    lists_one_folder(store)?;
    drops_what_was_not_finished(store)?;
    shows_all_names(store)?;
    store.prove()
}

/// Prefix of temporary files, which are not objects.
const TEMPORARY: &str = "tmp-";

fn shows_all_names(store: &dyn Store) -> Result<()> {
    let mut names = Vec::new();
    store.survey(&mut |name| {
        names.extend((!name.ends_with('/') && !name.starts_with(TEMPORARY)).then(|| name.to_owned()));
        ControlFlow::Continue(())
    })?;
    names.sort();
    ensure(names == ["d/one", "log/0/1", "log/0/2", "log/hint"], "survey reports every object once")?;
    let mut seen = 0;
    store.survey(&mut |_| {
        seen += 1;
        ControlFlow::Break(())
    })?;
    ensure(seen == 1, "survey stops when the callback breaks")
}

fn reads_what_was_put(store: &dyn Store, reads: &dyn Read) -> Result<()> {
    let body: Vec<u8> = (0..200_000u32).map(|value| value as u8).collect();
    store.put("d/one", &body)?;
    store.sync(&["d"])?;
    ensure(reads.read("d/one")?[..] == body[..], "read returns the body that was put")?;
    ensure(reads.map("d/one", body.len() as u64)?[..] == body[..], "map returns the body that was put")?;
    fails_with(reads.map("d/one", body.len() as u64 + 1), "object-truncated", "map rejects a wrong length")?;
    store.put("d/empty", b"")?;
    ensure(
        reads.read("d/empty")?.is_empty() && reads.map("d/empty", 0)?.is_empty(),
        "an empty object can be read and mapped",
    )?;
    fails_with(reads.read("d/none"), "object-not-found", "read reports a missing object")?;
    fails_with(reads.map("d/none", 1), "object-not-found", "map reports a missing object")?;
    ensure(store.exists("d/one")? && !store.exists("d/none")?, "exists finds only existing objects")?;
    store.overwrite("log/hint", b"one")?;
    store.overwrite("log/hint", b"two")?;
    ensure(reads.read("log/hint")?[..] == b"two"[..], "overwrite replaces the body")?;
    store.delete("d/empty")?;
    store.delete("d/empty")?;
    ensure(!store.exists("d/empty")?, "delete removes an object and may be repeated")
}

fn creates_once(store: &dyn Store) -> Result<()> {
    ensure(store.create("log/0/1", b"mine")? == Created::Created, "create stores an object")?;
    ensure(store.create("log/0/1", b"yours")? == Created::Exists, "create refuses a name that is taken")?;
    ensure(store.read("log/0/1")?[..] == b"mine"[..], "a refused create keeps the first body")?;
    let wins: Result<Vec<Created>> = std::thread::scope(|scope| {
        let racers: Vec<_> =
            (0..8u8).map(|racer| scope.spawn(move || store.create("log/0/2", &[racer; 100]))).collect();
        racers
            .into_iter()
            .map(|racer| racer.join().unwrap_or_else(|_| Err(Error::new("internal", "a racer panicked"))))
            .collect()
    });
    ensure(
        wins?.iter().filter(|answer| **answer == Created::Created).count() == 1,
        "exactly one of eight concurrent creates succeeds",
    )
}

fn lists_one_folder(store: &dyn Store) -> Result<()> {
    let listed = store.list("log/0")?;
    let known = listed.iter().filter_map(|entry| entry.modified?.elapsed().ok());
    ensure(known.clone().all(|age| age.as_secs() < 3600), "listed times match the write times")?;
    let mut names: Vec<_> = listed.iter().map(|entry| (entry.name.clone(), entry.bytes)).collect();
    names.sort();
    ensure(
        names == [("1".to_owned(), 4), ("2".to_owned(), 100)],
        "list returns names and sizes, but no temporary files",
    )?;
    ensure(store.list("nowhere")?.is_empty(), "a missing folder is empty")
}

fn drops_what_was_not_finished(store: &dyn Store) -> Result<()> {
    let mut writer = store.writer("d/half")?;
    writer.write(b"half".to_vec())?;
    drop(writer);
    ensure(!store.exists("d/half")?, "an unfinished object is discarded")
}
