//! Pins: names that protect snapshots from collection, stored in the log of names (spec section 9).

use std::collections::BTreeMap;

use penstock_error::{Context as _, Error, Result};
use penstock_format::SnapshotId;
use penstock_format::ids::{NAMES_FOLDER, numbered};
use penstock_format::names::{NameKind, Names, Operation};
use penstock_storage::{Created, Storage, create_certainly};

use crate::context::Context;
use crate::log::{leave_hint, newest_number};
use crate::transaction::now_us;

/// Lost races before an append fails with `conflict`.
const RACES: u32 = 10_000;

/// The state of the log up to the last record that was read.
#[derive(Default)]
struct Log {
    /// The number of the next record.
    next: u64,
    time_us: i64,
    pins: BTreeMap<String, SnapshotId>,
}

impl Log {
    /// Read the records since the last call, at least up to `known`. Cost: `newest_number`, and one request per record.
    fn catch_up(&mut self, storage: &dyn Storage, known: Option<u64>) -> Result<()> {
        let newest = newest_number(storage, NAMES_FOLDER, known)?;
        let end = newest.map_or(Ok(0), |newest| Ok(newest.whole(storage, NAMES_FOLDER)? + 1))?;
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

/// Return all pins by name.
pub fn pins(context: &Context) -> Result<BTreeMap<String, SnapshotId>> {
    context.check_dataset()?;
    let mut log = Log::default();
    log.catch_up(context.storage.as_ref(), None)?;
    Ok(log.pins)
}

/// Pin a snapshot under this name until `unpin`. Cost: that of `pins`, and one put unless the pin exists already.
pub fn pin(context: &Context, name: &str, target: SnapshotId) -> Result<()> {
    let set = |pins: &BTreeMap<String, SnapshotId>| {
        let operation = Operation { removes: false, kind: NameKind::Pin, name: name.into(), target };
        (pins.get(name) != Some(&target)).then_some(operation)
    };
    append(context, set).context(|| format!("cannot pin snapshot `{target}` of `{}`", context.storage.uri())).map(drop)
}

/// Remove a pin. Returns whether it existed.
pub fn unpin(context: &Context, name: &str) -> Result<bool> {
    let remove = |pins: &BTreeMap<String, SnapshotId>| {
        pins.get(name).map(|target| Operation { removes: true, kind: NameKind::Pin, name: name.into(), target: *target })
    };
    append(context, remove).context(|| format!("cannot remove pin `{name}` of `{}`", context.storage.uri()))
}

/// Append the operation that `left` returns for the current pins; repeating it is harmless. Returns whether the log was changed.
fn append(context: &Context, left: impl Fn(&BTreeMap<String, SnapshotId>) -> Option<Operation>) -> Result<bool> {
    let held = context.held()?;
    let here = held.as_deref().unwrap_or(context);
    let storage = here.storage.as_ref();
    here.check_dataset()?;
    here.check_place(context)?;
    let mut log = Log::default();
    let mut known = None;
    for race in 0..RACES {
        log.catch_up(storage, known)?;
        let Some(operation) = left(&log.pins) else { return Ok(race > 0) };
        let number = log.next;
        let names = Names { number, time_us: now_us().max(log.time_us + 1), operations: vec![operation] };
        if race == 0 {
            storage.prove()?;
        }
        if create_certainly(storage, &numbered(NAMES_FOLDER, number), &names.encode())? == Created::Created {
            leave_hint(storage, NAMES_FOLDER, number);
            return Ok(true);
        }
        // The number is taken by another writer, or by an earlier try of this call. `left` decides if anything remains.
        known = Some(number);
    }
    Err(Error::new("conflict", format!("lost {RACES} races in a row")))
}
