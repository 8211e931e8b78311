//! lz4 in the block format, without a length prefix.

use penstock_error::Result;

use super::{exact, undecodable};

/// Compress with lz4 in the block format, without a length prefix. Source: lz4_Block_format.md.
pub fn encode(raw: &[u8]) -> Vec<u8> {
    lz4_flex::block::compress(raw)
}

/// Decompress an lz4 block to exactly `raw_bytes` bytes.
pub fn decode(stored: &[u8], raw_bytes: usize) -> Result<Vec<u8>> {
    let mut out = vec![0; raw_bytes];
    let count = lz4_flex::block::decompress_into(stored, &mut out).map_err(|error| undecodable("lz4", error))?;
    exact(count, out, "lz4")
}
