//! Choose a column's layout in a data file when the column's first samples in a fragment are written.

use penstock_error::Result;
use penstock_format::datafile::{
    COMPRESSED_BLOCK_BYTES, Codec, FIXED_BLOCK_BYTES, Layout, PAGE_ALIGNED_BYTES, SINGLE_BYTES, TILED_BYTES, UNIT_BYTES,
};
use penstock_tensor::{Dtype, Shape};

/// The layout, codec and alignment of a column in a data file.
#[derive(Debug, Clone, Copy)]
pub struct Style {
    pub layout: Layout,
    pub codec: Codec,
    /// Rows per block, or zero if the tail lists each block's first row instead.
    pub rows_per_block: u64,
    pub align: u64,
}

impl Style {
    /// Return the style for tiled samples.
    pub fn tiled(codec: Codec) -> Style {
        Style { layout: Layout::Tiled, codec, rows_per_block: 1, align: 64 }
    }

    /// Return whether samples of this mean size are tiled even if the schema sets no tile.
    pub fn tiles(dtype: Dtype, shape: &Shape, mean_bytes: u64) -> bool {
        dtype != Dtype::Bytes && !shape.0.is_empty() && mean_bytes >= TILED_BYTES
    }

    /// Choose a style by the mean sample size (spec section 6).
    pub fn choose(dtype: Dtype, shape: &Shape, codec: Codec, mean_bytes: u64) -> Result<Style> {
        if Style::tiles(dtype, shape, mean_bytes) {
            return Ok(Style::tiled(codec));
        }
        if shape.is_fixed() {
            let cell = shape.fixed_bytes(dtype)?;
            let block_bytes = if codec == Codec::None { FIXED_BLOCK_BYTES } else { COMPRESSED_BLOCK_BYTES } as u64;
            let packed = cell < SINGLE_BYTES || (codec != Codec::None && cell < block_bytes);
            let rows_per_block = if packed { (block_bytes / cell.max(1)).max(1) } else { 1 };
            let align = if packed {
                8
            } else if cell >= PAGE_ALIGNED_BYTES || (cell >= UNIT_BYTES && cell.is_multiple_of(4096)) {
                4096
            } else {
                64
            };
            return Ok(Style { layout: Layout::Fixed, codec, rows_per_block, align });
        }
        Ok(match mean_bytes < SINGLE_BYTES {
            true => Style { layout: Layout::Packed, codec, rows_per_block: 0, align: 8 },
            false => Style { layout: Layout::Single, codec, rows_per_block: 1, align: 8 },
        })
    }

    /// Return the alignment of a block of `raw_bytes` bytes.
    pub fn align_of(&self, raw_bytes: u64) -> u64 {
        if raw_bytes >= PAGE_ALIGNED_BYTES { 4096 } else { self.align }
    }
}
