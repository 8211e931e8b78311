//! Names in the names log (spec section 9): branches, tags and pins. Each handle reads the newest record again only if there is a newer
//! one.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use bytes::Bytes;
use penstock_error::{Context as _, Error, Kind, Result};
use penstock_format::SnapshotId;
use penstock_format::ids::{NAMES_FOLDER, ObjectRef, names_name, numbered, record_name, sealed_crc};
use penstock_format::names::{Folded, Layer, NameKind, Names, NewLayer, Operation};
use penstock_storage::{Created, create_certainly};

use super::newest::{leave_hint, newest, newest_number};
use super::records;
use crate::config::now_us;
use crate::store::context::{Context, replaced};

/// The name of the first branch. No record of names lists it.
pub const MAIN: &str = "main";

/// The number of lost races after which an append fails with `conflict`.
const RACES: u32 = 10_000;

/// Return the newest record, at least record `known`, unless it is in `folded`. Fails if the log has lost the record in `folded`. Costs one
/// request, in addition to `newest_number`.
fn newer(folded: &Folded, context: &Context, known: Option<u64>) -> Result<Option<Names>> {
    let storage = context.storage.as_ref();
    let newest = newest_number(storage, NAMES_FOLDER, known.max(folded.next.checked_sub(1)))?;
    let Some(number) = newest.map(|newest| newest.whole(storage, NAMES_FOLDER)).transpose()? else { return Ok(None) };
    let name = numbered(NAMES_FOLDER, number);
    let is_known = number + 1 == folded.next;
    let changed = || replaced(&format!("the names of `{}`: `{name}` has changed or is missing", storage.uri()));
    let body = match storage.read(&name) {
        Err(error) if is_known && error.kind() == Kind::NotFound => return Err(changed()),
        other => other?,
    };
    match is_known {
        true if sealed_crc(&body) == folded.crc => Ok(None),
        true => Err(changed()),
        false => Names::parse(&body, number).context(|| format!("cannot read `{name}`")).map(Some),
    }
}

/// Read the newest record unless it is known, at least record `known`. Costs one read and concurrent ones for its new objects, in addition to
/// `newest_number`.
fn catch_up(folded: &mut Folded, context: &Context, known: Option<u64>) -> Result<()> {
    match newer(folded, context, known)? {
        Some(names) => fold(folded, context, names),
        None => Ok(()),
    }
}

/// Replace the known names with those of a record. Its objects may be removed as soon as there is a newer record, which is then read instead.
/// Cost: concurrent reads of the objects that are not known.
fn fold(folded: &mut Folded, context: &Context, mut names: Names) -> Result<()> {
    loop {
        let read = layers(context, &folded.unknown(&names));
        let error = match read {
            Ok(read) => return folded.follow(names, &read).context(|| format!("cannot read `{NAMES_FOLDER}`")),
            Err(error) => error,
        };
        let later = if error.kind() == Kind::NotFound { newer(folded, context, Some(names.number))? } else { None };
        match later {
            Some(later) if later.number > names.number => names = later,
            _ => return Err(error),
        }
    }
}

/// Read objects of names. Cost: concurrent reads.
fn layers(context: &Context, objects: &[ObjectRef]) -> Result<Vec<Layer>> {
    let parse = |object: &ObjectRef, body: Bytes| {
        Layer::parse(*object, &body).context(|| format!("cannot read `{}`", names_name(object.id)))
    };
    context.objects(objects, names_name)?.into_iter().zip(objects).map(|(body, object)| parse(object, body)).collect()
}

/// Return the targets of all names of a kind: of a branch, its first record. `main` is not among them. Cost: a read of commit 0, a call to `newest_number`, one request, and concurrent ones for new objects.
pub fn names(context: &Context, kind: NameKind) -> Result<BTreeMap<String, SnapshotId>> {
    context.check_dataset()?;
    let mut folded = context.refs.get().lock().unwrap_or_else(PoisonError::into_inner);
    catch_up(&mut folded, context, None)?;
    Ok(folded.all(kind))
}

/// Return what a tag or a branch names, without checking the dataset. Cost: a call to `newest_number` and one request. If the newest record
/// lacks the name, concurrent ones for its objects follow, and a look-up.
pub fn find(context: &Context, kind: NameKind, name: &str) -> Result<Option<SnapshotId>> {
    let mut folded = context.refs.get().lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(names) = newer(&folded, context, None)? {
        if let Some(Some(found)) = names.find(kind, name) {
            return Ok(Some(found));
        }
        fold(&mut folded, context, names)?;
    }
    loop {
        let found = folded.get(kind, name);
        // A stale listing must not hide a name.
        if found.is_some() || !context.storage.exists(&numbered(NAMES_FOLDER, folded.next))? {
            return Ok(found);
        }
        let next = folded.next;
        catch_up(&mut folded, context, Some(next))?;
    }
}

