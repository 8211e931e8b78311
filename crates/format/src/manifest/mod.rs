//! The manifest root, the manifest page, the fragment and the words object (spec sections 4, 5 and 7).

mod attachment;
mod statistics;

use std::collections::HashSet;
use std::ops::Range;

use bytes::Bytes;
use penstock_error::Result;
use penstock_tensor::counted;

use crate::cursor::{Cursor, Magic, Strings, Writer, malformed, seal, unseal};
use crate::files::FileRef;
use crate::id::Id;
use crate::ids::{ObjectRef, PROVISIONAL, Run, page_name};
use crate::overlay::Overlay;

pub use self::attachment::Attachment;
pub use self::statistics::{PageStatistics, Statistics};

/// Maximum number of fragments in a page.
pub const MANIFEST_PAGE_FRAGMENTS: usize = 512;
/// Maximum total size of a page's fragments, unless the page has a single larger fragment.
pub const MANIFEST_PAGE_BYTES: usize = 64 << 10;
/// A writer begins a new fragment at this many runs of row ids, so that a page stays small.
pub const FRAGMENT_RUNS: usize = 1 << 14;

/// A run of samples written together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fragment {
    pub samples: u64,
    /// Whether it was added as a stage. Its first data file identifies it.
    pub is_stage: bool,
    /// The row ids in the order of the samples.
    pub runs: Vec<Run>,
    pub files: Vec<FileRef>,
}

impl Fragment {
    pub fn parse(cursor: &mut Cursor) -> Result<Fragment> {
        let (samples, is_stage) = (cursor.varint()?, cursor.flag()?);
        let runs = Run::parse_list(cursor)?;
        let row_ids = runs.iter().try_fold(0u64, |sum, run| sum.checked_add(run.count));
        if row_ids != Some(samples) {
            return Err(malformed(format!(
                "a fragment has invalid counts: {samples} samples, {} runs and {} row ids",
                runs.len(),
                counted(row_ids)
            )));
        }
        Ok(Fragment { samples, is_stage, runs, files: FileRef::parse_list(cursor)? })
    }

    pub fn write(&self, writer: &mut Writer) {
        writer.varint(self.samples);
        writer.u8(self.is_stage.into());
        Run::write_list(&self.runs, writer);
        FileRef::write_list(&self.files, writer);
    }

    /// Return how many bytes this fragment occupies in a page or record.
    pub fn encoded_bytes(&self) -> usize {
        Writer::written(|writer| self.write(writer)).len()
    }

    /// Return the fragment with final row ids instead of provisional ones.
    pub fn resolved(mut self, base: u64) -> Fragment {
        for run in &mut self.runs {
            *run = run.resolved(base);
        }
        self
    }
}

/// A reference to a page, as stored in a root or a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PageRef {
    pub object: ObjectRef,
    pub base: u64,
    pub fragments: u64,
    pub samples: u64,
    /// The range that contains all row ids of the page.
    pub least: u64,
    pub span: u64,
    /// The object with the statistics of its fragments.
    pub statistics: Option<ObjectRef>,
}

impl PageRef {
    /// Make the reference to a page whose body contains these fragments. Either all of their row ids are provisional or none.
    pub fn of(id: Id, body: &[u8], fragments: &[Fragment]) -> PageRef {
        let runs = || fragments.iter().flat_map(|fragment| &fragment.runs);
        let least = runs().map(|run| run.first).min().unwrap_or(0);
        let end = runs().map(Run::end).max().unwrap_or(0);
        PageRef {
            object: ObjectRef::of(id, body),
            base: least & PROVISIONAL,
            fragments: fragments.len() as u64,
            samples: fragments.iter().map(|fragment| fragment.samples).sum(),
            least,
            span: end - least,
            statistics: None,
        }
    }

    /// Return the reference with final row ids if those of the page are provisional.
    pub fn resolved(&self, base: u64) -> PageRef {
        match self.least & PROVISIONAL {
            0 => *self,
            _ => PageRef { base, least: base.wrapping_add(self.least & !PROVISIONAL), ..*self },
        }
    }

