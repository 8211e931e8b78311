//! A running plan of a loader whose order is known: pages are fetched before they are needed, and those that are needed last give way.
//!
//! One thread plans and fetches in the order of use (`planner`). The loader asks before it reads a step (`before`) and reports when it has read it
//! (`after`). Plans of the same order share their fetches (`election`).

mod backpressure;
pub mod belady;
mod dispatch;
mod election;
mod layout;
pub mod page_runs;
mod planner;
mod prefetch_queue;

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use penstock_error::{Error, Result};
use penstock_storage::process;

use crate::cache::Cached;
use backpressure::Backpressure;
use page_runs::Future;
pub use planner::Foreseen;
use planner::Planner;

/// A plan that runs for a loader. It ends when this is dropped.
pub struct Plan {
    backpressure: Arc<Backpressure>,
    thread: Mutex<Option<JoinHandle<()>>>,
    generation: u64,
}

impl Plan {
    /// Start to plan, and to fetch for the steps below `until`.
    pub fn start(cached: Cached, future: Arc<dyn Future>, until: u64) -> Result<Plan> {
        let backpressure = Arc::new(Backpressure::new(future.member(), until));
        let own = backpressure.clone();
        let run = move || {
            process::heed(own.stop.clone());
            let planned =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| Planner::run(&own, &cached, future.as_ref())));
            // Without a plan, the loader reads on its own, and reports what fails.
            drop(planned);
            own.end();
            cached.prefetched().end(own.number(), u64::MAX);
        };
        let thread = std::thread::Builder::new().name("penstock-plan".into()).spawn(run);
        let thread = thread.map_err(|error| Error::new("storage-failed", format!("cannot start a thread: {error}")))?;
        Ok(Plan { backpressure, thread: Mutex::new(Some(thread)), generation: process::generation() })
    }

    /// Return what a plan would find cached and what it would fetch in the first epoch, in bytes. Cost: reads the checksums of cached extents.
    pub fn foresee(cached: &Cached, future: &dyn Future) -> Result<Foreseen> {
        Planner::foresee(cached, future)
    }

    /// Return whether the plan knows the order, or has ended.
    pub fn has_started(&self) -> bool {
        self.backpressure.has_started()
    }

    /// Fetch for the steps below `until`. Later ones are planned, so that what they need first is kept, but nothing is fetched for them.
    pub fn set_until(&self, until: u64) {
        self.backpressure.set_until(until);
    }

    /// Wait until the pages that step `step` needs are cached, as far as the plan keeps them.
    pub fn before(&self, step: u64) {
        self.backpressure.before(step);
    }

    /// Note that a step has been read, so that its pages may give way.
    pub fn after(&self, step: u64) {
        self.backpressure.after(step);
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        if self.generation != process::generation() {
            return; // A forked process lacks its parent's thread, which may have held the lock.
        }
        self.backpressure.stop();
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = thread.join(); // A panic was caught.
        }
    }
}

#[cfg(test)]
mod tests;
