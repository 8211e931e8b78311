//! The data file (spec section 6): its size constants, layouts and codecs. Reading starts at `Tail::parse`, and writing starts at
//! `ChunkBuilder`.

mod bounds;
mod build;
mod chunk;
mod packed;
mod tail;

use serde::{Deserialize, Serialize};

pub use bounds::{Bounds, Class, HEAD_BYTES, Span};
pub use build::{ChunkBuilder, write_footer, write_header, write_tail};
pub use chunk::Chunk;
pub use packed::{Packed, write_packed};
pub use tail::Tail;

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
/// Target uncompressed size of a compressed block. Smaller blocks compress worse, because they contain fewer repetitions.
pub const COMPRESSED_BLOCK_BYTES: usize = 16 << 10;
/// A data file is closed when its blocks reach this size.
pub const FILE_BYTES: u64 = 256 << 20;
/// A data file is also closed when its tail index reaches about this size.
pub const TAIL_BYTES: usize = 1 << 20;
/// A column gets separate data files if its mean value size is at least this.
pub const OWN_FILE_BYTES: u64 = 64 << 10;
/// Samples whose mean size is at least this get one block each, except compressed fixed-shape samples smaller than a block.
pub const SINGLE_BYTES: u64 = 1 << 10;
/// Maximum number of blocks in a chunk. A tail that claims more is forged, because so many entries would not fit in a tail.
pub const MAX_BLOCKS: u64 = 1 << 22;
/// Maximum size of a block. A value is in one block, unless it is tiled.
pub const MAX_BLOCK_BYTES: u64 = 1 << 40;
/// Tensors whose mean size is at least this are tiled.
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

/// How a block is compressed. The schema stores the codec's name, and a data file stores its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Codec {
    #[default]
    None = 0,
    Lz4 = 1,
    Zstd = 2,
}

impl Codec {
    pub fn from_code(code: u8) -> Option<Codec> {
        [Codec::None, Codec::Lz4, Codec::Zstd].into_iter().find(|codec| *codec as u8 == code)
    }

    /// Return whether `stored` bytes can decompress to `raw` bytes. A forged length must not cause a large allocation.
    pub fn can_hold(self, stored: u64, raw: u64) -> bool {
        let within_ratio = match self {
            Codec::Lz4 => raw / 256 <= stored + 16,
            Codec::None | Codec::Zstd => true,
        };
        raw <= MAX_BLOCK_BYTES && within_ratio
    }
}

/// Return the number of checksum units in a block.
pub fn units(stored_bytes: u64) -> u64 {
    stored_bytes.div_ceil(UNIT_BYTES)
}
