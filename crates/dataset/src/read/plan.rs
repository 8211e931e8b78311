//! Map positions to rows of fragments. Each row records its place in the result. If there are several fragments, the rows are
//! sorted so that each block is visited once.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use penstock_error::{Error, Result};
use penstock_format::manifest::Fragment;

use crate::selection::out_of_range;
use crate::snapshot::Snapshot;
use crate::snapshot::live::{LiveFragments, ManifestPart};
use crate::snapshot::overlays::{Divided, Patch};
use crate::snapshot::row_ids::row_ids_of;

/// The samples that a take reads. All columns of the take share this plan.
pub struct Plan {
    /// Positions in the order requested.
    pub positions: Vec<u64>,
    pub groups: Vec<FragmentRows>,
    /// The rows of all groups, each with its place in the result. The rows of a group ascend. In a snapshot with only one fragment,
    /// they keep the requested order, because sorting would cost as much as it saves. Readers that need neighbouring rows together
    /// use `ascending`.
    rows: Vec<(u64, u32)>,
}

/// Rows of one fragment.
pub struct FragmentRows {
    part: Arc<PlannedPart>,
    index: usize,
    /// The row of the part at which the fragment begins.
    begin: u64,
    /// Where the rows are in the list of the plan.
    rows: Range<usize>,
}

/// A part whose samples a plan reads.
struct PlannedPart {
    number: usize,
    fragments: LiveFragments,
    /// The newer values of columns that were read so far.
    patches: Mutex<Vec<(u64, Arc<Patch>)>>,
}

impl PlannedPart {
    /// Plan a part of which `wanted` samples are read.
    fn new(snapshot: &Snapshot, number: usize, wanted: usize) -> Result<Arc<PlannedPart>> {
        Ok(Arc::new(PlannedPart {
            number,
            fragments: snapshot.live_fragments(number, wanted)?,
            patches: Mutex::default(),
        }))
    }

    fn patch(&self, snapshot: &Snapshot, column: u64) -> Result<Arc<Patch>> {
        let mut known = self.patches.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, patch)) = known.iter().find(|(of, _)| *of == column) {
            return Ok(patch.clone());
        }
        let patch = snapshot.patch(self.number, self.fragments.as_slice(), column)?;
        known.push((column, patch.clone()));
        Ok(patch)
    }
}

impl FragmentRows {
    pub fn fragment(&self) -> &Fragment {
        &self.part.fragments.as_slice()[self.index]
    }

    /// Divide the group's rows into those whose value in a column is in the fragment's file, and those that have a newer value. Returns
    /// None if no row has a newer value. Cost: as for `Snapshot::patch`.
    pub fn divided(&self, snapshot: &Snapshot, column: u64, rows: &[(u64, u32)]) -> Result<Option<Divided<u32>>> {
        if !snapshot.overlays.changes(column) {
            return Ok(None);
        }
        let mut divided = Divided::default();
        if !self.part.patch(snapshot, column)?.divide(self.begin, rows, &mut divided) {
            return Ok(None);
        }
        divided.newer.sort_by_key(|(overlay, _)| *overlay);
        Ok(Some(divided))
    }
}

/// Return rows with their places, in ascending order.
pub fn ascending(rows: &[(u64, u32)]) -> Cow<'_, [(u64, u32)]> {
    match rows.is_sorted() {
        true => Cow::Borrowed(rows),
        false => Cow::Owned(sorted(rows)),
    }
}

