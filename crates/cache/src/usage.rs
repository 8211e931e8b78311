//! How many bytes a drive and each store on it use, and what all processes have read so far: one small file per drive, changed under a lock.
//!
//! Bytes are reserved before they are written and released after they were removed. A process that dies in between leaves a count
//! that is too high, never too low.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use penstock_storage::private;
use penstock_storage::process::PerProcess;

use crate::extent::read_padded;
use crate::flight::{Flight, WHOLE};

const RECORD_BYTES: usize = 512;
const NAME_BYTES: usize = 256;
/// Number of stores with a record of their own. The others share the last record.
const STORES: usize = 1023;
/// A lock on these counts is held for a few calls. A process that waits longer than this for a reservation does without it.
const PATIENCE: Duration = Duration::from_millis(500);
/// Other changes wait this long. They are kept in memory until the lock is free.
const SHORT_PATIENCE: Duration = Duration::from_millis(5);
/// After a process has waited in vain, it does not try again for this long.
const PAUSE: Duration = Duration::from_secs(1);

macro_rules! fields {
    ($($name:ident),*) => {
        /// Counts of a drive, or of one store on it.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct Counts { $(pub $name: u64),* }

        impl Counts {
            const COUNT: usize = [$(stringify!($name)),*].len();

            /// Return the name and value of each count.
            pub fn entries(&self) -> [(&'static str, u64); Counts::COUNT] {
                [$((stringify!($name), self.$name)),*]
            }

            fn from_array(values: [u64; Counts::COUNT]) -> Counts {
                let [$($name),*] = values;
                Counts { $($name),* }
            }

            /// Add the events of `other`, but not its state.
            pub fn add(&mut self, other: &Counts) {
                let state = (self.bytes, self.budget_bytes, self.pinned);
                $(self.$name = self.$name.saturating_add(other.$name);)*
                (self.bytes, self.budget_bytes, self.pinned) = state;
            }
        }
    };
}

fields!(
    // State: bytes reserved, the most that may be reserved (0: no limit), and whether a store is never evicted by age (1). All others are events since
    // the cache was created. The checksum of a corrupt page did not match. Bypassed bytes were fetched but not kept: the drive was full or failed.
    bytes, budget_bytes, pinned, hits, hit_bytes, misses, cold_bytes, corrupt_pages, evicted_bytes, bypassed_bytes
);

impl Counts {
    /// Return how many of these bytes exceed the budget.
    fn lacking_bytes(&self, bytes: u64) -> u64 {
        if self.budget_bytes == 0 { 0 } else { self.bytes.saturating_add(bytes).saturating_sub(self.budget_bytes) }
    }
}

/// A record of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UsageRecord {
    /// The store's root, or an empty text in the drive's record. A long root is cut.
    pub store: String,
    pub counts: Counts,
}

impl UsageRecord {
    /// Parse a record. Returns None if it is damaged.
    fn parse(bytes: &[u8; RECORD_BYTES]) -> Option<UsageRecord> {
        let (body, crc) = bytes.split_at(RECORD_BYTES - 4);
        if crc != crc_fast::crc32_iscsi(body).to_le_bytes() && bytes.iter().any(|byte| *byte != 0) {
            return None;
        }
        let name_bytes = u16::from_le_bytes([bytes[0], bytes[1]]) as usize;
        let store = String::from_utf8_lossy(&bytes[2..2 + name_bytes.min(NAME_BYTES)]).into_owned();
        let numbers = bytes[2 + NAME_BYTES..].as_chunks::<8>().0;
        Some(UsageRecord {
            store,
            counts: Counts::from_array(std::array::from_fn(|index| u64::from_le_bytes(numbers[index]))),
        })
    }

