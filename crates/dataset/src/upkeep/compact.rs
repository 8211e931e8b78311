//! Write small and worn fragments again as few large ones, with the newest values and without deleted samples. Row ids stay.
//!
//! What is written becomes one layout commit (docs/design/0024-layouts.md).

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use penstock_error::{Kind, Result};
use penstock_format::datafile::TAIL_BYTES;
use penstock_format::files::FileRef;
use penstock_format::ids::Run;
use penstock_format::manifest::{FRAGMENT_RUNS, Fragment};
use penstock_format::overlay::Overlay;
use penstock_format::record::{Change, ChangeKind, FEATURE_OVERLAYS, RecordKind};
use penstock_format::rows::{RowIds, RowSet};
use penstock_format::schema::ColumnSpec;

use crate::commit::changes::Proposal;
use crate::commit::manifest::layout::{Layout, ReplacedFragments};
use crate::commit::manifest::objects::write_rows;
use crate::commit::manifest::rewrite::{PlacedRun, Rewritten, rewritten};
use crate::commit::written::{Texts, Written, commit_to_newest};
use crate::snapshot::Snapshot;
use crate::snapshot::values::file_of;

/// A fragment with fewer bytes is joined with its neighbours. A larger one keeps the files whose columns stay the same.
const SMALL_BYTES: u64 = 32 << 20;
/// A fragment is written again if more than this part of its samples is deleted or absent.
const DEAD: u64 = 10;
/// The number of lost races after which `compact` fails with `conflict`.
const RACES: u32 = 20;

/// What `compact` did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Compacted {
    /// How many fragments and overlays were replaced.
    pub fragments: u64,
    pub overlays: u64,
    /// How many fragments, and how many bytes of data files, were written instead.
    pub new_fragments: u64,
    pub written_bytes: u64,
    /// Deleted samples that no fragment has any more.
    pub dropped: u64,
    /// Fragments that were left as they are, because their files are damaged. `verify` names them.
    pub damaged: u64,
}

/// Compact the newest snapshot of the handle's branch. Other commits may be made in the meantime. Returns the new snapshot, or the newest one if there was
/// nothing to do. Cost: reads the manifest; reads and writes the values of small and worn fragments; then a commit with a root.
pub fn compact(handle: &Arc<Snapshot>, texts: Texts) -> Result<(Snapshot, Compacted)> {
    commit_to_newest(handle, RACES, |written| {
        let Compaction { layout, features, done, .. } = compacted(written)?;
        let proposal = if layout.groups.is_empty() { None } else { Some(proposal(written, layout, features, texts)?) };
        Ok((proposal, done))
    })
}

/// Write the new fragments of a state. Nobody knows them until they are committed.
fn compacted(written: &mut Written) -> Result<Compaction> {
    let mut compaction = Compaction::new(written.base.clone())?;
    for group in compaction.groups()? {
        compaction.replace(group, &mut written.puts)?;
    }
    compaction.folded(&mut written.puts)
}

fn proposal(written: &mut Written, layout: Layout, features: u64, texts: Texts) -> Result<Proposal> {
    let mut proposal = written.proposal(RecordKind::Layout, texts, (0, 0))?;
    let ids = layout.rows();
    let rows = write_rows(&written.base.context, &ids, &mut written.puts)?;
    if let RowSet::Object(reference) = rows {
        proposal.row_ids.insert(reference, Arc::new(ids));
    }
    proposal.own.changes.writes = vec![Change { kind: ChangeKind::Layout, columns: Vec::new(), rows }];
    proposal.theirs.physical = Some(-layout.dropped().cast_signed());
    proposal.features = features | if layout.dropped() > 0 { FEATURE_OVERLAYS } else { 0 };
    proposal.layout = Some(Arc::new(layout));
    Ok(proposal)
}

/// A fragment that may be written again.
struct Candidate {
    fragment: Fragment,
    /// The positions of its live samples.
    positions: Range<u64>,
    bytes: u64,
    has_many_dead: bool,
    /// Whether many of its samples are dead, or some have newer values.
    is_worn: bool,
    /// The columns with fill values in which all of its samples were given a value. None if it has no live samples.
    filled: Option<Vec<u64>>,
}

impl Candidate {
    /// Return whether a writer may have begun another fragment because of the words or the index in this one's tails. It would do that again.
    fn is_full(&self) -> bool {
        self.fragment.files.iter().any(|file| file.tail_bytes >= TAIL_BYTES as u64 / 4 * 3)
    }
}

