//! Reads that never wait: bytes are returned only if they are cached, sound, and in the kernel's page cache.

use std::ops::Range;
use std::sync::Arc;

use penstock_storage::add;

use crate::cache::Cached;
use crate::drive::{Drive, now_seconds};
use crate::extent::pages::{extents_of, pages_of};
use crate::extent::{EXTENT_BYTES, Extent, STRETCH_BYTES, bytes_of};
use crate::usage::Counts;

impl Cached {
    /// Read bytes of one extent into `out`, which is cut or extended to whole pages, and return where in it the wanted bytes are. Returns None
    /// if some bytes are not cached, do not match their checksums, or would have to be read from the drive. Cost: two calls, and the
    /// checksums. Counts are added by `note_hits`.
    pub fn read_now(
        &self,
        name: &str,
        object_bytes: u64,
        wanted: Range<u64>,
        out: &mut Vec<u8>,
    ) -> Option<Range<usize>> {
        let (number, bytes) = in_one_extent(object_bytes, wanted)?;
        let (drive, extent) = self.extent_now(name, object_bytes, number)?;
        let pages = pages_of(&bytes);
        let base = bytes_of(&pages).start;
        out.resize(extent.bytes_in(&pages), 0);
        if !extent.read_now(pages, out).ok()? {
            return None;
        }
        extent.stamp((bytes.start / STRETCH_BYTES) as u32, now_seconds());
        drive.now.add(bytes.end - bytes.start);
        Some((bytes.start - base) as usize..(bytes.end - base) as usize)
    }

    /// Return whether bytes of one extent are stored, sound or not. Cost: a call.
    pub fn has(&self, name: &str, object_bytes: u64, wanted: Range<u64>) -> bool {
        let Some((number, bytes)) = in_one_extent(object_bytes, wanted) else { return false };
        let Some((_, extent)) = self.extent_now(name, object_bytes, number) else { return false };
        extent.table(pages_of(&bytes)).is_ok_and(|table| !table.contains(&0))
    }

    /// Return an extent and its drive, if the drive may be used now and has the extent.
    fn extent_now(&self, name: &str, object_bytes: u64, number: u32) -> Option<(&Drive, Arc<Extent>)> {
        let key = self.key(name, number);
        let drive = self.drive_of(&key);
        Some((drive, drive.find_usable(&key, Some(object_bytes)).ok()??))
    }

    /// Note that the stretch with this byte is used, though its bytes did not come from the drive. Cost: none, unless the last note is old.
    pub fn touch(&self, name: &str, object_bytes: u64, at: u64) {
        // A lost note only makes the stretch look older.
        if let Some((_, extent)) = self.extent_now(name, object_bytes, (at / EXTENT_BYTES) as u32) {
            extent.stamp((at % EXTENT_BYTES / STRETCH_BYTES) as u32, now_seconds());
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

/// Return the number of the extent that has all of these bytes, and the bytes in it. Returns None if there are none, or not in one extent.
fn in_one_extent(object_bytes: u64, wanted: Range<u64>) -> Option<(u32, Range<u64>)> {
    let is_in_object = wanted.end <= object_bytes;
    let mut extents = extents_of(wanted);
    extents.next().filter(|_| is_in_object && extents.next().is_none())
}
