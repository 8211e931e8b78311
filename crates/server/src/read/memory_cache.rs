//! Pieces of objects that are read often. They are compared with their checksums on every read, and sent without a copy.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use bytes::Bytes;
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use super::arena::{Arena, LEAST_BYTES, SLOT_BYTES};

/// The length of a piece. It is read, verified and sent while it is in the processor's cache.
pub const PIECE_BYTES: u64 = SLOT_BYTES;
/// Each checksum covers this much.
const CHECKED_BYTES: usize = 16 << 10;
/// Reads of a piece count as two if there is this time between them.
const APART_MS: u64 = 500;
/// How often the cache's drives learn that a piece is still used.
const TOUCH_MS: u64 = 30_000;

/// The name of a version, and the number of the piece.
type Key = (Arc<str>, u64);

/// Pieces in memory. A piece is held when it is read for the second time, some time after the first, and there is room. It replaces another piece only if that one was not
/// read for twice the time between these two reads. So pieces do not replace each other in turn when not all of them fit.
#[derive(Debug)]
pub struct MemoryCache {
    arena: Arc<Arena>,
    held: RwLock<Held>,
    /// Pieces that were read lately and are not held: their lengths, and when they were read, in milliseconds since `opened`.
    seen: Cache<Key, (u64, u64), Length>,
    opened: Instant,
}

#[derive(Debug)]
struct Held {
    pieces: HashMap<Key, Arc<Piece>>,
    /// The keys of all pieces. The next one that may be replaced is the first.
    order: VecDeque<Key>,
    /// How many bytes the pieces have, and may have if no replaced ones are being sent.
    bytes: u64,
    most_bytes: u64,
}

#[derive(Debug)]
struct Piece {
    bytes: Bytes,
    crcs: Vec<u32>,
    /// When it was read, and when the drives learnt of it, in milliseconds since `opened`.
    read: AtomicU64,
    touched: AtomicU64,
}

#[derive(Debug, Clone)]
struct Length;

impl Weighter<Key, (u64, u64)> for Length {
    fn weight(&self, _: &Key, (bytes, _): &(u64, u64)) -> u64 {
        *bytes
    }
}

impl MemoryCache {
    /// Return an empty store for this many bytes. An eighth of them is left to pieces that are still being sent after they were replaced.
    pub fn new(bytes: u64) -> io::Result<MemoryCache> {
        let most_bytes = bytes - bytes / 8;
        let held = Held { pieces: HashMap::new(), order: VecDeque::new(), bytes: 0, most_bytes };
        let seen = Cache::with_weighter((bytes / PIECE_BYTES) as usize, bytes, Length);
        Ok(MemoryCache { arena: Arena::new(bytes)?, held: RwLock::new(held), seen, opened: Instant::now() })
    }

    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    fn now_ms(&self) -> u64 {
        self.opened.elapsed().as_millis() as u64
    }

    /// Return a part of a piece, if the piece is held and the part matches its checksums. Calls `touch` now and then.
    pub fn get(&self, name: &Arc<str>, wanted: &Range<u64>, touch: impl FnOnce()) -> Option<Bytes> {
        let key = (name.clone(), wanted.start / PIECE_BYTES);
        let piece = self.held.read().unwrap_or_else(PoisonError::into_inner).pieces.get(&key)?.clone();
        let begin = key.1 * PIECE_BYTES;
        let (begin, end) = ((wanted.start - begin) as usize, (wanted.end - begin) as usize);
        let (first, last) = (begin / CHECKED_BYTES, end.div_ceil(CHECKED_BYTES));
        let mut parts = piece.bytes.chunks(CHECKED_BYTES).zip(&piece.crcs).take(last).skip(first);
        if !parts.all(|(part, crc)| crc_fast::crc32_iscsi(part) == *crc) {
            self.forget_if(|held| *held == key);
            return None;
        }
        let now = self.now_ms();
        piece.read.store(now, Relaxed);
        if now.saturating_sub(piece.touched.load(Relaxed)) >= TOUCH_MS {
            piece.touched.store(now, Relaxed);
            touch();
        }
        Some(piece.bytes.slice(begin..end))
    }

