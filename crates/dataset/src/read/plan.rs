//! Map positions to rows of fragments. Each row records its place in the result. If there are several fragments, the rows are
//! sorted so that each block is visited once.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};

use penstock_error::{Error, Result};
use penstock_format::manifest::Fragment;

use crate::snapshot::Snapshot;
use crate::snapshot::live::{LiveFragments, Part};
use crate::snapshot::overlays::PartPatches;
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
    pub rows: Vec<(u64, u32)>,
}

/// Rows of a group, by where their values are.
pub struct Divided {
    pub current: Vec<(u64, u32)>,
    /// Samples of overlays with their places in the result, by overlay.
    pub newer: Vec<(usize, (u64, u32))>,
}

/// A part whose samples a plan reads.
struct PlannedPart {
    number: usize,
    fragments: LiveFragments,
    /// The newer values of columns that were read so far.
    patches: Mutex<Vec<(u64, Arc<PartPatches>)>>,
}

impl PlannedPart {
    fn new(snapshot: &Snapshot, number: usize) -> Result<Arc<PlannedPart>> {
        Ok(Arc::new(PlannedPart { number, fragments: snapshot.live_fragments(number)?, patches: Mutex::default() }))
    }
}

impl Group {
    pub fn fragment(&self) -> &Fragment {
        &self.part.fragments.as_slice()[self.index]
    }

    /// Divide the rows into those whose value in a column is in the fragment's file, and those that have a newer value, each with its
    /// overlay and the sample there. Returns None if no row has a newer value. Cost: as for `Snapshot::patches`.
    pub fn divided(&self, snapshot: &Snapshot, column: u64) -> Result<Option<Divided>> {
        if !snapshot.overlays.changes(column) {
            return Ok(None);
        }
        let patches = {
            let mut known = self.part.patches.lock().unwrap_or_else(PoisonError::into_inner);
            match known.iter().find(|(of, _)| *of == column) {
                Some((_, patches)) => patches.clone(),
                None => {
                    let patches = snapshot.patches(self.part.number, self.part.fragments.as_slice(), column)?;
                    known.push((column, patches.clone()));
                    patches
                }
            }
        };
        let patch = &patches[self.index];
        if patch.is_empty() {
            return Ok(None);
        }
        let (mut current, mut newer) = (Vec::new(), Vec::new());
        if !patch.divide(&self.ascending(), &mut current, &mut newer) {
            return Ok(None);
        }
        newer.sort_by_key(|(overlay, _)| *overlay);
        Ok(Some(Divided { current, newer }))
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
                let asked = |(place, position): (usize, &u64)| (part.fragments.physical_row(0, *position), place as u32);
                let rows = positions.iter().enumerate().map(asked).collect();
                vec![Group { part, index: 0, rows }]
            }
            _ => {
                let mut order: Vec<(u64, u32)> = positions.iter().enumerate().map(asked).collect();
                if !order.is_sorted() {
                    order = sorted(&order);
                }
                let mut builder = Builder { snapshot, groups: Vec::new(), part: None, next: (0, 0), end: 0, gap: 0 };
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
    /// The next fragment of that part, and the position at which the fragment begins.
    next: (usize, u64),
    /// The position at which the fragment of the last group ends.
    end: u64,
    /// The place of the last row among the deleted rows of its fragment.
    gap: usize,
}

impl Builder<'_> {
    /// Add the next position. Positions must ascend.
    fn push(&mut self, position: u64, place: u32) -> Result<()> {
        while self.groups.is_empty() || position >= self.end {
            self.open(position)?;
        }
        if let Some(group) = self.groups.last_mut() {
            let begin = self.end - group.part.fragments.live_samples(group.index);
            let row = group.part.fragments.next_physical_row(group.index, &mut self.gap, position - begin);
            group.rows.push((row, place));
        }
        Ok(())
    }

    /// Begin the group of the fragment that contains `position`.
    fn open(&mut self, position: u64) -> Result<()> {
        let live = self.snapshot.live()?;
        let number = live.part_of(position);
        let part = match &self.part {
            Some(open) if open.number == number => open.clone(),
            _ => {
                let part = PlannedPart::new(self.snapshot, number)?;
                self.part = Some(part.clone());
                self.next = (0, live.start(number));
                part
            }
        };
        let fragments = &part.fragments;
        let (mut index, mut begin) = self.next;
        // `Context::page` has checked the page's counts, so one of the fragments contains the position.
        while position >= begin + fragments.live_samples(index) {
            begin += fragments.live_samples(index);
            index += 1;
        }
        self.end = begin + fragments.live_samples(index);
        self.next = (index + 1, self.end);
        self.gap = 0;
        self.groups.push(Group { part, index, rows: Vec::new() });
        Ok(())
    }
}
