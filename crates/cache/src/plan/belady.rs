//! Belady's choice over a known plan: which unit to fetch, when, and what to evict for it. A pure function without I/O.
//!
//! A loader uses units in a known order. Of the cached units, the one whose next use is the latest gives way, which costs the fewest fetches
//! possible (Belady 1966). A fetch may begin as soon as its victims were used for the last time before it. It then costs no additional
//! fetch, unlike a fetch as early as there is room (Cao, Felten, Karlin and Li 1995, "conservative").

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
    /// Whether to keep the unit. If not, its next use is later than that of all others.
    pub keep: bool,
}

#[derive(Debug, Clone, Copy)]
struct Unit {
    bytes: u64,
    is_cached: bool,
    /// Whether it is kept until all loaders have read it, and no longer.
    is_passing: bool,
    next_use: u64,
    /// One more than the step of the last use.
    free_from: u64,
}

/// A cache of which the future is known.
#[derive(Debug)]
pub struct Belady {
    units: Vec<Unit>,
    capacity_bytes: u64,
    used_bytes: u64,
    /// Cached units by their next use. Some entries are outdated.
    by_next_use: BinaryHeap<(u64, u32)>,
    /// Units that are not worth keeping, but which other loaders are about to read, oldest first.
    passing: VecDeque<u32>,
    passing_capacity_bytes: u64,
    passing_bytes: u64,
}

impl Belady {
    /// Begin with units of these sizes, none of which is cached. With `passing_bytes`, units that are not worth keeping are kept for the steps
    /// that fit in there, so that several loaders read them from the cache.
    pub fn new(unit_bytes: impl IntoIterator<Item = u64>, capacity_bytes: u64, passing_bytes: u64) -> Belady {
        let unit = |bytes| Unit { bytes, is_cached: false, is_passing: false, next_use: NEVER, free_from: 0 };
        Belady {
            units: unit_bytes.into_iter().map(unit).collect(),
            capacity_bytes,
            used_bytes: 0,
            by_next_use: BinaryHeap::new(),
            passing: VecDeque::new(),
            passing_capacity_bytes: passing_bytes,
            passing_bytes: 0,
        }
    }

    /// Note that a unit is cached already, and when it is used next. Returns false if it does not fit any more.
    pub fn has(&mut self, unit: u32, next_use: u64) -> bool {
        let bytes = self.units[unit as usize].bytes;
        if self.used_bytes + bytes > self.capacity_bytes {
            return false;
        }
        self.set_cached(unit, next_use);
        true
    }

    fn set_cached(&mut self, unit: u32, next_use: u64) {
        let found = &mut self.units[unit as usize];
        if !std::mem::replace(&mut found.is_cached, true) {
            self.used_bytes += found.bytes;
        }
        found.next_use = next_use;
        self.by_next_use.push((next_use, unit));
        if self.by_next_use.len() > 64 + 4 * self.units.len() {
            let is_true = |units: &[Unit], (next_use, unit): &(u64, u32)| {
                let unit = &units[*unit as usize];
                unit.is_cached && unit.next_use == *next_use
            };
            let units = &self.units;
            self.by_next_use.retain(|entry| is_true(units, entry));
        }
    }

    /// Use a unit at a step, and return the fetch that this costs, or None if the unit is cached. Steps never decrease.
    pub fn access(&mut self, unit: u32, step: u64, next_use: u64) -> Option<Fetch> {
        if self.units[unit as usize].is_cached {
            self.units[unit as usize].free_from = step + 1;
            self.set_cached(unit, next_use);
            return None;
        }
        if self.units[unit as usize].is_passing {
            self.units[unit as usize].free_from = step + 1;
            return None;
        }
        let mut fetch = Fetch { unit, needed: step, victims: Vec::new(), from: 0, keep: true };
        let bytes = self.units[unit as usize].bytes;
        let mut room = self.capacity_bytes.saturating_sub(self.used_bytes);
        let mut put_back = Vec::new();
        while room < bytes {
            let Some((latest, victim)) = self.by_next_use.pop() else {
                fetch.keep = false;
                break;
            };
            let found = &self.units[victim as usize];
            if !found.is_cached || found.next_use != latest || put_back.iter().any(|(_, other)| *other == victim) {
                continue;
            }
            put_back.push((latest, victim));
            // A victim of this very step is still needed by it.
            if latest <= next_use || found.free_from > step {
                fetch.keep = false;
                break;
            }
            room += found.bytes;
        }
        if fetch.keep {
            for (_, victim) in put_back {
                let found = &mut self.units[victim as usize];
                found.is_cached = false;
                fetch.from = fetch.from.max(found.free_from);
                self.used_bytes -= found.bytes;
                fetch.victims.push(victim);
            }
            self.units[unit as usize].free_from = step + 1;
            self.set_cached(unit, next_use);
        } else {
            self.by_next_use.extend(put_back);
            self.pass(&mut fetch);
        }
        Some(fetch)
    }

    /// Keep a unit until the steps have been read for which there is room.
    fn pass(&mut self, fetch: &mut Fetch) {
        let bytes = self.units[fetch.unit as usize].bytes;
        let free = self.passing_capacity_bytes.saturating_sub(self.passing_bytes);
        let (mut room, mut victims) = (free, Vec::new());
        for unit in self.passing.iter().filter(|unit| self.units[**unit as usize].free_from <= fetch.needed) {
            if room >= bytes {
                break;
            }
            room += self.units[*unit as usize].bytes;
            victims.push(*unit);
        }
        if room < bytes {
            return;
        }
        for victim in &victims {
            let found = &mut self.units[*victim as usize];
            found.is_passing = false;
            fetch.from = fetch.from.max(found.free_from);
            self.passing_bytes -= found.bytes;
        }
        let units = &self.units;
        if !victims.is_empty() {
            self.passing.retain(|unit| units[*unit as usize].is_passing);
        }
        (fetch.keep, fetch.victims) = (true, victims);
        self.passing.push_back(fetch.unit);
        self.passing_bytes += bytes;
        let found = &mut self.units[fetch.unit as usize];
        (found.is_passing, found.free_from) = (true, fetch.needed + 1);
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

    #[test]
    fn a_cache_that_holds_everything_fetches_each_unit_once() {
        let mut belady = Belady::new([10, 20, 30], 60, 0);
        assert!(belady.has(1, 5));
        let fetches: Vec<Option<u32>> =
            (0..9).map(|step| belady.access(step % 3, u64::from(step), u64::from(step) + 3).map(|fetch| fetch.unit)).collect();
        assert_eq!(fetches, [Some(0), None, Some(2), None, None, None, None, None, None]);
        assert!(!belady.has(0, 1) || belady.used_bytes == 60);
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
