//! Compare two snapshots: which samples were added or deleted, and which have other values in which columns.
//!
//! The manifests are compared first. Values are compared only where the snapshots have different overlays.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use penstock_codec::widen;
use penstock_error::{Error, Result};
use penstock_format::ids::Run;
use penstock_format::manifest::Fragment;
use penstock_format::overlay::Overlay;
use penstock_format::rows::{RowIds, RowSet};
use penstock_format::schema::{ColumnSpec, Schema};
use penstock_tensor::{Column, Dtype};

use crate::commit::manifest::stored::{LARGE_BYTES, PIECE_BYTES, WordList};
use crate::read::fetch::Purpose;
use crate::read::part::FoundValue;
use crate::read::reader::{OnCorrupt, Reader};
use crate::read::scan::GroupSize;
use crate::snapshot::Snapshot;
use crate::snapshot::values::file_of;
use crate::write::pending::own_value;

/// What happened to samples between two snapshots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Happened {
    Added,
    Deleted,
    /// The values in this column changed.
    Changed(u64),
    /// Columns by name. These have no samples.
    ColumnAdded(String),
    ColumnDropped(String),
    ColumnRenamed(String),
    ColumnWidened(String),
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
    /// Columns that differ.
    columns: VecDeque<Happened>,
    group: GroupSize,
    /// What remains: row ids from the second number on.
    rest: VecDeque<(Happened, RowIds, u64)>,
}

/// What the manifests of two snapshots of one dataset say about their differences.
pub struct Unshared {
    /// Samples that only the second snapshot has.
    pub added: RowIds,
    /// Samples that only the first snapshot has.
    pub removed: RowIds,
    /// Row ids that only the second snapshot has in fragments, hidden ones included, or as gone samples.
    pub rows: RowIds,
    /// Row ids that only the second snapshot knows: it has or deleted these samples, and the first one never had them.
    pub known: RowIds,
}

/// A fragment may claim so many samples, and eight per byte of its data files, before they are compared.
const UNCHECKED_SAMPLES: u64 = 1 << 20;

impl Unshared {
    /// Cost: reads the manifest pages and sets of row ids that only one of the snapshots has.
    pub fn between(one: &Snapshot, other: &Snapshot) -> Result<Unshared> {
        // Deleted samples that no fragment has any more are compared as if one had them.
        let (dropped, dropped_later) = unshared_overlays(one, other, Overlay::is_gone)?;
        let (ours, theirs) = (unshared_rows(one, other)?.or(&dropped), unshared_rows(other, one)?.or(&dropped_later));
        let (new, gone) = (theirs.minus(&ours), ours.minus(&theirs));
        let (hidden, hidden_later) = unshared_overlays(one, other, |overlay| overlay.hides() || overlay.is_gone())?;
        let added = new.minus(&hidden_later).or(&hidden.minus(&hidden_later).minus(&gone));
        let removed = gone.minus(&hidden).or(&hidden_later.minus(&hidden).minus(&new));
        let (absent, absent_later) = unshared_overlays(one, other, Overlay::is_absence)?;
        let known = new.or(&absent.minus(&gone)).minus(&absent_later);
        Ok(Unshared { added, removed, rows: new, known })
    }

    /// Return the samples that only the second snapshot knows, because it had and deleted them.
    pub fn died(&self) -> RowIds {
        self.known.minus(&self.added)
    }
}

impl Diff {
    /// Begin to compare `one` with a later snapshot of the same dataset, `other`. Costs the same as `Unshared::between`.
    pub fn new(one: Arc<Snapshot>, other: Arc<Snapshot>) -> Result<Diff> {
        let Unshared { added, removed, .. } = Unshared::between(&one, &other)?;
        let mut rest = VecDeque::from([(Happened::Added, added.clone(), 0), (Happened::Deleted, removed.clone(), 0)]);
        for spec in other.schema.columns.iter().filter(|spec| one.schema.has_column(spec.id)) {
            let candidates = changed_rows(&one, &other, spec.id)?.minus(&added).minus(&removed);
            rest.push_back((Happened::Changed(spec.id), candidates, 0));
        }
        rest.retain(|(_, ids, _)| !ids.is_empty());
        let columns = changed_columns(&one.schema, &other.schema);
        Ok(Diff { one, other, columns, group: GroupSize::default(), rest })
    }

