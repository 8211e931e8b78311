//! The change set of a transaction: its writes, and the reads on which it depends.

use std::collections::HashMap;
use std::sync::Arc;

use penstock_format::Id;
use penstock_format::ids::Run;
use penstock_format::record::{Change, ChangeKind, Delta, RecordKind, Transaction};
use penstock_format::rows::{RowIds, RowIdsRef, RowSet};

/// The samples and columns that a transaction read. If another commit changes them, there is a conflict. At present, transactions
/// only write and read nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reads {
    /// The transaction read nothing (for example, because it only appends), or snapshot isolation ignores its reads.
    Nothing,
    /// Some rows of some columns. An empty `columns` list means all columns.
    Rows { columns: Vec<u64>, rows: RowSet },
    /// All rows of some columns, as read by a scan or a predicate. These reads also conflict with appends.
    AllRows { columns: Vec<u64> },
}

/// The writes and reads of a transaction. An empty column list in a `Change` means all columns.
#[derive(Debug, Clone)]
pub struct ChangeSet {
    /// Rows may be provisional.
    pub writes: Vec<Change>,
    pub reads: Reads,
}

impl ChangeSet {
    /// Make the change set of an append. The new row ids are unknown until the commit has a number.
    pub fn append(columns: Vec<u64>) -> ChangeSet {
        ChangeSet { writes: vec![Change { kind: ChangeKind::Append, columns, rows: RowSet::Runs(Vec::new()) }], reads: Reads::Nothing }
    }

    /// Return whether only a schema change can conflict with this change set. If so, the intervening commits need not be read.
    pub fn is_bare_append(&self) -> bool {
        self.reads == Reads::Nothing && self.writes.iter().all(|change| change.kind == ChangeKind::Append)
    }

    /// Return the writes with final row ids, and `appended` as the rows of any append.
    pub fn resolved(&self, base: u64, appended: Option<Run>) -> Vec<Change> {
        let rows = |change: &Change| match change.kind {
            ChangeKind::Append => RowSet::Runs(appended.into_iter().collect()),
            _ => change.rows.resolved(base),
        };
        self.writes.iter().map(|change| Change { rows: rows(change), ..change.clone() }).collect()
    }
}

/// Row sets that are in objects, as far as they are known.
pub type Known = HashMap<RowIdsRef, Arc<RowIds>>;

/// A commit that is ready to be proposed under any number.
#[derive(Debug, Clone)]
pub struct Proposal {
    pub kind: RecordKind,
    pub transaction: Transaction,
    /// Deltas with provisional row ids.
    pub deltas: Vec<Delta>,
    pub changes: ChangeSet,
    /// The row ids in objects of the change set.
    pub row_ids: Known,
    /// The names of the changed columns, for errors.
    pub columns: Vec<(u64, String)>,
    /// Feature bits that readers of the deltas need.
    pub features: u64,
    /// The number and the GC epoch of the snapshot at which the transaction began.
    pub base: u64,
    pub gc_epoch: u64,
}

impl Proposal {
    pub fn uuid(&self) -> Id {
        self.transaction.uuid
    }
}