    /// Return whether the page has all row ids in its range. If so, no other fragment of the snapshot has any of them.
    pub fn is_dense(&self) -> bool {
        self.span == self.samples
    }

    pub fn parse(cursor: &mut Cursor) -> Result<PageRef> {
        let page = PageRef {
            object: ObjectRef::parse(cursor)?,
            base: cursor.varint()?,
            fragments: cursor.varint()?,
            samples: cursor.varint()?,
            least: cursor.u64()?,
            span: cursor.varint()?,
            statistics: cursor.option(ObjectRef::parse)?,
        };
        match page.samples <= page.span && page.least.checked_add(page.span).is_some() {
            true => Ok(page),
            false => {
                let PageRef { samples, least, span, .. } = page;
                Err(malformed(format!("a page claims to have {samples} samples with {span} row ids from {least}")))
            }
        }
    }

    pub fn write(&self, writer: &mut Writer) {
        self.object.write(writer);
        for value in [self.base, self.fragments, self.samples] {
            writer.varint(value);
        }
        writer.u64(self.least);
        writer.varint(self.span);
        writer.option(self.statistics, |writer, object| object.write(writer));
    }
}

/// New words for a category column, and the code of the first word.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WordsSegment {
    pub column: u64,
    pub first_code: u64,
    pub words: u64,
    pub object: ObjectRef,
}

impl WordsSegment {
    pub fn parse(cursor: &mut Cursor) -> Result<WordsSegment> {
        Ok(WordsSegment {
            column: cursor.varint()?,
            first_code: cursor.varint()?,
            words: cursor.varint()?,
            object: ObjectRef::parse(cursor)?,
        })
    }

    pub fn write(&self, writer: &mut Writer) {
        for value in [self.column, self.first_code, self.words] {
            writer.varint(value);
        }
        self.object.write(writer);
    }
}

/// A fragment that was added as a stage: its first data file, and the row ids of its samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Staged {
    pub file: Id,
    pub runs: Vec<Run>,
}

/// Encode stages, by their first data files.
pub fn encode_stages(stages: &[Staged]) -> Vec<u8> {
    seal(Magic::Stages, |writer| {
        writer.list(stages, |writer, stage| {
            writer.id(stage.file);
            Run::write_list(&stage.runs, writer);
        });
    })
}

pub fn parse_stages(bytes: &Bytes) -> Result<Vec<Staged>> {
    let parse_staged = |cursor: &mut Cursor| Ok(Staged { file: cursor.id()?, runs: Run::parse_list(cursor)? });
    let stages = unseal(Magic::Stages, bytes, |cursor| cursor.list(17, parse_staged))?;
    match stages.is_sorted_by(|one, other| one.file.0 < other.file.0) {
        true => Ok(stages),
        false => Err(malformed("stages are not in the order of their data files")),
    }
}

/// The state of a snapshot: its schema, pages, words, overlays, stages and attachments.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root {
    pub dataset: Id,
    pub branch: u64,
    pub number: u64,
    pub schema: String,
    pub pages: Vec<PageRef>,
    pub words: Vec<WordsSegment>,
    pub overlays: Vec<Overlay>,
    /// Stages whose fragments were replaced.
    pub stages: Vec<ObjectRef>,
    pub attachments: Vec<Attachment>,
}

impl Root {
    pub fn encode(&self) -> Vec<u8> {
        seal(Magic::Root, |writer| {
            writer.id(self.dataset);
            writer.u64(self.branch);
            writer.u64(self.number);
            writer.string(&self.schema);
            writer.list(&self.pages, |writer, page| page.write(writer));
            writer.list(&self.words, |writer, words| words.write(writer));
            writer.list(&self.overlays, |writer, overlay| overlay.write(writer));
            writer.list(&self.stages, |writer, stages| stages.write(writer));
            writer.list(&self.attachments, |writer, attachment| attachment.write(writer));
        })
    }

