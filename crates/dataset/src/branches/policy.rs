//! What a merge does about conflicts.

use std::collections::HashMap;

use penstock_error::{Error, Result};

use crate::log::records::LogEntry;
use crate::snapshot::Snapshot;

/// Whose value counts if both sides changed it, or if one side changed a sample that the other one deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    Fail,
    Ours,
    Theirs,
}

impl Policy {
    pub fn parse(text: &str) -> Result<Policy> {
        match text {
            "fail" => Ok(Policy::Fail),
            "ours" => Ok(Policy::Ours),
            "theirs" => Ok(Policy::Theirs),
            other => Err(Error::new(
                "invalid-argument",
                format!("cannot merge: on_conflict is `{other}`, expected fail, ours or theirs"),
            )),
        }
    }
}

/// The policies of a merge.
#[derive(Debug, Clone)]
pub struct Policies {
    /// The policy of columns that are not listed.
    pub others: Policy,
    pub columns: Vec<(String, Policy)>,
    ids: HashMap<u64, Policy>,
}

impl Policies {
    pub fn new(others: Policy, columns: Vec<(String, Policy)>) -> Policies {
        Policies { others, columns, ids: HashMap::new() }
    }

    /// Return the policies by column id. A name means the column of `ours`, and a column of `theirs` that `ours` lacks. If there is neither, it
    /// means the column of their common ancestor. Cost: reads the roots of these two, if columns are listed.
    pub fn resolved(&self, ours: &Snapshot, theirs: &LogEntry, base: &LogEntry) -> Result<Policies> {
        let mut ids = HashMap::new();
        if self.columns.is_empty() {
            return Ok(Policies { ids, ..self.clone() });
        }
        let (theirs, base) = (ours.near(theirs.clone())?, ours.near(base.clone())?);
        for (name, policy) in &self.columns {
            let own = ours.column(name).map(|spec| spec.id);
            let other = theirs.column(name).ok().map(|spec| spec.id).filter(|id| !ours.schema.has_column(*id));
            let mut named: Vec<u64> = own.iter().copied().chain(other).collect();
            if named.is_empty() {
                named.push(base.column(name).map(|spec| spec.id).or(own)?);
            }
            for id in named {
                if ids.insert(id, *policy).is_some_and(|other| other != *policy) {
                    let text = format!("on_conflict has two policies for column `{name}`, under both of its names");
                    return Err(Error::new("invalid-argument", text)
                        .column(name)
                        .hint("name the column as this branch does"));
                }
            }
        }
        Ok(Policies { ids, ..self.clone() })
    }

    pub fn of(&self, column: u64) -> Policy {
        self.ids.get(&column).copied().unwrap_or(self.others)
    }
}
