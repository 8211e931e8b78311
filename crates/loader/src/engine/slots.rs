//! The batches in progress: which of them may begin or run, and how much of the budget each one uses.

use std::collections::BTreeMap;
use std::sync::Arc;

use penstock_error::{Error, Result};

use crate::batch::Batch;
use crate::engine::job::{Job, Needs};
use crate::engine::started::Started;

/// Upper limit on batches in progress or waiting, even if memory would allow more.
const AHEAD: usize = 16;

pub struct Slots {
    /// The next step to begin, the next step to deliver, and the end (exclusive).
    pub(super) begin: u64,
    pub give: u64,
    pub end: u64,
    /// Distance from one step to the next.
    pub stride: u64,
    pub entries: BTreeMap<u64, InProgress>,
    /// Estimated bytes of a batch, based on the largest one so far.
    pub estimate_bytes: u64,
    /// The most scratch memory that any batch has needed so far.
    pub scratch_bytes: u64,
    /// Whether `estimate_bytes` is based on any data. Until it is, only one batch may be in progress.
    pub estimated: bool,
    /// Bytes of the last delivered batch, which the consumer holds until it receives the next one.
    pub given_bytes: u64,
    pub threads: usize,
}

/// A batch in progress, with its known or estimated memory use.
pub struct InProgress {
    pub slot: Slot,
    pub bytes: u64,
    /// Scratch bytes per task, and the number of tasks that may run at the same time.
    pub scratch: (u64, usize),
}

pub enum Slot {
    /// A thread is working on the batch.
    Taken,
    Fetched(Started),
    /// The batch has begun, and its tasks are waiting for memory.
    Parked(Job),
    /// The batch has begun, and `left` of its tasks are unfinished.
    Running {
        job: Arc<Job>,
        left: usize,
    },
    Done(Result<Batch>),
}

pub enum Task {
    Begin(u64, Option<Started>),
    Samples(u64, Arc<Job>, usize),
}

impl Slots {
    /// Return the size of all batches in progress or waiting, plus the scratch memory for the threads that make samples, in bytes.
    pub fn in_flight_bytes(&self) -> u64 {
        self.batches_bytes() + self.busy_scratch_bytes()
    }

    fn batches_bytes(&self) -> u64 {
        self.entries.values().map(|entry| entry.bytes).sum()
    }

    fn busy_scratch_bytes(&self) -> u64 {
        let (mut left, mut scratch): (usize, Vec<(u64, usize)>) =
            (self.threads, self.entries.values().map(|entry| entry.scratch).collect());
        scratch.sort_unstable_by(|one, other| other.cmp(one));
        let worst = scratch.into_iter().map(|(bytes, tasks)| {
            let busy = tasks.min(left);
            left -= busy;
            bytes * busy as u64
        });
        worst.sum()
    }

    /// Return whether another batch may begin within `memory_bytes`. Reserves scratch memory for the next batch to deliver, which
    /// must be finished regardless of the memory that later batches use.
    pub fn admits(&self, memory_bytes: u64) -> bool {
        let scratch = self.busy_scratch_bytes().max(self.scratch_bytes);
        let room =
            self.estimated && self.batches_bytes() + scratch + self.given_bytes + self.estimate_bytes <= memory_bytes;
        self.begin < self.end && self.entries.len() < AHEAD && (room || self.entries.is_empty())
    }

    /// Run the parked batches that fit. If no batch is running, run the earliest one even if it does not fit. That batch fails
    /// if it and the last delivered batch together exceed the budget.
    pub fn unpark(&mut self, memory_bytes: u64, room_bytes: u64) {
        let parked = self.entries.iter().filter(|(_, entry)| matches!(entry.slot, Slot::Parked(_)));
        for step in parked.map(|(step, _)| *step).collect::<Vec<u64>>() {
            let used = self.in_flight_bytes() + self.given_bytes;
            let first = self.entries.keys().next() == Some(&step);
            let running = self.entries.values().any(|entry| matches!(entry.slot, Slot::Running { .. }));
            // Earlier batches of unknown size must run before this one is delivered. Each of them may be as large as the largest
            // so far.
            let earlier =
                self.entries.range(..step).filter(|(_, entry)| matches!(entry.slot, Slot::Taken | Slot::Fetched(_)));
            let unknown: u64 = earlier.map(|(_, entry)| self.estimate_bytes.saturating_sub(entry.bytes)).sum();
            let (threads, Some(entry)) = (self.threads, self.entries.get_mut(&step)) else { return };
            let Slot::Parked(job) = &entry.slot else { return };
            let (tasks, Needs { bytes, held_bytes, scratch_bytes }) = (job.tasks.len(), job.needs);
            let alone = job.alone_bytes(threads);
            if used + unknown + alone - held_bytes > room_bytes && (!first || running) {
                return;
            }
            if first && alone + self.given_bytes > memory_bytes {
                entry.slot = Slot::Done(Err(too_large(alone, bytes, self.given_bytes, memory_bytes)));
                return;
            }
            (entry.bytes, entry.scratch) = (bytes, (scratch_bytes, tasks));
            if let Slot::Parked(job) = std::mem::replace(&mut entry.slot, Slot::Taken) {
                entry.slot = Slot::Running { job: Arc::new(job), left: tasks };
            }
        }
    }

    pub fn begin(&mut self) -> u64 {
        let step = self.begin;
        self.begin += self.stride;
        self.entries.insert(step, InProgress { slot: Slot::Taken, bytes: self.estimate_bytes, scratch: (0, 0) });
        step
    }

    /// Claim the earliest available work for a worker. The worker may begin a new batch if it fits in `admitted_bytes`, but not
    /// if `admitted_bytes` is None.
    pub fn task(&mut self, admitted_bytes: Option<u64>, memory_bytes: u64, room_bytes: u64) -> Option<Task> {
        self.unpark(memory_bytes, room_bytes);
        for (step, InProgress { slot, .. }) in &mut self.entries {
            match slot {
                Slot::Running { job, .. } => {
                    if let Some(task) = job.claim() {
                        return Some(Task::Samples(*step, job.clone(), task));
                    }
                }
                Slot::Fetched(_) => {
                    if let Slot::Fetched(started) = std::mem::replace(slot, Slot::Taken) {
                        return Some(Task::Begin(*step, Some(started)));
                    }
                }
                _ => {}
            }
        }
        admitted_bytes.is_some_and(|bytes| self.admits(bytes)).then(|| Task::Begin(self.begin(), None))
    }
}

pub fn too_large(alone: u64, bytes: u64, given: u64, memory_bytes: u64) -> Error {
    let before = if given > 0 { format!(" and the previous batch holds {given}") } else { String::new() };
    let text = format!("cannot load a batch: it needs {alone} bytes{before}, but memory_bytes is {memory_bytes}");
    Error::new("invalid-argument", text)
        .hint(format!("use a smaller batch, or memory_bytes={}", alone + bytes.max(given)))
}
