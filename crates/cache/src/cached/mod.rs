//! Reads through a cache: objects that never change are kept on its drives. Reads of others pass through.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use penstock_error::{Error, Result};
use penstock_storage::{Access, Counters, Features, RangeRequest, Read, Recycled, Then};

use crate::cache::{Cached, only};
use crate::drive::now_seconds;
use crate::drives::trust::Trust;
use crate::evict;
use crate::extent::pages::{extents_of, pages_of, stored_bytes};
use crate::extent::{EXTENT_BYTES, Extent, Key, PAGE_BYTES, object_of};
use crate::read_through::ReadThrough;
use crate::room;
use crate::upkeep;

/// Number of objects that are read together, so that a read of many has few open files.
const OBJECTS_AT_ONCE: usize = 64;

impl Cached {
    /// Read an object of at most one extent from the cache, whatever its length. Returns None if not all of it is cached.
    fn whole(&self, name: &str) -> Option<Bytes> {
        let key = self.key(name, 0);
        let drive = self.drive_of(&key);
        let extent =
            drive.find_usable(&key, None).ok().flatten().filter(|extent| extent.object_bytes <= EXTENT_BYTES)?;
        let table = extent.whole_table().ok()?;
        let mut body = vec![0; extent.data_bytes() as usize];
        let is_sound = !table.contains(&0) && extent.read(0, &table, &mut body).ok()? == table.len();
        is_sound.then(|| body.into())
    }

    /// Read a range of an object from the drives. Returns None if not all of it is cached and sound. Never asks the store.
    pub fn stored(&self, range: RangeRequest) -> Option<Bytes> {
        ReadThrough::new(self, &mut [(0, range)]).stored()
    }

    /// Return the length of an object of one extent if all of it is cached.
    fn is_whole(&self, name: &str) -> std::io::Result<Option<u64>> {
        let key = self.key(name, 0);
        let drive = self.drive_of(&key);
        let Some(extent) = drive.find_usable(&key, None)?.filter(|extent| extent.object_bytes <= EXTENT_BYTES) else {
            return Ok(None);
        };
        Ok(extent.is_whole(drive.now_ms())?.then(|| extent.object_bytes))
    }

    /// Keep an object that was read whole, if it fits into one extent and no other operation is storing it.
    fn keep(&self, name: &str, body: &Bytes) -> std::io::Result<()> {
        let key = self.key(name, 0);
        let drive = self.drive_of(&key);
        let bytes = body.len() as u64;
        if !(1..=EXTENT_BYTES).contains(&bytes) || !drive.is_writable() || !self.keeps_reads() {
            return Ok(());
        }
        let Some(extent) = room::make(drive, &key, bytes)? else { return Ok(()) };
        let Some(flight) = drive.flight()? else { return Ok(()) };
        if !flight.try_lock(extent.hash, 0..extent.pages())? || !extent.is_linked() {
            return Ok(());
        }
        let reserved = u64::from(extent.pages()) * PAGE_BYTES - stored_bytes(&extent.whole_table()?);
        if room::reserve(drive, &self.store, reserved)? {
            extent
                .write(0, body, now_seconds())
                .inspect_err(|_| drop(drive.usage.release(&self.store, reserved, 0)))?;
        }
        Ok(())
    }

