//! Runs a recipe. Threads begin, fetch and build batches in any order, and the consumer receives them in step order.
//!
//! One lock guards the work list, and threads hold it only briefly. A worker picks the earliest available work: samples of a
//! batch that has begun, otherwise the start of the next batch. If files are not mapped, separate threads fetch their data.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use penstock_codec::pixels::Pool;
use penstock_dataset::generation;
use penstock_error::{Error, Result};
use penstock_storage::process;

use crate::batch::Batch;
use crate::caught::caught;
use crate::engine::ahead::Plans;
use crate::engine::job::{Job, Needs};
use crate::engine::kept::Kept;
use crate::engine::recipe::Recipe;
use crate::engine::slots::{InProgress, Slot, Slots, Task, too_large};
use crate::source::window::{Steps, Window};

const FETCHERS: usize = 8;

/// Memory budgeted per fetching thread. An allocator retains about this much of the memory that each thread frees.
const FETCHER_BYTES: u64 = 32 << 20;

/// Up to 1/`SPARE_PART` of the budget may be idle memory in the pool, kept for the pixels of later images.
const SPARE_PART: u64 = 16;

/// How often a waiting consumer checks for an interrupt.
const LOOK: Duration = Duration::from_millis(50);

/// The threads and memory that a loader may use.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    pub threads: usize,
    /// Covers undelivered batches, the last delivered batch, and windows.
    pub memory_bytes: u64,
}

/// Counters for the time that threads spend on each kind of work, and for memory use in bytes.
#[derive(Debug, Default)]
pub struct Stats {
    pub fetch_ns: AtomicU64,
    pub gather_ns: AtomicU64,
    pub transform_ns: AtomicU64,
    /// Bytes of batches that the consumer still holds.
    pub kept_bytes: Arc<AtomicU64>,
    /// Peak bytes of batches in progress or waiting, plus windows.
    pub peak_bytes: AtomicU64,
}

pub struct Engine {
    inner: Arc<Inner>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    has_fetchers: bool,
    generation: u64,
}

struct Inner {
    recipe: Arc<Recipe>,
    budget: Budget,
    state: Mutex<Slots>,
    /// Signals that work is available, or that threads must stop.
    work: Condvar,
    /// The same for threads that fetch. They sleep while all files are mapped.
    to_fetch: Condvar,
    /// Signals that a batch is done.
    done: Condvar,
    stop: Arc<AtomicBool>,
    stats: Arc<Stats>,
    /// Whether any source must be fetched. Files that are cached while the engine runs are mapped from the next epoch on.
    fetches: AtomicBool,
    /// Plans of the caches through which sources are read.
    plans: Plans,
    /// What is kept of sources that are not read through a cache.
    kept: Option<Kept>,
    /// Reusable memory for decoded pixels.
    pool: Pool,
}

impl Engine {
    /// Start threads that make every `stride`-th batch of `begin..end`.
    pub fn start(
        recipe: Arc<Recipe>,
        budget: Budget,
        begin: u64,
        end: u64,
        stride: u64,
        stats: Arc<Stats>,
    ) -> Result<Engine> {
        let fetches = recipe.fetches()?;
        recipe.windows.iter().flatten().for_each(|window| window.begin(Steps { begin, stride }));
        let kept = if fetches {
            Kept::of(&recipe, budget.memory_bytes, Steps { begin, stride }, end).ok().flatten()
        } else {
            None
        };
        let plans = if fetches { Plans::start(&recipe, begin, end, stride)? } else { Plans::default() };
        let estimate_bytes = recipe.least_bytes().max(recipe.fetched_bytes.load(Relaxed));
        let state = Slots {
            begin,
            give: begin,
            end,
            stride,
            entries: BTreeMap::new(),
            estimate_bytes,
            scratch_bytes: 0,
            // What is kept gives way to batches that turn out to be larger.
            estimated: estimate_bytes > 0 && (kept.is_none() || recipe.is_sized()),
            given_bytes: 0,
            threads: budget.threads.max(1),
        };
        let inner = Arc::new(Inner {
            recipe,
            budget,
            state: Mutex::new(state),
            work: Condvar::new(),
            to_fetch: Condvar::new(),
            done: Condvar::new(),
            stop: Arc::default(),
            stats,
            fetches: AtomicBool::new(fetches),
            plans,
            kept,
            pool: Pool::new((budget.memory_bytes / SPARE_PART) as usize),
        });
        let engine = Engine { inner, threads: Mutex::default(), has_fetchers: fetches, generation: generation() };
        let fetchers = if fetches { ((budget.memory_bytes / FETCHER_BYTES) as usize).clamp(1, FETCHERS) } else { 0 };
        let roles = (0..budget.threads.max(1)).map(|_| false).chain((0..fetchers).map(|_| true));
        for fetches in roles {
            let inner = engine.inner.clone();
            let name = if fetches { "penstock-fetch" } else { "penstock-work" };
            let thread = std::thread::Builder::new().name(name.into()).spawn(move || {
                process::heed(inner.stop.clone());
                if fetches { inner.fetch() } else { inner.work() }
            });
            // Dropping the engine stops the threads that have already started.
            let thread =
                thread.map_err(|error| Error::new("storage-failed", format!("cannot start a thread: {error}")))?;
            engine.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
        }
        Ok(engine)
    }