struct Compaction {
    base: Arc<Snapshot>,
    /// Overlays with values of columns that exist, and their row ids.
    overlays: Vec<(Overlay, Arc<RowIds>)>,
    /// The samples with newer values, by column.
    newer: HashMap<u64, RowIds>,
    /// Those whose newer values are in files of overlays that can be folded.
    stored: HashMap<u64, RowIds>,
    deleted: RowIds,
    absent: RowIds,
    /// Both of them.
    dead: RowIds,
    /// The samples whose newer values remain in overlays, by column.
    kept: HashMap<u64, Vec<RowIds>>,
    /// The samples that were given a null, by column.
    nulls: HashMap<u64, Vec<RowIds>>,
    layout: Layout,
    features: u64,
    done: Compacted,
}

impl Compaction {
    fn new(base: Arc<Snapshot>) -> Result<Compaction> {
        let exists = |column: &u64| base.schema.has_column(*column);
        let overlays =
            base.overlays.all().iter().filter(|overlay| overlay.has_values() && overlay.columns.iter().any(exists));
        let overlays: Vec<Overlay> = overlays.cloned().collect();
        let sets = base.context.row_ids(overlays.iter().map(|overlay| &overlay.rows))?;
        let overlays: Vec<(Overlay, Arc<RowIds>)> = overlays.into_iter().zip(sets).collect();
        let newer = rows_by_column(&base, &overlays, |overlay, column| overlay.columns.contains(&column));
        let deleted = base.overlay_rows(Overlay::is_deletion)?;
        let absent = base.overlay_rows(Overlay::is_absence)?;
        let seen = overlays.iter().map(|(overlay, _)| overlay.id).collect();
        let mut compaction = Compaction {
            base,
            overlays,
            newer,
            stored: HashMap::new(),
            dead: deleted.or(&absent),
            deleted,
            absent,
            kept: HashMap::new(),
            nulls: HashMap::new(),
            layout: Layout { seen, ..Layout::default() },
            features: 0,
            done: Compacted::default(),
        };
        let partial = compaction.partial()?;
        let foldable = compaction.without_older(|overlay, ids| {
            let has_partial_rows = |column: &u64| partial.get(column).is_some_and(|rows| rows.meets(ids));
            !overlay.columns.iter().any(has_partial_rows)
        });
        compaction.stored =
            rows_by_column(&compaction.base, &foldable, |overlay, column| file_of(&overlay.files, column).is_some());
        Ok(compaction)
    }

    /// Return the overlays that may go. One that stays would show its values again if a newer one of the same cells went.
    fn without_older(&self, may_go: impl Fn(&Overlay, &RowIds) -> bool) -> Vec<(Overlay, Arc<RowIds>)> {
        let mut stay: HashMap<u64, RowIds> = HashMap::new();
        let mut found = Vec::new();
        for (overlay, ids) in &self.overlays {
            let is_above = |column: &u64| stay.get(column).is_some_and(|rows| rows.meets(ids));
            if may_go(overlay, ids) && !overlay.columns.iter().any(is_above) {
                found.push((overlay.clone(), ids.clone()));
                continue;
            }
            for column in &overlay.columns {
                let rows = stay.entry(*column).or_default();
                *rows = rows.or(ids);
            }
        }
        found
    }

    /// Return the samples of fragments in which some samples were given a value later, by column with a fill value. A fragment lists such a column for
    /// all of its samples or for none, so these values remain in overlays.
    fn partial(&self) -> Result<HashMap<u64, RowIds>> {
        let with_fill: Vec<&ColumnSpec> = self.base.schema.columns.iter().filter(|spec| spec.fill.is_some()).collect();
        let mut found: HashMap<u64, Vec<Run>> = HashMap::new();
        if with_fill.iter().any(|spec| self.newer.contains_key(&spec.id)) {
            self.base.each_fragment(|fragment| {
                for spec in &with_fill {
                    let newer = self.newer.get(&spec.id).map_or(0, |newer| newer.count_in_runs(&fragment.runs));
                    if newer > 0 && !self.is_filled(spec, fragment) {
                        found.entry(spec.id).or_default().extend(&fragment.runs);
                    }
                }
                Ok(())
            })?;
        }
        Ok(found.into_iter().map(|(column, runs)| (column, RowIds::of_runs(runs))).collect())
    }

