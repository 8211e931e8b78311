//! The thread of a plan: it plans one epoch after the other, evicts and fetches.

use std::time::{Duration, Instant};

use penstock_error::Result;
use penstock_storage::process;

use super::backpressure::Backpressure;
use super::belady::{Belady, NEVER};
use super::dispatch::{Carries, Dispatch, Ended, FetchGroup};
use super::election::{Election, Field};
use super::layout::{Pages, PlanLayout};
use super::page_runs::{Future, Member, PageRuns, Uses, order_of};
use super::prefetch_queue::{Closes, PrefetchQueue};
use crate::cache::Cached;
use crate::drive::PLANS;
use crate::extent::Extent;
use crate::registry::Registered;

/// Bytes that are fetched at a time at first and at most. The first ones are small, so that the first batch need not wait for later ones.
const FETCH_BYTES: (u64, u64) = (1 << 20, 16 << 20);
/// The same if other pages must give way. Steps then become ready one after the other. A fetch is at most this part of the cache.
const PASSING_FETCH_BYTES: u64 = 4 << 20;
const FETCH_PART: u64 = 8;
/// Fetches that run at the same time.
const FETCHES: usize = 8;
/// This part of the cache is for pages that are not worth keeping, if several loaders share a plan. It has at least so many bytes, or a
/// thirty-second if that is less. It has room for a step, or two if several jobs read the same. A loader alone gets such pages in memory.
const PASSING_PART: u64 = 128;
const PASSING_BYTES: u64 = 1 << 20;
/// How long a plan waits for reads that began before it.
const SETTLES: Duration = Duration::from_secs(2);

/// How often a leader shows that it lives.
const PULSE: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 1000 });
/// Longer than a leader waits for a member that does not read.
const LEADER_PATIENCE: Duration = Duration::from_millis(if cfg!(test) { 700 } else { 10_000 });

/// What an epoch would read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Foreseen {
    pub cached_bytes: u64,
    pub cold_bytes: u64,
    pub requests: u64,
}

/// The plan of one loader while it runs.
pub struct Planner<'a> {
    layout: PlanLayout<'a>,
    /// For each drive, what it will hold.
    caches: Vec<Belady>,
    /// The plan is at most this far ahead of the loader: an epoch.
    steps_ahead: u64,
}

