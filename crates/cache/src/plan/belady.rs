//! Belady's choice over a known plan: which unit to fetch, when, and what to evict for it. A pure function without I/O.
//!
//! A loader uses units in a known order. Of the cached units, the one whose next use is the latest gives way, which costs the fewest fetches
//! possible (Belady 1966). With shuffled epochs, the units that are worth keeping are those that the next epoch uses first, as many as fit
//! (`look_ahead`). The room of all others is a queue: units are fetched early into the room of those that were used the longest ago. So the
//! fetches of an epoch can begin long before they are needed, and cost no additional ones.

use std::collections::{BinaryHeap, VecDeque};

/// The next use of a unit that is not used again.
pub const NEVER: u64 = u64::MAX;

/// A unit to fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetch {
    pub unit: u32,
    /// The step that uses the unit.
    pub needed: u64,
    /// Units to evict first.
    pub victims: Vec<u32>,
    /// The victims are not used after the steps below this number.
    pub from: u64,
    /// Whether there is room for the unit. If not, its next use is later than that of all others.
    pub keep: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Cold,
    /// Kept for its next use.
    Kept,
    /// In the queue, at the entry with this number.
    Passing(u64),
}

#[derive(Debug, Clone, Copy)]
struct Unit {
    bytes: u64,
    place: Place,
    next_use: u64,
    /// One more than the step of the last use.
    free_from: u64,
    is_worth: bool,
}

/// A cache of which the future is known.
#[derive(Debug)]
pub struct Belady {
    units: Vec<Unit>,
    capacity_bytes: u64,
    /// A part of the capacity that is never used for units that are kept.
    reserve_bytes: u64,
    kept_bytes: u64,
    /// Kept units by their next use. Some entries are outdated.
    by_next_use: BinaryHeap<(u64, u32)>,
    /// The first step of the next epoch. Units that are used before are worth keeping, and of the others those with `is_worth`.
    horizon: u64,
    /// The queue of passing units, those that were used the longest ago first. Some entries are outdated.
    passing: VecDeque<(u64, u32)>,
    passing_bytes: u64,
    entries: u64,
}

