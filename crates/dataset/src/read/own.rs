//! Values that a transaction has in memory. Its reads see them in place of the stored ones.

use penstock_format::schema::ColumnSpec;

use super::reader::Reader;

/// New values of samples, by column id and row id.
pub trait OwnValues: Send + Sync {
    /// Return whether any sample has a new value in a column.
    fn changes(&self, column: u64) -> bool;

    fn find(&self, column: u64, row_id: u64) -> Option<OwnValue<'_>>;
}

/// A value in its stored form: its bytes, or None for a null, and the sizes of its free dimensions.
pub struct OwnValue<'a> {
    pub bytes: Option<&'a [u8]>,
    pub free: &'a [u64],
}

impl Reader {
    /// Return whether a transaction has new values for this column.
    pub(super) fn has_own(&self, column: &ColumnSpec) -> bool {
        self.own.as_ref().is_some_and(|own| own.changes(column.id))
    }

    /// Visit the samples of the plan that have a new value in a column, by their places in the result.
    pub(super) fn each_own(&self, column: &ColumnSpec, mut visit: impl FnMut(usize, OwnValue<'_>)) {
        let Some(own) = self.own.as_ref().filter(|own| own.changes(column.id)) else { return };
        for (place, row_id) in self.plan.row_ids().into_iter().enumerate() {
            if let Some(value) = own.find(column.id, row_id.cast_unsigned()) {
                visit(place, value);
            }
        }
    }
}
