//! The changes in a commit record: deltas, which describe the snapshot's state, and the change set, which other transactions compare with
//! theirs (spec section 3).

use std::sync::Arc;

use penstock_error::{Error, Result};

use crate::cursor::{Cursor, Writer, malformed};
use crate::files::FileRef;
use crate::id::Id;
use crate::manifest::{Attachment, Fragment, PageRef, WordsSegment};
use crate::overlay::Overlay;
use crate::rows::RowSet;

/// A change to a snapshot since its root was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    /// Shared, because each record repeats those of the record before it.
    Fragment(Arc<Fragment>),
    Page(PageRef),
    Words(WordsSegment),
    Overlay(Overlay),
    Attachment(Attachment),
    /// The attachment with this object is removed.
    Detached(Id),
}

impl Delta {
    pub fn parse(cursor: &mut Cursor) -> Result<Delta> {
        match cursor.u8()? {
            0 => Ok(Delta::Fragment(Arc::new(Fragment::parse(cursor)?))),
            1 => Ok(Delta::Page(PageRef::parse(cursor)?)),
            2 => Ok(Delta::Words(WordsSegment::parse(cursor)?)),
            3 => Ok(Delta::Overlay(Overlay::parse(cursor)?)),
            4 => Ok(Delta::Attachment(Attachment::parse(cursor)?)),
            5 => Ok(Delta::Detached(cursor.id()?)),
            other => Err(Error::new("unknown-feature", format!("a record has a delta of unknown kind {other}"))
                .hint("upgrade Penstock")),
        }
    }

    pub fn write(&self, writer: &mut Writer) {
        match self {
            Delta::Fragment(fragment) => {
                writer.u8(0);
                fragment.write(writer);
            }
            Delta::Page(page) => {
                writer.u8(1);
                page.write(writer);
            }
            Delta::Words(words) => {
                writer.u8(2);
                words.write(writer);
            }
            Delta::Overlay(overlay) => {
                writer.u8(3);
                overlay.write(writer);
            }
            Delta::Attachment(attachment) => {
                writer.u8(4);
                attachment.write(writer);
            }
            Delta::Detached(id) => {
                writer.u8(5);
                writer.id(*id);
            }
        }
    }

    /// Return the delta with final row ids and codes instead of provisional ones. A rebase changes nothing else.
    pub fn resolved(&self, base: u64, first_code: impl Fn(u64) -> u64) -> Delta {
        match self {
            Delta::Fragment(fragment) => Delta::Fragment(Arc::new(Fragment::clone(fragment).resolved(base))),
            Delta::Page(page) => Delta::Page(page.resolved(base)),
            Delta::Words(words) => Delta::Words(WordsSegment { first_code: first_code(words.column), ..*words }),
            Delta::Overlay(overlay) => Delta::Overlay(Overlay { rows: overlay.rows.resolved(base), ..overlay.clone() }),
            Delta::Attachment(_) | Delta::Detached(_) => self.clone(),
        }
    }

    /// Return the data files that the delta itself lists.
    pub fn files(&self) -> &[FileRef] {
        match self {
            Delta::Fragment(fragment) => &fragment.files,
            Delta::Overlay(overlay) => &overlay.files,
            _ => &[],
        }
    }

    /// Return the number of samples in each of these files.
    pub fn samples_in_files(&self) -> u64 {
        match self {
            Delta::Fragment(fragment) => fragment.samples,
            Delta::Overlay(overlay) => overlay.rows.ids(),
            _ => 0,
        }
    }

    pub fn files_mut(&mut self) -> &mut [FileRef] {
        match self {
            Delta::Fragment(fragment) => &mut Arc::make_mut(fragment).files,
            Delta::Overlay(overlay) => &mut overlay.files,
            _ => &mut [],
        }
    }
}

/// One entry of the change set: a kind of change, and the columns and rows that it affected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub kind: ChangeKind,
    pub columns: Vec<u64>,
    pub rows: RowSet,
}

impl Change {
    pub fn parse(cursor: &mut Cursor) -> Result<Change> {
        Ok(Change {
            kind: ChangeKind::from_code(cursor.u8()?)?,
            columns: cursor.varints()?,
            rows: RowSet::parse(cursor)?,
        })
    }

    pub fn write(&self, writer: &mut Writer) {
        writer.u8(self.kind as u8);
        writer.varints(&self.columns);
        self.rows.write(writer);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ChangeKind {
    Append = 0,
    Value = 1,
    Delete = 2,
    Schema = 3,
    Layout = 4,
    /// The whole state was replaced.
    Reset = 5,
    /// Label columns have more classes.
    Classes = 6,
    /// Attachments of these columns were added or removed.
    Attachment = 7,
}

impl ChangeKind {
    fn from_code(code: u8) -> Result<ChangeKind> {
        use ChangeKind::*;
        [Append, Value, Delete, Schema, Layout, Reset, Classes, Attachment]
            .get(code as usize)
            .copied()
            .ok_or_else(|| malformed(format!("unknown change kind {code}")))
    }
}
