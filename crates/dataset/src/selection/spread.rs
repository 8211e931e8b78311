//! Random choices that are functions of a seed and row ids: hashes, and how a split spreads row ids evenly over its parts.
//!
//! A split hashes each row id to a number in [0, 1), its place. A random permutation turns each of the last three digits of a row id into a
//! digit of the place. There is one for each combination of the higher digits of the row id and the digits drawn before. So each ten, hundred
//! and thousand consecutive row ids is spread evenly, and a bound divides each aligned thousand at one sample. Source: nested uniform scrambling
//! (Owen, 1995). There, a permutation does not depend on the higher digits, so samples that alternate between two classes would be split by
//! class. `tests/dataset/test_choose.py` has places as they were computed first: they must not change, because parts of splits would.

use std::cmp::Ordering;

/// Purposes of hashes, so that one seed gives independent choices.
pub const SAMPLE: u64 = 1;
const SPLIT: u64 = 2;
pub const GROUP: u64 = 3;

/// Row ids with the same higher digits.
pub const THOUSAND: u64 = 1000;

/// Add a number to a hash. Source: SplitMix64 (Steele, Lea and Flood, 2014).
#[inline]
pub fn mixed(state: u64, part: u64) -> u64 {
    let state = state.wrapping_add(0x9E37_79B9_7F4A_7C15).wrapping_add(part);
    let state = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    state ^ (state >> 31)
}

/// Hash numbers to 64 bits.
pub fn hash(parts: &[u64]) -> u64 {
    parts.iter().fold(0, |state, part| mixed(state, *part))
}

/// Convert a hash to a number in [0, 1).
#[inline]
pub fn unit(hash: u64) -> f64 {
    (hash >> 11) as f64 / (1u64 << 53) as f64
}

/// Return a number in [0, 1) for a group, which decides between parts that lack samples.
pub fn chance(seed: u64, group: i64) -> f64 {
    unit(hash(&[GROUP, seed, group.cast_unsigned()]))
}

/// Return a number in [0, 1) for each class, at which its samples begin in a split.
pub fn turn_of_class(seed: u64, class: i64) -> f64 {
    unit(hash(&[SPLIT, seed, class.cast_unsigned()]))
}

/// The place of a sample with these three digits and this fraction of a digit.
fn place(digits: u64, fraction: f64) -> f64 {
    (digits as f64 + fraction) / THOUSAND as f64
}

/// One bound of a split: which row ids have a place below it.
#[derive(Debug, Clone)]
pub struct Bound {
    pub value: f64,
    /// The place divided into digits. Only a sample whose place has all of these may be on either side of the bound.
    digits: [u64; 3],
    /// Hashes of what is equal for all row ids at each level.
    levels: [u64; 4],
}

/// What a permutation of ten digits does at a bound.
#[derive(Clone, Copy)]
struct Divided {
    /// The digits that are moved below the bound's digit, as bits.
    below: u16,
    /// The digit that is moved to the bound's digit.
    at: u64,
}

/// All ten digits, as bits.
const ALL: u16 = (1 << 10) - 1;

impl Bound {
    pub fn new(seed: u64, value: f64) -> Bound {
        let largest = unit(u64::MAX);
        let digits = (0..THOUSAND).find(|digits| place(*digits, largest) >= value).unwrap_or(THOUSAND);
        Bound {
            value,
            digits: [digits / 100, digits / 10 % 10, digits % 10],
            levels: std::array::from_fn(|level| hash(&[SPLIT, seed, level as u64])),
        }
    }

    /// Return whether all row ids are on the same side: Some(true) if they are below the bound.
    pub fn all_alike(&self) -> Option<bool> {
        if self.digits[0] > 9 { Some(true) } else { (self.value <= 0.0).then_some(false) }
    }

    /// Return the key of the permutation of a digit, given the higher digits and those drawn before.
    #[inline]
    fn key(&self, level: usize, higher: i64, drawn: u64) -> u64 {
        mixed(0, mixed(mixed(self.levels[level], higher.cast_unsigned()), drawn))
    }

    /// Return the digits of a bound that were drawn before a level.
    fn drawn(&self, level: usize) -> u64 {
        self.digits[..level].iter().fold(0, |drawn, digit| 10 * drawn + digit)
    }

