//! Encode and decode blocks with each codec supported in data files. A new codec needs an arm in both functions.

use std::borrow::Cow;

use penstock_codec::block::{lz4, zstd};
use penstock_error::Result;
use penstock_format::datafile::Codec;

/// Encode a block. An empty block is stored as zero bytes, regardless of the codec.
pub fn encode(codec: Codec, raw: Cow<'_, [u8]>) -> Result<Cow<'_, [u8]>> {
    Ok(match codec {
        Codec::None => raw,
        _ if raw.is_empty() => raw,
        Codec::Lz4 => Cow::Owned(lz4::encode(&raw)),
        Codec::Zstd => Cow::Owned(zstd::encode(&raw)?),
    })
}

/// Decode a block to exactly `raw_bytes` bytes.
pub fn decode(codec: Codec, stored: &[u8], raw_bytes: usize) -> Result<Vec<u8>> {
    match codec {
        Codec::None => Ok(stored.to_vec()),
        _ if raw_bytes == 0 => Ok(Vec::new()),
        Codec::Lz4 => lz4::decode(stored, raw_bytes),
        Codec::Zstd => zstd::decode(stored, raw_bytes),
    }
}