/// Return the snapshot of a tag. Costs the same as `find`.
pub fn tagged(context: &Context, name: &str) -> Result<SnapshotId> {
    find(context, NameKind::Tag, name)?.ok_or_else(|| unknown_tag(context, name))
}

fn unknown_tag(context: &Context, name: &str) -> Error {
    Error::new("name-not-found", format!("`{}` has no tag `{name}`", context.storage.uri()))
        .hint("see ds.tags() or `penstock tag`")
}

/// Give a snapshot a tag, which must be new. Costs one more put and one more read than `names`.
pub fn create_tag(context: &Context, name: &str, target: SnapshotId) -> Result<()> {
    records::named(context.storage.as_ref(), &target)
        .context(|| format!("cannot create tag `{name}` of `{}`", context.storage.uri()))?;
    create_name(context, NameKind::Tag, name, |_, _| Ok(target)).map(drop)
}

/// Set a tag or a branch, which must be new. `target` is called with the place of all puts and the number of the next names record, again
/// after each lost race. It fails with `conflict` if that record exists. Returns the last target. Of several callers, one succeeds. Costs one more put than
/// `names`.
pub fn create_name(
    context: &Context,
    kind: NameKind,
    name: &str,
    mut target: impl FnMut(&Context, u64) -> Result<SnapshotId>,
) -> Result<SnapshotId> {
    let what = if kind == NameKind::Branch { "branch" } else { "tag" };
    let uri = context.storage.uri();
    check_name(name)
        .and_then(|()| check_apart(context, name))
        .context(|| format!("cannot create {what} `{name}` of `{uri}`"))?;
    let found = loop {
        let (mut own, mut taken) = (None, None);
        let operation = |here: &Context, folded: &Folded| {
            taken =
                [NameKind::Branch, NameKind::Tag].into_iter().find_map(|kind| Some((kind, folded.get(kind, name)?)));
            if taken.is_some() {
                return Ok(None);
            }
            let target = target(here, folded.next)?;
            own = Some(target);
            Ok(Some(Operation { removes: false, kind, name: name.into(), target }))
        };
        append(context, operation).context(|| format!("cannot create {what} `{name}` of `{uri}`"))?;
        match (taken, own) {
            (None, Some(own)) => return Ok(own),
            (Some((NameKind::Tag, target)), _) => {
                break format!("a tag with this name already exists, for snapshot {target}");
            }
            // Its deletion was interrupted.
            (Some((_, first)), _) if has_ended(context, first.branch)? => remove_branch(context, name, first.branch)?,
            _ => break "a branch with this name already exists".to_owned(),
        }
    };
    Err(Error::new("name-exists", format!("cannot create {what} `{name}` of `{uri}`: {found}"))
        .hint("use another name, or delete the existing one first; branches and tags share one set of names"))
}

/// Remove a tag, which must exist. Costs one more put than `names`.
pub fn delete_tag(context: &Context, name: &str) -> Result<()> {
    match remove(context, NameKind::Tag, name, |_| true)
        .context(|| format!("cannot delete tag `{name}` of `{}`", context.storage.uri()))?
    {
        true => Ok(()),
        false => Err(unknown_tag(context, name)),
    }
}

/// Refuse names that readers would refuse or that a shell would not print.
fn check_name(name: &str) -> Result<()> {
    if name == MAIN {
        return Err(
            Error::new("name-exists", format!("`{MAIN}` is a branch of every dataset")).hint("use another name")
        );
    }
    match name.is_empty() || name.len() > 255 || name.chars().any(char::is_control) || SnapshotId::parse(name).is_ok() {
        true => Err(Error::new("invalid-argument", format!("{name:?} is not a valid name"))
            .hint("a name has 1 to 255 bytes, no control characters, and not the form of a snapshot id")),
        false => Ok(()),
    }
}

