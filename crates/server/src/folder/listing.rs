//! Objects of a bucket in the order of their keys.

use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use super::names::{Part, SELF, part_of};
use super::record::is_absent;

/// What is listed.
#[derive(Debug, Default, Clone)]
pub struct Query {
    pub prefix: String,
    pub delimiter: String,
    /// Only keys and common prefixes behind this one.
    pub after: String,
    pub most: usize,
}

/// A key with its file, or a common prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    Object(String, PathBuf),
    Prefix(String),
}

impl Found {
    pub fn text(&self) -> &str {
        match self {
            Found::Object(key, _) | Found::Prefix(key) => key,
        }
    }
}

/// A page of a listing, and whether there is more.
#[derive(Debug, Default)]
pub struct Listed {
    pub found: Vec<Found>,
    pub is_truncated: bool,
}

enum Kind {
    File,
    Folder,
}

/// List a page. Cost: reads each folder that may have keys of the page.
pub fn list(bucket: &Path, query: &Query) -> io::Result<Listed> {
    let mut listed = Listed::default();
    if query.most > 0 {
        let _ = walk(bucket, "", query, &mut listed)?;
    }
    Ok(listed)
}

fn walk(folder: &Path, base: &str, query: &Query, listed: &mut Listed) -> io::Result<ControlFlow<()>> {
    let mut entries = Vec::new();
    read(folder, base, false, &mut entries)?;
    entries.sort_unstable_by(|(one, ..), (other, ..)| one.cmp(other));
    for (key, kind, path) in entries {
        let flow = match kind {
            Kind::File => take(key, path, query, listed),
            Kind::Folder if may_have(&key, query, listed) => match walk(&path, &key, query, listed) {
                // It was removed in the meantime.
                Err(error) if error.kind() == io::ErrorKind::NotFound => ControlFlow::Continue(()),
                other => other?,
            },
            Kind::Folder => ControlFlow::Continue(()),
        };
        if flow.is_break() {
            return Ok(flow);
        }
    }
    Ok(ControlFlow::Continue(()))
}

/// Add the entries of a folder: the keys of its files, and for its folders the beginning of their keys.
fn read(folder: &Path, base: &str, is_rest: bool, entries: &mut Vec<(String, Kind, PathBuf)>) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        // Links are neither.
        let (path, is_folder, is_file) = (entry.path(), entry.file_type()?.is_dir(), entry.file_type()?.is_file());
        // Names that no key has are files of somebody else.
        match entry.file_name().to_str().and_then(|name| part_of(name, is_rest)) {
            Some(Part::Whole(part)) if is_folder => {
                let key = format!("{base}{part}");
                let own = path.join(SELF);
                // An error must not hide a key from somebody who deletes what is not listed.
                match std::fs::metadata(&own) {
                    Ok(found) if found.is_file() => entries.push((key.clone(), Kind::File, own)),
                    Err(error) if !is_absent(&error) => return Err(error),
                    _ => {}
                }
                entries.push((key + "/", Kind::Folder, path));
            }
            Some(Part::Whole(part)) if is_file => entries.push((format!("{base}{part}"), Kind::File, path)),
            Some(Part::Begin(part)) if is_folder => match read(&path, &format!("{base}{part}"), true, entries) {
                // It was removed in the meantime, and the others are still there.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => other?,
            },
            _ => {}
        }
    }
    Ok(())
}

/// Return whether keys with this beginning may be listed.
fn may_have(begin: &str, query: &Query, listed: &Listed) -> bool {
    let is_listed = matches!(listed.found.last(), Some(Found::Prefix(prefix)) if begin.starts_with(prefix.as_str()));
    let is_behind = begin > query.after.as_str() || query.after.starts_with(begin);
    let is_skipped = !query.delimiter.is_empty() && query.after.ends_with(&query.delimiter) && begin.starts_with(&query.after) && {
        // The prefix was the last entry of the page before.
        common(begin, query) == Some(query.after.as_str())
    };
    !is_listed && !is_skipped && is_behind && (begin.starts_with(&query.prefix) || query.prefix.starts_with(begin))
}

/// Return the common prefix that a key is listed as, or None.
fn common<'a>(key: &'a str, query: &Query) -> Option<&'a str> {
    let rest = key.strip_prefix(query.prefix.as_str())?;
    let at = if query.delimiter.is_empty() { None } else { rest.find(&query.delimiter) };
    at.map(|at| &key[..query.prefix.len() + at + query.delimiter.len()])
}

fn take(key: String, path: PathBuf, query: &Query, listed: &mut Listed) -> ControlFlow<()> {
    if key <= query.after || !key.starts_with(&query.prefix) {
        return ControlFlow::Continue(());
    }
    let found = match common(&key, query) {
        Some(prefix) if prefix == query.after || listed.found.last().is_some_and(|last| last.text() == prefix) => {
            return ControlFlow::Continue(());
        }
        Some(prefix) => Found::Prefix(prefix.to_owned()),
        None => Found::Object(key, path),
    };
    if listed.found.len() == query.most {
        listed.is_truncated = true;
        return ControlFlow::Break(());
    }
    listed.found.push(found);
    ControlFlow::Continue(())
}
