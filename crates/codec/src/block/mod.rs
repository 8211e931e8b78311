//! Block codecs, one per file. Lengths come from the tail index, never from the data. CONTRIBUTING.md lists the changes that a
//! new codec needs.

mod checked;
pub mod lz4;
pub mod zstd;

#[cfg(test)]
mod tests {
    use penstock_error::Result;

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
