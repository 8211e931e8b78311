//! Block codecs, one per file. Lengths come from the tail index, never from the data. CONTRIBUTING.md lists the changes that a
//! new codec needs.

pub mod lz4;
pub mod zstd;

use penstock_error::{Error, Result};

/// Check that a decoder returned as many bytes as the tail index says.
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
        assert_eq!(lz4::decode(&lz4::encode(&raw), raw.len())?, raw);
        assert_eq!(zstd::decode(&zstd::encode(&raw)?, raw.len())?, raw);
        for wrong in [0, raw.len() - 1, raw.len() + 1] {
            assert!(lz4::decode(&lz4::encode(&raw), wrong).is_err());
            assert!(zstd::decode(&zstd::encode(&raw)?, wrong).is_err());
        }
        Ok(())
    }
}
