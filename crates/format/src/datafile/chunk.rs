//! The blocks of one column in one data file, with methods that locate rows and checksum units. `tail` parses and checks chunks.

use std::ops::Range;

use bytes::Bytes;
use penstock_tensor::slice::Grid;
use penstock_tensor::{Dtype, Shape};

use super::{Bounds, Codec, Layout, UNIT_BYTES, units};
use crate::cursor::Strings;
use crate::ints::IntArray;

/// The blocks of one column in one data file, read in place from the tail.
#[derive(Debug, Clone)]
pub struct Chunk {
    pub column: u64,
    pub dtype: Dtype,
    pub layout: Layout,
    pub codec: Codec,
    pub shape: Shape,
    pub samples: u64,
    pub rows_per_block: u64,
    pub first_row: Option<IntArray>,
    pub offset: IntArray,
    pub stored_bytes: IntArray,
    pub raw_bytes: Option<IntArray>,
    pub crcs: IntArray,
    /// Index of each block's first checksum unit, or None if every block has exactly one unit.
    pub first_unit: Option<Vec<u32>>,
    pub free: Vec<IntArray>,
    /// Side lengths of a tile. Empty unless the chunk is tiled.
    pub tile: Vec<u64>,
    /// Block index of each sample's first tile, followed by the total number of tiles. None unless the chunk is tiled.
    pub first_tile: Option<IntArray>,
    pub validity: Option<Bytes>,
    pub dictionary: Option<Strings>,
    pub bounds: Option<Bounds>,
}

impl Chunk {
    /// Return how many bytes of memory this chunk occupies in addition to the tail.
    pub fn held_bytes(&self) -> u64 {
        let units = self.first_unit.as_ref().map_or(0, |first| size_of_val(&first[..]));
        let shape = size_of_val(&self.shape.0[..]) + size_of_val(&self.free[..]) + size_of_val(&self.tile[..]);
        (size_of::<Chunk>() + units + shape) as u64 + self.dictionary.as_ref().map_or(0, Strings::held_bytes)
    }

    pub fn blocks(&self) -> usize {
        self.offset.len()
    }

    /// Return the decoded size of each block.
    pub fn decoded_bytes(&self) -> &IntArray {
        self.raw_bytes.as_ref().unwrap_or(&self.stored_bytes)
    }

    /// Return the number of bytes from the start of the first block to the end of the last one.
    pub fn span_bytes(&self) -> u64 {
        let Some(last) = self.blocks().checked_sub(1) else { return 0 };
        (self.offset.get(last) + self.stored_bytes.get(last)).saturating_sub(self.offset.get(0))
    }

    /// Return the shape of a sample whose free dimensions are stored in the tail (layouts 0, 2 and 3). That of bytes is their length.
    pub fn shape_of(&self, row: u64) -> Vec<u64> {
        if (self.dtype, self.layout) == (Dtype::Bytes, Layout::Single) {
            return vec![self.decoded_bytes().get(row as usize)];
        }
        let free: Vec<u64> = self.free.iter().map(|sizes| sizes.get(row as usize)).collect();
        self.shape.fill(&free)
    }

    /// Return a sample's tile grid and the index of its first tile's block. Returns None if the chunk is not tiled.
    pub fn grid_of(&self, row: u64) -> Option<(Grid, u64)> {
        self.first_tile.as_ref().map(|first| (Grid::new(&self.shape_of(row), &self.tile), first.get(row as usize)))
    }

    /// Return the grid of a sample that has blocks of its own, and the index of the first one. A sample in one block is one tile. Returns
    /// None if the block has other samples as well.
    pub fn parts_of(&self, row: u64) -> Option<(Grid, u64)> {
        match self.layout {
            Layout::Tiled => self.grid_of(row),
            Layout::Fixed | Layout::Single if self.rows_per_block == 1 => {
                let shape = self.shape_of(row);
                let tile: Vec<u64> = shape.iter().map(|size| (*size).max(1)).collect();
                Some((Grid::new(&shape, &tile), row))
            }
            _ => None,
        }
    }

    /// Return whether a sample has blocks of its own, and more than one checksum unit, so that reading a part of it may cost less.
    pub fn is_divisible(&self, row: u64) -> bool {
        match self.layout {
            Layout::Tiled => true,
            Layout::Fixed | Layout::Single => {
                self.rows_per_block == 1 && self.decoded_bytes().get(row as usize) > UNIT_BYTES
            }
            Layout::Packed => false,
        }
    }

