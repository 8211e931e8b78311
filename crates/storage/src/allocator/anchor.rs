//! Keeps the memory of freed objects at the end of the heap for the next take, as long as takes follow each other.
//!
//! glibc returns the free end of its heap to the kernel as soon as that end exceeds 128 KiB. A take's large objects are at the end of the
//! heap. When they are freed, their memory is gone, and the next take must fault all of it in again, which costs more than the copies. An
//! allocation above the objects, the anchor, keeps their memory in the process. Nothing is written to the anchor. It is freed when no
//! take has used it for a while. What is free then returns to the kernel.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use crate::process::PerProcess;

/// An anchor that no take has used for this long is freed.
const IDLE: Duration = Duration::from_millis(500);
/// An anchor is replaced after this time, because it may keep more memory than the latest takes need.
const RENEWED: Duration = Duration::from_secs(1);
/// Allocations to allocate until one is above the objects. Others fill holes of the heap, and are freed again.
const TRIES: usize = 4;
/// glibc always maps larger objects separately, and at first also those of `MAPPED_FROM_BYTES`.
const MOST_BYTES: usize = 32 << 20;
const MAPPED_FROM_BYTES: usize = 128 << 10;

struct Anchor {
    /// The thread whose takes use the anchor. Each thread may have a heap of its own.
    thread: ThreadId,
    allocation: Allocation,
    made: Instant,
    used: Instant,
}

/// An allocation of the system allocator, which any thread may free.
struct Allocation(*mut libc::c_void);

// SAFETY: the allocation belongs to this value alone, and `free` may be called by any thread.
unsafe impl Send for Allocation {}

impl Drop for Allocation {
    fn drop(&mut self) {
        // SAFETY: the pointer came from `malloc`, or is null, and is freed only here.
        unsafe { libc::free(self.0) }
    }
}

impl Allocation {
    fn new(bytes: usize) -> Allocation {
        // SAFETY: a call of `malloc` has no preconditions.
        Allocation(unsafe { libc::malloc(bytes) })
    }

    /// Return an allocation that is above the address `last`, or None if the allocator gives none.
    fn above(last: usize, bytes: usize) -> Option<Allocation> {
        let mut lower = Vec::with_capacity(TRIES);
        for _ in 0..TRIES {
            let allocation = Allocation::new(bytes);
            // A mapped allocation begins 16 bytes after the start of a page. When it is freed, glibc learns to take such allocations from the heap.
            if bytes >= MAPPED_FROM_BYTES && allocation.0.addr() % 4096 == 16 {
                continue;
            }
            if allocation.0.addr() > last {
                return Some(allocation);
            }
            lower.push(allocation);
        }
        None
    }
}

/// The anchors of a process.
#[derive(Default)]
struct Anchors(Mutex<Vec<Anchor>>);

impl Anchors {
    fn lock(&self) -> MutexGuard<'_, Vec<Anchor>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Make sure that this thread has an anchor above `last`. Returns whether it is the only anchor and new.
    fn hold(&self, last: usize, bytes: usize, now: Instant) -> bool {
        let mut anchors = self.lock();
        let thread = std::thread::current().id();
        let known = anchors.iter().position(|anchor| anchor.thread == thread);
        if let Some(anchor) = known.and_then(|at| anchors.get_mut(at))
            && anchor.allocation.0.addr() > last
            && now.duration_since(anchor.made) < RENEWED
        {
            anchor.used = now;
            return false;
        }
        let Some(allocation) = Allocation::above(last, bytes) else { return false };
        let anchor = Anchor { thread, allocation, made: now, used: now };
        match known {
            Some(at) => anchors[at] = anchor,
            None => anchors.push(anchor),
        }
        known.is_none() && anchors.len() == 1
    }

    /// Free the anchors that were not used after `before`. Returns how many are left.
    fn release(&self, before: Instant) -> usize {
        let mut anchors = self.lock();
        anchors.retain(|anchor| anchor.used > before);
        anchors.len()
    }
}

static ANCHORS: PerProcess<Anchors> = PerProcess::new(Anchors::default);

/// Keep the memory of the objects that this thread has just allocated for its next take. The last one in memory is at `last`, and the
/// largest one has `bytes` bytes. Cost: a few compares, and an allocation of the heap if the objects moved.
pub fn hold(last: usize, bytes: usize) {
    if !cfg!(target_env = "gnu") || bytes >= MOST_BYTES || !ANCHORS.get().hold(last, bytes, Instant::now()) {
        return;
    }
    // The thread ends when takes have ended. It has little to do, and its stack is small.
    let watch = || {
        while ANCHORS.get().release(Instant::now().checked_sub(IDLE).unwrap_or_else(Instant::now)) > 0 {
            std::thread::sleep(IDLE / 2);
        }
        // Small objects of others may lie above the freed memory, which glibc then keeps.
        #[cfg(target_env = "gnu")]
        // SAFETY: the call has no preconditions.
        unsafe {
            libc::malloc_trim(0);
        }
    };
    let started = std::thread::Builder::new().name("penstock-heap".into()).stack_size(64 << 10).spawn(watch);
    if started.is_err() {
        ANCHORS.get().release(Instant::now());
    }
}

