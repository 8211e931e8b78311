//! Find the data file that stores a column's values for rows of a fragment or an overlay.

use std::sync::Arc;

use penstock_error::Result;
use penstock_format::cursor::malformed;
use penstock_format::datafile::Chunk;
use penstock_format::files::FileRef;
use penstock_format::schema::ColumnSpec;

use super::Snapshot;
use crate::store::datafile::DataFile;

/// A column's values for all samples of a fragment or overlay, stored as a chunk of an open data file.
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

/// Return the file that stores a column. Returns None if all of the column's values are null.
pub fn file_of(files: &[FileRef], column: u64) -> Option<&FileRef> {
    files.iter().find(|file| file.columns.contains(&column))
}

impl Snapshot {
    /// Find a column's values in a data file of `samples` samples. `known` is the file if it is already open.
    pub fn values(&self, reference: &FileRef, samples: u64, column: &ColumnSpec, known: Option<Result<Arc<DataFile>>>) -> Result<Values> {
        let file = match known.transpose()? {
            Some(known) if known.is(reference, samples) => known,
            _ => self.context.file(reference, samples)?,
        };
        let chunk = file.chunk_of(column.id).ok_or_else(|| {
            malformed(format!("data file `{}` has no column {}, but the manifest lists that column", file.shown(), column.id))
        })?;
        check_stored_as(&file, &file.tail.chunks[chunk], column)?;
        Ok(Values { file, chunk })
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
        file.shown(),
        column.name,
        chunk.dtype.name(),
        chunk.shape,
        dtype.name(),
        shape
    )))
}
