//! Cut a column's waiting samples into blocks, and encode the blocks on all threads.

use std::borrow::Cow;
use std::ops::Range;

use penstock_error::Result;
use penstock_format::crc;
use penstock_format::datafile::{COMPRESSED_BLOCK_BYTES, Codec, Layout, PACKED_BLOCK_BYTES, UNIT_BYTES, write_packed};
use penstock_tensor::slice::{Grid, elements, runs};
use penstock_tensor::{Column, Dtype, Ragged, Shape};

use super::style::Style;
use crate::parallel;
use crate::store::codecs;

/// An encoded block, ready to be written.
pub struct EncodedBlock<'a> {
    pub rows: u64,
    pub stored: Cow<'a, [u8]>,
    pub raw_bytes: u64,
    pub crcs: Vec<u32>,
}

/// Return the first row of each block, and the end of the last block.
fn cut(column: &Column, style: &Style, shape: &Shape, dtype: Dtype) -> Vec<usize> {
    let count = column.len();
    match (style.layout, column) {
        (Layout::Packed, Column::Ragged(ragged)) => {
            let head = 2 + 2 * shape.free_count().saturating_sub(1) + dtype.size() / 8;
            let most = if style.codec == Codec::None { PACKED_BLOCK_BYTES } else { COMPRESSED_BLOCK_BYTES };
            let (mut cuts, mut bytes) = (vec![0], 0);
            for row in 0..count {
                let size = ragged.value(row).len() + head;
                if bytes + size > most && bytes > 0 {
                    cuts.push(row);
                    bytes = 0;
                }
                bytes += size;
            }
            cuts.push(count);
            cuts
        }
        _ => (0..count).step_by(style.rows_per_block.max(1) as usize).chain([count]).collect(),
    }
}

/// Encode all samples of `column`. Uncompressed blocks borrow their bytes from `column`, unless they are packed.
pub fn encode<'a>(column: &'a Column, style: &Style, dtype: Dtype, shape: &Shape) -> Result<Vec<EncodedBlock<'a>>> {
    if column.is_empty() {
        return Ok(Vec::new());
    }
    let cuts = cut(column, style, shape, dtype);
    let blocks = parallel::map(cuts.len() - 1, column.value_bytes(), |block| {
        let (first, end) = (cuts[block], cuts[block + 1]);
        encode_block(raw_block(column, style, dtype, shape, first, end), style.codec, (end - first) as u64)
    })?;
    blocks.into_iter().collect()
}

fn encode_block(raw: Cow<'_, [u8]>, codec: Codec, rows: u64) -> Result<EncodedBlock<'_>> {
    let raw_bytes = raw.len() as u64;
    let stored = codecs::encode(codec, raw)?;
    let crcs = stored.chunks(UNIT_BYTES as usize).map(crc).collect();
    Ok(EncodedBlock { rows, stored, raw_bytes, crcs })
}

/// Encode the tiles of a slab, in order. An uncompressed tile that is contiguous in the slab borrows its content from `bytes`.
pub fn encode_tiles<'a>(
    grid: &Grid,
    slab: &[Range<u64>],
    bytes: &'a [u8],
    codec: Codec,
    size: usize,
) -> Result<Vec<EncodedBlock<'a>>> {
    let tiles = grid.meeting(slab);
    let blocks = parallel::map(tiles.len(), bytes.len(), |index| {
        let tile = grid.tile(tiles[index]);
        let length = elements(&tile).unwrap_or(0) as usize * size;
        let mut in_one = None;
        runs(slab, &tile, size, |from, _, bytes| in_one = (bytes == length).then_some(from));
        let raw = match in_one {
            Some(begin) => Cow::Borrowed(&bytes[begin..begin + length]),
            None => {
                let mut raw = vec![0; length];
                runs(slab, &tile, size, |from, to, count| {
                    raw[to..to + count].copy_from_slice(&bytes[from..from + count])
                });
                Cow::Owned(raw)
            }
        };
        encode_block(raw, codec, 0)
    })?;
    blocks.into_iter().collect()
}

fn raw_block<'a>(
    column: &'a Column,
    style: &Style,
    dtype: Dtype,
    shape: &Shape,
    first: usize,
    end: usize,
) -> Cow<'a, [u8]> {
    match column {
        Column::Fixed { data, samples, .. } => {
            let cell = data.len() / samples;
            Cow::Borrowed(&data[first * cell..end * cell])
        }
        Column::Ragged(ragged) if style.layout == Layout::Packed => Cow::Owned(pack(ragged, dtype, shape, first, end)),
        Column::Ragged(ragged) => Cow::Borrowed(ragged.value(first)),
        Column::Pulled(_) => Cow::Borrowed(&[]), // Pulled samples are always tiled.
    }
}

fn pack(ragged: &Ragged, dtype: Dtype, shape: &Shape, first: usize, end: usize) -> Vec<u8> {
    let free_count = shape.free_count();
    let values: Vec<&[u8]> = (first..end).map(|row| ragged.value(row)).collect();
    // Text and bytes have one free dimension, their length, which is not stored in `free`.
    let lengths: Vec<u64> =
        if ragged.free.is_empty() { values.iter().map(|value| value.len() as u64).collect() } else { Vec::new() };
    let free: Vec<&[u64]> = (first..end)
        .map(|row| {
            if lengths.is_empty() {
                &ragged.free[row * free_count..(row + 1) * free_count]
            } else {
                &lengths[row - first..row - first + 1]
            }
        })
        .collect();
    write_packed(shape, dtype, &values, &free)
}
