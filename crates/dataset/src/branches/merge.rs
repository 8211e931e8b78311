//! Merge a snapshot into a branch, or copy the changes of one commit.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use penstock_error::{Context as _, Error, Result};
use penstock_format::overlay::Overlay;
use penstock_format::record::{Change, ChangeKind, FEATURE_MERGES, FEATURE_OVERLAYS, RecordKind};
use penstock_format::rows::{RowIds, RowSet};
use penstock_format::{Id, SnapshotId};

use super::combine::{
    Additions, Linked, Turned, Wanted, combined, copied_samples, copied_values, hiding, linked, linked_files,
    new_parts, new_words,
};
use super::policy::Policies;
use super::reset::state_of;
use super::schemas::{Compared, check_leftover, compared};
use super::three_way::{Comparison, Decided, MergedSamples, MergedValues, Sides, Taken};
use crate::commit::changes::{Proposal, RootState, Theirs, schema_change};
use crate::commit::manifest::objects::write_rows;
use crate::commit::manifest::overlays::summary;
use crate::commit::manifest::root::{copy_to_overlays, write_root};
use crate::commit::written::{Texts, Written, commit_to_newest};
use crate::log::history::merge_bases;
use crate::log::records::{self, LogEntry};
use crate::snapshot::Snapshot;
use crate::upkeep::diff::changed_values;

/// The result of a merge. Without any changes to merge, `snapshot` is the newest one, and no commit was made.
pub struct Merged {
    pub snapshot: Snapshot,
    /// The samples that the branch got.
    pub row_ids: RowIds,
}

/// The number of lost races after which a merge fails with `conflict`.
const RACES: u32 = 50;

/// Merge the snapshot `theirs` into the newest snapshot of the handle's branch. The commit has both as parents.
///
/// Cost: finds the merge base, with a read for each merge on the way; reads the manifest pages and sets of row ids in which the three
/// snapshots differ, and the values that both sides may have changed. Files are shared, and values are copied only if both sides changed
/// samples of the same overlays. If the branch has no commits since the merge base, it gets the state of `theirs`.
pub fn merge(handle: &Arc<Snapshot>, theirs: &SnapshotId, policies: &Policies, texts: Texts) -> Result<Merged> {
    let merged = commit_to_newest(handle, RACES, |written| {
        let ours = written.base.clone();
        let store = ours.context.storage.as_ref();
        let theirs = records::named(store, theirs)?;
        let bases = merge_bases(store, &ours.entry, &theirs)?;
        let policies = policies.resolved(&ours, &theirs, bases.first().unwrap_or(&theirs))?;
        let is_base = |snapshot: SnapshotId| bases.iter().any(|base| base.record.snapshot() == snapshot);
        if is_base(theirs.record.snapshot()) {
            return Ok((None, RowIds::default()));
        }
        let (mut proposal, added) = match is_base(ours.id()) {
            true => fast_forward(written, &theirs, texts)?,
            false => three_way(written, Taken::Merged, &bases, &theirs, &policies, texts)?,
        };
        proposal.features |= FEATURE_MERGES;
        proposal.theirs.parent = Some((theirs.as_parent(), theirs.record.time_us));
        Ok((Some(proposal), added))
    });
    let (snapshot, row_ids) = merged.context(|| format!("cannot merge snapshot {theirs}"))?;
    Ok(Merged { snapshot, row_ids })
}

/// Copy the changes of one commit to the newest snapshot of the handle's branch: its differences from its first parent. Costs the same as
/// `merge`, without the search for a merge base.
pub fn cherry_pick(handle: &Arc<Snapshot>, commit: &SnapshotId, policies: &Policies, texts: Texts) -> Result<Merged> {
    let merged = commit_to_newest(handle, RACES, |written| {
        let store = written.base.context.storage.as_ref();
        let theirs = records::named(store, commit)?;
        let parent = theirs.record.parents.first();
        let parent = parent
            .ok_or_else(|| Error::new("invalid-argument", "it created the dataset").hint("give a later commit"))?;
        let base = records::named(store, &parent.snapshot())?;
        let policies = policies.resolved(&written.base, &theirs, &base)?;
        let (proposal, added) = three_way(written, Taken::Copied, &[base], &theirs, &policies, texts)?;
        Ok((Some(proposal).filter(|proposal| !proposal.own.changes.writes.is_empty()), added))
    });
    let (snapshot, row_ids) = merged.context(|| format!("cannot copy commit {commit}"))?;
    Ok(Merged { snapshot, row_ids })
}

