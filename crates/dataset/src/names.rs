//! Pins: names that keep snapshots, in the log of names (spec section 9).

use std::collections::BTreeMap;

use penstock_error::{Context as _, Error, Result};
use penstock_format::SnapshotId;
use penstock_format::ids::{NAMES_FOLDER, hint_name, numbered, write_hint};
use penstock_format::names::{NameKind, Names, Operation};
use penstock_storage::{Created, Storage, create_certainly};

use crate::log::newest_number;
use crate::transaction::now_us;

/// Lost races before giving up.
const RACES: u32 = 10_000;

/// The log as far as it was read.
#[derive(Default)]
struct Log {
    /// The number of the next record.
    next: u64,
    time_us: i64,
    pins: BTreeMap<String, SnapshotId>,
}

impl Log {
    /// Read what came since. Cost: `newest_number`, and one request a record.
    fn catch_up(&mut self, storage: &dyn Storage) -> Result<()> {
        let end = newest_number(storage, NAMES_FOLDER)?.map_or(0, |number| number + 1);
        for number in self.next..end {
            let name = numbered(NAMES_FOLDER, number);
            let names = Names::parse(&storage.read(&name)?, number).context(|| format!("cannot read `{name}`"))?;
            for Operation { removes, name, target, .. } in names.operations.into_iter().filter(|operation| operation.kind == NameKind::Pin)
            {
                match removes {
                    true => self.pins.remove(&name),
                    false => self.pins.insert(name, target),
                };
            }
            self.time_us = names.time_us;
            self.next = number + 1;
        }
        Ok(())
    }
}

/// All pins, by name.
pub fn pins(storage: &dyn Storage) -> Result<BTreeMap<String, SnapshotId>> {
    let mut log = Log::default();
    log.catch_up(storage)?;
    Ok(log.pins)
}

/// Keep a snapshot under this name, until it is removed. Cost: that of `pins`; one put unless it is kept so already.
pub fn pin(storage: &dyn Storage, name: &str, target: SnapshotId) -> Result<()> {
    let set = |pins: &BTreeMap<String, SnapshotId>| {
        let operation = Operation { removes: false, kind: NameKind::Pin, name: name.into(), target };
        (pins.get(name) != Some(&target)).then_some(operation)
    };
    append(storage, set).context(|| format!("cannot pin snapshot `{target}` of `{}`", storage.uri())).map(drop)
}

/// Remove a pin; whether it was there.
pub fn unpin(storage: &dyn Storage, name: &str) -> Result<bool> {
    let remove = |pins: &BTreeMap<String, SnapshotId>| {
        pins.get(name).map(|target| Operation { removes: true, kind: NameKind::Pin, name: name.into(), target: *target })
    };
    append(storage, remove).context(|| format!("cannot remove pin `{name}` of `{}`", storage.uri()))
}

/// Append what is still to be done, which is harmless to do twice; whether there was anything.
fn append(storage: &dyn Storage, left: impl Fn(&BTreeMap<String, SnapshotId>) -> Option<Operation>) -> Result<bool> {
    let mut log = Log::default();
    for race in 0..RACES {
        log.catch_up(storage)?;
        let Some(operation) = left(&log.pins) else { return Ok(race > 0) };
        let number = log.next;
        let names = Names { number, time_us: now_us().max(log.time_us + 1), operations: vec![operation] };
        if create_certainly(storage, &numbered(NAMES_FOLDER, number), &names.encode())? == Created::Created {
            let _ = storage.overwrite(&hint_name(NAMES_FOLDER), &write_hint(number)); // A stale hint costs a few look-ups.
            return Ok(true);
        }
        // Another's record, or an own earlier try: what is left tells.
    }
    Err(Error::new("conflict", format!("lost {RACES} races in a row")))
}
