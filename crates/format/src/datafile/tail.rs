//! Parses a tail index, and checks everything that later reads rely on. The bytes come from a store, so they are not trusted.

use bytes::Bytes;
use penstock_error::{Error, Result};
use penstock_tensor::slice::{self, Grid};
use penstock_tensor::{Dtype, MAX_DIMENSIONS, Shape, counted};

use super::{Bounds, Chunk, Class, Codec, HEADER_BYTES, Layout, MAX_BLOCKS, UNIT_BYTES, units};
use crate::cursor::{Cursor, malformed};
use crate::ints::IntArray;

/// The tail index: the locations of all blocks in a data file.
#[derive(Debug, Clone)]
pub struct Tail {
    pub samples: u64,
    pub chunks: Vec<Chunk>,
}

impl Tail {
    /// Parse a tail whose checksum was verified. The file's blocks end at `data_end`.
    pub fn parse(bytes: Bytes, data_end: u64) -> Result<Tail> {
        let mut cursor = Cursor::new(bytes);
        let samples = cursor.varint()?;
        if samples > 1 << 40 {
            return Err(malformed(format!("a data file claims to have {samples} samples, expected at most 2^40")));
        }
        if cursor.varint()? != 0 {
            return Err(Error::new(
                "unknown-feature",
                "a data file refers to foreign objects, which this release cannot read",
            )
            .hint("upgrade Penstock"));
        }
        let chunks = cursor.list(8, |cursor| Chunk::parse(cursor, samples, data_end))?;
        cursor.end()?;
        Ok(Tail { samples, chunks })
    }
}

impl Chunk {
    fn parse(cursor: &mut Cursor, samples: u64, data_end: u64) -> Result<Chunk> {
        let column = cursor.varint()?;
        let (dtype, layout, codec) = read_storage(cursor, column)?;
        let shape = Shape(cursor.list(1, |cursor| Ok(cursor.varint()?.checked_sub(1)))?);
        let cell = shape.fixed_bytes(dtype).map_err(|error| malformed(error.message()))?;
        let fits = match layout {
            Layout::Fixed => shape.is_fixed(),
            Layout::Packed | Layout::Single => !shape.is_fixed(),
            Layout::Tiled => !shape.0.is_empty() && dtype != Dtype::Bytes,
        };
        if shape.0.len() > MAX_DIMENSIONS || !fits {
            return Err(malformed(format!("column {column} has shape {shape}, which is invalid in layout {layout:?}")));
        }
        let rows_per_block = cursor.varint()?;
        let blocks = cursor.varint()?;
        let plausible = match layout {
            Layout::Tiled => samples <= MAX_BLOCKS,
            _ => blocks <= samples && (samples > 0) == (blocks > 0),
        };
        if blocks > MAX_BLOCKS || !plausible {
            return Err(malformed(format!("column {column} has {blocks} blocks for {samples} samples")));
        }
        let blocks = blocks as usize;
        let first_row = if rows_per_block == 0 { Some(IntArray::parse(cursor, blocks)?) } else { None };
        let ordinals = IntArray::parse(cursor, blocks)?;
        if ordinals.iter().any(|ordinal| ordinal != 0) {
            return Err(Error::new(
                "unknown-feature",
                format!("column {column} uses foreign objects, which this release cannot read"),
            )
            .hint("upgrade Penstock"));
        }
        let offset = IntArray::parse(cursor, blocks)?;
        let stored_bytes = IntArray::parse(cursor, blocks)?;
        let raw_bytes = if codec == Codec::None { None } else { Some(IntArray::parse(cursor, blocks)?) };
        let (first_unit, unit_count) = count_units(&stored_bytes)?;
        let crcs = IntArray::parse(cursor, unit_count)?;
        let free = match layout {
            // For dtype `bytes`, the only free dimension is the length of the value.
            Layout::Single | Layout::Tiled if dtype != Dtype::Bytes => {
                (0..shape.free_count()).map(|_| IntArray::parse(cursor, samples as usize)).collect::<Result<_>>()?
            }
            _ => Vec::new(),
        };
        let (tile, first_tile) = match layout {
            Layout::Tiled => (cursor.varints()?, Some(IntArray::parse(cursor, samples as usize + 1)?)),
            _ => (Vec::new(), None),
        };
        let validity = cursor.option(|cursor| cursor.take(samples.div_ceil(8) as usize))?;
        let dictionary = cursor.option(Cursor::strings)?;
        let bounds = cursor.option(|cursor| Bounds::parse(cursor, Class::of(dtype, &shape)))?;
        let chunk = Chunk {
            column,
            dtype,
            layout,
            codec,
            shape,
            samples,
            rows_per_block,
            first_row,
            offset,
            stored_bytes,
            raw_bytes,
            crcs,
            first_unit,
            free,
            tile,
            first_tile,
            validity,
            dictionary,
            bounds,
        };
        chunk.check(cell, data_end)?;
        Ok(chunk)
    }

