//! A layout: fragments go out, others that have the same samples come in. It is applied to the state of each parent that it is tried on
//! (docs/design/0024-layouts.md).

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use penstock_error::{Error, Result};
use penstock_format::Id;
use penstock_format::files::FileRef;
use penstock_format::ids::{ObjectRef, stages_name};
use penstock_format::manifest::{Fragment, Staged, encode_stages};
use penstock_format::overlay::Overlay;
use penstock_format::rows::{RowIds, RowSet};

use super::objects::{write_object, write_rows};
use crate::log::records::LogEntry;
use crate::snapshot::Snapshot;
use crate::snapshot::live::ManifestPart;
use crate::store::context::Context;

/// Neighbouring fragments, and those that take their place.
#[derive(Debug, Clone)]
pub struct ReplacedFragments {
    /// At least one, in manifest order.
    pub out: Vec<Fragment>,
    /// They have the row ids of `out` in the same order, without those that are dropped.
    pub fragments: Vec<Fragment>,
}

/// What a layout changes.
#[derive(Debug, Clone, Default)]
pub struct Layout {
    pub groups: Vec<ReplacedFragments>,
    /// The ids of the overlays with values that the layout has seen, and of those that the new fragments have.
    pub seen: HashSet<Id>,
    pub folded: HashSet<Id>,
    /// Overlays that come after those it has seen: samples that were given a null, for which a fragment has no form of its own.
    pub nulls: Vec<Overlay>,
    /// Samples that were deleted, and that the new fragments lack.
    pub deleted: RowIds,
    /// Absent samples that the new fragments lack.
    pub absent: RowIds,
}

impl Layout {
    /// Return how many samples are dropped.
    pub fn dropped(&self) -> u64 {
        self.deleted.len() + self.absent.len()
    }

    /// Return the row ids of the fragments that go out.
    pub fn rows(&self) -> RowIds {
        RowIds::of_runs(
            self.groups.iter().flat_map(|group| &group.out).flat_map(|fragment| &fragment.runs).copied().collect(),
        )
    }

    /// Return the snapshot of a record that follows `parent` with this layout. Fails with `conflict` if the parent lacks one of the fragments. Cost:
    /// reads the pages with the fragments that go out, and writes up to four objects.
    pub fn applied(&self, parent: &Snapshot, entry: LogEntry, puts: &mut Vec<String>) -> Result<Snapshot> {
        let parts = self.parts(parent)?;
        let overlays = self.overlays(parent, puts)?;
        let mut next = parent.replaced(parts, overlays, &[]);
        next.stages = self.stages(&parent.context, &parent.stages, puts)?;
        if (next.record().samples, next.record().live) != (entry.record.samples, entry.record.live) {
            return Err(moved("samples that this layout drops are alive"));
        }
        next.entry = entry;
        Ok(next)
    }

    fn parts(&self, parent: &Snapshot) -> Result<Vec<ManifestPart>> {
        let rows = self.rows();
        let first_of = |fragment: &Fragment| fragment.runs.first().map(|run| run.first);
        let mut groups: HashMap<Option<u64>, &ReplacedFragments> =
            self.groups.iter().map(|group| (first_of(&group.out[0]), group)).collect();
        let mut parts = Vec::new();
        // The fragments that are expected next.
        let mut rest: &[Fragment] = &[];
        for (index, part) in parent.parts.iter().enumerate() {
            if part.page().is_some_and(|page| rows.count_in(page.least..page.least + page.span) == 0) && rest.is_empty()
            {
                parts.push(part.clone());
                continue;
            }
            part.page().iter().try_for_each(|page| parent.context.carry_statistics(page))?;
            for fragment in parent.fragments(index)?.as_slice() {
                if rest.is_empty()
                    && let Some(group) = groups.remove(&first_of(fragment))
                {
                    rest = &group.out;
                    parts.extend(group.fragments.iter().cloned().map(Arc::new).map(ManifestPart::Fragment));
                }
                match rest.split_first() {
                    None => parts.push(ManifestPart::Fragment(Arc::new(fragment.clone()))),
                    Some((expected, later)) if is_same(expected, fragment) => rest = later,
                    Some(_) => return Err(moved("it has other fragments with the same samples")),
                }
            }
        }
        if groups.is_empty() && rest.is_empty() { Ok(parts) } else { Err(moved("it lacks their fragments")) }
    }

