//! Data file: header, tail index, footer, and the packed block (spec section 6).

use std::sync::Arc;

use bytes::Bytes;
use penstock_error::{Error, Result};
use penstock_tensor::window::{self, Grid};
use penstock_tensor::{Dtype, MAX_DIMENSIONS, Shape};

use crate::cursor::{Cursor, Strings, Writer, crc, malformed};
use crate::ids::Id;
use crate::ints::{IntArray, pack, unpack, width_for};

pub const MAGIC: &[u8; 8] = b"PNSTKD1\n";
pub const HEADER_BYTES: u64 = 24;
pub const FOOTER_BYTES: u64 = 32;
/// Number of stored bytes that one checksum covers.
pub const UNIT_BYTES: u64 = 64 << 10;
/// Target size of a block of small fixed-shape samples. A cold read of one sample reads the whole block. Each block adds four bytes to
/// the tail.
pub const FIXED_BLOCK_BYTES: usize = 4 << 10;
/// Target size of a block of ragged values. Each block adds sixteen bytes to the tail.
pub const PACKED_BLOCK_BYTES: usize = 8 << 10;
/// Target size of a block before compression. Smaller blocks compress worse, because they contain fewer repetitions.
pub const COMPRESSED_BLOCK_BYTES: usize = 16 << 10;
/// A data file closes when its blocks reach this size.
pub const FILE_BYTES: u64 = 256 << 20;
/// A data file also closes when its tail index reaches about this size.
pub const TAIL_BYTES: usize = 1 << 20;
/// A column whose mean value has at least this size gets separate data files.
pub const OWN_FILE_BYTES: u64 = 64 << 10;
/// Samples of at least this mean size are stored in one block each.
pub const SINGLE_BYTES: u64 = 1 << 10;
/// Maximum number of blocks of a chunk. A tail that claims more is forged, because the entries would not fit into a tail.
pub const MAX_BLOCKS: u64 = 1 << 22;
/// Tensors of at least this mean size are tiled.
pub const TILED_BYTES: u64 = 8 << 20;
/// Values of at least this size start on a 4,096-byte boundary.
pub const PAGE_ALIGNED_BYTES: u64 = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Layout {
    Fixed = 0,
    Packed = 1,
    Single = 2,
    Tiled = 3,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Codec {
    None = 0,
    Lz4 = 1,
    Zstd = 2,
}

/// Return the number of checksum units of a block.
pub fn units(stored_bytes: u64) -> u64 {
    stored_bytes.div_ceil(UNIT_BYTES)
}

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
    /// First checksum unit of each block. None if every block has exactly one unit.
    pub first_unit: Option<Vec<u32>>,
    pub free: Vec<IntArray>,
    /// Sides of a tile; empty unless the chunk is tiled.
    pub tile: Vec<u64>,
    /// Block of each sample's first tile, then the number of all tiles. None unless the chunk is tiled.
    pub first_tile: Option<IntArray>,
    pub validity: Option<Bytes>,
    pub dictionary: Option<Strings>,
}

impl Chunk {
    /// Return the bytes of memory that this chunk occupies in addition to the tail.
    pub fn held_bytes(&self) -> u64 {
        let units = self.first_unit.as_ref().map_or(0, |first| size_of_val(&first[..]));
        let shape = size_of_val(&self.shape.0[..]) + size_of_val(&self.free[..]) + size_of_val(&self.tile[..]);
        (size_of::<Chunk>() + units + shape) as u64 + self.dictionary.as_ref().map_or(0, Strings::held_bytes)
    }

    pub fn blocks(&self) -> usize {
        self.offset.len()
    }

    /// Return the number of bytes from the start of the first block to the end of the last one.
    pub fn span_bytes(&self) -> u64 {
        let Some(last) = self.blocks().checked_sub(1) else { return 0 };
        (self.offset.get(last) + self.stored_bytes.get(last)).saturating_sub(self.offset.get(0))
    }

    /// Return the shape of a sample whose free dimensions are stored in the tail (layouts 0, 2 and 3).
    pub fn shape_of(&self, row: u64) -> Vec<u64> {
        let free: Vec<u64> = self.free.iter().map(|sizes| sizes.get(row as usize)).collect();
        self.shape.fill(&free)
    }

