//! Belady's choice over a known plan: which run to fetch, when, and what to evict for it. A pure function without I/O.
//!
//! A loader uses runs in a known order. Of the cached runs, the one whose next use is the latest gives way, which costs the fewest fetches
//! possible (Belady 1966). With shuffled epochs, the runs that are worth keeping are those that the next epoch uses first, as many as fit
//! (`look_ahead`). The room of all others is a queue: runs are fetched early into the room of those that were used the longest ago. So the
//! fetches of an epoch can begin long before they are needed, and cost no additional ones.

use std::collections::{BinaryHeap, VecDeque};

/// The next use of a run that is not used again.
pub const NEVER: u64 = u64::MAX;

/// A run to fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetch {
    pub run: u32,
    /// The step that uses the run.
    pub needed: u64,
    /// Runs to evict first.
    pub victims: Vec<u32>,
    /// The victims are not used after the steps below this number.
    pub from: u64,
    /// Whether there is room for the run. If not, its next use is later than that of all others.
    pub keep: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Residence {
    Cold,
    /// Kept for its next use.
    Kept,
    /// In the queue, at the entry with this number.
    Passing(u64),
}

#[derive(Debug, Clone, Copy)]
struct RunState {
    bytes: u64,
    residence: Residence,
    next_use: u64,
    /// One more than the step of the last use.
    free_from: u64,
    is_worth: bool,
}

/// A cache of which the future is known.
#[derive(Debug)]
pub struct Belady {
    runs: Vec<RunState>,
    capacity_bytes: u64,
    /// A part of the capacity that is never used for runs that are kept.
    reserve_bytes: u64,
    kept_bytes: u64,
    /// Kept runs by their next use. Some entries are outdated.
    by_next_use: BinaryHeap<(u64, u32)>,
    /// The first step of the next epoch. Runs that are used before are worth keeping, and of the others those with `is_worth`.
    horizon: u64,
    /// The queue of passing runs, those that were used the longest ago first. Some entries are outdated.
    passing: VecDeque<(u64, u32)>,
    passing_bytes: u64,
    entries: u64,
}

impl Belady {
    /// Begin with runs of these sizes, none of which is cached.
    pub fn new(run_bytes: impl IntoIterator<Item = u64>, capacity_bytes: u64, reserve_bytes: u64) -> Belady {
        let run =
            |bytes| RunState { bytes, residence: Residence::Cold, next_use: NEVER, free_from: 0, is_worth: false };
        Belady {
            runs: run_bytes.into_iter().map(run).collect(),
            capacity_bytes,
            reserve_bytes,
            kept_bytes: 0,
            by_next_use: BinaryHeap::new(),
            horizon: NEVER,
            passing: VecDeque::new(),
            passing_bytes: 0,
            entries: 0,
        }
    }

    /// Choose what is worth keeping for the epoch that begins with step `begin`, from the first uses in it: as many runs as fit.
    pub fn look_ahead(&mut self, begin: u64, first_uses: &[u64]) {
        let mut uses: Vec<(u64, u32)> = (0u32..).zip(first_uses).map(|(run, first_use)| (*first_use, run)).collect();
        uses.retain(|(first_use, run)| *first_use != NEVER && self.runs[*run as usize].bytes > 0);
        uses.sort_unstable();
        self.runs.iter_mut().for_each(|run| run.is_worth = false);
        let mut room = self.capacity_bytes - self.reserve_bytes;
        self.horizon = NEVER;
        for (_, run) in uses {
            let found = &mut self.runs[run as usize];
            let Some(rest) = room.checked_sub(found.bytes) else {
                self.horizon = begin;
                break;
            };
            (found.is_worth, room) = (true, rest);
        }
    }

    /// Note that a run is cached already, and when it is used next. Returns false if it does not fit any more.
    pub fn has(&mut self, run: u32, next_use: u64) -> bool {
        let bytes = self.runs[run as usize].bytes;
        if self.free_bytes() < bytes {
            return false;
        }
        if self.is_worth(run, next_use) && self.kept_bytes + bytes <= self.capacity_bytes - self.reserve_bytes {
            self.keep(run, next_use);
        } else {
            self.pass(run);
        }
        true
    }

    /// Return whether a run is cached.
    pub fn holds(&self, run: u32) -> bool {
        self.runs[run as usize].residence != Residence::Cold
    }

    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    fn free_bytes(&self) -> u64 {
        self.capacity_bytes.saturating_sub(self.kept_bytes + self.passing_bytes)
    }

    /// Return whether a run is worth keeping for its next use.
    pub fn is_worth(&self, run: u32, next_use: u64) -> bool {
        next_use < self.horizon || self.horizon == NEVER || self.runs[run as usize].is_worth
    }

    /// Remove a run from where it is, without its outdated entry.
    fn leave(&mut self, run: u32) {
        let found = &mut self.runs[run as usize];
        match std::mem::replace(&mut found.residence, Residence::Cold) {
            Residence::Cold => {}
            Residence::Kept => self.kept_bytes -= found.bytes,
            Residence::Passing(_) => self.passing_bytes -= found.bytes,
        }
    }

