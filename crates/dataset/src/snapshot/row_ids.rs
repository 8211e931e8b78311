//! Map row ids to positions using an index of the whole snapshot, and map physical rows to row ids using their fragment's runs.

use penstock_error::{Error, Result};
use penstock_format::manifest::Fragment;

use super::Snapshot;
use super::live::live_runs;

/// Write the row ids of a fragment's physical rows to their places in `ids`. The rows must be in ascending order.
pub fn row_ids_of(fragment: &Fragment, rows: &[(u64, u32)], ids: &mut [i64]) {
    let (mut run, mut skipped) = (0, 0);
    for (row, place) in rows {
        while row - skipped >= fragment.runs[run].count {
            skipped += fragment.runs[run].count;
            run += 1;
        }
        ids[*place as usize] = (fragment.runs[run].first + (row - skipped)) as i64;
    }
}

impl Snapshot {
    /// Return the positions of the given row ids. Cost: a binary search per row id. The first call also reads all manifest pages.
    pub fn positions_of(&self, row_ids: &[i64]) -> Result<Vec<u64>> {
        let index = match self.row_index.get().get() {
            Some(index) => index,
            None => {
                let mut index = Vec::new();
                self.each_fragment(|start, fragment| {
                    index.extend(live_runs(fragment).map(|(run, live)| (run.first, run.count, start + live)));
                    Ok(())
                })?;
                index.sort_unstable();
                self.row_index.get().get_or_init(|| index)
            }
        };
        row_ids
            .iter()
            .map(|row_id| {
                let wanted = *row_id as u64;
                let at = index.partition_point(|(first, _, _)| *first <= wanted).checked_sub(1);
                let found = at.map(|at| index[at]).filter(|(first, count, _)| wanted - first < *count);
                found.map(|(first, _, position)| position + (wanted - first)).ok_or_else(|| {
                    Error::new("row-id-not-found", format!("cannot find row id {row_id}: snapshot {} has no such sample", self.id()))
                        .hint("row ids come from `_row_id` or receipt.row_ids")
                })
            })
            .collect()
    }
}
