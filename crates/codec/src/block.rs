//! The block codecs lz4 (block format) and zstd (frame). Lengths come from the tail index, never from the data.

use penstock_error::{Error, Result};

/// Compress with lz4 in the block format, without a length prefix. Source: lz4_Block_format.md.
pub fn lz4_encode(raw: &[u8]) -> Vec<u8> {
    lz4_flex::block::compress(raw)
}

/// Decompress an lz4 block to exactly `raw_bytes` bytes.
pub fn lz4_decode(stored: &[u8], raw_bytes: usize) -> Result<Vec<u8>> {
    let mut out = vec![0; raw_bytes];
    let count = lz4_flex::block::decompress_into(stored, &mut out).map_err(|error| undecodable("lz4", error))?;
    exact(count, out, "lz4")
}

/// Level 3 is the default of zstd.
const ZSTD_LEVEL: i32 = 3;

/// Compress with zstd into one frame. Source: RFC 8878.
pub fn zstd_encode(raw: &[u8]) -> Result<Vec<u8>> {
    zstd::bulk::compress(raw, ZSTD_LEVEL).map_err(|error| Error::new("internal", format!("cannot compress zstd block: {error}")))
}

/// Decompress a zstd frame to exactly `raw_bytes` bytes. Allocates nothing until the frame confirms that length.
pub fn zstd_decode(stored: &[u8], raw_bytes: usize) -> Result<Vec<u8>> {
    match zstd::zstd_safe::get_frame_content_size(stored) {
        Ok(Some(size)) if size == raw_bytes as u64 => {}
        other => return Err(undecodable("zstd", format!("the frame holds {other:?} bytes, expected {raw_bytes}"))),
    }
    let out = zstd::bulk::decompress(stored, raw_bytes).map_err(|error| undecodable("zstd", error))?;
    exact(out.len(), out, "zstd")
}

fn exact(count: usize, out: Vec<u8>, codec: &str) -> Result<Vec<u8>> {
    if count == out.len() { Ok(out) } else { Err(undecodable(codec, format!("{count} bytes, expected {}", out.len()))) }
}

fn undecodable(codec: &str, error: impl std::fmt::Display) -> Error {
    Error::new("object-malformed", format!("cannot decode {codec} block: {error}")).hint("run `penstock verify`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_come_back_and_wrong_lengths_are_refused() -> Result<()> {
        let raw: Vec<u8> = (0..100_000u32).map(|value| (value / 7) as u8).collect();
        assert_eq!(lz4_decode(&lz4_encode(&raw), raw.len())?, raw);
        assert_eq!(zstd_decode(&zstd_encode(&raw)?, raw.len())?, raw);
        for wrong in [0, raw.len() - 1, raw.len() + 1] {
            assert!(lz4_decode(&lz4_encode(&raw), wrong).is_err());
            assert!(zstd_decode(&zstd_encode(&raw)?, wrong).is_err());
        }
        Ok(())
    }
}