    /// Return whether all live samples of a fragment were given a value in a column with a fill value.
    fn is_filled(&self, spec: &ColumnSpec, fragment: &Fragment) -> bool {
        if file_of(&fragment.files, spec.id).is_some() {
            return true;
        }
        let Some(newer) = self.newer.get(&spec.id) else { return false };
        let given = newer.count_in_runs(&fragment.runs) - newer.and(&self.dead).count_in_runs(&fragment.runs);
        given > 0 && given == fragment.samples - self.dead.count_in_runs(&fragment.runs)
    }

    /// Return the groups of neighbouring fragments that are worth to be written again.
    fn groups(&self) -> Result<Vec<Vec<Candidate>>> {
        let (mut groups, mut position) = (Vec::<Vec<Candidate>>::new(), 0);
        // Whether the last group takes no more, and how many runs of row ids it has.
        let (mut ends, mut runs) = (true, 0);
        self.base.each_fragment(|fragment| {
            let candidate = self.candidate(fragment, &mut position);
            // Another large fragment is alone, so that its files may be kept.
            let joins = candidate.bytes < SMALL_BYTES && !candidate.is_full() || candidate.has_many_dead;
            if !joins && !candidate.is_worn || fragment.samples == 0 {
                ends = true;
                return Ok(());
            }
            let last = groups.last().and_then(|group| group.last()?.fragment.runs.last());
            let all_runs = runs + more_runs(last, &fragment.runs);
            match groups.last_mut() {
                // What has more runs is divided again.
                Some(group) if !ends && joins && all_runs <= FRAGMENT_RUNS && may_join(group, &candidate) => {
                    runs = all_runs;
                    group.push(candidate);
                }
                _ => {
                    runs = fragment.runs.len();
                    groups.push(vec![candidate]);
                }
            }
            ends = !joins;
            Ok(())
        })?;
        groups.retain(|group| group.len() > 1 || group[0].is_worn);
        Ok(groups)
    }

    fn candidate(&self, fragment: &Fragment, position: &mut u64) -> Candidate {
        let dead = self.dead.count_in_runs(&fragment.runs);
        let live = fragment.samples - dead.min(fragment.samples);
        let positions = *position..*position + live;
        *position = positions.end;
        let is_filled = |spec: &&ColumnSpec| spec.fill.is_some() && self.is_filled(spec, fragment);
        let has_many_dead = dead * DEAD > fragment.samples;
        Candidate {
            fragment: fragment.clone(),
            positions,
            bytes: fragment.files.iter().fold(0, |sum, file| sum.saturating_add(file.file_bytes)),
            has_many_dead,
            is_worn: has_many_dead || self.stored.values().any(|ids| ids.count_in_runs(&fragment.runs) > 0),
            filled: (live > 0).then(|| self.base.schema.columns.iter().filter(is_filled).map(|spec| spec.id).collect()),
        }
    }

    /// Write the samples of a group again. A group with damaged files stays as it is.
    fn replace(&mut self, group: Vec<Candidate>, puts: &mut Vec<String>) -> Result<()> {
        let rows = self.live_rows(&group);
        let ids = RowIds::of_runs(rows.iter().map(|(run, _)| *run).collect());
        let out: Vec<Fragment> = group.iter().map(|candidate| candidate.fragment.clone()).collect();
        let base = self.base.clone();
        let is_listed = |spec: &&ColumnSpec| match spec.fill {
            Some(_) => filled_of(&group).is_some_and(|filled| filled.contains(&spec.id)),
            None => {
                let is_stored = out.iter().any(|fragment| file_of(&fragment.files, spec.id).is_some());
                is_stored || self.stored.get(&spec.id).is_some_and(|newer| newer.meets(&ids))
            }
        };
        let specs: Vec<&ColumnSpec> = base.schema.columns.iter().filter(is_listed).collect();
        // The files of a large fragment whose columns stay the same, if no sample is dropped.
        let keeps = group.len() == 1 && group[0].bytes >= SMALL_BYTES && ids.len() == out[0].samples;
        let is_changed = |column: &u64| self.stored.get(column).is_some_and(|newer| newer.meets(&ids));
        let is_kept = |file: &&FileRef| {
            keeps && !file.columns.iter().any(is_changed) && specs.iter().any(|spec| file.columns.contains(&spec.id))
        };
        let mut kept: Vec<FileRef> = out[0].files.iter().filter(is_kept).cloned().collect();
        let mut written: Vec<&ColumnSpec> =
            specs.iter().copied().filter(|spec| file_of(&kept, spec.id).is_none()).collect();
        if keeps && !written.iter().any(|spec| is_changed(&spec.id)) {
            return Ok(());
        }
        let write =
            |written: &[&ColumnSpec], puts: &mut Vec<String>| rewritten(&base, written, &rows, &self.newer, puts);
        let mut result = write(&written, puts);
        if result.as_ref().is_ok_and(|done| !kept.is_empty() && done.fragments.len() != 1) {
            // The kept files have all samples of one fragment.
            (kept, written) = (Vec::new(), specs);
            result = write(&written, puts);
        }
        let Rewritten { mut fragments, features, nulls } = match result {
            Err(error) if matches!(error.kind(), Kind::Corrupt | Kind::NotFound) => {
                self.done.damaged += group.len() as u64;
                return Ok(());
            }
            other => other?,
        };
        self.done.new_fragments += fragments.len() as u64;
        self.done.written_bytes +=
            fragments.iter().flat_map(|fragment| &fragment.files).map(|file| file.file_bytes).sum::<u64>();
        fragments.iter_mut().for_each(|fragment| fragment.files.append(&mut kept));
        for spec in base.schema.columns.iter().filter(|spec| !written.iter().any(|own| own.id == spec.id)) {
            self.kept.entry(spec.id).or_default().push(ids.clone());
        }
        nulls
            .into_iter()
            .filter(|(_, ids)| !ids.is_empty())
            .for_each(|(column, ids)| self.nulls.entry(column).or_default().push(ids));
        self.features |= features;
        self.done.fragments += out.len() as u64;
        self.layout.groups.push(ReplacedFragments { out, fragments });
        Ok(())
    }