/// Give the branch the state of `theirs`, which was made from the branch's newest snapshot.
fn fast_forward(written: &mut Written, theirs: &LogEntry, texts: Texts) -> Result<(Proposal, RowIds)> {
    let theirs = Arc::new(written.base.near(theirs.clone())?);
    let dropped = written.base.schema.columns_missing_in(&theirs.schema).map(|spec| spec.id);
    let altered = (theirs.schema != written.base.schema).then(|| schema_change(dropped.collect()));
    let sides = Sides::new(written.base.clone(), written.base.clone(), theirs);
    let found = Comparison::of(&sides, Taken::Merged)?;
    let (added, removed) = (found.added().clone(), found.removed().clone());
    let mut proposal = written.proposal(RecordKind::Merge, texts, (added.len(), removed.len()))?;
    proposal.own.changes.writes.extend(altered);
    // After a reset of the other side, transactions that began here may use words that no longer exist, or wider dtypes.
    if !sides.theirs.continues_words_of(&sides.ours) || !sides.theirs.schema.has_dtypes_of(&written.base.schema) {
        proposal.own.changes.writes.push(Change {
            kind: ChangeKind::Reset,
            columns: Vec::new(),
            rows: RowSet::Runs(Vec::new()),
        });
    }
    list_changes(written, &mut proposal, &added, found.changed(), &removed)?;
    proposal.features = sides.theirs.record().features_read | sides.theirs.record().features_write;
    let state = match sides.theirs.schema.with_places_of(&sides.ours.schema)? {
        None => state_of(&sides.theirs, &mut written.puts)?,
        // The branch keeps the places of its classes.
        Some(schema) => {
            let (root, _) = write_root(&sides.theirs.with_schema(Arc::new(schema), &[]), &mut written.puts)?;
            RootState { root, samples: sides.theirs.record().samples, live: sides.theirs.record().live }
        }
    };
    proposal.theirs = Theirs { parent: None, physical: None, state: Some(state) };
    Ok((proposal, added))
}

