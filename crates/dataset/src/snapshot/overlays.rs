//! The overlays of a snapshot, and which rows of a part they give new values.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use penstock_error::Result;
use penstock_format::files::FileRef;
use penstock_format::manifest::Fragment;
use penstock_format::overlay::Overlay;
use penstock_format::rows::{RowIds, RowSet};
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use super::Snapshot;
use super::live::runs_of;
use super::ranks::Ranks;
use crate::config::Config;
use crate::prefetch::ROWS_AHEAD;
use crate::store::blocks::cache;
use crate::store::context::file_cache_bytes;

/// The overlays of a snapshot in manifest order.
#[derive(Default)]
pub struct Overlays {
    all: Vec<Overlay>,
    /// The overlays that give a column new values, oldest first.
    by_column: BTreeMap<u64, Vec<usize>>,
}

impl Overlays {
    pub fn new(all: Vec<Overlay>) -> Overlays {
        let mut by_column: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (index, overlay) in all.iter().enumerate() {
            let columns = overlay.columns.iter().filter(|_| overlay.has_values());
            columns.for_each(|column| by_column.entry(*column).or_default().push(index));
        }
        Overlays { all, by_column }
    }

    pub fn all(&self) -> &[Overlay] {
        &self.all
    }

    /// Return whether this overlay with values is among them.
    pub fn have(&self, overlay: &Overlay) -> bool {
        self.all.iter().any(|own| own.has_values() && own.id == overlay.id)
    }

    /// Return the row sets of the overlays for which `is_wanted` returns true.
    pub fn rows<'a>(&'a self, is_wanted: impl Fn(&Overlay) -> bool + 'a) -> impl Iterator<Item = &'a RowSet> {
        self.all.iter().filter(move |overlay| is_wanted(overlay)).map(|overlay| &overlay.rows)
    }

    /// Return whether any sample has a newer value in this column.
    #[inline]
    pub fn changes(&self, column: u64) -> bool {
        self.by_column.contains_key(&column)
    }
}

/// A run of rows whose values are consecutive samples of an overlay.
#[derive(Debug, Clone, Copy)]
struct PatchRun {
    /// The first sample in the overlay.
    first: u64,
    count: u32,
    overlay: u32,
}

/// A run with its first row.
type RowRun = (u64, PatchRun);

/// The rows of a part that have newer values in one column. Rows are counted from the beginning of the part.
pub struct Patch {
    runs: Ranks<PatchRun>,
    /// How many overlays of the column have been considered, oldest first.
    overlays: usize,
}

impl Patch {
    /// Join the runs of several overlays, newest first, with the patch of the overlays before them. A newer run hides the older ones under it.
    fn new(layers: Vec<Vec<RowRun>>, before: Option<&Patch>, overlays: usize) -> Patch {
        let newer = layers.into_iter().reduce(|newer, older| under(&newer, &older)).unwrap_or_default();
        let runs = if let Some(before) = before { under(&newer, before.runs.entries()) } else { newer };
        Patch { runs: Ranks::new(runs), overlays }
    }

    /// Return the overlay that has the value of a row, and the sample there. Returns None if the fragment's own value is current.
    #[inline]
    fn find(&self, row: u64) -> Option<(usize, u64)> {
        let (begin, run) = self.runs.entries()[self.runs.at_most(row).checked_sub(1)?];
        (row - begin < run.count.into()).then(|| (run.overlay as usize, run.first + (row - begin)))
    }

    /// Divide rows in any order, which are counted from row `begin`. Those without newer values go to `current`, the others to `newer` with
    /// their overlay and the sample there. Returns false if no row has a newer value; `divided` then does not count.
    pub fn divide<T: Copy>(&self, begin: u64, rows: &[(u64, T)], divided: &mut Divided<T>) -> bool {
        if let [(row, place)] = rows {
            let found = self.find(begin + row);
            divided.newer.extend(found.map(|(overlay, sample)| (overlay, (sample, *place))));
            return found.is_some();
        }
        let (low, high) = rows.iter().fold((u64::MAX, 0), |(low, high), (row, _)| (low.min(*row), high.max(*row)));
        if low > high {
            return false; // `rows` is empty.
        }
        // A run may begin before the first row.
        let runs = self.runs.at_most(begin + low).saturating_sub(1)..self.runs.at_most(begin + high);
        if runs.len() > RUNS_PER_ROW * rows.len() {
            let ahead = |index: usize| rows.get(index).map(|(row, _)| begin + row);
            for (index, (row, place)) in rows.iter().enumerate() {
                self.runs.expect(ahead(index + ROWS_AHEAD), ahead(index + 2 * ROWS_AHEAD));
                match self.find(begin + row) {
                    Some((overlay, sample)) => divided.newer.push((overlay, (sample, *place))),
                    None => divided.current.push((*row, *place)),
                }
            }
            return !divided.newer.is_empty();
        }
        let mut sorted = Cow::Borrowed(rows);
        if !rows.is_sorted_by_key(|(row, _)| *row) {
            sorted.to_mut().sort_by_key(|(row, _)| *row);
        }
        let mut rest = &sorted[..];
        for (row, PatchRun { count, overlay, first }) in &self.runs.entries()[runs] {
            let (before, later) = rest.split_at(rest.partition_point(|(found, _)| begin + found < *row));
            let (inside, later) =
                later.split_at(later.partition_point(|(found, _)| begin + found < row + u64::from(*count)));
            if !inside.is_empty() {
                divided.current.extend_from_slice(before);
                divided.newer.extend(
                    inside.iter().map(|(found, place)| (*overlay as usize, (first + (begin + found - row), *place))),
                );
                rest = later;
            }
        }
        if divided.newer.is_empty() {
            return false;
        }
        divided.current.extend_from_slice(rest);
        true
    }
}

