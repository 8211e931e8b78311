//! Map positions to rows of fragments. Each row records its place in the result. If there are several fragments, the rows are
//! sorted so that each block is visited once.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use penstock_error::{Error, Result};
use penstock_format::manifest::Fragment;

use crate::snapshot::Snapshot;
use crate::snapshot::live::{LiveFragments, Part};
use crate::snapshot::overlays::{Divided, Patch};
use crate::snapshot::row_ids::row_ids_of;

/// The samples that a take reads. All columns of the take share this plan.
pub struct Plan {
    /// Positions in the order requested.
    pub positions: Vec<u64>,
    pub groups: Vec<Group>,
}

/// Rows of one fragment, each with its place in the result. The rows ascend. In a snapshot with only one fragment, they keep the
/// requested order, because sorting would cost as much as it saves. Readers that need neighbouring rows together use `ascending`.
pub struct Group {
    part: Arc<PlannedPart>,
    index: usize,
    /// The row of the part at which the fragment begins.
    begin: u64,
    pub rows: Vec<(u64, u32)>,
}

/// A part whose samples a plan reads.
struct PlannedPart {
    number: usize,
    fragments: LiveFragments,
    /// The newer values of columns that were read so far.
    patches: Mutex<Vec<(u64, Arc<Patch>)>>,
}

impl PlannedPart {
    fn new(snapshot: &Snapshot, number: usize) -> Result<Arc<PlannedPart>> {
        Ok(Arc::new(PlannedPart { number, fragments: snapshot.live_fragments(number)?, patches: Mutex::default() }))
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

impl Group {
    pub fn fragment(&self) -> &Fragment {
        &self.part.fragments.as_slice()[self.index]
    }

    /// Divide the rows into those whose value in a column is in the fragment's file, and those that have a newer value. Returns None if
    /// no row has a newer value. Cost: as for `Snapshot::patch`.
    pub fn divided(&self, snapshot: &Snapshot, column: u64) -> Result<Option<Divided<u32>>> {
        if !snapshot.overlays.changes(column) {
            return Ok(None);
        }
        let mut divided = Divided::default();
        if !self.part.patch(snapshot, column)?.divide(self.begin, &self.rows, &mut divided) {
            return Ok(None);
        }
        divided.newer.sort_by_key(|(overlay, _)| *overlay);
        Ok(Some(divided))
    }

    /// Return the rows in ascending order, so that each block is visited once and files are read forwards.
    pub fn ascending(&self) -> Cow<'_, [(u64, u32)]> {
        ascending(&self.rows)
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
            return Err(
                Error::new("invalid-argument", format!("cannot take {} samples at once", positions.len())).hint("take fewer, or scan")
            );
        }
        if let Some(place) = positions.iter().position(|position| *position >= snapshot.len()) {
            return Err(out_of_range(positions[place] as i64, snapshot.len()).rows(vec![place as u64]));
        }
        let asked = |(place, position): (usize, &u64)| (*position, place as u32);
        let groups = match &snapshot.parts[..] {
            [Part::Fragment(_)] if !positions.is_empty() => {
                let part = PlannedPart::new(snapshot, 0)?;
                let asked = |(place, position): (usize, &u64)| (part.fragments.physical_row(*position), place as u32);
                let rows = positions.iter().enumerate().map(asked).collect();
                vec![Group { part, index: 0, begin: 0, rows }]
            }
            _ => {
                let mut order: Vec<(u64, u32)> = positions.iter().enumerate().map(asked).collect();
                if !order.is_sorted() {
                    order = sorted(&order);
                }
                let mut builder = Builder { snapshot, groups: Vec::new(), part: None, positions: 0..0, rows: 0..0, next: 0, gap: 0 };
                for (position, place) in order {
                    builder.push(position, place)?;
                }
                builder.groups
            }
        };
        Ok(Plan { positions, groups })
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
            row_ids_of(group.fragment(), &group.ascending(), &mut ids);
        }
        ids
    }
}

/// Make the error for a position outside a snapshot or view.
pub fn out_of_range(position: i64, len: u64) -> Error {
    Error::new(
        "position-out-of-range",
        match len {
            0 => format!("cannot take position {position}: there are no samples"),
            _ => format!("cannot take position {position}: there are {len} samples, at positions 0 to {}", len - 1),
        },
    )
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

struct Builder<'a> {
    snapshot: &'a Snapshot,
    groups: Vec<Group>,
    part: Option<Arc<PlannedPart>>,
    /// The positions of the part.
    positions: Range<u64>,
    /// The rows of the current fragment, counted from the beginning of the part, and the next fragment.
    rows: Range<u64>,
    next: usize,
    /// The place of the last row among the deleted rows of the part.
    gap: usize,
}

impl Builder<'_> {
    /// Add the next position. Positions must ascend.
    fn push(&mut self, position: u64, place: u32) -> Result<()> {
        if position >= self.positions.end {
            self.open(position)?;
        }
        let Some(part) = &self.part else { return Ok(()) };
        let row = part.fragments.next_physical_row(&mut self.gap, position - self.positions.start);
        if row >= self.rows.end {
            let fragments = part.fragments.as_slice();
            // The counts of the part have been checked, so one of the fragments contains the row.
            while row >= self.rows.end {
                self.rows = self.rows.end..self.rows.end + fragments[self.next].samples;
                self.next += 1;
            }
            self.groups.push(Group { part: part.clone(), index: self.next - 1, begin: self.rows.start, rows: Vec::new() });
        }
        if let Some(group) = self.groups.last_mut() {
            group.rows.push((row - self.rows.start, place));
        }
        Ok(())
    }

    /// Begin the part that contains `position`.
    fn open(&mut self, position: u64) -> Result<()> {
        let live = self.snapshot.live()?;
        let number = live.part_of(position);
        self.part = Some(PlannedPart::new(self.snapshot, number)?);
        self.positions = live.start(number)..live.start(number + 1);
        (self.rows, self.next, self.gap) = (0..0, 0, 0);
        Ok(())
    }
}
