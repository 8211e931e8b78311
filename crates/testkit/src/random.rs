//! Seeded random numbers from splitmix64 (Steele, Lea and Flood, OOPSLA 2014).

use std::ops::Range;

/// Return `count` seeds for a test. Each run of tools/test.sh uses different seeds and prints the PENSTOCK_ROTATION that replays them.
pub fn seeds(count: u64) -> Range<u64> {
    let rotation: u64 = std::env::var("PENSTOCK_ROTATION").ok().and_then(|number| number.parse().ok()).unwrap_or(0);
    rotation * count..(rotation + 1) * count
}

/// Return whether all of a long test is to run, and not a part of it.
pub fn is_soak() -> bool {
    std::env::var_os("PENSTOCK_SOAK").is_some()
}

/// Return the seeds of this run: of all schedules, or of one in so many.
pub fn slice(all: u64, one_in: u64) -> Range<u64> {
    seeds(if is_soak() { all } else { all / one_in })
}

pub struct Random(pub u64);

impl Random {
    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Return a number below `limit`, which must be positive.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.number() % limit
    }

    pub fn chance(&mut self, one_in: u64) -> bool {
        self.below(one_in) == 0
    }

    pub fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.number() as u8).collect()
    }
}