    /// Return the tile grid of a sample and the block of its first tile. None if the chunk is not tiled.
    pub fn grid_of(&self, row: u64) -> Option<(Grid, u64)> {
        self.first_tile.as_ref().map(|first| (Grid::new(&self.shape_of(row), &self.tile), first.get(row as usize)))
    }

    /// Return the block of a row and the row's index within the block. For tiled samples, call `grid_of` instead.
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

    /// Return the first row of a block. The chunk must not be tiled.
    pub fn first_row_of(&self, block: usize) -> u64 {
        self.first_row.as_ref().map_or(block as u64 * self.rows_per_block, |first| first.get(block))
    }

    /// Return the number of rows in a block.
    pub fn rows_of(&self, block: usize) -> u64 {
        match &self.first_row {
            None => (self.samples - block as u64 * self.rows_per_block).min(self.rows_per_block),
            Some(first) => (if block + 1 < self.blocks() { first.get(block + 1) } else { self.samples }) - first.get(block),
        }
    }

    #[inline]
    pub fn is_valid(&self, row: u64) -> bool {
        match &self.validity {
            None => true,
            Some(bits) => bits[(row / 8) as usize] >> (row % 8) & 1 == 1,
        }
    }

    /// Return the index of a block's first checksum unit and the number of its units.
    #[inline]
    pub fn units_of(&self, block: usize) -> (usize, usize) {
        match &self.first_unit {
            None => (block, usize::from(self.stored_bytes.get(block) > 0)),
            Some(first) => (first[block] as usize, units(self.stored_bytes.get(block)) as usize),
        }
    }

    fn read(cursor: &mut Cursor, samples: u64, data_end: u64) -> Result<Chunk> {
        let column = cursor.varint()?;
        let dtype = cursor.u8()?;
        let dtype = Dtype::from_code(dtype)
            .ok_or_else(|| Error::new("unknown-codec", format!("column {column} has dtype {dtype}, which this release does not know")))?;
        let layout = match cursor.u8()? {
            0 => Layout::Fixed,
            1 => Layout::Packed,
            2 => Layout::Single,
            3 => Layout::Tiled,
            other => {
                return Err(Error::new("unknown-feature", format!("column {column} has layout {other}, which this release does not know"))
                    .hint("upgrade Penstock"));
            }
        };
        let codec = match cursor.u8()? {
            0 => Codec::None,
            1 => Codec::Lz4,
            2 => Codec::Zstd,
            other => {
                return Err(Error::new(
                    "unknown-codec",
                    format!("column {column} is stored with codec {other}, which this release does not know"),
                )
                .hint("upgrade Penstock"));
            }
        };
        let shape = Shape(cursor.list(1, |cursor| Ok(cursor.varint()?.checked_sub(1)))?);
        let cell = shape.fixed_bytes(dtype).map_err(|error| malformed(error.message()))?;
        let fits = match layout {
            Layout::Fixed => shape.is_fixed(),
            Layout::Packed | Layout::Single => !shape.is_fixed(),
            Layout::Tiled => !shape.0.is_empty() && dtype != Dtype::Bytes,
        };
        if shape.0.len() > MAX_DIMENSIONS || !fits {
            return Err(malformed(format!("column {column} has shape {:?}, which is invalid in layout {layout:?}", shape.0)));
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
        let first_row = if rows_per_block == 0 { Some(IntArray::read(cursor, blocks)?) } else { None };
        let ordinals = IntArray::read(cursor, blocks)?;
        if ordinals.iter().any(|ordinal| ordinal != 0) {
            return Err(Error::new("unknown-feature", format!("column {column} uses foreign objects, which this release cannot read"))
                .hint("upgrade Penstock"));
        }
        let offset = IntArray::read(cursor, blocks)?;
        let stored_bytes = IntArray::read(cursor, blocks)?;
        let raw_bytes = if codec == Codec::None { None } else { Some(IntArray::read(cursor, blocks)?) };
        let (first_unit, unit_count) = count_units(&stored_bytes)?;
        let crcs = IntArray::read(cursor, unit_count)?;
        let free = match layout {
            // For dtype bytes, the only free dimension is the length of the value.
            Layout::Single | Layout::Tiled if dtype != Dtype::Bytes => {
                (0..shape.free_count()).map(|_| IntArray::read(cursor, samples as usize)).collect::<Result<_>>()?
            }
            _ => Vec::new(),
        };
        let (tile, first_tile) = match layout {
            Layout::Tiled => (cursor.list(1, Cursor::varint)?, Some(IntArray::read(cursor, samples as usize + 1)?)),
            _ => (Vec::new(), None),
        };
        let validity = if cursor.flag()? { Some(cursor.take(samples.div_ceil(8) as usize)?) } else { None };
        let dictionary = if cursor.flag()? { Some(cursor.strings()?) } else { None };
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
        };
        chunk.check(cell, data_end)?;
        Ok(chunk)
    }

