//! The limit on concurrent requests. The limit rises while throughput rises with it, and halves when the server throttles.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

const FIRST: usize = 64;
const LEAST: usize = 4;
const MOST: usize = 256;
/// Minimum number of requests in a measurement window. Fewer requests say little about throughput.
const WINDOW_REQUESTS: usize = 32;

#[derive(Debug)]
pub struct ConcurrencyLimit {
    permits: Arc<Semaphore>,
    state: Mutex<LimitState>,
}

#[derive(Debug)]
struct LimitState {
    limit: usize,
    /// Number of permits to remove when they are returned.
    surplus: usize,
    began: Instant,
    done: usize,
    bytes: u64,
    /// Whether a request had to wait for a permit. Only then does the limit affect throughput.
    waited: bool,
    /// The best throughput so far, in bytes per second. It decays, because the network changes.
    best: f64,
    climbing: bool,
    doubling: bool,
}

/// The right to run one request.
pub struct Permit<'a> {
    concurrency: &'a ConcurrencyLimit,
    permit: Option<OwnedSemaphorePermit>,
    pub bytes: u64,
    pub throttled: bool,
}

impl ConcurrencyLimit {
    pub fn new() -> ConcurrencyLimit {
        let state = LimitState {
            limit: FIRST,
            surplus: 0,
            began: Instant::now(),
            done: 0,
            bytes: 0,
            waited: false,
            best: 0.0,
            climbing: true,
            doubling: true,
        };
        ConcurrencyLimit { permits: Arc::new(Semaphore::new(FIRST)), state: Mutex::new(state) }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, LimitState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return the current limit.
    #[cfg(test)]
    fn limit(&self) -> usize {
        self.state().limit
    }

    pub async fn permit(&self) -> Permit<'_> {
        let permit = match self.permits.clone().try_acquire_owned() {
            Ok(permit) => Some(permit),
            Err(_) => {
                self.state().waited = true;
                self.permits.clone().acquire_owned().await.ok() // The semaphore is never closed.
            }
        };
        Permit { concurrency: self, permit, bytes: 0, throttled: false }
    }

    /// Record the end of a request. Returns whether its permit must be removed.
    fn ended(&self, bytes: u64, throttled: bool) -> bool {
        let mut state = self.state();
        state.done += 1;
        state.bytes += bytes;
        if throttled {
            state.doubling = false;
            state.climbing = false;
            if state.done > 1 {
                let half = state.limit / 2;
                self.set(&mut state, half);
                state.restart();
            }
        } else if state.done >= WINDOW_REQUESTS.max(2 * state.limit) {
            let rate = state.bytes as f64 / state.began.elapsed().as_secs_f64().max(1e-9);
            if state.waited {
                self.adapt(&mut state, rate);
            }
            state.restart();
        }
        let one_too_many = state.surplus > 0;
        state.surplus -= usize::from(one_too_many);
        one_too_many
    }

    fn adapt(&self, state: &mut LimitState, rate: f64) {
        let better = rate > 1.05 * state.best;
        if !better {
            state.doubling = false;
            // More requests do not help, so lower the limit until throughput drops.
            state.climbing = rate < 0.93 * state.best && !state.climbing;
        }
        state.best = rate.max(state.best * 0.98);
        let next = match (state.doubling, state.climbing) {
            (true, _) => state.limit * 2,
            (_, true) => state.limit * 5 / 4,
            (_, false) => state.limit * 4 / 5,
        };
        self.set(state, next);
    }

    fn set(&self, state: &mut LimitState, limit: usize) {
        let limit = limit.clamp(LEAST, MOST);
        if limit > state.limit {
            let more = limit - state.limit;
            let kept = more.min(state.surplus);
            state.surplus -= kept;
            self.permits.add_permits(more - kept);
        } else {
            state.surplus += state.limit - limit - self.permits.forget_permits(state.limit - limit);
        }
        state.limit = limit;
    }
}

impl LimitState {
    fn restart(&mut self) {
        self.began = Instant::now();
        self.done = 0;
        self.bytes = 0;
        self.waited = false;
    }
}

impl Drop for Permit<'_> {
    fn drop(&mut self) {
        if self.concurrency.ended(self.bytes, self.throttled)
            && let Some(permit) = self.permit.take()
        {
            permit.forget();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(concurrency: &ConcurrencyLimit, requests: usize, throttled: bool) {
        for _ in 0..requests {
            concurrency.state().waited = true;
            if concurrency.ended(1 << 20, throttled) {
                concurrency.permits.forget_permits(1);
            }
        }
    }

    #[test]
    fn throttling_halves_down_to_the_least() {
        let concurrency = ConcurrencyLimit::new();
        run(&concurrency, 64, true);
        assert_eq!(concurrency.limit(), LEAST);
        assert!(concurrency.permits.available_permits() <= LEAST);
    }

    #[test]
    fn the_limit_stays_in_bounds_and_matches_the_permits() {
        let concurrency = ConcurrencyLimit::new();
        for round in 0..200 {
            run(&concurrency, 40, round % 17 == 16);
            let state = concurrency.state();
            assert!((LEAST..=MOST).contains(&state.limit));
            assert_eq!(concurrency.permits.available_permits() as i64 - state.surplus as i64, state.limit as i64);
        }
    }
}
