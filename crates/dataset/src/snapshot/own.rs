//! Values that a transaction has in memory. Its reads see them in place of the stored ones.

use std::sync::Arc;

/// Values of samples, by column id and row id.
pub trait OwnValues: Send + Sync {
    /// Return whether any sample has a value in a column.
    fn changes(&self, column: u64) -> bool;

    fn find(&self, column: u64, row_id: u64) -> Option<OwnValue<'_>>;
}

/// Values that a transaction has in memory.
pub type Own = Arc<dyn OwnValues>;

/// A value in its stored form: its bytes, or None for a null, and the sizes of its free dimensions.
pub struct OwnValue<'a> {
    pub bytes: Option<&'a [u8]>,
    pub free: &'a [u64],
}
