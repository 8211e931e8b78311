//! Let threads of this process that commit to one branch take turns. The thread whose turn it is takes small commits of others into its
//! record. No thread waits for more commits: those that arrive while a record is written share the next record.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use penstock_error::{Error, Result};
use penstock_format::cursor::Writer;
use penstock_format::record::{Delta, RECORD_BYTES, RECORD_DELTAS, RecordKind};
use penstock_storage::process::PerProcess;

use super::changes::{ChangeSet, Member, Proposal};
use super::conflict::{self, Verdict};
use crate::log::newest::LogKey;
use crate::snapshot::Snapshot;

/// A thread that has waited this long commits alone. The thread whose turn it is may be waiting for a store that does not respond.
const PATIENCE: Duration = Duration::from_secs(2);

/// The part of a record that other fields than those of its transactions may need, without the deltas of earlier commits.
const FIXED_BYTES: usize = 512;

/// The outcome of a turn that other threads took part in.
enum Outcome {
    Committed(Arc<Snapshot>),
    Failed(Error),
    /// Nothing was committed. Each thread must commit alone, because another member may be the reason.
    Alone,
    /// It is this thread's turn.
    Lead,
}

/// Where a waiting thread gets its outcome.
#[derive(Default)]
struct Waiter {
    outcome: Mutex<Option<Outcome>>,
    settled: Condvar,
}

impl Waiter {
    /// Wake the thread. The caller has locked the queues, so that the thread is either waiting or has not looked yet.
    fn settle(&self, outcome: Outcome) {
        *lock(&self.outcome) = Some(outcome);
        self.settled.notify_one();
    }
}

struct Waiting {
    /// None if the commit needs a record of its own.
    proposal: Option<Proposal>,
    waiter: Arc<Waiter>,
}

/// The threads that commit to one log.
#[derive(Default)]
struct CommitQueue {
    /// Whether a thread has its turn.
    led: bool,
    waiting: VecDeque<Waiting>,
}

/// The queues of this process. A log to which no thread commits has none.
static QUEUES: PerProcess<Mutex<HashMap<LogKey, CommitQueue>>> = PerProcess::new(Mutex::default);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Commit a proposal in turn. `alone` commits a proposal; it is called in this thread unless another one has taken the proposal along.
pub fn commit(
    base: &Snapshot,
    proposal: Proposal,
    mut alone: impl FnMut(Proposal) -> Result<Snapshot>,
) -> Result<Snapshot> {
    let key = base.log_key();
    match wait_for_turn(&key, &proposal) {
        Outcome::Lead => {}
        Outcome::Committed(snapshot) => return Ok(snapshot.within(snapshot.context.clone())),
        Outcome::Failed(error) => return Err(error),
        Outcome::Alone => return alone(proposal),
    }
    let mut turn = CommitTurn { key, others: Vec::new() };
    let Some(joint) = turn.take_along(&proposal) else { return alone(proposal) };
    match alone(joint) {
        Ok(snapshot) => {
            let shared = Arc::new(snapshot.within(base.context.clone()));
            turn.settle(|| Outcome::Committed(shared.clone()));
            Ok(snapshot)
        }
        Err(error) if error.code() == "commit-state-unknown" => {
            turn.settle(|| Outcome::Failed(error.clone()));
            Err(error)
        }
        Err(_) => {
            turn.settle(|| Outcome::Alone);
            alone(proposal)
        }
    }
}

/// Wait until it is this thread's turn, or another one has settled its commit.
fn wait_for_turn(key: &LogKey, proposal: &Proposal) -> Outcome {
    let mut queues = lock(QUEUES.get());
    let queue = queues.entry(key.clone()).or_default();
    if !queue.led {
        queue.led = true;
        return Outcome::Lead;
    }
    let waiter = Arc::new(Waiter::default());
    queue
        .waiting
        .push_back(Waiting { proposal: may_share(proposal).then(|| proposal.clone()), waiter: waiter.clone() });
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(outcome) = lock(&waiter.outcome).take() {
            return outcome;
        }
        let left = until.saturating_duration_since(Instant::now());
        let is_own_waiter = |waiting: &Waiting| Arc::ptr_eq(&waiting.waiter, &waiter);
        // A thread that was taken along is not in the queue, and must wait for the outcome.
        let queue = queues.get_mut(key);
        let place = queue.and_then(|queue| queue.waiting.iter().position(is_own_waiter).map(|place| (queue, place)));
        queues = match place {
            Some((queue, place)) if left.is_zero() => {
                queue.waiting.remove(place);
                return Outcome::Alone;
            }
            Some(_) => waiter.settled.wait_timeout(queues, left).unwrap_or_else(PoisonError::into_inner).0,
            None => waiter.settled.wait(queues).unwrap_or_else(PoisonError::into_inner),
        };
    }
}