    /// Return the next difference, or None at the end. Cost: reads the values of the samples that may have changed, in both snapshots.
    pub fn more(&mut self) -> Result<Option<Difference>> {
        if let Some(what) = self.columns.pop_front() {
            return Ok(Some(Difference { what, row_ids: Vec::new() }));
        }
        let mut found = Vec::new();
        while let Some((what, ids, from)) = self.rest.front_mut() {
            let limit = if let Happened::Changed(_) = what { self.group.samples } else { ROWS };
            let (what, row_ids) = (what.clone(), ids.next_group(from, limit.min(ROWS - found.len())));
            let Some(row_ids) = row_ids else {
                self.rest.pop_front();
                self.group = GroupSize::default();
                if found.is_empty() {
                    continue;
                }
                return Ok(Some(Difference { what, row_ids: found }));
            };
            found.extend(match what {
                Happened::Changed(column) => match read_as(&self.one, &self.other, column) {
                    Some(specs) => differing(&self.one, &self.other, &specs, row_ids, &mut self.group)?,
                    None => Vec::new(),
                },
                _ => row_ids,
            });
            if found.len() == ROWS {
                return Ok(Some(Difference { what, row_ids: found }));
            }
        }
        Ok(None)
    }
}

/// Return the columns in which two schemas differ. A renamed column has its new name.
fn changed_columns(one: &Schema, other: &Schema) -> VecDeque<Happened> {
    let dropped = one.columns_missing_in(other).map(|column| Happened::ColumnDropped(column.name.clone()));
    let others = other.columns.iter().filter_map(|column| match one.column_by_id(column.id) {
        None => Some(Happened::ColumnAdded(column.name.clone())),
        Some(before) => (before.name != column.name).then(|| Happened::ColumnRenamed(column.name.clone())),
    });
    let has_dtype = |column: &ColumnSpec| {
        one.column_by_id(column.id).is_none_or(|before| before.kind.dtype() == column.kind.dtype())
    };
    let widened = other.columns.iter().filter(|column| !has_dtype(column));
    let widened = widened.map(|column| Happened::ColumnWidened(column.name.clone()));
    dropped.chain(others).chain(widened).collect()
}

/// Return the column as both snapshots are read, so that its values can be compared: with the wider dtype, or with their own dtypes if neither
/// represents all values of the other one. None if one of them lacks the column.
pub fn read_as(one: &Snapshot, other: &Snapshot, column: u64) -> Option<[ColumnSpec; 2]> {
    let (mut before, mut after) =
        (one.schema.column_by_id(column)?.clone(), other.schema.column_by_id(column)?.clone());
    if before.take_wider(&after) {
        after.take_wider(&before);
    }
    Some([before, after])
}

/// Return those of some samples that both snapshots have, with different values in a column. Cost: reads their values in both.
pub fn changed_values(one: &Arc<Snapshot>, other: &Arc<Snapshot>, spec: &ColumnSpec, ids: &RowIds) -> Result<RowIds> {
    changed_between(one, other, &[spec.clone(), spec.clone()], ids)
}

/// Do the same as `changed_values`, with the column as each snapshot is read.
pub fn changed_between(
    one: &Arc<Snapshot>,
    other: &Arc<Snapshot>,
    specs: &[ColumnSpec; 2],
    ids: &RowIds,
) -> Result<RowIds> {
    let (mut from, mut found, mut group) = (0, Vec::new(), GroupSize::default());
    while let Some(row_ids) = ids.next_group(&mut from, group.samples) {
        found.extend(differing(one, other, specs, row_ids, &mut group)?);
    }
    Ok(found.into_iter().collect())
}

