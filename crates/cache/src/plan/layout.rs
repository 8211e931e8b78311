//! What a plan covers: the units of all objects, the drive of each one, and how they are fetched and evicted.

use std::collections::HashMap;
use std::ops::Range;
use std::time::Duration;

use super::units::{Future, Member, Object, Unit, Units, Uses};
use crate::cache::Cached;
use crate::drive::Drive;
use crate::evict;
use crate::extent::{BLOCK_PAGES, EXTENT_BYTES, Extent, PAGE_BYTES};
use crate::fill::{Fill, JOINED_BYTES, Run};

/// If everything fits, a fetch includes its neighbours in a window of this length, because stores send one long range faster than many short ones.
/// Not in the first fetches, for which a batch waits.
const WINDOW_PAGES: u32 = BLOCK_PAGES;
const WINDOWS_FROM_BYTES: u64 = 4 << 20;

/// A page that gives way may be locked by a fetch of its neighbours.
const PATIENCE: Duration = Duration::from_secs(2);

const EXTENT_PAGES: u64 = EXTENT_BYTES / PAGE_BYTES;

/// A set of pages of objects: a bit a page, for 64 pages at a time.
#[derive(Default)]
pub struct Pages(HashMap<(u32, u64), u64>);

impl Pages {
    /// Add a page. Returns whether it is new.
    pub fn insert(&mut self, object: u32, page: u64) -> bool {
        let bits = self.0.entry((object, page / 64)).or_default();
        let before = std::mem::replace(bits, *bits | 1 << (page % 64));
        before != *bits
    }

    pub fn remove(&mut self, object: u32, page: u64) {
        if let Some(bits) = self.0.get_mut(&(object, page / 64)) {
            *bits &= !(1 << (page % 64));
        }
    }
}

pub struct Layout<'a> {
    pub cached: &'a Cached,
    pub objects: Vec<Object>,
    pub units: Units,
    pub drive_of: Vec<u16>,
    /// Whether each unit is used at all.
    pub used: Vec<bool>,
    /// Whether the drives have room for everything.
    pub fits: bool,
}