    fn bytes(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        let name = cut(&self.store).as_bytes();
        bytes[..2].copy_from_slice(&(name.len() as u16).to_le_bytes());
        bytes[2..2 + name.len()].copy_from_slice(name);
        for (place, (_, value)) in bytes[2 + NAME_BYTES..].chunks_exact_mut(8).zip(self.counts.entries()) {
            place.copy_from_slice(&value.to_le_bytes());
        }
        let crc = crc_fast::crc32_iscsi(&bytes[..RECORD_BYTES - 4]);
        bytes[RECORD_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }
}

/// Return as much of a store's root as a record holds.
pub fn cut(store: &str) -> &str {
    let end = (0..=NAME_BYTES.min(store.len())).rev().find(|end| store.is_char_boundary(*end));
    &store[..end.unwrap_or(0)]
}

/// The counts of one drive.
#[derive(Debug)]
pub struct Usage {
    file: File,
    path: PathBuf,
    /// The number of each store's record that this process has found so far.
    known: PerProcess<Mutex<Vec<(String, u64)>>>,
    /// Changes of each store that could not be written yet: bytes to release, and events.
    owed: PerProcess<Mutex<HashMap<String, (u64, Counts)>>>,
    /// When this process last waited for the lock in vain.
    in_vain: PerProcess<Mutex<Option<Instant>>>,
}

fn lock<T: Send>(value: &PerProcess<Mutex<T>>) -> MutexGuard<'_, T> {
    value.get().lock().unwrap_or_else(PoisonError::into_inner)
}

impl Usage {
    pub fn open(path: &Path) -> io::Result<Usage> {
        Ok(Usage {
            file: private::open_own(path)?,
            path: path.into(),
            known: PerProcess::new(Mutex::default),
            owed: PerProcess::new(Mutex::default),
            in_vain: PerProcess::new(Mutex::default),
        })
    }

    fn record_if_sound(&self, number: u64) -> io::Result<Option<UsageRecord>> {
        let mut bytes = [0; RECORD_BYTES];
        // Records behind the end of the file are empty.
        read_padded(&self.file, &mut bytes, number * RECORD_BYTES as u64)?;
        Ok(UsageRecord::parse(&bytes))
    }

    fn record(&self, number: u64) -> io::Result<UsageRecord> {
        self.record_if_sound(number).map(Option::unwrap_or_default)
    }

    /// Return whether no record is damaged, and there is at least one. Cost: reads the file.
    pub fn is_sound(&self) -> io::Result<bool> {
        let count = self.file.metadata()?.len().div_ceil(RECORD_BYTES as u64).min(STORES as u64 + 2);
        let mut all_sound = count > 0;
        for number in 0..count {
            all_sound = all_sound && self.record_if_sound(number)?.is_some();
        }
        Ok(all_sound)
    }

    /// Return the counts of the drive. Cost: one call.
    pub fn total(&self) -> io::Result<Counts> {
        Ok(self.record(0)?.counts)
    }

    /// Return the number of records in the file, with that of the drive.
    fn count(&self) -> io::Result<u64> {
        Ok((self.file.metadata()?.len() / RECORD_BYTES as u64).min(STORES as u64 + 2))
    }

    /// Return the records of all stores.
    pub fn stores(&self) -> io::Result<Vec<UsageRecord>> {
        let mut records =
            (1..self.count()?).map(|number| self.record(number)).collect::<io::Result<Vec<UsageRecord>>>()?;
        records.retain(|record| record.counts != Counts::default());
        Ok(records)
    }

    /// Write a record. The caller holds the lock.
    fn write(&self, number: u64, record: &UsageRecord) -> io::Result<()> {
        self.file.write_all_at(&record.bytes(), number * RECORD_BYTES as u64)
    }

    /// Change the counts of the drive and of a store under the lock. Returns None, and changes nothing, if another process holds the lock for too long.
    fn change<T>(
        &self,
        patience: Duration,
        store: &str,
        change: impl FnOnce(&mut Counts, &mut Counts) -> T,
    ) -> io::Result<Option<T>> {
        let mut in_vain = lock(&self.in_vain);
        if in_vain.is_some_and(|last| last.elapsed() < PAUSE) {
            return Ok(None);
        }
        let flight = Flight::new(&self.path)?;
        if !flight.lock(0, WHOLE, patience)? {
            // A short look in vain only shows that others use the counts, too.
            *in_vain = (patience >= PATIENCE).then(Instant::now);
            return Ok(None);
        }
        drop(in_vain);
        let number = self.number_of(store)?;
        let (mut total, mut own) = (self.record(0)?, self.record(number)?);
        own.store = cut(store).to_owned();
        let before = total.counts.bytes;
        let owed = lock(&self.owed).remove(store);
        for counts in [&mut total.counts, &mut own.counts] {
            if let Some((released_bytes, events)) = &owed {
                counts.bytes = counts.bytes.saturating_sub(*released_bytes);
                counts.add(events);
            }
        }
        let result = change(&mut total.counts, &mut own.counts);
        // A process that dies between the two calls must not leave a total below the sum of its parts.
        if total.counts.bytes >= before {
            self.write(0, &total)?;
            self.write(number, &own)?;
        } else {
            self.write(number, &own)?;
            self.write(0, &total)?;
        }
        Ok(Some(result))
    }

