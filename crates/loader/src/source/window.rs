//! Keeps the runs of a window order in memory while their samples are being drawn. Each run is fetched as a whole and released
//! after its last draw.
//!
//! Windows are used only if files are not mapped. Each rank holds its share of the window, which counts towards the budget.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use penstock_dataset::{HeldBlocks, hold};
use penstock_error::Result;
use penstock_format::Id;

use crate::caught::caught;
use crate::order::sequence::Order;
use crate::source::view::Source;

pub struct Window {
    run_samples: u64,
    /// Limit on the number of held runs in mixtures, where the number of draws per run is unknown. The least recently used run is dropped
    /// first.
    most: Option<usize>,
    state: Mutex<WindowState>,
    fetched: Condvar,
}

/// The steps whose batches this engine makes: every `stride`-th step, starting at `begin`.
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
struct WindowState {
    steps: Steps,
    /// Runs by epoch and number.
    runs: HashMap<(u64, u64), HeldRun>,
    /// Bytes of all held blocks and data files.
    bytes: u64,
    /// For each data file, the number of runs that hold it.
    files: HashMap<Id, usize>,
    /// Number of runs being fetched.
    fetching: u64,
    /// Bytes of the largest run so far.
    run_bytes: u64,
    /// Number of calls to `missing` so far.
    asked: u64,
}

struct HeldRun {
    /// None while a thread fetches the run.
    held: Option<Arc<HeldBlocks>>,
    /// Upper limit on the number of samples in the run that this engine still has to draw.
    left: u64,
    /// Number of the last call to `missing` that requested the run.
    asked: u64,
}

impl WindowState {
    fn insert(&mut self, number: &(u64, u64), held: HeldBlocks) {
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
        let Some(HeldRun { held: Some(held), .. }) = self.runs.remove(number) else { return };
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
    /// Create the window of a source. Returns None for an order without windows, or if files are mapped. `mixed` is true if the
    /// source belongs to a mixture.
    pub fn of(order: &Order, source: &Source, mixed: bool) -> Option<Window> {
        let Order::Window { run_samples, window_samples, .. } = order else { return None };
        if source.snapshot.is_mapped() {
            return None;
        }
        // Two windows may overlap, because the next one begins before the current one ends.
        let most = mixed.then(|| 2 * window_samples.div_ceil(*run_samples) as usize);
        Some(Window { run_samples: *run_samples, most, state: Mutex::default(), fetched: Condvar::new() })
    }

    /// Release all runs and start over with these steps.
    pub fn begin(&self, steps: Steps) {
        *self.lock() = WindowState { steps, ..WindowState::default() };
    }

    /// Return the bytes held now, plus an estimate for runs being fetched.
    pub fn bytes(&self) -> u64 {
        let state = self.lock();
        state.bytes + state.fetching * state.run_bytes
    }

    fn lock(&self) -> MutexGuard<'_, WindowState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return the runs that contain these positions in the view, and fetch those that are not in memory. Each position counts
    /// as one draw of `epoch`. `drawn` returns an upper limit on the number of samples that this engine draws from a run in the
    /// epoch.
    pub fn runs(
        &self,
        source: &Source,
        epoch: u64,
        positions: &[u64],
        drawn: impl Fn(Range<u64>, Steps) -> u64,
    ) -> Result<Vec<Arc<HeldBlocks>>> {
        let mut uses: HashMap<(u64, u64), u64> = HashMap::new();
        positions.iter().for_each(|position| *uses.entry((epoch, position / self.run_samples)).or_default() += 1);
        let missing = self.missing(source, uses.keys().copied(), drawn);
        let groups = missing
            .iter()
            .map(|(_, run)| self.range(source, *run).map(|position| source.absolute(position)).collect())
            .collect();
        // Other threads wait for these runs, so even a panic must be caught.
        let fetched = if missing.is_empty() {
            Ok(Vec::new())
        } else {
            caught(|| hold(&source.snapshot, groups, &source.specs()))
        };
        let mut state = self.lock();
        state.fetching -= missing.len() as u64;
        self.fetched.notify_all(); // Waiting threads check again when this lock is released.
        let fetched = fetched.inspect_err(|_| missing.iter().for_each(|run| state.remove(run)))?;
        for (run, held) in missing.iter().zip(fetched) {
            state.insert(run, held);
        }
        let mut found = Vec::with_capacity(uses.len());
        for (number, count) in uses {
            while state.runs.get(&number).is_some_and(|run| run.held.is_none()) {
                state = self.fetched.wait(state).unwrap_or_else(PoisonError::into_inner);
            }
            // If another thread failed to fetch the run, this batch fetches its own blocks instead.
            let Some(run) = state.runs.get_mut(&number) else { continue };
            found.extend(run.held.clone());
            run.left = run.left.saturating_sub(count);
            if run.left == 0 {
                state.remove(&number);
            }
        }
        while self.most.is_some_and(|most| state.runs.len() > most)
            && let Some(oldest) =
                state.runs.iter().filter(|(_, run)| run.held.is_some()).min_by_key(|(_, run)| run.asked)
        {
            let number = *oldest.0;
            state.remove(&number);
        }
        Ok(found)
    }

    /// Claim the runs that are neither held nor being fetched; the caller must fetch them.
    fn missing(
        &self,
        source: &Source,
        wanted: impl Iterator<Item = (u64, u64)>,
        drawn: impl Fn(Range<u64>, Steps) -> u64,
    ) -> Vec<(u64, u64)> {
        let mut state = self.lock();
        state.asked += 1;
        let asked = state.asked;
        let mut missing: Vec<(u64, u64)> =
            wanted.filter(|run| state.runs.get_mut(run).map(|run| run.asked = asked).is_none()).collect();
        missing.sort_unstable();
        state.fetching += missing.len() as u64;
        for run in &missing {
            let left = drawn(self.range(source, run.1), state.steps);
            state.runs.insert(*run, HeldRun { held: None, left, asked });
        }
        missing
    }

    /// Return the numbers of the runs that contain these positions in the view.
    pub fn numbers(&self, positions: impl Iterator<Item = u64>) -> BTreeSet<u64> {
        positions.map(|position| position / self.run_samples).collect()
    }

    /// Return the positions in the view of a run's samples.
    pub fn range(&self, source: &Source, run: u64) -> Range<u64> {
        run * self.run_samples..((run + 1) * self.run_samples).min(source.len())
    }
}
