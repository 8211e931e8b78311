//! The int array of spec section 1: a base, and either a step or one integer of 1, 2, 4 or 8 bytes per value.

use bytes::Bytes;
use penstock_error::Result;

use crate::cursor::{Cursor, Writer, malformed};

/// An array of integers that is read in place, without a copy.
#[derive(Debug, Clone)]
pub enum IntArray {
    Linear { base: u64, step: u64, count: usize },
    Packed { base: u64, width: u8, values: Bytes },
}

impl IntArray {
    pub fn parse(cursor: &mut Cursor, count: usize) -> Result<IntArray> {
        let width = cursor.u8()?;
        match width {
            0 => Ok(IntArray::Linear { base: cursor.varint()?, step: cursor.varint()?, count }),
            1 | 2 | 4 | 8 => {
                let base = cursor.varint()?;
                let bytes = count
                    .checked_mul(width as usize)
                    .ok_or_else(|| malformed("an integer array is larger than the address space"))?;
                Ok(IntArray::Packed { base, width, values: cursor.take(bytes)? })
            }
            other => Err(malformed(format!("an int array has width {other}, expected 0, 1, 2, 4 or 8"))),
        }
    }

    pub fn len(&self) -> usize {
        match self {
            IntArray::Linear { count, .. } => *count,
            IntArray::Packed { width, values, .. } => values.len() / *width as usize,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Return the value at `index`, which the caller has checked against `len`.
    #[inline]
    pub fn get(&self, index: usize) -> u64 {
        match self {
            IntArray::Linear { base, step, .. } => base.wrapping_add((index as u64).wrapping_mul(*step)),
            IntArray::Packed { base, width, values } => base.wrapping_add(unpack(values, *width, index)),
        }
    }

    /// Return whether the values follow `base + i · step` without wrapping at 2^64.
    pub fn rises_evenly(&self) -> bool {
        matches!(self, IntArray::Linear { base, step, count } if step.checked_mul(*count as u64).is_some_and(|rise| base.checked_add(rise).is_some()))
    }

    /// Return whether each value is `wanted` more than the one before, or the array has exactly one value.
    pub fn is_line_of(&self, wanted: u64) -> bool {
        matches!(self, IntArray::Linear { step, count, .. } if *count == 1 || (*step == wanted && *count > 0))
    }

    pub fn iter(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.len()).map(|index| self.get(index))
    }

    /// Return the index of the last value ≤ `target` in an ascending array. Takes time logarithmic in the distance from `guess`.
    #[inline]
    pub fn last_at_most(&self, target: u64, guess: usize) -> Option<usize> {
        let guess = guess.min(self.len());
        // Values before index `low` are at most the target; values from index `high` on are greater.
        let (mut low, mut high, mut step) = (guess, guess, 1);
        while high < self.len() && self.get(high) <= target {
            (low, high, step) = (high + 1, (high + step).min(self.len()), 2 * step);
        }
        while low > 0 && self.get(low - 1) > target {
            (high, low, step) = (low - 1, low.saturating_sub(step), 2 * step);
        }
        while low < high {
            let middle = (low + high) / 2;
            if self.get(middle) <= target { low = middle + 1 } else { high = middle }
        }
        low.checked_sub(1)
    }

    /// Write `values` in the smallest encoding.
    pub fn write(writer: &mut Writer, values: &[u64]) {
        let step = if values.len() > 1 { values[1].wrapping_sub(values[0]) } else { 0 };
        if values.windows(2).all(|pair| pair[1].wrapping_sub(pair[0]) == step) {
            writer.u8(0);
            writer.varint(values.first().copied().unwrap_or(0));
            writer.varint(step);
            return;
        }
        let base = values.iter().copied().min().unwrap_or(0);
        let width = width_for(values.iter().copied().max().unwrap_or(0) - base);
        writer.u8(width);
        writer.varint(base);
        pack(&mut writer.0, width, values.iter().map(|value| value - base));
    }
}

/// Return the smallest integer width, in bytes, that fits `largest`.
pub fn width_for(largest: u64) -> u8 {
    match largest {
        0..=0xff => 1,
        0x100..=0xffff => 2,
        0x1_0000..=0xffff_ffff => 4,
        _ => 8,
    }
}

/// Append each value as a `width`-byte integer.
pub fn pack(out: &mut Vec<u8>, width: u8, values: impl Iterator<Item = u64>) {
    for value in values {
        out.extend_from_slice(&value.to_le_bytes()[..width as usize]);
    }
}

/// Read the integer at `index` in an array of `width`-byte integers.
#[inline]
pub fn unpack(values: &[u8], width: u8, index: usize) -> u64 {
    match width {
        1 => u64::from(values[index]),
        2 => u64::from(u16::from_le_bytes(array(values, index))),
        4 => u64::from(u32::from_le_bytes(array(values, index))),
        _ => u64::from_le_bytes(array(values, index)),
    }
}

#[inline]
fn array<const N: usize>(values: &[u8], index: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&values[index * N..index * N + N]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_at_most_finds_each_place_from_any_guess() -> Result<()> {
        for values in [&[][..], &[5], &[0, 1, 2, 3], &[0, 0, 7, 7, 7, 9, 300, 301, 70_000, 1 << 40]] {
            let written = Writer::written(|writer| IntArray::write(writer, values));
            let array = IntArray::parse(&mut Cursor::new(written.into()), values.len())?;
            let targets =
                values.iter().flat_map(|value| [value.saturating_sub(1), *value, value + 1]).chain([0, u64::MAX]);
            for (target, guess) in targets.flat_map(|target| (0..values.len() + 3).map(move |guess| (target, guess))) {
                let expected = values.iter().rposition(|value| *value <= target);
                assert_eq!(array.last_at_most(target, guess), expected, "{target} in {values:?} from {guess}");
            }
        }
        Ok(())
    }
}
