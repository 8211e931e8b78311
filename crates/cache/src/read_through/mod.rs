//! One read of many ranges through the cache: read what is cached, fetch what is missing once, keep it, and assemble the pieces.

use std::collections::HashMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use bytes::Bytes;
use penstock_error::{Error, Result};
use penstock_storage::{Piece, RangeRequest, Slot, add};

use crate::cache::{Cached, Counting, only};
use crate::drive::{LOCKS, now_seconds};
use crate::extent::pages::{extents_of, pages_of};
use crate::extent::{EXTENT_BYTES, PAGE_BYTES, STRETCH_BYTES, bytes_of};
use crate::flight::Flight;
use crate::usage::Counts;

mod extent_read;
mod prefetch;

use extent_read::{ExtentRead, chunk_at};
pub use prefetch::ExtentPages;

/// Pages that are read and verified together, so that they are still in the processor's cache when they are copied.
const GROUP_PAGES: u32 = 16;
/// A read waits this long for another operation that fetches the same pages. It then fetches them on its own, and keeps nothing.
const OTHERS_PATIENCE: Duration = Duration::from_secs(5);
/// Cold pages are joined into requests of at most this length.
pub const JOINED_BYTES: u64 = 8 << 20;
/// A piece that claims to be longer gets its memory as its bytes arrive.
const MOST_RESERVED_BYTES: usize = 8 << 20;

/// A piece that is being assembled.
struct Wanted {
    range: usize,
    piece: usize,
    begin: u64,
    bytes: usize,
    /// Index of the part that has the first byte. A piece that crosses extents continues in the parts that follow.
    part: usize,
    target: Target,
}

impl Wanted {
    /// Return the parts that have the bytes that are still missing, and these bytes in each extent.
    fn rest(&self) -> impl Iterator<Item = (usize, Range<u64>)> + use<> {
        let (part, first) = (self.part, self.begin / EXTENT_BYTES);
        let rest = extents_of(self.begin + self.target.filled() as u64..self.begin + self.bytes as u64);
        rest.map(move |(extent, bytes)| (part + (u64::from(extent) - first) as usize, bytes))
    }
}

/// Where the bytes of a piece go.
enum Target {
    Slot(Slot),
    Memory(Vec<u8>),
}

impl Target {
    fn filled(&self) -> usize {
        match self {
            Target::Slot(slot) => slot.filled(),
            Target::Memory(memory) => memory.len(),
        }
    }

    fn push(&mut self, bytes: &[u8]) {
        match self {
            Target::Slot(slot) => slot.push(bytes),
            Target::Memory(memory) => memory.extend_from_slice(bytes),
        }
    }

    fn freeze(self) -> Bytes {
        match self {
            Target::Slot(slot) => slot.freeze(),
            Target::Memory(memory) => memory.into(),
        }
    }
}

/// Pages that this operation has locked and must fetch.
struct PageFetch {
    part: usize,
    pages: Range<u32>,
    /// Whether the bytes may be kept, because there is room for them.
    keep: bool,
}

/// The pieces of a range: for each one, the number of its `PageFetch`, its pages, and where it begins in the extent.
type Pieces = Vec<(usize, Range<u32>, u64)>;

/// A read of many ranges.
pub struct ReadThrough<'a> {
    cached: &'a Cached,
    parts: Vec<ExtentRead<'a>>,
    wanted: Vec<Wanted>,
    scratch: Vec<u8>,
    now_seconds: u32,
    /// Whether fetched pages may be kept.
    keeps: bool,
    _keeping: Option<Counting>,
    /// Gaps of up to this length are fetched, too: kept if pages are kept, otherwise dropped. This saves requests.
    gap_bytes: u64,
}

