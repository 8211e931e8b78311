//! Map row ids to positions, and physical rows to row ids.

use std::ops::Range;

use penstock_error::{Error, Result};
use penstock_format::ids::Run;
use penstock_format::manifest::Fragment;
use penstock_format::overlay::Overlay;
use penstock_format::rows::RowIds;

use super::Snapshot;
use super::live::{LiveFragments, ManifestPart, runs_of};

/// Write the row ids of a fragment's physical rows to their places in `ids`. The rows must be in ascending order.
pub fn row_ids_of(fragment: &Fragment, rows: &[(u64, u32)], ids: &mut [i64]) {
    let (mut run, mut skipped) = (0, 0);
    for (row, place) in rows {
        while row - skipped >= fragment.runs[run].count {
            skipped += fragment.runs[run].count;
            run += 1;
        }
        ids[*place as usize] = (fragment.runs[run].first + (row - skipped)) as i64;
    }
}

/// The range of row ids of each part, by its first row id.
pub struct PartRanges {
    parts: Vec<(u64, u64, usize)>,
    /// The largest end of a range up to each of `parts`. Ranges may overlap.
    reach: Vec<u64>,
}

impl PartRanges {
    fn new(parts: &[ManifestPart]) -> PartRanges {
        let with_index = parts.iter().enumerate().map(|(index, part)| (range_of(part), index));
        let mut parts: Vec<(u64, u64, usize)> = with_index.map(|((least, end), index)| (least, end, index)).collect();
        parts.sort_unstable();
        let reach = parts.iter().scan(0, |reach: &mut u64, (_, end, _)| {
            *reach = (*reach).max(*end);
            Some(*reach)
        });
        PartRanges { reach: reach.collect(), parts }
    }

    /// Return the parts whose range contains a row id.
    fn containing(&self, row_id: u64) -> impl Iterator<Item = usize> {
        let end = self.parts.partition_point(|(least, _, _)| *least <= row_id);
        let reachable = (0..end).rev().take_while(move |index| self.reach[*index] > row_id);
        reachable.map(|index| self.parts[index]).filter(move |(_, end, _)| *end > row_id).map(|(_, _, part)| part)
    }
}

/// Return the range of row ids of a part.
fn range_of(part: &ManifestPart) -> (u64, u64) {
    match part {
        ManifestPart::Page(page) => (page.least, page.least + page.span),
        ManifestPart::Fragment(fragment) => {
            let least = fragment.runs.iter().map(|run| run.first).min().unwrap_or(0);
            (least, fragment.runs.iter().map(Run::end).max().unwrap_or(0))
        }
    }
}

/// At most this many positions are visited at once.
const POSITIONS: usize = 1 << 16;

/// Where the sample with a row id is.
enum RowLookup {
    At(u64),
    /// The sample was deleted, or is absent.
    Hidden,
    Nowhere,
}

/// A part in which row ids are looked up.
struct OpenPart {
    fragments: LiveFragments,
    /// The position of the first sample.
    start: u64,
    /// Runs of row ids by their first row id, each with its first row.
    runs: Vec<(Run, u64)>,
}

impl OpenPart {
    /// Open a part to look up `wanted` row ids.
    fn new(snapshot: &Snapshot, part: usize, wanted: usize) -> Result<OpenPart> {
        let fragments = snapshot.live_fragments(part, wanted)?;
        let mut runs: Vec<(Run, u64)> = runs_of(fragments.as_slice()).collect();
        runs.sort_unstable_by_key(|(run, _)| run.first);
        Ok(OpenPart { fragments, start: snapshot.live()?.start(part), runs })
    }

    /// Return where a row id is, or None if the part lacks it.
    fn position(&self, row_id: u64) -> Option<RowLookup> {
        let at = self.runs.partition_point(|(run, _)| run.first <= row_id).checked_sub(1)?;
        let (run, first) = self.runs[at];
        if row_id >= run.end() {
            return None;
        }
        let live = self.fragments.live_row(first + (row_id - run.first));
        Some(live.map_or(RowLookup::Hidden, |live| RowLookup::At(self.start + live)))
    }
}

impl Snapshot {
    /// Return the positions of the given row ids. Cost: a binary search per row id. Reads the manifest pages that may contain them,
    /// unless they are cached, and the row ids of deletions.
    pub fn positions_of(&self, row_ids: &[i64]) -> Result<Vec<u64>> {
        let lookups = self.look_up(row_ids)?.into_iter().zip(row_ids).enumerate();
        let positions = lookups.map(|(place, (lookup, row_id))| match lookup {
            RowLookup::At(position) => Ok(position),
            RowLookup::Hidden => Err(self.without_position(place, *row_id, true)),
            RowLookup::Nowhere => Err(self.without_position(place, *row_id, false)),
        });
        positions.collect()
    }

