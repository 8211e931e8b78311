//! Turn the new values and deletions of a transaction into overlays and their change set.

use std::collections::HashSet;
use std::sync::Arc;

use penstock_error::Result;
use penstock_format::ids::PROVISIONAL;
use penstock_format::overlay::Overlay;
use penstock_format::record::{Change, ChangeKind};
use penstock_format::rows::{RowIds, RowSet};

use super::changes::Known;
use super::root::write_rows;
use crate::store::context::Context;
use crate::write::pending::Changed;

/// A change set lists at most this many columns. More are listed as all columns.
const SUMMARY_COLUMNS: usize = 64;

/// Overlays with provisional row ids, the change set, and the row ids that are stored in objects.
#[derive(Default)]
pub struct Written {
    pub overlays: Vec<Overlay>,
    pub writes: Vec<Change>,
    pub known: Known,
}

impl Written {
    /// Write the row ids. `puts` gets the names of the objects. Cost: one put per set with more than a few runs.
    pub fn write(context: &Context, changed: &[Changed], deleted: &HashSet<u64>, puts: &mut Vec<String>) -> Result<Written> {
        let mut written = Written::default();
        for Changed { columns, row_ids, writer } in changed {
            let mut rest = &row_ids[..];
            for fragment in &writer.fragments {
                let (ids, later) = rest.split_at(fragment.samples as usize);
                rest = later;
                let rows = written.rows(context, ids.iter().copied(), puts)?;
                written.push(ChangeKind::Value, Overlay { columns: columns.clone(), rows, files: fragment.files.clone() });
            }
        }
        let (appended, existing): (Vec<u64>, Vec<u64>) = deleted.iter().partition(|row_id| **row_id & PROVISIONAL != 0);
        for ids in [existing, appended].into_iter().filter(|ids| !ids.is_empty()) {
            let rows = written.rows(context, ids.into_iter(), puts)?;
            written.push(ChangeKind::Delete, Overlay { columns: Vec::new(), rows, files: Vec::new() });
        }
        Ok(written)
    }

    fn rows(&mut self, context: &Context, ids: impl Iterator<Item = u64>, puts: &mut Vec<String>) -> Result<RowSet> {
        let ids = RowIds::of(ids);
        let rows = write_rows(context, &ids, puts)?;
        if let RowSet::Object(reference) = rows {
            self.known.insert(reference, Arc::new(ids));
        }
        Ok(rows)
    }

    fn push(&mut self, kind: ChangeKind, overlay: Overlay) {
        // Nobody else knows the samples that this transaction appended, so changes of those are not listed.
        if overlay.rows.range().start & PROVISIONAL == 0 {
            self.writes.push(Change { kind, columns: summary(overlay.columns.clone()), rows: overlay.rows.clone() });
        }
        self.overlays.push(overlay);
    }
}

/// Return the columns as a change set lists them. An empty list means all columns, because the summary must fit into the record.
pub fn summary(mut columns: Vec<u64>) -> Vec<u64> {
    columns.sort_unstable();
    if columns.len() > SUMMARY_COLUMNS {
        columns.clear();
    }
    columns
}
