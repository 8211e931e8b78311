//! Overlays: later values of some samples in some columns, or samples that a snapshot does not have (spec section 7).

use std::collections::HashSet;

use penstock_error::Result;

use crate::cursor::{Cursor, Writer, malformed};
use crate::files::FileRef;
use crate::id::Id;
use crate::rows::RowSet;

/// No column has this id. An overlay of it lists absent samples.
const ABSENT: u64 = 0;
/// No column has this id. An overlay of it lists gone samples.
const GONE: u64 = 1 << 48;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overlay {
    /// The columns that have new values. If empty, the samples are deleted. An overlay with `ABSENT` or `GONE` has no other column.
    pub columns: Vec<u64>,
    /// That of the first file, or, without files, an id of its own: two overlays may have equal rows, and the place of a small file changes. Zero in
    /// overlays without values.
    pub id: Id,
    pub rows: RowSet,
    /// Sample k of these files is the sample with the k-th smallest row id.
    pub files: Vec<FileRef>,
}

impl Overlay {
    pub const LEAST_BYTES: usize = 13;

    fn without_values(columns: Vec<u64>, rows: RowSet) -> Overlay {
        Overlay { columns, id: Id::default(), rows, files: Vec::new() }
    }

    /// Return the overlay that gives samples new values. If all of these are null, no file has them, and `new_id` is called.
    pub fn of_values(
        columns: Vec<u64>,
        rows: RowSet,
        files: Vec<FileRef>,
        new_id: impl FnOnce() -> Result<Id>,
    ) -> Result<Overlay> {
        let id = files.first().map_or_else(new_id, |file| Ok(file.id))?;
        Ok(Overlay { columns, id, rows, files })
    }

    /// Return the overlay that deletes these samples.
    pub fn deleting(rows: RowSet) -> Overlay {
        Overlay::without_values(Vec::new(), rows)
    }

    /// Return the overlay of samples that never lived on the branch, although their fragment is linked.
    pub fn without(rows: RowSet) -> Overlay {
        Overlay::without_values(vec![ABSENT], rows)
    }

    /// Return the overlay of samples that were deleted, and that no fragment has any more.
    pub fn gone(rows: RowSet) -> Overlay {
        Overlay::without_values(vec![GONE], rows)
    }

    pub fn is_deletion(&self) -> bool {
        self.columns.is_empty()
    }

    pub fn is_absence(&self) -> bool {
        self.columns == [ABSENT]
    }

    pub fn is_gone(&self) -> bool {
        self.columns == [GONE]
    }

    /// Return whether a fragment has these samples, but the snapshot does not.
    pub fn hides(&self) -> bool {
        self.is_deletion() || self.is_absence()
    }

    /// Return whether the overlay has values.
    pub fn has_values(&self) -> bool {
        has_values(&self.columns)
    }

    pub fn parse(cursor: &mut Cursor) -> Result<Overlay> {
        let columns = cursor.varints()?;
        let rows = RowSet::parse(cursor)?;
        let files = FileRef::parse_list(cursor)?;
        let id = match files.first() {
            Some(file) => file.id,
            None if has_values(&columns) => cursor.id()?,
            None => Id::default(),
        };
        let own: HashSet<u64> = columns.iter().copied().collect();
        let foreign = files.iter().flat_map(|file| &file.columns).find(|column| !own.contains(column));
        match foreign {
            Some(column) => {
                Err(malformed(format!("an overlay has a file with column {column}, which is not one of its columns")))
            }
            None if own.len() < columns.len() => Err(malformed("an overlay lists a column twice")),
            None if rows.ids() == 0 => Err(malformed("an overlay has no row ids")),
            None if own.is_empty() && !files.is_empty() => Err(malformed("a deletion has data files")),
            None if (own.contains(&ABSENT) || own.contains(&GONE)) && (own.len() > 1 || !files.is_empty()) => {
                Err(malformed("an overlay of absent or gone samples has other columns or data files"))
            }
            None => Ok(Overlay { columns, id, rows, files }),
        }
    }

    pub fn write(&self, writer: &mut Writer) {
        writer.varints(&self.columns);
        self.rows.write(writer);
        FileRef::write_list(&self.files, writer);
        if self.has_values() && self.files.is_empty() {
            writer.id(self.id);
        }
    }
}

fn has_values(columns: &[u64]) -> bool {
    !columns.is_empty() && !columns.contains(&ABSENT) && !columns.contains(&GONE)
}