    /// Check that blocks cover all rows and are inside the file, and that lengths match shapes. Later reads rely on this.
    fn check(&self, cell: u64, data_end: u64) -> Result<()> {
        let column = self.column;
        let invalid = |text: String| Err(malformed(format!("column {column}: {text}")));
        let blocks = self.blocks() as u64;
        match &self.first_row {
            None => {
                if self.layout != Layout::Tiled
                    && self.rows_per_block != 0
                    && blocks != self.samples.div_ceil(self.rows_per_block)
                {
                    return invalid(format!(
                        "it has {blocks} blocks of {} rows, but {} samples",
                        self.rows_per_block, self.samples
                    ));
                }
            }
            Some(first) => {
                let mut last = None;
                for (index, row) in first.iter().enumerate() {
                    if (index == 0 && row != 0) || last.is_some_and(|last| row <= last) || row >= self.samples {
                        return invalid(format!("block {index} begins at the invalid row {row}"));
                    }
                    last = Some(row);
                }
            }
        }
        if matches!(self.layout, Layout::Single | Layout::Tiled) && self.rows_per_block != 1 {
            return invalid("a single-sample layout does not have one row per block".into());
        }
        self.check_tiles()?;
        let is_empty = self.bounds.as_ref().is_none_or(|bounds| bounds.span.is_none() && !bounds.has_nan);
        if self.bounds.is_some() && is_empty != (self.nulls() == self.samples) {
            return invalid(format!("its bounds contradict its {} nulls", self.nulls()));
        }
        // For equally spaced blocks of equal size, it suffices to check the first and the last block.
        let even = self.first_row.is_none()
            && self.raw_bytes.is_none()
            && self.layout == Layout::Fixed
            && self.offset.rises_evenly()
            && matches!(self.stored_bytes, IntArray::Linear { step: 0, .. });
        let checked: Vec<usize> =
            if even && blocks > 2 { vec![0, self.blocks() - 1] } else { (0..self.blocks()).collect() };
        for block in checked {
            let (offset, stored) = (self.offset.get(block), self.stored_bytes.get(block));
            if offset < HEADER_BYTES || offset.checked_add(stored).is_none_or(|end| end > data_end) {
                return invalid(format!(
                    "block {block} at offset {offset} has {stored} bytes, but the data ends at {data_end}"
                ));
            }
            let raw = self.decoded_bytes().get(block);
            if !self.codec.can_hold(stored, raw) {
                return invalid(format!("block {block} of {stored} bytes claims to hold {raw} bytes"));
            }
            if self.layout == Layout::Fixed && self.rows_of(block).checked_mul(cell) != Some(raw) {
                return invalid(format!(
                    "block {block} has {raw} bytes, expected {} samples of {cell} bytes",
                    self.rows_of(block)
                ));
            }
            if self.layout == Layout::Single && self.dtype != Dtype::Bytes && self.is_valid(block as u64) {
                let wanted = self.free.iter().try_fold(cell, |product, free| product.checked_mul(free.get(block)));
                if wanted != Some(raw) {
                    return invalid(format!(
                        "sample {block} has {raw} bytes, but its shape requires {}",
                        counted(wanted)
                    ));
                }
            }
        }
        Ok(())
    }

