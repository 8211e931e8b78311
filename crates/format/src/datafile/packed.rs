//! The packed block (layout 1): one head, followed by many small ragged values.

use penstock_error::Result;
use penstock_tensor::{Dtype, Shape};

use crate::cursor::malformed;
use crate::ints::{pack, unpack, width_for};

/// Encode ragged samples into one packed block (layout 1).
pub fn write_packed(shape: &Shape, dtype: Dtype, values: &[&[u8]], free: &[&[u64]]) -> Vec<u8> {
    let free_count = shape.free_count();
    let leading = free_count - 1;
    let all = free.iter().any(|sizes| sizes.iter().take(leading).any(|size| *size == 0));
    let stored = if all { free_count } else { leading };
    let total: usize = values.iter().map(|value| value.len()).sum();
    let width = width_for(total as u64);
    let mut out = vec![width, u8::from(all), 0, 0];
    for dimension in 0..stored {
        let largest = free.iter().map(|sizes| sizes.get(dimension).copied().unwrap_or(0)).max().unwrap_or(0);
        let width = width_for(largest);
        out.push(width);
        pack(&mut out, width, free.iter().map(|sizes| sizes.get(dimension).copied().unwrap_or(0)));
    }
    let mut end = 0u64;
    pack(
        &mut out,
        width,
        values.iter().map(|value| {
            end += value.len() as u64;
            end
        }),
    );
    out.resize(out.len().next_multiple_of(dtype.size()), 0);
    out.reserve(total);
    values.iter().for_each(|value| out.extend_from_slice(value));
    out
}

/// The layout of a packed block. `parse` checks it once per block, so `range` and `free` are cheap.
#[derive(Debug, Clone)]
pub struct Packed {
    width: u8,
    ends: usize,
    values: usize,
    /// Width and offset of each stored free dimension.
    free: Vec<(u8, usize)>,
}

impl Packed {
    /// Parse the head of a packed block of `rows` rows.
    pub fn parse(block: &[u8], rows: usize, dtype: Dtype, shape: &Shape) -> Result<Packed> {
        let [width, flags, 0, 0, ..] = *block else { return Err(malformed("a packed block has no valid head")) };
        if !matches!(width, 1 | 2 | 4 | 8) || flags > 1 {
            return Err(malformed(format!(
                "a packed block has an invalid end width of {width} bytes or invalid flags {flags:#x}"
            )));
        }
        let free_count = shape.free_count();
        let stored = if flags & 1 == 1 { free_count } else { free_count - 1 };
        let mut at = 4;
        let mut free = Vec::with_capacity(stored);
        for _ in 0..stored {
            let width = *block
                .get(at)
                .filter(|width| matches!(width, 1 | 2 | 4 | 8))
                .ok_or_else(|| malformed("a packed block has a dimension without a valid width"))?;
            free.push((width, at + 1));
            at = rows
                .checked_mul(width as usize)
                .and_then(|bytes| bytes.checked_add(at + 1))
                .filter(|at| *at <= block.len())
                .ok_or_else(|| malformed("a packed block is too short for its dimensions"))?;
        }
        let ends = at;
        let values = rows
            .checked_mul(width as usize)
            .and_then(|bytes| bytes.checked_add(at))
            .ok_or_else(|| malformed("a packed block is too short for the ends of its rows"))?;
        let values = values.next_multiple_of(dtype.size());
        if values > block.len() {
            return Err(malformed("a packed block is too short for the ends of its rows"));
        }
        let packed = Packed { width, ends, values, free };
        let last = if rows == 0 { 0 } else { unpack(&block[ends..], width, rows - 1) };
        if last != (block.len() - values) as u64 {
            return Err(malformed(format!(
                "the values in a packed block end at {last}, expected {}",
                block.len() - values
            )));
        }
        Ok(packed)
    }

    /// Return the byte range of a row. Fails if the ends decrease or exceed the block.
    #[inline]
    pub fn range(&self, block: &[u8], row: usize) -> Result<std::ops::Range<usize>> {
        let ends = &block[self.ends..self.values];
        let begin = if row == 0 { 0 } else { unpack(ends, self.width, row - 1) };
        let end = unpack(ends, self.width, row);
        if begin > end || end > (block.len() - self.values) as u64 {
            return Err(malformed(format!("row {row} of a packed block has the invalid range {begin}..{end}")));
        }
        Ok(self.values + begin as usize..self.values + end as usize)
    }

    /// Append a row's free dimensions to `out`. The row's value has `bytes` bytes.
    pub fn free(
        &self,
        block: &[u8],
        row: usize,
        bytes: usize,
        cell: u64,
        out: &mut Vec<u64>,
        free_count: usize,
    ) -> Result<()> {
        let mut product = cell;
        for (width, offset) in &self.free {
            let size = unpack(&block[*offset..], *width, row);
            product = product.checked_mul(size).ok_or_else(|| malformed("a shape is larger than the address space"))?;
            out.push(size);
        }
        if self.free.len() < free_count {
            let last = (bytes as u64).checked_div(product).unwrap_or(0);
            product = product.wrapping_mul(last);
            out.push(last);
        }
        if product != bytes as u64 {
            return Err(malformed(format!(
                "row {row} of a packed block has {bytes} bytes, but its shape requires {product}"
            )));
        }
        Ok(())
    }
}