/// Apply the changes between a common ancestor and `theirs` to the branch. If there are several common ancestors, they must agree.
fn three_way(
    written: &mut Written,
    taken: Taken,
    bases: &[LogEntry],
    theirs: &LogEntry,
    policies: &Policies,
    texts: Texts,
) -> Result<(Proposal, RowIds)> {
    let Compared { all, altered, dropped, new_there } = compared(&written.base, bases, theirs, policies, taken)?;
    let sides = &all[0];
    let ours = sides.ours.clone();
    let puts = &mut written.puts;
    let found = Comparison::of(sides, taken)?;
    let others = all[1..].iter().map(|sides| Comparison::of(sides, taken)).collect::<Result<Vec<Comparison>>>()?;
    let new = others.iter().fold(found.new_there().clone(), |new, other| new.and(other.new_there()));
    let learned = others.iter().fold(found.learned(), |learned, other| learned.and(&other.learned()));
    let choose = |added: &RowIds| {
        linked(&ours, &sides.theirs, &Wanted { added, learned: &learned, lacking: &found.lacking, new: &new })
    };
    let mut chosen = choose(found.added())?;
    let Decided { samples: MergedSamples { added, removed, revived }, values, reads } = match others.is_empty() {
        true => found.decide(&chosen.row_ids, policies)?,
        false => found.decide_among(&others, policies)?,
    };
    // A policy may have changed which samples are added.
    if added.len() != found.added().and(&found.lacking).len()
        || !added.minus(&chosen.row_ids).minus(&chosen.copied).is_empty()
    {
        chosen = choose(&added)?;
    }
    let back = revived.and(&ours.overlay_rows(Overlay::is_gone)?);
    let copied = chosen.copied.or(&back);
    let linked = check_stages(&ours, &sides.theirs, &chosen, &revived)?;
    check_leftover(&new_there, |_, visit| linked_files(&sides.theirs, &chosen, visit))?;
    let mut additions = additions(sides, &chosen, &found.lacking, &learned, values, puts)?;
    let fragments = additions.copy(copied_samples(&sides.theirs, &sides.columns[2], &copied, puts)?);
    additions.words = if additions.is_empty() { Vec::new() } else { new_words(&ours, &sides.theirs, puts)? };
    let columns: BTreeSet<u64> = additions.overlays.iter().flat_map(|overlay| overlay.columns.clone()).collect();
    let mut changed = ours.context.all_row_ids(additions.overlays.iter().map(|overlay| &overlay.rows))?;
    let gained = added.or(&revived);
    if taken == Taken::Copied && gained.is_empty() && !has_other_values(sides, &additions.overlays)? {
        // The branch has these values already, and a copy that changes nothing makes no commit.
        (additions.overlays, changed) = Default::default();
    }
    let known = (&found.lacking, &learned);
    additions.overlays.extend(hiding_overlays(&ours, &chosen.row_ids, known, (&added, &removed), puts)?);
    // Of earlier dtypes of the other side, the branch learns with the files that have them.
    let settled = learned.minus(&found.lacking);
    let has_rows = !additions.is_empty() || !revived.is_empty() || !settled.is_empty();
    let altered = altered && (has_rows || !ours.schema.equals_but_for_earlier_dtypes(&written.base.schema));
    let kind = match taken {
        Taken::Merged => RecordKind::Merge,
        Taken::Copied if altered => RecordKind::Schema,
        Taken::Copied => RecordKind::Data,
    };
    let mut proposal = written.proposal(kind, texts, (added.len() + revived.len(), removed.len()))?;
    proposal.own.changes.writes.extend(altered.then(|| schema_change(dropped)));
    let overlays = if additions.overlays.is_empty() { 0 } else { FEATURE_OVERLAYS };
    proposal.features = sides.theirs.record().features_read & !FEATURE_MERGES | additions.features | overlays;
    list_changes(written, &mut proposal, &gained, (columns.into_iter().collect(), changed), &removed)?;
    proposal.theirs.physical = Some((chosen.row_ids.len() + copied.len()).cast_signed());
    (proposal.own.changes.staged, proposal.own.changes.reads) = (Arc::new(linked), reads);
    let has_stages = sides.theirs.stages.iter().any(|stages| !ours.stages.contains(stages));
    let turned = Turned { revived: revived.minus(&back), settled, back };
    match additions.deltas().filter(|_| turned.is_empty() && !has_stages && !altered) {
        Some(deltas) => proposal.own.deltas = deltas,
        None => {
            let whole = combined(&ours, &sides.theirs, &additions, &turned, &mut written.puts)?;
            let (root, listed) = write_root(&whole, &mut written.puts)?;
            written.delete_joined((&root, &listed), fragments.iter(), &proposal.own.changes);
            let record = whole.record();
            proposal.theirs.state = Some(RootState { root, samples: record.samples, live: record.live });
        }
    }
    Ok((proposal, gained))
}

/// Link fragments, and link or copy the values that the branch gets. Samples whose fragments it does not get have no values in it.
fn additions(
    sides: &Sides,
    chosen: &Linked,
    lacking: &RowIds,
    learned: &RowIds,
    values: MergedValues,
    puts: &mut Vec<String>,
) -> Result<Additions> {
    let theirs = &sides.theirs;
    let mut additions = Additions { parts: new_parts(theirs, chosen, puts)?, ..Additions::default() };
    (additions.overlays, additions.features) = match values {
        MergedValues::Overlays(mut overlays) => {
            copy_to_overlays(&theirs.context, &mut overlays)?;
            (overlays, 0)
        }
        MergedValues::Samples(mut values) => {
            // Of samples that died there and that no fragment has any more, there are no values.
            let absent = lacking.minus(&chosen.row_ids).or(&theirs.overlay_rows(Overlay::is_gone)?);
            values.iter_mut().for_each(|(_, rows)| *rows = rows.minus(&absent));
            let theirs = if learned.is_empty() { theirs.clone() } else { Arc::new(theirs.with_hidden()) };
            copied_values(&theirs, &values, puts)?
        }
    };
    Ok(additions)
}