    /// Add to the changes of a store, and write them if the lock is free.
    fn owe(&self, store: &str, released_bytes: u64, events: &Counts) -> io::Result<()> {
        {
            let mut owed = lock(&self.owed);
            let (bytes, counts) = owed.entry(store.to_owned()).or_default();
            *bytes += released_bytes;
            counts.add(events);
        }
        self.change(SHORT_PATIENCE, store, |_, _| {}).map(drop)
    }

    /// Find the record of a store, or the first empty one. The caller holds the lock.
    fn number_of(&self, store: &str) -> io::Result<u64> {
        let store = cut(store);
        let mut known = lock(&self.known);
        if let Some((_, number)) = known.iter().find(|(name, _)| name == store)
            && self.record(*number)?.store == store
        {
            return Ok(*number);
        }
        known.retain(|(name, _)| name != store);
        let mut unused = None;
        for number in 1..=STORES as u64 {
            let found = self.record(number)?;
            if found.store == store || found == UsageRecord::default() {
                known.push((store.to_owned(), number));
                return Ok(number);
            }
            let is_unused = found.counts.bytes == 0 && found.counts.budget_bytes == 0 && found.counts.pinned == 0;
            unused = unused.or(is_unused.then_some(number));
        }
        // A store without bytes gives its record to another one.
        match unused {
            Some(number) => {
                self.write(number, &UsageRecord::default())?;
                known.push((store.to_owned(), number));
                Ok(number)
            }
            None => Ok(STORES as u64 + 1),
        }
    }

    /// Replace the bytes of the drive and of all stores. The caller keeps all other operations out. Returns the total.
    pub fn recount(&self, mut bytes_of: HashMap<String, u64>) -> io::Result<u64> {
        lock(&self.owed).values_mut().for_each(|(released_bytes, _)| *released_bytes = 0);
        let total = bytes_of.values().sum();
        for number in 1..self.count()? {
            let mut record = self.record(number)?;
            record.counts.bytes = bytes_of.remove(&record.store).unwrap_or(0);
            self.write(number, &record)?;
        }
        for (store, bytes) in bytes_of {
            self.change(PATIENCE, &store, |_, own| own.bytes += bytes)?;
        }
        self.change_total(|counts| counts.bytes = total)?;
        Ok(total)
    }

    /// Set the budget of the drive, or of a store.
    pub fn set_budget(&self, store: Option<&str>, bytes: u64) -> io::Result<()> {
        match store {
            None if self.total()?.budget_bytes == bytes => Ok(()),
            None => self.change_total(|total| total.budget_bytes = bytes),
            Some(store) => self.change(PATIENCE, store, |_, own| own.budget_bytes = bytes).map(drop),
        }
    }

    /// Choose whether a store is never evicted by age.
    pub fn pin(&self, store: &str, pinned: bool) -> io::Result<()> {
        self.change(PATIENCE, store, |_, own| own.pinned = u64::from(pinned))?
            .ok_or_else(|| io::ErrorKind::TimedOut.into())
    }

    fn change_total(&self, change: impl FnOnce(&mut Counts)) -> io::Result<()> {
        let flight = Flight::new(&self.path)?;
        if !flight.lock(0, WHOLE, PATIENCE)? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut total = self.record(0)?;
        change(&mut total.counts);
        self.write(0, &total)
    }