    /// Make the error for a row id without a position. `is_hidden` says whether a fragment has its sample.
    fn without_position(&self, place: usize, row_id: i64, is_hidden: bool) -> Error {
        // A sample that was not deleted never lived on the branch.
        let listed =
            self.context.row_ids(self.overlays.rows(if is_hidden { Overlay::is_absence } else { Overlay::is_gone }));
        let is_listed = listed.is_ok_and(|sets| sets.iter().any(|set| set.contains(row_id.cast_unsigned())));
        let why = if is_listed != is_hidden { "its sample was deleted in" } else { "no such sample exists in" };
        // What a transaction sees has no id of its own.
        let here = if self.tables.get().kept.get().is_some() {
            "this transaction".to_owned()
        } else {
            format!("snapshot {}", self.id())
        };
        Error::new("row-id-not-found", format!("cannot find row id {row_id}: {why} {here}"))
            .hint("row ids come from `_row_id` or receipt.row_ids")
            .rows(vec![place as u64])
            .row_ids(vec![row_id])
    }

    /// Return the positions of row ids, with None for those without a sample. Costs the same as `positions_of`.
    pub fn find_positions(&self, row_ids: &[i64]) -> Result<Vec<Option<u64>>> {
        let position = |lookup| if let RowLookup::At(position) = lookup { Some(position) } else { None };
        Ok(self.look_up(row_ids)?.into_iter().map(position).collect())
    }

    /// Visit the positions of the samples that have any of these row ids, in parts. Cost: reads the manifest pages that may contain them.
    /// The set may be much larger than the snapshot.
    pub fn each_position_of(&self, ids: &RowIds, mut visit: impl FnMut(Vec<u64>) -> Result<()>) -> Result<()> {
        let live = self.live()?;
        for part in 0..self.parts.len() {
            let (least, end) = range_of(&self.parts[part]);
            if ids.count_in(least..end) == 0 {
                continue;
            }
            let fragments = self.live_fragments(part, usize::MAX)?;
            let rows = runs_of(fragments.as_slice()).flat_map(|(run, row)| {
                let found = ids.runs_in(run.first..run.end()).into_iter();
                found
                    .flat_map(move |(part, _)| (0..part.count).map(move |index| row + (part.first - run.first) + index))
            });
            let mut positions = rows.filter_map(|row| Some(live.start(part) + fragments.live_row(row)?)).peekable();
            while positions.peek().is_some() {
                visit(positions.by_ref().take(POSITIONS).collect())?;
            }
        }
        Ok(())
    }

    /// Return the row ids of consecutive positions. Cost: reads their manifest pages, unless they are cached, and the row ids of deletions.
    pub fn row_ids_in(&self, positions: Range<u64>) -> Result<Vec<i64>> {
        let live = self.live()?;
        let (mut ids, mut next) = (Vec::with_capacity((positions.end - positions.start) as usize), positions.start);
        while next < positions.end {
            let part = live.part_of(next);
            let (start, end, mut hint) = (live.start(part), live.start(part + 1).min(positions.end), 0);
            let fragments = self.live_fragments(part, (end - next) as usize)?;
            let runs: Vec<(Run, u64)> = runs_of(fragments.as_slice()).collect();
            while next < end {
                let same = fragments.run(&mut hint, next - start);
                let row = next - start + same.deleted;
                let (run, first) = runs[runs.partition_point(|(_, first)| *first <= row) - 1];
                let count = (end.min(start.saturating_add(same.end)) - next).min(first + run.count - row);
                let id = run.first + (row - first);
                ids.extend((id..id + count).map(u64::cast_signed));
                next += count;
            }
        }
        Ok(ids)
    }

    fn look_up(&self, row_ids: &[i64]) -> Result<Vec<RowLookup>> {
        let ranges = self.tables.get().ranges.get_or_init(|| PartRanges::new(&self.parts));
        let mut open: Vec<Option<OpenPart>> = Vec::new();
        open.resize_with(self.parts.len(), || None);
        let mut found = Vec::with_capacity(row_ids.len());
        for row_id in row_ids.iter().map(|row_id| row_id.cast_unsigned()) {
            let mut lookup = None;
            for part in ranges.containing(row_id) {
                let opened = match open[part].take() {
                    Some(opened) => opened,
                    None => OpenPart::new(self, part, row_ids.len())?,
                };
                lookup = open[part].insert(opened).position(row_id);
                if lookup.is_some() {
                    break;
                }
            }
            found.push(lookup.unwrap_or(RowLookup::Nowhere));
        }
        Ok(found)
    }
}
