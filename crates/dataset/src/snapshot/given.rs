//! Find the samples whose values in a column were never given, for backfills.

use penstock_error::Result;
use penstock_format::rows::RowIds;
use penstock_format::schema::ColumnSpec;

use super::Snapshot;
use super::values::file_of;

impl Snapshot {
    /// Return the samples to which no update gave a value in a column: those in fragments that lack the column, and those in other fragments,
    /// whose values may be null. Cost: reads the manifest, and the row ids of hidden samples and of overlays with the column.
    pub fn without_value(&self, column: &ColumnSpec) -> Result<(RowIds, RowIds)> {
        let hides = self.overlays.all().iter().filter(|overlay| overlay.hides() || overlay.columns.contains(&column.id));
        let hidden = self.context.all_row_ids(hides.map(|overlay| &overlay.rows))?;
        let (mut lacking, mut others) = (Vec::new(), Vec::new());
        for part in 0..self.parts.len() {
            for fragment in self.fragments(part)?.as_slice() {
                let own = if file_of(&fragment.files, column.id).is_none() { &mut lacking } else { &mut others };
                own.extend(&fragment.runs);
            }
        }
        Ok((RowIds::of_runs(lacking).minus(&hidden), RowIds::of_runs(others).minus(&hidden)))
    }
}
