//! The thread of a plan: it plans one epoch after the other, evicts and fetches.

use std::ops::Range;

use penstock_error::Result;

use super::belady::{Belady, Fetch, NEVER};
use super::company::{Company, Field};
use super::pace::Pace;
use super::units::{Future, Member, Object, Unit, Units, Uses, order_of};
use crate::cache::Cached;
use crate::drive::Drive;
use crate::evict;
use crate::extent::{BLOCK_PAGES, Extent, PAGE_BYTES};
use crate::fill::Fill;
use crate::registry::Registered;

/// Bytes that are fetched at a time at first and at most. The first ones are small, so that the first batch need not wait for later ones.
const FETCH_BYTES: (u64, u64) = (1 << 20, 32 << 20);
/// If everything fits, a fetch includes its neighbours in a window of this length, because stores send one long range faster than many short ones.
/// Not in the first fetches, for which a batch waits.
const WINDOW_PAGES: u32 = BLOCK_PAGES;
const WINDOWS_FROM_BYTES: u64 = 4 << 20;
/// Jobs that read the same share this part of the cache for pages that are not worth keeping, or what two steps need if that is more.
const PASSING_PART: u64 = 128;
/// Loaders of one order go on together if they are at most this part of an epoch apart, or as many steps.
const TOGETHER: (u64, u64) = (8, 8);

/// What an epoch would read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Foreseen {
    pub cached_bytes: u64,
    pub cold_bytes: u64,
}

/// Why a plan does not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ended {
    /// The loader has ended.
    Stopped,
    /// Other plans came or went, or this one leads now.
    Changed,
    /// The others go on without this plan.
    Left,
}