    /// Return the first digit of the place of a row id, which is the same for all bounds of a seed.
    #[inline]
    pub fn first_digit(&self, id: i64) -> u64 {
        self.digit(0, id.rem_euclid(10).cast_unsigned(), id.div_euclid(10))
    }

    /// Return the digit to which a permutation turns another one.
    #[inline]
    fn digit(&self, level: usize, digit: u64, higher: i64) -> u64 {
        let key = self.key(level, higher, self.drawn(level));
        let own = mixed(key, digit);
        (0..10).map(|other| u64::from(mixed(key, other) < own)).sum()
    }

    /// Return whether the place of a row id is below the bound, given the first digit of the place.
    #[inline]
    pub fn is_below(&self, id: i64, first: u64) -> bool {
        match first.cmp(&self.digits[0]) {
            Ordering::Less => true,
            Ordering::Greater => false,
            Ordering::Equal => self.is_rest_below(id),
        }
    }

    /// Return the same for a row id whose place has the first digit of the bound.
    fn is_rest_below(&self, id: i64) -> bool {
        let mut higher = id.div_euclid(10);
        for level in 1..3 {
            let digit = higher.rem_euclid(10).cast_unsigned();
            higher = higher.div_euclid(10);
            match self.digit(level, digit, higher).cmp(&self.digits[level]) {
                Ordering::Less => return true,
                Ordering::Greater => return false,
                Ordering::Equal => {}
            }
        }
        self.is_last_below(id)
    }

    /// Return the same for a row id whose place has the three digits of the bound.
    fn is_last_below(&self, id: i64) -> bool {
        place(self.drawn(3), unit(mixed(self.levels[3], id.cast_unsigned()))) < self.value
    }

    /// Divide the ten digits at a level.
    fn divided(&self, level: usize, higher: i64) -> Divided {
        let limit = self.digits[level];
        if limit > 9 || self.value <= 0.0 {
            return Divided { below: if limit > 9 { ALL } else { 0 }, at: 0 };
        }
        let key = self.key(level, higher, self.drawn(level));
        let own: [u64; 10] = std::array::from_fn(|digit| mixed(key, digit as u64));
        let mut ranks = [0u8; 10];
        for one in 0..10 {
            for other in one + 1..10 {
                let is_less = own[one] < own[other];
                ranks[other] += u8::from(is_less);
                ranks[one] += u8::from(!is_less);
            }
        }
        let (mut below, mut at) = (0, 0);
        for (digit, rank) in ranks.into_iter().enumerate() {
            below |= u16::from(u64::from(rank) < limit) << digit;
            at |= if u64::from(rank) == limit { digit as u64 } else { 0 };
        }
        Divided { below, at }
    }

    /// Return which row ids of an aligned thousand are below the bound, where `number` is the row ids' thousandth.
    pub fn thousand(&self, number: i64) -> Thousand<'_> {
        let hundreds = self.divided(2, number);
        let mut below = hundreds.below;
        if below != ALL {
            let hundred = 10 * number + hundreds.at as i64;
            let ten = 10 * hundred + self.divided(1, hundred).at as i64;
            below |= u16::from(self.is_last_below(10 * ten + self.divided(0, ten).at as i64)) << hundreds.at;
        }
        Thousand { bound: self, number, hundreds: below }
    }
}

/// The row ids of an aligned thousand that are below a bound.
pub struct Thousand<'a> {
    bound: &'a Bound,
    number: i64,
    /// The hundreds that have one more row id below the bound than others, as bits.
    hundreds: u16,
}