/// Refuse a name that is also the beginning of the id of a snapshot. Another form of number, such as the month of a date, is not. Cost: a look-up
/// for such a name only.
fn check_apart(context: &Context, name: &str) -> Result<()> {
    let Ok((branch, number)) = SnapshotId::parse_beginning(name) else { return Ok(()) };
    let beginning = format!("{branch:x}-{number}");
    let is_id = name.strip_prefix(&beginning).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'));
    match is_id && context.storage.exists(&record_name(branch, 0))? {
        false => Ok(()),
        true => Err(Error::new(
            "invalid-argument",
            format!("`{name}` is the beginning of a snapshot id, and would be ambiguous"),
        )
        .hint("use a name with a different form, such as v1")),
    }
}

/// Return whether a branch was deleted, although its name may remain. Cost: a call to `newest_number`, and a read.
fn has_ended(context: &Context, branch: u64) -> Result<bool> {
    let newest = newest(context.storage.as_ref(), branch, None)?;
    Ok(newest.is_some_and(|newest| newest.check_open().is_err()))
}

/// Pin a snapshot under this name until `unpin` is called. Costs one more put than `names`, unless the pin already exists.
pub fn pin(context: &Context, name: &str, target: SnapshotId) -> Result<()> {
    let operation = |_: &Context, folded: &Folded| {
        let operation = Operation { removes: false, kind: NameKind::Pin, name: name.into(), target };
        Ok((folded.get(NameKind::Pin, name) != Some(target)).then_some(operation))
    };
    append(context, operation)
        .context(|| format!("cannot pin snapshot `{target}` of `{}`", context.storage.uri()))
        .map(drop)
}

/// Remove a pin. Returns whether the pin existed.
pub fn unpin(context: &Context, name: &str) -> Result<bool> {
    remove(context, NameKind::Pin, name, |_| true)
        .context(|| format!("cannot remove pin `{name}` from `{}`", context.storage.uri()))
}

/// Remove the name of a branch, unless another process has removed it or given it to another branch.
pub fn remove_branch(context: &Context, name: &str, branch: u64) -> Result<()> {
    let removed = remove(context, NameKind::Branch, name, |target| target.branch == branch);
    let removed = removed.map_err(|error| error.hint("the branch has ended, but its name remains: delete it again"));
    removed.context(|| format!("cannot delete branch `{name}` of `{}`", context.storage.uri())).map(drop)
}

/// Remove a name if its target is the right one. Returns whether it was there.
fn remove(context: &Context, kind: NameKind, name: &str, is_right: impl Fn(&SnapshotId) -> bool) -> Result<bool> {
    let operation = |target| Operation { removes: true, kind, name: name.into(), target };
    append(context, |_, folded| Ok(folded.get(kind, name).filter(&is_right).map(operation)))
}

/// Append the operation that `missing` returns for the place of all puts and the current names. Retry after each lost race, also if `missing` fails with
/// `conflict` because the next record exists. Returns false if `missing` returns None.
fn append(context: &Context, mut missing: impl FnMut(&Context, &Folded) -> Result<Option<Operation>>) -> Result<bool> {
    let held = context.held()?;
    let here = held.as_deref().unwrap_or(context);
    let storage = here.storage.as_ref();
    storage.writable()?;
    here.check_dataset()?;
    here.check_place(context)?;
    let mut folded = here.refs.get().lock().unwrap_or_else(PoisonError::into_inner);
    let mut known = None;
    for race in 0..RACES {
        catch_up(&mut folded, here, known)?;
        let operation = match missing(here, &folded) {
            Err(error) if error.code() == "conflict" => {
                known = Some(folded.next);
                continue;
            }
            other => other?,
        };
        let Some(operation) = operation else { return Ok(false) };
        if race == 0 {
            storage.prove()?;
        }
        let (names, new) = folded.followed_by(operation, now_us().max(folded.time_us + 1), here.new_id()?);
        if let Some(NewLayer { layer, body }) = &new {
            storage.put(&names_name(layer.object.id), body)?;
            storage.sync(&["n"])?;
        }
        if create_certainly(storage, &numbered(NAMES_FOLDER, names.number), &names.encode())? == Created::Created {
            leave_hint(storage, NAMES_FOLDER, names.number);
            // A stale listing must not hide this handle's own record.
            // Nothing may fail now. Without the names in memory, the next call reads them.
            if folded.follow(names, new.map(|new| new.layer).as_slice()).is_err() {
                *folded = Folded::default();
            }
            return Ok(true);
        }
        // Another writer created the record. The next iteration reads it.
        known = Some(names.number);
    }
    Err(Error::new("conflict", format!("lost {RACES} races in a row")))
}
