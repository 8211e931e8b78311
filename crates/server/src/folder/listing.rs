//! Objects of a bucket in the order of their keys.

use std::collections::BTreeMap;
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
    Prefix,
}

/// Entries of a folder that are held at once. A folder that has more is read again.
const MOST_HELD: usize = 4096;

/// The first entries of a folder behind the ones before: the keys of its files or their common prefixes, and for its folders the beginning of their keys.
struct Entries<'a> {
    query: &'a Query,
    /// The last of the entries before.
    before: Option<String>,
    found: BTreeMap<String, (Kind, PathBuf)>,
    has_more: bool,
}

impl Entries<'_> {
    fn add(&mut self, key: String, kind: Kind, path: impl FnOnce() -> PathBuf) {
        let is_wanted = match kind {
            Kind::Folder => may_have(&key, self.query, None),
            _ => key > self.query.after && key.starts_with(&self.query.prefix),
        };
        let (key, kind) = match common(&key, self.query).filter(|_| matches!(kind, Kind::File)) {
            Some(prefix) => (prefix.to_owned(), Kind::Prefix),
            None => (key, kind),
        };
        if !is_wanted || self.before.as_ref().is_some_and(|before| key <= *before) {
            return;
        }
        if self.found.len() == MOST_HELD && !self.found.contains_key(&key) {
            self.has_more = true;
            if self.found.last_key_value().is_some_and(|(last, _)| *last < key) {
                return;
            }
            self.found.pop_last();
        }
        self.found.insert(key, (kind, path()));
    }
}

/// List a page. Cost: reads each folder that may have keys of the page, and holds up to 4,096 names of each on its way.
pub fn list(bucket: &Path, query: &Query) -> io::Result<Listed> {
    let mut listed = Listed::default();
    if query.most > 0 {
        let _ = walk(bucket, "", query, &mut listed)?;
    }
    Ok(listed)
}

fn walk(folder: &Path, base: &str, query: &Query, listed: &mut Listed) -> io::Result<ControlFlow<()>> {
    let mut entries = Entries { query, before: None, found: BTreeMap::new(), has_more: true };
    while std::mem::take(&mut entries.has_more) {
        read(folder, base, false, &mut entries)?;
        entries.before = entries.found.last_key_value().map(|(last, _)| last.clone());
        for (key, (kind, path)) in std::mem::take(&mut entries.found) {
            let flow = match kind {
                Kind::File => take(Found::Object(key, path), query, listed),
                Kind::Prefix => take(Found::Prefix(key), query, listed),
                Kind::Folder if may_have(&key, query, listed.found.last()) => match walk(&path, &key, query, listed) {
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
    }
    Ok(ControlFlow::Continue(()))
}

/// Add the entries of a folder.
fn read(folder: &Path, base: &str, is_rest: bool, entries: &mut Entries<'_>) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let kind = match entry.file_type() {
            // Only this one was removed in the meantime.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other?,
        };
        // Links are neither. Names that no key has are files of somebody else.
        match entry.file_name().to_str().and_then(|name| part_of(name, is_rest)) {
            Some(Part::Whole(part)) if kind.is_dir() => {
                let key = format!("{base}{part}");
                let own = entry.path().join(SELF);
                // An error must not hide a key from somebody who deletes what is not listed.
                match std::fs::symlink_metadata(&own) {
                    Ok(found) if found.is_file() => entries.add(key.clone(), Kind::File, || own),
                    Err(error) if !is_absent(&error) => return Err(error),
                    _ => {}
                }
                entries.add(key + "/", Kind::Folder, || entry.path());
            }
            Some(Part::Whole(part)) if kind.is_file() => entries.add(format!("{base}{part}"), Kind::File, || entry.path()),
            Some(Part::Begin(part)) if kind.is_dir() => match read(&entry.path(), &format!("{base}{part}"), true, entries) {
                // It was removed in the meantime, and the others are still there.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                other => other?,
            },
            _ => {}
        }
    }
    Ok(())
}

/// Return whether keys with this beginning may be listed, behind the last one that is.
fn may_have(begin: &str, query: &Query, last: Option<&Found>) -> bool {
    let is_listed = matches!(last, Some(Found::Prefix(prefix)) if begin.starts_with(prefix.as_str()));
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

fn take(found: Found, query: &Query, listed: &mut Listed) -> ControlFlow<()> {
    let is_known = |prefix: &String| *prefix == query.after || listed.found.last().is_some_and(|last| last.text() == prefix);
    if matches!(&found, Found::Prefix(prefix) if is_known(prefix)) {
        return ControlFlow::Continue(());
    }
    if listed.found.len() == query.most {
        listed.is_truncated = true;
        return ControlFlow::Break(());
    }
    listed.found.push(found);
    ControlFlow::Continue(())
}