    /// Wait for the next batch in order. Returns None after the last one. Calls `interrupted` periodically while waiting.
    pub fn next(&self, interrupted: impl Fn() -> bool) -> Result<Option<Batch>> {
        if self.generation != generation() {
            let text = "cannot continue this loader: its threads belong to the process that began to iterate, \
                        and this process is a fork of it";
            return Err(Error::new("loader-closed", text).hint("start a new iteration here"));
        }
        let inner = &self.inner;
        let mut state = inner.lock();
        loop {
            if state.give >= state.end || inner.stop.load(Relaxed) {
                return Ok(None);
            }
            let step = state.give;
            if matches!(state.entries.get(&step), Some(InProgress { slot: Slot::Done(_), .. }))
                && let Some(InProgress { slot: Slot::Done(batch), bytes, .. }) = state.entries.remove(&step)
            {
                state.give += state.stride;
                let (before, most) = (std::mem::replace(&mut state.given_bytes, bytes), inner.budget.memory_bytes);
                let fits = before + bytes <= most;
                let batch =
                    batch.and_then(|batch| if fits { Ok(batch) } else { Err(too_large(bytes, bytes, before, most)) });
                // An iteration ends with its first error, while its consumer still holds the batch before it. Later batches would only
                // take memory that the budget does not have.
                let unneeded = if batch.is_err() { std::mem::take(&mut state.entries) } else { BTreeMap::new() };
                inner.stop.fetch_or(batch.is_err(), Relaxed);
                drop(state);
                drop(unneeded);
                inner.wake();
                let mut batch = batch?;
                batch.give(&inner.stats.kept_bytes);
                return Ok(Some(batch));
            }
            (state, _) = inner.done.wait_timeout(state, LOOK).unwrap_or_else(PoisonError::into_inner);
            drop(state);
            if interrupted() {
                return Err(Error::new("interrupted", "the loader was interrupted"));
            }
            state = inner.lock();
        }
    }

    /// Return whether the engine is running and `step` is the next one to deliver.
    pub fn continues_with(&self, step: u64) -> bool {
        self.generation == generation() && !self.inner.stop.load(Relaxed) && self.inner.lock().give == step
    }

    /// Move the end to an earlier or later step, as an epoch begins. Threads that fetched files which are mapped now have nothing more to do.
    pub fn set_end(&self, end: u64) {
        if self.has_fetchers {
            // If this cannot be found out, reads report why.
            self.inner.fetches.store(self.inner.recipe.fetches().unwrap_or(true), Relaxed);
        }
        self.inner.lock().end = end;
        self.inner.plans.set_end(end);
        self.inner.kept.iter().for_each(|kept| kept.set_end(end));
        self.inner.wake();
    }

