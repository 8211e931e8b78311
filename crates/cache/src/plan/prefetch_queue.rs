//! The queue of a plan: groups of fetches that run at the same time, and become ready in the order in which they were planned.
//!
//! A group may begin before there is room for it. It is then fetched into memory, and kept when the plan has made room. If there will be none, it
//! stays in memory until the loader has read it. The plan's thread adds groups and makes room (`dispatch`); other threads fetch.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::layout::PlanLayout;
use crate::read_through::ReadThrough;

/// The plan waits while groups for which there is room have more bytes than this.
const MOST_BYTES: u64 = 32 << 20;

/// What must give way to a group.
#[derive(Debug, Default)]
pub struct Eviction {
    pub victims: Vec<u32>,
    /// The victims are not used after the steps below this.
    pub from: u64,
}

/// What becomes of the runs of a group.
#[derive(Debug, Clone)]
pub enum Fate {
    /// There is room for them.
    Keep,
    /// There will be room for them after this.
    KeepAfter(Arc<Eviction>),
    /// They stay in memory until the loader has read the steps below this.
    Pass(u64),
}

enum GroupState<'a> {
    /// These runs are to be fetched.
    Planned(Vec<u32>),
    /// A thread fetches or keeps the group.
    Running,
    /// In memory, until there is room.
    InMemory(ReadThrough<'a>),
    Ready,
}

struct QueuedGroup<'a> {
    state: GroupState<'a>,
    bytes: u64,
    fate: Fate,
    /// The step below which all is ready after this group and the earlier ones.
    ready: u64,
}

impl QueuedGroup<'_> {
    fn is_ready(&self) -> bool {
        matches!(self.state, GroupState::Ready)
    }

    fn has_room(&self) -> bool {
        matches!(self.fate, Fate::Keep)
    }

    /// Return what must give way first, and the step below which all is ready afterwards.
    fn waits_for(&self) -> Option<(&Arc<Eviction>, u64)> {
        if let Fate::KeepAfter(eviction) = &self.fate { Some((eviction, self.ready)) } else { None }
    }
}

#[derive(Default)]
struct QueueState<'a> {
    /// The groups from number `first` on, of which the first is not ready or waits for room.
    groups: VecDeque<QueuedGroup<'a>>,
    first: u64,
    closed: bool,
}

impl<'a> QueueState<'a> {
    /// Choose the next group: what is in memory is kept before more is fetched.
    fn next(&mut self) -> Option<(u64, GroupState<'a>, Fate)> {
        let kept =
            self.groups.iter().position(|group| group.has_room() && matches!(group.state, GroupState::InMemory(_)));
        let at = kept.or_else(|| self.groups.iter().position(|group| matches!(group.state, GroupState::Planned(_))))?;
        let group = &mut self.groups[at];
        Some((self.first + at as u64, std::mem::replace(&mut group.state, GroupState::Running), group.fate.clone()))
    }
}

/// The groups of one plan.
pub struct PrefetchQueue<'a> {
    state: Mutex<QueueState<'a>>,
    changed: Condvar,
    pub layout: &'a PlanLayout<'a>,
    /// The number of the plan, for what it has in memory.
    plan: u64,
    announce: &'a (dyn Fn(u64) + Sync),
}

/// Closes the queue when it is dropped, so that its threads end.
pub struct Closes<'l, 'a>(pub &'l PrefetchQueue<'a>);

impl Drop for Closes<'_, '_> {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.changed.notify_all();
    }
}

