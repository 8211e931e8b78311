//! Find the data file that stores a column's values for a fragment's rows. Value overlays will be implemented here: newer cell
//! values will be stored in separate files.

use std::sync::Arc;

use penstock_error::Result;
use penstock_format::cursor::malformed;
use penstock_format::datafile::Chunk;
use penstock_format::ids::data_name;
use penstock_format::manifest::{FileRef, Fragment};
use penstock_format::schema::ColumnSpec;

use super::Snapshot;
use crate::store::datafile::DataFile;

/// A column's values for all rows of a fragment, stored as a chunk of an open data file.
#[derive(Clone)]
pub struct Values {
    pub file: Arc<DataFile>,
    pub chunk: usize,
}

impl Values {
    pub fn entry(&self) -> &Chunk {
        &self.file.tail.chunks[self.chunk]
    }
}

/// Return the data file that stores a fragment's column. Returns None if all of the column's values are null.
pub fn file_of(fragment: &Fragment, column: u64) -> Option<&FileRef> {
    fragment.files.iter().find(|file| file.columns.contains(&column))
}

/// Return the data files that store any of these columns for a fragment.
pub fn files_of<'a>(fragment: &'a Fragment, columns: &'a [u64]) -> impl Iterator<Item = &'a FileRef> {
    fragment.files.iter().filter(|file| file.columns.iter().any(|column| columns.contains(column)))
}

impl Snapshot {
    /// Find a column's values in a fragment. `open` returns the data file if it is already open. Returns None if all values are
    /// null.
    pub fn values(
        &self,
        fragment: &Fragment,
        column: &ColumnSpec,
        open: impl Fn(&FileRef) -> Option<Result<Arc<DataFile>>>,
    ) -> Result<Option<Values>> {
        let Some(reference) = file_of(fragment, column.id) else { return Ok(None) };
        let file = match open(reference).transpose()? {
            Some(known) if known.is(reference, fragment.samples) => known,
            _ => self.context.file(reference, fragment.samples)?,
        };
        let chunk = file.chunk_of(column.id).ok_or_else(|| {
            malformed(format!("data file `{}` has no column {}, but the manifest lists that column", data_name(file.id), column.id))
        })?;
        check_stored_as(&file, &file.tail.chunks[chunk], column)?;
        Ok(Some(Values { file, chunk }))
    }
}

/// Check that a chunk has the dtype and shape that the schema specifies.
pub fn check_stored_as(file: &DataFile, chunk: &Chunk, column: &ColumnSpec) -> Result<()> {
    let (dtype, shape) = column.kind.stored()?;
    if chunk.dtype == dtype && chunk.shape == shape {
        return Ok(());
    }
    Err(malformed(format!(
        "data file `{}` stores `{}` as {} {}, expected {} {}",
        data_name(file.id),
        column.name,
        chunk.dtype.name(),
        chunk.shape,
        dtype.name(),
        shape
    )))
}
