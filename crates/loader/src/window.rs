//! Runs of a window order, held while their samples are being drawn: each is fetched once, whole, and let go when it is used up.
//!
//! Only where files are not mapped. What a rank holds is its share of the window, and counts in the budget.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use penstock_dataset::Held;
use penstock_error::Result;
use penstock_format::Id;
use penstock_format::schema::ColumnSpec;

use crate::engine::caught;
use crate::order::Order;
use crate::source::Source;

pub struct Window {
    run_samples: u64,
    /// Runs that are held at most, where it is not known how often one is drawn: the one not asked for longest goes.
    most: Option<usize>,
    state: Mutex<State>,
    fetched: Condvar,
}

/// Every `stride`-th step from `begin` on: those that are made here.
#[derive(Debug, Clone, Copy)]
pub struct Steps {
    pub begin: u64,
    pub stride: u64,
}

impl Default for Steps {
    fn default() -> Steps {
        Steps { begin: 0, stride: 1 }
    }
}

impl Steps {
    pub fn has(&self, step: u64) -> bool {
        step.checked_sub(self.begin).is_some_and(|behind| behind.is_multiple_of(self.stride))
    }
}

#[derive(Default)]
struct State {
    steps: Steps,
    /// By epoch and number.
    runs: HashMap<(u64, u64), Run>,
    /// Of all blocks and data files that are held.
    bytes: u64,
    /// In how many runs each data file is.
    files: HashMap<Id, usize>,
    /// Runs that are being fetched, and the bytes of the largest so far.
    fetching: u64,
    run_bytes: u64,
    asked: u64,
}

struct Run {
    /// Nothing while somebody fetches it.
    held: Option<Arc<Held>>,
    /// Samples of it that are still to be drawn here, at most.
    left: u64,
    /// The number of the request that asked for it last.
    asked: u64,
}

impl State {
    fn insert(&mut self, number: &(u64, u64), held: Held) {
        let Some(run) = self.runs.get_mut(number) else { return };
        self.bytes += held.bytes();
        self.run_bytes = self.run_bytes.max(held.bytes());
        for (file, bytes) in held.files() {
            let runs = self.files.entry(file).or_default();
            *runs += 1;
            self.bytes += if *runs == 1 { bytes } else { 0 };
        }
        run.held = Some(Arc::new(held));
    }

    fn remove(&mut self, number: &(u64, u64)) {
        let Some(Run { held: Some(held), .. }) = self.runs.remove(number) else { return };
        self.bytes -= held.bytes();
        for (file, bytes) in held.files() {
            let runs = self.files.entry(file).or_default();
            *runs -= 1;
            if *runs == 0 {
                self.files.remove(&file);
                self.bytes -= bytes;
            }
        }
    }
}

impl Window {
    /// Nothing for orders without windows, and where files are mapped. `mixed`: the source is one of a mixture.
    pub fn of(order: &Order, source: &Source, mixed: bool) -> Option<Window> {
        let Order::Window { run_samples, window_samples, .. } = order else { return None };
        if source.snapshot.context.storage.mapped() {
            return None;
        }
        // While one window ends, the next one begins.
        let most = mixed.then(|| 2 * window_samples.div_ceil(*run_samples) as usize);
        Some(Window { run_samples: *run_samples, most, state: Mutex::default(), fetched: Condvar::new() })
    }

    /// Let go of everything: the draws begin anew, for these steps.
    pub fn begin(&self, steps: Steps) {
        *self.lock() = State { steps, ..State::default() };
    }

    /// What is held now, or will be when it is fetched.
    pub fn bytes(&self) -> u64 {
        let state = self.lock();
        state.bytes + state.fetching * state.run_bytes
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The runs that these positions of the view are in, fetched now unless they are held; each position is a draw of `epoch`. `drawn`
    /// tells how many samples of a run are drawn here in the epoch, at most.
    pub fn runs(
        &self,
        source: &Source,
        columns: &[&ColumnSpec],
        epoch: u64,
        positions: &[u64],
        drawn: impl Fn(Range<u64>, Steps) -> u64,
    ) -> Result<Vec<Arc<Held>>> {
        let mut uses: HashMap<(u64, u64), u64> = HashMap::new();
        positions.iter().for_each(|position| *uses.entry((epoch, position / self.run_samples)).or_default() += 1);
        let missing = self.missing(source, uses.keys().copied(), drawn);
        let groups = missing.iter().map(|(_, run)| self.range(source, *run).map(|position| source.absolute(position)).collect()).collect();
        // Others wait for these runs, whatever happens.
        let fetched = if missing.is_empty() { Ok(Vec::new()) } else { caught(|| source.snapshot.hold(groups, columns)) };
        let mut state = self.lock();
        state.fetching -= missing.len() as u64;
        self.fetched.notify_all(); // They look when this lock is free.
        let fetched = fetched.inspect_err(|_| missing.iter().for_each(|run| state.remove(run)))?;
        for (run, held) in missing.iter().zip(fetched) {
            state.insert(run, held);
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
                state.remove(&number);
            }
        }
        while self.most.is_some_and(|most| state.runs.len() > most)
            && let Some(oldest) = state.runs.iter().filter(|(_, run)| run.held.is_some()).min_by_key(|(_, run)| run.asked)
        {
            let number = *oldest.0;
            state.remove(&number);
        }
        Ok(found)
    }

    /// Those that nobody has or fetches; from now on, the caller fetches them.
    fn missing(
        &self,
        source: &Source,
        wanted: impl Iterator<Item = (u64, u64)>,
        drawn: impl Fn(Range<u64>, Steps) -> u64,
    ) -> Vec<(u64, u64)> {
        let mut state = self.lock();
        state.asked += 1;
        let asked = state.asked;
        let mut missing: Vec<(u64, u64)> = wanted.filter(|run| state.runs.get_mut(run).map(|run| run.asked = asked).is_none()).collect();
        missing.sort_unstable();
        state.fetching += missing.len() as u64;
        for run in &missing {
            let left = drawn(self.range(source, run.1), state.steps);
            state.runs.insert(*run, Run { held: None, left, asked });
        }
        missing
    }

    fn range(&self, source: &Source, run: u64) -> Range<u64> {
        run * self.run_samples..((run + 1) * self.run_samples).min(source.len())
    }
}
