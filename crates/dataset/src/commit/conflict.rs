//! Decide whether a transaction may follow commits that it has not seen. The decision depends only on the two change sets (spec
//! section 3).
//!
//! Appends commute, and changes to disjoint rows or columns can be rebased. Two schema changes always conflict. A `Conflict`
//! describes the change in the other commit.

use std::sync::Arc;

use penstock_error::Error;
use penstock_format::record::{Change, ChangeKind, Record};
use penstock_format::rows::{RowIds, RowIdsRef, RowSet};

use super::changes::{ChangeSet, KnownRowIds, NO_COLUMN, RowsRead};

/// The conflicting change in another commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Conflict {
    pub kind: ChangeKind,
    /// The columns that it changed. An empty list means all columns.
    pub columns: Vec<u64>,
    /// How many rows it changed.
    pub samples: u64,
    /// The first rows that both changed, or that one read and the other changed.
    pub rows: Vec<u64>,
    /// Rows that the other commit changed. They are named if `rows` is empty.
    pub others: Vec<u64>,
    /// Whether it gave values in a column that this transaction drops.
    pub dropped: bool,
}

/// Whether a transaction may follow another commit.
#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    Follows,
    Conflict(Conflict),
    /// The answer depends on these sets of row ids.
    Depends(Vec<RowIdsRef>),
}

/// What to do after a conflict. A handle stays at its snapshot.
pub const AGAIN: &str = "refresh the handle (ds.refresh()), and run the transaction again";

/// At most this many row ids are named in an error.
const NAMED: usize = 10;

/// Decide whether `ours` may follow a commit that made the changes `theirs`.
pub fn judge(ours: &ChangeSet, theirs: &[Change], known: &KnownRowIds) -> Verdict {
    let mut missing = Vec::new();
    for change in theirs {
        let writes = ours
            .writes
            .iter()
            .map(|own| (own.kind == ChangeKind::Schema, writes_meet(own, ours.detaches, change, known)));
        let reads = ours.reads.iter().map(|read| (false, read_meets(read, change, known)));
        for (alters, meets) in writes.chain(reads) {
            match meets {
                Meets::No => {}
                Meets::Unknown(sets) => missing.extend(sets),
                Meets::Yes(rows) => {
                    let (kind, columns, samples) = (change.kind, change.columns.clone(), change.rows.ids());
                    let others = found(&change.rows, known).map_or_else(|_| Vec::new(), |rows| rows.first(0, NAMED));
                    let dropped = alters && matches!(kind, ChangeKind::Append | ChangeKind::Value);
                    return Verdict::Conflict(Conflict { kind, columns, samples, rows, others, dropped });
                }
            }
        }
    }
    if missing.is_empty() { Verdict::Follows } else { Verdict::Depends(missing) }
}

/// Make the error that names the other commit. `names` has the names of columns.
pub fn error(conflict: &Conflict, other: &Record, names: &[(u64, String)]) -> Error {
    let samples = conflict.samples;
    let what = match conflict.kind {
        ChangeKind::Append if conflict.dropped => {
            format!("it appended {samples} samples with values in a column that this transaction drops")
        }
        ChangeKind::Append if conflict.rows.is_empty() => {
            format!("this transaction read all samples, and that commit appended {samples} more")
        }
        ChangeKind::Append => format!("it appended {samples} samples"),
        ChangeKind::Value => format!("it changed values of {samples} samples"),
        ChangeKind::Delete => format!("it deleted {samples} samples"),
        ChangeKind::Schema => "it changed the schema".to_owned(),
        ChangeKind::Layout => "it moved samples that this transaction also moved".to_owned(),
        ChangeKind::Reset => "it replaced the whole state".to_owned(),
        ChangeKind::Classes => "it added classes".to_owned(),
        ChangeKind::Attachment => "it added or removed attachments".to_owned(),
    };
    let name = |column: &u64| match names.iter().find(|(id, _)| id == column) {
        Some((_, name)) => format!("`{name}`"),
        None => format!("with id {column}"),
    };
    // An append changes no columns.
    let is_named = |column: &u64| *column != NO_COLUMN && conflict.kind != ChangeKind::Append;
    let named: Vec<u64> = conflict.columns.iter().copied().filter(is_named).collect();
    let columns = match &named[..] {
        [] => String::new(),
        [column] => format!(" in column {}", name(column)),
        several => format!(" in columns {}", several.iter().map(name).collect::<Vec<_>>().join(", ")),
    };
    let rows = match &conflict.rows[..] {
        [] if conflict.others.is_empty() => String::new(),
        [] => format!(
            " (row ids {:?}{})",
            conflict.others,
            if samples > conflict.others.len() as u64 { ", …" } else { "" }
        ),
        [row] => format!(", among them row id {row}, which this transaction also needs"),
        several => format!(", among them row ids {several:?}, which this transaction also needs"),
    };
    let text = format!("cannot commit: commit {} was made in the meantime: {what}{columns}{rows}", other.snapshot());
    let rows = if conflict.rows.is_empty() { &conflict.others } else { &conflict.rows };
    let row_ids = rows.iter().map(|row| *row as i64).collect();
    let error = Error::new("conflict", text).row_ids(row_ids).commit(other.snapshot()).hint(AGAIN);
    match names.iter().find(|(id, _)| named == [*id]) {
        Some((_, name)) => error.column(name),
        None => error,
    }
}