#[cfg(all(test, target_os = "linux", target_env = "gnu"))]
mod tests {
    use super::*;

    const OBJECTS: usize = 64;
    const BYTES: usize = 80_000;

    /// Allocate objects as a take does, and touch their pages.
    fn fill(objects: &mut Vec<Allocation>) {
        for _ in 0..OBJECTS {
            let allocation = Allocation::new(BYTES);
            // SAFETY: the allocation has that many bytes.
            unsafe { allocation.0.cast::<u8>().write_bytes(1, BYTES) };
            objects.push(allocation);
        }
    }

    fn objects() -> Vec<Allocation> {
        let mut objects = Vec::with_capacity(OBJECTS);
        fill(&mut objects);
        objects
    }

    /// Return how many of the objects at these places are in memory, judged by a page in the middle of each.
    fn resident(places: &[usize]) -> usize {
        let is_resident = |place: &&usize| {
            let mut state = 0u8;
            // SAFETY: the call accesses none of that memory. For one page, it writes one byte.
            let known =
                unsafe { libc::mincore(((*place + BYTES / 2) & !4095) as *mut libc::c_void, 1, &raw mut state) == 0 };
            known && state & 1 == 1
        };
        places.iter().filter(is_resident).count()
    }

    /// Return where objects are, on the stack: memory of the heap above the objects would be an anchor.
    fn places(objects: &[Allocation]) -> [usize; OBJECTS] {
        std::array::from_fn(|index| objects[index].0.addr())
    }

    fn last(objects: &[Allocation]) -> usize {
        objects.iter().map(|object| object.0.addr()).max().unwrap_or(0)
    }

    /// Run a test in a thread of its own, whose heap no other test uses. Other tests may have freed large allocations, after which glibc keeps more.
    fn alone(test: impl FnOnce() + Send + 'static) {
        // SAFETY: the call sets a number, which is also the first one of every process.
        unsafe { libc::mallopt(libc::M_TRIM_THRESHOLD, 128 << 10) };
        assert!(std::thread::spawn(test).join().is_ok());
    }

    #[test]
    fn freed_objects_stay_in_memory_until_takes_have_ended() {
        alone(|| {
            let (anchors, begin) = (Anchors::default(), Instant::now());
            anchors.lock().reserve(4);
            let one = objects();
            let at = places(&one);
            drop(one);
            assert!(resident(&at) < OBJECTS / 4, "without an anchor, the end of the heap is returned");
            for take in 0..5 {
                let one = objects();
                let at = places(&one);
                assert_eq!(anchors.hold(last(&one), BYTES, begin), take == 0);
                drop(one);
                assert_eq!(resident(&at), OBJECTS);
            }
            let at = places(&objects());
            assert_eq!(anchors.release(begin.checked_sub(IDLE).unwrap_or(begin)), 1);
            assert_eq!(resident(&at), OBJECTS);
            assert_eq!(anchors.release(begin), 0);
            assert!(resident(&at) < OBJECTS / 4, "the memory goes with the anchor");
        });
    }

    #[test]
    fn takes_whose_objects_outlive_the_next_take_find_an_anchor_above_both() {
        alone(|| {
            let (anchors, begin) = (Anchors::default(), Instant::now());
            anchors.lock().reserve(4);
            let mut before = objects();
            for _ in 0..6 {
                let next = objects();
                anchors.hold(last(&next), BYTES, begin);
                let at = places(&before);
                before = next;
                assert_eq!(resident(&at), OBJECTS);
            }
        });
    }

    #[test]
    fn a_large_take_does_not_determine_what_later_ones_keep() {
        alone(|| {
            let (anchors, begin) = (Anchors::default(), Instant::now());
            anchors.lock().reserve(4);
            // The lists come first, so that no memory between the objects stays in use.
            let list = || Vec::with_capacity(OBJECTS);
            let (mut first, mut second, mut small) = (list(), list(), list());
            fill(&mut first);
            fill(&mut second);
            anchors.hold(last(&first).max(last(&second)), BYTES, begin);
            let (low, high) = (places(&first), places(&second));
            first.clear();
            second.clear();
            assert_eq!(resident(&low) + resident(&high), 2 * OBJECTS);
            fill(&mut small);
            anchors.hold(last(&small), BYTES, begin + RENEWED);
            small.clear();
            assert_eq!(resident(&low), OBJECTS);
            assert!(resident(&high) < OBJECTS / 4);
        });
    }
}
