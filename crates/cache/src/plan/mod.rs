//! A running plan of a loader whose order is known: pages are fetched before they are needed, and those that are needed last give way.
//!
//! One thread plans and fetches in the order of use. The loader asks before it reads a step (`before`) and reports when it has read it (`after`).

mod belady;
pub mod units;

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use penstock_error::{Error, Result};
use penstock_storage::process;

use crate::cache::Cached;
use crate::drive::Drive;
use crate::evict;
use crate::extent::{BLOCK_PAGES, Extent, PAGE_BYTES};
use crate::fill::Fill;
use crate::registry::Registered;
use belady::{Belady, Fetch, NEVER};
use units::{Need, Object, Unit, Units, Uses};

/// What a loader will read.
pub trait Future: Send + Sync {
    /// Return the number of samples. They are numbered from 0.
    fn samples(&self) -> u32;

    /// Return the objects and the bytes of them that each sample needs. Cost: reads the tails of data files.
    fn needs(&self) -> Result<(Vec<Object>, Vec<Need>)>;

    /// Return the number of steps in an epoch.
    fn epoch_steps(&self) -> u64;

    /// Return the samples of a step. Steps are numbered from 0 and continue in the next epoch without end.
    fn samples_of(&self, step: u64) -> Vec<u32>;
}

/// Bytes that are fetched at a time at first and at most. The first ones are small, so that the first batch need not wait for later ones.
const FETCH_BYTES: (u64, u64) = (1 << 20, 32 << 20);
/// If everything fits, a fetch includes its neighbours in a window of this length, because stores send one long range faster than many short ones.
/// Not in the first fetches, for which a batch waits.
const WINDOW_PAGES: u32 = BLOCK_PAGES;
const WINDOWS_FROM_BYTES: u64 = 4 << 20;
/// A loader does not wait longer than this for its plan. It then reads on its own.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often a waiting thread looks whether it should stop.
const LOOK: Duration = Duration::from_millis(50);

/// What an epoch would read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Foreseen {
    pub cached_bytes: u64,
    pub cold_bytes: u64,
}

#[derive(Debug, Default)]
struct State {
    /// All steps below this are read, and steps that were read out of order.
    read: u64,
    read_early: BTreeSet<u64>,
    /// All fetches for steps below this are done.
    ready: u64,
    /// Whether the plan knows the order. Until then, the loader reads on its own.
    started: bool,
    ended: bool,
}

/// A plan that runs for a loader. It ends when this is dropped.
pub struct Plan {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    generation: u64,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    stop: Arc<AtomicBool>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Relaxed)
    }

    fn set(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }
}

impl Plan {
    /// Start to plan and fetch.
    pub fn start(cached: Cached, future: Arc<dyn Future>) -> Result<Plan> {
        let shared = Arc::new(Shared { state: Mutex::default(), changed: Condvar::new(), stop: Arc::default() });
        let own = shared.clone();
        let run = move || {
            process::heed(own.stop.clone());
            let planned = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| Planner::run(&own, &cached, future.as_ref())));
            // Without a plan, the loader reads on its own, and reports what fails.
            drop(planned);
            own.set(|state| state.ended = true);
        };
        let thread = std::thread::Builder::new().name("penstock-plan".into()).spawn(run);
        let thread = thread.map_err(|error| Error::new("storage-failed", format!("cannot start a thread: {error}")))?;
        Ok(Plan { shared, thread: Mutex::new(Some(thread)), generation: process::generation() })
    }

    /// Return what a plan would find cached and what it would fetch in the first epoch, in bytes. Cost: reads the checksums of cached extents.
    pub fn foresee(cached: &Cached, future: &dyn Future) -> Result<Foreseen> {
        let mut planner = Planner::new(cached, future)?;
        let steps = future.epoch_steps().max(1);
        let (current, later) = (planner.uses(future, 0..steps), planner.uses(future, steps..2 * steps));
        planner.find_cached(&current, &later);
        let mut foreseen = Foreseen::default();
        let next_uses = current.next_uses(&later.first_use);
        let mut next_uses = next_uses.iter();
        for step in current.steps() {
            for (unit, next_use) in current.of(step).iter().zip(&mut next_uses) {
                let bytes = planner.units.units[*unit as usize].bytes();
                match planner.access(*unit, step, *next_use) {
                    None => foreseen.cached_bytes += bytes,
                    Some(_) => foreseen.cold_bytes += bytes,
                }
            }
        }
        Ok(foreseen)
    }

    /// Return whether the plan knows the order, or has ended.
    pub fn has_started(&self) -> bool {
        let state = self.shared.lock();
        state.started || state.ended
    }

    /// Wait until the pages that step `step` needs are cached, as far as the plan keeps them.
    pub fn before(&self, step: u64) {
        let began = Instant::now();
        let mut state = self.shared.lock();
        while state.started
            && state.ready <= step
            && !state.ended
            && !self.shared.is_stopped()
            && began.elapsed() < PATIENCE
            && !process::interrupted()
        {
            (state, _) = self.shared.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Note that a step has been read, so that its pages may give way.
    pub fn after(&self, step: u64) {
        let mut state = self.shared.lock();
        if state.ended {
            return;
        }
        let State { read, read_early, .. } = &mut *state;
        read_early.insert(step);
        while read_early.remove(read) {
            *read += 1;
        }
        self.shared.changed.notify_all();
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        if self.generation != process::generation() {
            return; // A forked process lacks its parent's thread, which may have held the lock.
        }
        self.shared.stop.store(true, Relaxed);
        self.shared.set(|_| {}); // A thread that is about to wait sees the flag or is woken.
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = thread.join(); // A panic was caught.
        }
    }
}