impl<'a> ReadThrough<'a> {
    /// Divide ranges of objects that the cache may keep into pieces and parts.
    pub fn new(cached: &'a Cached, ranges: &mut [(usize, RangeRequest)]) -> ReadThrough<'a> {
        let keeping = cached.may_keep();
        let mut read = ReadThrough::empty(cached, keeping.is_some(), cached.cold.features().request_cost.gap_bytes);
        read._keeping = keeping;
        for (index, range) in ranges {
            let object_bytes = range.object_bytes.unwrap_or(0);
            let mut begin = range.begin;
            let mut slots = std::mem::take(&mut range.slots).into_iter();
            for (number, piece) in range.pieces.iter().enumerate() {
                begin += piece.skip;
                let part = read.parts_of(&range.name, object_bytes, begin, piece.bytes as u64);
                let target = match slots.next().flatten() {
                    Some(slot) => Target::Slot(slot),
                    None => Target::Memory(Vec::with_capacity(piece.bytes.min(MOST_RESERVED_BYTES))),
                };
                read.wanted.push(Wanted { range: *index, piece: number, begin, bytes: piece.bytes, part, target });
                begin += piece.bytes as u64;
            }
        }
        read
    }

    fn empty(cached: &'a Cached, keeps: bool, gap_bytes: u64) -> ReadThrough<'a> {
        let scratch = vec![0; (u64::from(GROUP_PAGES) * PAGE_BYTES) as usize];
        ReadThrough {
            cached,
            parts: Vec::new(),
            wanted: Vec::new(),
            scratch,
            now_seconds: now_seconds(),
            keeps,
            _keeping: None,
            gap_bytes,
        }
    }

    /// Add the events of all parts to the counters of the store and the counts of each drive, once.
    fn note_events(&mut self) {
        for drive in &self.cached.drives().drives {
            let mut events = Counts::default();
            let of_drive = self.parts.iter_mut().filter(|part| std::ptr::eq(part.drive, drive));
            of_drive.for_each(|part| events.add(&std::mem::take(&mut part.events)));
            if events == Counts::default() {
                continue;
            }
            let counters = self.cached.cold.counters();
            for (counter, amount) in [
                (&counters.cache_hits, events.hits),
                (&counters.cache_hit_bytes, events.hit_bytes),
                (&counters.cache_misses, events.misses),
                (&counters.cache_cold_bytes, events.cold_bytes),
                (&counters.cache_corrupt_pages, events.corrupt_pages),
            ] {
                add(counter, amount);
            }
            // The counts of the drive matter less than reads.
            let _ = drive.usage.note(&self.cached.store, &events);
        }
    }

    /// Return the first part of a piece, and add the parts that are new.
    fn parts_of(&mut self, name: &str, object_bytes: u64, begin: u64, bytes: u64) -> usize {
        let extents = (begin / EXTENT_BYTES) as u32..=((begin + bytes.max(1) - 1) / EXTENT_BYTES) as u32;
        // Ranges of one object follow each other, so its parts are the last ones.
        let first =
            self.parts.iter().rposition(|part| part.is_of(name, *extents.start()) && part.object_bytes == object_bytes);
        let has_all = |first: &usize| {
            extents
                .clone()
                .zip(*first..)
                .all(|(extent, at)| self.parts.get(at).is_some_and(|part| part.is_of(name, extent)))
        };
        if let Some(first) = first.filter(has_all) {
            return first;
        }
        let first = self.parts.len();
        for extent in extents {
            let key = self.cached.key(name, extent);
            self.parts.push(ExtentRead::new(self.cached.drive_of(&key), key, object_bytes));
        }
        first
    }

    /// Return the only piece, if its pages are cached and sound.
    pub fn stored(mut self) -> Option<Bytes> {
        let (mut wanted, mut bytes) = (self.wanted.pop()?, None);
        self.complete(&mut wanted, true, &mut |_, _, read| bytes = read.ok());
        if bytes.is_none() {
            // The read that fetches it counts what it finds.
            self.parts.iter_mut().for_each(|part| part.events = Counts::default());
        }
        bytes
    }

    /// Read all pieces, and pass each one to `done` when it is complete.
    pub fn run(mut self, done: &mut dyn FnMut(usize, usize, Result<Bytes>)) {
        let mut open = std::mem::take(&mut self.wanted);
        open.retain_mut(|wanted| !self.complete(wanted, true, done));
        let began = Instant::now();
        let mut failure: Option<Error> = None;
        while !open.is_empty() && failure.is_none() {
            open.iter().for_each(|wanted| self.note_missing(wanted));
            let busy = self.fetch_missing(began).unwrap_or_else(|error| {
                failure = Some(error);
                false
            });
            open.retain_mut(|wanted| !self.complete(wanted, false, done));
            if !busy {
                break;
            }
        }
        // Pages that another operation removed in the meantime, or that it is still fetching after the deadline.
        for wanted in open {
            let answer = match &failure {
                Some(error) => Err(error.clone()),
                None => self.straight(wanted.part, wanted.begin, wanted.bytes),
            };
            done(wanted.range, wanted.piece, answer);
        }
    }

    /// ReadThrough a piece as far as its pages are cached or fetched. Returns whether it is complete, and then passes it to `done`.
    fn complete(
        &mut self,
        wanted: &mut Wanted,
        first: bool,
        done: &mut dyn FnMut(usize, usize, Result<Bytes>),
    ) -> bool {
        while let Some((part, bytes)) = wanted.rest().next() {
            if !self.push(part, bytes, &mut wanted.target) {
                return false;
            }
        }
        let events = &mut self.parts[wanted.part].events;
        if first {
            events.hits += 1;
            events.hit_bytes += wanted.bytes as u64;
        } else {
            events.misses += 1;
        }
        let target = std::mem::replace(&mut wanted.target, Target::Memory(Vec::new()));
        done(wanted.range, wanted.piece, Ok(target.freeze()));
        true
    }

    /// Push the first of these bytes of a part into a target. Returns false if no byte could be pushed.
    fn push(&mut self, part: usize, Range { start: begin, end }: Range<u64>, target: &mut Target) -> bool {
        let ExtentRead { drive, extent, fetched, events, key, corrupt, .. } = &mut self.parts[part];
        let wanted_bytes = (end - begin) as usize;
        if let Some((bytes, skip)) = chunk_at(fetched, begin) {
            target.push(&bytes[skip..bytes.len().min(skip + wanted_bytes)]);
            return true;
        }
        if let Some(bytes) = self.cached.prefetched().find(key, begin) {
            target.push(&bytes[..bytes.len().min(wanted_bytes)]);
            return true;
        }
        let Some(found) = extent.clone() else { return false };
        let pages = pages_of(&(begin..end));
        let page = pages.start;
        let next_fetched = fetched.get(fetched.partition_point(|(at, _)| *at <= begin));
        let until = next_fetched.map_or(u32::MAX, |(at, _)| (at / PAGE_BYTES) as u32).max(page);
        match found.read_stored(page..pages.end.min(page + GROUP_PAGES).min(until), &mut self.scratch) {
            Ok(Some(0)) => {
                // The other corrupt pages up to the end are found now, so that they are fetched together.
                let more = found.corrupt(pages).unwrap_or_else(|_| vec![page]);
                let new = more.into_iter().filter(|page| !corrupt.contains(page)).collect::<Vec<u32>>();
                events.corrupt_pages += new.len() as u64;
                corrupt.extend(new);
                false
            }
            Ok(Some(sound_bytes)) => {
                let skip = (begin % PAGE_BYTES) as usize;
                target.push(&self.scratch[skip..sound_bytes.min(skip + wanted_bytes)]);
                found.stamp((begin / STRETCH_BYTES) as u32, self.now_seconds);
                drive.worked();
                true
            }
            Ok(None) => false,
            Err(error) => {
                drive.failed(&error);
                drive.forget(key);
                *extent = None;
                false
            }
        }
    }

    /// Add the pages of a piece that are neither fetched nor cached.
    fn note_missing(&mut self, wanted: &Wanted) {
        for (part, bytes) in wanted.rest() {
            self.parts[part].missing.push(pages_of(&bytes));
            self.parts[part].needed.push(bytes);
        }
    }

    /// PageFetch missing pages that no other operation is fetching, and keep them. Returns whether others are fetching some of them.
    fn fetch_missing(&mut self, began: Instant) -> Result<bool> {
        // One set of locks for each drive.
        let (mut fetches, mut flights, mut busy) = (Vec::new(), HashMap::new(), None);
        for index in 0..self.parts.len() {
            let part = &mut self.parts[index];
            let missing = part.wanted_runs(if self.keeps { (self.gap_bytes / PAGE_BYTES) as u32 } else { 0 });
            if missing.is_empty() {
                continue;
            }
            let flight = flights
                .entry(std::ptr::from_ref(part.drive))
                .or_insert_with(|| if self.keeps { part.begin().ok() } else { None });
            let flight = flight.as_ref().and_then(|(flight, _)| flight.as_ref());
            let locked = part.lock(&missing, flight);
            let runs = match part.drive.succeeded(locked).flatten() {
                Some((locked, waiting)) => {
                    busy = busy.or(waiting.map(|pages| (index, pages)));
                    part.reserve(locked)
                }
                // Without locks, the pages are fetched but not kept.
                None => missing.into_iter().map(|pages| (pages, false)).collect(),
            };
            fetches.extend(runs.into_iter().map(|(pages, keep)| PageFetch { part: index, pages, keep }));
        }
        let fetched = self.fetch(fetches);
        drop(flights);
        fetched?;
        let Some((part, pages)) = busy else { return Ok(false) };
        // This operation holds no lock now, so it may wait for others.
        let ExtentRead { drive, key, .. } = &self.parts[part];
        if !drive.is_patient() {
            return Ok(false);
        }
        let patience = OTHERS_PATIENCE.saturating_sub(began.elapsed());
        match Flight::new(&drive.part(LOCKS)).and_then(|flight| flight.lock(key.hash(), pages, patience)) {
            Ok(true) => Ok(true),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {
                Err(Error::new("interrupted", "interrupted while another process fetches the same bytes"))
            }
            // The other process hangs, or is stopped.
            _ => {
                drive.was_in_vain();
                Ok(false)
            }
        }
    }

    /// PageFetch pages from the store, and keep those for which there is room.
    fn fetch(&mut self, fetches: Vec<PageFetch>) -> Result<()> {
        self.parts.iter_mut().for_each(|part| part.needed.sort_unstable_by_key(|needed| needed.start));
        let (ranges, order) = self.plan(&fetches);
        let answers = self.answers(ranges, &order, &fetches);
        let mut failure = None;
        for ((is_held, answer), numbers) in answers.into_iter().zip(order) {
            match answer {
                Ok(pieces) => {
                    for (bytes, (number, pages, begin)) in pieces.into_iter().zip(numbers) {
                        let PageFetch { part, keep, .. } = fetches[number];
                        if !is_held {
                            self.parts[part].events.cold_bytes += bytes.len() as u64;
                        }
                        self.parts[part].took(pages, begin, bytes, keep);
                    }
                }
                Err(error) => {
                    for (number, pages, _) in numbers.into_iter().filter(|(number, ..)| fetches[*number].keep) {
                        self.parts[fetches[number].part].give_back(pages);
                    }
                    failure = failure.or(Some(error));
                }
            }
        }
        for part in &mut self.parts {
            part.fetched.sort_unstable_by_key(|(begin, _)| *begin);
            part.needed.clear();
        }
        failure.map_or(Ok(()), Err)
    }

    /// Join runs of pages into ranges. Returns the ranges, and for each of their pieces the number of its run and its pages.
    fn plan(&self, fetches: &[PageFetch]) -> (Vec<RangeRequest>, Vec<Pieces>) {
        // If pages are kept, the gaps between them are cached already.
        let gap_bytes = if self.keeps { 0 } else { self.gap_bytes };
        let most = self.cached.cold.features().range_bytes.min(JOINED_BYTES);
        let (mut ranges, mut order): (Vec<RangeRequest>, Vec<Pieces>) = (Vec::new(), Vec::new());
        for (number, fetch) in fetches.iter().enumerate() {
            let part = &self.parts[fetch.part];
            let base = u64::from(part.key.extent) * EXTENT_BYTES;
            let step = ((most / PAGE_BYTES).max(1)) as usize;
            for first in fetch.pages.clone().step_by(step) {
                let pages = first..fetch.pages.end.min(first.saturating_add(step as u32));
                // Pages that are not kept need not be whole.
                let within = if fetch.keep { bytes_of(&pages) } else { part.needed_of(&pages) };
                let (begin, end) = (base + within.start, (base + within.end).min(part.object_bytes));
                if begin >= end {
                    continue;
                }
                match (ranges.last_mut(), order.last_mut()) {
                    (Some(range), Some(order))
                        if range.name == part.key.name()
                            && begin >= range.end()
                            && begin - range.end() <= gap_bytes
                            && end - range.begin <= most =>
                    {
                        range.pieces.push(Piece { skip: begin - range.end(), bytes: (end - begin) as usize });
                        order.push((number, pages, within.start));
                    }
                    _ => {
                        let plain = RangeRequest::plain(part.key.name(), begin, end - begin, Some(part.object_bytes));
                        ranges.push(RangeRequest { shared: true, ..plain });
                        order.push(vec![(number, pages, within.start)]);
                    }
                }
            }
        }
        (ranges, order)
    }

    /// Read a piece from the store, past the cache.
    fn straight(&mut self, part: usize, begin: u64, bytes: usize) -> Result<Bytes> {
        let part = &mut self.parts[part];
        part.events.misses += 1;
        part.events.cold_bytes += bytes as u64;
        part.events.bypassed_bytes += bytes as u64;
        let range = RangeRequest::plain(part.key.name(), begin, bytes as u64, Some(part.object_bytes));
        only(self.cached.cold.fetch(vec![range]))
    }
}

impl Drop for ReadThrough<'_> {
    fn drop(&mut self) {
        self.note_events();
    }
}