impl Belady {
    /// Begin with units of these sizes, none of which is cached.
    pub fn new(unit_bytes: impl IntoIterator<Item = u64>, capacity_bytes: u64, reserve_bytes: u64) -> Belady {
        let unit = |bytes| Unit { bytes, place: Place::Cold, next_use: NEVER, free_from: 0, is_worth: false };
        Belady {
            units: unit_bytes.into_iter().map(unit).collect(),
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

    /// Choose what is worth keeping for the epoch that begins with step `begin`, from the first uses in it: as many units as fit.
    pub fn look_ahead(&mut self, begin: u64, first_uses: &[u64]) {
        let mut uses: Vec<(u64, u32)> = (0u32..).zip(first_uses).map(|(unit, first_use)| (*first_use, unit)).collect();
        uses.retain(|(first_use, unit)| *first_use != NEVER && self.units[*unit as usize].bytes > 0);
        uses.sort_unstable();
        self.units.iter_mut().for_each(|unit| unit.is_worth = false);
        let mut room = self.capacity_bytes - self.reserve_bytes;
        self.horizon = NEVER;
        for (_, unit) in uses {
            let found = &mut self.units[unit as usize];
            let Some(rest) = room.checked_sub(found.bytes) else {
                self.horizon = begin;
                break;
            };
            (found.is_worth, room) = (true, rest);
        }
    }

    /// Note that a unit is cached already, and when it is used next. Returns false if it does not fit any more.
    pub fn has(&mut self, unit: u32, next_use: u64) -> bool {
        let bytes = self.units[unit as usize].bytes;
        if self.free_bytes() < bytes {
            return false;
        }
        if self.is_worth(unit, next_use) && self.kept_bytes + bytes <= self.capacity_bytes - self.reserve_bytes {
            self.keep(unit, next_use);
        } else {
            self.pass(unit);
        }
        true
    }

    /// Return whether a unit is cached.
    pub fn holds(&self, unit: u32) -> bool {
        self.units[unit as usize].place != Place::Cold
    }

    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    fn free_bytes(&self) -> u64 {
        self.capacity_bytes.saturating_sub(self.kept_bytes + self.passing_bytes)
    }

    /// Return whether a unit is worth keeping for its next use.
    pub fn is_worth(&self, unit: u32, next_use: u64) -> bool {
        next_use < self.horizon || self.horizon == NEVER || self.units[unit as usize].is_worth
    }

    /// Remove a unit from where it is, without its outdated entry.
    fn leave(&mut self, unit: u32) {
        let found = &mut self.units[unit as usize];
        match std::mem::replace(&mut found.place, Place::Cold) {
            Place::Cold => {}
            Place::Kept => self.kept_bytes -= found.bytes,
            Place::Passing(_) => self.passing_bytes -= found.bytes,
        }
    }

    fn keep(&mut self, unit: u32, next_use: u64) {
        self.leave(unit);
        let found = &mut self.units[unit as usize];
        (found.place, found.next_use) = (Place::Kept, next_use);
        self.kept_bytes += found.bytes;
        self.by_next_use.push((next_use, unit));
        if self.by_next_use.len() > 64 + 4 * self.units.len() {
            let is_true = |(next_use, unit): &(u64, u32)| {
                let unit = &self.units[*unit as usize];
                unit.place == Place::Kept && unit.next_use == *next_use
            };
            self.by_next_use.retain(is_true);
        }
    }

    /// Put a unit at the end of the queue.
    fn pass(&mut self, unit: u32) {
        self.leave(unit);
        self.entries += 1;
        let found = &mut self.units[unit as usize];
        found.place = Place::Passing(self.entries);
        self.passing_bytes += found.bytes;
        self.passing.push_back((self.entries, unit));
    }

    /// Use a unit at a step, and return the fetch that this costs, or None if the unit is cached. Steps never decrease.
    pub fn access(&mut self, unit: u32, step: u64, next_use: u64) -> Option<Fetch> {
        let Unit { bytes, place, .. } = self.units[unit as usize];
        let mut fetch = Fetch { unit, needed: step, victims: Vec::new(), from: 0, keep: true };
        let is_kept = self.is_worth(unit, next_use) && (place == Place::Kept || self.displace(unit, step, next_use));
        if place == Place::Cold {
            fetch.keep = self.make_room(bytes, &mut fetch);
            if !fetch.keep {
                return Some(fetch);
            }
        }
        if is_kept {
            self.keep(unit, next_use);
        } else {
            self.pass(unit);
        }
        self.units[unit as usize].free_from = step + 1;
        (place == Place::Cold).then_some(fetch)
    }

    /// Move kept units that are used later than `unit` to the queue, until `unit` can be kept. Returns false if it is not worth that.
    fn displace(&mut self, unit: u32, step: u64, next_use: u64) -> bool {
        let bytes = self.units[unit as usize].bytes;
        let mut room = (self.capacity_bytes - self.reserve_bytes).saturating_sub(self.kept_bytes);
        let mut victims = Vec::new();
        while room < bytes {
            let Some((latest, victim)) = self.by_next_use.pop() else { break };
            let found = &self.units[victim as usize];
            if found.place != Place::Kept || found.next_use != latest || victims.iter().any(|(_, other)| *other == victim) {
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

    /// Evict the first units of the queue until there is room. Returns false, and evicts nothing, if too few were used before this step.
    fn make_room(&mut self, bytes: u64, fetch: &mut Fetch) -> bool {
        let (mut room, mut count) = (self.free_bytes(), 0);
        for (entry, unit) in &self.passing {
            let found = &self.units[*unit as usize];
            let is_true = found.place == Place::Passing(*entry);
            if room >= bytes || is_true && found.free_from > fetch.needed {
                break;
            }
            count += 1;
            room += if is_true { found.bytes } else { 0 };
        }
        if room < bytes {
            return false;
        }
        for (entry, unit) in self.passing.drain(..count) {
            let found = &mut self.units[unit as usize];
            if found.place == Place::Passing(entry) {
                found.place = Place::Cold;
                self.passing_bytes -= found.bytes;
                fetch.from = fetch.from.max(found.free_from);
                fetch.victims.push(unit);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
            for victim in (0..8).map(|unit| 1 << unit).filter(|victim| cached & victim != 0) {
                best = best.min(fewest(rest, keep & !victim, capacity));
            }
        }
        1 + best
    }

    fn simulate(uses: &[u32], capacity: u64) -> Vec<Fetch> {
        let mut belady = Belady::new([1; 8], capacity, 0);
        let next =
            |step: usize| uses[step + 1..].iter().position(|unit| *unit == uses[step]).map_or(NEVER, |ahead| (step + 1 + ahead) as u64);
        (0..uses.len()).filter_map(|step| belady.access(uses[step], step as u64, next(step))).collect()
    }

    #[test]
    fn no_strategy_fetches_less() {
        let mut random = 1u64;
        for _ in 0..300 {
            let uses: Vec<u32> = (0..11)
                .map(|_| {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                    (random >> 40) as u32 % 5
                })
                .collect();
            for capacity in 1..=4 {
                let fetches = simulate(&uses, capacity);
                assert_eq!(fetches.len() as u32, fewest(&uses, 0, capacity as u32), "{uses:?} in {capacity}");
            }
        }
    }

    #[test]
    fn fetches_can_begin_when_they_say() {
        // Execute each fetch as early as it says, before the uses of its step: nothing that is still needed may have gone.
        let mut random = 9u64;
        let mut epochs: Vec<u32> = Vec::new();
        for _ in 0..4 {
            let mut epoch: Vec<u32> = (0..8).collect();
            for at in (1..8).rev() {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                epoch.swap(at, (random >> 40) as usize % (at + 1));
            }
            epochs.extend(epoch);
        }
        for capacity in 1..=8 {
            let fetches = simulate(&epochs, capacity);
            let mut cached = 0u32;
            let mut waiting = fetches.iter().filter(|fetch| fetch.keep).peekable();
            let mut missed = 0;
            for (step, unit) in epochs.iter().enumerate() {
                while let Some(fetch) = waiting.next_if(|fetch| fetch.from <= step as u64) {
                    fetch.victims.iter().for_each(|victim| cached &= !(1 << victim));
                    cached |= 1 << fetch.unit;
                    assert!(cached.count_ones() as u64 <= capacity);
                    assert!(fetch.needed >= step as u64, "a fetch comes too late");
                }
                missed += u64::from(cached & 1 << unit == 0);
            }
            assert_eq!(missed, fetches.iter().filter(|fetch| !fetch.keep).count() as u64);
        }
    }

    /// Return shuffled epochs of `count` units.
    fn epochs(count: u32, epochs: u32) -> Vec<u32> {
        let mut random = 5u64;
        let mut epoch = || {
            let mut epoch: Vec<u32> = (0..count).collect();
            for at in (1..count as usize).rev() {
                random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                epoch.swap(at, (random >> 33) as usize % (at + 1));
            }
            epoch
        };
        (0..epochs).flat_map(|_| epoch()).collect()
    }

    #[test]
    fn fetches_of_shuffled_epochs_begin_early_and_are_as_few() {
        let (count, each, capacity, reserve) = (1000, 10, 200, 10);
        let uses = epochs(count, 6);
        let mut belady = Belady::new(vec![1; count as usize], capacity, reserve);
        let (mut hits, mut early, mut fetches, mut cold) = (0, 0, 0, 0);
        for epoch in 0..5 {
            let step_of = |at: usize| at as u64 / each;
            let mut next = vec![NEVER; count as usize];
            for (at, unit) in uses.iter().enumerate().skip((epoch + 1) * count as usize).take(count as usize) {
                next[*unit as usize] = step_of(at);
            }
            belady.look_ahead((epoch as u64 + 1) * u64::from(count) / each, &next);
            for at in epoch * count as usize..(epoch + 1) * count as usize {
                let (unit, step) = (uses[at], step_of(at));
                match belady.access(unit, step, next[unit as usize]) {
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
    fn a_cache_that_holds_everything_fetches_each_unit_once() {
        let mut belady = Belady::new([10, 20, 30], 60, 0);
        assert!(belady.has(1, 5));
        let fetches: Vec<Option<u32>> =
            (0..9).map(|step| belady.access(step % 3, u64::from(step), u64::from(step) + 3).map(|fetch| fetch.unit)).collect();
        assert_eq!(fetches, [Some(0), None, Some(2), None, None, None, None, None, None]);
        assert_eq!(belady.free_bytes(), 0);
    }

    #[test]
    fn units_larger_than_the_cache_are_not_kept() {
        let mut belady = Belady::new([10, 5], 5, 0);
        for step in 0..6 {
            let fetch = belady.access(step % 2, u64::from(step), u64::from(step) + 2);
            assert_eq!(
                fetch.map(|fetch| fetch.keep),
                if step == 1 {
                    Some(true)
                } else if step % 2 == 0 {
                    Some(false)
                } else {
                    None
                }
            );
        }
    }
}
