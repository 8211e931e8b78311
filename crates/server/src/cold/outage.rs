//! Whether the cold store counts as down, so that what is known is served without a question.
//!
//! If the cold store cannot return one object, others are still asked for. Only if several objects fail in a row, the store counts as
//! down, until one is answered.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::meta::Object;

/// The store counts as down when this many objects have failed since the last answer.
const FAILURES: usize = 3;
/// An object that failed, or a store that is down, is asked again after this time.
const PAUSE: Duration = Duration::from_secs(1);
/// At most this many failed objects are remembered.
const MOST: usize = 1024;

#[derive(Default)]
pub struct Outage {
    state: Mutex<State>,
    /// Whether anything has failed lately. Reads of a store that works need no lock.
    has_failures: AtomicBool,
}

#[derive(Default)]
struct State {
    /// When each object failed last.
    failed: HashMap<Object, Instant>,
    /// How many of them have failed since the last answer.
    in_a_row: usize,
    /// When a store that is down was asked last.
    asked: Option<Instant>,
}

impl Outage {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return whether the cold store may be asked for an object now.
    pub fn may_ask(&self, object: &Object) -> bool {
        if !self.has_failures.load(Relaxed) {
            return true;
        }
        let mut state = self.state();
        let is_over = |since: Option<Instant>| since.is_none_or(|since| since.elapsed() >= PAUSE);
        if !is_over(state.failed.get(object).copied()) {
            return false;
        }
        let may = state.in_a_row < FAILURES || is_over(state.asked);
        if may {
            state.asked = Some(Instant::now());
        }
        may
    }

    /// Note that the cold store did not answer for an object.
    pub fn failed(&self, object: &Object) {
        let mut state = self.state();
        self.has_failures.store(true, Relaxed);
        if state.failed.len() >= MOST {
            state.failed.retain(|_, since| since.elapsed() < PAUSE);
        }
        if state.failed.len() >= MOST || state.failed.insert(object.clone(), Instant::now()).is_none() {
            state.in_a_row += 1;
        }
    }

    /// Note that the cold store answered for an object.
    pub fn answered(&self, object: &Object) {
        if self.has_failures.load(Relaxed) {
            let mut state = self.state();
            state.failed.remove(object);
            state.in_a_row = 0;
            self.has_failures.store(!state.failed.is_empty(), Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(name: &str) -> Object {
        Object::new("bucket", name)
    }

    #[test]
    fn an_object_that_fails_does_not_keep_others_from_being_asked_for() {
        let outage = Outage::default();
        for _ in 0..20 {
            outage.failed(&object("bad"));
            outage.failed(&object("worse"));
        }
        assert!(!outage.may_ask(&object("bad")) && outage.may_ask(&object("good")));
        outage.answered(&object("good"));
        assert!(!outage.may_ask(&object("bad")) && outage.may_ask(&object("good")));
    }

    #[test]
    fn a_store_that_fails_is_asked_now_and_then_until_it_answers() {
        let outage = Outage::default();
        for name in ["a", "b", "c"] {
            outage.failed(&object(name));
        }
        assert!(outage.may_ask(&object("d")) && !outage.may_ask(&object("d")) && !outage.may_ask(&object("e")));
        outage.answered(&object("d"));
        assert!(outage.may_ask(&object("d")) && outage.may_ask(&object("e")) && !outage.may_ask(&object("a")));
    }
}