    /// Check what later reads rely on: blocks cover all rows and lie inside the file, and lengths match shapes.
    fn check(&self, cell: u64, data_end: u64) -> Result<()> {
        let column = self.column;
        let bad = |text: String| Err(malformed(format!("column {column}: {text}")));
        let blocks = self.blocks() as u64;
        match &self.first_row {
            None => {
                if self.layout != Layout::Tiled && self.rows_per_block != 0 && blocks != self.samples.div_ceil(self.rows_per_block) {
                    return bad(format!("{blocks} blocks of {} rows for {} samples", self.rows_per_block, self.samples));
                }
            }
            Some(first) => {
                let mut last = None;
                for (index, row) in first.iter().enumerate() {
                    if (index == 0 && row != 0) || last.is_some_and(|last| row <= last) || row >= self.samples {
                        return bad(format!("block {index} begins at row {row}"));
                    }
                    last = Some(row);
                }
            }
        }
        if matches!(self.layout, Layout::Single | Layout::Tiled) && self.rows_per_block != 1 {
            return bad("a single-sample layout does not have one row per block".into());
        }
        self.check_tiles()?;
        // For equally spaced blocks of equal size, it suffices to check the first and the last block.
        let even = self.first_row.is_none()
            && self.raw_bytes.is_none()
            && self.layout == Layout::Fixed
            && self.offset.rises_evenly()
            && matches!(self.stored_bytes, IntArray::Linear { step: 0, .. });
        let checked: Vec<usize> = if even && blocks > 2 { vec![0, self.blocks() - 1] } else { (0..self.blocks()).collect() };
        for block in checked {
            let (offset, stored) = (self.offset.get(block), self.stored_bytes.get(block));
            if offset < HEADER_BYTES || offset.checked_add(stored).is_none_or(|end| end > data_end) {
                return bad(format!("block {block} at offset {offset} has {stored} bytes, but the data ends at {data_end}"));
            }
            let raw = self.raw_bytes.as_ref().map_or(stored, |raw| raw.get(block));
            // The spec limits a block to 2^40 bytes, and lz4 cannot expand beyond this ratio. A forged length must not cause a large
            // allocation.
            if raw > 1 << 40 || (self.codec == Codec::Lz4 && raw / 256 > stored + 16) {
                return bad(format!("block {block} of {stored} bytes claims to hold {raw} bytes"));
            }
            if self.layout == Layout::Fixed && self.rows_of(block).checked_mul(cell) != Some(raw) {
                return bad(format!("block {block} has {raw} bytes, expected {} samples of {cell} bytes", self.rows_of(block)));
            }
            if self.layout == Layout::Single && self.dtype != Dtype::Bytes && self.is_valid(block as u64) {
                let wanted = self.free.iter().try_fold(cell, |product, free| product.checked_mul(free.get(block)));
                if wanted != Some(raw) {
                    return bad(format!("sample {block} has {raw} bytes, its shape requires {wanted:?}"));
                }
            }
        }
        Ok(())
    }