    /// Note that a whole piece was read and verified, and hold it if it is read often.
    pub fn note(&self, name: &Arc<str>, number: u64, bytes: &[u8]) {
        if bytes.len() < LEAST_BYTES {
            return;
        }
        let (key, now) = ((name.clone(), number), self.now_ms());
        let before = self.seen.get(&key).map(|(_, before)| before);
        // Several clients may want the same piece at about the same time. That does not show that it will be wanted again.
        if before.is_some_and(|before| now.saturating_sub(before) < APART_MS) {
            return;
        }
        self.seen.insert(key.clone(), (bytes.len() as u64, now));
        let Some(before) = before else { return };
        let idle_ms = 2 * now.saturating_sub(before);
        let reserved = self.held.write().unwrap_or_else(PoisonError::into_inner).reserve(
            &self.arena,
            bytes.len() as u64,
            now,
            idle_ms,
        );
        let Some(replaced) = reserved else { return };
        // Their pages are freed while nobody waits.
        drop(replaced);
        let crcs = bytes.chunks(CHECKED_BYTES).map(crc_fast::crc32_iscsi).collect();
        let piece = self.arena.store(bytes).map(|bytes| Piece { bytes, crcs, read: now.into(), touched: now.into() });
        let mut held = self.held.write().unwrap_or_else(PoisonError::into_inner);
        match piece.filter(|_| !held.pieces.contains_key(&key)) {
            Some(piece) => {
                held.order.push_back(key.clone());
                held.pieces.insert(key.clone(), Arc::new(piece));
                self.seen.remove(&key);
            }
            None => held.bytes -= bytes.len() as u64,
        }
    }

    /// Forget the pieces of a version.
    pub fn forget(&self, name: &str) {
        self.forget_if(|(held, _)| **held == *name);
    }

    /// Forget the pieces of all versions whose names are meant.
    pub fn forget_all(&self, is_meant: impl Fn(&str) -> bool) {
        self.forget_if(|(held, _)| is_meant(held));
    }

    fn forget_if(&self, is_gone: impl Fn(&Key) -> bool) {
        let mut held = self.held.write().unwrap_or_else(PoisonError::into_inner);
        let Held { pieces, order, bytes, .. } = &mut *held;
        order.retain(|key| !is_gone(key));
        let gone = pieces.extract_if(|key, _| is_gone(key)).map(|(_, piece)| piece);
        *bytes -= gone.map(|piece| piece.bytes.len() as u64).sum::<u64>();
    }
}