    /// Check that every sample has the tiles that its shape requires, and that the size of each tile matches its position.
    fn check_tiles(&self) -> Result<()> {
        let Some(first) = &self.first_tile else { return Ok(()) };
        let invalid = |text: String| Err(malformed(format!("column {}: {text}", self.column)));
        if self.tile.len() != self.shape.0.len() || self.tile.contains(&0) {
            return invalid(format!("tiles of {:?} do not fit the shape {}", self.tile, self.shape));
        }
        if first.get(0) != 0 || first.get(self.samples as usize) != self.blocks() as u64 {
            return invalid(format!(
                "it has {} blocks, but its samples have {} tiles",
                self.blocks(),
                first.get(self.samples as usize)
            ));
        }
        for row in 0..self.samples {
            let (begin, end) = (first.get(row as usize), first.get(row as usize + 1));
            let shape = self.shape_of(row);
            let grid = Grid::new(&shape, &self.tile);
            let wanted = if self.is_valid(row) { grid.tiles() } else { Some(0) };
            if end.checked_sub(begin) != wanted || end > self.blocks() as u64 {
                return invalid(format!(
                    "sample {row} has tiles {begin}..{end}, but its shape requires {} tiles",
                    counted(wanted)
                ));
            }
            // If all tiles have the same size, it suffices to check one.
            let alike = matches!(self.decoded_bytes(), IntArray::Linear { step: 0, .. })
                && shape.iter().zip(&self.tile).all(|(size, side)| size % side == 0);
            for block in (begin..end).take(if alike { 1 } else { usize::MAX }) {
                let elements = slice::elements(&grid.tile(block - begin));
                let raw = self.decoded_bytes().get(block as usize);
                if elements.and_then(|elements| elements.checked_mul(self.dtype.size() as u64)) != Some(raw) {
                    return invalid(format!(
                        "tile {} of sample {row} has {raw} bytes, but its shape requires {} elements",
                        block - begin,
                        counted(elements)
                    ));
                }
            }
        }
        Ok(())
    }
}

/// Read the dtype, layout and codec of a column.
fn read_storage(cursor: &mut Cursor, column: u64) -> Result<(Dtype, Layout, Codec)> {
    let unknown = |code, what: String| {
        Err(Error::new(code, format!("column {column} has {what}, which this release does not support"))
            .hint("upgrade Penstock"))
    };
    let dtype = cursor.u8()?;
    let Some(dtype) = Dtype::from_code(dtype) else { return unknown("unknown-codec", format!("dtype {dtype}")) };
    let layout = match cursor.u8()? {
        0 => Layout::Fixed,
        1 => Layout::Packed,
        2 => Layout::Single,
        3 => Layout::Tiled,
        other => return unknown("unknown-feature", format!("layout {other}")),
    };
    let codec = cursor.u8()?;
    let Some(codec) = Codec::from_code(codec) else { return unknown("unknown-codec", format!("codec {codec}")) };
    Ok((dtype, layout, codec))
}

fn count_units(stored_bytes: &IntArray) -> Result<(Option<Vec<u32>>, usize)> {
    let one_each = match stored_bytes {
        IntArray::Linear { base, step: 0, .. } => (1..=UNIT_BYTES).contains(base),
        _ => stored_bytes.iter().all(|bytes| bytes <= UNIT_BYTES && bytes > 0),
    };
    if one_each {
        return Ok((None, stored_bytes.len()));
    }
    let mut first = Vec::with_capacity(stored_bytes.len());
    let mut total = 0u64;
    for bytes in stored_bytes.iter() {
        first.push(
            u32::try_from(total)
                .map_err(|_| malformed("a column has more checksum units than a data file can hold"))?,
        );
        total = total.saturating_add(units(bytes));
    }
    // Reading the crc array checks this count against the remaining bytes.
    let total = usize::try_from(total).ok().filter(|total| *total <= u32::MAX as usize);
    Ok((Some(first), total.ok_or_else(|| malformed("a column has more checksum units than a data file can hold"))?))
}
