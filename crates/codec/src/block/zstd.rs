//! zstd, one frame per block.

use penstock_error::{Error, Result};

use super::{exact, undecodable};

/// zstd's default level.
const LEVEL: i32 = 3;

/// Compress with zstd into one frame. Source: RFC 8878.
pub fn encode(raw: &[u8]) -> Result<Vec<u8>> {
    ::zstd::bulk::compress(raw, LEVEL)
        .map_err(|error| Error::new("internal", format!("cannot compress zstd block: {error}")))
}

/// Decompress a zstd frame to exactly `raw_bytes` bytes. Allocates nothing until the frame confirms that length.
pub fn decode(stored: &[u8], raw_bytes: usize) -> Result<Vec<u8>> {
    match ::zstd::zstd_safe::get_frame_content_size(stored) {
        Ok(Some(size)) if size == raw_bytes as u64 => {}
        declared => {
            let declared = declared.ok().flatten().map_or("no size".to_owned(), |size| format!("{size} bytes"));
            return Err(undecodable(
                "zstd",
                format!("the frame header declares {declared}, expected {raw_bytes} bytes"),
            ));
        }
    }
    let out = ::zstd::bulk::decompress(stored, raw_bytes).map_err(|error| undecodable("zstd", error))?;
    exact(out.len(), out, "zstd")
}
