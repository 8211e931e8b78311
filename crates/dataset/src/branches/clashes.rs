//! Conflicts of a merge: samples that both sides changed, or that one side changed and the other one deleted, and what policies make of them.

use penstock_error::Error;
use penstock_format::rows::RowIds;
use penstock_format::schema::ColumnSpec;

use super::policy::Policy;

/// A conflict: samples that both sides changed, in a column, or that one side changed and the other one lacks.
pub struct Clash {
    pub column: String,
    pub rows: RowIds,
    pub what: Clashing,
}

impl Clash {
    /// Samples that both sides changed in a column.
    pub fn changed(column: &ColumnSpec, rows: RowIds) -> Clash {
        Clash { column: column.name.clone(), rows, what: Clashing::Changed }
    }
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

impl Clash {
    fn description(&self) -> String {
        let (count, examples) = (self.rows.len(), self.rows.examples());
        let more = if count as usize > examples.len() { ", …" } else { "" };
        let row_ids = examples.iter().map(i64::to_string).collect::<Vec<_>>().join(", ");
        let samples = format!("{count} sample{} (row ids {row_ids}{more})", if count == 1 { "" } else { "s" });
        match (self.column.as_str(), self.what) {
            ("", _) => format!("{samples}, which one side deleted: the other side or an older merge changed them"),
            (column, Clashing::Lacking) => {
                format!("{samples} that this branch lacks and the commit changed in column `{column}`")
            }
            (column, Clashing::Deleted) => {
                format!("{samples} that one side deleted and the other one changed in column `{column}`")
            }
            (column, Clashing::Changed) => format!("{samples} in column `{column}`, which both sides changed"),
        }
    }
}

/// Make the error for conflicts that no policy decides.
pub fn error(clashes: &[Clash]) -> Error {
    let row_ids = RowIds::union(clashes.iter().map(|clash| &clash.rows)).examples();
    let descriptions: Vec<String> = clashes.iter().map(Clash::description).collect();
    let found = Error::new("conflict", format!("found conflicts: {}", descriptions.join("; ")));
    let found = match clashes.iter().find(|clash| !clash.column.is_empty()) {
        Some(clash) => found.column(&clash.column),
        None => found,
    };
    found
        .row_ids(row_ids)
        .hint("choose with on_conflict=\"ours\" or \"theirs\", or with a dict of columns; nothing was committed")
}