    fn keep(&mut self, run: u32, next_use: u64) {
        self.leave(run);
        let found = &mut self.runs[run as usize];
        (found.residence, found.next_use) = (Residence::Kept, next_use);
        self.kept_bytes += found.bytes;
        self.by_next_use.push((next_use, run));
        if self.by_next_use.len() > 64 + 4 * self.runs.len() {
            self.by_next_use.retain(|(next_use, run)| {
                let run = &self.runs[*run as usize];
                run.residence == Residence::Kept && run.next_use == *next_use
            });
        }
    }

    /// Put a run at the end of the queue.
    fn pass(&mut self, run: u32) {
        self.leave(run);
        self.entries += 1;
        let found = &mut self.runs[run as usize];
        found.residence = Residence::Passing(self.entries);
        self.passing_bytes += found.bytes;
        self.passing.push_back((self.entries, run));
    }

    /// Use a run at a step, and return the fetch that this costs, or None if the run is cached. Steps never decrease.
    pub fn access(&mut self, run: u32, step: u64, next_use: u64) -> Option<Fetch> {
        let RunState { bytes, residence, .. } = self.runs[run as usize];
        let mut fetch = Fetch { run, needed: step, victims: Vec::new(), from: 0, keep: true };
        let is_kept =
            self.is_worth(run, next_use) && (residence == Residence::Kept || self.displace(run, step, next_use));
        if residence == Residence::Cold {
            fetch.keep = self.make_room(bytes, &mut fetch);
            if !fetch.keep {
                return Some(fetch);
            }
        }
        if is_kept {
            self.keep(run, next_use);
        } else {
            self.pass(run);
        }
        self.runs[run as usize].free_from = step + 1;
        (residence == Residence::Cold).then_some(fetch)
    }

    /// Move kept runs that are used later than `run` to the queue, until `run` can be kept. Returns false if it is not worth that.
    fn displace(&mut self, run: u32, step: u64, next_use: u64) -> bool {
        let bytes = self.runs[run as usize].bytes;
        let mut room = (self.capacity_bytes - self.reserve_bytes).saturating_sub(self.kept_bytes);
        let mut victims = Vec::new();
        while room < bytes {
            let Some((latest, victim)) = self.by_next_use.pop() else { break };
            let found = &self.runs[victim as usize];
            if found.residence != Residence::Kept
                || found.next_use != latest
                || victims.iter().any(|(_, other)| *other == victim)
            {
                continue;
            }
            victims.push((latest, victim));
            // A victim of this very step is still needed by it.
            if latest <= next_use || found.free_from > step {
                break;
            }
            room += found.bytes;
        }
        if room < bytes {
            self.by_next_use.extend(victims);
            return false;
        }
        for (_, victim) in victims {
            self.pass(victim);
            // It was used before those that were in the queue.
            if let Some(last) = self.passing.pop_back() {
                self.passing.push_front(last);
            }
        }
        true
    }

