//! Attach objects to a snapshot: what a program derived from its samples, such as an index (docs/design/0025-ground.md).

use std::sync::Arc;

use penstock_error::{Error, Result};
use penstock_format::Id;
use penstock_format::cursor::{Magic, seal};
use penstock_format::ids::{ObjectRef, attachment_name};
use penstock_format::manifest::Attachment;
use penstock_format::record::{Change, ChangeKind, Delta, FEATURE_ATTACHMENTS, RecordKind};
use penstock_format::rows::{RowIds, RowSet};

use crate::commit::changes::NO_COLUMN;
use crate::commit::manifest::objects::{folders_of, write_rows};
use crate::commit::written::{Texts, Written};
use crate::snapshot::Snapshot;

/// An attachment that is to be added.
pub struct New<'a> {
    pub kind: &'a str,
    pub content: &'a [u8],
    /// The names of the columns whose values it was made of. If empty, only the samples matter.
    pub columns: &'a [&'a str],
    /// The samples that it was made of, or None for all of the snapshot.
    pub rows: Option<RowIds>,
    /// A JSON object.
    pub parameters: &'a str,
    /// Objects of attachments whose place it takes.
    pub replaces: &'a [Id],
}

/// Attach an object that was made of the handle's snapshot, and return the new snapshot. It covers the samples that nobody gave other values in the
/// meantime. Cost: reads the manifest, and writes the object and a commit.
pub fn attach(handle: &Arc<Snapshot>, new: &New, texts: Texts) -> Result<Snapshot> {
    let mut written = Written::at(handle)?;
    let base = written.base.clone();
    let mut columns = new.columns.iter().map(|name| Ok(base.column(name)?.id)).collect::<Result<Vec<u64>>>()?;
    columns.sort_unstable();
    columns.dedup();
    let (id, body) =
        (base.context.new_id()?, seal(Magic::Attachment, |writer| writer.0.extend_from_slice(new.content)));
    let mut attachment = Attachment {
        kind: new.kind.to_owned(),
        object: ObjectRef::of(id, &body),
        columns,
        rows: RowSet::Runs(Vec::new()),
        changed: Vec::new(),
        parameters: new.parameters.to_owned(),
    };
    attachment.check()?;
    let (mut deltas, columns) = detached(&base, new.replaces, &attachment.columns)?;
    let rows = covered(&base, new)?;
    written.puts.push(attachment_name(id));
    base.context.storage.put(&attachment_name(id), &body)?;
    attachment.rows = write_rows(&base.context, &rows, &mut written.puts)?;
    deltas.push(Delta::Attachment(attachment));
    commit(written, deltas, columns, texts)
}

/// Remove attachments, given by their objects, and return the new snapshot. Earlier snapshots keep them. Cost: a commit.
pub fn detach(handle: &Arc<Snapshot>, objects: &[Id], texts: Texts) -> Result<Snapshot> {
    let written = Written::at(handle)?;
    let (deltas, columns) = detached(&written.base, objects, &[])?;
    if deltas.is_empty() {
        return Err(Error::new("invalid-argument", "cannot remove attachments: none was given"));
    }
    commit(written, deltas, columns, texts)
}

/// Return the row ids of the samples that an attachment was made of.
fn covered(base: &Snapshot, new: &New) -> Result<RowIds> {
    let mut runs = Vec::new();
    base.each_fragment(|fragment| {
        runs.extend(&fragment.runs);
        Ok(())
    })?;
    let live = RowIds::of_runs(runs).minus(&base.not_alive()?);
    let Some(rows) = &new.rows else { return Ok(live) };
    match rows.minus(&live) {
        unknown if unknown.is_empty() => Ok(rows.clone()),
        unknown => {
            let row_ids = unknown.examples();
            let text = format!(
                "cannot attach `{}`: {} of its row ids belong to no sample, such as {}",
                new.kind,
                unknown.len(),
                row_ids[0]
            );
            Err(Error::new("row-id-not-found", text).row_ids(row_ids).hint("take row ids from the column `_row_id`"))
        }
    }
}

/// Return the deltas that remove these attachments, and the columns of all that changes.
fn detached(base: &Snapshot, objects: &[Id], columns: &[u64]) -> Result<(Vec<Delta>, Vec<u64>)> {
    let mut columns = columns.to_vec();
    for object in objects {
        let found = base.attachments.iter().find(|attachment| attachment.object.id == *object);
        let Some(found) = found else {
            let text = format!("cannot remove attachment `{object}`: snapshot {} does not have it", base.id());
            return Err(Error::new("object-not-found", text).hint("see the snapshot's attachments"));
        };
        columns.extend(&found.columns);
    }
    columns.sort_unstable();
    columns.dedup();
    Ok((objects.iter().copied().map(Delta::Detached).collect(), columns))
}

fn commit(mut written: Written, deltas: Vec<Delta>, mut columns: Vec<u64>, texts: Texts) -> Result<Snapshot> {
    if columns.is_empty() {
        columns.push(NO_COLUMN);
    }
    let mut proposal = written.proposal(RecordKind::Data, texts, (0, 0))?;
    proposal.features = FEATURE_ATTACHMENTS;
    proposal.own.changes.detaches = deltas.iter().any(|delta| matches!(delta, Delta::Detached(_)));
    proposal.own.changes.writes =
        vec![Change { kind: ChangeKind::Attachment, columns, rows: RowSet::Runs(Vec::new()) }];
    proposal.own.deltas = deltas;
    written.base.context.storage.sync(&folders_of(&written.puts))?;
    written.commit(proposal)
}