/// Whether two changes concern the same cells.
#[derive(Debug, PartialEq, Eq)]
enum Meets {
    No,
    /// The first rows of both, or none if they meet in any row.
    Yes(Vec<u64>),
    Unknown(Vec<RowIdsRef>),
}

fn always(meets: bool) -> Meets {
    if meets { Meets::Yes(Vec::new()) } else { Meets::No }
}

fn writes_meet(ours: &Change, detaches: bool, theirs: &Change, known: &KnownRowIds) -> Meets {
    use ChangeKind::*;
    match (ours.kind, theirs.kind) {
        (Reset, _) | (_, Reset) | (Schema, Schema) => always(true),
        // Classes are merged by name, and samples refer to them by codes that stay the same.
        (Classes, _) | (_, Classes) => Meets::No,
        (Attachment, Schema) => always(columns_meet(&ours.columns, &theirs.columns)),
        (Attachment, Attachment) => always(detaches && columns_meet(&ours.columns, &theirs.columns)),
        // An attachment does not cover what changed in the meantime, and goes with its column.
        (Attachment, _) | (_, Attachment) => Meets::No,
        (Schema, Append | Value) | (Append | Value, Schema) => always(columns_meet(&ours.columns, &theirs.columns)),
        (Value, Value) if !columns_meet(&ours.columns, &theirs.columns) => Meets::No,
        // A merge lists the samples of another branch that it adds or revives. Two merges must not add the same ones, and a layout may have dropped them.
        (Append, Append | Layout) | (Layout, Append) => rows_meet(&ours.rows, &theirs.rows, known),
        (Value | Delete, Value | Delete) | (Layout, Layout) => rows_meet(&ours.rows, &theirs.rows, known),
        // New samples have new row ids. A layout keeps all values, and folds only overlays that it has seen.
        (Append, _) | (_, Append) | (Layout, _) | (_, Layout) | (Schema, Delete) | (Delete, Schema) => Meets::No,
    }
}

fn read_meets(RowsRead { columns, rows }: &RowsRead, theirs: &Change, known: &KnownRowIds) -> Meets {
    use ChangeKind::*;
    match (rows, theirs.kind) {
        (_, Layout | Classes | Attachment) => Meets::No,
        (_, Reset) => always(true),
        (None, Append | Delete) => always(theirs.rows.ids() > 0),
        (_, Value | Schema) if !columns_meet(columns, &theirs.columns) => Meets::No,
        (None, Value) | (_, Schema) => always(true),
        // A sample that was looked for in vain may have been appended.
        (Some(rows), Append | Delete | Value) => ids_meet(rows, &theirs.rows, known),
    }
}

/// Return whether two lists have a column in common. An empty list means all columns, and `NO_COLUMN` is none of them.
pub fn columns_meet(ours: &[u64], theirs: &[u64]) -> bool {
    let names_none = |columns: &[u64]| columns == [NO_COLUMN];
    let in_both = || ours.is_empty() || theirs.is_empty() || ours.iter().any(|column| theirs.contains(column));
    !names_none(ours) && !names_none(theirs) && in_both()
}

fn rows_meet(ours: &RowSet, theirs: &RowSet, known: &KnownRowIds) -> Meets {
    let (one, other) = (ours.range(), theirs.range());
    if one.is_empty() || other.is_empty() || one.end <= other.start || other.end <= one.start {
        return Meets::No;
    }
    match (found(ours, known), found(theirs, known)) {
        (Ok(ours), Ok(theirs)) => common(&ours, &theirs),
        (ours, theirs) => Meets::Unknown(ours.err().into_iter().chain(theirs.err()).collect()),
    }
}

fn ids_meet(ours: &RowIds, theirs: &RowSet, known: &KnownRowIds) -> Meets {
    if ours.count_in(theirs.range()) == 0 {
        return Meets::No;
    }
    found(theirs, known).map_or_else(|unknown| Meets::Unknown(vec![unknown]), |theirs| common(ours, &theirs))
}