    /// Stop all threads and wait for them to finish. Later calls do nothing.
    pub fn close(&self) {
        if self.generation != generation() {
            return; // A forked process lacks its parent's threads, one of which may have held a lock.
        }
        self.inner.stop.store(true, Relaxed);
        drop(self.inner.lock()); // A thread that is about to wait sees the flag or is woken by the notification.
        self.inner.work.notify_all();
        self.inner.to_fetch.notify_all();
        self.inner.done.notify_all();
        for thread in std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner)) {
            let _ = thread.join(); // The consumer has already received any panic as an error.
        }
        self.inner.lock().entries.clear();
        self.inner.kept.iter().for_each(Kept::end);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.close();
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn window_bytes(&self) -> u64 {
        self.recipe.windows.iter().flatten().map(Window::bytes).sum()
    }

    /// Return the part of the budget, in bytes, that windows and what is kept leave for batches.
    fn room_bytes(&self) -> u64 {
        let kept = self.kept.as_ref().map_or(0, Kept::reserved_bytes);
        self.budget.memory_bytes.saturating_sub(self.window_bytes().max(self.recipe.window_bytes) + kept)
    }

    fn timed<T>(&self, spent: &AtomicU64, work: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let result = work();
        spent.fetch_add(began.elapsed().as_nanos() as u64, Relaxed);
        result
    }

    /// Wake the threads that may have something to do.
    fn wake(&self) {
        self.work.notify_all();
        if self.fetches.load(Relaxed) {
            self.to_fetch.notify_all();
        }
    }

    /// Wait until `find` returns a value, and return it. Returns None when the engine stops.
    fn wait<T>(&self, signal: &Condvar, mut find: impl FnMut(&mut Slots) -> Option<T>) -> Option<T> {
        let mut state = self.lock();
        loop {
            if self.stop.load(Relaxed) {
                return None;
            }
            if let Some(found) = find(&mut state) {
                return Some(found);
            }
            state = signal.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Run a fetching thread's loop.
    fn fetch(&self) {
        let next =
            |state: &mut Slots| (self.fetches.load(Relaxed) && state.admits(self.room_bytes())).then(|| state.begin());
        while let Some(step) = self.wait(&self.to_fetch, next) {
            let started = self.timed(&self.stats.fetch_ns, || {
                self.plans.before(step);
                let started = caught(|| self.recipe.start(step, [], |places| self.kept.as_ref()?.lend(step, places)));
                self.plans.after(step);
                started
            });
            let slot = match started {
                Ok(started) => Slot::Fetched(started),
                Err(error) => Slot::Done(Err(error)),
            };
            self.put(step, slot);
        }
    }

    /// Run a worker's loop.
    fn work(&self) {
        let next = |state: &mut Slots| {
            let admitted = (!self.fetches.load(Relaxed)).then_some(self.budget.memory_bytes);
            state.task(admitted, self.budget.memory_bytes, self.room_bytes())
        };
        while let Some(task) = self.wait(&self.work, next) {
            match task {
                Task::Begin(step, started) => {
                    let job = self.timed(&self.stats.gather_ns, || {
                        caught(|| {
                            let started = started.map_or_else(|| self.recipe.start(step, [], |_| None), Ok)?;
                            self.recipe.begin(started)
                        })
                    });
                    self.begun(step, job);
                }
                Task::Samples(step, job, task) => {
                    if task == 0 {
                        self.note_peak(&self.lock());
                    }
                    self.timed(&self.stats.transform_ns, || job.run(&self.recipe, task, &self.pool));
                    let mut state = self.lock();
                    drop(job);
                    let Some(InProgress { slot, .. }) = state.entries.get_mut(&step) else { continue };
                    let Slot::Running { left, .. } = slot else { continue };
                    *left -= 1;
                    if *left > 0 {
                        continue;
                    }
                    let Slot::Running { job, .. } = std::mem::replace(slot, Slot::Taken) else { continue };
                    drop(state);
                    // Every other thread dropped its reference before it decremented `left`.
                    if let Some(job) = Arc::into_inner(job) {
                        self.finish(step, job);
                    }
                }
            }
        }
    }

    /// Record a batch that has begun. Its tasks run when memory is available.
    fn begun(&self, step: u64, job: Result<Job>) {
        let job = match job {
            Ok(job) => job,
            Err(error) => return self.put(step, Slot::Done(Err(error))),
        };
        let (Needs { bytes, held_bytes, .. }, alone) = (job.needs, job.alone_bytes(self.budget.threads.max(1)));
        self.kept.iter().for_each(|kept| kept.leave_room(alone, self.budget.memory_bytes));
        let room_bytes = self.room_bytes();
        let mut state = self.lock();
        (state.estimate_bytes, state.estimated) = (state.estimate_bytes.max(bytes), true);
        state.scratch_bytes = state.scratch_bytes.max(alone - bytes);
        if alone > self.budget.memory_bytes {
            drop(state);
            return self.put(step, Slot::Done(Err(too_large(alone, bytes, 0, self.budget.memory_bytes))));
        }
        if job.tasks.is_empty() {
            if let Some(entry) = state.entries.get_mut(&step) {
                entry.bytes = bytes;
            }
            self.note_peak(&state);
            drop(state);
            return self.finish(step, job);
        }
        if let Some(entry) = state.entries.get_mut(&step) {
            *entry = InProgress { slot: Slot::Parked(job), bytes: held_bytes, scratch: (0, 0) };
        }
        state.unpark(self.budget.memory_bytes, room_bytes);
        self.note_peak(&state);
        drop(state);
        self.wake();
        self.done.notify_all();
    }

    fn note_peak(&self, state: &Slots) {
        self.stats.peak_bytes.fetch_max(
            state.in_flight_bytes() + self.window_bytes() + self.kept.as_ref().map_or(0, Kept::bytes),
            Relaxed,
        );
    }

    fn finish(&self, step: u64, job: Job) {
        let finished = self.timed(&self.stats.gather_ns, || {
            caught(|| match job.finish(&self.recipe)? {
                Ok(batch) => Ok(Ok(batch)),
                // Some samples are damaged: run the batch again with stand-ins.
                Err(started) => self.recipe.begin(started).map(Err),
            })
        });
        match finished {
            Ok(Ok(batch)) => self.put(step, Slot::Done(Ok(batch))),
            Ok(Err(job)) => self.begun(step, Ok(job)),
            Err(error) => self.put(step, Slot::Done(Err(error))),
        }
    }

    fn put(&self, step: u64, slot: Slot) {
        if let Some(entry) = self.lock().entries.get_mut(&step) {
            (entry.slot, entry.scratch) = (slot, (0, 0));
        }
        self.wake();
        self.done.notify_all();
    }
}