    /// Check that every sample has the tiles that its shape requires, and that each tile has the size of its window.
    fn check_tiles(&self) -> Result<()> {
        let Some(first) = &self.first_tile else { return Ok(()) };
        let bad = |text: String| Err(malformed(format!("column {}: {text}", self.column)));
        if self.tile.len() != self.shape.0.len() || self.tile.contains(&0) {
            return bad(format!("tiles of {:?} for the shape {:?}", self.tile, self.shape.0));
        }
        if first.get(0) != 0 || first.get(self.samples as usize) != self.blocks() as u64 {
            return bad(format!("{} blocks, but its samples have {} tiles", self.blocks(), first.get(self.samples as usize)));
        }
        for row in 0..self.samples {
            let (begin, end) = (first.get(row as usize), first.get(row as usize + 1));
            let shape = self.shape_of(row);
            let grid = Grid::new(&shape, &self.tile);
            let wanted = if self.is_valid(row) { grid.tiles() } else { Some(0) };
            if end.checked_sub(begin) != wanted || end > self.blocks() as u64 {
                return bad(format!("sample {row} has tiles {begin}..{end}, its shape requires {wanted:?} tiles"));
            }
            // If all tiles have the same size, it suffices to check one.
            let alike = matches!(self.raw_bytes.as_ref().unwrap_or(&self.stored_bytes), IntArray::Linear { step: 0, .. })
                && shape.iter().zip(&self.tile).all(|(size, side)| size % side == 0);
            for block in (begin..end).take(if alike { 1 } else { usize::MAX }) {
                let elements = window::elements(&grid.tile(block - begin));
                let raw = self.raw_bytes.as_ref().unwrap_or(&self.stored_bytes).get(block as usize);
                if elements.and_then(|elements| elements.checked_mul(self.dtype.size() as u64)) != Some(raw) {
                    return bad(format!("tile {} of sample {row} has {raw} bytes, its window has {elements:?} elements", block - begin));
                }
            }
        }
        Ok(())
    }
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
        first.push(u32::try_from(total).map_err(|_| malformed("more checksum units than a data file can have"))?);
        total = total.saturating_add(units(bytes));
    }
    // When the crc array is read, the remaining bytes bound this count again.
    let total = usize::try_from(total).ok().filter(|total| *total <= u32::MAX as usize);
    Ok((Some(first), total.ok_or_else(|| malformed("more checksum units than a data file can have"))?))
}

/// The tail index: the locations of all blocks of a data file.
#[derive(Debug, Clone)]
pub struct Tail {
    pub samples: u64,
    pub chunks: Vec<Chunk>,
}

impl Tail {
    /// Parse a tail whose checksum is verified, of a file whose blocks end at `data_end`.
    pub fn parse(bytes: Bytes, data_end: u64) -> Result<Tail> {
        let mut cursor = Cursor::new(bytes);
        let samples = cursor.varint()?;
        if samples > 1 << 40 {
            return Err(malformed(format!("a data file claims to have {samples} samples, expected at most 2^40")));
        }
        if cursor.varint()? != 0 {
            return Err(Error::new("unknown-feature", "a data file refers to foreign objects, which this release cannot read")
                .hint("upgrade Penstock"));
        }
        let chunks = cursor.list(8, |cursor| Chunk::read(cursor, samples, data_end))?;
        cursor.end()?;
        Ok(Tail { samples, chunks })
    }
}

/// One column of a tail that is being written.
#[derive(Debug, Clone)]
pub struct ChunkBuilder {
    pub column: u64,
    pub dtype: Dtype,
    pub layout: Layout,
    pub codec: Codec,
    pub shape: Shape,
    pub rows_per_block: u64,
    pub first_row: Vec<u64>,
    pub offset: Vec<u64>,
    pub stored_bytes: Vec<u64>,
    pub raw_bytes: Vec<u64>,
    pub crcs: Vec<u64>,
    pub free: Vec<Vec<u64>>,
    pub tile: Vec<u64>,
    pub first_tile: Vec<u64>,
    pub validity: Option<Vec<bool>>,
    pub dictionary: Option<Vec<Arc<str>>>,
}

