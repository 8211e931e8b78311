//! Names of snapshots, which are stored in the names log (spec section 9): tags and pins. The format also defines branches. Each handle
//! reads the newest record again only if there is a newer one.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::PoisonError;

use penstock_error::{Context as _, Error, Result};
use penstock_format::SnapshotId;
use penstock_format::ids::{NAMES_FOLDER, names_name, numbered};
use penstock_format::names::{Folded, NameKind, Names, Operation, parse_entries};
use penstock_storage::{Created, create_certainly};

use super::newest::{leave_hint, newest_number};
use crate::config::now_us;
use crate::store::context::Context;

/// The number of lost races after which an append fails with `conflict`.
const RACES: u32 = 10_000;

/// Read the newest record unless it is known, at least record `known`. Costs two requests at most, in addition to `newest_number`.
fn catch_up(folded: &mut Folded, context: &Context, known: Option<u64>) -> Result<()> {
    let storage = context.storage.as_ref();
    let newest = newest_number(storage, NAMES_FOLDER, known.max(folded.next.checked_sub(1)))?;
    let Some(number) = newest.map(|newest| newest.whole(storage, NAMES_FOLDER)).transpose()? else { return Ok(()) };
    if number + 1 == folded.next {
        return Ok(());
    }
    let name = numbered(NAMES_FOLDER, number);
    let names = Names::parse(&storage.read(&name)?, number).context(|| format!("cannot read `{name}`"))?;
    let before = match names.object {
        None => Vec::new(),
        Some(object) => {
            let name = names_name(object.id);
            parse_entries(&context.object(&name, &object)?).context(|| format!("cannot read `{name}`"))?
        }
    };
    *folded = Folded::of(names, &before);
    Ok(())
}

/// Return the names of a kind. Cost: a read of commit 0, a call to `newest_number`, and at most two requests if another handle has
/// changed names since this handle's last call.
fn all(context: &Context, kind: NameKind) -> Result<BTreeMap<String, SnapshotId>> {
    context.check_dataset()?;
    let mut folded = context.refs.get().lock().unwrap_or_else(PoisonError::into_inner);
    catch_up(&mut folded, context, None)?;
    Ok(folded.all(kind))
}

/// Return all pins by name. Costs the same as `all`.
pub fn pins(context: &Context) -> Result<BTreeMap<String, SnapshotId>> {
    all(context, NameKind::Pin)
}

/// Return all tags by name. Costs the same as `all`.
pub fn tags(context: &Context) -> Result<BTreeMap<String, SnapshotId>> {
    all(context, NameKind::Tag)
}

/// Return the snapshot of a tag, without checking the dataset. Cost: a call to `newest_number`, and at most two requests.
pub fn tagged(context: &Context, name: &str) -> Result<SnapshotId> {
    let mut folded = context.refs.get().lock().unwrap_or_else(PoisonError::into_inner);
    catch_up(&mut folded, context, None)?;
    folded.get(NameKind::Tag, name).ok_or_else(|| unknown_tag(context, name))
}

fn unknown_tag(context: &Context, name: &str) -> Error {
    Error::new("name-not-found", format!("`{}` has no tag `{name}`", context.storage.uri())).hint("see ds.tags() or `penstock tag`")
}

/// Give a snapshot a tag, which must be new. Costs one more put than `tags`.
pub fn create_tag(context: &Context, name: &str, target: SnapshotId) -> Result<()> {
    check_name(name)?;
    let exists = Cell::new(None);
    let set = |folded: &Folded, race: u32| {
        let found = folded.get(NameKind::Tag, name);
        // After a race, the tag may be the one that an earlier attempt has set.
        exists.set(found.filter(|found| race == 0 || *found != target));
        found.is_none().then(|| Operation { removes: false, kind: NameKind::Tag, name: name.into(), target })
    };
    append(context, set).context(|| format!("cannot create tag `{name}` of `{}`", context.storage.uri()))?;
    match exists.take() {
        None => Ok(()),
        Some(found) => {
            let text = format!("cannot create tag `{name}` of `{}`: it exists and names snapshot {found}", context.storage.uri());
            Err(Error::new("name-exists", text).hint("use another name, or delete the tag first"))
        }
    }
}

/// Remove a tag, which must exist. Costs one more put than `tags`.
pub fn delete_tag(context: &Context, name: &str) -> Result<()> {
    match remove(context, NameKind::Tag, name).context(|| format!("cannot delete tag `{name}` of `{}`", context.storage.uri()))? {
        true => Ok(()),
        false => Err(unknown_tag(context, name)),
    }
}

/// Refuse names that readers would refuse or that a shell would not print.
fn check_name(name: &str) -> Result<()> {
    match name.is_empty() || name.len() > 255 || name.chars().any(char::is_control) {
        true => {
            Err(Error::new("invalid-argument", format!("{name:?} is not a name"))
                .hint("a name has 1 to 255 bytes and no control characters"))
        }
        false => Ok(()),
    }
}

/// Pin a snapshot under this name until `unpin` is called. Costs one more put than `pins`, unless the pin already exists.
pub fn pin(context: &Context, name: &str, target: SnapshotId) -> Result<()> {
    let set = |folded: &Folded, _| {
        let operation = Operation { removes: false, kind: NameKind::Pin, name: name.into(), target };
        (folded.get(NameKind::Pin, name) != Some(target)).then_some(operation)
    };
    append(context, set).context(|| format!("cannot pin snapshot `{target}` of `{}`", context.storage.uri())).map(drop)
}

/// Remove a pin. Returns whether the pin existed.
pub fn unpin(context: &Context, name: &str) -> Result<bool> {
    remove(context, NameKind::Pin, name).context(|| format!("cannot remove pin `{name}` from `{}`", context.storage.uri()))
}

/// Remove a name. Returns whether it existed.
fn remove(context: &Context, kind: NameKind, name: &str) -> Result<bool> {
    append(context, |folded, _| Some(Operation { removes: true, kind, name: name.into(), target: folded.get(kind, name)? }))
}

/// Append the operation that `missing` returns for the current names and the number of lost races, and retry after each lost race. Returns
/// false if `missing` returns None before the first attempt.
fn append(context: &Context, missing: impl Fn(&Folded, u32) -> Option<Operation>) -> Result<bool> {
    let held = context.held()?;
    let here = held.as_deref().unwrap_or(context);
    let storage = here.storage.as_ref();
    here.check_dataset()?;
    here.check_place(context)?;
    let mut folded = here.refs.get().lock().unwrap_or_else(PoisonError::into_inner);
    let mut known = None;
    for race in 0..RACES {
        catch_up(&mut folded, here, known)?;
        let Some(operation) = missing(&folded, race) else { return Ok(race > 0) };
        let (names, object) = folded.followed_by(operation, now_us().max(folded.time_us + 1), here.new_id()?);
        if race == 0 {
            storage.prove()?;
        }
        if let (Some(reference), Some(body)) = (names.object, object) {
            storage.put(&names_name(reference.id), &body)?;
            storage.sync(&["n"])?;
        }
        if create_certainly(storage, &numbered(NAMES_FOLDER, names.number), &names.encode())? == Created::Created {
            leave_hint(storage, NAMES_FOLDER, names.number);
            return Ok(true);
        }
        // Another writer, or an earlier attempt by this one, created the record. The next iteration reads it.
        known = Some(names.number);
    }
    Err(Error::new("conflict", format!("lost {RACES} races in a row")))
}
