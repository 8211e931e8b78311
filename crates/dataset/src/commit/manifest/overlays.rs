//! Turn the new values and deletions of a transaction into overlays and their change set.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use penstock_error::Result;
use penstock_format::ids::{PROVISIONAL, data_name};
use penstock_format::manifest::Fragment;
use penstock_format::overlay::Overlay;
use penstock_format::record::{Change, ChangeKind};
use penstock_format::rows::{RowIds, RowSet};
use penstock_format::schema::Schema;

use super::objects::{KnownRowIds, write_rows};
use super::stored::WordList;
use crate::store::context::Context;
use crate::write::pending::{Changed, Pending};
use crate::write::vocabulary::Words;

/// A change set lists at most this many columns. More are listed as all columns.
const SUMMARY_COLUMNS: usize = 64;

/// If a transaction has more changes, those of the same columns are joined.
const CHANGES: usize = 4;

/// Overlays with provisional row ids, the change set, and the row ids that are stored in objects.
#[derive(Default)]
pub struct WrittenOverlays {
    pub overlays: Vec<Overlay>,
    pub writes: Vec<Change>,
    pub known: KnownRowIds,
    /// The columns in which samples that the transaction appended got new values.
    pub of_appended: HashSet<u64>,
}

impl WrittenOverlays {
    /// Write the row ids. `puts` gets the names of the objects. Cost: one put per set with more than a few runs.
    pub fn write(
        context: &Context,
        changed: &[Changed],
        deleted: &HashSet<u64>,
        puts: &mut Vec<String>,
    ) -> Result<WrittenOverlays> {
        let mut written = WrittenOverlays::default();
        for changed in changed {
            for (overlay, ids) in overlays_of(context, changed, puts)? {
                written.push(ChangeKind::Value, overlay, ids);
            }
        }
        let (appended, existing): (Vec<u64>, Vec<u64>) = deleted.iter().partition(|row_id| **row_id & PROVISIONAL != 0);
        for ids in [existing, appended].into_iter().filter(|ids| !ids.is_empty()) {
            let ids: RowIds = ids.into_iter().collect();
            let overlay = Overlay::deleting(write_rows(context, &ids, puts)?);
            written.push(ChangeKind::Delete, overlay, ids);
        }
        written.join_changes(context, puts)?;
        Ok(written)
    }

    /// Join changes of the same columns, if there are many. The change set must fit into the record.
    fn join_changes(&mut self, context: &Context, puts: &mut Vec<String>) -> Result<()> {
        if self.writes.len() <= CHANGES {
            return Ok(());
        }
        let mut sets: Vec<(ChangeKind, Vec<u64>, Vec<Arc<RowIds>>)> = Vec::new();
        for Change { kind, columns, rows } in std::mem::take(&mut self.writes) {
            let ids = match &rows {
                RowSet::Runs(runs) => Arc::new(RowIds::Runs(runs.clone())),
                RowSet::Object(reference) => self.known.get(reference).cloned().unwrap_or_default(),
            };
            match sets.iter_mut().find(|(one, other, _)| (*one, other) == (kind, &columns)) {
                Some((.., sets)) => sets.push(ids),
                None => sets.push((kind, columns, vec![ids])),
            }
        }
        for (kind, columns, sets) in sets {
            let ids = RowIds::union(sets.iter().map(AsRef::as_ref));
            let rows = write_rows(context, &ids, puts)?;
            if let RowSet::Object(reference) = rows {
                self.known.insert(reference, Arc::new(ids));
            }
            self.writes.push(Change { kind, columns, rows });
        }
        Ok(())
    }

    fn push(&mut self, kind: ChangeKind, overlay: Overlay, ids: RowIds) {
        if let RowSet::Object(reference) = overlay.rows {
            self.known.insert(reference, Arc::new(ids));
        }
        // Nobody else knows the samples that this transaction appended, so new values of those belong to the append.
        match overlay.rows.range().start & PROVISIONAL {
            0 => {
                self.writes.push(Change { kind, columns: summary(overlay.columns.clone()), rows: overlay.rows.clone() })
            }
            _ => self.of_appended.extend(&overlay.columns),
        }
        self.overlays.push(overlay);
    }
}

/// Make the overlays of written values: one per fragment. Cost: one put per set with more than a few runs.
pub fn overlays_of(context: &Context, changed: &Changed, puts: &mut Vec<String>) -> Result<Vec<(Overlay, RowIds)>> {
    let mut rest = &changed.row_ids[..];
    let overlay_of_fragment = |fragment: &Fragment| {
        let (ids, later) = rest.split_at(fragment.samples as usize);
        rest = later;
        let ids: RowIds = ids.iter().copied().collect();
        let rows = write_rows(context, &ids, puts)?;
        Ok((Overlay::of_values(changed.columns.clone(), rows, fragment.files.clone(), || context.new_id())?, ids))
    };
    changed.writer.fragments.iter().map(overlay_of_fragment).collect()
}

/// Write new values as overlays. `lists` has the words of category columns. Returns the overlays, and the feature bits required to read them.
pub fn write_values(
    context: &Arc<Context>,
    schema: &Schema,
    pending: &mut Pending,
    lists: HashMap<u64, WordList>,
    puts: &mut Vec<String>,
) -> Result<(Vec<Overlay>, u64)> {
    // Only categories have words.
    let lists = lists.into_iter().map(|(column, list)| (column, list.words)).filter(|(_, words)| !words.is_empty());
    let words = Words::listing(lists);
    let (mut written, mut features) = (Vec::new(), 0);
    for changed in pending.write(context, schema, &words, 0)? {
        features |= changed.writer.features;
        puts.extend(
            changed.writer.fragments.iter().flat_map(|fragment| &fragment.files).map(|file| data_name(file.id)),
        );
        written.extend(overlays_of(context, &changed, puts)?.into_iter().map(|(overlay, _)| overlay));
    }
    Ok((written, features))
}

/// Return the columns as a change set lists them. An empty list means all columns, because the summary must fit into the record.
pub fn summary(mut columns: Vec<u64>) -> Vec<u64> {
    columns.sort_unstable();
    if columns.len() > SUMMARY_COLUMNS {
        columns.clear();
    }
    columns
}