    fn overlays(&self, parent: &Snapshot, puts: &mut Vec<String>) -> Result<Vec<Overlay>> {
        let (context, all) = (&parent.context, &parent.overlays);
        let deleted = parent.overlay_rows(Overlay::is_deletion)?;
        if !self.deleted.minus(&deleted).is_empty() {
            return Err(moved("samples that this layout drops are alive"));
        }
        let absent = parent.overlay_rows(Overlay::is_absence)?;
        let gone = parent.overlay_rows(Overlay::is_gone)?;
        let mut overlays = Vec::new();
        let mut list = |ids: RowIds, of: fn(RowSet) -> Overlay| -> Result<()> {
            if !ids.is_empty() {
                overlays.push(of(write_rows(context, &ids, puts)?));
            }
            Ok(())
        };
        list(deleted.minus(&self.deleted), Overlay::deleting)?;
        list(absent.minus(&self.absent), Overlay::without)?;
        list(gone.or(&self.deleted), Overlay::gone)?;
        let values: Vec<&Overlay> = all.all().iter().filter(|overlay| overlay.has_values()).collect();
        // Later ones are newer. Those that a root has joined have the newest values of both.
        let seen = values.iter().rposition(|overlay| self.seen.contains(&overlay.id)).map_or(0, |last| last + 1);
        let (seen, newer) = values.split_at(seen);
        overlays.extend(seen.iter().copied().filter(|overlay| !self.folded.contains(&overlay.id)).cloned());
        overlays.extend(self.nulls.iter().chain(newer.iter().copied()).cloned());
        Ok(overlays)
    }

    /// Note the stages whose fragments go out. Small objects are joined, so there are few.
    fn stages(&self, context: &Context, before: &[ObjectRef], puts: &mut Vec<String>) -> Result<Vec<ObjectRef>> {
        let out = self.groups.iter().flat_map(|group| &group.out).filter(|fragment| fragment.is_stage);
        let named =
            |fragment: &Fragment| Some(Staged { file: fragment.files.first()?.id, runs: fragment.runs.clone() });
        let mut staged: Vec<Staged> = out.filter_map(named).collect();
        let mut all = before.to_vec();
        if staged.is_empty() {
            return Ok(all);
        }
        let mut bytes = encode_stages(&staged).len() as u64;
        while let Some(last) = all.pop_if(|last| last.bytes <= JOINED * bytes) {
            bytes += last.bytes;
            staged.extend(context.stages(&last)?);
        }
        staged.sort_by_key(|stage| stage.file.0);
        // Both sides of a merge may have noted the same stage, perhaps with other row ids.
        staged.dedup_by(|other, kept| {
            let is_same = other.file == kept.file;
            if is_same {
                let runs = RowIds::of_runs(kept.runs.iter().chain(&other.runs).copied().collect());
                kept.runs = runs.runs().collect();
            }
            is_same
        });
        let body = encode_stages(&staged);
        let id = write_object(context, stages_name, &body, puts)?;
        all.push(ObjectRef::of(id, &body));
        Ok(all)
    }
}

/// An object with stages is joined with later ones that have at least this part of its size.
const JOINED: u64 = 8;

/// Return whether two fragments have the same samples in the same files. Where the bytes of a small file are may differ.
pub fn is_same(one: &Fragment, other: &Fragment) -> bool {
    let files = |fragment: &Fragment| fragment.files.iter().map(|file: &FileRef| file.id).collect::<Vec<_>>();
    one.runs == other.runs && files(one) == files(other)
}

/// Make the error for a state to which the layout does not apply.
fn moved(why: &str) -> Error {
    Error::new(
        "conflict",
        format!("cannot commit: another commit, made in the meantime, moved or revived samples: {why}"),
    )
    .hint("refresh the handle, and compact again")
}