/// Return the samples that both snapshots have, with different values in a column.
fn differing(
    one: &Arc<Snapshot>,
    other: &Arc<Snapshot>,
    [spec_before, spec_after]: &[ColumnSpec; 2],
    row_ids: Vec<u64>,
    group: &mut GroupSize,
) -> Result<Vec<u64>> {
    let signed: Vec<i64> = row_ids.iter().map(|row_id| row_id.cast_signed()).collect();
    let (ours, theirs) = (one.find_positions(&signed)?, other.find_positions(&signed)?);
    let mut both: Vec<(u64, (u64, u64))> = row_ids
        .into_iter()
        .zip(ours.into_iter().zip(theirs))
        .filter_map(|(id, (one, other))| Some((id, (one?, other?))))
        .collect();
    let reader_of =
        |snapshot: &Arc<Snapshot>, positions: Vec<u64>| Reader::new(snapshot.clone(), positions, OnCorrupt::Raise);
    let readers = |both: &[(u64, (u64, u64))]| {
        let before = reader_of(one, both.iter().map(|(_, (one, _))| *one).collect())?;
        Ok::<_, Error>((before, reader_of(other, both.iter().map(|(_, (_, other))| *other).collect())?))
    };
    let (mut before, mut after) = readers(&both)?;
    let mut found = Vec::new();
    let large = [before.large_values(spec_before, LARGE_BYTES)?, after.large_values(spec_after, LARGE_BYTES)?];
    if large.iter().any(|large| large.contains(&true)) {
        let is_large = |place: usize| large.iter().any(|large| large.get(place) == Some(&true));
        let (parts, small): (Vec<_>, Vec<_>) = both.into_iter().enumerate().partition(|(place, _)| is_large(*place));
        for (_, (row_id, (position, later))) in parts {
            if !same_bytes(
                (reader_of(one, vec![position])?, spec_before),
                (reader_of(other, vec![later])?, spec_after),
            )? {
                found.push(row_id);
            }
        }
        both = small.into_iter().map(|(_, sample)| sample).collect();
        (before, after) = readers(&both)?;
    }
    let (before, after) = (ComparedValues::read(before, spec_before)?, ComparedValues::read(after, spec_after)?);
    group.note(both.len(), before.column.value_bytes() + after.column.value_bytes());
    for (place, (row_id, _)) in both.into_iter().enumerate() {
        if !before.equals(&after, place)? {
            found.push(row_id);
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// Return whether the only sample of two readers has the same value of bytes. Cost: reads both piece by piece, until they differ.
fn same_bytes((mut one, spec): (Reader, &ColumnSpec), (mut other, other_spec): (Reader, &ColumnSpec)) -> Result<bool> {
    let (value, other_value) = (one.find_value(spec)?, other.find_value(other_spec)?);
    let Some(bytes) = value.bytes().filter(|bytes| other_value.bytes() == Some(*bytes)) else { return Ok(false) };
    // Each piece of a compressed value costs all of it.
    let is_whole =
        [&value, &other_value].iter().any(|value| matches!(value, FoundValue::Large { is_plain: false, .. }));
    let (most, mut pieces) = (if is_whole { bytes } else { PIECE_BYTES }, [Vec::new(), Vec::new()]);
    for begin in (0..bytes).step_by(most as usize) {
        let range = begin..(begin + most).min(bytes);
        one.part_of(spec, &value, range.clone(), &mut pieces[0])?;
        other.part_of(other_spec, &other_value, range, &mut pieces[1])?;
        if pieces[0] != pieces[1] {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Values of a column that can be compared.
struct ComparedValues {
    column: Column,
    words: WordList,
    category: bool,
    /// The dtype of numbers, or of the codes of labels.
    dtype: Option<Dtype>,
}

impl ComparedValues {
    fn read(mut reader: Reader, spec: &ColumnSpec) -> Result<ComparedValues> {
        reader.fetch(&[spec], Purpose::Take)?;
        let mut words = WordList::default();
        let column = reader.stored(spec, &mut words)?;
        let dtype = spec.kind.stored().ok().map(|(dtype, _)| dtype);
        Ok(ComparedValues { column, words, category: spec.kind.is_category(), dtype })
    }

    /// Return whether a value is the same in both. Numbers of different dtypes are compared exactly.
    fn equals(&self, other: &ComparedValues, place: usize) -> Result<bool> {
        match (self.get(place), other.get(place), self.dtype, other.dtype) {
            (Some((one, free)), Some((two, other_free)), Some(from), Some(to)) if from != to => {
                Ok(free == other_free && exact(one, from)? == exact(two, to)?)
            }
            (one, two, ..) => Ok(one == two),
        }
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

/// Return numbers in a form in which those of all dtypes can be compared: a whole number, or the bits of a float. A float that is a whole number
/// becomes one, except for negative zero.
fn exact(bytes: &[u8], dtype: Dtype) -> Result<Vec<(i128, u64)>> {
    let wide =
        [Dtype::Int64, Dtype::Uint64, Dtype::Float64].into_iter().find(|wide| *wide == dtype || dtype.widens_to(*wide));
    let Some(wide) = wide else {
        return Err(Error::new("internal", format!("values of {} are not compared with other dtypes", dtype.name())));
    };
    let mut numbers = bytes.to_vec();
    if wide != dtype {
        numbers = vec![0; bytes.len() / dtype.size() * wide.size()];
        widen(bytes, dtype, wide, &mut numbers)?;
    }
    let number = |bytes: &[u8; 8]| match wide {
        Dtype::Int64 => (i128::from(i64::from_le_bytes(*bytes)), 0),
        Dtype::Uint64 => (i128::from(u64::from_le_bytes(*bytes)), 0),
        _ => match f64::from_le_bytes(*bytes) {
            float if float.fract() == 0.0 && float.to_bits() != (-0.0f64).to_bits() && float.abs() < 1e30 => {
                (float as i128, 0)
            }
            float => (0, float.to_bits()),
        },
    };
    Ok(numbers.as_chunks().0.iter().map(number).collect())
}

/// Return the row ids of the fragments in pages that another snapshot lacks, and of those without a page.
fn unshared_rows(snapshot: &Snapshot, other: &Snapshot) -> Result<RowIds> {
    let mut runs = Vec::new();
    snapshot.each_fragment_outside(&other.pages(), |fragment| {
        check_count(snapshot, fragment)?;
        runs.extend(&fragment.runs);
        Ok(())
    })?;
    Ok(RowIds::of_runs(runs))
}

/// Return the samples that both snapshots have, in different files of a column. A layout moved them. Cost: reads the pages that only one of them has.
pub fn moved_rows(one: &Snapshot, other: &Snapshot, column: u64) -> Result<RowIds> {
    // Fragments with the same samples in the same file are the same for this column.
    let identity = |fragment: &Fragment| {
        (fragment.runs.first().map(|run| run.first), file_of(&fragment.files, column).map(|file| file.id))
    };
    let mut kept: HashMap<_, Vec<Run>> = HashMap::new();
    let (pages, other_pages) = (one.pages(), other.pages());
    one.each_fragment_outside(&other_pages, |fragment| {
        kept.insert(identity(fragment), fragment.runs.clone());
        Ok(())
    })?;
    let mut moved = Vec::new();
    other.each_fragment_outside(&pages, |fragment| {
        match kept.remove(&identity(fragment)) {
            Some(runs) if runs == fragment.runs => {}
            _ => moved.extend(&fragment.runs),
        }
        Ok(())
    })?;
    let mut before = Vec::new();
    if !moved.is_empty() {
        one.each_fragment_outside(&other_pages, |fragment| {
            before.extend(&fragment.runs);
            Ok(())
        })?;
    }
    Ok(RowIds::of_runs(moved).and(&RowIds::of_runs(before)))
}

/// Refuse a fragment with more samples than its data files have, before anything is as long as its count. Cost: nothing, unless the count is far
/// larger than the files are. Their tails are read then.
fn check_count(snapshot: &Snapshot, fragment: &Fragment) -> Result<()> {
    let bytes = fragment.files.iter().fold(0, |sum: u64, file| sum.saturating_add(file.file_bytes));
    if fragment.samples > bytes.saturating_mul(8).saturating_add(UNCHECKED_SAMPLES) {
        fragment.files.iter().try_for_each(|file| snapshot.context.file(file, fragment.samples).map(drop))?;
    }
    Ok(())
}

/// Return the samples of the overlays of each snapshot that `is_wanted` selects, without those overlays that both have.
fn unshared_overlays(
    one: &Snapshot,
    other: &Snapshot,
    is_wanted: impl Fn(&Overlay) -> bool,
) -> Result<(RowIds, RowIds)> {
    let [ours, theirs]: [Vec<&RowSet>; 2] = [one, other].map(|snapshot| snapshot.overlays.rows(&is_wanted).collect());
    let only_ours = ours.iter().filter(|set| !theirs.contains(set)).copied();
    let only_theirs = theirs.iter().filter(|set| !ours.contains(set)).copied();
    Ok((one.context.all_row_ids(only_ours)?, other.context.all_row_ids(only_theirs)?))
}

/// Return the samples whose values in a column may differ: only one of the snapshots has an overlay, or their files differ. Cost: reads the row ids of
/// these overlays, and the pages that only one of the snapshots has.
pub fn changed_rows(one: &Snapshot, other: &Snapshot, column: u64) -> Result<RowIds> {
    let ours = one.overlay_rows(|overlay| overlay.columns.contains(&column) && !other.overlays.have(overlay))?;
    let theirs = other.overlay_rows(|overlay| overlay.columns.contains(&column) && !one.overlays.have(overlay))?;
    Ok(ours.or(&theirs).or(&moved_rows(one, other, column)?))
}
