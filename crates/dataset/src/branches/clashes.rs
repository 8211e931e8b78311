//! Conflicts of a merge: samples that both sides changed, or that one side changed and the other one deleted, and what policies make of them.

use penstock_error::Error;
use penstock_format::rows::RowIds;

use super::policy::Policy;

/// A conflict: samples that both sides changed, in a column, or that one side changed and the other one lacks.
pub struct Clash {
    pub column: String,
    pub rows: RowIds,
    pub what: Clashing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clashing {
    Changed,
    Deleted,
    /// The branch lacks samples that a copied commit changed.
    Lacking,
}

/// Samples that one side deleted and the other one changed, by the policies of the columns.
pub struct ByPolicy {
    what: Clashing,
    fail: Vec<Clash>,
    ours: RowIds,
    theirs: RowIds,
}

impl ByPolicy {
    pub fn new(what: Clashing) -> ByPolicy {
        ByPolicy { what, fail: Vec::new(), ours: RowIds::default(), theirs: RowIds::default() }
    }

    pub fn add(&mut self, policy: Policy, column: &str, rows: RowIds) {
        match policy {
            _ if rows.is_empty() => {}
            Policy::Fail => self.fail.push(Clash { column: column.into(), rows, what: self.what }),
            Policy::Ours => self.ours = self.ours.or(&rows),
            Policy::Theirs => self.theirs = self.theirs.or(&rows),
        }
    }

    /// Return the samples for which `ours` wins, and those for which `theirs` wins. Policies that disagree are a conflict.
    pub fn decide(self, clashes: &mut Vec<Clash>) -> (RowIds, RowIds) {
        let ByPolicy { what, fail, ours, theirs } = self;
        clashes.extend(fail);
        let disagree = ours.and(&theirs);
        if !disagree.is_empty() {
            clashes.push(Clash { column: String::new(), rows: disagree, what });
        }
        (ours, theirs)
    }
}

/// At most this many row ids are named in an error.
const NAMED: usize = 10;

/// Make the error for conflicts that no policy decides.
pub fn error(clashes: &[Clash]) -> Error {
    let text = |Clash { column, rows, what }: &Clash| {
        let (count, named) = (rows.len(), rows.first(0, NAMED));
        let more = if count as usize > named.len() { ", …" } else { "" };
        let named = named.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        let samples = if count == 1 { "1 sample" } else { &format!("{count} samples") };
        match (column.as_str(), what) {
            ("", _) => format!("{samples} (row ids {named}{more}), which one side deleted: the other side or an older merge changed them"),
            (column, Clashing::Lacking) => {
                format!("{samples} (row ids {named}{more}) that this branch lacks and the commit changed in column `{column}`")
            }
            (column, Clashing::Deleted) => {
                format!("{samples} (row ids {named}{more}) that one side deleted and the other one changed in column `{column}`")
            }
            (column, Clashing::Changed) => format!("{samples} (row ids {named}{more}) in column `{column}`, which both sides changed"),
        }
    };
    let all = RowIds::union(clashes.iter().map(|clash| &clash.rows));
    let row_ids = all.first(0, NAMED).into_iter().map(u64::cast_signed).collect();
    let found = Error::new("conflict", format!("found conflicts: {}", clashes.iter().map(text).collect::<Vec<_>>().join("; ")));
    let found = match clashes.iter().find(|clash| !clash.column.is_empty()) {
        Some(clash) => found.column(&clash.column),
        None => found,
    };
    found.row_ids(row_ids).hint("choose with on_conflict=\"ours\" or \"theirs\", or with a dict of columns; nothing was committed")
}