    /// Remove the cached parts of an object, whatever its version, and its note. A part that another operation uses is evicted later. Fails if the note may
    /// still be there. No note is believed then. Cost: a few calls for each of its extents.
    pub fn forget(&self, name: &str) -> std::io::Result<()> {
        for number in 0.. {
            let key = self.key(name, number);
            let (drive_number, drive) = self.numbered_drive_of(&key);
            let remove = || {
                let Some((extent, _)) = drive.find_any(&key)? else {
                    return drive.remove_unreadable(&key).map(|()| None);
                };
                is_of(&extent, name).then(|| upkeep::remove(drive, &extent)).transpose()
            };
            if self.removing(drive_number, remove)?.is_none() {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Believe no note that was written until now, because objects may have changed.
    pub fn distrust_notes(&self) {
        self.trust.iter().for_each(|trust| trust.renew());
    }

    /// Return which notes are believed, if there may be some.
    pub fn trust(&self) -> Option<&Arc<Trust>> {
        self.trust.as_ref()
    }

    /// Remove notes from a drive. If that fails, no note is believed any more.
    fn removing<T>(&self, drive: usize, remove: impl FnOnce() -> std::io::Result<T>) -> std::io::Result<T> {
        match &self.trust {
            Some(trust) => trust.removing(drive, remove),
            None => remove(),
        }
    }

    /// Remove the cached parts of all objects of this store whose names are meant. Returns the bytes that were freed. Parts that another operation uses
    /// remain, without their notes. Fails if notes may still be there. No note is believed then. Cost: opens each extent.
    pub fn clear(&self, is_meant: impl Fn(&str) -> bool) -> std::io::Result<u64> {
        let is_meant = |key: &Key| *key.store() == *self.store && is_meant(key.name());
        let cleared = self
            .drives()
            .drives
            .iter()
            .enumerate()
            .map(|(number, drive)| self.removing(number, || upkeep::clear(drive, &is_meant)));
        // A drive that fails does not keep the others.
        cleared.collect::<Vec<_>>().into_iter().sum()
    }

    /// Keep a note beside the first part of a version of an object. Returns whether it is there: only if a page of the part is cached, and the note is not
    /// too long. Cost: six calls.
    pub fn annotate(&self, name: &str, note: &[u8]) -> bool {
        let Some(note) = self.trust.as_ref().map(|trust| trust.sign(note)) else { return false };
        let key = self.key(name, 0);
        let drive = self.drive_of(&key);
        let found = if drive.is_writable() { drive.find(&key, None) } else { Ok(None) };
        let written = found.and_then(|extent| extent.map_or(Ok(false), |extent| room::annotate(drive, &extent, &note)));
        drive.succeeded(written).unwrap_or(false)
    }

    /// Return which version of an object is cached, in whole or in part, and its note. Cost: five calls, whatever the cache holds.
    pub fn noted(&self, object: &str) -> Option<Noted> {
        let key = self.key(object, 0);
        let (drive_number, drive) = self.numbered_drive_of(&key);
        let found = if drive.is_usable() { drive.find_any(&key) } else { Ok(None) };
        let (extent, note) = drive.succeeded(found)??;
        let (note, is_believed) = self.trust.as_ref()?.check(drive_number, &note)?;
        is_of(&extent, object).then(|| Noted { name: extent.key.name().to_owned(), note: note.to_vec(), is_believed })
    }
}

/// The note of a version.
#[derive(Debug, PartialEq, Eq)]
pub struct Noted {
    pub name: String,
    pub note: Vec<u8>,
    /// Whether this server wrote it, or the one before it that was alone, and every write since then has removed the notes of its objects.
    pub is_believed: bool,
}

/// Return whether an extent is of some version of an object. Another object may have the same place.
fn is_of(extent: &Extent, name: &str) -> bool {
    object_of(extent.key.name()) == object_of(name)
}

impl Read for Cached {
    fn uri(&self) -> &str {
        self.cold.uri()
    }

    fn identity(&self) -> String {
        self.store.to_string()
    }

    fn features(&self) -> Features {
        Features { access: None, fills_slots: true, stream_bytes: 0, ..self.cold.features() }
    }

    fn counters(&self) -> &Counters {
        self.cold.counters()
    }

    fn read(&self, name: &str) -> Result<Bytes> {
        if !self.keeps(name) {
            return self.cold.read(name);
        }
        if let Some(body) = self.whole(name) {
            return Ok(body);
        }
        let body = self.cold.read(name)?;
        if let Err(error) = self.keep(name, &body) {
            self.drive_of(&self.key(name, 0)).failed(&error);
        }
        Ok(body)
    }

    fn access(&self, name: &str) -> Access {
        // While a plan runs, it may evict parts of the object.
        if self.keeps(name)
            && self.keeps_reads()
            && let Ok(Some(bytes)) = self.is_whole(name)
            && self.may_hold(bytes)
        {
            return Access::Mapped;
        }
        Access::Ranged
    }

    fn fetch_then(&self, ranges: Vec<RangeRequest>, then: Then) -> Vec<Result<Vec<Bytes>>> {
        let pieces: Vec<usize> = ranges.iter().map(|range| range.pieces.len()).collect();
        let kept = |range: &RangeRequest| {
            self.keeps(&range.name) && range.object_bytes.is_some_and(|bytes| bytes > 0 && range.end() <= bytes)
        };
        let (mut ours, others): (Vec<_>, Vec<_>) = ranges.into_iter().enumerate().partition(|(_, range)| kept(range));
        let mut answers: Vec<Result<Vec<Bytes>>> = pieces.iter().map(|count| Ok(vec![Bytes::new(); *count])).collect();
        let (numbers, others): (Vec<usize>, Vec<RangeRequest>) = others.into_iter().unzip();
        if !others.is_empty() {
            let (numbered, inner) = (numbers.clone(), then.clone());
            let passed: Then = Arc::new(move |range, piece, bytes| inner(numbered[range], piece, bytes));
            for (number, answer) in numbers.into_iter().zip(self.cold.fetch_then(others, passed)) {
                answers[number] = answer;
            }
        }
        // Each object of a read has an open file.
        let mut rest = &mut ours[..];
        while !rest.is_empty() {
            let mut names = HashSet::new();
            let count = rest
                .iter()
                .take_while(|(_, range)| {
                    names.contains(&range.name) || (names.len() < OBJECTS_AT_ONCE && names.insert(range.name.clone()))
                })
                .count();
            let (some, later) = std::mem::take(&mut rest).split_at_mut(count.max(1));
            rest = later;
            ReadThrough::new(self, some).run(&mut |range, piece, answer| match (answer, &mut answers[range]) {
                (Ok(bytes), Ok(pieces)) => {
                    then(range, piece, &bytes);
                    pieces[piece] = bytes;
                }
                (Err(error), whole) => *whole = Err(error),
                _ => {}
            });
        }
        answers
    }

    fn map(&self, name: &str, bytes: u64) -> Result<Bytes> {
        if bytes == 0 || !self.keeps(name) {
            return self.cold.map(name, bytes);
        }
        let memory = Recycled::fresh(bytes as usize);
        let memory =
            memory.map_err(|error| Error::new("storage-failed", format!("cannot allocate {bytes} bytes: {error}")))?;
        let range =
            RangeRequest { slots: vec![Some(memory.slot())], ..RangeRequest::plain(name, 0, bytes, Some(bytes)) };
        only(self.fetch(vec![range])).map(|bytes| self.hold(bytes))
    }

    fn distrust(&self, name: &str, begin: u64, bytes: u64) {
        if !self.keeps(name) {
            return;
        }
        for (extent, bytes) in extents_of(begin..begin + bytes) {
            let key = self.key(name, extent);
            let drive = self.drive_of(&key);
            if let Ok(Some(extent)) = drive.find(&key, None) {
                // Pages that another operation uses were fetched anew.
                let _ = evict::clear(drive, &extent, pages_of(&bytes), Duration::ZERO);
            }
        }
    }
}

#[cfg(test)]
mod tests;