impl Held {
    /// Count these bytes as held. Returns the pieces that are replaced because they were not read for `idle_ms`, or None if it must not replace others.
    fn reserve(&mut self, arena: &Arena, bytes: u64, now: u64, idle_ms: u64) -> Option<Vec<Arc<Piece>>> {
        let mut replaced = Vec::new();
        let still_sent = arena.held_bytes().saturating_sub(self.bytes);
        let most_bytes = self.most_bytes.min(arena.bytes().saturating_sub(still_sent));
        while self.bytes + bytes > most_bytes {
            let key = self.order.pop_front()?;
            let is_idle = |piece: &&Arc<Piece>| now.saturating_sub(piece.read.load(Relaxed)) >= idle_ms;
            if self.pieces.get(&key).filter(is_idle).is_none() {
                // The next candidate meets another piece.
                self.order.push_back(key);
                return None;
            }
            let piece = self.pieces.remove(&key)?;
            self.bytes -= piece.bytes.len() as u64;
            replaced.push(piece);
        }
        self.bytes += bytes;
        Some(replaced)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::time::Duration;

    use super::*;

    fn piece(seed: u8) -> Vec<u8> {
        (0..PIECE_BYTES as usize).map(|at| seed.wrapping_add((at / 7) as u8)).collect()
    }

    /// Let a piece be read twice, with time between.
    fn hold(memory_cache: &mut MemoryCache, name: &Arc<str>, number: u64, bytes: &[u8]) {
        memory_cache.note(name, number, bytes);
        memory_cache.opened -= Duration::from_millis(APART_MS);
        memory_cache.note(name, number, bytes);
    }

    #[test]
    fn a_piece_is_held_when_it_is_read_again() {
        let mut memory_cache = MemoryCache::new(8 * PIECE_BYTES).unwrap();
        let (name, bytes): (Arc<str>, _) = ("version".into(), piece(3));
        let whole = PIECE_BYTES..2 * PIECE_BYTES;
        (0..2).for_each(|_| memory_cache.note(&name, 1, &bytes));
        assert!(memory_cache.get(&name, &whole, || ()).is_none());
        hold(&mut memory_cache, &name, 1, &bytes);
        assert_eq!(memory_cache.get(&name, &whole, || ()).unwrap(), bytes);
        assert_eq!(
            memory_cache.get(&name, &(PIECE_BYTES + 20_000..PIECE_BYTES + 70_001), || ()).unwrap(),
            bytes[20_000..70_001]
        );
        assert!(memory_cache.get(&name, &(0..PIECE_BYTES), || ()).is_none());
        assert!(memory_cache.get(&"other".into(), &whole, || ()).is_none());
        memory_cache.forget("version");
        assert!(memory_cache.get(&name, &whole, || ()).is_none());
        assert_eq!(memory_cache.arena.held_bytes(), 0);
    }

    #[test]
    fn a_flipped_bit_is_not_sent() {
        let mut memory_cache = MemoryCache::new(8 * PIECE_BYTES).unwrap();
        let (name, bytes): (Arc<str>, _) = ("version".into(), piece(3));
        hold(&mut memory_cache, &name, 0, &bytes);
        let held = memory_cache.get(&name, &(0..PIECE_BYTES), || ()).unwrap();
        memory_cache.arena.damage(&held[100_000..]);
        // Other parts of it are sound.
        assert_eq!(memory_cache.get(&name, &(0..50_000), || ()).unwrap(), bytes[..50_000]);
        assert!(memory_cache.get(&name, &(99_999..100_001), || ()).is_none());
        assert!(memory_cache.get(&name, &(0..50_000), || ()).is_none());
    }

    /// Read a piece: from memory, or else as the cache would.
    fn read(memory_cache: &MemoryCache, number: u64) -> Bytes {
        let name: Arc<str> = "version".into();
        let wanted = number * PIECE_BYTES..(number + 1) * PIECE_BYTES;
        memory_cache.get(&name, &wanted, || ()).unwrap_or_else(|| {
            memory_cache.note(&name, number, &piece(number as u8));
            piece(number as u8).into()
        })
    }

    fn held(memory_cache: &MemoryCache) -> Vec<u64> {
        let mut numbers: Vec<u64> =
            memory_cache.held.read().unwrap().pieces.keys().map(|(_, number)| *number).collect();
        numbers.sort_unstable();
        numbers
    }

    #[test]
    fn pieces_that_do_not_all_fit_do_not_replace_each_other() {
        let mut memory_cache = MemoryCache::new(16 * PIECE_BYTES).unwrap();
        let mut found = Vec::new();
        for _ in 0..10 {
            for number in 0..16 {
                assert_eq!(read(&memory_cache, number), piece(number as u8));
                // Each round takes 1.6 s.
                memory_cache.opened -= Duration::from_millis(100);
            }
            found.push(held(&memory_cache));
        }
        assert_eq!((found[0].len(), found[1].len()), (0, 14));
        assert!(found[2..].iter().all(|numbers| *numbers == found[1]), "{found:?}");
    }

    #[test]
    fn pieces_that_are_not_read_any_more_are_replaced() {
        let mut memory_cache = MemoryCache::new(16 * PIECE_BYTES).unwrap();
        for _ in 0..2 {
            (0..14).for_each(|number| drop(read(&memory_cache, number)));
            memory_cache.opened -= Duration::from_millis(APART_MS);
        }
        assert_eq!(held(&memory_cache), (0..14).collect::<Vec<_>>());
        memory_cache.opened -= Duration::from_secs(10);
        // These are read now and then, and stay.
        let stay = [read(&memory_cache, 3), read(&memory_cache, 7)];
        let first = read(&memory_cache, 0);
        for _ in 0..3 {
            memory_cache.opened -= Duration::from_secs(4);
            (0..8).for_each(|number| drop(read(&memory_cache, 20 + number)));
            (3..8).step_by(4).for_each(|number| drop(read(&memory_cache, number)));
        }
        let now = held(&memory_cache);
        assert_eq!(now.len(), 14);
        assert!([3, 7].into_iter().chain(20..28).all(|number| now.contains(&number)), "{now:?}");
        assert_eq!((&stay[0][..], &first[..]), (&piece(3)[..], &piece(0)[..]));
    }

    #[test]
    fn memory_is_bounded_while_pieces_are_sent() {
        let mut memory_cache = MemoryCache::new(16 * PIECE_BYTES).unwrap();
        let mut sent = Vec::new();
        for number in 0..200 {
            hold(&mut memory_cache, &"version".into(), number, &piece(number as u8));
            // A slow client holds some of them.
            let bytes = read(&memory_cache, number);
            sent.extend((number % 50 == 0).then_some((number, bytes)));
            assert!(memory_cache.arena.held_bytes() <= 16 * PIECE_BYTES);
            memory_cache.opened -= Duration::from_secs(1);
        }
        assert!(sent.iter().all(|(number, bytes)| *bytes == piece(*number as u8)));
        let numbers = held(&memory_cache);
        assert!(numbers.len() >= 12 && numbers[0] > 180, "{numbers:?}");
        drop(sent);
        memory_cache.forget("version");
        assert_eq!((memory_cache.arena.held_bytes(), memory_cache.held.read().unwrap().bytes), (0, 0));
    }

    #[test]
    fn drives_learn_now_and_then_that_a_piece_is_used() {
        let mut memory_cache = MemoryCache::new(8 * PIECE_BYTES).unwrap();
        let (name, touches): (Arc<str>, _) = ("version".into(), Cell::new(0));
        hold(&mut memory_cache, &name, 0, &piece(1));
        let read =
            |memory_cache: &MemoryCache| memory_cache.get(&name, &(0..10), || touches.set(touches.get() + 1)).unwrap();
        read(&memory_cache);
        assert_eq!(touches.get(), 0);
        memory_cache.opened -= Duration::from_millis(TOUCH_MS);
        (0..3).for_each(|_| drop(read(&memory_cache)));
        assert_eq!(touches.get(), 1);
    }
}
