//! Fences: transactions that began before one fail, so that a collector may remove objects that only they refer to (spec section 10).

use std::sync::Arc;

use penstock_error::Result;
use penstock_format::record::RecordKind;

use crate::commit::written::{Texts, Written};
use crate::snapshot::Snapshot;

/// Append a fence to the branch of a handle, and return the new snapshot. Its GC epoch is this one, or a higher one that is there already. Transactions
/// that began under a lower epoch then fail with `transaction-expired`, and so do those that add a stage of a lower epoch. Cost: a commit.
pub fn fence(handle: &Arc<Snapshot>, epoch: u64, texts: Texts) -> Result<Snapshot> {
    let mut written = Written::at(handle)?;
    let mut proposal = written.proposal(RecordKind::Fence, texts, (0, 0))?;
    proposal.fence_epoch = epoch;
    // Another fence does not end it.
    proposal.gc_epoch = u64::MAX;
    written.commit(proposal)
}