impl Layout<'_> {
    pub fn drive_number(&self, unit: u32) -> usize {
        usize::from(self.drive_of[unit as usize])
    }

    /// Collect the uses of steps by the loaders that read them.
    pub fn uses(&self, future: &dyn Future, members: &[Member], steps: Range<u64>) -> Uses {
        let units_of = |step| {
            let mut ranks: Vec<u64> = members.iter().filter(|member| member.reads(step)).map(|member| member.rank).collect();
            ranks.sort_unstable();
            ranks.dedup();
            self.units.of(ranks.into_iter().flat_map(|rank| future.samples_of(step, rank)))
        };
        Uses::new(self.units.units.len(), steps.start, steps.map(units_of))
    }

    /// Return whether the drives have room for all samples.
    pub fn fits(&self) -> bool {
        let drives = &self.cached.drives().drives;
        let mut free: Vec<i128> = drives.iter().map(|drive| i128::from(drive.room_bytes(&self.cached.store).unwrap_or(0))).collect();
        let mut last = None;
        let is_needed = self.units.is_needed();
        for ((unit, drive), _) in self.units.units.iter().zip(&self.drive_of).zip(is_needed).filter(|(_, is_needed)| *is_needed) {
            let room = &mut free[usize::from(*drive)];
            *room -= i128::from(unit.bytes());
            if last.replace((unit.object, unit.extent)) != Some((unit.object, unit.extent)) {
                let Object { name, bytes } = &self.objects[unit.object as usize];
                *room -= i128::from(Extent::overhead_bytes(*bytes, &self.cached.key(name, unit.extent)));
            }
        }
        free.iter().all(|room| *room >= 0)
    }

    /// Fetch units, and keep them. The loader reads what could not be fetched, and reports why.
    pub fn fetch(&self, fetches: Vec<u32>) {
        let _ = Fill::warm(self.cached, self.fits, self.runs(&self.chosen(fetches)));
    }

    /// Return these units, with their neighbours if that is worth while.
    pub fn chosen(&self, fetches: Vec<u32>) -> Vec<u32> {
        let bytes = self.units.bytes(&fetches);
        if self.fits && bytes >= WINDOWS_FROM_BYTES { self.with_neighbours(fetches) } else { fetches }
    }

    /// Return the requests for units of which `here` has some pages, and their bytes. The others are added to `here`.
    pub fn requests(&self, units: &[u32], here: &mut Pages) -> (u64, u64) {
        let gap_pages = if self.fits { self.cached.cold.features().request_cost.gap_bytes / PAGE_BYTES } else { 0 };
        let most = self.cached.cold.features().range_bytes.min(JOINED_BYTES);
        let mut wanted: Vec<(u32, Range<u64>)> = units.iter().map(|unit| self.pages_of(*unit)).collect();
        wanted.sort_unstable_by_key(|(object, pages)| (*object, pages.start));
        let mut runs: Vec<(u32, Range<u64>)> = Vec::new();
        for (object, pages) in wanted {
            match runs.last_mut() {
                // Gaps end with the extent.
                Some((of, run)) if *of == object && pages.start <= run.end + gap_pages * u64::from(pages.start % EXTENT_PAGES != 0) => {
                    run.end = run.end.max(pages.end);
                }
                _ => runs.push((object, pages)),
            }
        }
        let (mut requests, mut bytes) = (0, 0);
        for (object, run) in runs {
            let mut lacking = 0;
            let object_bytes = self.objects[object as usize].bytes;
            for page in run.start..=run.end {
                if page < run.end && here.insert(object, page) {
                    lacking += PAGE_BYTES.min(object_bytes.saturating_sub(page * PAGE_BYTES));
                } else {
                    requests += u64::div_ceil(lacking, most);
                    bytes += std::mem::take(&mut lacking);
                }
            }
        }
        (requests, bytes)
    }

    /// Return the object of a unit, and its pages in the object.
    pub fn pages_of(&self, unit: u32) -> (u32, Range<u64>) {
        let Unit { object, extent, pages } = &self.units.units[unit as usize];
        let first = u64::from(*extent) * EXTENT_PAGES;
        (*object, first + u64::from(pages.start)..first + u64::from(pages.end))
    }

    /// Fetch units into memory.
    pub fn ahead(&self, fetches: &[u32]) -> Fill<'_> {
        Fill::ahead(self.cached, self.runs(fetches))
    }

    fn runs(&self, fetches: &[u32]) -> impl Iterator<Item = Run> {
        fetches.iter().map(|unit| {
            let Unit { object, extent, pages } = &self.units.units[*unit as usize];
            let Object { name, bytes } = &self.objects[*object as usize];
            (name.clone(), *bytes, *extent, pages.clone())
        })
    }

    pub fn evict(&self, unit: u32) {
        let (drive, unit) = (self.drive(unit), &self.units.units[unit as usize]);
        let key = self.cached.key(&self.objects[unit.object as usize].name, unit.extent);
        let cleared = drive
            .find(&key, None)
            .and_then(|found| found.map_or(Ok(0), |extent| evict::clear(drive, &extent, unit.pages.clone(), PATIENCE)));
        if let Err(error) = cleared {
            drive.failed(&error);
        }
    }

    /// Add the units that are used in the same windows.
    fn with_neighbours(&self, mut fetches: Vec<u32>) -> Vec<u32> {
        let units = &self.units.units;
        let window = |unit: usize| (units[unit].object, units[unit].extent, units[unit].pages.start / WINDOW_PAGES);
        let mut windows: Vec<_> = fetches.iter().map(|unit| window(*unit as usize)).collect();
        windows.sort_unstable();
        windows.dedup();
        for wanted in windows {
            let begin = units.partition_point(|unit| (unit.object, unit.extent, unit.pages.start / WINDOW_PAGES) < wanted);
            let inside = (begin..units.len()).take_while(|unit| window(*unit) == wanted).filter(|unit| self.used[*unit]);
            fetches.extend(inside.map(|unit| unit as u32));
        }
        fetches.sort_unstable();
        fetches.dedup();
        fetches
    }

    fn drive(&self, unit: u32) -> &Drive {
        &self.cached.drives().drives[self.drive_number(unit)]
    }
}
