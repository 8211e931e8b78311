//! Blocks of object stores that a loader keeps in its own memory, because it knows its order: what fits is fetched once, and of what does not
//! fit, those blocks stay that are used next. `foresight` decides; threads of this file fetch.
//!
//! The memory is private to the process and a part of the loader's budget. A read that finds no block here fetches it on its own.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use bytes::Bytes;
use penstock_cache::{Cached, Member, Pace};
use penstock_dataset::{BlockAt, Held, block_cache_bytes, fetch_blocks, file_cache_bytes, generation};
use penstock_error::{Error, Result};
use penstock_storage::{Access, process};

use crate::engine::foresight::{Dispatch, Ended, Fetches, Group, Layout, foresee, plan};
use crate::engine::recipe::Recipe;

/// Fetches that run at the same time.
const FETCHES: usize = 8;
/// The plan waits while more bytes than this are being fetched.
const OPEN_BYTES: u64 = 32 << 20;
/// Batches have at least this part of the budget, or room for so many of them.
const BATCHES_PART: u64 = 4;
const BATCHES: u64 = 4;
/// With less memory, a plan gains nothing.
const LEAST_BYTES: u64 = 4 << 20;
/// What a plan needs to know of a sample, in bytes, and the part of the budget that this may take.
const SAMPLE_BYTES: u64 = 160;
const KNOWN_PART: u64 = 8;

/// Return the memory that a loader may use to keep blocks, if its batches have about `batch_bytes`.
fn room_bytes(recipe: &Recipe, memory_bytes: u64, batch_bytes: u64) -> u64 {
    let beside = (memory_bytes / BATCHES_PART).max(BATCHES * batch_bytes);
    memory_bytes.saturating_sub(beside + recipe.window_bytes)
}

/// Return which sources are worth a plan: those of object stores whose blocks the cache of blocks cannot all keep.
fn planned(recipe: &Recipe, memory_bytes: u64) -> Result<Vec<bool>> {
    let room = room_bytes(recipe, memory_bytes, batch_bytes(recipe));
    let samples: u64 = recipe.sources.iter().map(|source| source.len()).sum();
    let is_known = samples * SAMPLE_BYTES <= memory_bytes / KNOWN_PART && recipe.cut.steps() > 0 && room >= LEAST_BYTES;
    let mut planned = Vec::new();
    for (number, source) in recipe.sources.iter().enumerate() {
        let (snapshot, storage) = (&source.snapshot, source.snapshot.context.storage.as_ref());
        let columns: Vec<u64> = recipe.specs[number].iter().filter(|spec| source.files_of(spec).is_none()).map(|spec| spec.id).collect();
        let may = is_known && recipe.windows[number].is_none() && storage.fills_slots() && !snapshot.is_mapped_now(&columns)?;
        if !may {
            planned.push(false);
            continue;
        }
        let sizes = snapshot.column_bytes(&columns)?;
        let (tails, _) = snapshot.kept_bytes(&columns)?;
        let is_worth = match Cached::of(storage) {
            // The cache has a plan of its own, unless it is smaller than what fits here.
            Some(cached) => cached.room_bytes() < sizes.stored && sizes.decoded <= room,
            None => storage.access_of_all() == Some(Access::Ranged) && sizes.spanned > block_cache_bytes() / 2,
        };
        planned.push(is_worth && tails <= file_cache_bytes());
    }
    Ok(planned)
}

fn batch_bytes(recipe: &Recipe) -> u64 {
    recipe.least_bytes().max(recipe.fetched_bytes)
}

/// What a loader would keep and fetch.
pub struct Outlook {
    /// Whether each source is planned.
    pub planned: Vec<bool>,
    pub bytes: u64,
    pub room_bytes: u64,
    /// The fetches of this epoch and of the next one.
    pub fetches: [Fetches; 2],
}

