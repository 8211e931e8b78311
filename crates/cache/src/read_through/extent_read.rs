//! The part of a read that concerns one extent: which pages are missing, their locks and their space, and how fetched pages are stored.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;

use crate::drive::{Drive, PENDING, now_seconds};
use crate::extent::pages::{join, runs_of};
use crate::extent::{Extent, Key, PAGE_BYTES, STRETCH_PAGES, bytes_of};
use crate::flight::Flight;
use crate::registry::Registered;
use crate::room;
use crate::usage::Counts;

/// The pieces of one extent that a read wants.
pub struct ExtentRead<'a> {
    pub drive: &'a Drive,
    pub key: Key,
    pub object_bytes: u64,
    pub extent: Option<Arc<Extent>>,
    /// Where bytes begin that were fetched by this read, in ascending order, and the bytes.
    pub fetched: Vec<(u64, Bytes)>,
    /// The same for bytes that were fetched ahead, and are not kept yet.
    pub ahead: Vec<(u64, Bytes)>,
    /// Pages that open pieces still need.
    pub missing: Vec<Range<u32>>,
    /// Bytes that open pieces still need.
    pub needed: Vec<Range<u64>>,
    /// Pages whose stored checksum did not match. Their bytes are reserved already.
    pub corrupt: BTreeSet<u32>,
    pub events: Counts,
}

/// The runs that an operation has locked, and pages that another operation has locked.
pub type Locked = (Vec<Range<u32>>, Option<Range<u32>>);

/// Return which of ascending chunks has the byte at `begin`, and where in it. Each chunk has the place of its first byte.
pub fn chunk_at(chunks: &[(u64, Bytes)], begin: u64) -> Option<(&Bytes, usize)> {
    let (at, bytes) = &chunks[chunks.partition_point(|(at, _)| *at <= begin).checked_sub(1)?];
    let skip = (begin - at) as usize;
    (skip < bytes.len()).then_some((bytes, skip))
}