/// Return the row ids of a set, or the reference to them if they are not known.
fn found(set: &RowSet, known: &KnownRowIds) -> Result<Arc<RowIds>, RowIdsRef> {
    match set {
        RowSet::Runs(runs) => Ok(Arc::new(RowIds::Runs(runs.clone()))),
        RowSet::Object(rows) => known.get(rows).cloned().ok_or(*rows),
    }
}

fn common(ours: &RowIds, theirs: &RowIds) -> Meets {
    match ours.common(theirs, NAMED) {
        rows if rows.is_empty() => Meets::No,
        rows => Meets::Yes(rows),
    }
}

#[cfg(test)]
mod tests {
    use penstock_format::Id;
    use penstock_format::ids::Run;

    use super::*;

    const KINDS: [ChangeKind; 7] = [
        ChangeKind::Append,
        ChangeKind::Value,
        ChangeKind::Delete,
        ChangeKind::Schema,
        ChangeKind::Layout,
        ChangeKind::Reset,
        ChangeKind::Classes,
    ];

    fn ten(first: u64) -> RowSet {
        RowSet::Runs(vec![Run { first, count: 10 }])
    }

    fn change(kind: ChangeKind, columns: &[u64], first: u64) -> Change {
        Change { kind, columns: columns.to_vec(), rows: ten(first) }
    }

    fn conflict(writes: Vec<Change>, reads: Vec<RowsRead>, theirs: Change) -> Option<Conflict> {
        match judge(&ChangeSet { writes, reads, ..ChangeSet::default() }, &[theirs], &KnownRowIds::new()) {
            Verdict::Follows => None,
            Verdict::Conflict(found) => Some(found),
            Verdict::Depends(_) => panic!("runs are known"),
        }
    }

    fn meets(ours: Change, theirs: Change) -> bool {
        conflict(vec![ours], Vec::new(), theirs).is_some()
    }

    #[test]
    fn a_conflict_does_not_depend_on_who_came_first() {
        for one in KINDS {
            for other in KINDS {
                for (columns, first) in [(&[1][..], 5), (&[2], 5), (&[1], 10), (&[2], 10), (&[], 0)] {
                    let (ours, theirs) = (change(one, &[1], 0), change(other, columns, first));
                    assert_eq!(
                        meets(ours.clone(), theirs.clone()),
                        meets(theirs, ours),
                        "{one:?} {other:?} {columns:?} {first}"
                    );
                }
            }
        }
    }

    #[test]
    fn appends_commute_and_disjoint_changes_rebase() {
        use ChangeKind::*;
        let new = Change { rows: RowSet::Runs(Vec::new()), ..change(Append, &[], 0) };
        assert!(KINDS[..5].iter().all(|kind| *kind == Schema || !meets(new.clone(), change(*kind, &[], 0))));
        assert!(
            meets(change(Append, &[], 0), change(Append, &[], 9))
                && !meets(change(Append, &[], 0), change(Append, &[], 10))
        );
        assert!(KINDS.iter().all(|kind| *kind == Reset || !meets(change(Classes, &[1], 0), change(*kind, &[1], 0))));
        assert!(KINDS.iter().all(|kind| meets(change(Reset, &[], 0), change(*kind, &[2], 50))));
        assert!(meets(change(Value, &[1], 0), change(Value, &[1], 9)));
        assert!(!meets(change(Value, &[1], 0), change(Value, &[1], 10)), "changes to disjoint rows do not conflict");
        assert!(!meets(change(Value, &[1], 0), change(Value, &[2], 0)), "changes to disjoint columns do not conflict");
        assert!(
            meets(change(Value, &[1], 0), change(Delete, &[], 5))
                && meets(change(Delete, &[], 0), change(Delete, &[], 9))
        );
        assert!(!meets(change(Delete, &[], 0), change(Delete, &[], 10)));
        assert!(
            meets(change(Append, &[1, 2], 0), change(Schema, &[2], 0))
                && !meets(change(Append, &[1], 0), change(Schema, &[2], 0))
        );
    }

