//! The change set of a transaction: its writes, and the reads on which it depends. Also its entry in a record.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use penstock_error::{Error, Result};
use penstock_format::Id;
use penstock_format::ids::{ObjectRef, Run};
use penstock_format::record::{Change, ChangeKind, Delta, Parent, Record, RecordKind, Transaction};
use penstock_format::rows::{RowIds, RowSet};
use penstock_format::schema::Schema;

use super::manifest::layout::Layout;
pub use super::manifest::objects::KnownRowIds;
use crate::snapshot::Snapshot;

/// Samples and columns that a transaction read. If another commit changes them, there is a conflict.
#[derive(Debug, Clone)]
pub struct RowsRead {
    /// An empty list means all columns.
    pub columns: Vec<u64>,
    /// None for all rows, as read by a scan or a predicate. Such a read also conflicts with appends.
    pub rows: Option<Arc<RowIds>>,
}

impl RowsRead {
    /// Return the read of these samples in a column. None if there are none.
    pub fn of_column(column: u64, rows: &RowIds) -> Option<RowsRead> {
        (!rows.is_empty()).then(|| RowsRead { columns: vec![column], rows: Some(Arc::new(rows.clone())) })
    }
}

/// Column ids begin at 1. A read of this column is a read of no values.
pub const NO_COLUMN: u64 = 0;

/// The writes and reads of a transaction. An empty column list in a `Change` means all columns.
#[derive(Debug, Clone, Default)]
pub struct ChangeSet {
    /// Rows may be provisional.
    pub writes: Vec<Change>,
    /// Snapshot isolation leaves these out.
    pub reads: Vec<RowsRead>,
    /// Columns in which the transaction added unique keys. The samples of other commits must not have them.
    pub keys: Vec<u64>,
    /// Those of `keys` that have a fill value, which all samples have that are appended without the column.
    pub filled_keys: Vec<u64>,
    /// Data files of stages that the transaction added. No other commit may add them.
    pub staged: Arc<HashSet<Id>>,
    /// A part of the transaction's properties that no other commit may have in its own, such as the digest of an imported file.
    pub once: Option<Arc<str>>,
    /// Whether attachments are removed. No other commit may do that, too.
    pub detaches: bool,
}

impl ChangeSet {
    /// Make the change set of an append that gave values in these columns. An empty list means all columns, and `NO_COLUMN` none. It has no
    /// rows, because the new row ids are unknown until the commit has a number.
    pub fn append(columns: Vec<u64>) -> ChangeSet {
        let append = Change { kind: ChangeKind::Append, columns, rows: RowSet::Runs(Vec::new()) };
        ChangeSet { writes: vec![append], ..ChangeSet::default() }
    }

    /// Return whether only a schema change can conflict with this change set. If so, the intervening commits need not be read.
    pub fn is_bare_append(&self) -> bool {
        self.reads.is_empty()
            && self.keys.is_empty()
            && self.staged.is_empty()
            && self.once.is_none()
            && self.writes.iter().all(|change| change.kind == ChangeKind::Append && change.rows.ids() == 0)
    }

    /// Return the rows of another commit's changes that may have one of this transaction's keys.
    pub fn rows_with_keys<'a>(&self, theirs: &'a [Change]) -> impl Iterator<Item = &'a RowSet> {
        let may_have = |change: &&Change| {
            let filled = |key: &u64| change.kind == ChangeKind::Append && self.filled_keys.contains(key);
            let columns = |key: &u64| change.columns.is_empty() || change.columns.contains(key) || filled(key);
            matches!(change.kind, ChangeKind::Append | ChangeKind::Value) && self.keys.iter().any(columns)
        };
        theirs.iter().filter(may_have).map(|change| &change.rows).filter(|rows| rows.ids() > 0)
    }

    /// Return whether another commit's changes may have added one of this transaction's stages.
    pub fn may_share_stage(&self, theirs: &[Change]) -> bool {
        !self.staged.is_empty()
            && theirs.iter().any(|change| change.kind == ChangeKind::Append && change.rows.ids() > 0)
    }

    /// Return whether another commit's properties have what only one commit may have.
    pub fn is_repeated_by(&self, theirs: &Record) -> bool {
        self.once
            .as_deref()
            .is_some_and(|once| theirs.transactions.iter().any(|transaction| transaction.properties.contains(once)))
    }

    /// Return the writes with final row ids, and `appended` as the rows of any append without rows.
    pub fn resolved(&self, base: u64, appended: Option<Run>) -> Vec<Change> {
        let rows = |change: &Change| match change.kind {
            ChangeKind::Append if change.rows.ids() == 0 => RowSet::Runs(appended.into_iter().collect()),
            _ => change.rows.resolved(base),
        };
        self.writes.iter().map(|change| Change { rows: rows(change), ..change.clone() }).collect()
    }
}

/// A transaction with its changes.
#[derive(Debug, Clone)]
pub struct Member {
    pub transaction: Transaction,
    /// Deltas with provisional row ids.
    pub deltas: Vec<Delta>,
    pub changes: ChangeSet,
}