    /// Return the block that contains a row, and the row's index in it. For tiled samples, call `grid_of` instead.
    #[inline]
    pub fn locate(&self, row: u64) -> (usize, u64) {
        match &self.first_row {
            None if self.rows_per_block == 1 => (row as usize, 0),
            None => ((row / self.rows_per_block) as usize, row % self.rows_per_block),
            Some(first) => {
                let guess = row as f64 / self.samples as f64 * first.len() as f64; // Blocks have similar numbers of rows.
                let block = first.last_at_most(row, guess as usize).unwrap_or(0);
                (block, row - first.get(block))
            }
        }
    }

    /// Return the blocks that have a row's values: all tiles of a tiled sample, otherwise one block, which may have other rows as well.
    pub fn blocks_of(&self, row: u64) -> Range<usize> {
        match &self.first_tile {
            Some(first) => first.get(row as usize) as usize..first.get(row as usize + 1) as usize,
            None => self.locate(row).0..self.locate(row).0 + 1,
        }
    }

    /// Return the first row of a block. The chunk must not be tiled.
    pub fn first_row_of(&self, block: usize) -> u64 {
        self.first_row.as_ref().map_or(block as u64 * self.rows_per_block, |first| first.get(block))
    }

    /// Return the number of rows in a block.
    pub fn rows_of(&self, block: usize) -> u64 {
        match &self.first_row {
            None => (self.samples - block as u64 * self.rows_per_block).min(self.rows_per_block),
            Some(first) => {
                (if block + 1 < self.blocks() { first.get(block + 1) } else { self.samples }) - first.get(block)
            }
        }
    }

    #[inline]
    pub fn is_valid(&self, row: u64) -> bool {
        match &self.validity {
            None => true,
            Some(bits) => bits[(row / 8) as usize] >> (row % 8) & 1 == 1,
        }
    }

    /// Return how many samples are null.
    pub fn nulls(&self) -> u64 {
        let valid = |bits: &Bytes| bits.iter().map(|byte| u64::from(byte.count_ones())).sum::<u64>();
        self.validity.as_ref().map_or(0, |bits| self.samples.saturating_sub(valid(bits)))
    }

    /// Return the index of a block's first checksum unit, and how many units the block has.
    #[inline]
    pub fn units_of(&self, block: usize) -> (usize, usize) {
        match &self.first_unit {
            None => (block, usize::from(self.stored_bytes.get(block) > 0)),
            Some(first) => (first[block] as usize, units(self.stored_bytes.get(block)) as usize),
        }
    }
}

#[cfg(test)]
mod tests {
    use penstock_error::Result;

    use super::*;
    use crate::datafile::{ChunkBuilder, HEADER_BYTES, Tail, write_tail};

    #[test]
    fn values_beyond_4_gib_are_found() -> Result<()> {
        let lengths = [7, (5 << 30) + 3, 0, 2 * UNIT_BYTES];
        let mut chunk = ChunkBuilder {
            column: 1,
            dtype: Dtype::Bytes,
            layout: Layout::Single,
            codec: Codec::None,
            shape: Shape::free(),
            rows_per_block: 1,
            first_row: Vec::new(),
            offset: Vec::new(),
            stored_bytes: lengths.to_vec(),
            raw_bytes: lengths.to_vec(),
            crcs: (0..lengths.iter().map(|length| units(*length)).sum()).collect(),
            free: Vec::new(),
            tile: Vec::new(),
            first_tile: Vec::new(),
            validity: None,
            dictionary: None,
            bounds: None,
        };
        let mut end = HEADER_BYTES;
        for length in lengths {
            chunk.offset.push(end.next_multiple_of(8));
            end = end.next_multiple_of(8) + length;
        }
        let (tail, tail_bytes, _) = write_tail(4, &[chunk], end);
        assert!(tail_bytes < 5 * (5 << 30) / UNIT_BYTES, "a unit takes four bytes");
        let tail = Tail::parse(Bytes::from(tail).slice(..tail_bytes as usize), end)?;
        let chunk = &tail.chunks[0];
        assert_eq!((0..4).map(|row| chunk.shape_of(row)[0]).collect::<Vec<u64>>(), lengths);
        assert_eq!((0..4).map(|row| chunk.is_divisible(row)).collect::<Vec<bool>>(), [false, true, false, true]);
        let film_units = (5 << 30) / UNIT_BYTES as usize + 1;
        assert_eq!(
            (0..4).map(|block| chunk.units_of(block)).collect::<Vec<_>>(),
            [(0, 1), (1, film_units), (1 + film_units, 0), (1 + film_units, 2)]
        );
        assert_eq!(chunk.crcs.get(film_units), film_units as u64);
        assert!(chunk.offset.get(3) > u64::from(u32::MAX));
        Ok(())
    }
}