impl Planner<'_> {
    fn new<'a>(cached: &'a Cached, future: &dyn Future) -> Result<Planner<'a>> {
        let (objects, needs) = future.needs()?;
        let page_runs = PageRuns::new(future.samples(), needs);
        let layout = PlanLayout::new(cached, objects, page_runs);
        Ok(Planner { layout, caches: Vec::new(), steps_ahead: future.epoch_steps().max(1) })
    }

    /// Return what a plan would find cached and what it would fetch in the first epoch.
    pub fn foresee(cached: &Cached, future: &dyn Future) -> Result<Foreseen> {
        let mut planner = Planner::new(cached, future)?;
        let members = [Member { stride: 1, ..future.member() }];
        let begin = members[0].begin;
        let (current, later) = planner.uses(future, &members, begin, begin + planner.steps_ahead);
        let _ = planner.find_cached(&current, &later, 0);
        let Planner { layout, mut caches, .. } = planner;
        let is_cached = |run: u32| caches[layout.drive_number(run)].holds(run);
        let cached = (0..layout.page_runs.runs.len() as u32).filter(|run| is_cached(*run));
        let mut here = Pages::default();
        for (object, pages) in cached.map(|run| layout.pages_of(run)) {
            pages.for_each(|page| _ = here.insert(object, page));
        }
        let used = current.first_use.iter().enumerate().filter(|(_, first_use)| **first_use != NEVER);
        let cached_bytes =
            used.filter(|(run, _)| is_cached(*run as u32)).map(|(run, _)| layout.page_runs.runs[run].bytes()).sum();
        let foreseen = Foreseen { cached_bytes, ..Foreseen::default() };
        let mut counted = Counted { layout: &layout, until: current.steps().end, here, foreseen };
        // The count ends where the epoch does.
        let _ = plan(
            &layout,
            &mut caches,
            current,
            later,
            &mut |begin| layout.uses(future, &members, begin..begin),
            &mut counted,
        );
        Ok(counted.foreseen)
    }

    /// Plan and fetch until the loader ends.
    pub fn run(backpressure: &Backpressure, cached: &Cached, future: &dyn Future) -> Result<()> {
        let mut planner = Planner::new(cached, future)?;
        let drives = &cached.drives().drives;
        let plans = drives.iter().map(|drive| {
            Registered::new(&drive.part(PLANS), cached.store.as_bytes()).inspect_err(|error| drive.failed(error))
        });
        let _registered: Vec<Registered> = plans.filter_map(std::io::Result::ok).collect();
        if planner.layout.fits {
            // Nothing is evicted, and reads may keep what they fetch beside the plan.
            return planner.lead(backpressure, future, None).map(drop);
        }
        let _planned = cached.planned();
        let folders: Vec<String> = drives.iter().map(|drive| drive.folder().display().to_string()).collect();
        let order = order_of(
            future,
            &planner.layout.objects,
            &planner.layout.page_runs,
            &format!("{} {}", cached.store, folders.join(" ")),
        );
        let mut first = 0;
        loop {
            let joined = drives.first().map(|drive| {
                Election::join(drive, order, future.member(), (backpressure.read(), backpressure.until()), first)
            });
            let Some(Ok(mut election)) = joined else { return planner.lead(backpressure, future, None).map(drop) };
            backpressure.shown_in(Some(election.own.clone()));
            let ended = loop {
                let ended = match election.leads() {
                    Ok(true) => planner.lead(backpressure, future, Some(&mut election))?,
                    Ok(false) => follow(backpressure, &mut election),
                    Err(_) => Ended::Left,
                };
                if ended != Ended::Changed {
                    break ended;
                }
            };
            backpressure.shown_in(None);
            if ended == Ended::Stopped {
                return Ok(());
            }
            first = election.group + 1;
        }
    }

    /// Plan one epoch after the other, and fetch what each one needs, for this loader or for all of its group.
    fn lead(
        &mut self,
        backpressure: &Backpressure,
        future: &dyn Future,
        mut election: Option<&mut Election>,
    ) -> Result<Ended> {
        let steps = self.steps_ahead;
        // Steps that the loader has begun on its own are left to it. If they were planned, their pages could be evicted before they are kept.
        let own_begin = if backpressure.has_started() { 0 } else { backpressure.start() };
        if !self.layout.fits {
            self.layout.cached.settle(SETTLES);
        }
        // The loaders have gone on in the meantime.
        let (begin, members) = match &mut election {
            None => (backpressure.read().max(own_begin), vec![future.member()]),
            Some(election) => {
                if election.look(0).is_err() {
                    return Ok(Ended::Left);
                }
                let begin = if election.is_alone() { election.floor().max(own_begin) } else { election.floor() };
                (begin, election.members())
            }
        };
        // What is worth keeping is chosen for whole epochs.
        let (current, later) = self.uses(future, &members, begin, (begin + 1).next_multiple_of(steps));
        let is_shared =
            members.iter().enumerate().any(|(at, one)| members[..at].iter().any(|other| other.rank == one.rank));
        let passing_steps = if members.len() == 1 { 0 } else { 1 + u64::from(is_shared) };
        for run in self.find_cached(&current, &later, passing_steps) {
            self.layout.evict(run);
        }
        if election.as_ref().is_some_and(|election| election.include_all(begin).is_err()) {
            return Ok(Ended::Left);
        }
        backpressure.set_ready(begin);
        let own = election.as_ref().map(|election| election.own.clone());
        let announce = |ready| {
            if let Some(own) = &own {
                own.set(Field::Ready, ready);
            }
            backpressure.set_ready(ready);
        };
        let Planner { layout, caches, .. } = self;
        let (layout, queue) = (&*layout, PrefetchQueue::new(layout, backpressure.number(), &announce));
        let ended = std::thread::scope(|scope| {
            for _ in 0..FETCHES {
                scope.spawn(|| {
                    process::heed(backpressure.stop.clone());
                    queue.work();
                });
            }
            if let Some(own) = &own {
                scope.spawn(|| queue.each(PULSE, |count| own.set(Field::Pulse, count)));
            }
            let _closes = Closes(&queue);
            let mut dispatch = Dispatch::new(backpressure, election, &queue, begin, steps);
            let mut later_of = |begin| layout.uses(future, &members, begin..begin + steps);
            plan(layout, caches, current, later, &mut later_of, &mut dispatch).err().unwrap_or_else(|| {
                // Everything is cached, and stays so while the plan is registered. There is nothing left to plan.
                queue.wait_until_ready();
                backpressure.end();
                backpressure.wait_for(u64::MAX, u64::MAX);
                Ended::Stopped
            })
        });
        queue.hand_over();
        Ok(ended)
    }

    /// Return the uses in the steps from `begin` to `end`, and in the epoch that follows.
    fn uses(&self, future: &dyn Future, members: &[Member], begin: u64, end: u64) -> (Uses, Uses) {
        let layout = &self.layout;
        (layout.uses(future, members, begin..end), layout.uses(future, members, end..end + self.steps_ahead))
    }

    /// Begin with the runs that are cached already, and with the room that the drives have. There must be room for `passing_steps` besides what is
    /// worth keeping. Returns the cached runs that do not fit.
    fn find_cached(&mut self, current: &Uses, later: &Uses, passing_steps: u64) -> Vec<u32> {
        let layout = &mut self.layout;
        let drives = &layout.cached.drives().drives;
        layout.used =
            current.first_use.iter().zip(&later.first_use).map(|(one, other)| *one.min(other) != NEVER).collect();
        let store = &layout.cached.store;
        let mut room_bytes: Vec<u64> = drives.iter().map(|drive| drive.room_bytes(store).unwrap_or(0)).collect();
        // What the store has beside the runs, such as pages of lists of files.
        let mut other_bytes: Vec<u64> = drives.iter().map(|drive| drive.store_bytes(store).unwrap_or(0)).collect();
        let mut cached: Vec<(u64, u32)> = Vec::new();
        let mut index = 0;
        for of_extent in
            layout.page_runs.runs.chunk_by(|one, next| (one.object, one.extent) == (next.object, next.extent))
        {
            let number = layout.drive_number(index as u32);
            let (key, object_bytes) = layout.key(&of_extent[0]);
            let found = drives[number].find(&key, Some(object_bytes)).ok().flatten();
            let overhead_bytes = Extent::overhead_bytes(object_bytes, &key);
            room_bytes[number] = room_bytes[number].saturating_sub(overhead_bytes);
            other_bytes[number] = other_bytes[number].saturating_sub(if found.is_some() { overhead_bytes } else { 0 });
            let table = found.and_then(|found| found.whole_table().ok()).unwrap_or_default();
            for run in of_extent {
                let crcs = table.get(run.pages.start as usize..run.pages.end as usize).unwrap_or_default();
                if !crcs.is_empty() && !crcs.contains(&0) {
                    other_bytes[number] = other_bytes[number].saturating_sub(run.bytes());
                    cached.push((current.first_use[index].min(later.first_use[index]), index as u32));
                }
                index += 1;
            }
        }
        self.caches.clear();
        for (number, (mut room_bytes, other_bytes)) in room_bytes.into_iter().zip(other_bytes).enumerate() {
            // If everything fits, nothing may give way, whatever other processes that fetch the same have reserved at this moment.
            room_bytes = if layout.fits { u64::MAX / 2 } else { room_bytes.saturating_sub(other_bytes) };
            // What a step of several loaders reads must be there all at once.
            let step_bytes = current.steps().map(|step| layout.bytes_on(number, current.of(step))).max().unwrap_or(0);
            let least =
                PASSING_BYTES.min(room_bytes / 32).max(room_bytes / PASSING_PART).max(passing_steps * step_bytes);
            let reserve = if layout.fits || passing_steps == 0 { 0 } else { least.min(room_bytes / 2) };
            let sizes = (0..layout.drive_of.len() as u32).map(|run| layout.bytes_on(number, &[run]));
            let mut cache = Belady::new(sizes, room_bytes, reserve);
            cache.look_ahead(later.begin, &later.first_use);
            self.caches.push(cache);
        }
        cached.sort_unstable();
        cached.retain(|(next_use, run)| !self.caches[layout.drive_number(*run)].has(*run, *next_use));
        cached.into_iter().map(|(_, run)| run).collect()
    }
}

