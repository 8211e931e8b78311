//! Makes room for the groups of a plan, in their order. Fetches run ahead of that, into memory.

use super::backpressure::Backpressure;
use super::belady::Fetch;
use super::election::{Election, Field};
use super::prefetch_queue::{Eviction, Fate, PrefetchQueue};

/// Fetches run ahead of the room for them, into memory: by so many bytes, and by so many groups.
const AHEAD_BYTES: u64 = if cfg!(test) { 100 << 10 } else { 32 << 20 };
const AHEAD_GROUPS: usize = 64;

/// Why a plan ends or begins anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// The loader has ended.
    Stopped,
    /// Other plans came or went, or this one leads now.
    Changed,
    /// The others continue without this plan.
    Left,
}

/// Fetches that are made together.
#[derive(Default)]
pub struct FetchGroup {
    /// Runs to keep.
    pub fetches: Vec<u32>,
    /// Runs to hold in memory, until the steps below `until` are read.
    pub passes: Vec<u32>,
    until: u64,
    /// The bytes of all runs, and of those to hold in memory.
    pub bytes: u64,
    pass_bytes: u64,
    pub eviction: Eviction,
}

impl FetchGroup {
    pub fn add(&mut self, fetch: Fetch, bytes: u64) {
        self.bytes += bytes;
        if fetch.keep {
            self.fetches.push(fetch.run);
        } else {
            self.passes.push(fetch.run);
            self.pass_bytes += bytes;
            self.until = self.until.max(fetch.needed + 1);
        }
        self.eviction.victims.extend(fetch.victims);
        self.eviction.from = self.eviction.from.max(fetch.from);
    }

    pub fn is_empty(&self) -> bool {
        self.fetches.is_empty() && self.passes.is_empty()
    }
}

/// Carries a plan out.
pub trait Carries {
    /// Return the step from which on no loader reads, as far as they know.
    fn until(&self) -> u64;

    /// Return whether a group may have runs that stay in memory.
    fn may_pass(&self, group: &FetchGroup) -> bool;

    /// Begin to fetch a group, after which all steps below `ready` are ready.
    fn put(&mut self, group: FetchGroup, ready: u64) -> Result<(), Ended>;

    /// Wait until a loader will read this step.
    fn wait_until_wanted(&mut self, step: u64) -> Result<(), Ended>;
}

pub struct Dispatch<'d, 'a> {
    backpressure: &'d Backpressure,
    election: Option<&'d mut Election>,
    queue: &'d PrefetchQueue<'a>,
    /// The plan is at most this far ahead of the loaders.
    ahead_steps: u64,
    /// The bytes of groups in memory, and the step below which all must be read before they go.
    passing: Vec<(u64, u64)>,
    /// All steps below this are planned.
    ready: u64,
    /// What the steps below this had in memory is gone.
    released: u64,
}

impl Carries for Dispatch<'_, '_> {
    /// Other processes would not find what stays in memory, and the loader reads on its own what would be too much.
    fn may_pass(&self, group: &FetchGroup) -> bool {
        let is_alone = self.election.as_ref().is_none_or(|election| election.is_alone());
        is_alone && self.passing_bytes() <= AHEAD_BYTES && group.pass_bytes <= AHEAD_BYTES
    }

    /// Waits while the plan is far ahead of the loaders.
    fn put(&mut self, group: FetchGroup, ready: u64) -> Result<(), Ended> {
        let FetchGroup { fetches, passes, until, pass_bytes, eviction, .. } = group;
        if !passes.is_empty() {
            self.passing.push((until, pass_bytes));
            // What is ready after it depends on the other runs.
            self.queue.put(passes, self.ready, Fate::Pass(until));
        }
        self.ready = ready;
        let waiting = self.queue.first_waiting();
        self.look(waiting.as_ref().map_or(eviction.from, |(first, _)| first.from))?;
        // What fits needs no room. It is kept at once, under locks, so that processes with other plans do not fetch it as well.
        if self.queue.layout.fits || waiting.is_none() && self.may_evict(eviction.from, ready) {
            self.evict(&eviction);
            self.queue.put(fetches, ready, Fate::Keep);
        } else {
            self.queue.put(fetches, ready, Fate::KeepAfter(eviction.into()));
        }
        loop {
            let read = self.allow();
            if !self.is_far_ahead() {
                return Ok(());
            }
            self.wait(read, u64::MAX)?;
        }
    }

