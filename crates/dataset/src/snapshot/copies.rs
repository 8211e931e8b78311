//! Find incomplete copies of local datasets. A copy made during a write may contain records whose objects are missing.

use std::collections::{HashMap, HashSet};

use penstock_error::{Error, Kind, Result};
use penstock_format::Id;
use penstock_format::files::{FilePlace, FileRef};
use penstock_format::ids::{
    ObjectRef, attachment_name, data_name, forwarding_name, page_name, record_name, rows_name, stages_name,
    statistics_name, words_name,
};
use penstock_format::rows::RowSet;
use penstock_storage::Store;

use super::Snapshot;
use super::live::ManifestPart;
use crate::log::newest;
use crate::store::context::Incomplete;

/// The maximum number of objects named in an error.
const NAMED: usize = 3;

/// Refuse a copy that lacks objects of this snapshot, with `log-incomplete` or `copy-incomplete`.
///
/// Cost: none if the hint was written in this folder. For a copy, the check lists `log`, `d`, `w`, `o`, `g`, `a` and `s`, and reads the manifest. The
/// first commit in the copy writes a new hint, and later checks cost nothing.
pub fn check(snapshot: &Snapshot, written_in: Option<u64>) -> Result<()> {
    let store = snapshot.context.storage.as_ref();
    if snapshot.context.incomplete == Incomplete::Permit || !is_copy(store, written_in) {
        return Ok(());
    }
    if let Some(gap) = newest::gaps(store, &snapshot.id())?.into_iter().next() {
        return Err(gap);
    }
    let missing = missing(snapshot)?;
    if missing.is_empty() { Ok(()) } else { Err(lacks(store, &missing)) }
}

/// Return `copy-incomplete` if a copy lacks a snapshot's root; otherwise return `error`.
pub fn without_root(store: &dyn Store, written_in: Option<u64>, root: String, error: Error) -> Error {
    let absent = error.kind() == Kind::NotFound || error.code() == "object-truncated";
    if absent && is_copy(store, written_in) { lacks(store, &[root]) } else { error }
}

fn is_copy(store: &dyn Store, written_in: Option<u64>) -> bool {
    store.place().is_some_and(|here| written_in != Some(here))
}

fn lacks(store: &dyn Store, missing: &[String]) -> Error {
    let named = missing.iter().take(NAMED).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let more = if missing.len() > NAMED { ", …" } else { "" };
    let text = format!("cannot open `{}`: the copy lacks {} of its objects: {named}{more}", store.uri(), missing.len());
    Error::new("copy-incomplete", text).hint(
        "copy it again (`log` and `refs` first, then the rest), or add the missing objects with `cp -rn`; `penstock verify` lists them",
    )
}

/// List the objects of a snapshot that are absent or have the wrong length. Other damage is reported when the object is read.
fn missing(snapshot: &Snapshot) -> Result<Vec<String>> {
    let store = snapshot.context.storage.as_ref();
    let mut listed: HashMap<String, u64> = HashMap::new();
    for folder in ["d", "w", "o", "g", "a", "s"] {
        listed.extend(store.list(folder)?.into_iter().map(|entry| (format!("{folder}/{}", entry.name), entry.bytes)));
    }
    let name_if_missing = |id: Id, bytes: u64, name: String| {
        let is_whole = match listed.get(&name) {
            Some(found) => *found == bytes,
            // Listings omit links to files.
            None => store.exists(&name)? || name == data_name(id) && store.exists(&forwarding_name(id))?,
        };
        Ok((!is_whole).then_some(name))
    };
    // The snapshot's own log is checked as a whole.
    let mut records = HashSet::new();
    let mut name_if_file_missing = |file: &FileRef| match file.place {
        FilePlace::Object => name_if_missing(file.id, file.file_bytes, data_name(file.id)),
        FilePlace::Record { branch, number, .. }
            if branch != snapshot.id().branch && records.insert((branch, number)) =>
        {
            let name = record_name(branch, number);
            Ok((!store.exists(&name)?).then_some(name))
        }
        FilePlace::Record { .. } | FilePlace::Inline(_) => Ok(None),
    };
    let mut missing = Vec::new();
    for ObjectRef { id, bytes, .. } in snapshot.words_segments().map(|segment| segment.object) {
        missing.extend(name_if_missing(id, bytes, words_name(id))?);
    }
    for ObjectRef { id, bytes, .. } in snapshot.stages.iter().copied() {
        missing.extend(name_if_missing(id, bytes, stages_name(id))?);
    }
    for ObjectRef { id, bytes, .. } in snapshot.attachments.iter().map(|attachment| attachment.object) {
        missing.extend(name_if_missing(id, bytes, attachment_name(id))?);
    }
    for ObjectRef { id, bytes, .. } in snapshot.parts.iter().filter_map(|part| part.page()?.statistics) {
        missing.extend(name_if_missing(id, bytes, statistics_name(id))?);
    }
    let of_attachments =
        snapshot.attachments.iter().flat_map(|attachment| [&attachment.rows].into_iter().chain(&attachment.changed));
    for rows in snapshot.overlays.rows(|_| true).chain(of_attachments) {
        if let RowSet::Object(reference) = rows {
            let ObjectRef { id, bytes, .. } = reference.object;
            missing.extend(name_if_missing(id, bytes, rows_name(id))?);
        }
    }
    let files = snapshot.overlays.all().iter().flat_map(|overlay| &overlay.files);
    for file in files.chain(snapshot.schema.fill_files()) {
        missing.extend(name_if_file_missing(file)?);
    }
    for (index, part) in snapshot.parts.iter().enumerate() {
        match (snapshot.fragments(index), part) {
            (Ok(fragments), _) => {
                for file in fragments.as_slice().iter().flat_map(|fragment| &fragment.files) {
                    missing.extend(name_if_file_missing(file)?);
                }
            }
            (Err(error), ManifestPart::Page(page))
                if error.kind() == Kind::NotFound || error.code() == "object-truncated" =>
            {
                missing.push(page_name(page.object.id));
            }
            (Err(error), _) if error.kind() == Kind::Corrupt => {}
            (Err(error), _) => return Err(error),
        }
    }
    Ok(missing)
}
