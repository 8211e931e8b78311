//! Compare two snapshots: which samples were added or deleted, and which have other values in which columns.
//!
//! The manifests are compared first. Values are compared only where the snapshots have different overlays.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use penstock_error::Result;
use penstock_format::ids::Run;
use penstock_format::manifest::PageRef;
use penstock_format::overlay::Overlay;
use penstock_format::rows::{RowIds, RowSet};
use penstock_format::schema::ColumnSpec;
use penstock_tensor::Column;

use crate::commit::stored::WordList;
use crate::config::Config;
use crate::read::fetch::Purpose;
use crate::read::reader::{OnCorrupt, Reader};
use crate::snapshot::Snapshot;
use crate::snapshot::live::Part;
use crate::write::pending::own_value;

/// What happened to samples between two snapshots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Happened {
    Added,
    Deleted,
    /// The values in this column changed.
    Changed(u64),
}

/// Samples to which the same thing happened, by row id, in ascending order.
#[derive(Debug, PartialEq, Eq)]
pub struct Difference {
    pub what: Happened,
    pub row_ids: Vec<u64>,
}

/// At most this many row ids are returned at once.
const ROWS: usize = 1 << 16;

/// The differences between two snapshots, which are found part by part.
pub struct Diff {
    one: Arc<Snapshot>,
    other: Arc<Snapshot>,
    /// What remains: row ids from the second number on.
    rest: VecDeque<(Happened, RowIds, u64)>,
}

impl Diff {
    /// Begin to compare `one` with a later snapshot of the same dataset, `other`. Cost: reads the manifest pages and sets of row ids that
    /// only one of them has.
    pub fn new(one: Arc<Snapshot>, other: Arc<Snapshot>) -> Result<Diff> {
        let (ours, theirs) = unshared_rows(&one, &other)?;
        let (new, gone) = (theirs.minus(&ours), ours.minus(&theirs));
        let (deleted, deleted_later) = unshared_deletions(&one, &other)?;
        let added = new.minus(&deleted_later).or(&deleted.minus(&deleted_later).minus(&gone));
        let removed = gone.minus(&deleted).or(&deleted_later.minus(&deleted).minus(&new));
        let mut rest = VecDeque::from([(Happened::Added, added.clone(), 0), (Happened::Deleted, removed.clone(), 0)]);
        for spec in &other.schema.columns {
            let candidates = changed_rows(&one, &other, spec.id)?.minus(&added).minus(&removed);
            rest.push_back((Happened::Changed(spec.id), candidates, 0));
        }
        rest.retain(|(_, ids, _)| !ids.is_empty());
        Ok(Diff { one, other, rest })
    }

    /// Return the next difference, or None at the end. Cost: reads the values of the samples that may have changed, in both snapshots.
    pub fn more(&mut self) -> Result<Option<Difference>> {
        while let Some((what, ids, from)) = self.rest.front_mut() {
            let row_ids = ids.first(*from, ROWS.min((Config::memory_bytes() / 4096) as usize).max(1));
            let Some(last) = row_ids.last() else {
                self.rest.pop_front();
                continue;
            };
            *from = last + 1;
            let what = what.clone();
            let row_ids = match what {
                Happened::Changed(column) => self.changed(column, row_ids)?,
                _ => row_ids,
            };
            if !row_ids.is_empty() {
                return Ok(Some(Difference { what, row_ids }));
            }
        }
        Ok(None)
    }

    /// Return the samples that both snapshots have, with different values in a column.
    fn changed(&self, column: u64, row_ids: Vec<u64>) -> Result<Vec<u64>> {
        let Some(spec) = self.other.schema.columns.iter().find(|spec| spec.id == column) else { return Ok(Vec::new()) };
        let signed: Vec<i64> = row_ids.iter().map(|row_id| row_id.cast_signed()).collect();
        let (ours, theirs) = (self.one.find_positions(&signed)?, self.other.find_positions(&signed)?);
        let both: Vec<(u64, (u64, u64))> =
            row_ids.into_iter().zip(ours.into_iter().zip(theirs)).filter_map(|(id, (one, other))| Some((id, (one?, other?)))).collect();
        let before = Values::read(&self.one, both.iter().map(|(_, (one, _))| *one).collect(), spec)?;
        let after = Values::read(&self.other, both.iter().map(|(_, (_, other))| *other).collect(), spec)?;
        let differs = |(place, (row_id, _)): (usize, (u64, (u64, u64)))| (before.get(place) != after.get(place)).then_some(row_id);
        Ok(both.into_iter().enumerate().filter_map(differs).collect())
    }
}