    #[test]
    fn what_was_read_counts_as_well() {
        use ChangeKind::*;
        let reads = |read: RowsRead, theirs: Change| conflict(Vec::new(), vec![read], theirs).map(|found| found.kind);
        let rows = || RowsRead { columns: vec![1], rows: Some(Arc::new((0..10).collect())) };
        let all_rows = || RowsRead { columns: vec![1], rows: None };
        assert_eq!(reads(rows(), change(Append, &[], 100)), None, "new samples do not change rows that were read");
        assert_eq!(reads(rows(), change(Append, &[], 5)), Some(Append), "samples that did not exist were looked for");
        assert_eq!(
            reads(all_rows(), change(Append, &[], 100)),
            Some(Append),
            "a predicate may be true for new samples"
        );
        assert_eq!(reads(rows(), change(Value, &[1], 9)), Some(Value));
        assert_eq!((reads(rows(), change(Value, &[2], 9)), reads(all_rows(), change(Value, &[2], 9))), (None, None));
        assert_eq!(
            (reads(rows(), change(Delete, &[], 10)), reads(all_rows(), change(Delete, &[], 10))),
            (None, Some(Delete))
        );
        assert_eq!(
            (reads(rows(), change(Classes, &[1], 5)), reads(all_rows(), change(Classes, &[1], 5))),
            (None, None)
        );
        assert_eq!(conflict(Vec::new(), Vec::new(), change(Schema, &[], 0)), None);
    }

    #[test]
    fn a_change_of_no_column_meets_no_column() {
        use ChangeKind::*;
        for rows in [None, Some(Arc::new((0..10).collect()))] {
            let counted = RowsRead { columns: vec![NO_COLUMN], rows };
            for columns in [&[][..], &[1], &[NO_COLUMN]] {
                for kind in [Value, Schema] {
                    assert_eq!(
                        conflict(Vec::new(), vec![counted.clone()], change(kind, columns, 0)),
                        None,
                        "{kind:?} {columns:?}"
                    );
                }
                assert!(conflict(Vec::new(), vec![counted.clone()], change(Delete, columns, 0)).is_some());
            }
        }
        for kind in [Append, Value] {
            for columns in [&[][..], &[1]] {
                assert!(
                    !meets(change(Schema, &[NO_COLUMN], 0), change(kind, columns, 0)),
                    "it dropped no column: {kind:?} {columns:?}"
                );
            }
            assert!(!meets(change(Schema, &[1], 0), change(kind, &[NO_COLUMN], 0)), "it gave no value: {kind:?}");
        }
        assert!(meets(change(Schema, &[NO_COLUMN], 0), change(Schema, &[1], 0)), "two changes of the schema conflict");
        for (kind, dropped) in [(Append, true), (Value, true), (Schema, false), (Reset, false)] {
            let found = conflict(vec![change(Schema, &[1], 0)], Vec::new(), change(kind, &[1], 0));
            assert_eq!(found.map(|found| found.dropped), Some(dropped), "{kind:?}");
        }
    }

    #[test]
    fn rows_in_objects_are_compared_exactly() {
        let every_other_row = |first: u64| (0..50).map(|index| first + 2 * index).collect::<RowIds>();
        let (RowSet::Object(even), RowSet::Object(odd)) =
            (every_other_row(0).encode(Id([1; 16])).0, every_other_row(1).encode(Id([2; 16])).0)
        else {
            panic!("50 runs need an object");
        };
        let delete = |rows| Change { kind: ChangeKind::Delete, columns: Vec::new(), rows };
        let ours = |rows| ChangeSet { writes: vec![delete(rows)], ..ChangeSet::default() };
        let mut known = KnownRowIds::new();
        let verdict = |known: &KnownRowIds, ours: &ChangeSet, rows| judge(ours, &[delete(rows)], known);
        let (far, odd_run) =
            (RowSet::Runs(vec![Run { first: 99, count: 9 }]), RowSet::Runs(vec![Run { first: 33, count: 1 }]));
        assert_eq!(verdict(&known, &ours(RowSet::Object(even)), far), Verdict::Follows, "the ranges are disjoint");
        assert_eq!(verdict(&known, &ours(RowSet::Object(even)), odd_run.clone()), Verdict::Depends(vec![even]));
        assert_eq!(
            verdict(&known, &ours(RowSet::Object(even)), RowSet::Object(odd)),
            Verdict::Depends(vec![even, odd])
        );
        known.insert(even, Arc::new(every_other_row(0)));
        known.insert(odd, Arc::new(every_other_row(1)));
        assert_eq!(verdict(&known, &ours(RowSet::Object(even)), RowSet::Object(odd)), Verdict::Follows);
        assert_eq!(verdict(&known, &ours(RowSet::Object(even)), odd_run.clone()), Verdict::Follows);
        let Verdict::Conflict(found) = verdict(&known, &ours(RowSet::Object(odd)), odd_run) else {
            panic!("33 is odd")
        };
        assert_eq!((found.rows, found.samples), (vec![33], 1));
        let Verdict::Conflict(found) = verdict(&known, &ours(RowSet::Object(odd)), RowSet::Object(odd)) else {
            panic!("the same rows")
        };
        assert_eq!((found.rows.len(), found.rows[1], found.samples), (NAMED, 3, 50));
    }
}
