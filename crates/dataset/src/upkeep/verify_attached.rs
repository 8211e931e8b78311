//! Check what a snapshot lists beside its samples: attachments and stages.

use penstock_error::Result;
use penstock_format::cursor::malformed;
use penstock_format::ids::{COUNTERS, attachment_name, row_id, stages_name};
use penstock_format::rows::RowIds;

use crate::snapshot::Snapshot;

/// Check each object, and return its name with the result. Cost: reads all of them.
pub fn each(snapshot: &Snapshot) -> impl Iterator<Item = (String, Result<()>)> + '_ {
    let stages = snapshot.stages.iter().map(|stages| {
        let runs = snapshot.context.stages(stages).map(|all| all.iter().flat_map(|stage| stage.runs.clone()).collect());
        (stages_name(stages.id), runs.and_then(|runs| check_known(snapshot, &RowIds::of_runs(runs))))
    });
    let attachments = snapshot.attachments.iter().map(|attachment| {
        let rows = snapshot.context.all_row_ids([&attachment.rows]).and_then(|rows| check_known(snapshot, &rows));
        (attachment_name(attachment.object.id), rows.and_then(|()| snapshot.content_of(attachment)).map(drop))
    });
    let covered = std::iter::once_with(|| ("attachments".into(), snapshot.attachments().map(drop)));
    stages.chain(attachments).chain(covered)
}

/// Check that commits have given out all of these row ids. Those of other branches are not known.
pub fn check_known(snapshot: &Snapshot, ids: &RowIds) -> Result<()> {
    let record = snapshot.record();
    match ids.count_in(row_id(record.lineage, record.next_counter)..row_id(record.lineage, 0).saturating_add(COUNTERS))
    {
        0 => Ok(()),
        unknown => Err(malformed(format!("{unknown} listed row ids were never assigned by a commit"))),
    }
}
