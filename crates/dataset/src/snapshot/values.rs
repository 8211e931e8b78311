//! Find the data file that stores a column's values for rows of a fragment or an overlay.

use std::collections::HashSet;
use std::sync::Arc;

use penstock_error::Result;
use penstock_format::Id;
use penstock_format::cursor::malformed;
use penstock_format::datafile::Chunk;
use penstock_format::files::FileRef;
use penstock_format::ids::{ObjectRef, Run};
use penstock_format::manifest::Staged;
use penstock_format::schema::ColumnSpec;
use penstock_tensor::Dtype;

use super::Snapshot;
use crate::store::datafile::DataFile;

/// A column's values for all samples of a fragment or overlay, stored as a chunk of an open data file.
#[derive(Clone)]
pub struct StoredColumn {
    pub file: Arc<DataFile>,
    pub chunk: usize,
}

impl StoredColumn {
    pub fn entry(&self) -> &Chunk {
        &self.file.tail.chunks[self.chunk]
    }
}

/// Return the file that stores a column. Returns None if all of the column's values are null.
pub fn file_of(files: &[FileRef], column: u64) -> Option<&FileRef> {
    files.iter().find(|file| file.columns.contains(&column))
}

impl Snapshot {
    /// Return the row ids of the fragments that have these data files, once for each such file. Those of stages are found although other fragments
    /// replaced theirs. What is in `known`, too, is left out. Cost: reads the other pages and stages.
    pub fn rows_of_files(&self, known: Option<&Snapshot>, files: &HashSet<Id>) -> Result<Vec<(Id, Vec<Run>)>> {
        let mut found = Vec::new();
        if files.is_empty() {
            return Ok(found);
        }
        let pages = known.map(Snapshot::pages).unwrap_or_default();
        let named = self.stages_outside(known)?.into_iter().filter(|stage| files.contains(&stage.file));
        found.extend(named.map(|stage| (stage.file, stage.runs)));
        self.each_fragment_outside(&pages, |fragment| {
            let named = fragment.files.iter().filter(|file| files.contains(&file.id));
            found.extend(named.map(|file| (file.id, fragment.runs.clone())));
            Ok(())
        })?;
        Ok(found)
    }

    /// Return the stages whose fragments a layout replaced, without those that are in `known`, too. Cost: reads their objects.
    pub fn stages_outside(&self, known: Option<&Snapshot>) -> Result<Vec<Staged>> {
        let is_known = |stages: &ObjectRef| known.is_some_and(|known| known.stages.contains(stages));
        let mut found = Vec::new();
        for stages in self.stages.iter().filter(|stages| !is_known(stages)) {
            found.extend(self.context.stages(stages)?);
        }
        Ok(found)
    }

    /// Find a column's values in a data file of `samples` samples. `known` is the file if it is already open.
    pub fn values(
        &self,
        reference: &FileRef,
        samples: u64,
        column: &ColumnSpec,
        known: Option<Result<Arc<DataFile>>>,
    ) -> Result<StoredColumn> {
        let file = match known.transpose()? {
            Some(known) if known.is(reference, samples) => known,
            _ => self.context.file(reference, samples)?,
        };
        let chunk = file.chunk_of(column.id).ok_or_else(|| {
            malformed(format!(
                "data file `{}` has no column {}, but the manifest lists that column",
                file.shown(),
                column.id
            ))
        })?;
        check_stored_as(&file, &file.tail.chunks[chunk], column)?;
        Ok(StoredColumn { file, chunk })
    }
}

/// Check that a chunk has the shape that the schema specifies, and its dtype or an earlier one.
pub fn check_stored_as(file: &DataFile, chunk: &Chunk, column: &ColumnSpec) -> Result<()> {
    let (dtype, shape) = column.kind.stored()?;
    let is_earlier = || column.was.iter().any(|was| Dtype::from_name(was) == Some(chunk.dtype));
    if (chunk.dtype == dtype || is_earlier()) && chunk.shape == shape {
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