fn room_bytes(caches: &[Belady]) -> u64 {
    caches.iter().map(Belady::capacity_bytes).sum()
}

/// Counts what a plan fetches until a step, instead of fetching it.
struct Counted<'a> {
    layout: &'a PlanLayout<'a>,
    until: u64,
    /// The pages that are cached.
    here: Pages,
    foreseen: Foreseen,
}

impl Carries for Counted<'_> {
    fn until(&self) -> u64 {
        self.until
    }

    fn may_pass(&self, _: &FetchGroup) -> bool {
        true
    }

    fn put(&mut self, group: FetchGroup, _: u64) -> std::result::Result<(), Ended> {
        let FetchGroup { fetches, passes, eviction, .. } = group;
        let layout = self.layout;
        layout.remove(&eviction.victims, &mut self.here);
        for runs in [&layout.chosen(fetches), &passes] {
            let (requests, bytes) = layout.requests(runs, &mut self.here);
            self.foreseen.requests += requests;
            self.foreseen.cold_bytes += bytes;
        }
        layout.remove(&passes, &mut self.here);
        Ok(())
    }

    fn wait_until_wanted(&mut self, _: u64) -> std::result::Result<(), Ended> {
        Err(Ended::Stopped)
    }
}

/// Plan one epoch after the other, and give each group of fetches to `dispatch`, with the step below which all is ready after it. Returns when
/// there is nothing left to plan.
fn plan(
    layout: &PlanLayout,
    caches: &mut [Belady],
    mut current: Uses,
    mut later: Uses,
    later_of: &mut dyn FnMut(u64) -> Uses,
    dispatch: &mut impl Carries,
) -> std::result::Result<(), Ended> {
    let passing = (room_bytes(caches) / FETCH_PART).clamp(FETCH_BYTES.0 / 4, PASSING_FETCH_BYTES);
    let most = if layout.fits { FETCH_BYTES.1 } else { passing };
    let (mut bytes, mut ready) = (FETCH_BYTES.0.min(most), current.steps().start);
    loop {
        let next_uses = current.next_uses(&later.first_use);
        let mut next_uses = next_uses.iter();
        let (mut group, mut has_fetched) = (FetchGroup::default(), false);
        for step in current.steps() {
            if step >= dispatch.until() {
                dispatch.put(std::mem::take(&mut group), step)?;
                dispatch.wait_until_wanted(step)?;
                ready = step;
            }
            for (run, next_use) in by_worth(layout, caches, current.of(step), &mut next_uses) {
                let fetch = caches[layout.drive_number(run)].access(run, step, next_use);
                let Some(fetch) = fetch.filter(|fetch| fetch.keep || dispatch.may_pass(&group)) else { continue };
                // The loader must be able to read the steps that this fetch waits for, and a large step needs several groups.
                if fetch.from > ready || group.bytes >= bytes {
                    dispatch.put(std::mem::take(&mut group), step)?;
                    (bytes, ready) = ((2 * bytes).min(most), step);
                }
                group.add(fetch, layout.run(run).bytes());
                has_fetched = true;
            }
            // A step whose pages are ready must not wait for a group to fill.
            if group.bytes >= bytes || group.is_empty() || step + 1 == current.steps().end {
                dispatch.put(std::mem::take(&mut group), step + 1)?;
                (bytes, ready) = ((2 * bytes).min(most), step + 1);
            }
        }
        if layout.fits && !has_fetched || current.steps().is_empty() {
            return Ok(());
        }
        let end = later.steps().end;
        current = std::mem::replace(&mut later, later_of(end));
        caches.iter_mut().for_each(|cache| cache.look_ahead(later.begin, &later.first_use));
    }
}

