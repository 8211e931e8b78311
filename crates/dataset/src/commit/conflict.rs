//! Decide whether a transaction may follow commits that it has not seen. The decision depends only on the two change sets (spec
//! section 12).
//!
//! Appends commute. Changes to disjoint rows or columns can be rebased, and so can two deletions of the same rows. Two schema
//! changes always conflict. A `Conflict` describes the change in the other commit.

use penstock_error::Error;
use penstock_format::ids::Run;
use penstock_format::record::{Change, ChangeKind, Record};

use super::changes::{ChangeSet, Reads};

/// The conflicting change in another commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    pub kind: ChangeKind,
    /// The columns that it changed. An empty list means all columns.
    pub columns: Vec<u64>,
    /// The rows that it changed.
    pub rows: Vec<Run>,
}

/// Return the first change in another commit over which `ours` cannot be rebased.
pub fn conflict(ours: &ChangeSet, theirs: &[Change]) -> Option<Conflict> {
    let collides = |change: &&Change| ours.writes.iter().any(|own| writes_collide(own, change)) || reads_collide(&ours.reads, change);
    theirs.iter().find(collides).map(|change| Conflict { kind: change.kind, columns: change.columns.clone(), rows: change.rows.clone() })
}

/// Make the error that names the other commit.
pub fn error(conflict: &Conflict, other: &Record) -> Error {
    let samples: u64 = conflict.rows.iter().map(|run| run.count).sum();
    let what = match conflict.kind {
        ChangeKind::Append => format!("it appended {samples} samples to columns that this transaction read"),
        ChangeKind::Value => format!("it changed values of {samples} samples"),
        ChangeKind::Delete => format!("it deleted {samples} samples"),
        ChangeKind::Schema => "it changed the schema".to_owned(),
        ChangeKind::Layout => "it moved samples that this transaction also moved".to_owned(),
    };
    let columns = if conflict.columns.is_empty() { String::new() } else { format!(", columns with the ids {:?}", conflict.columns) };
    let text = format!("cannot commit: commit {} was made in the meantime: {what}{columns}", other.snapshot());
    Error::new("conflict", text).hint("run the transaction again on the newest snapshot")
}

fn writes_collide(ours: &Change, theirs: &Change) -> bool {
    use ChangeKind::*;
    match (ours.kind, theirs.kind) {
        (Schema, Schema) => true,
        (Schema, Append | Value) | (Append | Value, Schema) => columns_meet(&ours.columns, &theirs.columns),
        (Value, Value) => columns_meet(&ours.columns, &theirs.columns) && rows_meet(&ours.rows, &theirs.rows),
        (Value, Delete) | (Delete, Value) | (Layout, Layout) => rows_meet(&ours.rows, &theirs.rows),
        // New samples have new row ids. Deleting a sample that is already deleted has no effect. A layout change keeps all values
        // and lists the overlays that it folds.
        (Append, _) | (_, Append) | (Delete, Delete) | (Layout, _) | (_, Layout) | (Schema, Delete) | (Delete, Schema) => false,
    }
}

fn reads_collide(reads: &Reads, theirs: &Change) -> bool {
    use ChangeKind::*;
    match (reads, theirs.kind) {
        (Reads::Nothing, _) | (_, Layout) => false,
        (Reads::Rows { .. }, Append) => false,
        (Reads::AllRows { .. }, Append | Delete) => true,
        (Reads::Rows { rows, .. }, Delete) => rows_meet(rows, &theirs.rows),
        (Reads::Rows { columns, rows }, Value) => columns_meet(columns, &theirs.columns) && rows_meet(rows, &theirs.rows),
        (Reads::AllRows { columns }, Value) => columns_meet(columns, &theirs.columns),
        (Reads::Rows { columns, .. } | Reads::AllRows { columns }, Schema) => columns_meet(columns, &theirs.columns),
    }
}

fn columns_meet(ours: &[u64], theirs: &[u64]) -> bool {
    ours.is_empty() || theirs.is_empty() || ours.iter().any(|column| theirs.contains(column))
}

fn rows_meet(ours: &[Run], theirs: &[Run]) -> bool {
    let meet = |one: &Run, other: &Run| one.first < other.first + other.count && other.first < one.first + one.count;
    ours.iter().any(|one| theirs.iter().any(|other| meet(one, other)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KINDS: [ChangeKind; 5] = [ChangeKind::Append, ChangeKind::Value, ChangeKind::Delete, ChangeKind::Schema, ChangeKind::Layout];

    fn change(kind: ChangeKind, columns: &[u64], first: u64) -> Change {
        Change { kind, columns: columns.to_vec(), rows: vec![Run { first, count: 10 }] }
    }

    fn meets(ours: Change, theirs: Change) -> bool {
        conflict(&ChangeSet { writes: vec![ours], reads: Reads::Nothing }, &[theirs]).is_some()
    }

    #[test]
    fn a_conflict_does_not_depend_on_who_came_first() {
        for one in KINDS {
            for other in KINDS {
                for (columns, first) in [(&[1][..], 5), (&[2], 5), (&[1], 10), (&[2], 10), (&[], 0)] {
                    let (ours, theirs) = (change(one, &[1], 0), change(other, columns, first));
                    assert_eq!(meets(ours.clone(), theirs.clone()), meets(theirs, ours), "{one:?} {other:?} {columns:?} {first}");
                }
            }
        }
    }

    #[test]
    fn appends_commute_and_disjoint_changes_rebase() {
        use ChangeKind::*;
        assert!(KINDS.iter().all(|kind| *kind == Schema || !meets(change(Append, &[], 0), change(*kind, &[], 0))));
        assert!(meets(change(Value, &[1], 0), change(Value, &[1], 9)));
        assert!(!meets(change(Value, &[1], 0), change(Value, &[1], 10)), "changes to disjoint rows do not conflict");
        assert!(!meets(change(Value, &[1], 0), change(Value, &[2], 0)), "changes to disjoint columns do not conflict");
        assert!(meets(change(Value, &[1], 0), change(Delete, &[], 5)) && !meets(change(Delete, &[], 0), change(Delete, &[], 0)));
        assert!(meets(change(Append, &[1, 2], 0), change(Schema, &[2], 0)) && !meets(change(Append, &[1], 0), change(Schema, &[2], 0)));
    }

    #[test]
    fn what_was_read_counts_as_well() {
        use ChangeKind::*;
        let reads = |reads: Reads, theirs: Change| conflict(&ChangeSet { writes: Vec::new(), reads }, &[theirs]).map(|found| found.kind);
        let rows = || Reads::Rows { columns: vec![1], rows: vec![Run { first: 0, count: 10 }] };
        let all = || Reads::AllRows { columns: vec![1] };
        assert_eq!(reads(rows(), change(Append, &[], 100)), None, "new samples do not change rows that were read");
        assert_eq!(reads(all(), change(Append, &[], 100)), Some(Append), "a predicate may be true for new samples");
        assert_eq!(reads(rows(), change(Value, &[1], 9)), Some(Value));
        assert_eq!((reads(rows(), change(Value, &[2], 9)), reads(all(), change(Value, &[2], 9))), (None, None));
        assert_eq!((reads(rows(), change(Delete, &[], 10)), reads(all(), change(Delete, &[], 10))), (None, Some(Delete)));
        assert_eq!(reads(Reads::Nothing, change(Schema, &[], 0)), None);
    }
}
