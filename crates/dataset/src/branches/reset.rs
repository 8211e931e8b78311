//! Return a branch to an earlier state, or give it the state of another branch.

use std::sync::Arc;

use penstock_error::{Error, Result};
use penstock_format::SnapshotId;
use penstock_format::ids::ObjectRef;
use penstock_format::record::{Change, ChangeKind, RecordKind};
use penstock_format::rows::RowSet;

use crate::commit::changes::{RootState, Theirs};
use crate::commit::manifest::root::write_root;
use crate::commit::written::{Texts, Written};
use crate::log::records;
use crate::snapshot::Snapshot;
use crate::upkeep::diff::Unshared;

/// Give the handle's branch the state of another snapshot of the dataset, as a new commit. The earlier commits remain in the log. Fails with
/// `conflict` if the handle's snapshot is not the newest one. Cost: reads the manifest pages in which the snapshots differ, and writes a
/// root if the other snapshot has deltas.
pub fn reset(handle: &Arc<Snapshot>, target: &SnapshotId, texts: Texts) -> Result<Snapshot> {
    let mut written = Written::at(handle)?;
    let base = written.base.clone();
    let entry = records::named(base.context.storage.as_ref(), target)?;
    if entry.record.snapshot() == base.id() {
        let text = format!("cannot reset to snapshot {target}: it is the current one");
        return Err(Error::new("invalid-argument", text).hint("see ds.log() for earlier snapshots"));
    }
    let parent = (entry.as_parent(), entry.record.time_us);
    let target = base.near(entry)?;
    let Unshared { added, removed, .. } = Unshared::between(&base, &target)?;
    let mut proposal = written.proposal(RecordKind::Reset, texts, (added.len(), removed.len()))?;
    proposal.features = target.record().features_read | target.record().features_write;
    proposal.own.changes.writes =
        vec![Change { kind: ChangeKind::Reset, columns: Vec::new(), rows: RowSet::Runs(Vec::new()) }];
    let state = state_of(&target, &mut written.puts)?;
    proposal.theirs = Theirs { parent: Some(parent), physical: None, state: Some(state) };
    written.commit(proposal)
}

/// Return the state of a snapshot without deltas. Cost: writes a root if there are deltas.
pub fn state_of(snapshot: &Snapshot, puts: &mut Vec<String>) -> Result<RootState> {
    let record = snapshot.record();
    let root: ObjectRef = if record.deltas.is_empty() { record.root } else { write_root(snapshot, puts)?.0 };
    Ok(RootState { root, samples: record.samples, live: record.live })
}
