//! The samples that a transaction changes or deletes.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use penstock_error::Result;
use penstock_format::ids::Run;
use penstock_format::overlay::Overlay;
use penstock_format::rows::RowSet;

use crate::config::Config;
use crate::snapshot::Snapshot;
use crate::snapshot::own::Own;
use crate::store::context::Context;
use crate::write::pending::{Changed, Pending};
use crate::write::vocabulary::Words;

/// New values of samples, and deletions.
#[derive(Default)]
pub struct ChangedSamples {
    /// New values that are in memory.
    pub pending: Arc<Pending>,
    /// New values that are written, oldest first.
    pub written: Vec<Changed>,
    pub deleted: HashSet<u64>,
}

impl ChangedSamples {
    /// Write the new values in memory.
    pub fn write_pending(&mut self, base: &Snapshot, words: &Words) -> Result<()> {
        let pending = Arc::make_mut(&mut self.pending);
        self.written.extend(pending.write(&base.context, &base.schema, words, Config::inline_bytes())?);
        Ok(())
    }

    /// Return the new values in memory, for reads. None if there are none.
    pub fn own(&self) -> Option<Own> {
        if self.pending.is_empty() { None } else { Some(self.pending.clone()) }
    }

    /// Return the other changes, for reads in this process. Their row ids are in memory, so they need no object.
    pub fn overlays(&self, context: &Context) -> Result<Vec<Overlay>> {
        let mut overlays = Vec::new();
        for Changed { columns, row_ids, writer } in &self.written {
            let mut rest = row_ids.iter().copied();
            for fragment in &writer.fragments {
                let rows = runs_of(rest.by_ref().take(fragment.samples as usize));
                overlays.push(Overlay::of_values(columns.clone(), rows, fragment.files.clone(), || context.new_id())?);
            }
        }
        if !self.deleted.is_empty() {
            overlays
                .push(Overlay::deleting(runs_of(self.deleted.iter().copied().collect::<BTreeSet<u64>>().into_iter())));
        }
        Ok(overlays)
    }
}

/// Return ascending row ids as runs, however many there are.
fn runs_of(row_ids: impl Iterator<Item = u64>) -> RowSet {
    let mut runs: Vec<Run> = Vec::new();
    for first in row_ids {
        match runs.last_mut().filter(|run| run.end() == first) {
            Some(run) => run.count += 1,
            None => runs.push(Run { first, count: 1 }),
        }
    }
    RowSet::Runs(runs)
}
