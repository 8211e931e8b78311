//! Makes room for the groups of a plan, in their order. Fetches run ahead of that, into memory.

use std::collections::VecDeque;

use super::backpressure::Backpressure;
use super::belady::Fetch;
use super::election::{Election, Field};
use super::prefetch_queue::{Fate, PrefetchQueue};

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
pub struct Group {
    /// Units to keep.
    pub fetches: Vec<u32>,
    /// Units to hold in memory, until the steps below `until` are read.
    pub passes: Vec<u32>,
    until: u64,
    /// The bytes of all units, and of those to hold in memory.
    pub bytes: u64,
    pass_bytes: u64,
    pub victims: Vec<u32>,
    /// The victims are not used after the steps below this.
    from: u64,
}

impl Group {
    pub fn add(&mut self, fetch: Fetch, bytes: u64) {
        self.bytes += bytes;
        if fetch.keep {
            self.fetches.push(fetch.unit);
        } else {
            self.passes.push(fetch.unit);
            self.pass_bytes += bytes;
            self.until = self.until.max(fetch.needed + 1);
        }
        self.victims.extend(fetch.victims);
        self.from = self.from.max(fetch.from);
    }

    pub fn is_empty(&self) -> bool {
        self.fetches.is_empty() && self.passes.is_empty()
    }
}

/// Carries a plan out.
pub trait Carries {
    /// Return the step from which on no loader reads, as far as they know.
    fn until(&self) -> u64;

    /// Return whether a group may have units that stay in memory.
    fn may_pass(&self, group: &Group) -> bool;

    /// Begin to fetch a group, after which all steps below `ready` are ready.
    fn put(&mut self, group: Group, ready: u64) -> Result<(), Ended>;

    /// Wait until a loader will read this step.
    fn wait_until_wanted(&mut self, step: u64) -> Result<(), Ended>;
}

/// A group that waits for room.
struct Behind {
    number: u64,
    bytes: u64,
    victims: Vec<u32>,
    from: u64,
    ready: u64,
}

pub struct Dispatch<'d, 'a> {
    backpressure: &'d Backpressure,
    election: Option<&'d mut Election>,
    queue: &'d PrefetchQueue<'a>,
    /// The plan is at most this far ahead of the loaders.
    ahead_steps: u64,
    behind: VecDeque<Behind>,
    /// The bytes of groups in memory, and the step below which all must be read before they go.
    passing: Vec<(u64, u64)>,
    /// All steps below this are planned.
    ready: u64,
    /// What the steps below this had in memory is gone.
    released: u64,
}

impl Carries for Dispatch<'_, '_> {
    /// Return whether a group may have units that stay in memory. Other processes would not find them, and the loader reads on its own what would
    /// be too much.
    fn may_pass(&self, group: &Group) -> bool {
        let is_alone = self.election.as_ref().is_none_or(|election| election.is_alone());
        is_alone && self.passing_bytes() <= AHEAD_BYTES && group.pass_bytes <= AHEAD_BYTES
    }

    /// Begin to fetch a group, after which all steps below `ready` are ready. Waits while the plan is far ahead of the loaders.
    fn put(&mut self, group: Group, ready: u64) -> Result<(), Ended> {
        let Group { fetches, passes, until, victims, from, bytes, pass_bytes } = group;
        if !passes.is_empty() {
            self.passing.push((until, pass_bytes));
            // What is ready after it depends on the other units.
            self.queue.put(passes, self.ready, Fate::Pass(until));
        }
        self.ready = ready;
        self.look(self.behind.front().map_or(from, |group| group.from))?;
        // What fits needs no room. It is kept at once, under locks, so that processes with other plans do not fetch it as well.
        let has_room = self.queue.layout.fits || self.behind.is_empty() && self.may_evict(from, ready);
        if has_room {
            self.evict(&victims, from);
        }
        let number = self.queue.put(fetches, ready, if has_room { Fate::Keep } else { Fate::KeepLater });
        if !has_room {
            self.behind.push_back(Behind { number, bytes: bytes - pass_bytes, victims, from, ready });
        }
        loop {
            let read = self.allow();
            if !self.is_far_ahead() {
                return Ok(());
            }
            self.wait(read, u64::MAX)?;
        }
    }

    /// Return the step from which on no loader reads, as far as they know.
    fn until(&self) -> u64 {
        self.election.as_ref().map_or_else(|| self.backpressure.until(), |election| election.until())
    }

    /// Wait until a loader will read this step.
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
        Dispatch { backpressure, election, queue, ahead_steps, behind: VecDeque::new(), passing: Vec::new(), ready: begin, released: 0 }
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
        self.look(self.behind.front().map_or(0, |group| group.from))
    }

    /// Make room for groups in their order, as far as the loaders have read. Returns the step below which they had read everything.
    fn allow(&mut self) -> u64 {
        let read = self.read();
        if read > self.released {
            self.passing.retain(|(until, _)| *until > read);
            self.queue.release(read);
            self.released = read;
        }
        while let Some(Behind { from, ready, .. }) = self.behind.front() {
            if !self.may_evict(*from, *ready) {
                break;
            }
            let Some(Behind { number, victims, from, .. }) = self.behind.pop_front() else { break };
            self.evict(&victims, from);
            self.queue.allow(number);
        }
        read
    }

    /// Evict units that are not used in the steps from `from` on.
    fn evict(&self, victims: &[u32], from: u64) {
        if let Some(election) = &self.election {
            election.own.set(Field::Floor, from);
        }
        victims.iter().for_each(|victim| self.queue.layout.evict(*victim));
    }

    /// Return whether the plan must wait for the loaders, which have steps to read that are planned completely.
    fn is_far_ahead(&self) -> bool {
        let bytes = self.passing_bytes() + self.behind.iter().map(|group| group.bytes).sum::<u64>();
        let most_ahead = self.read() + self.ahead_steps;
        self.ready > self.read() && (bytes > AHEAD_BYTES || self.behind.len() > AHEAD_GROUPS || self.ready > most_ahead)
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
