//! Fetches of a plan. Pages are kept at once, or fetched into memory first, and kept as soon as others have given way.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use penstock_error::Result;
use penstock_storage::RangeRequest;

use super::{PageFetch, Pieces, ReadThrough};
use crate::cache::{Cached, no_answer};
use crate::extent::{EXTENT_BYTES, bytes_of};

/// Pages of one extent: the object's name and length, the number of the extent, and the pages.
pub type ExtentPages = (Arc<str>, u64, u32, Range<u32>);

impl<'a> ReadThrough<'a> {
    /// PageFetch and keep pages. With `gaps`, the pages between them are wanted later as well. Cost: one request per run of pages.
    pub fn warm(cached: &'a Cached, gaps: bool, runs: impl Iterator<Item = ExtentPages>) -> Result<()> {
        ReadThrough::of_runs(cached, true, if gaps { cached.cold.features().request_cost.gap_bytes } else { 0 }, runs)
            .fetch_all()
    }

    /// Read or fetch pages into memory, without locks. Those that cannot be fetched are left out. Cost: one request per run of pages.
    pub fn ahead(cached: &'a Cached, runs: impl Iterator<Item = ExtentPages>) -> ReadThrough<'a> {
        let mut read = ReadThrough::of_runs(cached, false, 0, runs);
        let wanted = read.missing();
        // A failing drive is found by those who write to it.
        read.parts.iter_mut().for_each(|part| drop(part.copy_cached()));
        // What fails is tried again when the pages are to be kept.
        let _ = read.fetch_missing(Instant::now());
        for (part, missing) in read.parts.iter_mut().zip(wanted) {
            (part.ahead, part.missing) = (std::mem::take(&mut part.fetched), missing);
            // The pages may be kept later.
            part.events.bypassed_bytes = 0;
        }
        read.note_events();
        read
    }

    /// Hold the pages that were fetched ahead in memory, until the loader of a plan has read the steps below `until`.
    pub fn pass(mut self, plan: u64, until: u64) {
        for part in &mut self.parts {
            self.cached.prefetched().add(plan, until, &part.key, std::mem::take(&mut part.ahead));
        }
    }

    /// Keep the pages that were fetched ahead, and fetch those that were left out.
    pub fn keep(mut self) -> Result<()> {
        self.keeps = true;
        self.fetch_all()
    }

    /// PageFetch ranges from the store, except those that are in memory. Returns whether each one was, and its pieces.
    pub(super) fn answers(
        &self,
        ranges: Vec<RangeRequest>,
        order: &[Pieces],
        fetches: &[PageFetch],
    ) -> Vec<(bool, Result<Vec<Bytes>>)> {
        let held: Vec<Option<Vec<Bytes>>> =
            ranges.iter().zip(order).map(|(range, pieces)| self.in_memory(range, pieces, fetches)).collect();
        let missing =
            ranges.into_iter().zip(&held).filter(|(_, held)| held.is_none()).map(|(range, _)| range).collect();
        let mut fetched = self.cached.cold.fetch(missing).into_iter();
        let answers = held.into_iter().map(|held| match held {
            Some(pieces) => (true, Ok(pieces)),
            None => (false, fetched.next().unwrap_or_else(no_answer)),
        });
        answers.collect()
    }

    /// Return the pieces of a range, if all of them were fetched into memory by this operation or a plan.
    fn in_memory(&self, range: &RangeRequest, pieces: &Pieces, fetches: &[PageFetch]) -> Option<Vec<Bytes>> {
        let each = range.pieces.iter().zip(pieces).map(|(piece, (number, _, begin))| {
            let part = &self.parts[fetches[*number].part];
            part.held(*begin, piece.bytes).or_else(|| {
                let found = self.cached.prefetched().find(&part.key, *begin)?;
                (found.len() >= piece.bytes).then(|| found.slice(..piece.bytes))
            })
        });
        each.collect()
    }

    fn of_runs(
        cached: &'a Cached,
        keeps: bool,
        gap_bytes: u64,
        runs: impl Iterator<Item = ExtentPages>,
    ) -> ReadThrough<'a> {
        let mut read = ReadThrough::empty(cached, keeps, gap_bytes);
        for (name, object_bytes, extent, pages) in runs {
            let part = read.parts_of(&name, object_bytes, u64::from(extent) * EXTENT_BYTES, 1);
            read.parts[part].needed.push(bytes_of(&pages));
            read.parts[part].missing.push(pages);
        }
        read
    }

    fn missing(&self) -> Vec<Vec<Range<u32>>> {
        self.parts.iter().map(|part| part.missing.clone()).collect()
    }

    /// PageFetch all missing pages, and wait for those that other operations fetch.
    fn fetch_all(mut self) -> Result<()> {
        let began = Instant::now();
        loop {
            let wanted = self.missing();
            let busy = self.fetch_missing(began)?;
            self.parts.iter_mut().for_each(|part| part.fetched.clear());
            if !busy {
                return Ok(());
            }
            // Pages that another operation was fetching are cached now, unless it failed.
            self.parts.iter_mut().zip(wanted).for_each(|(part, missing)| part.missing = missing);
        }
    }
}
