//! Count objects that no snapshot refers to. A killed writer leaves them, and a running one has not committed its own yet, so nothing here
//! decides whether they are garbage.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::ops::ControlFlow;

use bytes::Bytes;
use penstock_error::{Context as _, Error, Kind, Result};
use penstock_format::Id;
use penstock_format::files::{FileRef, parse_forwarding};
use penstock_format::ids::{ObjectRef, forwarding_name, log_folder, numbered, page_name, record_number, root_name};
use penstock_format::manifest::{Attachment, PageRef, Root, WordsSegment, parse_page};
use penstock_format::overlay::Overlay;
use penstock_format::record::{Delta, RECORD_BYTES, Record};
use penstock_format::rows::RowSet;
use penstock_storage::{RangeRequest, Store};

use crate::log::newest::newest_number;
use crate::log::records::read_record;
use crate::store::context::Context;

/// Objects that no snapshot refers to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Unreferenced {
    pub objects: u64,
    pub bytes: u64,
}

/// The folders whose objects only snapshots refer to.
const FOLDERS: [&str; 9] = [DATA, "p", "r", WORDS, ROWS, STAGES, ATTACHMENTS, STATISTICS, FORWARDING];
const DATA: &str = "d";
const WORDS: &str = "w";
const ROWS: &str = "o";
const STAGES: &str = "g";
const ATTACHMENTS: &str = "a";
const STATISTICS: &str = "s";
const FORWARDING: &str = "f";

/// At most this many records, roots or pages are fetched together.
const AT_ONCE: usize = 256;

/// Count the objects that no snapshot of any branch refers to, deleted branches included. Returns None if they cannot be counted: the store cannot
/// list, or a record, a root or a page is damaged, which may refer to any of them. Cost: lists the dataset, and reads all records, roots and
/// pages, concurrently.
pub fn unreferenced(context: &Context) -> Result<Option<Unreferenced>> {
    if !context.storage.lists() {
        return Ok(None);
    }
    match count(context) {
        Err(error) if matches!(error.kind(), Kind::Corrupt | Kind::NotFound | Kind::Unsupported) => Ok(None),
        other => other.map(Some),
    }
}

fn count(context: &Context) -> Result<Unreferenced> {
    let store = context.storage.as_ref();
    // Objects are listed before records are read. A commit in the meantime then has its objects, if they were listed.
    let mut walk =
        Walk { context, listed: HashMap::new(), roots: HashSet::new(), pages: HashSet::new(), forwarded: Vec::new() };
    for folder in FOLDERS {
        let entries = store.list(folder)?.into_iter();
        walk.listed.extend(entries.filter_map(|entry| Some(((folder, Id::parse(&entry.name)?), entry.bytes))));
    }
    for branch in logs(store)? {
        walk.log(branch)?;
    }
    walk.roots()?;
    walk.pages()?;
    while let Some(file) = walk.forwarded.pop() {
        let body = store.read(&forwarding_name(file.id))?;
        walk.files([&parse_forwarding(&body, &file)?]);
    }
    Ok(Unreferenced { objects: walk.listed.len() as u64, bytes: walk.listed.values().sum() })
}

/// Return the numbers of all logs, those of deleted branches included.
fn logs(store: &dyn Store) -> Result<BTreeSet<u64>> {
    let mut found = BTreeSet::from([0]);
    store.survey(&mut |name: &str| {
        let branch = name.strip_prefix("log/").and_then(|rest| rest.split('/').next());
        found
            .extend(branch.filter(|branch| branch.len() == 16).and_then(|branch| u64::from_str_radix(branch, 16).ok()));
        ControlFlow::Continue(())
    })?;
    Ok(found)
}

/// Visits everything that snapshots refer to.
struct Walk<'a> {
    context: &'a Context,
    /// The listed objects that nothing visited so far refers to, with their sizes.
    listed: HashMap<(&'static str, Id), u64>,
    roots: HashSet<ObjectRef>,
    pages: HashSet<PageRef>,
    /// Data files that have forwarding objects.
    forwarded: Vec<FileRef>,
}