/// Return what a loader with this budget would fetch from step `begin` on, or None if it keeps nothing. Cost: reads the tails of all data
/// files, and computes the order of three epochs.
pub fn outlook(recipe: &Arc<Recipe>, memory_bytes: u64, begin: u64) -> Result<Option<Outlook>> {
    let planned = planned(recipe, memory_bytes)?;
    if !planned.contains(&true) {
        return Ok(None);
    }
    let layout = Layout::new(recipe, &planned, (begin, 1))?;
    let room_bytes = room_bytes(recipe, memory_bytes, batch_bytes(recipe));
    Ok(Some(Outlook { bytes: layout.bytes(), room_bytes, fetches: foresee(&layout, begin, room_bytes), planned }))
}

#[derive(Default)]
struct State {
    layout: Option<Arc<Layout>>,
    blocks: HashMap<u32, Bytes>,
    bytes: u64,
    /// The bytes that may be used. A plan begins anew when there are fewer.
    room_bytes: u64,
    /// Counts how often the room has shrunk. Blocks that were fetched for an earlier plan are dropped.
    round: u64,
}

impl State {
    fn insert(&mut self, block: u32, bytes: Bytes) {
        self.bytes += bytes.len() as u64;
        if let Some(before) = self.blocks.insert(block, bytes) {
            self.bytes -= before.len() as u64;
        }
    }

    fn remove(&mut self, block: u32) {
        self.bytes -= self.blocks.remove(&block).map_or(0, |bytes| bytes.len() as u64);
    }

    fn clear(&mut self) {
        (self.blocks, self.bytes) = (HashMap::new(), 0);
    }
}

struct Shared {
    recipe: Arc<Recipe>,
    planned: Vec<bool>,
    member: Member,
    pace: Pace,
    state: Mutex<State>,
    /// Bytes that batches must leave to the plan.
    reserved_bytes: AtomicU64,
}

/// The blocks that a loader keeps, and the plan that fetches them. The plan ends when this is dropped.
pub struct Kept {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    generation: u64,
}

impl Kept {
    /// Return which sources would be planned, and None if there are none.
    pub fn sources(recipe: &Recipe, memory_bytes: u64) -> Result<Option<Vec<bool>>> {
        let planned = planned(recipe, memory_bytes)?;
        Ok(planned.contains(&true).then_some(planned))
    }

    /// Start to plan, and to fetch for every `stride`-th step of `begin..end`.
    pub fn start(recipe: &Arc<Recipe>, planned: Vec<bool>, memory_bytes: u64, (begin, end, stride): (u64, u64, u64)) -> Result<Kept> {
        let member = Member { rank: recipe.cut.rank, begin, stride };
        let room_bytes = room_bytes(recipe, memory_bytes, batch_bytes(recipe));
        let pace = Pace::new(member, end);
        // The loader waits from the first step on, so that nothing is fetched twice.
        pace.set_ready(begin);
        let state = Mutex::new(State { room_bytes, ..State::default() });
        let shared = Arc::new(Shared { recipe: recipe.clone(), planned, member, pace, state, reserved_bytes: AtomicU64::new(room_bytes) });
        let own = shared.clone();
        let run = move || {
            process::heed(own.pace.stop.clone());
            // Without a plan, the loader reads on its own, and reports what fails.
            if !matches!(catch_unwind(AssertUnwindSafe(|| own.run())), Ok(Ok(()))) {
                own.give_up();
            }
            own.pace.end();
        };
        let thread = std::thread::Builder::new().name("penstock-plan".into()).spawn(run);
        let thread = thread.map_err(|error| Error::new("storage-failed", format!("cannot start a thread: {error}")))?;
        Ok(Kept { shared, thread: Mutex::new(Some(thread)), generation: generation() })
    }

    /// Return the plan's source flags.
    pub fn planned(&self) -> &[bool] {
        &self.shared.planned
    }

    /// Move the end to an earlier or later step.
    pub fn set_end(&self, end: u64) {
        self.shared.pace.set_until(end);
    }

    /// Wait until the blocks of a step are here, as far as the plan keeps them.
    pub fn before(&self, step: u64) {
        self.shared.pace.before(step);
    }