    /// Return the row ids of the live samples of a group, in order, and their positions.
    fn live_rows(&self, group: &[Candidate]) -> Vec<PlacedRun> {
        let mut rows: Vec<PlacedRun> = Vec::new();
        for Candidate { fragment, positions, .. } in group {
            let mut position = positions.start;
            for run in &fragment.runs {
                let mut first = run.first;
                let ends =
                    self.dead.runs_in(run.first..run.end()).into_iter().map(|(dead, _)| (dead.first, dead.end()));
                for (end, next) in ends.chain([(run.end(), run.end())]) {
                    if first < end {
                        let live = Run { first, count: end - first };
                        match rows.last_mut().filter(|(last, _)| last.end() == first) {
                            Some((last, _)) => last.count += live.count,
                            None => rows.push((live, position)),
                        }
                        position += live.count;
                    }
                    first = next;
                }
            }
        }
        rows
    }

    /// Note which samples were given a null, and which overlays are folded: those all of whose samples were written again with their values. A merge may
    /// revive a deleted sample with the values that it had, so those that still have a fragment count, too.
    fn folded(mut self, puts: &mut Vec<String>) -> Result<Compaction> {
        for (column, sets) in &self.nulls {
            let rows = write_rows(&self.base.context, &RowIds::union(sets.iter()), puts)?;
            self.layout.nulls.push(Overlay::of_values(vec![*column], rows, Vec::new(), || self.base.context.new_id())?);
        }
        self.layout.nulls.sort_by_key(|overlay| overlay.columns[0]);
        let out = self.layout.rows();
        let gone = self.base.overlay_rows(Overlay::is_gone)?;
        let kept: HashMap<u64, RowIds> =
            self.kept.iter().map(|(column, sets)| (*column, RowIds::union(sets.iter()))).collect();
        let folded = self.without_older(|overlay, ids| {
            let live = ids.minus(&self.dead);
            let remains = |column: &u64| kept.get(column).is_some_and(|kept| kept.meets(&live));
            ids.minus(&gone).minus(&out).is_empty() && !overlay.columns.iter().any(remains)
        });
        self.layout.folded = folded.into_iter().map(|(overlay, _)| overlay.id).collect();
        (self.layout.deleted, self.layout.absent) = (self.deleted.and(&out), self.absent.and(&out));
        self.done.overlays = self.layout.folded.len() as u64;
        self.done.dropped = self.layout.deleted.len();
        Ok(self)
    }
}

/// Return the columns with fill values in which all samples of a group were given a value.
fn filled_of(group: &[Candidate]) -> Option<&Vec<u64>> {
    group.iter().find_map(|candidate| candidate.filled.as_ref())
}

fn may_join(group: &[Candidate], candidate: &Candidate) -> bool {
    let (one, other) = (filled_of(group), candidate.filled.as_ref());
    one.is_none() || other.is_none() || one == other
}

