//! Merge the schemas of two sides, so that samples can be compared column by column.

use std::sync::Arc;

use penstock_error::{Error, Result};
use penstock_format::files::FileRef;
use penstock_format::rows::RowIds;
use penstock_format::schema::{ColumnSpec, Schema};

use super::policy::{Policies, Policy};
use super::three_way::{Sides, Taken};
use crate::log::records::LogEntry;
use crate::snapshot::Snapshot;
use crate::snapshot::values::file_of;
use crate::upkeep::diff::{Unshared, changed_between, changed_rows, read_as};

/// Snapshots with the merged schema, and how it differs from the schemas of both sides.
pub struct Compared {
    /// One for each common ancestor.
    pub all: Vec<Sides>,
    /// Whether the merged schema differs from that of `ours`.
    pub altered: bool,
    /// Columns of `ours` that the merged schema lacks.
    pub dropped: Vec<u64>,
    /// Columns of the merged schema that `theirs` lacks.
    pub new_there: Vec<ColumnSpec>,
}

/// Read the snapshots, and give them the merged schema. Cost: reads their roots. If both sides changed the schema, reads the values that one side
/// changed in columns that the other one dropped.
pub fn compared(
    ours: &Arc<Snapshot>,
    bases: &[LogEntry],
    theirs: &LogEntry,
    policies: &Policies,
    taken: Taken,
) -> Result<Compared> {
    let theirs = Arc::new(ours.near(theirs.clone())?);
    let sides = |base: &LogEntry| Ok(Sides::new(Arc::new(ours.near(base.clone())?), ours.clone(), theirs.clone()));
    let all = bases.iter().map(sides).collect::<Result<Vec<Sides>>>()?;
    let (mut schema, dropped) = merged_schema(&all[0], policies, taken)?;
    for other in &all[1..] {
        if merged_schema(other, policies, taken)?.1 != dropped {
            let text = "found conflicts: an older merge leaves unclear which columns were dropped";
            return Err(Error::new("conflict", text).hint("drop them on both sides, then merge again"));
        }
    }
    for other in &all[1..] {
        schema.widen_to(&other.base.schema)?;
    }
    let new_here: Vec<ColumnSpec> = schema.columns_missing_in(&ours.schema).cloned().collect();
    check_leftover(&new_here, |ids, visit| ours.each_file(Some(ids), |file, _| visit(file)))?;
    let (altered, new_there) = (schema != *ours.schema, schema.columns_missing_in(&theirs.schema).cloned().collect());
    let schema = Arc::new(schema);
    let all = all.into_iter().map(|sides| sides.with_schema(schema.clone())).collect();
    Ok(Compared { all, altered, dropped, new_there })
}

/// Return the merged schema, and the columns of `ours` that it lacks. If one side dropped a column in which the other one changed values, the
/// policy must be that of the side that dropped it: the other side's root may lack the older values.
fn merged_schema(sides: &Sides, policies: &Policies, taken: Taken) -> Result<(Schema, Vec<u64>)> {
    let Sides { base, ours, theirs, .. } = sides;
    for spec in &base.schema.columns {
        let (kept, policy, word) = match (ours.schema.has_column(spec.id), theirs.schema.has_column(spec.id)) {
            (true, false) => (ours, Policy::Theirs, "theirs"),
            (false, true) => (theirs, Policy::Ours, "ours"),
            _ => continue,
        };
        if policies.of(spec.id) == policy {
            continue;
        }
        let changed = match read_as(base, kept, spec.id) {
            Some(specs) => changed_between(base, kept, &specs, &changed_rows(base, kept, spec.id)?)?,
            None => RowIds::default(),
        };
        let changed = changed.or(&given(base, kept, spec)?);
        if !changed.is_empty() {
            return Err(lost_values(spec, &changed, word, taken));
        }
    }
    let merged = Schema::merged(&base.schema, &ours.schema, &theirs.schema)?;
    let dropped = ours.schema.columns_missing_in(&merged).map(|spec| spec.id).collect();
    Ok((merged, dropped))
}

/// Make the error for values of a column that only one side has. `word` is the policy that drops them.
fn lost_values(spec: &ColumnSpec, changed: &RowIds, word: &str, taken: Taken) -> Error {
    let (name, count) = (&spec.name, changed.len());
    let text = match (taken, word) {
        (Taken::Copied, "ours") => {
            format!("the commit changed or added {count} values of column `{name}`, which this branch lacks")
        }
        _ => format!("one side dropped column `{name}`, and the other one changed or added {count} values"),
    };
    let hint = match (taken, word) {
        (Taken::Copied, "ours") => "leaves these values out; or copy the commit that added the column first",
        _ => "drops it",
    };
    Error::new("conflict", format!("found conflicts: {text}"))
        .column(name)
        .row_ids(changed.examples())
        .hint(format!("on_conflict=\"{word}\", for this column or for all, {hint}; nothing was committed"))
}

/// Return the samples that the ancestor lacks and that have a value in a column, since they were appended or later. Cost: reads the pages with
/// these samples, and the row ids of the column's overlays.
fn given(base: &Snapshot, kept: &Snapshot, spec: &ColumnSpec) -> Result<RowIds> {
    let added = Unshared::between(base, kept)?.added;
    if added.is_empty() {
        return Ok(added);
    }
    let mut found = kept.overlay_rows(|overlay| overlay.columns.contains(&spec.id))?.and(&added);
    for (index, part) in kept.parts.iter().enumerate() {
        if part.page().is_some_and(|page| added.count_in(page.least..page.least + page.span) == 0) {
            continue;
        }
        let fragments = kept.fragments(index)?;
        for fragment in fragments.as_slice().iter().filter(|fragment| file_of(&fragment.files, spec.id).is_some()) {
            found = found.or(&RowIds::of_runs(fragment.runs.clone()).and(&added));
        }
    }
    Ok(found)
}

/// Refuse to bring back columns that one side dropped earlier: its files still have values of them, but not the newest ones.
pub fn check_leftover(
    columns: &[ColumnSpec],
    each: impl FnOnce(&[u64], &mut dyn FnMut(&FileRef) -> Result<()>) -> Result<()>,
) -> Result<()> {
    if columns.is_empty() {
        return Ok(());
    }
    let ids: Vec<u64> = columns.iter().map(|spec| spec.id).collect();
    each(&ids, &mut |file| match columns.iter().find(|spec| file.columns.contains(&spec.id)) {
        None => Ok(()),
        Some(spec) => {
            let text = format!(
                "found conflicts: column `{}` was dropped on one side earlier, or left out of a copy, and would come back with old values",
                spec.name
            );
            let hint = "merge the other way round first, or drop the column on the other side as well";
            Err(Error::new("conflict", text).column(&spec.name).hint(hint))
        }
    })
}