impl Plan {
    pub fn new(snapshot: &Snapshot, positions: Vec<u64>) -> Result<Plan> {
        if positions.len() > u32::MAX as usize {
            return Err(Error::new("invalid-argument", format!("cannot take {} samples at once", positions.len()))
                .hint("take fewer, or scan"));
        }
        if let Some(place) = positions.iter().position(|position| *position >= snapshot.len()) {
            return Err(out_of_range(positions[place] as i64, snapshot.len()).rows(vec![place as u64]));
        }
        let (rows, groups) = match &snapshot.parts[..] {
            [ManifestPart::Fragment(_)] if !positions.is_empty() => {
                let part = PlannedPart::new(snapshot, 0, positions.len())?;
                let row_of = |(place, position): (usize, &u64)| (part.fragments.physical_row(*position), place as u32);
                let rows: Vec<(u64, u32)> = positions.iter().enumerate().map(row_of).collect();
                let all = 0..rows.len();
                (rows, vec![FragmentRows { part, index: 0, begin: 0, rows: all }])
            }
            _ => {
                let mut rows: Vec<(u64, u32)> =
                    (0..).zip(&positions).map(|(place, position)| (*position, place)).collect();
                if !rows.is_sorted() {
                    rows = sorted(&rows);
                }
                let groups = groups_of(snapshot, &mut rows)?;
                (rows, groups)
            }
        };
        Ok(Plan { positions, groups, rows })
    }

    /// Return the rows of a group, each with its place in the result.
    pub fn rows(&self, group: &FragmentRows) -> &[(u64, u32)] {
        &self.rows[group.rows.clone()]
    }

    /// Return the number of samples in the result.
    pub fn len(&self) -> usize {
        self.positions.len()
    }

    pub fn is_empty(&self) -> bool {
        self.positions.is_empty()
    }

    /// Return the row ids in the order requested.
    pub fn row_ids(&self) -> Vec<i64> {
        let mut ids = vec![0; self.len()];
        for group in &self.groups {
            row_ids_of(group.fragment(), &ascending(self.rows(group)), &mut ids);
        }
        ids
    }
}

/// Sort pairs of (position or row, place). Packing each pair into one machine word makes sorting three times as fast.
fn sorted(pairs: &[(u64, u32)]) -> Vec<(u64, u32)> {
    let place_bits = u32::BITS - pairs.iter().fold(1, |all, (_, place)| all | place).leading_zeros();
    if pairs.iter().any(|(key, _)| *key >> (64 - place_bits) != 0) {
        let mut order = pairs.to_vec();
        order.sort_unstable();
        return order;
    }
    let mut keys: Vec<u64> = pairs.iter().map(|(key, place)| key << place_bits | u64::from(*place)).collect();
    keys.sort_unstable();
    keys.into_iter().map(|key| (key >> place_bits, (key & ((1 << place_bits) - 1)) as u32)).collect()
}

/// Group ascending positions by fragment, and replace each position by its row in the fragment.
fn groups_of(snapshot: &Snapshot, rows: &mut [(u64, u32)]) -> Result<Vec<FragmentRows>> {
    let (mut groups, mut next): (Vec<FragmentRows>, usize) = (Vec::new(), 0);
    while let Some((position, _)) = rows.get(next) {
        let live = snapshot.live()?;
        let number = live.part_of(*position);
        let (start, end) = (live.start(number), live.start(number + 1));
        let wanted = rows[next..].partition_point(|(position, _)| *position < end);
        let part = PlannedPart::new(snapshot, number, wanted)?;
        // The rows of the current fragment, counted from the beginning of the part, and the next fragment.
        let (mut within, mut index, mut hint) = (0..0, 0, 0);
        while let Some((position, _)) = rows.get(next).filter(|(position, _)| *position < end) {
            let run = part.fragments.run(&mut hint, position - start);
            // The counts of the part have been checked, so one of the fragments contains the row.
            while position - start + run.deleted >= within.end {
                within = within.end..within.end + part.fragments.as_slice()[index].samples;
                index += 1;
            }
            if groups.last().is_none_or(|group| group.index != index - 1 || !Arc::ptr_eq(&group.part, &part)) {
                groups.push(FragmentRows {
                    part: part.clone(),
                    index: index - 1,
                    begin: within.start,
                    rows: next..next,
                });
            }
            // Up to this position, rows of the fragment differ from positions by the same number.
            let same = end.min(start + run.end.min(within.end - run.deleted));
            let shift = start.wrapping_add(within.start).wrapping_sub(run.deleted);
            let in_run = rows[next..].iter_mut().take_while(|(position, _)| *position < same);
            next += in_run.map(|(row, _)| *row = row.wrapping_sub(shift)).count();
            if let Some(group) = groups.last_mut() {
                group.rows.end = next;
            }
        }
    }
    Ok(groups)
}