/// Return the runs of a step and their next uses, those first that are worth keeping: the others have the room that is left.
fn by_worth<'u>(
    layout: &PlanLayout,
    caches: &[Belady],
    runs: &[u32],
    next_uses: &mut impl Iterator<Item = &'u u64>,
) -> Vec<(u32, u64)> {
    let mut uses: Vec<(u32, u64)> = runs.iter().copied().zip(next_uses.copied()).collect();
    uses.sort_by_key(|(run, next_use)| !caches[layout.drive_number(*run)].is_worth(*run, *next_use));
    uses
}

/// Follow the leader of a group. A leader that shows no life while this loader waits, because it is stopped, is left alone.
fn follow(backpressure: &Backpressure, election: &mut Election) -> Ended {
    let (mut seen, mut since) = (None, Instant::now());
    loop {
        if backpressure.is_stopped() {
            return Ended::Stopped;
        }
        let led_to = match (election.leads(), election.led_to()) {
            (Ok(true), _) => return Ended::Changed,
            (Ok(false), Ok(Some(led))) if led.floor > backpressure.read() => return Ended::Left,
            (Ok(false), Ok(led_to)) => led_to,
            _ => return Ended::Left,
        };
        if led_to != seen || !backpressure.waits() {
            (seen, since) = (led_to, Instant::now());
        }
        if since.elapsed() > LEADER_PATIENCE {
            return Ended::Left;
        }
        if let Some(led) = led_to {
            backpressure.set_ready(led.ready);
        }
        backpressure.pause(false);
    }
}