    pub fn parse(bytes: &Bytes) -> Result<Root> {
        let root = unseal(Magic::Root, bytes, |cursor| {
            Ok(Root {
                dataset: cursor.id()?,
                branch: cursor.u64()?,
                number: cursor.u64()?,
                schema: cursor.string()?,
                pages: cursor.list(34, PageRef::parse)?,
                words: cursor.list(24, WordsSegment::parse)?,
                overlays: cursor.list(Overlay::LEAST_BYTES, Overlay::parse)?,
                stages: cursor.list(ObjectRef::LEAST_BYTES, ObjectRef::parse)?,
                attachments: cursor.list(Attachment::LEAST_BYTES, Attachment::parse)?,
            })
        })?;
        let full = root.pages.iter().filter(|page| page.samples == page.span && page.span > 0);
        if let Some(row_id) = in_two(full.map(|page| page.least..page.least.saturating_add(page.span))) {
            return Err(malformed(format!("two of its pages have row id {row_id}")));
        }
        let mut named = HashSet::new();
        match root.pages.iter().find(|page| !named.insert(page.object.id)) {
            None => Ok(root),
            Some(page) => Err(malformed(format!("it lists `{}` twice", page_name(page.object.id)))),
        }
    }
}

/// Encode fragments as pages of at most [`MANIFEST_PAGE_FRAGMENTS`] and [`MANIFEST_PAGE_BYTES`]. Returns the body of each page and its fragments.
pub fn encode_pages(fragments: &[Fragment]) -> Vec<(Vec<u8>, &[Fragment])> {
    let mut pages = Vec::new();
    let (mut begin, mut bytes) = (0, 0);
    let mut close_page = |group: Range<usize>| {
        if !group.is_empty() {
            let group = &fragments[group];
            pages.push((
                seal(Magic::Page, |writer| writer.list(group, |writer, fragment| fragment.write(writer))),
                group,
            ));
        }
    };
    for (index, fragment) in fragments.iter().enumerate() {
        let size = fragment.encoded_bytes();
        if index - begin >= MANIFEST_PAGE_FRAGMENTS || bytes + size > MANIFEST_PAGE_BYTES {
            close_page(begin..index);
            (begin, bytes) = (index, 0);
        }
        bytes += size;
    }
    close_page(begin..fragments.len());
    pages
}

pub fn parse_page(bytes: &Bytes) -> Result<Vec<Fragment>> {
    let fragments = unseal(Magic::Page, bytes, |cursor| cursor.list(4, Fragment::parse))?;
    match in_two(fragments.iter().flat_map(|fragment| fragment.runs.iter().map(|run| run.first..run.end()))) {
        None => Ok(fragments),
        Some(row_id) => Err(malformed(format!("two of its samples have row id {row_id}"))),
    }
}

/// Return a number that is in two of some ranges, none of which is empty. Cost: nothing to speak of if the ranges ascend; otherwise they are sorted.
fn in_two(ranges: impl Iterator<Item = Range<u64>> + Clone) -> Option<u64> {
    first_before_the_end(ranges.clone())?;
    let mut sorted: Vec<Range<u64>> = ranges.collect();
    sorted.sort_unstable_by_key(|range| range.start);
    first_before_the_end(sorted.into_iter())
}

/// Return the beginning of the first range that begins before the end of the one before it.
fn first_before_the_end(mut ranges: impl Iterator<Item = Range<u64>>) -> Option<u64> {
    let mut end = 0;
    ranges.find_map(|range| {
        let before = std::mem::replace(&mut end, range.end);
        (range.start < before).then_some(range.start)
    })
}

pub fn encode_words(column: u64, words: &[impl AsRef<str>]) -> Vec<u8> {
    seal(Magic::Words, |writer| {
        writer.varint(column);
        writer.list(words, |writer, word| writer.string(word.as_ref()));
    })
}

pub fn parse_words(bytes: &Bytes) -> Result<(u64, Strings)> {
    unseal(Magic::Words, bytes, |cursor| Ok((cursor.varint()?, cursor.strings()?)))
}