/// Return the overlays that hide samples: those that the merge removes, and those of the `linked` fragments that it does not add. Of `learned`
/// samples, the branch learns that they were deleted.
fn hiding_overlays(
    ours: &Snapshot,
    linked: &RowIds,
    (lacking, learned): (&RowIds, &RowIds),
    (added, removed): (&RowIds, &RowIds),
    puts: &mut Vec<String>,
) -> Result<Vec<Overlay>> {
    // The fragments that the branch gets may have samples that it does not get.
    let hidden = linked.minus(added);
    let deleted = hiding(ours, &hidden.and(learned).or(removed), Overlay::deleting, puts)?;
    let absent = hiding(ours, &hidden.minus(learned), Overlay::without, puts)?;
    // Samples that died there, and that no fragment of either side has.
    let gone = hiding(ours, &learned.and(lacking).minus(linked), Overlay::gone, puts)?;
    Ok([deleted, absent, gone].into_iter().flatten().collect())
}

/// Return whether some value of `theirs` that these overlays cover is another one in `ours`. Cost: reads values of both until one differs.
fn has_other_values(sides: &Sides, overlays: &[Overlay]) -> Result<bool> {
    let Sides { ours, theirs, .. } = sides;
    for spec in &ours.schema.columns {
        let own = overlays.iter().filter(|overlay| overlay.columns.contains(&spec.id));
        let rows = ours.context.all_row_ids(own.map(|overlay| &overlay.rows))?;
        let (mut from, mut count) = (0, 1 << 10);
        while let Some(ids) = rows.next_group(&mut from, count) {
            count *= 8;
            if !changed_values(ours, theirs, spec, &ids.into_iter().collect())?.is_empty() {
                return Ok(true);
            }
        }
    }
    Ok(false)
}

/// Refuse to link or revive samples that the branch has under other row ids, because both sides added one stage. Returns the data files that are linked.
/// Cost: reads the pages that only the branch has, and all pages of `theirs` if samples are revived.
fn check_stages(ours: &Snapshot, theirs: &Snapshot, chosen: &Linked, revived: &RowIds) -> Result<HashSet<Id>> {
    let mut linked = HashSet::new();
    linked_files(theirs, chosen, &mut |file| {
        linked.insert(file.id);
        Ok(())
    })?;
    // Fragments that replaced those of a stage have other data files.
    let mut same = Vec::new();
    for stage in theirs.stages_outside(Some(ours))? {
        if chosen.row_ids.or(&chosen.copied).count_in_runs(&stage.runs) > 0 {
            linked.insert(stage.file);
            same.push(RowIds::of_runs(stage.runs));
        }
    }
    let mut files = linked.clone();
    if !revived.is_empty() {
        theirs.each_fragment(|fragment| {
            if fragment.runs.iter().any(|run| revived.count_in(run.first..run.end()) > 0) {
                files.extend(fragment.files.iter().map(|file| file.id));
                same.push(RowIds::of_runs(fragment.runs.clone()));
            }
            Ok(())
        })?;
    }
    let known = ours.rows_of_files(Some(theirs), &files)?;
    let known: Vec<RowIds> = known.into_iter().map(|(_, runs)| RowIds::of_runs(runs)).collect();
    let twice = RowIds::union(known.iter()).minus(&RowIds::union(same.iter())).minus(&ours.not_alive()?);
    if twice.is_empty() {
        return Ok(linked);
    }
    let text = format!(
        "found conflicts: both sides added the same stage, and {} of its samples would appear twice",
        twice.len()
    );
    Err(Error::new("conflict", text)
        .row_ids(twice.examples())
        .hint("delete its samples on one side, then merge again; nothing was committed"))
}

