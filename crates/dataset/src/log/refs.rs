//! Snapshot names, which are stored in the names log (spec section 9). At present, only pins are implemented; the format also
//! defines branches and tags. Each handle folds the log once and then reads only later records.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use penstock_error::{Context as _, Error, Result};
use penstock_format::SnapshotId;
use penstock_format::ids::{NAMES_FOLDER, numbered};
use penstock_format::names::{Folded, NameKind, Names, Operation};
use penstock_storage::{Created, Storage, create_certainly};

use super::newest::{leave_hint, newest_number};
use crate::config::now_us;
use crate::store::context::Context;

/// The number of lost races after which an append fails with `conflict`.
const RACES: u32 = 10_000;

/// Read the records written since the last call, at least up to `known`. Costs one request per record, in addition to
/// `newest_number`.
fn catch_up(folded: &mut Folded, storage: &dyn Storage, known: Option<u64>) -> Result<()> {
    let newest = newest_number(storage, NAMES_FOLDER, known.max(folded.next.checked_sub(1)))?;
    let end = newest.map_or(Ok(0), |newest| Ok(newest.whole(storage, NAMES_FOLDER)? + 1))?;
    for number in folded.next..end {
        let name = numbered(NAMES_FOLDER, number);
        folded.apply(Names::parse(&storage.read(&name)?, number).context(|| format!("cannot read `{name}`"))?);
    }
    Ok(())
}

/// Return all pins by name. Cost: a read of commit 0, a call to `newest_number`, and one request per record added since this
/// handle's last call.
pub fn pins(context: &Context) -> Result<BTreeMap<String, SnapshotId>> {
    context.check_dataset()?;
    let mut folded = context.refs.get().lock().unwrap_or_else(PoisonError::into_inner);
    catch_up(&mut folded, context.storage.as_ref(), None)?;
    Ok(folded.all(NameKind::Pin))
}

/// Pin a snapshot under this name until `unpin` is called. Costs one more put than `pins`, unless the pin already exists.
pub fn pin(context: &Context, name: &str, target: SnapshotId) -> Result<()> {
    let set = |folded: &Folded| {
        let operation = Operation { removes: false, kind: NameKind::Pin, name: name.into(), target };
        (folded.get(NameKind::Pin, name) != Some(target)).then_some(operation)
    };
    append(context, set).context(|| format!("cannot pin snapshot `{target}` of `{}`", context.storage.uri())).map(drop)
}

/// Remove a pin. Returns whether the pin existed.
pub fn unpin(context: &Context, name: &str) -> Result<bool> {
    let remove = |folded: &Folded| {
        let target = folded.get(NameKind::Pin, name)?;
        Some(Operation { removes: true, kind: NameKind::Pin, name: name.into(), target })
    };
    append(context, remove).context(|| format!("cannot remove pin `{name}` from `{}`", context.storage.uri()))
}

/// Append the operation that `missing` returns for the current names, and retry after each lost race. Returns false if `missing`
/// returns None before the first attempt.
fn append(context: &Context, missing: impl Fn(&Folded) -> Option<Operation>) -> Result<bool> {
    let held = context.held()?;
    let here = held.as_deref().unwrap_or(context);
    let storage = here.storage.as_ref();
    here.check_dataset()?;
    here.check_place(context)?;
    let mut folded = here.refs.get().lock().unwrap_or_else(PoisonError::into_inner);
    let mut known = None;
    for race in 0..RACES {
        catch_up(&mut folded, storage, known)?;
        let Some(operation) = missing(&folded) else { return Ok(race > 0) };
        let number = folded.next;
        let names = Names { number, time_us: now_us().max(folded.time_us + 1), operations: vec![operation] };
        if race == 0 {
            storage.prove()?;
        }
        if create_certainly(storage, &numbered(NAMES_FOLDER, number), &names.encode())? == Created::Created {
            leave_hint(storage, NAMES_FOLDER, number);
            return Ok(true);
        }
        // Another writer, or an earlier attempt by this one, created the record. The next iteration reads it.
        known = Some(number);
    }
    Err(Error::new("conflict", format!("lost {RACES} races in a row")))
}
