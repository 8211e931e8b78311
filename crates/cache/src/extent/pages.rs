//! The pages of extents: which bytes of an object they have, and which of them are cached by their stored checksums.

use std::ops::Range;

/// The smallest piece that is fetched, kept and verified: a block of the file system, whose space can be freed alone.
pub const PAGE_BYTES: u64 = 4096;
/// A stretch: pages that share one time of last use.
pub const STRETCH_BYTES: u64 = 1 << 20;
pub const STRETCH_PAGES: u32 = (STRETCH_BYTES / PAGE_BYTES) as u32;
pub const EXTENT_BYTES: u64 = 1 << 30;

/// Return each extent that has bytes of a range of an object, and these bytes in the extent.
pub fn extents_of(range: Range<u64>) -> impl Iterator<Item = (u32, Range<u64>)> {
    let extents = range.start / EXTENT_BYTES..range.end.div_ceil(EXTENT_BYTES);
    let parts = extents.map(move |extent| {
        let base = extent * EXTENT_BYTES;
        (extent as u32, range.start.saturating_sub(base)..(range.end - base).min(EXTENT_BYTES))
    });
    parts.filter(|(_, bytes)| !bytes.is_empty())
}

/// Return the pages that have bytes of a range of an extent.
pub fn pages_of(bytes: &Range<u64>) -> Range<u32> {
    (bytes.start / PAGE_BYTES) as u32..bytes.end.div_ceil(PAGE_BYTES) as u32
}

/// Return the bytes of pages of an extent.
pub fn bytes_of(pages: &Range<u32>) -> Range<u64> {
    u64::from(pages.start) * PAGE_BYTES..u64::from(pages.end) * PAGE_BYTES
}

/// Return the bytes of the pages that are cached. A checksum of 0 means that the page is not.
pub fn stored_bytes(crcs: &[u32]) -> u64 {
    crcs.iter().filter(|crc| **crc != 0).count() as u64 * PAGE_BYTES
}

/// Divide the pages from `first` on into runs of which all pages are cached or none is. Returns each run and its checksums.
pub fn runs_of(first: u32, crcs: &[u32]) -> impl Iterator<Item = (Range<u32>, &[u32])> {
    crcs.chunk_by(|one, next| (*one == 0) == (*next == 0)).scan(first, |end, run| {
        let begin = std::mem::replace(end, *end + run.len() as u32);
        Some((begin..*end, run))
    })
}

/// Add pages to the last of ascending runs, or begin another one if more than `gap_pages` lie between them.
pub fn join(runs: &mut Vec<Range<u32>>, pages: Range<u32>, gap_pages: u32) {
    match runs.last_mut() {
        Some(last) if pages.start <= last.end.saturating_add(gap_pages) => last.end = last.end.max(pages.end),
        _ => runs.push(pages),
    }
}