    fn until(&self) -> u64 {
        self.election.as_ref().map_or_else(|| self.backpressure.until(), |election| election.until())
    }

    fn wait_until_wanted(&mut self, step: u64) -> Result<(), Ended> {
        loop {
            let read = self.allow();
            if step < self.until() {
                return Ok(());
            }
            self.wait(read, step + 1)?;
        }
    }
}

impl<'d, 'a> Dispatch<'d, 'a> {
    pub fn new(
        backpressure: &'d Backpressure,
        election: Option<&'d mut Election>,
        queue: &'d PrefetchQueue<'a>,
        begin: u64,
        ahead_steps: u64,
    ) -> Dispatch<'d, 'a> {
        Dispatch { backpressure, election, queue, ahead_steps, passing: Vec::new(), ready: begin, released: 0 }
    }

    fn passing_bytes(&self) -> u64 {
        self.passing.iter().map(|(_, bytes)| *bytes).sum()
    }

    /// Wait for the loaders to read more than the steps below `read`, or to want those below `until`.
    fn wait(&mut self, read: u64, until: u64) -> Result<(), Ended> {
        match &self.election {
            Some(election) => self.backpressure.pause(election.waits()),
            None => self.backpressure.wait_for(read + 1, until),
        }
        self.look(self.queue.first_waiting().map_or(0, |(eviction, _)| eviction.from))
    }

    /// Make room for groups in their order, as far as the loaders have read. Returns the step below which they had read everything.
    fn allow(&mut self) -> u64 {
        let read = self.read();
        if read > self.released {
            self.passing.retain(|(until, _)| *until > read);
            self.queue.release(read);
            self.released = read;
        }
        while let Some((eviction, ready)) = self.queue.first_waiting()
            && self.may_evict(eviction.from, ready)
        {
            self.evict(&eviction);
            self.queue.allow();
        }
        read
    }

    /// Evict the victims of a group. All loaders have read the steps below `from`.
    fn evict(&self, Eviction { victims, from }: &Eviction) {
        if let Some(election) = &self.election {
            election.own.set(Field::Floor, *from);
        }
        victims.iter().for_each(|victim| self.queue.layout.evict(*victim));
    }

    /// Return whether the plan must wait for the loaders, which have steps to read that are planned completely.
    fn is_far_ahead(&self) -> bool {
        let ((groups, bytes), read) = (self.queue.waiting(), self.read());
        let bytes = bytes + self.passing_bytes();
        self.ready > read && (bytes > AHEAD_BYTES || groups > AHEAD_GROUPS || self.ready > read + self.ahead_steps)
    }

    /// Return the step below which all loaders have read.
    fn read(&self) -> u64 {
        self.election.as_ref().map_or_else(|| self.backpressure.read(), |election| election.floor())
    }

    /// Return whether all loaders have read the steps below `from`, and are at most `ahead_steps` behind `ready`.
    fn may_evict(&self, from: u64, ready: u64) -> bool {
        self.read() >= from && ready <= self.read() + self.ahead_steps
    }

    /// Look at the loaders, of which those that have not read the steps below `wanted` may hold the others up.
    fn look(&mut self, wanted: u64) -> Result<(), Ended> {
        if self.backpressure.is_stopped() {
            return Err(Ended::Stopped);
        }
        let Some(election) = self.election.as_deref_mut() else { return Ok(()) };
        match election.look(wanted) {
            Ok(true) => Err(Ended::Changed),
            Ok(false) if !election.is_left() => Ok(()),
            _ => Err(Ended::Left),
        }
    }
}