    /// Note that a step has been read, so that its blocks may give way.
    pub fn after(&self, step: u64) {
        self.shared.pace.after(step);
    }

    /// Return the blocks of samples that are here.
    pub fn lend(&self, source: usize, positions: &[u64]) -> Option<Held> {
        let state = self.shared.lock();
        let layout = state.layout.as_ref().filter(|_| !state.blocks.is_empty())?;
        let blocks = layout.of(positions.iter().map(|position| (source, *position))).into_iter();
        Some(Held::of(blocks.filter_map(|block| Some((&layout.blocks[block as usize], state.blocks.get(&block)?.clone())))))
    }

    /// Return the bytes that batches must leave to the plan.
    pub fn reserved_bytes(&self) -> u64 {
        self.shared.reserved_bytes.load(Relaxed)
    }

    /// Return the bytes of all blocks that are here.
    pub fn bytes(&self) -> u64 {
        self.shared.lock().bytes
    }

    /// Leave room for two batches of a size that was unknown before.
    pub fn leave(&self, batch_bytes: u64, memory_bytes: u64) {
        let most = memory_bytes.saturating_sub(2 * batch_bytes + self.shared.recipe.window_bytes);
        if self.reserved_bytes() > most {
            self.shared.shrink(most);
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        if self.generation != generation() {
            return; // A forked process lacks its parent's thread, which may have held the lock.
        }
        self.shared.pace.stop();
        if let Some(thread) = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = thread.join(); // A panic was caught.
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn give_up(&self) {
        let mut state = self.lock();
        state.round += 1;
        state.clear();
        self.reserved_bytes.store(0, Relaxed);
    }

    fn shrink(&self, room_bytes: u64) {
        let mut state = self.lock();
        state.round += 1;
        // Blocks share memory, so all of them go.
        state.clear();
        state.room_bytes = room_bytes;
        self.reserved_bytes.store(if room_bytes < LEAST_BYTES { 0 } else { room_bytes }, Relaxed);
    }

    /// Plan and fetch until the loader ends, or until everything is here.
    fn run(&self) -> Result<()> {
        let layout = Arc::new(Layout::new(&self.recipe, &self.planned, (self.member.begin, self.member.stride))?);
        self.lock().layout = Some(layout.clone());
        loop {
            let (round, room_bytes) = {
                let state = self.lock();
                (state.round, state.room_bytes)
            };
            if room_bytes < LEAST_BYTES {
                return Ok(());
            }
            let fits = layout.bytes() <= room_bytes;
            if fits {
                self.reserved_bytes.fetch_min(layout.bytes(), Relaxed);
            }
            let line = Line::default();
            let ended = std::thread::scope(|scope| {
                for _ in 0..FETCHES {
                    scope.spawn(|| {
                        process::heed(self.pace.stop.clone());
                        line.work(&self.pace, |blocks| self.fetch(&layout, blocks, fits, round));
                    });
                }
                let _closes = Closes(&line);
                let mut running = Running { shared: self, line: &line, round };
                let planned = plan(&layout, self.pace.read(), room_bytes, &mut running);
                // Everything will be here.
                planned.and_then(|()| running.wait(|| line.is_done()))
            });
            if ended != Err(Ended::Shrunk) {
                return Ok(());
            }
        }
    }

    /// Fetch blocks and keep them. What fails is left to the loader, which reports why.
    fn fetch(&self, layout: &Layout, blocks: &[u32], together: bool, round: u64) {
        for (source, part) in layout.by_source(blocks) {
            let wanted: Vec<BlockAt> = part.iter().map(|block| layout.blocks[*block as usize].clone()).collect();
            let fetched = fetch_blocks(&self.recipe.sources[source].snapshot, &wanted, together);
            let mut state = self.lock();
            if state.round == round {
                part.into_iter().zip(fetched).for_each(|(block, bytes)| bytes.into_iter().for_each(|bytes| state.insert(block, bytes)));
            }
        }
    }
}

/// A plan that is carried out.
struct Running<'a> {
    shared: &'a Shared,
    line: &'a Line,
    round: u64,
}

impl Running<'_> {
    fn wait(&self, is_over: impl Fn() -> bool) -> std::result::Result<(), Ended> {
        loop {
            if self.shared.pace.is_stopped() {
                return Err(Ended::Stopped);
            }
            if self.shared.lock().round != self.round {
                return Err(Ended::Shrunk);
            }
            if is_over() {
                return Ok(());
            }
            self.shared.pace.pause(false);
        }
    }
}