/// The plan of one loader while it runs.
struct Planner<'a> {
    cached: &'a Cached,
    objects: Vec<Object>,
    units: Units,
    /// The drive of each unit, and for each drive what it will hold.
    drive_of: Vec<u16>,
    caches: Vec<Belady>,
    /// Whether each unit is used at all.
    used: Vec<bool>,
    /// Whether the drives have room for everything.
    fits: bool,
    /// The plan is at most this far ahead of the loader: an epoch.
    steps_ahead: u64,
}

impl Planner<'_> {
    fn new<'a>(cached: &'a Cached, future: &dyn Future) -> Result<Planner<'a>> {
        let (objects, needs) = future.needs()?;
        let units = Units::new(future.samples(), needs);
        let key = |unit: &Unit| cached.key(&objects[unit.object as usize].name, unit.extent);
        let drive_of = units.units.iter().map(|unit| cached.drives().number_of(&key(unit)) as u16).collect();
        Ok(Planner {
            cached,
            objects,
            units,
            drive_of,
            caches: Vec::new(),
            used: Vec::new(),
            fits: false,
            steps_ahead: future.epoch_steps().max(1),
        })
    }

    fn run(shared: &Shared, cached: &Cached, future: &dyn Future) -> Result<()> {
        let mut planner = Planner::new(cached, future)?;
        let drives = &cached.drives().drives;
        let plans =
            drives.iter().map(|drive| Registered::new(&drive.plans_folder(), &cached.store).inspect_err(|error| drive.failed(error)));
        let _registered: Vec<Registered> = plans.filter_map(std::io::Result::ok).collect();
        planner.follow(shared, future)
    }

    fn uses(&self, future: &dyn Future, steps: Range<u64>) -> Uses {
        Uses::new(self.units.units.len(), steps.start, steps.map(|step| self.units.of(future.samples_of(step).into_iter())))
    }

    /// Use a unit at a step, and return the fetch that this costs.
    fn access(&mut self, unit: u32, step: u64, next_use: u64) -> Option<Fetch> {
        self.caches[usize::from(self.drive_of[unit as usize])].access(unit, step, next_use)
    }

    /// Plan one epoch after the other, and fetch what each one needs.
    fn follow(&mut self, shared: &Shared, future: &dyn Future) -> Result<()> {
        let steps = self.steps_ahead;
        // The loader has gone on in the meantime.
        let begin = shared.lock().read;
        let (mut current, mut later) = (self.uses(future, begin..begin + steps), self.uses(future, begin + steps..begin + 2 * steps));
        // If everything fits, nothing is evicted, and reads may keep what they fetch beside the plan.
        self.fits = self.find_cached(&current, &later);
        let _planned = (!self.fits).then(|| self.cached.planned());
        let (mut bytes, mut ready) = (FETCH_BYTES.0, begin);
        shared.set(|state| (state.started, state.ready) = (true, begin));
        loop {
            let next_uses = current.next_uses(&later.first_use);
            let mut next_uses = next_uses.iter();
            let (mut group, mut has_fetched) = (Group::default(), false);
            for step in current.steps() {
                for (unit, next_use) in current.of(step).iter().zip(&mut next_uses) {
                    match self.access(*unit, step, *next_use) {
                        None => {}
                        Some(fetch) if fetch.keep => {
                            // The loader must be able to read the steps that this fetch waits for.
                            if fetch.from > ready {
                                if !self.execute(shared, std::mem::take(&mut group), step) {
                                    return Ok(());
                                }
                                ready = step;
                            }
                            group.add(fetch, &self.units);
                            has_fetched = true;
                        }
                        Some(_) => {}
                    }
                }
                // A step whose pages are ready must not wait for a group to fill.
                if group.bytes >= bytes || group.fetches.is_empty() || step + 1 == current.steps().end {
                    if !self.execute(shared, std::mem::take(&mut group), step + 1) {
                        return Ok(());
                    }
                    (bytes, ready) = ((2 * bytes).min(FETCH_BYTES.1), step + 1);
                }
            }
            if self.fits && !has_fetched {
                // Everything is cached, and stays so while the plan is registered. There is nothing left to plan.
                let mut state = shared.lock();
                state.ended = true;
                while !shared.is_stopped() {
                    state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                return Ok(());
            }
            let end = later.steps().end;
            current = std::mem::replace(&mut later, self.uses(future, end..end + steps));
        }
    }

    /// Begin with the units that are cached already, and with the room that the drives have. Returns whether everything fits.
    fn find_cached(&mut self, current: &Uses, later: &Uses) -> bool {
        let drives = &self.cached.drives().drives;
        self.used = current.first_use.iter().zip(&later.first_use).map(|(one, other)| *one.min(other) != NEVER).collect();
        let (mut known, mut cached): (Option<Known>, Vec<(u32, u64)>) = (None, Vec::new());
        let mut used_bytes = vec![0; drives.len()];
        let mut room_bytes: Vec<u64> = drives.iter().map(|drive| drive.room_bytes(&self.cached.store).unwrap_or(0)).collect();
        for (index, unit) in self.units.units.iter().enumerate() {
            let next_use = current.first_use[index].min(later.first_use[index]);
            let number = usize::from(self.drive_of[index]);
            if next_use == NEVER {
                continue;
            }
            used_bytes[number] += unit.bytes();
            if known.as_ref().is_none_or(|known| (known.object, known.extent) != (unit.object, unit.extent)) {
                let Object { name, bytes } = &self.objects[unit.object as usize];
                let key = self.cached.key(name, unit.extent);
                let found = drives[number].find(&key, Some(*bytes)).ok().flatten();
                room_bytes[number] = room_bytes[number].saturating_sub(Extent::overhead_bytes(*bytes, &key));
                let table = found.and_then(|found| found.table(0..found.pages()).ok()).unwrap_or_default();
                known = Some(Known { object: unit.object, extent: unit.extent, table });
            }
            let table = known.as_ref().and_then(|known| known.table.get(unit.pages.start as usize..unit.pages.end as usize));
            if table.is_some_and(|table| !table.contains(&0)) {
                cached.push((index as u32, next_use));
            }
        }
        let on = |(drive, room_bytes): (usize, u64)| {
            let sizes = self.units.units.iter().zip(&self.drive_of);
            Belady::new(sizes.map(|(unit, on)| if usize::from(*on) == drive { unit.bytes() } else { 0 }), room_bytes)
        };
        let fits = used_bytes.iter().zip(&room_bytes).all(|(used_bytes, room_bytes)| used_bytes <= room_bytes);
        self.caches = room_bytes.into_iter().enumerate().map(on).collect();
        for (unit, next_use) in cached {
            self.caches[usize::from(self.drive_of[unit as usize])].has(unit, next_use);
        }
        fits
    }

    /// Evict and fetch what a group says, as soon as the loader has read far enough. All steps below `ready` are ready afterwards. Returns false if
    /// the loader has ended.
    fn execute(&self, shared: &Shared, group: Group, ready: u64) -> bool {
        let mut state = shared.lock();
        while (state.read < group.from || ready > state.read + self.steps_ahead) && !shared.is_stopped() {
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if shared.is_stopped() {
            return false;
        }
        drop(state);
        for victim in &group.victims {
            let unit = &self.units.units[*victim as usize];
            let (drive, key) = (self.drive(*victim), self.cached.key(&self.objects[unit.object as usize].name, unit.extent));
            let cleared =
                drive.find(&key, None).and_then(|found| found.map_or(Ok(0), |extent| evict::clear(drive, &extent, unit.pages.clone())));
            if let Err(error) = cleared {
                drive.failed(&error);
            }
        }
        let fetches = if self.fits && group.bytes >= WINDOWS_FROM_BYTES { self.with_neighbours(group.fetches) } else { group.fetches };
        if !fetches.is_empty() {
            let pages = fetches.iter().map(|unit| {
                let Unit { object, extent, pages } = &self.units.units[*unit as usize];
                let Object { name, bytes } = &self.objects[*object as usize];
                (name.clone(), *bytes, *extent, pages.clone())
            });
            // The loader reads what could not be fetched, and reports why.
            let _ = Fill::warm(self.cached, self.fits, pages);
        }
        shared.set(|state| state.ready = ready);
        true
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
        &self.cached.drives().drives[usize::from(self.drive_of[unit as usize])]
    }
}

/// The checksums of an extent's pages.
struct Known {
    object: u32,
    extent: u32,
    table: Vec<u32>,
}

/// Fetches that are made together.
#[derive(Default)]
struct Group {
    fetches: Vec<u32>,
    victims: Vec<u32>,
    bytes: u64,
    /// The victims are not used after the steps below this.
    from: u64,
}

impl Group {
    fn add(&mut self, fetch: Fetch, units: &Units) {
        self.bytes += units.units[fetch.unit as usize].pages.len() as u64 * PAGE_BYTES;
        self.fetches.push(fetch.unit);
        // A unit that this very group fetches may be the victim of a later fetch of the group.
        for victim in fetch.victims {
            match self.fetches.iter().position(|unit| *unit == victim) {
                Some(at) => drop(self.fetches.swap_remove(at)),
                None => self.victims.push(victim),
            }
        }
        self.from = self.from.max(fetch.from);
    }
}

#[cfg(test)]
mod tests;
