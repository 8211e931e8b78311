//! Runs of a window order, held while their samples are being drawn: each is fetched once, whole, and let go when it is used up.
//!
//! Only where files are not mapped. What a rank holds is its share of the window.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use penstock_dataset::Held;
use penstock_error::Result;
use penstock_format::schema::ColumnSpec;

use crate::order::Order;
use crate::source::Source;

pub struct Window {
    run_samples: u64,
    state: Mutex<State>,
    fetched: Condvar,
}

#[derive(Default)]
struct State {
    /// By epoch and number.
    runs: HashMap<(u64, u64), Run>,
}

struct Run {
    /// Nothing while somebody fetches it.
    held: Option<Arc<Held>>,
    /// Samples of it that are still to be drawn, by this rank.
    left: u64,
}

impl Window {
    /// Nothing for orders without windows, and where files are mapped.
    pub fn of(order: &Order, source: &Source) -> Option<Window> {
        let Order::Window { run_samples, .. } = order else { return None };
        if source.snapshot.context.storage.mapped() {
            return None;
        }
        Some(Window { run_samples: *run_samples, state: Mutex::default(), fetched: Condvar::new() })
    }

    /// Let go of everything: the draws begin anew.
    pub fn clear(&self) {
        self.lock().runs.clear();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The runs that these positions of the view are in, fetched now unless they are held; each position is a draw of `epoch`. `drawn`
    /// tells how many samples of a run this rank draws in the epoch.
    pub fn runs(
        &self,
        source: &Source,
        columns: &[&ColumnSpec],
        epoch: u64,
        positions: &[u64],
        drawn: impl Fn(Range<u64>) -> u64,
    ) -> Result<Vec<Arc<Held>>> {
        let mut uses: HashMap<(u64, u64), u64> = HashMap::new();
        positions.iter().for_each(|position| *uses.entry((epoch, position / self.run_samples)).or_default() += 1);
        let missing = self.missing(source, uses.keys().copied(), drawn);
        let groups = missing.iter().map(|(_, run)| self.range(source, *run).map(|position| source.absolute(position)).collect()).collect();
        let fetched = if missing.is_empty() { Ok(Vec::new()) } else { source.snapshot.hold(groups, columns) };
        let mut state = self.lock();
        self.fetched.notify_all(); // They look when this lock is free.
        let fetched = fetched.inspect_err(|_| missing.iter().for_each(|run| drop(state.runs.remove(run))))?;
        for (run, held) in missing.iter().zip(fetched) {
            state.runs.entry(*run).and_modify(|run| run.held = Some(Arc::new(held)));
        }
        let mut found = Vec::with_capacity(uses.len());
        for (number, count) in uses {
            while state.runs.get(&number).is_some_and(|run| run.held.is_none()) {
                state = self.fetched.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            // Whoever fetched it may have failed: then the take fetches what it needs by itself.
            let Some(run) = state.runs.get_mut(&number) else { continue };
            found.extend(run.held.clone());
            run.left = run.left.saturating_sub(count);
            if run.left == 0 {
                state.runs.remove(&number);
            }
        }
        Ok(found)
    }

    /// Those that nobody has or fetches; from now on, the caller fetches them.
    fn missing(&self, source: &Source, wanted: impl Iterator<Item = (u64, u64)>, drawn: impl Fn(Range<u64>) -> u64) -> Vec<(u64, u64)> {
        let mut state = self.lock();
        let mut missing: Vec<(u64, u64)> = wanted.filter(|run| !state.runs.contains_key(run)).collect();
        missing.sort_unstable();
        for run in &missing {
            state.runs.insert(*run, Run { held: None, left: drawn(self.range(source, run.1)) });
        }
        missing
    }

    fn range(&self, source: &Source, run: u64) -> Range<u64> {
        run * self.run_samples..((run + 1) * self.run_samples).min(source.len())
    }
}