/// Return the row ids of the overlays that have a column, by column.
fn rows_by_column(
    base: &Snapshot,
    overlays: &[(Overlay, Arc<RowIds>)],
    has: impl Fn(&Overlay, u64) -> bool,
) -> HashMap<u64, RowIds> {
    let rows = |spec: &ColumnSpec| {
        let own = overlays.iter().filter(|(overlay, _)| has(overlay, spec.id));
        (spec.id, RowIds::union(own.map(|(_, ids)| ids.as_ref())))
    };
    base.schema.columns.iter().map(rows).filter(|(_, ids)| !ids.is_empty()).collect()
}

/// Return how many runs of row ids are more if these follow others. One that meets the last of them continues it.
fn more_runs(last: Option<&Run>, runs: &[Run]) -> usize {
    let meets = last.zip(runs.first()).is_some_and(|(last, first)| last.end() == first.first);
    runs.len() - usize::from(meets)
}

#[cfg(test)]
mod tests {
    use penstock_format::schema::ColumnKind;
    use penstock_storage::Memory;
    use penstock_tensor::{Column, Ragged};

    use super::*;
    use crate::read::fetch::Purpose;
    use crate::{Context, Input, Isolation, OnCorrupt, Reader, Transaction, Validate, create};

    const TEXTS: Texts = Texts { message: "", author: "test", properties: "{}" };

    fn open(name: &str) -> Result<Arc<Snapshot>> {
        Snapshot::open(Context::new(Arc::new(Memory::named(name))), 0).map(Arc::new)
    }

    fn write(base: &Arc<Snapshot>, row: Option<i64>, value: Option<&str>) -> Result<Arc<Snapshot>> {
        let mut texts = Ragged::default();
        texts.push(value.map(str::as_bytes), &[]);
        let input = Input { name: "text".into(), column: Column::Ragged(texts), words: None };
        let mut transaction = Transaction::begin(base.clone(), Isolation::Serializable)?;
        match row {
            None => transaction.append(vec![input], Validate::Header).map(drop)?,
            Some(row) => transaction.update(&[row], vec![input], Validate::Header)?,
        };
        Ok(Arc::new(transaction.commit("", "test", "{}")?.1))
    }

    fn first(snapshot: &Arc<Snapshot>) -> Result<Option<String>> {
        let mut reader = Reader::new(snapshot.clone(), vec![0], OnCorrupt::Raise)?;
        let spec = snapshot.column("text")?;
        reader.fetch(&[spec], Purpose::Take)?;
        let Column::Ragged(texts) = reader.stored(spec, &mut crate::commit::manifest::stored::WordList::default())?
        else {
            unreachable!()
        };
        Ok((!texts.is_null(0)).then(|| String::from_utf8_lossy(texts.value(0)).into_owned()))
    }

    #[test]
    fn runs_that_meet_count_once() {
        let run = |first| Run { first, count: 10 };
        let fragments = [vec![run(0)], vec![run(10)], vec![run(20), run(40)], vec![run(60)], vec![], vec![run(30)]];
        let counts: Vec<usize> = fragments
            .iter()
            .zip([&vec![]].into_iter().chain(&fragments))
            .map(|(runs, last)| more_runs(last.last(), runs))
            .collect();
        assert_eq!(counts, [1, 0, 1, 1, 0, 1]);
    }

    #[test]
    fn an_overlay_whose_small_file_a_root_has_moved_is_folded() -> Result<()> {
        let long = "long".repeat(1000);
        for (case, newest) in [Some(long.as_str()), Some("short"), None].into_iter().enumerate() {
            let name = format!("compact moved {case}");
            create(Arc::new(Memory::named(&name)), vec![ColumnSpec::new("text", ColumnKind::Text)], "create", "test")?;
            write(&open(&name)?, None, Some("first"))?;
            write(&open(&name)?, Some(0), Some("old"))?;
            let base = write(&open(&name)?, Some(0), newest)?;
            let mut written = Written::at(&base)?;
            let Compaction { layout, features, .. } = compacted(&mut written)?;
            assert_eq!(layout.folded.len(), 2);
            // Meanwhile a root is written. It takes the values of small updates out of their records.
            let mut later = base.clone();
            while later.record().root == base.record().root {
                later = write(&later, None, Some("other"))?;
            }
            let proposal = proposal(&mut written, layout, features, TEXTS)?;
            let laid_out = Arc::new(written.commit(proposal)?);
            assert_eq!(first(&laid_out)?.as_deref(), newest);
            assert_eq!(laid_out.overlays.all().len(), usize::from(newest.is_none()));
        }
        Ok(())
    }
}
