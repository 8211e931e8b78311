//! Fetches that run at the same time, and become ready in the order in which they were planned.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Groups of fetches that wait for a thread. The plan waits if there are more.
const WAITING: usize = 1;

#[derive(Default)]
struct State {
    waiting: VecDeque<(u64, Vec<u32>)>,
    /// The step below which all is ready after each group that is not done.
    running: BTreeMap<u64, u64>,
    /// The same for groups that are done before earlier ones.
    done: BTreeMap<u64, u64>,
    put: u64,
    closed: bool,
}

/// The groups of one plan.
pub struct Line<'a> {
    state: Mutex<State>,
    changed: Condvar,
    announce: &'a (dyn Fn(u64) + Sync),
}

/// Closes the line when it is dropped, so that its threads end.
pub struct Closes<'a>(&'a Line<'a>);

impl Drop for Closes<'_> {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.changed.notify_all();
    }
}

impl Line<'_> {
    /// Begin an empty line. `announce` is called with the step below which all is ready.
    pub fn new(announce: &(dyn Fn(u64) + Sync)) -> Line<'_> {
        Line { state: Mutex::default(), changed: Condvar::new(), announce }
    }

    pub fn closes(&self) -> Closes<'_> {
        Closes(self)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Add a group, after which all steps below `ready` are ready. Waits while too many wait.
    pub fn put(&self, fetches: Vec<u32>, ready: u64) {
        let mut state = self.lock();
        while state.waiting.len() > WAITING {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let number = state.put;
        state.put += 1;
        state.running.insert(number, ready);
        if fetches.is_empty() {
            self.end(&mut state, number);
        } else {
            state.waiting.push_back((number, fetches));
        }
        self.changed.notify_all();
    }

    /// Note that a group is done, and announce what is ready.
    fn end(&self, state: &mut State, number: u64) {
        if let Some(ready) = state.running.remove(&number) {
            state.done.insert(number, ready);
        }
        let first = state.running.keys().next().copied().unwrap_or(u64::MAX);
        let mut ready = None;
        while let Some(entry) = state.done.first_entry().filter(|entry| *entry.key() < first) {
            ready = Some(entry.remove());
        }
        if let Some(ready) = ready {
            (self.announce)(ready);
        }
    }

    /// Fetch groups until the line is closed.
    pub fn work(&self, fetch: impl Fn(Vec<u32>)) {
        let mut state = self.lock();
        while !state.closed {
            let Some((number, fetches)) = state.waiting.pop_front() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            self.changed.notify_all();
            drop(state);
            // A group whose fetch fails is done, too: the loader reads on its own what is missing, and reports why.
            drop(std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| fetch(fetches))));
            state = self.lock();
            self.end(&mut state, number);
            self.changed.notify_all();
        }
    }

    /// Call `act` again and again, with the number of the call, until the line is closed.
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
        while !state.running.is_empty() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