/// A thread's turn. When it ends, the next thread in the queue has its turn.
struct CommitTurn {
    key: LogKey,
    /// The threads that were taken along and wait for the outcome.
    others: Vec<Arc<Waiter>>,
}

impl CommitTurn {
    /// Return the proposal with those commits of the queue that fit into its record and do not depend on the others there. Returns None if
    /// there are none.
    fn take_along(&mut self, proposal: &Proposal) -> Option<Proposal> {
        let mut queues = lock(QUEUES.get());
        let queue = queues.get_mut(&self.key).filter(|queue| may_share(proposal) && !queue.waiting.is_empty())?;
        let mut joint = proposal.clone();
        let mut room = RecordRoom::after(&joint.own)?;
        for Waiting { proposal, waiter } in std::mem::take(&mut queue.waiting) {
            match proposal {
                Some(other) if are_apart(&joint, &other) && room.take(&other.own) => {
                    joint.row_ids.extend(other.row_ids);
                    joint.columns.extend(other.columns);
                    joint.features |= other.features;
                    joint.base = joint.base.min(other.base);
                    joint.gc_epoch = joint.gc_epoch.min(other.gc_epoch);
                    joint.others.push(other.own);
                    self.others.push(waiter);
                }
                proposal => queue.waiting.push_back(Waiting { proposal, waiter }),
            }
        }
        (!self.others.is_empty()).then_some(joint)
    }

    /// Pass the outcome to the threads that were taken along.
    fn settle(&mut self, mut outcome: impl FnMut() -> Outcome) {
        let _queues = lock(QUEUES.get());
        self.others.drain(..).for_each(|other| other.settle(outcome()));
    }
}

impl Drop for CommitTurn {
    fn drop(&mut self) {
        // Threads are left here only if this one panicked, perhaps after the put.
        let unknown = || {
            Error::new(
                "commit-state-unknown",
                "cannot determine whether the commit succeeded: the thread that made it failed",
            )
        };
        self.settle(|| Outcome::Failed(unknown()));
        let mut queues = lock(QUEUES.get());
        let Some(queue) = queues.get_mut(&self.key) else { return };
        match queue.waiting.pop_front() {
            Some(next) => next.waiter.settle(Outcome::Lead),
            None => drop(queues.remove(&self.key)),
        }
    }
}

/// The room that is left in a record.
struct RecordRoom {
    bytes: usize,
    deltas: usize,
}

impl RecordRoom {
    fn after(first: &Member) -> Option<RecordRoom> {
        let mut room = RecordRoom { bytes: RECORD_BYTES - FIXED_BYTES, deltas: RECORD_DELTAS };
        room.take(first).then_some(room)
    }

    /// Use room for a transaction, if there is enough.
    fn take(&mut self, member: &Member) -> bool {
        let (bytes, deltas) = (encoded_bytes(member), member.deltas.len());
        let fits = bytes <= self.bytes && deltas <= self.deltas;
        if fits {
            (self.bytes, self.deltas) = (self.bytes - bytes, self.deltas - deltas);
        }
        fits
    }
}

/// Return whether a commit changes nothing that the members of a proposal change.
fn are_apart(joint: &Proposal, other: &Proposal) -> bool {
    let follows = |one: &Member, other: &Member| {
        conflict::judge(&one.changes, &other.changes.writes, &joint.row_ids) == Verdict::Follows
    };
    joint.members().all(|member| follows(&other.own, member) && follows(member, &other.own))
}

/// Return whether a proposal may share its record: it does not depend on what it read, and no object names its place in the log.
fn may_share(proposal: &Proposal) -> bool {
    let Proposal { kind, own, theirs, schema, .. } = proposal;
    let ChangeSet { reads, keys, staged, once, .. } = &own.changes;
    let reads_nothing = reads.is_empty() && keys.is_empty() && staged.is_empty() && once.is_none();
    let plain = theirs.parent.is_none() && theirs.state.is_none() && theirs.physical.is_none() && schema.is_none();
    let words = |delta: &Delta| matches!(delta, Delta::Words(_) | Delta::Attachment(_) | Delta::Detached(_));
    *kind == RecordKind::Data && reads_nothing && plain && !own.deltas.iter().any(words)
}

/// Return how many bytes of a record a transaction takes at most.
fn encoded_bytes(Member { transaction, deltas, changes }: &Member) -> usize {
    let mut writer = Writer::default();
    transaction.write(&mut writer);
    deltas.iter().for_each(|delta| delta.write(&mut writer));
    changes.writes.iter().for_each(|change| change.write(&mut writer));
    // Row ids, counters and the places of data files are not final yet.
    writer.0.len() + 32 * (1 + deltas.len() + changes.writes.len())
}
