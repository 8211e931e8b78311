//! Reads that never wait: bytes are returned only if they are cached, sound, and in the kernel's page cache.

use std::ops::Range;
use std::sync::Arc;

use penstock_storage::add;

use crate::cache::Cached;
use crate::drive::{Drive, now_seconds};
use crate::extent::{BLOCK_BYTES, EXTENT_BYTES, Extent, PAGE_BYTES};
use crate::usage::Counts;

impl Cached {
    /// Read bytes of one extent into `out`, which is cut or extended to whole pages, and return where in it the wanted bytes are. Returns None
    /// if some bytes are not cached, do not match their checksums, or would have to be read from the drive. Cost: two calls, and the
    /// checksums. Counts are added by `note_hits`.
    pub fn read_now(&self, name: &str, object_bytes: u64, wanted: Range<u64>, out: &mut Vec<u8>) -> Option<Range<usize>> {
        let (number, pages) = pages_of(object_bytes, &wanted)?;
        let (drive, extent) = self.extent_now(name, object_bytes, number)?;
        let (begin, end) = (wanted.start - number * EXTENT_BYTES, wanted.end - number * EXTENT_BYTES);
        let base = u64::from(pages.start) * PAGE_BYTES;
        out.resize(((u64::from(pages.end) * PAGE_BYTES).min(extent.data_bytes()) - base) as usize, 0);
        if !extent.read_now(pages, out).ok()? {
            return None;
        }
        extent.stamp((begin / BLOCK_BYTES) as u32, now_seconds());
        drive.now.add(end - begin);
        Some((begin - base) as usize..(end - base) as usize)
    }

    /// Return whether bytes of one extent are stored, sound or not. Cost: a call.
    pub fn has(&self, name: &str, object_bytes: u64, wanted: Range<u64>) -> bool {
        let Some((number, pages)) = pages_of(object_bytes, &wanted) else { return false };
        self.extent_now(name, object_bytes, number).is_some_and(|(_, extent)| extent.table(pages).is_ok_and(|table| !table.contains(&0)))
    }

    /// Return an extent and its drive, if the drive may be used now and has the extent.
    fn extent_now(&self, name: &str, object_bytes: u64, number: u64) -> Option<(&Drive, Arc<Extent>)> {
        let key = self.key(name, number as u32);
        let drive = self.drive_of(&key);
        let found = drive.is_usable().then(|| drive.find(&key, Some(object_bytes)).ok().flatten());
        Some((drive, found.flatten()?))
    }

    /// Note that the block with this byte is used, though its bytes did not come from the drive. Cost: none, unless the last note is old.
    pub fn touch(&self, name: &str, object_bytes: u64, at: u64) {
        let number = at / EXTENT_BYTES;
        // A lost note only makes the block look older.
        if let Some((_, extent)) = self.extent_now(name, object_bytes, number) {
            extent.stamp(((at - number * EXTENT_BYTES) / BLOCK_BYTES) as u32, now_seconds());
        }
    }

    /// Add what `read_now` read since the last call to the counts of the store on each drive, and to the counters.
    pub fn note_hits(&self) {
        let counters = self.cold.counters();
        for drive in &self.drives().drives {
            let (hits, hit_bytes) = drive.now.take();
            add(&counters.cache_hits, hits);
            add(&counters.cache_hit_bytes, hit_bytes);
            // The counts of the drive matter less than reads.
            let _ = drive.usage.note(&self.store, &Counts { hits, hit_bytes, ..Counts::default() });
        }
    }
}

/// Return the number of the extent that has all of these bytes, and their pages in it. Returns None if there are none, or not in one extent.
fn pages_of(object_bytes: u64, wanted: &Range<u64>) -> Option<(u64, Range<u32>)> {
    let number = wanted.start / EXTENT_BYTES;
    if wanted.is_empty() || wanted.end > object_bytes || (wanted.end - 1) / EXTENT_BYTES != number {
        return None;
    }
    let base = number * EXTENT_BYTES;
    Some((number, ((wanted.start - base) / PAGE_BYTES) as u32..(wanted.end - base).div_ceil(PAGE_BYTES) as u32))
}
