//! A source of samples: a view, optionally with a column of separate files.

use std::sync::Arc;

use penstock_dataset::{Selection, Snapshot};
use penstock_error::{Context as _, Result};
use penstock_format::schema::ColumnSpec;
use penstock_tensor::{Dtype, Shape};

use crate::source::files::Files;

/// All samples of a snapshot, or a selection of them.
#[derive(Clone)]
pub struct Source {
    pub name: String,
    pub snapshot: Arc<Snapshot>,
    pub selection: Selection,
    /// The columns that are read. Each source of a loader has the same ones, in the same order.
    pub columns: Vec<ColumnSpec>,
    /// An additional column, whose values are separate files.
    pub files: Option<Arc<Files>>,
    /// For columns of words, by name: the code in batches of each code of this source. Sources with the same words have none.
    pub codes: Vec<(String, Vec<i64>)>,
}

impl Source {
    pub fn len(&self) -> u64 {
        self.selection.len()
    }

    pub fn is_empty(&self) -> bool {
        self.selection.is_empty()
    }

    /// Return whether all files of this source are mapped.
    pub fn mapped(&self) -> bool {
        self.files.is_none() && self.snapshot.is_mapped()
    }

    /// Return references to the columns, as readers take them.
    pub fn specs(&self) -> Vec<&ColumnSpec> {
        self.columns.iter().collect()
    }

    pub fn column(&self, name: &str) -> Result<ColumnSpec> {
        match self.files.as_ref().filter(|files| files.spec.name == name) {
            Some(files) => Ok(files.spec.clone()),
            None => self.snapshot.column(name).cloned(),
        }
    }

    /// Return the separate files of a column, or None if the column is part of the snapshot.
    pub fn files_of(&self, spec: &ColumnSpec) -> Option<&Files> {
        self.files.as_deref().filter(|files| files.spec.name == spec.name)
    }

    /// Return the codes in batches of a column's codes, or None if they are the same.
    pub fn codes_of(&self, spec: &ColumnSpec) -> Option<&[i64]> {
        self.codes.iter().find(|(name, _)| *name == spec.name).map(|(_, codes)| codes.as_slice())
    }

    /// Map a position in the view to a position in the snapshot.
    pub fn absolute(&self, position: u64) -> u64 {
        self.selection.at(position)
    }
}

/// Return the dtype and shape of a column's values in a batch.
pub fn value_type(spec: &ColumnSpec) -> Result<(Dtype, Shape)> {
    match spec.kind.has_codes() {
        true => Ok((Dtype::Int64, Shape::scalar())),
        false => spec.kind.stored().context(|| format!("cannot load column `{}`", spec.name)),
    }
}
