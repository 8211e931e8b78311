//! Find out what a merge changes: compare what both sides did since their common ancestor, by sample and by column. Manifests are compared
//! first, and values only where both sides may have changed them.

use std::collections::HashSet;
use std::sync::Arc;

use penstock_error::Result;
use penstock_format::overlay::Overlay;
use penstock_format::rows::{RowIds, RowSet};
use penstock_format::schema::{ColumnSpec, Schema};

use super::clashes::{ByPolicy, Clash, Clashing, error};
use super::policy::{Policies, Policy};
use crate::commit::changes::{NO_COLUMN, RowsRead};
use crate::snapshot::Snapshot;
use crate::upkeep::diff::{Unshared, changed_rows, changed_values, moved_rows};

/// Three snapshots of one dataset: a common ancestor, and two that were made from it.
pub struct Sides {
    pub base: Arc<Snapshot>,
    pub ours: Arc<Snapshot>,
    pub theirs: Arc<Snapshot>,
    /// The columns that the ancestor, `ours` and `theirs` had before all three got the merged schema.
    pub columns: [HashSet<u64>; 3],
}

/// The samples that a merge adds to `ours` or removes from it.
#[derive(Default)]
pub struct MergedSamples {
    /// Samples whose fragments `ours` lacks.
    pub added: RowIds,
    pub removed: RowIds,
    /// Samples that are hidden in a fragment of `ours`, and get a position.
    pub revived: RowIds,
}

/// Which changes of `theirs` the branch gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    /// All of them. The branch then knows which samples `theirs` had and deleted.
    Merged,
    /// Those of one commit, whose ancestor need not be an ancestor of the branch.
    Copied,
}

/// The values that a merge takes from `theirs`: overlays that apply unchanged, or samples by column.
pub enum MergedValues {
    Overlays(Vec<Overlay>),
    Samples(Vec<(ColumnSpec, RowIds)>),
}

/// What a merge changes, and what it found that `ours` has in the same way.
pub struct Decided {
    pub samples: MergedSamples,
    pub values: MergedValues,
    /// What `ours` did that keeps the merge from doing something: the same as `theirs`, or values for which a policy decides. If `ours` changes it before
    /// the merge is committed, the merge decides again.
    pub reads: Vec<RowsRead>,
}

/// The same as `Decided`, with values that are copied by sample.
type BySample = (MergedSamples, Vec<(ColumnSpec, RowIds)>, Vec<RowsRead>);

/// What both sides did to samples and to values since the ancestor.
pub struct Comparison<'a> {
    sides: &'a Sides,
    taken: Taken,
    ours: Unshared,
    theirs: Unshared,
    /// Row ids that `ours` has in no fragment.
    pub lacking: RowIds,
    /// Samples that only `theirs` knows. They never lived in `ours`.
    unknown: RowIds,
    /// Samples that no ancestor and only one side knows, and that this side deleted. The other side has them under the same row ids.
    died: [RowIds; 2],
    /// Samples that only `ours` has. `theirs` may have deleted them.
    own: RowIds,
    /// Samples that only `theirs` has. `ours` may have deleted them.
    missing: RowIds,
    columns: Vec<Candidates<'a>>,
}

/// The samples whose values in a column may have changed on each side.
struct Candidates<'a> {
    spec: &'a ColumnSpec,
    ours: RowIds,
    theirs: RowIds,
    added: AddedBy,
}

/// Which sides added a column since the ancestor. A column that both have was copied from one to the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AddedBy {
    Nobody,
    Ours,
    Theirs,
    Both,
}

impl Sides {
    /// Compare snapshots, each with the columns of its own schema.
    pub fn new(base: Arc<Snapshot>, ours: Arc<Snapshot>, theirs: Arc<Snapshot>) -> Sides {
        let columns =
            [&base, &ours, &theirs].map(|snapshot| snapshot.schema.columns.iter().map(|spec| spec.id).collect());
        Sides { base, ours, theirs, columns }
    }

    /// Give all three snapshots the merged schema.
    pub fn with_schema(self, schema: Arc<Schema>) -> Sides {
        let Sides { base, ours, theirs, columns } = self;
        let [base, ours, theirs] =
            [&base, &ours, &theirs].map(|snapshot| Arc::new(snapshot.with_schema(schema.clone(), &[&ours, &theirs])));
        Sides { base, ours, theirs, columns }
    }
}