/// Looking up a row costs about as much as passing this many runs.
const RUNS_PER_ROW: usize = 2;

/// Rows by where their values are.
pub struct Divided<T> {
    pub current: Vec<(u64, T)>,
    /// Samples of overlays, each with its overlay.
    pub newer: Vec<(usize, (u64, T))>,
}

impl<T> Default for Divided<T> {
    fn default() -> Divided<T> {
        Divided { current: Vec::new(), newer: Vec::new() }
    }
}

/// Join two lists of ascending, disjoint runs. Where both have a row, the first list counts.
fn under(newer: &[RowRun], older: &[RowRun]) -> Vec<RowRun> {
    let mut all = Vec::with_capacity(newer.len() + older.len());
    let mut above = newer.iter().copied().peekable();
    // The end of the rows that `newer` has so far.
    let mut covered = 0;
    for (begin, run) in older {
        let (mut row, end) = ((*begin).max(covered), begin + u64::from(run.count));
        let part_of_run = |row: u64, end: u64| {
            (row, PatchRun { first: run.first + (row - begin), count: (end - row) as u32, ..*run })
        };
        while row < end {
            match above.peek().copied() {
                Some((next, hiding)) if next <= row => {
                    all.push((next, hiding));
                    above.next();
                    covered = next + u64::from(hiding.count);
                    row = row.max(covered);
                }
                Some((next, _)) if next < end => {
                    all.push(part_of_run(row, next));
                    row = next;
                }
                _ => {
                    all.push(part_of_run(row, end));
                    row = end;
                }
            }
        }
    }
    all.extend(above);
    all
}

/// Estimated number of patches that are kept.
const KEPT_PATCHES: usize = 1024;

#[derive(Clone)]
pub struct PatchWeight;

impl Weighter<(usize, u64), Arc<Patch>> for PatchWeight {
    fn weight(&self, _key: &(usize, u64), patch: &Arc<Patch>) -> u64 {
        128 + patch.runs.held_bytes()
    }
}

/// Patches that successive snapshots of a transaction share: each has the overlays of those before it, and more.
pub struct KeptPatches {
    /// The first parts, which all of these snapshots have.
    parts: usize,
    patches: Cache<(usize, u64), Arc<Patch>, PatchWeight>,
}

impl KeptPatches {
    pub fn new(parts: usize) -> KeptPatches {
        KeptPatches { parts, patches: cache(KEPT_PATCHES, Config::memory_bytes() / 8, PatchWeight) }
    }
}

impl Snapshot {
    /// Return the newer values of a column in a part. Cost: reads the row ids of the overlays that may meet the part, unless the result is
    /// cached.
    pub fn patch(&self, part: usize, fragments: &[Fragment], column: u64) -> Result<Arc<Patch>> {
        let tables = self.tables.get();
        let overlays = self.overlays.by_column.get(&column).map_or(&[][..], Vec::as_slice);
        let new_patch = |before: Option<&Patch>| {
            let layers = self.layers(fragments, &overlays[before.map_or(0, |before| before.overlays)..])?;
            Ok(Arc::new(Patch::new(layers, before, overlays.len())))
        };
        let Some(kept) = tables.kept.get().filter(|kept| part < kept.parts) else {
            let patches = tables.patches.get_or_init(|| cache(KEPT_PATCHES, file_cache_bytes() / 4, PatchWeight));
            return patches.get_or_insert_with(&(part, column), || new_patch(None));
        };
        match kept.patches.get(&(part, column)).filter(|known| known.overlays <= overlays.len()) {
            Some(known) if known.overlays == overlays.len() => Ok(known),
            known => {
                let patch = new_patch(known.as_deref())?;
                kept.patches.insert((part, column), patch.clone());
                Ok(patch)
            }
        }
    }