impl Thousand<'_> {
    /// Return how many of the first `offset` row ids are below the bound.
    pub fn before(&self, offset: u64) -> u64 {
        let (hundred, ten, one) = (offset / 100, offset / 10 % 10, offset % 10);
        let mut sum = (0..hundred).map(|hundred| self.of_hundred(hundred)).sum();
        if ten + one > 0 {
            let tens = self.tens(hundred);
            sum += (0..ten).map(|ten| self.of_ten(tens, ten)).sum::<u64>();
            sum += u64::from((self.units(hundred, tens, ten) & ((1 << one) - 1)).count_ones());
        }
        sum
    }

    /// Return how many row ids of a hundred are below the bound.
    pub fn of_hundred(&self, hundred: u64) -> u64 {
        10 * self.bound.digits[0]
            + if self.bound.digits[0] > 9 { 0 } else { self.bound.digits[1] + u64::from(self.hundreds >> hundred & 1) }
    }

    /// Return the tens of a hundred that have one more row id below the bound than others, as bits.
    pub fn tens(&self, hundred: u64) -> u16 {
        let tens = self.bound.divided(1, 10 * self.number + hundred as i64);
        tens.below | (self.hundreds >> hundred & 1) << tens.at
    }

    /// Return how many row ids of a ten are below the bound, given the tens of its hundred.
    pub fn of_ten(&self, tens: u16, ten: u64) -> u64 {
        self.bound.digits[0] + if self.bound.digits[0] > 9 { 0 } else { u64::from(tens >> ten & 1) }
    }

    /// Return which row ids of a ten are below the bound, as bits, given the tens of its hundred.
    pub fn units(&self, hundred: u64, tens: u16, ten: u64) -> u16 {
        let units = self.bound.divided(0, 100 * self.number + (10 * hundred + ten) as i64);
        units.below | (tens >> ten & 1) << units.at
    }
}

/// Return how many of 0..count fulfil a condition that ever larger numbers do not.
pub fn below(count: u64, holds: impl Fn(u64) -> bool) -> u64 {
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = low + (high - low) / 2;
        if holds(middle) { low = middle + 1 } else { high = middle }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The place of a row id, digit by digit.
    fn place_of(id: i64, seed: u64) -> f64 {
        let (mut drawn, mut higher) = (0, id);
        for level in 0..3 {
            let digit = higher.rem_euclid(10).cast_unsigned();
            higher = higher.div_euclid(10);
            let key = hash(&[SPLIT, seed, level, higher.cast_unsigned(), drawn]);
            let own = hash(&[key, digit]);
            drawn = 10 * drawn + (0..10).filter(|other| hash(&[key, *other]) < own).count() as u64;
        }
        place(drawn, unit(hash(&[SPLIT, seed, 3, id.cast_unsigned()])))
    }

    #[test]
    fn all_ways_of_finding_who_is_below_a_bound_agree() {
        for (seed, value) in
            [(0, 0.8), (1, 0.5), (2, 0.12345), (3, 0.0), (4, 1.0), (5, 1.1), (6, 0.001), (7, 0.9995), (8, 1.0 / 3.0)]
        {
            let bound = Bound::new(seed, value);
            for number in [0, 1, 77, -3, (1 << 40) / 1000, i64::MIN / 1000 + 5] {
                let thousand = bound.thousand(number);
                let expected: Vec<bool> =
                    (0..1000).map(|offset| place_of(1000 * number + offset, seed) < value).collect();
                assert_eq!(
                    thousand.before(THOUSAND),
                    expected.iter().filter(|below| **below).count() as u64,
                    "{seed} {number}"
                );
                for (offset, below) in expected.iter().enumerate() {
                    let (hundred, ten, one) = (offset as u64 / 100, offset as u64 / 10 % 10, offset % 10);
                    let tens = thousand.tens(hundred);
                    assert_eq!(thousand.units(hundred, tens, ten) >> one & 1 == 1, *below, "{seed} {number} {offset}");
                    assert_eq!(
                        thousand.before(offset as u64),
                        expected[..offset].iter().filter(|below| **below).count() as u64
                    );
                    let id = 1000 * number + offset as i64;
                    assert_eq!(bound.is_below(id, bound.first_digit(id)), *below, "{seed} {number} {offset}");
                    let of_ten = expected[offset / 10 * 10..][..10].iter().filter(|below| **below).count();
                    assert_eq!(thousand.of_ten(tens, ten), of_ten as u64);
                    let of_hundred = expected[offset / 100 * 100..][..100].iter().filter(|below| **below).count();
                    assert_eq!(thousand.of_hundred(hundred), of_hundred as u64);
                }
            }
        }
    }
}