/// A commit that is ready to be proposed under any number.
#[derive(Debug, Clone)]
pub struct Proposal {
    pub kind: RecordKind,
    pub own: Member,
    /// Later transactions that share the record. They do not depend on each other.
    pub others: Vec<Member>,
    /// The row ids in objects of the change set.
    pub row_ids: KnownRowIds,
    /// The names of the changed columns, for errors.
    pub columns: Vec<(u64, String)>,
    /// Feature bits that readers of the deltas need.
    pub features: u64,
    /// The number and the GC epoch of the snapshot at which the transaction began.
    pub base: u64,
    pub gc_epoch: u64,
    /// The GC epoch that a fence begins. 0 for all other kinds.
    pub fence_epoch: u64,
    /// The new schema, if it changed. The record then needs a new root.
    pub schema: Option<NewSchema>,
    /// How fragments are replaced. The record then needs a new root.
    pub layout: Option<Arc<Layout>>,
    /// What a merge, a reset or a copied commit adds to the record.
    pub theirs: Theirs,
    /// Whether another process may commit the transaction: an earlier one, or one with a copy of the journal.
    pub may_exist: bool,
}

/// A schema that a transaction changed.
#[derive(Debug, Clone)]
pub struct NewSchema {
    pub before: Arc<Schema>,
    pub after: Arc<Schema>,
}

impl NewSchema {
    /// Return the new schema for a commit whose parent has this one. Another commit may have added classes.
    pub fn following(&self, parent: &Arc<Schema>) -> Result<Arc<Schema>> {
        match parent == &self.before {
            true => Ok(self.after.clone()),
            false => Schema::merged(&self.before, parent, &self.after).map(Arc::new),
        }
    }
}

/// A part of a commit that comes from another snapshot.
#[derive(Debug, Clone, Default)]
pub struct Theirs {
    /// The second parent, and its time.
    pub parent: Option<(Parent, i64)>,
    /// The number of samples that have row ids already, deleted ones included, less those that a layout drops. A transaction's own samples get theirs
    /// at the commit.
    pub physical: Option<i64>,
    /// The state that replaces the parent's state. The commit then fails if its parent is not the base.
    pub state: Option<RootState>,
}

/// A complete state: a root without deltas, and its numbers of samples.
#[derive(Debug, Clone)]
pub struct RootState {
    pub root: ObjectRef,
    pub samples: u64,
    pub live: u64,
}

impl Proposal {
    /// Make a proposal of one transaction that began at `base`.
    pub fn new(kind: RecordKind, own: Member, base: &Snapshot) -> Proposal {
        Proposal {
            kind,
            own,
            others: Vec::new(),
            row_ids: KnownRowIds::new(),
            columns: base.schema.columns.iter().map(|spec| (spec.id, spec.name.clone())).collect(),
            features: 0,
            base: base.id().number,
            gc_epoch: base.record().gc_epoch,
            fence_epoch: 0,
            schema: None,
            layout: None,
            theirs: Theirs::default(),
            may_exist: false,
        }
    }

    pub fn uuid(&self) -> Id {
        self.own.transaction.uuid
    }

    pub fn members(&self) -> impl Iterator<Item = &Member> {
        [&self.own].into_iter().chain(&self.others)
    }
}

/// How a transaction changed the schema.
pub struct Altered {
    /// The schema before all changes.
    pub before: Arc<Schema>,
    /// The ids and names of columns.
    pub dropped: Vec<(u64, String)>,
    /// The fill values of new columns that can be keys, as keys.
    pub fills: HashMap<u64, Vec<u8>>,
    /// The columns with more classes.
    pub classes: Vec<u64>,
    /// Whether anything but classes changed.
    pub has_others: bool,
    /// Feature bits required to read the new columns.
    pub features: u64,
}

impl Altered {
    pub fn new(before: Arc<Schema>) -> Altered {
        Altered {
            before,
            dropped: Vec::new(),
            fills: HashMap::new(),
            classes: Vec::new(),
            has_others: false,
            features: 0,
        }
    }

    /// Return the entry of the change set. More classes conflict with nothing. Other changes conflict with those of another commit, and with
    /// changes of dropped columns.
    pub fn change(&self) -> Change {
        if self.has_others {
            return schema_change(self.dropped.iter().map(|(column, _)| *column).collect());
        }
        Change { kind: ChangeKind::Classes, columns: self.classes.clone(), rows: RowSet::Runs(Vec::new()) }
    }
}

/// Return the entry of a change set for a schema change that drops these columns.
pub fn schema_change(dropped: Vec<u64>) -> Change {
    let columns = if dropped.is_empty() { vec![NO_COLUMN] } else { dropped };
    Change { kind: ChangeKind::Schema, columns, rows: RowSet::Runs(Vec::new()) }
}

/// Refuse strings that are too long for a record.
pub fn check_texts(message: &str, author: &str, properties: &str) -> Result<()> {
    for (what, text, limit) in [("message", message, 1024), ("author", author, 256), ("properties", properties, 1024)] {
        if text.len() > limit {
            return Err(Error::new(
                "invalid-argument",
                format!("cannot commit: {what} has {} bytes, but at most {limit} are allowed", text.len()),
            ));
        }
    }
    Ok(())
}

/// Build the transaction entry for a commit that adds and deletes these numbers of samples. The added samples get new row ids.
pub fn transaction_entry(
    uuid: Id,
    message: &str,
    author: &str,
    properties: &str,
    (samples_added, samples_deleted): (u64, u64),
) -> Result<Transaction> {
    check_texts(message, author, properties)?;
    Ok(Transaction {
        uuid,
        message: message.into(),
        author: author.into(),
        properties: properties.into(),
        first_counter: 0,
        assigned: samples_added,
        samples_added,
        samples_deleted,
    })
}
