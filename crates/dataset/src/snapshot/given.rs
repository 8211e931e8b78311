//! Find the samples whose values in a column were never given, for backfills, and the nulls that were.

use penstock_error::Result;
use penstock_format::overlay::Overlay;
use penstock_format::rows::RowIds;
use penstock_format::schema::ColumnSpec;

use super::Snapshot;
use super::values::file_of;

impl Snapshot {
    /// Return the samples to which no update gave a value in a column: those in fragments that lack the column, and those in other fragments,
    /// whose values may be null. Cost: reads the manifest, and the row ids of hidden samples and of overlays with the column.
    pub fn without_value(&self, column: &ColumnSpec) -> Result<(RowIds, RowIds)> {
        let hidden = self.overlay_rows(|overlay| overlay.hides() || overlay.columns.contains(&column.id))?;
        let (mut lacking, mut others) = (Vec::new(), Vec::new());
        self.each_fragment(|fragment| {
            let runs = if file_of(&fragment.files, column.id).is_none() { &mut lacking } else { &mut others };
            runs.extend(&fragment.runs);
            Ok(())
        })?;
        Ok((RowIds::of_runs(lacking).minus(&hidden), RowIds::of_runs(others).minus(&hidden)))
    }

    /// Return which of some samples were given a null, and had no value in `before`. Cost: as `without_value`, if there are nulls.
    pub fn given_nulls(&self, column: &ColumnSpec, rows: &RowIds, before: &Snapshot) -> Result<RowIds> {
        let has_nulls =
            |overlay: &Overlay| overlay.columns.contains(&column.id) && file_of(&overlay.files, column.id).is_none();
        let given = self.overlay_rows(has_nulls)?.and(rows);
        if given.is_empty() { Ok(given) } else { Ok(given.and(&before.without_value(column)?.0)) }
    }
}