/// List what a merge changes in its change set.
fn list_changes(
    written: &mut Written,
    proposal: &mut Proposal,
    added: &RowIds,
    (columns, changed): (Vec<u64>, RowIds),
    removed: &RowIds,
) -> Result<()> {
    let kinds = [
        (ChangeKind::Append, Vec::new(), added),
        (ChangeKind::Value, columns, &changed),
        (ChangeKind::Delete, Vec::new(), removed),
    ];
    for (kind, columns, ids) in kinds.into_iter().filter(|(_, _, ids)| !ids.is_empty()) {
        let rows = write_rows(&written.base.context, ids, &mut written.puts)?;
        if let RowSet::Object(reference) = rows {
            proposal.row_ids.insert(reference, Arc::new(ids.clone()));
        }
        proposal.own.changes.writes.push(Change { kind, columns: summary(columns), rows });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use penstock_format::schema::{ColumnKind, ColumnSpec};
    use penstock_storage::Memory;
    use penstock_tensor::Column;

    use super::*;
    use crate::{Context, Input, Isolation, Policy, Transaction, Validate, create, create_branch};

    const TEXTS: Texts = Texts { message: "", author: "test", properties: "{}" };

    fn commit(base: &Arc<Snapshot>, change: impl FnOnce(&mut Transaction) -> Result<()>) -> Result<Arc<Snapshot>> {
        let mut transaction = Transaction::begin(base.clone(), Isolation::Serializable)?;
        change(&mut transaction)?;
        Ok(Arc::new(transaction.commit("", "test", "{}")?.1))
    }

    fn cells(values: &[i32]) -> Vec<Input> {
        let data = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        vec![Input {
            name: "n".into(),
            column: Column::Fixed { data, validity: None, samples: values.len() },
            words: None,
        }]
    }

    fn started(name: &str, values: &[i32]) -> Result<Arc<Snapshot>> {
        let number = ColumnSpec::new("n", ColumnKind::Scalar { dtype: "int32".into() });
        create(Arc::new(Memory::named(name)), vec![number], "create", "test")?;
        let empty = Arc::new(Snapshot::open(Context::new(Arc::new(Memory::named(name))), 0)?);
        commit(&empty, |first| first.append(cells(values), Validate::Header).map(drop))
    }

    /// What `ours` did that keeps the merge from doing something must count as read: if it is changed, the merge has to decide again.
    #[test]
    fn what_keeps_a_merge_from_doing_something_is_read() -> Result<()> {
        type Do = fn(&mut Transaction) -> Result<()>;
        let set: Do = |tx| tx.update(&[0], cells(&[5]), Validate::Header);
        let set_more: Do = |tx| tx.update(&[0, 1], cells(&[5, 6]), Validate::Header);
        let delete: Do = |tx| tx.delete(&[0]).map(drop);
        let (fail, ours_wins) = (Policy::Fail, Policy::Ours);
        let cases: [(&str, Policy, [Do; 3], bool); 6] = [
            (
                "both set it, then another value",
                fail,
                [set_more, set, |tx| tx.update(&[0], cells(&[9]), Validate::Header)],
                true,
            ),
            ("both set it, then a deletion", fail, [set_more, set, delete], true),
            (
                "both set it, then another sample",
                fail,
                [set_more, set, |tx| tx.update(&[2], cells(&[9]), Validate::Header)],
                false,
            ),
            (
                "both set it, then an append",
                fail,
                [set_more, set, |tx| tx.append(cells(&[9]), Validate::Header).map(drop)],
                false,
            ),
            (
                "kept as changed, then as before",
                ours_wins,
                [delete, set, |tx| tx.update(&[0], cells(&[1]), Validate::Header)],
                true,
            ),
            (
                "deleted, then another sample",
                ours_wins,
                [delete, set, |tx| tx.update(&[1], cells(&[9]), Validate::Header)],
                false,
            ),
        ];
        for (what, policy, [theirs, ours, later], conflicts) in cases {
            let base = started(&format!("merge reads {what}"), &[1, 2, 3])?;
            let branch = Arc::new(create_branch(&base, "side", "test")?);
            let (theirs, ours) = (commit(&branch, theirs)?, commit(&base, ours)?);
            let mut written = Written::at(&ours)?;
            let bases = merge_bases(ours.context.storage.as_ref(), &ours.entry, &theirs.entry)?;
            let policies = Policies::new(policy, Vec::new());
            let (mut proposal, _) = three_way(&mut written, Taken::Merged, &bases, &theirs.entry, &policies, TEXTS)?;
            proposal.features |= FEATURE_MERGES;
            proposal.theirs.parent = Some((theirs.entry.as_parent(), theirs.record().time_us));
            commit(&ours, later)?;
            let code = written.commit(proposal).err().map(|error| error.code());
            assert_eq!(code, conflicts.then_some("conflict"), "{what}");
        }
        Ok(())
    }
}