impl Walk<'_> {
    fn object(&mut self, folder: &'static str, object: &ObjectRef) {
        self.listed.remove(&(folder, object.id));
    }

    fn files<'a>(&mut self, files: impl IntoIterator<Item = &'a FileRef>) {
        for file in files {
            self.listed.remove(&(DATA, file.id));
            self.forwarded.extend(self.listed.remove(&(FORWARDING, file.id)).map(|_| file.clone()));
        }
    }

    fn rows(&mut self, rows: &RowSet) {
        if let RowSet::Object(rows) = rows {
            self.object(ROWS, &rows.object);
        }
    }

    fn overlay(&mut self, overlay: &Overlay) {
        self.rows(&overlay.rows);
        self.files(&overlay.files);
    }

    fn attachment(&mut self, attachment: &Attachment) {
        self.object(ATTACHMENTS, &attachment.object);
        self.rows(&attachment.rows);
        attachment.changed.iter().for_each(|rows| self.rows(rows));
    }

    fn words(&mut self, segment: &WordsSegment) {
        self.object(WORDS, &segment.object);
    }

    fn record(&mut self, record: &Record) {
        self.object("r", &record.root);
        self.roots.insert(record.root);
        for delta in &record.deltas {
            match delta {
                Delta::Fragment(fragment) => self.files(&fragment.files),
                Delta::Page(page) => {
                    self.pages.insert(*page);
                }
                Delta::Words(segment) => self.words(segment),
                Delta::Overlay(overlay) => self.overlay(overlay),
                Delta::Attachment(attachment) => self.attachment(attachment),
                Delta::Detached(_) => {}
            }
        }
        record.changes.iter().for_each(|change| self.rows(&change.rows));
    }

    /// Visit all records of a log.
    fn log(&mut self, branch: u64) -> Result<()> {
        let (store, folder) = (self.context.storage.as_ref(), log_folder(branch));
        let entries = store.list(&folder)?.into_iter();
        let listed: BTreeMap<u64, u64> =
            entries.filter_map(|entry| Some((record_number(&entry.name)?, entry.bytes))).collect();
        let Some(newest) = newest_number(store, &folder, None)? else { return Ok(()) };
        // A listing may lack the newest records, which are read one by one.
        let unlisted = listed.last_key_value().map_or(0, |(last, _)| last + 1)..=newest.number;
        if unlisted.clone().nth(AT_ONCE).is_some() {
            return Err(Error::new(
                "object-not-found",
                format!("the listing of `{folder}` lacks more than {AT_ONCE} of its newest records"),
            ));
        }
        let numbers: Vec<u64> = listed.keys().copied().chain(unlisted).collect();
        // A record that is too long is read alone, which reports the error.
        let bytes_of = |number: &u64| listed.get(number).copied().filter(|bytes| *bytes <= RECORD_BYTES as u64);
        for numbers in numbers.chunks(AT_ONCE) {
            let range = |number: &u64| {
                let name = numbered(&folder, *number);
                bytes_of(number).map(|bytes| RangeRequest::plain(&name, 0, bytes, Some(bytes)))
            };
            let ranges: Vec<RangeRequest> = numbers.iter().filter_map(range).collect();
            let mut bodies = store.fetch(ranges).into_iter();
            for number in numbers {
                let body: Option<Bytes> = bytes_of(number).and_then(|_| bodies.next()?.ok()?.into_iter().next());
                match body.and_then(|body| Record::parse(&body, branch, *number).ok()) {
                    Some(record) => self.record(&record),
                    None => self.record(&read_record(store, branch, *number)?.record),
                }
            }
        }
        Ok(())
    }

    /// Visit all roots.
    fn roots(&mut self) -> Result<()> {
        let roots: Vec<ObjectRef> = self.roots.drain().collect();
        for roots in roots.chunks(AT_ONCE) {
            for (body, object) in self.context.objects(roots, root_name)?.iter().zip(roots) {
                let root = Root::parse(body).context(|| format!("cannot read `{}`", root_name(object.id)))?;
                self.pages.extend(&root.pages);
                root.words.iter().for_each(|segment| self.words(segment));
                root.overlays.iter().for_each(|overlay| self.overlay(overlay));
                root.stages.iter().for_each(|stages| self.object(STAGES, stages));
                root.attachments.iter().for_each(|attachment| self.attachment(attachment));
                self.files(self.context.caches.get().schema(&root.schema)?.fill_files());
            }
        }
        Ok(())
    }

    /// Visit all pages.
    fn pages(&mut self) -> Result<()> {
        let mut objects = HashSet::new();
        for page in self.pages.drain().collect::<Vec<PageRef>>() {
            page.statistics.iter().for_each(|object| self.object(STATISTICS, object));
            objects.insert(page.object);
        }
        let pages: Vec<ObjectRef> = objects.into_iter().collect();
        for pages in pages.chunks(AT_ONCE) {
            for (body, object) in self.context.objects(pages, page_name)?.iter().zip(pages) {
                self.object("p", object);
                let fragments = parse_page(body).context(|| format!("cannot read `{}`", page_name(object.id)))?;
                self.files(fragments.iter().flat_map(|fragment| &fragment.files));
            }
        }
        Ok(())
    }
}