/// Values of a column that can be compared.
struct Values {
    column: Column,
    words: WordList,
    category: bool,
}

impl Values {
    fn read(snapshot: &Arc<Snapshot>, positions: Vec<u64>, spec: &ColumnSpec) -> Result<Values> {
        let mut reader = Reader::new(snapshot.clone(), positions, OnCorrupt::Raise)?;
        reader.fetch(&[spec], Purpose::Take)?;
        let mut words = WordList::default();
        let column = reader.stored(spec, &mut words)?;
        Ok(Values { column, words, category: matches!(spec.kind, penstock_format::schema::ColumnKind::Category) })
    }

    /// Return the bytes of a value, or its word, and its free sizes. None for a null.
    fn get(&self, place: usize) -> Option<(&[u8], &[u64])> {
        let value = own_value(&self.column, place)?;
        let bytes = value.bytes?;
        match bytes.first_chunk() {
            Some(code) if self.category => Some((self.words.words[u32::from_le_bytes(*code) as usize].as_bytes(), &[])),
            _ => Some((bytes, value.free)),
        }
    }
}

/// Return the row ids of parts that only one of the snapshots has.
fn unshared_rows(one: &Snapshot, other: &Snapshot) -> Result<(RowIds, RowIds)> {
    let pages = |snapshot: &Snapshot| snapshot.parts.iter().filter_map(page_of).collect::<HashSet<PageRef>>();
    let (ours, theirs) = (pages(one), pages(other));
    let rows = |snapshot: &Snapshot, known: &HashSet<PageRef>| {
        let mut runs = Vec::new();
        for part in 0..snapshot.parts.len() {
            if !page_of(&snapshot.parts[part]).is_some_and(|page| known.contains(&page)) {
                runs.extend(snapshot.fragments(part)?.as_slice().iter().flat_map(|fragment| fragment.runs.clone()));
            }
        }
        Ok(joined(runs))
    };
    Ok((rows(one, &theirs)?, rows(other, &ours)?))
}

fn page_of(part: &Part) -> Option<PageRef> {
    if let Part::Page(page) = part { Some(*page) } else { None }
}

/// Return runs as a set, whatever their order. Runs of intact snapshots are disjoint.
fn joined(mut runs: Vec<Run>) -> RowIds {
    runs.sort_unstable_by_key(|run| run.first);
    runs.dedup_by(|next, last| {
        let meets = next.first <= last.end();
        if meets {
            last.count = last.count.max(next.end() - last.first);
        }
        meets
    });
    RowIds::Runs(runs)
}

/// Return the deleted samples of both snapshots, less those deletions that both have.
fn unshared_deletions(one: &Snapshot, other: &Snapshot) -> Result<(RowIds, RowIds)> {
    let (ours, theirs): (Vec<&RowSet>, Vec<&RowSet>) = (one.overlays.deletions().collect(), other.overlays.deletions().collect());
    let set = |snapshot: &Snapshot, sets: &[&RowSet], known: &[&RowSet]| {
        let unshared: Vec<&RowSet> = sets.iter().filter(|set| !known.contains(set)).copied().collect();
        Ok(RowIds::union(snapshot.context.row_ids(&unshared)?.iter().map(AsRef::as_ref)))
    };
    Ok((set(one, &ours, &theirs)?, set(other, &theirs, &ours)?))
}

/// Return the samples for which only one of the snapshots has an overlay in a column.
fn changed_rows(one: &Snapshot, other: &Snapshot, column: u64) -> Result<RowIds> {
    let of = |snapshot: &Snapshot, known: &Snapshot| {
        let unshared = |overlay: &&Overlay| overlay.columns.contains(&column) && !known.overlays.all().contains(overlay);
        let sets: Vec<&RowSet> = snapshot.overlays.all().iter().filter(unshared).map(|overlay| &overlay.rows).collect();
        snapshot.context.row_ids(&sets)
    };
    let sets = [of(one, other)?, of(other, one)?].concat();
    Ok(RowIds::union(sets.iter().map(AsRef::as_ref)))
}