impl<'a> Candidates<'a> {
    fn of(sides: &Sides, spec: &'a ColumnSpec) -> Result<Candidates<'a>> {
        let Sides { base, ours, theirs, .. } = sides;
        let [before, own, other] = [0, 1, 2].map(|side| sides.columns[side].contains(&spec.id));
        let (added, ours, theirs) = match (before, own, other) {
            (true, ..) => {
                // Of samples that the ancestor lacks, both sides may have other values in fragments since a layout.
                let moved = moved_rows(ours, theirs, spec.id)?;
                (
                    AddedBy::Nobody,
                    changed_rows(base, ours, spec.id)?.or(&moved),
                    changed_rows(base, theirs, spec.id)?.or(&moved),
                )
            }
            (_, true, false) => (AddedBy::Ours, changed_rows(base, ours, spec.id)?, RowIds::default()),
            // Without an ancestor, all values of the other side count.
            (_, false, _) => (AddedBy::Theirs, RowIds::default(), changed_rows(ours, theirs, spec.id)?),
            (_, true, true) => {
                let either = changed_rows(ours, theirs, spec.id)?;
                (AddedBy::Both, either.clone(), either)
            }
        };
        Ok(Candidates { spec, ours, theirs, added })
    }
}

impl<'a> Comparison<'a> {
    /// Cost: reads the manifest pages and sets of row ids in which the snapshots differ.
    pub fn of(sides: &'a Sides, taken: Taken) -> Result<Comparison<'a>> {
        let Sides { base, ours, theirs, .. } = sides;
        let Unshared { rows: lacking, known: unknown, removed: own, added: missing } = Unshared::between(ours, theirs)?;
        let columns = ours.schema.columns.iter().map(|spec| Candidates::of(sides, spec)).collect::<Result<_>>()?;
        let (ours, theirs) = (Unshared::between(base, ours)?, Unshared::between(base, theirs)?);
        let died = match taken {
            Taken::Merged => [ours.died().and(&theirs.added), theirs.died().and(&ours.added)],
            Taken::Copied => Default::default(),
        };
        Ok(Comparison { sides, taken, lacking, unknown, died, own, missing, ours, theirs, columns })
    }

    /// Return the row ids in fragments that `theirs` got since the ancestor, hidden ones included.
    pub fn new_there(&self) -> &RowIds {
        &self.theirs.rows
    }

    /// Return the samples that `theirs` got and deleted since the ancestor, and that never lived in `ours`. The branch learns of their deletion.
    pub fn learned(&self) -> RowIds {
        match self.taken {
            Taken::Merged => self.theirs.died().and(&self.unknown),
            Taken::Copied => RowIds::default(),
        }
    }

    /// Return the samples that `theirs` has and that stay hidden in fragments of `ours`. The branch must not get values of them: a later merge would
    /// take these for the values before the deletion.
    fn buried(&self, revived: &RowIds) -> RowIds {
        self.missing.minus(&self.lacking).minus(revived)
    }

    /// Return the samples that `theirs` has added since the ancestor.
    pub fn added(&self) -> &RowIds {
        &self.theirs.added
    }

    /// Return the samples that `theirs` has deleted since the ancestor.
    pub fn removed(&self) -> &RowIds {
        &self.theirs.removed
    }

    /// Return the columns that `theirs` may have changed, and the samples.
    pub fn changed(&self) -> (Vec<u64>, RowIds) {
        let changed = || self.columns.iter().filter(|column| !column.theirs.is_empty());
        (changed().map(|column| column.spec.id).collect(), RowIds::union(changed().map(|column| &column.theirs)))
    }

    /// Decide what the merge changes, without linking overlays. `others` are comparisons with other common ancestors. If they lead to other
    /// results, the policies decide.
    pub fn decide_among(&self, others: &[Comparison], policies: &Policies) -> Result<Decided> {
        let Sides { ours, theirs, .. } = self.sides;
        let (mut samples, mut values, mut reads) = self.decide_values(self.samples(), policies)?;
        let (mut clashes, mut unclear) = (Vec::new(), RowIds::default());
        // What died there is read only if the branch learns of it by each comparison.
        let all: Vec<RowIds> = others.iter().chain([self]).map(Comparison::learned).collect();
        let died = RowIds::union(all.iter());
        let dead = died.minus(&all.iter().fold(self.learned(), |both, other| both.and(other)));
        for other in others {
            let (other_samples, other_values, other_reads) = other.decide_values(other.samples(), policies)?;
            reads.extend(other_reads);
            let pairs = [(&samples.added, &other_samples.added), (&samples.removed, &other_samples.removed)];
            for (one, other) in pairs.into_iter().chain([(&samples.revived, &other_samples.revived)]) {
                unclear = unclear.or(&one.minus(other)).or(&other.minus(one));
            }
            for ((spec, rows), (_, others)) in values.iter_mut().zip(other_values) {
                let differing =
                    changed_values(ours, theirs, spec, &rows.minus(&others).or(&others.minus(rows)).minus(&died))?;
                match policies.of(spec.id) {
                    Policy::Theirs => *rows = rows.or(&others),
                    Policy::Ours => *rows = rows.minus(&differing),
                    Policy::Fail if differing.is_empty() => {}
                    Policy::Fail => clashes.push(Clash::changed(spec, differing)),
                }
            }
        }
        match policies.others {
            _ if unclear.is_empty() => {}
            Policy::Fail => clashes.push(Clash { column: String::new(), rows: unclear, what: Clashing::Deleted }),
            Policy::Ours => {
                let MergedSamples { added, removed, revived } = samples;
                samples = MergedSamples {
                    added: added.minus(&unclear),
                    removed: removed.minus(&unclear),
                    revived: revived.minus(&unclear),
                };
                values.iter_mut().for_each(|(_, rows)| *rows = rows.minus(&unclear));
            }
            Policy::Theirs => {
                let gained = unclear.and(&self.missing);
                samples.added = samples.added.or(&gained.and(&self.lacking));
                samples.revived = samples.revived.or(&gained.minus(&self.lacking));
                samples.removed = samples.removed.minus(&unclear).or(&unclear.and(&self.own));
                values.iter_mut().for_each(|(_, rows)| *rows = rows.or(&gained));
            }
        }
        if !clashes.is_empty() {
            return Err(error(&clashes));
        }
        values.iter_mut().for_each(|(_, rows)| *rows = rows.minus(&dead));
        Ok(Decided { samples, values: MergedValues::Samples(values), reads })
    }

    /// Decide what the merge changes. `linked` are the row ids of the fragments that `ours` gets for the samples added by `theirs`. Cost:
    /// reads the values that both sides may have changed, in all three snapshots.
    pub fn decide(&self, linked: &RowIds, policies: &Policies) -> Result<Decided> {
        let samples = self.samples();
        if let Some(overlays) = self.unchanged_overlays(linked, &samples)? {
            return Ok(Decided { samples, values: MergedValues::Overlays(overlays), reads: self.read_as_removed() });
        }
        let (samples, values, reads) = self.decide_values(samples, policies)?;
        Ok(Decided { samples, values: MergedValues::Samples(values), reads })
    }

    /// Return the samples that `ours` deleted, and that `theirs` deleted or may have changed, as a read of their existence.
    fn read_as_removed(&self) -> Vec<RowsRead> {
        let rows = self.ours.removed.and(&self.theirs.removed.or(&self.changed().1));
        RowsRead::of_column(NO_COLUMN, &rows).into_iter().collect()
    }

    /// Return the samples that the merge adds or removes, if no policy decides otherwise.
    fn samples(&self) -> MergedSamples {
        let (ours, theirs, [_, died]) = (&self.ours, &self.theirs, &self.died);
        // A sample that `ours` got from elsewhere and then deleted remains deleted. One that never lived in `ours` was not deleted there.
        let back = theirs.added.minus(&self.unknown).minus(&ours.added).minus(&ours.known);
        let revived = theirs.added.and(&self.unknown).minus(&self.lacking).or(&back);
        MergedSamples {
            added: theirs.added.and(&self.lacking),
            removed: theirs.removed.minus(&ours.removed).or(died),
            revived,
        }
    }

    /// Return the overlays of `theirs` if they apply unchanged: no sample has changes on both sides, and `ours` gets all of their samples.
    fn unchanged_overlays(&self, linked: &RowIds, samples: &MergedSamples) -> Result<Option<Vec<Overlay>>> {
        let Sides { base, ours, theirs, .. } = self.sides;
        let is_new = |overlay: &Overlay| !base.overlays.have(overlay) && !ours.overlays.have(overlay);
        let values: Vec<(&Overlay, bool)> = theirs
            .overlays
            .all()
            .iter()
            .filter(|overlay| overlay.has_values())
            .map(|overlay| (overlay, is_new(overlay)))
            .collect();
        if self.hides_shared(&values)? {
            return Ok(None);
        }
        let exists = |column: &u64| ours.schema.has_column(*column);
        let is_wanted = |(overlay, is_new): &(&Overlay, bool)| *is_new && overlay.columns.iter().any(exists);
        let overlays: Vec<Overlay> = values.into_iter().filter(is_wanted).map(|(overlay, _)| overlay.clone()).collect();
        // A copy that left a column out may have linked an overlay with its values.
        let is_left_out = |column: &u64| exists(column) && !self.sides.columns[2].contains(column);
        if overlays.iter().any(|overlay| overlay.columns.iter().any(is_left_out)) {
            return Ok(None);
        }
        let sets = theirs.context.row_ids(overlays.iter().map(|overlay| &overlay.rows))?;
        let absent = self.lacking.minus(linked);
        let on_both = self.ours.added.and(&self.theirs.added).or(&RowIds::union(self.died.iter()));
        let is_changed_on_one_side = |column: &Candidates| {
            let of_column = overlays.iter().zip(&sets).filter(|(overlay, _)| overlay.columns.contains(&column.spec.id));
            let all = RowIds::union(of_column.map(|(_, rows)| rows.as_ref()));
            column.theirs.minus(&all).is_empty()
                && ![&all, &self.theirs.removed, &samples.added].into_iter().any(|rows| rows.meets(&column.ours))
                && !column.theirs.meets(&self.ours.removed)
                && !on_both.meets(&column.ours.or(&column.theirs))
        };
        // A copy leaves out what died in its commit.
        let dead = if self.taken == Taken::Copied { self.theirs.died() } else { RowIds::default() };
        let buried = self.buried(&samples.revived).or(&dead);
        let unchanged = samples.revived.is_empty()
            && !sets.iter().any(|rows| [&absent, &self.own, &buried].into_iter().any(|others| rows.meets(others)))
            && self.columns.iter().all(is_changed_on_one_side);
        if !unchanged {
            return Ok(None);
        }
        // What both sides have of a column that the ancestor lacks is a change beside a deletion, too.
        for column in self.columns.iter().filter(|column| column.added != AddedBy::Nobody) {
            for (side, removed) in [(theirs, &self.ours.removed), (ours, &self.theirs.removed)] {
                if !removed.is_empty() && changed_rows(base, side, column.spec.id)?.meets(removed) {
                    return Ok(None);
                }
            }
        }
        Ok(Some(overlays))
    }

    /// Return whether a new overlay of `theirs` has values that a later, shared one replaces. On top of `ours`, it would hide that one. Roots
    /// of one side may have joined overlays that the other side has one by one. `values` are its overlays, and whether each is new.
    fn hides_shared(&self, values: &[(&Overlay, bool)]) -> Result<bool> {
        let theirs = &self.sides.theirs;
        for (index, (overlay, _)) in values.iter().enumerate().filter(|(_, (_, is_new))| *is_new) {
            let has_common_cells = |(later, is_new): &&(&Overlay, bool)| {
                let (one, other) = (overlay.rows.range(), later.rows.range());
                !is_new
                    && overlay.columns.iter().any(|column| later.columns.contains(column))
                    && one.start < other.end
                    && other.start < one.end
            };
            let later: Vec<&RowSet> =
                values[index + 1..].iter().filter(has_common_cells).map(|(later, _)| &later.rows).collect();
            if later.is_empty() {
                continue;
            }
            let own = theirs.context.all_row_ids([&overlay.rows])?;
            if theirs.context.row_ids(later)?.iter().any(|shared| own.meets(shared)) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Return the values that the merge takes, by column, and what both sides did alike.
    fn decide_values(&self, mut samples: MergedSamples, policies: &Policies) -> Result<BySample> {
        let Sides { base, ours, theirs, .. } = self.sides;
        let on_both = self.ours.added.and(&self.theirs.added);
        let mut reads = self.read_as_removed();
        let (mut clashes, mut values) = (Vec::new(), Vec::new());
        // Samples that one side deleted and the other one changed, by the policy of the changed column.
        let lacking = if self.taken == Taken::Copied { Clashing::Lacking } else { Clashing::Deleted };
        let (mut kept_by_ours, mut kept_by_theirs) = (ByPolicy::new(Clashing::Deleted), ByPolicy::new(lacking));
        for Candidates { spec, ours: own, theirs: other, added } in &self.columns {
            let policy = policies.of(spec.id);
            let either = either_side(own, other, *added);
            let (changed, own_changed, unclear) = match added {
                AddedBy::Nobody => {
                    let changed = changed_values(base, theirs, spec, other)?;
                    let own_changed = changed_values(base, ours, spec, &own.and(&changed))?;
                    let unclear = changed.and(&own_changed).or(&either.and(&on_both));
                    (changed, own_changed, changed_values(ours, theirs, spec, &unclear)?)
                }
                AddedBy::Ours => Default::default(),
                AddedBy::Theirs => (changed_values(ours, theirs, spec, other)?, RowIds::default(), RowIds::default()),
                AddedBy::Both => (RowIds::default(), RowIds::default(), changed_values(ours, theirs, spec, &either)?),
            };
            // A backfill computes what was never given, so a null that was given is a change.
            let changed = changed.or(&theirs.given_nulls(spec, other, ours)?);
            let alike = if *added == AddedBy::Both {
                either.clone()
            } else {
                changed.and(&own_changed).or(&either.and(&on_both))
            };
            reads.extend(RowsRead::of_column(spec.id, &alike));
            let [died_here, died_there] = self.changed_before(spec)?;
            let changed_here = self.changed_since(ours, spec, &self.theirs.removed)?.or(&died_there);
            reads.extend(RowsRead::of_column(spec.id, &changed_here));
            kept_by_ours.add(policy, &spec.name, changed_here);
            let changed_there = self.changed_since(theirs, spec, &self.ours.removed)?.or(&died_here);
            kept_by_theirs.add(policy, &spec.name, changed_there);
            let mut taken = vec![changed.minus(&own_changed).minus(&self.ours.removed)];
            taken.extend([either.and(&samples.added), either.and(&samples.revived)]);
            // A later merge compares the values that a sample had before it was deleted.
            taken.push(either.and(&self.learned()));
            match policy {
                Policy::Theirs => taken.push(unclear),
                Policy::Fail if !unclear.is_empty() => clashes.push(Clash::changed(spec, unclear)),
                _ => {}
            }
            values.push(((*spec).clone(), RowIds::union(taken.iter())));
        }
        let (ours_wins, _) = kept_by_ours.decide(&mut clashes);
        samples.removed = samples.removed.minus(&ours_wins);
        let (_, theirs_wins) = kept_by_theirs.decide(&mut clashes);
        samples.revived = samples.revived.or(&theirs_wins.minus(&self.lacking));
        samples.added = samples.added.or(&theirs_wins.and(&self.lacking));
        let buried = self.buried(&samples.revived);
        for ((_, taken), Candidates { ours: own, theirs: other, added, .. }) in values.iter_mut().zip(&self.columns) {
            *taken = taken.or(&either_side(own, other, *added).and(&theirs_wins)).minus(&buried);
        }
        if !clashes.is_empty() {
            return Err(error(&clashes));
        }
        Ok((samples, values, reads))
    }

    /// Return which of some samples have another value than in the ancestor. The values of an added column are compared with its fill value.
    fn changed_since(&self, side: &Arc<Snapshot>, spec: &ColumnSpec, rows: &RowIds) -> Result<RowIds> {
        let base = &self.sides.base;
        if rows.is_empty() {
            Ok(RowIds::default())
        } else {
            changed_values(base, side, spec, &changed_rows(base, side, spec.id)?.and(rows))
        }
    }

    /// Return the samples that one side deleted, although no ancestor knows them, and that have another value in the other side: those that `ours`
    /// deleted, and those that `theirs` deleted. The values before the deletion count. A side that lacks the column has changed nothing in it.
    fn changed_before(&self, spec: &ColumnSpec) -> Result<[RowIds; 2]> {
        let Sides { ours, theirs, columns: [_, own, other], .. } = self.sides;
        let changed = |died: &RowIds, there: &Arc<Snapshot>, living: &Arc<Snapshot>, columns: &HashSet<u64>| {
            if died.is_empty() || !columns.contains(&spec.id) {
                return Ok(RowIds::default());
            }
            // The values of samples that no fragment has any more may have been others.
            let gone = there.overlay_rows(Overlay::is_gone)?.and(died);
            let candidates = changed_rows(ours, theirs, spec.id)?.and(died);
            Ok(changed_values(&Arc::new(there.with_hidden()), living, spec, &candidates)?.or(&gone))
        };
        let [here, there] = &self.died;
        Ok([changed(here, ours, theirs, other)?, changed(there, theirs, ours, own)?])
    }
}

/// Return the samples whose value may differ between both sides. `theirs` has no values of a column that only `ours` added.
fn either_side(ours: &RowIds, theirs: &RowIds, added: AddedBy) -> RowIds {
    if added == AddedBy::Ours { RowIds::default() } else { ours.or(theirs) }
}