    /// Return the runs of a part's rows that each of some overlays has, newest first. Overlays that cannot meet the part are left out.
    fn layers(&self, fragments: &[Fragment], overlays: &[usize]) -> Result<Vec<Vec<RowRun>>> {
        let mut meeting = overlays.to_vec();
        meeting.retain(|index| {
            let range = self.overlays.all[*index].rows.range();
            fragments
                .iter()
                .flat_map(|fragment| &fragment.runs)
                .any(|run| run.first < range.end && range.start < run.end())
        });
        let sets = self.context.row_ids(meeting.iter().map(|index| &self.overlays.all[*index].rows))?;
        Ok(meeting.into_iter().zip(sets).rev().map(|(overlay, ids)| runs_under(fragments, overlay, &ids)).collect())
    }

    /// Visit the data files that store any of these columns, each with its number of samples: those of fragments, then those of
    /// overlays and of fill values. Cost: reads the manifest.
    pub fn each_file(&self, columns: Option<&[u64]>, mut visit: impl FnMut(&FileRef, u64) -> Result<()>) -> Result<()> {
        let mut visit_files = |files: &[FileRef], samples: u64| {
            let is_wanted = |file: &&FileRef| {
                columns.is_none_or(|columns| file.columns.iter().any(|column| columns.contains(column)))
            };
            files.iter().filter(is_wanted).try_for_each(|file| visit(file, samples))
        };
        self.each_fragment(|fragment| visit_files(&fragment.files, fragment.samples))?;
        self.overlays.all.iter().try_for_each(|overlay| visit_files(&overlay.files, overlay.rows.ids()))?;
        self.schema.fill_files().try_for_each(|file| visit_files(std::slice::from_ref(file), 1))
    }
}

/// Return the runs of a part's rows that an overlay has.
fn runs_under(fragments: &[Fragment], overlay: usize, ids: &RowIds) -> Vec<RowRun> {
    let (most, overlay) = (u64::from(u32::MAX), overlay as u32);
    let mut runs = Vec::new();
    for (run, row) in runs_of(fragments) {
        for (found, rank) in ids.runs_in(run.first..run.end()) {
            for begin in (0..found.count).step_by(most as usize) {
                let count = (found.count - begin).min(most) as u32;
                runs.push((row + (found.first - run.first) + begin, PatchRun { first: rank + begin, count, overlay }));
            }
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_overlay_of_a_row_counts() {
        let layer = |overlay: u32, runs: &[(u64, u64)]| {
            let with_first = |next: &mut u64, (row, count): &(u64, u64)| {
                let first = std::mem::replace(next, *next + count);
                Some((*row, PatchRun { count: *count as u32, overlay, first }))
            };
            runs.iter().scan(0, with_first).collect::<Vec<RowRun>>()
        };
        let shapes: [&[(u64, u64)]; 7] = [
            &[(0, 30)],
            &[(3, 4)],
            &[(3, 2), (5, 2), (20, 1)],
            &[],
            &[(29, 1)],
            &[(0, 1), (4, 1), (28, 2)],
            &[(2, 20), (25, 2)],
        ];
        for (newest, middle, oldest) in (0..343).map(|index| (index / 49, index / 7 % 7, index % 7)) {
            let layers = [layer(2, shapes[newest]), layer(1, shapes[middle]), layer(0, shapes[oldest])];
            let patch = Patch::new(layers[..1].to_vec(), Some(&Patch::new(layers[1..].to_vec(), None, 2)), 3);
            for rows in [
                (2..32).collect(),
                vec![5],
                vec![4, 29],
                vec![3, 6, 7, 20],
                vec![30, 31],
                (10..12).collect::<Vec<u64>>(),
            ] {
                let mut divided = Divided::default();
                let expected: Vec<_> =
                    rows.iter().filter_map(|row| patch.find(*row).map(|(at, sample)| (at, (sample, *row)))).collect();
                let rest: Vec<(u64, u64)> =
                    rows.iter().filter(|row| patch.find(**row).is_none()).map(|row| (row - 2, *row)).collect();
                let from_two: Vec<(u64, u64)> = rows.into_iter().map(|row| (row - 2, row)).collect();
                let found = patch.divide(2, &from_two, &mut divided);
                assert_eq!((found, &divided.newer), (!expected.is_empty(), &expected), "{newest} {middle} {oldest}");
                assert!(!found || rest == divided.current, "{newest} {middle} {oldest}");
            }
            for row in 0..32 {
                let inside = |layer: &Vec<RowRun>| {
                    let (begin, run) =
                        layer.iter().find(|(begin, run)| (*begin..begin + u64::from(run.count)).contains(&row))?;
                    Some((run.overlay as usize, run.first + (row - begin)))
                };
                assert_eq!(patch.find(row), layers.iter().find_map(inside), "{row} {newest} {middle} {oldest}");
            }
        }
    }
}