impl Dispatch for Running<'_> {
    fn put(&mut self, group: Group, ready: u64) -> std::result::Result<(), Ended> {
        let Group { blocks, bytes, victims, from } = group;
        self.wait(|| self.shared.pace.read() >= from && self.line.open_bytes() <= OPEN_BYTES)?;
        {
            let mut state = self.shared.lock();
            if state.round == self.round {
                victims.into_iter().for_each(|victim| state.remove(victim));
            }
        }
        self.line.put(blocks, bytes, ready, &self.shared.pace);
        Ok(())
    }

    fn is_wanted(&self, step: u64) -> bool {
        step < self.shared.pace.until()
    }

    fn wait_until_wanted(&mut self, step: u64) -> std::result::Result<(), Ended> {
        self.wait(|| self.is_wanted(step))
    }
}

/// Groups that are fetched at the same time, and become ready in their order.
#[derive(Default)]
struct Line {
    state: Mutex<Groups>,
    changed: Condvar,
}

#[derive(Default)]
struct Groups {
    /// The groups from number `first` on, of which the first is not done.
    groups: VecDeque<Waiting>,
    first: usize,
    closed: bool,
}

struct Waiting {
    /// None once a thread has begun to fetch them.
    blocks: Option<Vec<u32>>,
    is_done: bool,
    bytes: u64,
    ready: u64,
}

impl Groups {
    /// Announce what is ready, if the first groups are done.
    fn announce(&mut self, pace: &Pace) {
        let mut ready = None;
        while let Some(Waiting { is_done: true, ready: after, .. }) = self.groups.front() {
            ready = Some(*after);
            self.groups.pop_front();
            self.first += 1;
        }
        ready.into_iter().for_each(|ready| pace.set_ready(ready));
    }
}

/// Closes a line when it is dropped, so that its threads end.
struct Closes<'a>(&'a Line);

impl Drop for Closes<'_> {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.changed.notify_all();
    }
}

impl Line {
    fn lock(&self) -> MutexGuard<'_, Groups> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put(&self, blocks: Vec<u32>, bytes: u64, ready: u64, pace: &Pace) {
        let mut state = self.lock();
        let is_done = blocks.is_empty();
        state.groups.push_back(Waiting { blocks: Some(blocks).filter(|_| !is_done), is_done, bytes, ready });
        state.announce(pace);
        self.changed.notify_one();
    }

    fn open_bytes(&self) -> u64 {
        self.lock().groups.iter().filter(|group| !group.is_done).map(|group| group.bytes).sum()
    }

    fn is_done(&self) -> bool {
        self.lock().groups.is_empty()
    }

    /// Fetch groups until the line is closed.
    fn work(&self, pace: &Pace, fetch: impl Fn(&[u32])) {
        let mut state = self.lock();
        while !state.closed {
            let next = state.groups.iter_mut().enumerate().find_map(|(at, group)| Some((at, group.blocks.take()?)));
            let Some((at, blocks)) = next else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let number = state.first + at;
            drop(state);
            // A group whose fetch fails is done, too: the loader reads on its own what is missing.
            let _ = catch_unwind(AssertUnwindSafe(|| fetch(&blocks)));
            state = self.lock();
            let at = number - state.first;
            if let Some(group) = state.groups.get_mut(at) {
                group.is_done = true;
            }
            state.announce(pace);
            drop(state);
            pace.wake();
            state = self.lock();
        }
    }
}
