//! Reusable memory for decoded pixels. Without reuse, the kernel would clear fresh pages, which takes up to a third of the decoding time.

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A pool of memory for decoded pixels. It keeps at most `most_bytes` in addition to the pixels in use.
#[derive(Debug)]
pub struct Pool {
    idle: Mutex<Idle>,
    most_bytes: usize,
}

#[derive(Debug)]
struct Idle {
    memory: Vec<Vec<u8>>,
    /// Bytes of idle memory, plus the unused excess of blocks in use.
    spare_bytes: usize,
}

/// Decoded pixels. Dropping a `Pixels` returns its memory to the pool.
#[derive(Debug)]
pub struct Pixels<'a> {
    memory: Vec<u8>,
    bytes: usize,
    pool: Option<&'a Pool>,
}

impl Pool {
    pub const fn new(most_bytes: usize) -> Pool {
        Pool { idle: Mutex::new(Idle { memory: Vec::new(), spare_bytes: 0 }), most_bytes }
    }

    fn idle(&self) -> MutexGuard<'_, Idle> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return memory for `bytes` bytes with arbitrary content.
    pub fn take(&self, bytes: usize) -> Pixels<'_> {
        let fitting = {
            let Idle { memory, spare_bytes } = &mut *self.idle();
            let fits = memory.iter().enumerate().filter(|(_, memory)| memory.len() >= bytes);
            let smallest = fits.min_by_key(|(_, memory)| memory.len()).map(|(at, _)| at);
            smallest.map(|at| {
                *spare_bytes -= bytes;
                memory.swap_remove(at)
            })
        };
        // Fresh memory from the kernel is already zeroed, so `vec!` writes nothing.
        Pixels { memory: fitting.unwrap_or_else(|| vec![0; bytes]), bytes, pool: Some(self) }
    }

    /// Take back memory that was requested for `bytes` bytes. If the pool exceeds its limit, it frees the smallest blocks first,
    /// because larger blocks fit more images.
    fn give(&self, returned: Vec<u8>, bytes: usize) {
        let mut let_go = Vec::new(); // Dropped after the lock is released.
        let Idle { memory, spare_bytes } = &mut *self.idle();
        *spare_bytes += bytes;
        memory.push(returned);
        while *spare_bytes > self.most_bytes {
            let Some(at) = (0..memory.len()).min_by_key(|at| memory[*at].len()) else { break };
            *spare_bytes -= memory[at].len();
            let_go.push(memory.swap_remove(at));
        }
    }
}

impl From<Vec<u8>> for Pixels<'_> {
    fn from(memory: Vec<u8>) -> Self {
        let bytes = memory.len();
        Pixels { memory, bytes, pool: None }
    }
}

impl Deref for Pixels<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.memory[..self.bytes]
    }
}

impl DerefMut for Pixels<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.memory[..self.bytes]
    }
}

impl Drop for Pixels<'_> {
    fn drop(&mut self) {
        if let Some(pool) = self.pool {
            pool.give(std::mem::take(&mut self.memory), self.bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(pool: &Pool) -> Vec<usize> {
        let mut kept: Vec<usize> = pool.idle().memory.iter().map(Vec::len).collect();
        kept.sort_unstable();
        kept
    }

    #[test]
    fn memory_is_used_again() {
        let pool = Pool::new(100);
        let first = pool.take(60);
        let begin = first.as_ptr();
        drop(first);
        let again = pool.take(50);
        assert_eq!((again.as_ptr(), again.len()), (begin, 50));
        // Ten bytes of `again` are spare, so the pool may keep ninety more.
        drop((pool.take(80), pool.take(70)));
        assert_eq!(kept(&pool), [80]);
        drop(again);
        assert_eq!(kept(&pool), [80]);
    }

    #[test]
    fn no_more_is_kept_than_may_be() {
        let pool = Pool::new(1000);
        let mut state = 7usize;
        let mut held: Vec<Pixels<'_>> = Vec::new();
        for _ in 0..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let drawn = state >> 33;
            if drawn.is_multiple_of(2) && held.len() < 16 {
                held.push(pool.take(drawn % 700));
            } else if !held.is_empty() {
                held.swap_remove(drawn % held.len());
            }
            let unasked: usize = held.iter().map(|pixels| pixels.memory.len() - pixels.len()).sum();
            let spare = pool.idle().spare_bytes;
            assert_eq!(spare, kept(&pool).iter().sum::<usize>() + unasked);
            assert!(spare <= 1000);
        }
        drop(held);
        assert!(kept(&pool).iter().sum::<usize>() > 600);
        assert_eq!(Pool::new(0).take(5).len(), 5);
    }
}
