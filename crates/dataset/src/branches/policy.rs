//! What a merge does about conflicts.

use std::collections::HashMap;

use penstock_error::{Error, Result};

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
            other => Err(Error::new("invalid-argument", format!("cannot merge: on_conflict is `{other}`, expected fail, ours or theirs"))),
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

    /// Return the policies by column id. Names are those of `ours`, or of `theirs` for columns that `ours` lacks.
    pub fn resolved(&self, ours: &Snapshot, theirs: impl Fn() -> Result<Snapshot>) -> Result<Policies> {
        let id_of = |name: &str| match ours.column(name) {
            Ok(spec) => Ok(spec.id),
            Err(error) => theirs()?.column(name).map(|spec| spec.id).map_err(|_| error),
        };
        let mut ids = HashMap::new();
        for (name, policy) in &self.columns {
            if ids.insert(id_of(name)?, *policy).is_some_and(|other| other != *policy) {
                let text = format!("cannot merge: on_conflict has two policies for column `{name}`, under both of its names");
                return Err(Error::new("invalid-argument", text).column(name).hint("name the column as this branch does"));
            }
        }
        Ok(Policies { ids, ..self.clone() })
    }

    pub fn of(&self, column: u64) -> Policy {
        self.ids.get(&column).copied().unwrap_or(self.others)
    }
}