impl ChunkBuilder {
    fn write(&self, writer: &mut Writer) {
        writer.varint(self.column);
        writer.u8(self.dtype as u8);
        writer.u8(self.layout as u8);
        writer.u8(self.codec as u8);
        writer.list(&self.shape.0, |writer, size| writer.varint(size.map_or(0, |size| size + 1)));
        writer.varint(self.rows_per_block);
        writer.varint(self.offset.len() as u64);
        if self.rows_per_block == 0 {
            IntArray::write(writer, &self.first_row);
        }
        IntArray::write(writer, &vec![0; self.offset.len()]);
        IntArray::write(writer, &self.offset);
        IntArray::write(writer, &self.stored_bytes);
        if self.codec != Codec::None {
            IntArray::write(writer, &self.raw_bytes);
        }
        IntArray::write(writer, &self.crcs);
        for free in &self.free {
            IntArray::write(writer, free);
        }
        if self.layout == Layout::Tiled {
            writer.list(&self.tile, |writer, side| writer.varint(*side));
            IntArray::write(writer, &self.first_tile);
        }
        match &self.validity {
            None => writer.u8(0),
            Some(valid) => {
                writer.u8(1);
                let mut bits = vec![0u8; valid.len().div_ceil(8)];
                for (index, _) in valid.iter().enumerate().filter(|(_, valid)| **valid) {
                    bits[index / 8] |= 1 << (index % 8);
                }
                writer.0.extend_from_slice(&bits);
            }
        }
        match &self.dictionary {
            None => writer.u8(0),
            Some(words) => {
                writer.u8(1);
                writer.list(words, |writer, word| writer.string(word));
            }
        }
    }

    /// Estimate how many bytes this column occupies in the tail.
    pub fn tail_bytes(&self) -> usize {
        self.offset.len() * 8
            + self.first_row.len() * 4
            + self.crcs.len() * 4
            + self.free.iter().map(|free| free.len() * 4).sum::<usize>()
            + self.first_tile.len() * 4
            + 64
    }
}

/// Encode the header of a data file.
pub fn write_header(id: Id) -> Vec<u8> {
    let mut header = MAGIC.to_vec();
    header.extend_from_slice(&id.0);
    header
}

/// Encode tail and footer of a file whose blocks end at `data_end`. Returns the bytes, the length of the tail and its crc.
pub fn write_tail(samples: u64, chunks: &[ChunkBuilder], data_end: u64) -> (Vec<u8>, u64, u32) {
    let mut writer = Writer::default();
    writer.varint(samples);
    writer.varint(0);
    writer.list(chunks, |writer, chunk| chunk.write(writer));
    let (tail_bytes, tail_crc) = (writer.0.len() as u64, crc(&writer.0));
    writer.u64(data_end);
    writer.u32(tail_bytes as u32);
    writer.u32(tail_crc);
    writer.u64(data_end + tail_bytes + FOOTER_BYTES);
    writer.0.extend_from_slice(&[1, 0, 0, 0]);
    writer.0.extend_from_slice(b"PNSD");
    (writer.0, tail_bytes, tail_crc)
}

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

/// The positions of the parts of a packed block. `parse` checks them once per block, so `range` and `free` are cheap.
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
            return Err(malformed(format!("a packed block has invalid ends of {width} bytes or invalid flags {flags:#x}")));
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
                .ok_or_else(|| malformed("a packed block is shorter than its dimensions"))?;
        }
        let ends = at;
        let values = rows
            .checked_mul(width as usize)
            .and_then(|bytes| bytes.checked_add(at))
            .ok_or_else(|| malformed("a packed block is shorter than its ends"))?;
        let values = values.next_multiple_of(dtype.size());
        if values > block.len() {
            return Err(malformed("a packed block is shorter than its ends"));
        }
        let packed = Packed { width, ends, values, free };
        let last = if rows == 0 { 0 } else { unpack(&block[ends..], width, rows - 1) };
        if last != (block.len() - values) as u64 {
            return Err(malformed(format!("a packed block ends at {last}, but has {} bytes of values", block.len() - values)));
        }
        Ok(packed)
    }

    /// Return the byte range of a row. Fails if the ends descend or exceed the block.
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

    /// Append the free dimensions of a row whose value has `bytes` bytes to `out`.
    pub fn free(&self, block: &[u8], row: usize, bytes: usize, cell: u64, out: &mut Vec<u64>, free_count: usize) -> Result<()> {
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
            return Err(malformed(format!("row {row} of a packed block has {bytes} bytes, its shape requires {product}")));
        }
        Ok(())
    }
}