impl<'a> ExtentRead<'a> {
    /// Begin a read of an extent that may be missing.
    pub fn new(drive: &'a Drive, key: Key, object_bytes: u64) -> ExtentRead<'a> {
        let extent = drive.succeeded(drive.find_usable(&key, Some(object_bytes))).flatten();
        let (fetched, ahead, missing, needed, corrupt, events) = Default::default();
        ExtentRead { drive, key, object_bytes, extent, fetched, ahead, missing, needed, corrupt, events }
    }

    pub fn is_of(&self, name: &str, extent: u32) -> bool {
        self.key.extent == extent && self.key.name() == name
    }

    /// Begin an operation that keeps pages on the drive of this part. The locks are missing while another process counts again.
    pub fn begin(&self) -> std::io::Result<(Option<Flight>, Registered)> {
        Ok((self.drive.flight()?, Registered::new(&self.drive.part(PENDING), self.key.store().as_bytes())?))
    }

    /// Take the runs of pages that open pieces need, without repetitions. Gaps of up to `gap_pages` between them are added.
    pub fn wanted_runs(&mut self, gap_pages: u32) -> Vec<Range<u32>> {
        let mut missing = std::mem::take(&mut self.missing);
        missing.sort_unstable_by_key(|pages| pages.start);
        let mut runs: Vec<Range<u32>> = Vec::new();
        missing.into_iter().for_each(|pages| join(&mut runs, pages, gap_pages));
        self.lacking(&runs, self.extent.as_deref())
    }

    /// Return the pages of these runs that are neither fetched nor cached.
    fn lacking(&self, runs: &[Range<u32>], extent: Option<&Extent>) -> Vec<Range<u32>> {
        let mut lacking: Vec<Range<u32>> = Vec::new();
        for run in runs {
            let table = extent.and_then(|extent| extent.table(run.clone()).ok());
            for page in run.clone() {
                let is_cached = table
                    .as_ref()
                    .is_some_and(|table| table[(page - run.start) as usize] != 0 && !self.corrupt.contains(&page));
                if !is_cached && !self.has_fetched(page) {
                    join(&mut lacking, page..page + 1, 0);
                }
            }
        }
        lacking
    }

    fn has_fetched(&self, page: u32) -> bool {
        let Range { start: begin, end } = bytes_of(&(page..page + 1));
        let before_end = &self.fetched[..self.fetched.partition_point(|(at, _)| *at < end)];
        before_end.last().is_some_and(|(at, bytes)| at + bytes.len() as u64 > begin)
    }

    /// Return the bytes of a run of pages that are needed, without those before the first and behind the last. `needed` is sorted.
    pub fn needed_of(&self, pages: &Range<u32>) -> Range<u64> {
        let Range { start: begin, end } = bytes_of(pages);
        let until = self.needed.partition_point(|needed| needed.start < end);
        let inside = self.needed[..until].iter().rev().take_while(|needed| needed.end > begin);
        let (first, last) =
            inside.fold((end, begin), |(first, last), needed| (first.min(needed.start), last.max(needed.end)));
        first.max(begin)..last.min(end).max(begin)
    }

    /// Lock the pages that no other operation has locked, and leave out those that were cached in the meantime. Returns None if the extent cannot be
    /// written to.
    pub fn lock(&mut self, missing: &[Range<u32>], flight: Option<&Flight>) -> std::io::Result<Option<Locked>> {
        let Some(flight) = flight.filter(|_| self.drive.is_writable()) else { return Ok(None) };
        let Some(extent) = room::make(self.drive, &self.key, self.object_bytes)? else { return Ok(None) };
        let (mut locked, mut busy): (Vec<Range<u32>>, Option<Range<u32>>) = (Vec::new(), None);
        for pages in missing {
            if flight.try_lock(extent.hash, pages.clone())? {
                locked.push(pages.clone());
                continue;
            }
            for page in pages.clone() {
                if flight.try_lock(extent.hash, page..page + 1)? {
                    join(&mut locked, page..page + 1, 0);
                } else {
                    busy.get_or_insert(page..page + 1);
                }
            }
        }
        if !extent.is_linked() {
            // It was removed after it was opened.
            self.drive.forget(&self.key);
            return Ok(None);
        }
        let lacking = self.lacking(&locked, Some(&extent));
        self.extent = Some(extent);
        Ok(Some((lacking, busy)))
    }

    /// Return the bytes to reserve for pages. Those of corrupt pages are reserved already.
    fn reserved_bytes(&self, pages: &Range<u32>) -> u64 {
        pages.clone().filter(|page| !self.corrupt.contains(page)).count() as u64 * PAGE_BYTES
    }

    /// Reserve the bytes of locked pages as far as there is room. Returns runs of pages, and whether each one may be kept.
    pub fn reserve(&self, locked: Vec<Range<u32>>) -> Vec<(Range<u32>, bool)> {
        let bytes = locked.iter().map(|pages| self.reserved_bytes(pages)).sum();
        // A large read must not push out everything else at once.
        let is_small = self.drive.usage.total().is_ok_and(|total| bytes <= total.budget_bytes / 4);
        if is_small && self.has_room(bytes) {
            return locked.into_iter().map(|pages| (pages, true)).collect();
        }
        let mut has_room = true;
        let cut = locked.iter().flat_map(|pages| {
            pages.clone().step_by(STRETCH_PAGES as usize).map(|first| first..pages.end.min(first + STRETCH_PAGES))
        });
        let reserve = |pages: Range<u32>| {
            has_room = has_room && self.has_room(self.reserved_bytes(&pages));
            (pages, has_room)
        };
        cut.map(reserve).collect()
    }

    fn has_room(&self, bytes: u64) -> bool {
        self.drive.succeeded(room::reserve(self.drive, self.key.store(), bytes)).unwrap_or(false)
    }

    /// Release the bytes of pages that were reserved but not stored.
    pub fn give_back(&self, pages: Range<u32>) {
        self.drive.succeeded(self.drive.usage.release(self.key.store(), self.reserved_bytes(&pages), 0));
    }

    /// Return bytes that were fetched ahead. Copies them if they were fetched in several pieces.
    pub fn held(&self, begin: u64, bytes: usize) -> Option<Bytes> {
        let (chunk, skip) = chunk_at(&self.ahead, begin)?;
        if chunk.len() - skip >= bytes {
            return Some(chunk.slice(skip..skip + bytes));
        }
        let mut all = Vec::with_capacity(bytes);
        while all.len() < bytes {
            let (chunk, skip) = chunk_at(&self.ahead, begin + all.len() as u64)?;
            all.extend_from_slice(&chunk[skip..chunk.len().min(skip + bytes - all.len())]);
        }
        Some(all.into())
    }

    /// Read cached pages, which may give way before the others are kept.
    pub fn copy_cached(&mut self) -> std::io::Result<()> {
        let Some(extent) = &self.extent else { return Ok(()) };
        for run in &self.missing {
            let table = extent.table(run.clone())?;
            for (pages, crcs) in runs_of(run.start, &table).filter(|(_, crcs)| crcs[0] != 0) {
                let mut bytes = vec![0; extent.bytes_in(&pages)];
                let sound_pages = extent.read(pages.start, crcs, &mut bytes)?;
                bytes.truncate(sound_pages * PAGE_BYTES as usize);
                if sound_pages > 0 {
                    self.fetched.push((bytes_of(&pages).start, bytes.into()));
                }
            }
        }
        self.fetched.sort_unstable_by_key(|(begin, _)| *begin);
        Ok(())
    }

    /// Take fetched pages, and store them if there is room for them.
    pub fn took(&mut self, pages: Range<u32>, begin: u64, bytes: Bytes, keep: bool) {
        let stored = match self.extent.as_ref().filter(|_| keep) {
            None => Ok(false),
            Some(extent) => extent.write(pages.start, &bytes, now_seconds()).map(|()| true).inspect_err(|_| {
                // Space without a checksum would not be counted.
                let _ = extent.clear(pages.clone());
            }),
        };
        match stored {
            Ok(true) => {}
            Ok(false) => self.events.bypassed_bytes += bytes.len() as u64,
            Err(error) => {
                self.drive.failed(&error);
                self.events.bypassed_bytes += bytes.len() as u64;
                self.give_back(pages.clone());
            }
        }
        self.fetched.push((begin, bytes));
    }
}