    /// Evict the first runs of the queue until there is room. Returns false, and evicts nothing, if too few were used before this step.
    fn make_room(&mut self, bytes: u64, fetch: &mut Fetch) -> bool {
        let (mut room, mut count) = (self.free_bytes(), 0);
        for (entry, run) in &self.passing {
            let found = &self.runs[*run as usize];
            let is_true = found.residence == Residence::Passing(*entry);
            if room >= bytes || is_true && found.free_from > fetch.needed {
                break;
            }
            count += 1;
            room += if is_true { found.bytes } else { 0 };
        }
        if room < bytes {
            return false;
        }
        for (entry, run) in self.passing.drain(..count) {
            let found = &mut self.runs[run as usize];
            if found.residence == Residence::Passing(entry) {
                found.residence = Residence::Cold;
                self.passing_bytes -= found.bytes;
                fetch.from = fetch.from.max(found.free_from);
                fetch.victims.push(run);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::place::mix;

    /// Return the fewest fetches of any strategy that may also keep nothing, by trying all of them.
    fn fewest(uses: &[u32], cached: u32, capacity: u32) -> u32 {
        let Some((first, rest)) = uses.split_first() else { return 0 };
        let bit = 1 << first;
        if cached & bit != 0 {
            return fewest(rest, cached, capacity);
        }
        let keep = cached | bit;
        let mut best = fewest(rest, cached, capacity); // Use it without keeping it.
        if keep.count_ones() <= capacity {
            best = best.min(fewest(rest, keep, capacity));
        } else {
            for victim in (0..8).map(|run| 1 << run).filter(|victim| cached & victim != 0) {
                best = best.min(fewest(rest, keep & !victim, capacity));
            }
        }
        1 + best
    }

    fn simulate(uses: &[u32], capacity: u64) -> Vec<Fetch> {
        let mut belady = Belady::new([1; 8], capacity, 0);
        let next = |step: usize| {
            uses[step + 1..].iter().position(|run| *run == uses[step]).map_or(NEVER, |ahead| (step + 1 + ahead) as u64)
        };
        (0..uses.len()).filter_map(|step| belady.access(uses[step], step as u64, next(step))).collect()
    }

    #[test]
    fn no_strategy_fetches_less() {
        for round in 0..300 {
            let uses: Vec<u32> = (0..11).map(|use_| (mix(round << 8 | use_) % 5) as u32).collect();
            for capacity in 1..=4 {
                let fetches = simulate(&uses, capacity);
                assert_eq!(fetches.len() as u32, fewest(&uses, 0, capacity as u32), "{uses:?} in {capacity}");
            }
        }
    }

    #[test]
    fn fetches_can_begin_when_they_say() {
        // Execute each fetch as early as it says, before the uses of its step: nothing that is still needed may have gone.
        let epochs = shuffled(8, 4);
        for capacity in 1..=8 {
            let fetches = simulate(&epochs, capacity);
            let mut cached = 0u32;
            let mut waiting = fetches.iter().filter(|fetch| fetch.keep).peekable();
            let mut missed = 0;
            for (step, run) in epochs.iter().enumerate() {
                while let Some(fetch) = waiting.next_if(|fetch| fetch.from <= step as u64) {
                    fetch.victims.iter().for_each(|victim| cached &= !(1 << victim));
                    cached |= 1 << fetch.run;
                    assert!(cached.count_ones() as u64 <= capacity);
                    assert!(fetch.needed >= step as u64, "a fetch comes too late");
                }
                missed += u64::from(cached & 1 << run == 0);
            }
            assert_eq!(missed, fetches.iter().filter(|fetch| !fetch.keep).count() as u64);
        }
    }

    /// Return shuffled epochs of `count` runs.
    fn shuffled(count: u32, epochs: u64) -> Vec<u32> {
        let epoch = |epoch: u64| {
            let mut runs: Vec<u32> = (0..count).collect();
            runs.sort_by_key(|run| mix(epoch << 32 | u64::from(*run)));
            runs
        };
        (0..epochs).flat_map(epoch).collect()
    }

    #[test]
    fn fetches_of_shuffled_epochs_begin_early_and_are_as_few() {
        let (count, each, capacity, reserve) = (1000, 10, 200, 10);
        let uses = shuffled(count, 6);
        let mut belady = Belady::new(vec![1; count as usize], capacity, reserve);
        let (mut hits, mut early, mut fetches, mut cold) = (0, 0, 0, 0);
        for epoch in 0..5 {
            let step_of = |at: usize| at as u64 / each;
            let mut next = vec![NEVER; count as usize];
            for (at, run) in uses.iter().enumerate().skip((epoch + 1) * count as usize).take(count as usize) {
                next[*run as usize] = step_of(at);
            }
            belady.look_ahead((epoch as u64 + 1) * u64::from(count) / each, &next);
            for at in epoch * count as usize..(epoch + 1) * count as usize {
                let (run, step) = (uses[at], step_of(at));
                match belady.access(run, step, next[run as usize]) {
                    None => hits += u32::from(epoch > 0),
                    Some(fetch) if fetch.keep => {
                        fetches += u32::from(epoch > 0);
                        early += u32::from(epoch > 0) * u32::from(fetch.needed - fetch.from >= 5);
                    }
                    Some(_) => cold += 1,
                }
            }
        }
        // What a cache without the reserve finds: a fifth of each epoch. A reserve of a hundredth costs that much.
        assert!((hits as f64 / 4000.0 - 0.19).abs() < 0.005, "{hits} hits");
        assert_eq!((hits + fetches, cold), (4000, 0));
        assert!(early as f64 > 0.7 * fetches as f64, "{early} of {fetches} can begin five steps early");
    }

    #[test]
    fn a_cache_that_holds_everything_fetches_each_run_once() {
        let mut belady = Belady::new([10, 20, 30], 60, 0);
        assert!(belady.has(1, 5));
        let fetches: Vec<Option<u32>> = (0..9)
            .map(|step| belady.access(step % 3, u64::from(step), u64::from(step) + 3).map(|fetch| fetch.run))
            .collect();
        assert_eq!(fetches, [Some(0), None, Some(2), None, None, None, None, None, None]);
        assert_eq!(belady.free_bytes(), 0);
    }

    #[test]
    fn runs_larger_than_the_cache_are_not_kept() {
        let (mut belady, mut kept) = (Belady::new([10, 5], 5, 0), Vec::new());
        for step in 0..6 {
            let fetch = belady.access(step % 2, u64::from(step), u64::from(step) + 2);
            kept.push(fetch.map(|fetch| fetch.keep));
        }
        assert_eq!(kept, [Some(false), Some(true), Some(false), None, Some(false), None]);
    }
}
