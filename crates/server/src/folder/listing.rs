//! Objects of a bucket in the order of their keys.

use std::collections::BTreeMap;
use std::io;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use super::left_out::{LeftOut, Why};
use super::names::{Part, SELF, encoded, part_of};
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
/// Bytes of the entries that all folders on the way hold together. Each may hold half of what those above it leave, but always some entries.
const MOST_HELD_BYTES: usize = 4 << 20;
const LEAST_HELD: usize = 4;
/// What an entry takes beside its texts.
const ENTRY_BYTES: usize = 150;
/// Keys have at most so many bytes, as in S3.
const MOST_KEY_BYTES: usize = 1024;

/// The first entries of a folder behind the ones before: the keys of its files or their common prefixes, and for its folders the beginning of their keys.
struct Entries<'a> {
    query: &'a Query,
    left_out: &'a LeftOut,
    /// The last of the entries before.
    before: Option<String>,
    found: BTreeMap<String, (Kind, PathBuf)>,
    held_bytes: usize,
    most_bytes: usize,
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
        if self.found.contains_key(&key) {
            return;
        }
        // Those behind one that did not fit are found when the folder is read again.
        if self.has_more && self.found.last_key_value().is_some_and(|(last, _)| *last < key) {
            return;
        }
        let path = path();
        self.held_bytes += size_of_entry(&key, &path);
        self.found.insert(key, (kind, path));
        while self.found.len() > MOST_HELD || self.held_bytes > self.most_bytes && self.found.len() > LEAST_HELD {
            self.has_more = true;
            if let Some((key, (_, path))) = self.found.pop_last() {
                self.held_bytes -= size_of_entry(&key, &path);
            }
        }
    }
}

fn size_of_entry(key: &str, path: &Path) -> usize {
    key.len() + path.as_os_str().len() + ENTRY_BYTES
}

/// List a page. Cost: reads each folder that may have keys of the page. It holds up to 4,096 names of each on its way, and 4 MiB of all of them.
pub fn list(bucket: &Path, query: &Query, left_out: &LeftOut) -> io::Result<Listed> {
    let mut listed = Listed::default();
    if query.most > 0 {
        let _ = Walk { query, left_out, listed: &mut listed }.walk(bucket, "", MOST_HELD_BYTES)?;
    }
    Ok(listed)
}

struct Walk<'a> {
    query: &'a Query,
    left_out: &'a LeftOut,
    listed: &'a mut Listed,
}

impl Walk<'_> {
    /// List what is in a folder. It may hold half of these bytes, and the folders in it the rest.
    fn walk(&mut self, folder: &Path, base: &str, bytes: usize) -> io::Result<ControlFlow<()>> {
        let (query, left_out) = (self.query, self.left_out);
        let (before, found, most_bytes) = (None, BTreeMap::new(), bytes / 2);
        let mut entries = Entries { query, left_out, before, found, held_bytes: 0, most_bytes, has_more: true };
        while std::mem::take(&mut entries.has_more) {
            read(folder, base, None, &mut entries)?;
            entries.before = entries.found.last_key_value().map(|(last, _)| last.clone());
            let rest = bytes - std::mem::take(&mut entries.held_bytes).min(most_bytes);
            for (key, (kind, path)) in std::mem::take(&mut entries.found) {
                let flow = match kind {
                    Kind::File => take(Found::Object(key, path), query, self.listed),
                    Kind::Prefix => take(Found::Prefix(key), query, self.listed),
                    Kind::Folder if may_have(&key, query, self.listed.found.last()) => {
                        match self.walk(&path, &key, rest) {
                            // It was removed in the meantime.
                            Err(error) if error.kind() == io::ErrorKind::NotFound => ControlFlow::Continue(()),
                            other => other?,
                        }
                    }
                    Kind::Folder => ControlFlow::Continue(()),
                };
                if flow.is_break() {
                    return Ok(flow);
                }
            }
        }
        Ok(ControlFlow::Continue(()))
    }
}

/// Add the entries of a folder. In one whose name ends with `%~`, `begin` is what the part of the key has above, with the path of that.
fn read(folder: &Path, base: &str, begin: Option<(&str, &str)>, entries: &mut Entries<'_>) -> io::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let kind = match entry.file_type() {
            // Only this one was removed in the meantime.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            other => other?,
        };
        let path = entry.path();
        let why = match entry.file_name().to_str() {
            _ if kind.is_symlink() => Some(Why::Link),
            _ if !kind.is_dir() && !kind.is_file() => Some(Why::Kind),
            None => Some(Why::NotText),
            Some(name) => add(name, path.clone(), kind.is_dir(), (base, begin), entries)?,
        };
        why.into_iter().for_each(|why| entries.left_out.note(&path, why));
    }
    Ok(())
}

/// Add a file or a folder. Returns why that cannot be done.
fn add(
    name: &str,
    path: PathBuf,
    is_folder: bool,
    (base, begin): (&str, Option<(&str, &str)>),
    entries: &mut Entries<'_>,
) -> io::Result<Option<Why>> {
    let (above, place) = begin.unwrap_or_default();
    let part = match part_of(name) {
        // The one of the folder above, which was added with it. A bucket has none.
        Part::Own if !is_folder && begin.is_none() && !base.is_empty() => return Ok(None),
        Part::Begin(piece) if is_folder => {
            return match read(&path, base, Some((&format!("{above}{piece}"), &format!("{place}{name}/"))), entries) {
                // It was removed in the meantime, and the others are still there.
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                other => other.map(|()| None),
            };
        }
        Part::Own | Part::Begin(_) => return Ok(Some(Why::Reserved)),
        Part::Whole(part) => format!("{above}{part}"),
    };
    if begin.is_some() && encoded(&part) != format!("{place}{name}") {
        return Ok(Some(Why::Reserved));
    }
    let key = format!("{base}{part}");
    if key.len() + usize::from(is_folder) > MOST_KEY_BYTES {
        return Ok(Some(Why::Length));
    }
    if !is_folder {
        entries.add(key, Kind::File, || path);
        return Ok(None);
    }
    let own = path.join(SELF);
    // An error must not hide a key from somebody who deletes what is not listed.
    match std::fs::symlink_metadata(&own) {
        Ok(found) if found.is_file() => entries.add(key.clone(), Kind::File, || own),
        Err(error) if !is_absent(&error) => return Err(error),
        _ => {}
    }
    entries.add(key + "/", Kind::Folder, || path);
    Ok(None)
}

/// Return whether keys with this beginning may be listed, behind the last one that is.
fn may_have(begin: &str, query: &Query, last: Option<&Found>) -> bool {
    let is_listed = matches!(last, Some(Found::Prefix(prefix)) if begin.starts_with(prefix.as_str()));
    let is_behind = begin > query.after.as_str() || query.after.starts_with(begin);
    let is_skipped =
        !query.delimiter.is_empty() && query.after.ends_with(&query.delimiter) && begin.starts_with(&query.after) && {
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
    let is_known =
        |prefix: &String| *prefix == query.after || listed.found.last().is_some_and(|last| last.text() == prefix);
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
