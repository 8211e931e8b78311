//! What a plan covers: the runs of all objects, the drive of each one, and how they are fetched and evicted.

use std::collections::HashMap;
use std::ops::Range;
use std::time::Duration;

use super::page_runs::{Future, Member, Object, PageRun, PageRuns, Uses};
use crate::cache::Cached;
use crate::evict;
use crate::extent::{EXTENT_BYTES, Extent, Key, PAGE_BYTES, STRETCH_PAGES};
use crate::read_through::{ExtentPages, JOINED_BYTES, ReadThrough};

/// If everything fits, a fetch includes its neighbours in a window of this length, because stores send one long range faster than many short ones.
/// Not in the first fetches, for which a batch waits.
const WINDOW_PAGES: u32 = STRETCH_PAGES;
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

pub struct PlanLayout<'a> {
    pub cached: &'a Cached,
    pub objects: Vec<Object>,
    pub page_runs: PageRuns,
    pub drive_of: Vec<u16>,
    /// Whether each run is used at all.
    pub used: Vec<bool>,
    /// Whether the drives have room for everything.
    pub fits: bool,
}

impl PlanLayout<'_> {
    pub fn new(cached: &Cached, objects: Vec<Object>, page_runs: PageRuns) -> PlanLayout<'_> {
        let mut layout = PlanLayout { cached, objects, page_runs, drive_of: Vec::new(), used: Vec::new(), fits: false };
        layout.drive_of =
            layout.page_runs.runs.iter().map(|run| cached.drives().number_of(&layout.key(run).0) as u16).collect();
        layout.fits = layout.fits();
        layout
    }

    /// Return the key of the extent that has a run, and the bytes of its object.
    pub fn key(&self, run: &PageRun) -> (Key, u64) {
        let Object { name, bytes } = &self.objects[run.object as usize];
        (self.cached.key(name, run.extent), *bytes)
    }

    /// Return the bytes of those runs that a drive holds.
    pub fn bytes_on(&self, drive: usize, runs: &[u32]) -> u64 {
        runs.iter().filter(|run| self.drive_number(**run) == drive).map(|run| self.run(*run).bytes()).sum()
    }

    pub fn run(&self, run: u32) -> &PageRun {
        &self.page_runs.runs[run as usize]
    }

    pub fn drive_number(&self, run: u32) -> usize {
        usize::from(self.drive_of[run as usize])
    }

    /// Collect the uses of steps by the loaders that read them.
    pub fn uses(&self, future: &dyn Future, members: &[Member], steps: Range<u64>) -> Uses {
        let runs_of = |step| {
            let mut ranks: Vec<u64> =
                members.iter().filter(|member| member.reads(step)).map(|member| member.rank).collect();
            ranks.sort_unstable();
            ranks.dedup();
            self.page_runs.of(ranks.into_iter().flat_map(|rank| future.samples_of(step, rank)))
        };
        Uses::new(self.page_runs.runs.len(), steps.start, steps.map(runs_of))
    }

    /// Return whether the drives have room for all samples.
    fn fits(&self) -> bool {
        let drives = &self.cached.drives().drives;
        let mut free: Vec<i128> =
            drives.iter().map(|drive| i128::from(drive.room_bytes(&self.cached.store).unwrap_or(0))).collect();
        let mut last = None;
        let is_needed = self.page_runs.is_needed();
        for ((run, drive), _) in
            self.page_runs.runs.iter().zip(&self.drive_of).zip(is_needed).filter(|(_, is_needed)| *is_needed)
        {
            let room = &mut free[usize::from(*drive)];
            *room -= i128::from(run.bytes());
            if last.replace((run.object, run.extent)) != Some((run.object, run.extent)) {
                let (key, object_bytes) = self.key(run);
                *room -= i128::from(Extent::overhead_bytes(object_bytes, &key));
            }
        }
        free.iter().all(|room| *room >= 0)
    }

    /// Fetch runs, and keep them. The loader reads what could not be fetched, and reports why.
    pub fn fetch(&self, fetches: Vec<u32>) {
        let _ = ReadThrough::warm(self.cached, self.fits, self.extent_pages(&self.chosen(fetches)));
    }

    /// Return these runs, with their neighbours if that is worth while.
    pub fn chosen(&self, fetches: Vec<u32>) -> Vec<u32> {
        let bytes = self.page_runs.bytes(&fetches);
        if self.fits && bytes >= WINDOWS_FROM_BYTES { self.with_neighbours(fetches) } else { fetches }
    }

    /// Return the requests for runs of which `here` has some pages, and their bytes. The others are added to `here`.
    pub fn requests(&self, runs: &[u32], here: &mut Pages) -> (u64, u64) {
        let gap_pages = if self.fits { self.cached.cold.features().request_cost.gap_bytes / PAGE_BYTES } else { 0 };
        let most = self.cached.cold.features().range_bytes.min(JOINED_BYTES);
        let mut wanted: Vec<(u32, Range<u64>)> = runs.iter().map(|run| self.pages_of(*run)).collect();
        wanted.sort_unstable_by_key(|(object, pages)| (*object, pages.start));
        let mut joined: Vec<(u32, Range<u64>)> = Vec::new();
        for (object, pages) in wanted {
            match joined.last_mut() {
                // Gaps end with the extent.
                Some((of, part))
                    if *of == object
                        && pages.start <= part.end + gap_pages * u64::from(pages.start % EXTENT_PAGES != 0) =>
                {
                    part.end = part.end.max(pages.end);
                }
                _ => joined.push((object, pages)),
            }
        }
        let (mut requests, mut bytes) = (0, 0);
        for (object, part) in joined {
            let mut lacking = 0;
            let object_bytes = self.objects[object as usize].bytes;
            for page in part.start..=part.end {
                if page < part.end && here.insert(object, page) {
                    lacking += PAGE_BYTES.min(object_bytes.saturating_sub(page * PAGE_BYTES));
                } else {
                    requests += u64::div_ceil(lacking, most);
                    bytes += std::mem::take(&mut lacking);
                }
            }
        }
        (requests, bytes)
    }

    /// Remove the pages of runs from a set.
    pub fn remove(&self, runs: &[u32], set: &mut Pages) {
        for (object, pages) in runs.iter().map(|run| self.pages_of(*run)) {
            pages.for_each(|page| set.remove(object, page));
        }
    }

    /// Return the object of a run, and its pages in the object.
    pub fn pages_of(&self, run: u32) -> (u32, Range<u64>) {
        let PageRun { object, extent, pages } = &self.run(run);
        let first = u64::from(*extent) * EXTENT_PAGES;
        (*object, first + u64::from(pages.start)..first + u64::from(pages.end))
    }

    /// Fetch runs into memory.
    pub fn ahead(&self, fetches: &[u32]) -> ReadThrough<'_> {
        ReadThrough::ahead(self.cached, self.extent_pages(fetches))
    }

    fn extent_pages(&self, fetches: &[u32]) -> impl Iterator<Item = ExtentPages> {
        fetches.iter().map(|run| {
            let PageRun { object, extent, pages } = &self.run(*run);
            let Object { name, bytes } = &self.objects[*object as usize];
            (name.clone(), *bytes, *extent, pages.clone())
        })
    }

    pub fn evict(&self, run: u32) {
        let (drive, run) = (&self.cached.drives().drives[self.drive_number(run)], self.run(run));
        if let Some(Some(extent)) = drive.succeeded(drive.find(&self.key(run).0, None)) {
            drive.succeeded(evict::clear(drive, &extent, run.pages.clone(), PATIENCE));
        }
    }

    /// Add the runs that are used in the same windows.
    fn with_neighbours(&self, mut fetches: Vec<u32>) -> Vec<u32> {
        let runs = &self.page_runs.runs;
        let window = |run: usize| (runs[run].object, runs[run].extent, runs[run].pages.start / WINDOW_PAGES);
        let mut windows: Vec<_> = fetches.iter().map(|run| window(*run as usize)).collect();
        windows.sort_unstable();
        windows.dedup();
        for wanted in windows {
            let begin = runs.partition_point(|run| (run.object, run.extent, run.pages.start / WINDOW_PAGES) < wanted);
            let inside = (begin..runs.len()).take_while(|run| window(*run) == wanted).filter(|run| self.used[*run]);
            fetches.extend(inside.map(|run| run as u32));
        }
        fetches.sort_unstable();
        fetches.dedup();
        fetches
    }
}