/// The plan of one loader while it runs.
pub struct Planner<'a> {
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

    /// Return what a plan would find cached and what it would fetch in the first epoch, in bytes.
    pub fn foresee(cached: &Cached, future: &dyn Future) -> Result<Foreseen> {
        let mut planner = Planner::new(cached, future)?;
        let (steps, members) = (future.epoch_steps().max(1), [Member { stride: 1, ..future.member() }]);
        let begin = members[0].begin;
        let uses = |planner: &Planner, begin| planner.uses(future, &members, begin..begin + steps);
        let (current, later) = (uses(&planner, begin), uses(&planner, begin + steps));
        let _ = planner.find_cached(&current, &later, false);
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

    /// Plan and fetch until the loader ends.
    pub fn run(pace: &Pace, cached: &Cached, future: &dyn Future) -> Result<()> {
        let mut planner = Planner::new(cached, future)?;
        let drives = &cached.drives().drives;
        let plans = drives
            .iter()
            .map(|drive| Registered::new(&drive.plans_folder(), cached.store.as_bytes()).inspect_err(|error| drive.failed(error)));
        let _registered: Vec<Registered> = plans.filter_map(std::io::Result::ok).collect();
        planner.fits = planner.fits();
        if planner.fits {
            // Nothing is evicted, and reads may keep what they fetch beside the plan.
            return planner.lead(pace, future, None).map(drop);
        }
        let _planned = cached.planned();
        let folders: Vec<String> = drives.iter().map(|drive| drive.folder().display().to_string()).collect();
        let order = order_of(future, &planner.objects, &planner.units, &format!("{} {}", cached.store, folders.join(" ")));
        let window = (planner.steps_ahead / TOGETHER.0).max(TOGETHER.1);
        let mut first = 0;
        loop {
            let joined = drives.first().map(|drive| Company::join(drive, order, future.member(), pace.read(), window, first));
            let Some(Ok(mut company)) = joined else { return planner.lead(pace, future, None).map(drop) };
            pace.shown_in(Some(company.own.clone()));
            let ended = loop {
                let ended = match company.leads() {
                    Ok(true) => planner.lead(pace, future, Some(&mut company))?,
                    Ok(false) => follow(pace, &mut company),
                    Err(_) => Ended::Left,
                };
                if ended != Ended::Changed {
                    break ended;
                }
            };
            pace.shown_in(None);
            if ended == Ended::Stopped {
                return Ok(());
            }
            first = company.group + 1;
        }
    }

    /// Collect the uses of steps by the loaders that read them.
    fn uses(&self, future: &dyn Future, members: &[Member], steps: Range<u64>) -> Uses {
        let units_of = |step| {
            let mut ranks: Vec<u64> = members.iter().filter(|member| member.reads(step)).map(|member| member.rank).collect();
            ranks.sort_unstable();
            ranks.dedup();
            self.units.of(ranks.into_iter().flat_map(|rank| future.samples_of(step, rank)))
        };
        Uses::new(self.units.units.len(), steps.start, steps.map(units_of))
    }

    /// Use a unit at a step, and return the fetch that this costs.
    fn access(&mut self, unit: u32, step: u64, next_use: u64) -> Option<Fetch> {
        self.caches[usize::from(self.drive_of[unit as usize])].access(unit, step, next_use)
    }

    /// Plan one epoch after the other, and fetch what each one needs, for this loader or for all of a company.
    fn lead(&mut self, pace: &Pace, future: &dyn Future, mut company: Option<&mut Company>) -> Result<Ended> {
        let steps = self.steps_ahead;
        // The loaders have gone on in the meantime.
        let (begin, members) = match &mut company {
            None => (pace.read(), vec![future.member()]),
            Some(company) => {
                if company.look(0).is_err() {
                    return Ok(Ended::Left);
                }
                (company.floor(), company.members())
            }
        };
        let uses = |planner: &Planner, begin| planner.uses(future, &members, begin..begin + steps);
        let (mut current, mut later) = (uses(self, begin), uses(self, begin + steps));
        let is_shared = members.iter().enumerate().any(|(at, one)| members[..at].iter().any(|other| other.rank == one.rank));
        for unit in self.find_cached(&current, &later, is_shared) {
            self.evict(unit);
        }
        let (mut bytes, mut ready) = (FETCH_BYTES.0, begin);
        if company.as_ref().is_some_and(|company| company.tell_all(begin).is_err()) {
            return Ok(Ended::Left);
        }
        pace.set_ready(begin);
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
                                if let Some(ended) = self.execute(pace, company.as_deref_mut(), std::mem::take(&mut group), step) {
                                    return Ok(ended);
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
                    if let Some(ended) = self.execute(pace, company.as_deref_mut(), std::mem::take(&mut group), step + 1) {
                        return Ok(ended);
                    }
                    (bytes, ready) = ((2 * bytes).min(FETCH_BYTES.1), step + 1);
                }
            }
            if self.fits && !has_fetched {
                // Everything is cached, and stays so while the plan is registered. There is nothing left to plan.
                pace.end();
                pace.wait_until(|_| false);
                return Ok(Ended::Stopped);
            }
            let end = later.steps().end;
            current = std::mem::replace(&mut later, uses(self, end));
        }
    }

    /// Return whether the drives have room for all samples.
    fn fits(&self) -> bool {
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

    /// Begin with the units that are cached already, and with the room that the drives have. `is_shared` if several loaders read the same. Returns
    /// the cached units for which there is no room.
    fn find_cached(&mut self, current: &Uses, later: &Uses, is_shared: bool) -> Vec<u32> {
        let drives = &self.cached.drives().drives;
        self.used = current.first_use.iter().zip(&later.first_use).map(|(one, other)| *one.min(other) != NEVER).collect();
        let (mut known, mut cached): (Option<Known>, Vec<(u64, u32)>) = (None, Vec::new());
        let mut room_bytes: Vec<u64> = drives.iter().map(|drive| drive.room_bytes(&self.cached.store).unwrap_or(0)).collect();
        for (index, unit) in self.units.units.iter().enumerate() {
            let number = usize::from(self.drive_of[index]);
            if known.as_ref().is_none_or(|known| (known.object, known.extent) != (unit.object, unit.extent)) {
                let Object { name, bytes } = &self.objects[unit.object as usize];
                let key = self.cached.key(name, unit.extent);
                let found = drives[number].find(&key, Some(*bytes)).ok().flatten();
                room_bytes[number] = room_bytes[number].saturating_sub(Extent::overhead_bytes(*bytes, &key));
                let table = found.and_then(|found| found.table(0..found.pages()).ok()).unwrap_or_default();
                known = Some(Known { object: unit.object, extent: unit.extent, table });
            }
            let table = known.as_ref().and_then(|known| known.table.get(unit.pages.start as usize..unit.pages.end as usize));
            if table.is_some_and(|table| !table.is_empty() && !table.contains(&0)) {
                cached.push((current.first_use[index].min(later.first_use[index]), index as u32));
            }
        }
        // Two steps, so that one is fetched while the other is read.
        let step_bytes = |number: usize| {
            let bytes = |unit: &&u32| usize::from(self.drive_of[**unit as usize]) == number;
            let of_step = |step| current.of(step).iter().filter(bytes).map(|unit| self.units.units[*unit as usize].bytes()).sum();
            current.steps().map(of_step).max().unwrap_or(0u64)
        };
        let on = |(number, room_bytes): (usize, u64)| {
            let passing = if is_shared { (2 * step_bytes(number)).max(room_bytes / PASSING_PART).min(room_bytes / 2) } else { 0 };
            let sizes = self.units.units.iter().zip(&self.drive_of);
            let sizes = sizes.map(|(unit, on)| if usize::from(*on) == number { unit.bytes() } else { 0 });
            Belady::new(sizes, room_bytes - passing, passing)
        };
        self.caches = room_bytes.into_iter().enumerate().map(on).collect();
        cached.sort_unstable();
        let Planner { caches, drive_of, .. } = self;
        let mut has = |(next_use, unit): (u64, u32)| caches[usize::from(drive_of[unit as usize])].has(unit, next_use);
        cached.into_iter().filter_map(|cached| (!has(cached)).then_some(cached.1)).collect()
    }

    /// Evict and fetch what a group says, as soon as all loaders have read far enough. All steps below `ready` are ready afterwards. Returns why the
    /// plan does not go on, if it does not.
    fn execute(&self, pace: &Pace, company: Option<&mut Company>, group: Group, ready: u64) -> Option<Ended> {
        let may_begin = |read: u64| read >= group.from && ready <= read + self.steps_ahead;
        let mut company = company;
        match &mut company {
            None if !pace.wait_until(may_begin) => return Some(Ended::Stopped),
            None => {}
            Some(company) => loop {
                match company.look(group.from) {
                    _ if pace.is_stopped() => return Some(Ended::Stopped),
                    Ok(true) => return Some(Ended::Changed),
                    Err(_) => return Some(Ended::Left),
                    Ok(false) if company.is_left() => return Some(Ended::Left),
                    Ok(false) => {}
                }
                if may_begin(company.floor()) {
                    company.own.set(Field::Floor, group.from);
                    break;
                }
                pace.pause(company.waits());
            },
        }
        group.victims.iter().for_each(|victim| self.evict(*victim));
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
        if let Some(company) = company {
            company.own.set(Field::Ready, ready);
        }
        pace.set_ready(ready);
        None
    }

    fn evict(&self, unit: u32) {
        let (drive, unit) = (self.drive(unit), &self.units.units[unit as usize]);
        let key = self.cached.key(&self.objects[unit.object as usize].name, unit.extent);
        let cleared =
            drive.find(&key, None).and_then(|found| found.map_or(Ok(0), |extent| evict::clear(drive, &extent, unit.pages.clone())));
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
        &self.cached.drives().drives[usize::from(self.drive_of[unit as usize])]
    }
}

/// Follow the leader of a company.
fn follow(pace: &Pace, company: &mut Company) -> Ended {
    loop {
        if pace.is_stopped() {
            return Ended::Stopped;
        }
        match (company.leads(), company.led_to()) {
            (Ok(true), _) => return Ended::Changed,
            (Ok(false), Ok(Some((_, floor)))) if floor > pace.read() => return Ended::Left,
            (Ok(false), Ok(Some((ready, _)))) => pace.set_ready(ready),
            (Ok(false), Ok(None)) => {}
            _ => return Ended::Left,
        }
        pace.pause(false);
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
