//! Receives many ranges at once. Each range has its own task, and one more task waits for all of them.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use penstock_error::{Error, Kind, Result};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::live::{runtime, wait};
use super::ranges::Asked;
use super::store::Remote;
use crate::counters::add;
use crate::ranges::{RangeRequest, Then};

impl Remote {
    pub(super) fn receive(&self, ranges: Vec<RangeRequest>, then: Then) -> Vec<Result<Vec<Bytes>>> {
        let count = ranges.len();
        let (live, runtime) = match (self.live(), runtime()) {
            (Ok(live), Ok(runtime)) => (live, runtime),
            (Err(error), _) | (_, Err(error)) => return (0..count).map(|_| Err(error.clone())).collect(),
        };
        add(&self.traffic.counters.ranges, count as u64);
        let bytes = ranges.iter().map(|range| range.end() - range.begin).sum();
        add(&self.traffic.counters.range_bytes, bytes);
        let began = Instant::now();
        let stop: Arc<Mutex<Option<Error>>> = Arc::default();
        let mut tasks = JoinSet::new();
        for (index, range) in ranges.into_iter().enumerate() {
            let stop = stop.clone();
            let (live, traffic, hedge, then) = (live.clone(), self.traffic.clone(), self.hedge, then.clone());
            let (path, what) = (self.path(&range.name), self.what("read", &range.name));
            let task = async move {
                let permit = live.patience.level.permit().await;
                // Once one range has failed permanently, the others need not wait for their own deadlines.
                if let Some(error) = stop.lock().unwrap_or_else(PoisonError::into_inner).clone() {
                    return (index, Err(error));
                }
                let seen = |piece: usize, bytes: &Bytes| then(index, piece, bytes);
                let asked = Asked { counters: &traffic.counters, path, what, then: &seen };
                let pieces = match hedge {
                    true => live.hedged(&asked, range, permit).await,
                    false => live.range(&asked, range, permit).await,
                };
                if let Some(error) = pieces.as_ref().err().filter(|error| error.kind() == Kind::Unavailable) {
                    stop.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| error.clone());
                }
                (index, pieces)
            };
            tasks.spawn_on(task, runtime.handle());
        }
        // One task waits for all others, so that the caller's thread is woken only once, not once per range. Dropping a task set
        // aborts its tasks.
        let broken = || Error::new("internal", "a network task failed");
        let mut all = JoinSet::new();
        let join = async move {
            let mut answers: Vec<Result<Vec<Bytes>>> = (0..count).map(|_| Err(broken())).collect();
            while let Some(joined) = tasks.join_next().await {
                joined.into_iter().for_each(|(index, answer)| answers[index] = answer);
            }
            answers
        };
        all.spawn_on(join, runtime.handle());
        match wait(async { all.join_next().await.and_then(|joined| joined.ok()).ok_or_else(broken) }) {
            Ok(answers) => {
                live.cost.note(count, bytes, began.elapsed());
                answers
            }
            Err(error) => (0..count).map(|_| Err(error.clone())).collect(),
        }
    }
}