impl<'a> PrefetchQueue<'a> {
    /// Begin an empty queue. `announce` is called with the step below which all is ready.
    pub fn new(layout: &'a PlanLayout<'a>, plan: u64, announce: &'a (dyn Fn(u64) + Sync)) -> PrefetchQueue<'a> {
        PrefetchQueue { state: Mutex::default(), changed: Condvar::new(), layout, plan, announce }
    }

    fn lock(&self) -> MutexGuard<'_, QueueState<'a>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'s>(&self, state: MutexGuard<'s, QueueState<'a>>) -> MutexGuard<'s, QueueState<'a>> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Add a group, after which all steps below `ready` are ready. Waits while there is much to do.
    pub fn put(&self, runs: Vec<u32>, ready: u64, fate: Fate) {
        let mut state = self.lock();
        while state
            .groups
            .iter()
            .filter(|group| group.has_room() && !group.is_ready())
            .map(|group| group.bytes)
            .sum::<u64>()
            > MOST_BYTES
        {
            state = self.wait(state);
        }
        let bytes = self.layout.page_runs.bytes(&runs);
        let group = if runs.is_empty() { GroupState::Ready } else { GroupState::Planned(runs) };
        state.groups.push_back(QueuedGroup { state: group, bytes, fate, ready });
        self.announce(&mut state);
    }

    /// Return what the first group without room waits for, and the step below which all is ready after it.
    pub fn first_waiting(&self) -> Option<(Arc<Eviction>, u64)> {
        self.lock().groups.iter().find_map(QueuedGroup::waits_for).map(|(eviction, ready)| (eviction.clone(), ready))
    }

    /// Return how many groups wait for room, and their bytes.
    pub fn waiting(&self) -> (usize, u64) {
        let state = self.lock();
        state
            .groups
            .iter()
            .filter(|group| group.waits_for().is_some())
            .fold((0, 0), |(count, bytes), group| (count + 1, bytes + group.bytes))
    }

    /// Let the first group that waits for room be kept, because there is room now.
    pub fn allow(&self) {
        let mut state = self.lock();
        if let Some(group) = state.groups.iter_mut().find(|group| group.waits_for().is_some()) {
            group.fate = Fate::Keep;
        }
        self.announce(&mut state);
    }

    /// Leave what is in memory to the next plan of the same loader. The queue is closed.
    pub fn hand_over(self) {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        for group in state.groups {
            if let GroupState::InMemory(read) = group.state {
                read.pass(self.plan, group.ready + 1);
            }
        }
    }

    /// Drop what is in memory for the steps below `read`.
    pub fn release(&self, read: u64) {
        self.layout.cached.prefetched().end(self.plan, read);
    }

    /// Announce what is ready, if the first groups are, and let all threads look at the queue again.
    fn announce(&self, state: &mut QueueState<'_>) {
        let ready = state.groups.iter().take_while(|group| group.is_ready()).last().map(|group| group.ready);
        while state.groups.front().is_some_and(|group| group.is_ready() && group.waits_for().is_none()) {
            state.groups.pop_front();
            state.first += 1;
        }
        if let Some(ready) = ready {
            (self.announce)(ready);
        }
        self.changed.notify_all();
    }

    /// Fetch groups until the queue is closed.
    pub fn work(&self) {
        let mut state = self.lock();
        while !state.closed {
            let Some((number, group, fate)) = state.next() else {
                state = self.wait(state);
                continue;
            };
            drop(state);
            // A group whose fetch fails is ready, too: the loader reads on its own what is missing, and reports why.
            let next = catch_unwind(AssertUnwindSafe(|| self.advance(group, fate))).unwrap_or(GroupState::Ready);
            state = self.lock();
            let at = (number - state.first) as usize;
            state.groups[at].state = next;
            self.announce(&mut state);
        }
    }

    /// Fetch or keep a group. Returns its next state.
    fn advance(&self, group: GroupState<'a>, fate: Fate) -> GroupState<'a> {
        match (group, fate) {
            (GroupState::Planned(runs), Fate::Keep) => self.layout.fetch(runs),
            (GroupState::Planned(runs), Fate::KeepAfter(_)) => return GroupState::InMemory(self.layout.ahead(&runs)),
            (GroupState::Planned(runs), Fate::Pass(until)) => self.layout.ahead(&runs).pass(self.plan, until),
            (GroupState::InMemory(read), _) => drop(read.keep()),
            (GroupState::Running | GroupState::Ready, _) => {}
        }
        GroupState::Ready
    }

    /// Call `act` again and again, with the number of the call, until the queue is closed.
    pub fn each(&self, pause: Duration, act: impl Fn(u64)) {
        let mut state = self.lock();
        let mut next = Instant::now();
        let mut count = 0;
        while !state.closed {
            if Instant::now() >= next {
                act(count);
                (count, next) = (count + 1, Instant::now() + pause);
            }
            (state, _) = self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Wait until all groups are ready.
    pub fn wait_until_ready(&self) {
        let mut state = self.lock();
        while !state.groups.iter().all(QueuedGroup::is_ready) {
            state = self.wait(state);
        }
    }
}
