//! Check encoded images before they are stored: the headers, or every pixel.

use penstock_codec::{decode, decode_mask, probe, probe_mask};
use penstock_error::{Error, Result};

use crate::config::Config;
use crate::parallel;

/// How much of an image `append` checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Validate {
    /// Magic, size, channels: finds values that are not images, and decompression bombs.
    Header,
    /// Every pixel: also finds truncated files.
    Decode,
}

/// Check media on all threads. Returns an error for each refused value, else None.
pub fn check<'a>(
    count: usize,
    bytes: usize,
    value: impl Fn(usize) -> Option<&'a [u8]> + Sync,
    mask: bool,
    validate: Validate,
) -> Result<Vec<Option<Error>>> {
    let limits = Config::limits();
    parallel::map(count, bytes, |index| {
        let media = value(index)?;
        let checked = match (validate, mask) {
            (Validate::Header, true) => probe_mask(media, limits).map(|_| ()),
            (Validate::Header, false) => probe(media, limits).map(|_| ()),
            (Validate::Decode, true) => decode_mask(media, limits).map(|_| ()),
            (Validate::Decode, false) => decode(media, limits, false).map(|_| ()),
        };
        checked.err()
    })
}
