//! The manifest root, the manifest page, the fragment and the words object (spec sections 4, 5 and 7).

use std::collections::HashSet;

use bytes::Bytes;
use penstock_error::{Error, Result};
use penstock_tensor::counted;

use crate::cursor::{Cursor, Magic, Strings, Writer, malformed, seal, unseal};
use crate::id::Id;
use crate::ids::{ObjectRef, PROVISIONAL, Run};

/// Maximum number of fragments in a page.
pub const PAGE_FRAGMENTS: usize = 512;
/// Maximum total size of a page's fragments, unless the page has a single larger fragment.
pub const PAGE_BYTES: usize = 64 << 10;
/// Maximum number of row id runs in a fragment. More runs require an id block, which this release does not write.
pub const FRAGMENT_RUNS: usize = 16;

/// A fragment's reference to one of its data files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRef {
    pub id: Id,
    pub file_bytes: u64,
    pub tail_bytes: u64,
    pub tail_crc: u32,
    pub columns: Vec<u64>,
}

/// A run of samples written together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fragment {
    pub samples: u64,
    pub live: u64,
    pub runs: Vec<Run>,
    pub files: Vec<FileRef>,
}

impl Fragment {
    pub fn parse(cursor: &mut Cursor) -> Result<Fragment> {
        let samples = cursor.varint()?;
        let live = cursor.varint()?;
        let runs = cursor.list(9, Run::parse)?;
        let row_ids = runs.iter().try_fold(0u64, |sum, run| sum.checked_add(run.count));
        if runs.len() > FRAGMENT_RUNS || runs.iter().any(|run| run.count == 0) || row_ids != Some(samples) || live != samples {
            return Err(malformed(format!(
                "a fragment has invalid counts: {samples} samples ({live} live), {} runs and {} row ids",
                runs.len(),
                counted(row_ids)
            )));
        }
        let files = cursor.list(22, |cursor| {
            match cursor.u8()? {
                0 => {}
                other => return Err(Error::new("unknown-feature", format!("a data file reference has the unknown kind {other}"))),
            }
            Ok(FileRef {
                id: cursor.id()?,
                file_bytes: cursor.varint()?,
                tail_bytes: cursor.varint()?,
                tail_crc: cursor.u32()?,
                columns: cursor.list(1, Cursor::varint)?,
            })
        })?;
        let mut named = HashSet::new();
        if !files.iter().all(|file: &FileRef| file.columns.iter().all(|column| named.insert(*column))) {
            return Err(malformed("a fragment refers to a column twice"));
        }
        let mut ids = HashSet::new();
        if !files.iter().all(|file: &FileRef| ids.insert(file.id)) {
            return Err(malformed("a fragment refers to a data file twice"));
        }
        Ok(Fragment { samples, live, runs, files })
    }

    pub fn write(&self, writer: &mut Writer) {
        writer.varint(self.samples);
        writer.varint(self.live);
        writer.list(&self.runs, |writer, run| run.write(writer));
        writer.list(&self.files, |writer, file| {
            writer.u8(0);
            writer.id(file.id);
            writer.varint(file.file_bytes);
            writer.varint(file.tail_bytes);
            writer.u32(file.tail_crc);
            writer.list(&file.columns, |writer, column| writer.varint(*column));
        });
    }

    /// Return how many bytes this fragment occupies in a page or record.
    pub fn encoded_bytes(&self) -> usize {
        let mut writer = Writer::default();
        self.write(&mut writer);
        writer.0.len()
    }

    /// Return the fragment with final row ids instead of provisional ones.
    pub fn resolved(mut self, base: u64) -> Fragment {
        for run in &mut self.runs {
            if run.first & PROVISIONAL != 0 {
                run.first = base.wrapping_add(run.first & !PROVISIONAL);
            }
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
    pub live: u64,
}

impl PageRef {
    pub fn parse(cursor: &mut Cursor) -> Result<PageRef> {
        let page = PageRef {
            object: ObjectRef::parse(cursor)?,
            base: cursor.varint()?,
            fragments: cursor.varint()?,
            samples: cursor.varint()?,
            live: cursor.varint()?,
        };
        match page.live == page.samples {
            true => Ok(page),
            false => Err(malformed(format!("a page has {} samples and {} live samples, expected equal counts", page.samples, page.live))),
        }
    }

    pub fn write(&self, writer: &mut Writer) {
        self.object.write(writer);
        for value in [self.base, self.fragments, self.samples, self.live] {
            writer.varint(value);
        }
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

/// The state of a snapshot: its schema, pages and words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root {
    pub dataset: Id,
    pub branch: u64,
    pub number: u64,
    pub schema: String,
    pub pages: Vec<PageRef>,
    pub words: Vec<WordsSegment>,
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
            writer.varint(0); // overlays: reserved
            writer.varint(0); // statistics: reserved
        })
    }

    pub fn parse(bytes: &Bytes) -> Result<Root> {
        let mut cursor = unseal(Magic::Root, bytes)?;
        let root = Root {
            dataset: cursor.id()?,
            branch: cursor.u64()?,
            number: cursor.u64()?,
            schema: cursor.string()?,
            pages: cursor.list(25, PageRef::parse)?,
            words: cursor.list(24, WordsSegment::parse)?,
        };
        if cursor.varint()? != 0 {
            return Err(
                Error::new("unknown-feature", "the manifest root has overlays, which this release cannot read").hint("upgrade Penstock")
            );
        }
        cursor.list(21, ObjectRef::parse)?; // Statistics are reserved, and this release does not load them.
        cursor.end()?;
        Ok(root)
    }
}

/// Encode fragments as pages of at most [`PAGE_FRAGMENTS`] and [`PAGE_BYTES`]. For each page, returns its body and
/// how many fragments, samples and live samples it contains.
pub fn encode_pages(fragments: &[Fragment]) -> Vec<(Vec<u8>, u64, u64, u64)> {
    let mut pages = Vec::new();
    let (mut group, mut bytes): (Vec<&Fragment>, usize) = (Vec::new(), 0);
    let mut close = |group: &mut Vec<&Fragment>| {
        if !group.is_empty() {
            let body = seal(Magic::Page, |writer| writer.list(group, |writer, fragment| fragment.write(writer)));
            let samples = group.iter().map(|fragment| fragment.samples).sum();
            let live = group.iter().map(|fragment| fragment.live).sum();
            pages.push((body, group.len() as u64, samples, live));
            group.clear();
        }
    };
    for fragment in fragments {
        let size = fragment.encoded_bytes();
        if group.len() >= PAGE_FRAGMENTS || bytes + size > PAGE_BYTES {
            close(&mut group);
            bytes = 0;
        }
        bytes += size;
        group.push(fragment);
    }
    close(&mut group);
    pages
}

pub fn parse_page(bytes: &Bytes) -> Result<Vec<Fragment>> {
    let mut cursor = unseal(Magic::Page, bytes)?;
    let fragments = cursor.list(4, Fragment::parse)?;
    cursor.end()?;
    Ok(fragments)
}

pub fn encode_words(column: u64, words: &[impl AsRef<str>]) -> Vec<u8> {
    seal(Magic::Words, |writer| {
        writer.varint(column);
        writer.list(words, |writer, word| writer.string(word.as_ref()));
    })
}

pub fn parse_words(bytes: &Bytes) -> Result<(u64, Strings)> {
    let mut cursor = unseal(Magic::Words, bytes)?;
    let column = cursor.varint()?;
    let words = cursor.strings()?;
    cursor.end()?;
    Ok((column, words))
}
