//! How far a loader has read, and how far its plan is. The loader's threads and the plan's thread wait for each other here.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use penstock_storage::process;

use super::election::{Field, MemberFile};
use super::page_runs::Member;

/// A loader does not wait longer than this for its plan. It then reads on its own.
const PATIENCE: Duration = Duration::from_secs(60);
/// How often a waiting thread looks whether it should stop.
const LOOK: Duration = Duration::from_millis(50);
/// How often a plan looks at others, while a loader waits and otherwise.
const PAUSES: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(20));

#[derive(Debug, Default)]
struct BackpressureState {
    /// All own steps below this are read, and steps that were read out of order.
    read: u64,
    read_early: BTreeSet<u64>,
    /// No step from this on has been begun.
    begun: u64,
    /// No step from this on will be read, as far as the loader knows.
    until: u64,
    /// All fetches for steps below this are done.
    ready: u64,
    /// Whether the plan knows the order. Until then, the loader reads on its own.
    started: bool,
    ended: bool,
    /// Threads of the loader that wait.
    waiting: usize,
    /// What was ready when a thread lost its patience. None waits again before more is ready.
    gave_up_at: Option<u64>,
    /// Where other plans see how far the loader is.
    entry: Option<Arc<MemberFile>>,
}

impl BackpressureState {
    fn tell(&self, field: Field, value: u64) {
        if let Some(entry) = &self.entry {
            entry.set(field, value);
        }
    }
}

#[derive(Debug)]
pub struct Backpressure {
    state: Mutex<BackpressureState>,
    changed: Condvar,
    stride: u64,
    pub stop: Arc<AtomicBool>,
}

impl Backpressure {
    pub fn new(member: Member, until: u64) -> Backpressure {
        let state = Mutex::new(BackpressureState { read: member.begin, until, ..BackpressureState::default() });
        Backpressure { state, changed: Condvar::new(), stride: member.stride.max(1), stop: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BackpressureState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return a number that no other plan of this process has.
    pub fn number(&self) -> u64 {
        std::ptr::from_ref(self) as u64
    }

    pub fn has_started(&self) -> bool {
        let state = self.lock();
        state.started || state.ended
    }

    /// Return whether the loader waits for a step for which it has waited since `began`.
    fn must_wait(&self, state: &BackpressureState, step: u64, began: Instant) -> bool {
        state.started
            && state.ready <= step
            && !state.ended
            && state.gave_up_at != Some(state.ready)
            && !self.is_stopped()
            && began.elapsed() < PATIENCE
            && !process::interrupted()
    }

    /// Wait until a step is ready.
    pub fn before(&self, step: u64) {
        let began = Instant::now();
        let mut state = self.lock();
        if !self.must_wait(&state, step, began) {
            state.begun = state.begun.max(step + 1);
            return;
        }
        state.waiting += 1;
        state.tell(Field::Waits, 1);
        self.changed.notify_all(); // The plan looks at other plans more often while its loader waits.
        while self.must_wait(&state, step, began) {
            (state, _) = self.changed.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner);
        }
        if began.elapsed() >= PATIENCE {
            state.gave_up_at = Some(state.ready);
        }
        state.begun = state.begun.max(step + 1);
        state.waiting -= 1;
        if state.waiting == 0 {
            state.tell(Field::Waits, 0);
        }
    }

    /// Note that a step has been read.
    pub fn after(&self, step: u64) {
        let mut state = self.lock();
        if state.ended {
            return;
        }
        let BackpressureState { read, read_early, .. } = &mut *state;
        read_early.insert(step);
        while read_early.remove(read) {
            *read += self.stride;
        }
        state.tell(Field::Read, state.read);
        self.changed.notify_all();
    }

    /// Return whether the loader waits.
    pub fn waits(&self) -> bool {
        self.lock().waiting > 0
    }

    pub fn read(&self) -> u64 {
        self.lock().read
    }

    pub fn until(&self) -> u64 {
        self.lock().until
    }

    /// Note that the loader reads the steps below `until`.
    pub fn set_until(&self, until: u64) {
        let mut state = self.lock();
        state.until = until;
        state.tell(Field::Until, until);
        self.changed.notify_all();
    }

    /// Let other plans see how far the loader is.
    pub fn shown_in(&self, entry: Option<Arc<MemberFile>>) {
        let mut state = self.lock();
        state.entry = entry;
        state.tell(Field::Read, state.read);
        state.tell(Field::Until, state.until);
        state.tell(Field::Waits, u64::from(state.waiting > 0));
    }

    /// Let the loader wait for the plan from now on. Returns the first step that it has not begun on its own.
    pub fn start(&self) -> u64 {
        let mut state = self.lock();
        (state.started, state.ready) = (true, state.begun.max(state.read));
        state.ready
    }

    /// Note that the steps below `ready` are ready, and that the plan has started.
    pub fn set_ready(&self, ready: u64) {
        let mut state = self.lock();
        (state.started, state.ready) = (true, ready);
        self.changed.notify_all();
    }

    /// Let the loader read on its own.
    pub fn end(&self) {
        self.lock().ended = true;
        self.changed.notify_all();
    }

    pub fn is_stopped(&self) -> bool {
        self.stop.load(Relaxed)
    }

    pub fn stop(&self) {
        self.stop.store(true, Relaxed);
        drop(self.lock()); // A thread that is about to wait sees the flag or is woken.
        self.changed.notify_all();
    }

    /// Wait until the loader has read the steps below `read`, or will read those below `until`, or has ended.
    pub fn wait_for(&self, read: u64, until: u64) {
        let mut state = self.lock();
        while !self.is_stopped() && state.read < read && state.until < until {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Wait a moment for what other plans do: a short one if a loader waits.
    pub fn pause(&self, is_urgent: bool) {
        let state = self.lock();
        if !self.is_stopped() {
            let pause = if is_urgent || state.waiting > 0 { PAUSES.0 } else { PAUSES.1 };
            drop(self.changed.wait_timeout(state, pause));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_that_a_loader_has_begun_are_left_to_it() {
        let backpressure = Backpressure::new(Member { rank: 0, begin: 0, stride: 1 }, 100);
        for step in [0, 1, 4] {
            backpressure.before(step);
        }
        backpressure.after(4);
        assert_eq!((backpressure.start(), backpressure.read()), (5, 0));
        // Others wait from now on.
        std::thread::scope(|scope| {
            let next = scope.spawn(|| backpressure.before(5));
            while !backpressure.waits() {
                std::thread::yield_now();
            }
            assert!(!next.is_finished());
            backpressure.set_ready(6);
        });
        assert_eq!(backpressure.start(), 6);
    }
}
