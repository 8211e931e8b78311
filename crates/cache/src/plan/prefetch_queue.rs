//! Fetches that run at the same time, and become ready in the order in which they were planned.
//!
//! A group may begin before there is room for it. It is then fetched into memory, and kept when the plan has made room. If there will be none, it
//! stays in memory until the loader has read it.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::layout::Layout;
use crate::fill::Fill;

/// The plan waits while groups for which there is room have more bytes than this.
const MOST_BYTES: u64 = 32 << 20;

/// What becomes of the units of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// There is room for them.
    Keep,
    /// There will be room for them.
    KeepLater,
    /// They stay in memory until the loader has read the steps below this.
    Pass(u64),
}

enum Stage<'a> {
    Waiting(Vec<u32>),
    Running,
    /// In memory, until there is room.
    Held(Fill<'a>),
    Done,
}

struct Group<'a> {
    stage: Stage<'a>,
    bytes: u64,
    fate: Fate,
    /// The step below which all is ready after this group and the earlier ones.
    ready: u64,
}

#[derive(Default)]
struct State<'a> {
    /// The groups from number `first` on, of which the first is not done.
    groups: VecDeque<Group<'a>>,
    first: u64,
    closed: bool,
}

/// What a thread does next.
enum Task<'a> {
    Fetch(Vec<u32>, Fate),
    Keep(Fill<'a>),
}

impl<'a> State<'a> {
    fn group(&mut self, number: u64) -> Option<&mut Group<'a>> {
        self.groups.get_mut(usize::try_from(number.checked_sub(self.first)?).ok()?)
    }

    /// Bytes of groups for which there is room.
    fn open_bytes(&self) -> u64 {
        self.groups.iter().filter(|group| group.fate == Fate::Keep && !matches!(group.stage, Stage::Done)).map(|group| group.bytes).sum()
    }

    /// Choose the next task: what is in memory is kept before more is fetched.
    fn next(&mut self) -> Option<(u64, Task<'a>)> {
        let is_held = |group: &Group<'_>| group.fate == Fate::Keep && matches!(group.stage, Stage::Held(_));
        let at = self.groups.iter().position(is_held);
        let at = at.or_else(|| self.groups.iter().position(|group| matches!(group.stage, Stage::Waiting(_))))?;
        let group = &mut self.groups[at];
        let task = match std::mem::replace(&mut group.stage, Stage::Running) {
            Stage::Held(fill) => Task::Keep(fill),
            Stage::Waiting(fetches) => Task::Fetch(fetches, group.fate),
            Stage::Running | Stage::Done => return None,
        };
        Some((self.first + at as u64, task))
    }
}

/// The groups of one plan.
pub struct PrefetchQueue<'a> {
    state: Mutex<State<'a>>,
    changed: Condvar,
    pub layout: &'a Layout<'a>,
    /// The number of the plan, for what it has in memory.
    plan: u64,
    announce: &'a (dyn Fn(u64) + Sync),
}

/// Closes the queue when it is dropped, so that its threads end.
pub struct Closes<'l, 'a>(&'l PrefetchQueue<'a>);

impl Drop for Closes<'_, '_> {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.changed.notify_all();
    }
}

impl<'a> PrefetchQueue<'a> {
    /// Begin an empty queue. `announce` is called with the step below which all is ready.
    pub fn new(layout: &'a Layout<'a>, plan: u64, announce: &'a (dyn Fn(u64) + Sync)) -> PrefetchQueue<'a> {
        PrefetchQueue { state: Mutex::default(), changed: Condvar::new(), layout, plan, announce }
    }

    pub fn closes(&self) -> Closes<'_, 'a> {
        Closes(self)
    }

    fn lock(&self) -> MutexGuard<'_, State<'a>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'s>(&self, state: MutexGuard<'s, State<'a>>) -> MutexGuard<'s, State<'a>> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Add a group, after which all steps below `ready` are ready, and return its number. Waits while there is much to do.
    pub fn put(&self, fetches: Vec<u32>, ready: u64, fate: Fate) -> u64 {
        let mut state = self.lock();
        while state.open_bytes() > MOST_BYTES {
            state = self.wait(state);
        }
        let bytes = self.layout.units.bytes(&fetches);
        let stage = if fetches.is_empty() { Stage::Done } else { Stage::Waiting(fetches) };
        let number = state.first + state.groups.len() as u64;
        state.groups.push_back(Group { stage, bytes, fate, ready });
        self.announce(&mut state);
        self.changed.notify_all();
        number
    }

    /// Let a group be kept, because there is room now.
    pub fn allow(&self, number: u64) {
        if let Some(group) = self.lock().group(number) {
            group.fate = Fate::Keep;
        }
        self.changed.notify_all();
    }

    /// Leave what is in memory to the next plan of the same loader. The queue is closed.
    pub fn hand_over(self) {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        for group in state.groups {
            if let Stage::Held(fill) = group.stage {
                fill.pass(self.plan, group.ready + 1);
            }
        }
    }

    /// Drop what is in memory for the steps below `read`.
    pub fn release(&self, read: u64) {
        self.layout.cached.prefetched().end(self.plan, read);
    }

    /// Announce what is ready, if the first groups are done.
    fn announce(&self, state: &mut State<'_>) {
        let mut ready = None;
        while let Some(Group { stage: Stage::Done, ready: after, .. }) = state.groups.front() {
            ready = Some(*after);
            state.groups.pop_front();
            state.first += 1;
        }
        if let Some(ready) = ready {
            (self.announce)(ready);
        }
    }

    /// Fetch groups until the queue is closed.
    pub fn work(&self) {
        let mut state = self.lock();
        while !state.closed {
            let Some((number, task)) = state.next() else {
                state = self.wait(state);
                continue;
            };
            drop(state);
            // A group whose fetch fails is done, too: the loader reads on its own what is missing, and reports why.
            let act = || match task {
                Task::Fetch(fetches, Fate::KeepLater) => Some(self.layout.ahead(&fetches)),
                task => {
                    match task {
                        Task::Fetch(fetches, Fate::Pass(until)) => self.layout.ahead(&fetches).pass(self.plan, until),
                        Task::Fetch(fetches, _) => self.layout.fetch(fetches),
                        Task::Keep(fill) => drop(fill.keep()),
                    }
                    None
                }
            };
            let held = catch_unwind(AssertUnwindSafe(act)).ok().flatten();
            state = self.lock();
            if let Some(group) = state.group(number) {
                group.stage = held.map_or(Stage::Done, Stage::Held);
            }
            self.announce(&mut state);
            self.changed.notify_all();
        }
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

    /// Wait until all groups are done.
    pub fn wait_until_done(&self) {
        let mut state = self.lock();
        while !state.groups.is_empty() {
            state = self.wait(state);
        }
    }
}
