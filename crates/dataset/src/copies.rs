//! Copies of local datasets. Who copies one while it is written to may get records without what they refer to.

use std::collections::HashMap;

use penstock_error::{Error, Kind, Result};
use penstock_format::Id;
use penstock_format::ids::{data_name, page_name, words_name};

use crate::log;
use crate::snapshot::{Part, Snapshot};

/// Names in an error.
const NAMED: usize = 3;

/// Refuse a copy that lacks objects of this snapshot, with `log-incomplete` or `copy-incomplete`. Cost: nothing where the hint was written
/// in this very place. In a copy: listings of `log`, `d` and `w`, and the manifest, until a commit is made there, which leaves a hint.
pub fn check(snapshot: &Snapshot, written_in: Option<u64>) -> Result<()> {
    let store = snapshot.context.storage.as_ref();
    if snapshot.context.incomplete || store.place().is_none_or(|here| written_in == Some(here)) {
        return Ok(());
    }
    if let Some(gap) = log::gaps(store, &snapshot.id())?.into_iter().next() {
        return Err(gap);
    }
    let missing = missing(snapshot)?;
    if missing.is_empty() {
        return Ok(());
    }
    let named = missing.iter().take(NAMED).map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let more = if missing.len() > NAMED { ", …" } else { "" };
    let text = format!("cannot open `{}`: it is a copy that lacks {} of its objects: {named}{more}", store.uri(), missing.len());
    Err(Error::new("copy-incomplete", text)
        .hint("copy it again, `log` and `refs` first and the rest after, or add what lacks with `cp -rn`; `penstock verify` names it"))
}

/// Objects of a snapshot that are not there, or shorter or longer than they were. What is damaged otherwise is left to whoever reads it.
fn missing(snapshot: &Snapshot) -> Result<Vec<String>> {
    let store = snapshot.context.storage.as_ref();
    let list = |folder: &str| Ok(store.list(folder)?.into_iter().collect::<HashMap<String, u64>>());
    let (data, words) = (list("d")?, list("w")?);
    let is_there = |listed: &HashMap<String, u64>, id: Id, bytes: u64, name: &str| match listed.get(&id.to_string()) {
        Some(found) => Ok(*found == bytes),
        None => store.exists(name), // A link to a file is not listed.
    };
    let mut missing = Vec::new();
    for segment in snapshot.words_segments() {
        let name = words_name(segment.object.id);
        if !is_there(&words, segment.object.id, segment.object.bytes, &name)? {
            missing.push(name);
        }
    }
    for (index, part) in snapshot.parts.iter().enumerate() {
        match (snapshot.fragments(index), part) {
            (Ok((_, fragments)), _) => {
                for file in fragments.as_slice().iter().flat_map(|fragment| &fragment.files) {
                    let name = data_name(file.id);
                    if !is_there(&data, file.id, file.file_bytes, &name)? {
                        missing.push(name);
                    }
                }
            }
            (Err(error), Part::Page(page)) if error.kind() == Kind::NotFound || error.code() == "object-truncated" => {
                missing.push(page_name(page.object.id));
            }
            (Err(error), _) if error.kind() == Kind::Corrupt => {}
            (Err(error), _) => return Err(error),
        }
    }
    Ok(missing)
}