    /// Reserve bytes for a store. Returns how many bytes must be evicted first (0: they are reserved now), from the drive and from the store.
    pub fn reserve(&self, store: &str, bytes: u64) -> io::Result<Option<(u64, u64)>> {
        self.change(PATIENCE, store, |total, own| {
            let lacking = (total.lacking_bytes(bytes), own.lacking_bytes(bytes));
            if lacking == (0, 0) {
                total.bytes += bytes;
                own.bytes += bytes;
            }
            lacking
        })
    }

    /// Release bytes of a store, of which `evicted` were removed to make room.
    pub fn release(&self, store: &str, bytes: u64, evicted: u64) -> io::Result<()> {
        self.owe(store, bytes, &Counts { evicted_bytes: evicted, ..Counts::default() })
    }

    /// Add events of a store.
    pub fn note(&self, store: &str, events: &Counts) -> io::Result<()> {
        self.owe(store, 0, events)
    }
}

impl Drop for Usage {
    fn drop(&mut self) {
        let stores: Vec<String> = lock(&self.owed).keys().cloned().collect();
        // What cannot be written is counted too high until the next count.
        stores.iter().for_each(|store| drop(self.change(SHORT_PATIENCE, store, |_, _| {})));
    }
}

/// Hits that are not added to the counts of a drive yet.
#[derive(Debug, Default)]
pub struct NowCounts {
    hits: AtomicU64,
    bytes: AtomicU64,
}

impl NowCounts {
    pub fn add(&self, bytes: u64) {
        self.hits.fetch_add(1, Relaxed);
        self.bytes.fetch_add(bytes, Relaxed);
    }

    /// Return what was added since the last call: reads and bytes.
    pub fn take(&self) -> (u64, u64) {
        (self.hits.swap(0, Relaxed), self.bytes.swap(0, Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(folder: &Path) -> io::Result<Usage> {
        Usage::open(&folder.join("usage"))
    }

    #[test]
    fn bytes_are_reserved_up_to_both_budgets() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let usage = usage(folder.path())?;
        usage.set_budget(None, 100)?;
        usage.set_budget(Some("a"), 60)?;
        assert_eq!(usage.reserve("a", 60)?, Some((0, 0)));
        assert_eq!(usage.reserve("a", 1)?, Some((0, 1)));
        assert_eq!(usage.reserve("b", 41)?, Some((1, 0)));
        assert_eq!(usage.reserve("b", 40)?, Some((0, 0)));
        assert_eq!(usage.reserve("a", 3)?, Some((3, 3)));
        usage.release("a", 5, 5)?;
        assert_eq!(usage.reserve("a", 5)?, Some((0, 0)));
        let total = usage.total()?;
        assert_eq!((total.bytes, total.evicted_bytes), (100, 5));
        let stores: Vec<(String, u64)> =
            usage.stores()?.into_iter().map(|record| (record.store, record.counts.bytes)).collect();
        assert_eq!(stores, [("a".to_owned(), 60), ("b".to_owned(), 40)]);
        Ok(())
    }

    #[test]
    fn threads_and_handles_count_every_event() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let shared = usage(folder.path())?;
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (shared, own) = (&shared, usage(folder.path()));
                scope.spawn(move || {
                    let own = own.ok();
                    for _ in 0..100 {
                        let events = Counts { hits: 1, bytes: 9, ..Counts::default() };
                        let usage = if thread % 2 == 0 { Some(shared) } else { own.as_ref() };
                        usage.map(|usage| usage.note(&format!("store {}", thread % 3), &events));
                    }
                });
            }
        });
        assert_eq!((shared.total()?.hits, shared.total()?.bytes), (400, 0));
        assert_eq!(shared.stores()?.iter().map(|record| record.counts.hits).sum::<u64>(), 400);
        Ok(())
    }

    #[test]
    fn a_long_root_is_cut_between_characters() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let usage = usage(folder.path())?;
        let root = "é".repeat(300);
        usage.reserve(&root, 7)?;
        usage.reserve(&root, 8)?;
        let stores = usage.stores()?;
        assert_eq!((stores.len(), stores[0].counts.bytes, stores[0].store.len()), (1, 15, 256));
        Ok(())
    }
}
