//! State that belongs to one process: after a fork the child sees none of it, so no lock it may inherit can hold it up. A lock
//! that must live on is held under `no_fork`.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Once, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Counts the forks between this process and the first one.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// Read by threads that hold a lock which a child has use for; a fork waits until there are none.
static GATE: RwLock<()> = RwLock::new(());

thread_local! {
    static CLOSED: RefCell<Option<RwLockWriteGuard<'static, ()>>> = const { RefCell::new(None) };
}

extern "C" fn before_fork() {
    CLOSED.set(Some(GATE.write().unwrap_or_else(PoisonError::into_inner)));
}

extern "C" fn parent_after_fork() {
    CLOSED.take();
}

extern "C" fn child_after_fork() {
    GENERATION.fetch_add(1, Ordering::Relaxed);
    CLOSED.take();
}

/// Done early, by whoever loads the library: a child that is forked in the middle of it would wait for ever.
pub fn watch_forks() {
    static WATCH: Once = Once::new();
    // SAFETY: the handlers take and release a lock that is held for moments, and add to an atomic.
    WATCH.call_once(|| unsafe {
        libc::pthread_atfork(Some(before_fork), Some(parent_after_fork), Some(child_after_fork));
    });
}

/// To be held around a lock that lives on in a child, and nowhere twice in a thread.
pub fn no_fork() -> RwLockReadGuard<'static, ()> {
    watch_forks();
    GATE.read().unwrap_or_else(PoisonError::into_inner)
}

/// A number that a forked child does not share with its parent.
pub fn generation() -> u64 {
    watch_forks();
    GENERATION.load(Ordering::Relaxed)
}

static ASKED: OnceLock<fn() -> bool> = OnceLock::new();

thread_local! {
    static STOP: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Make this thread, which works for another one, stop waiting when the flag is set, and ask nobody else.
pub fn heed(stop: Arc<AtomicBool>) {
    STOP.set(Some(stop));
}

/// Set what threads that wait for the network ask now and then: whether their user wants them to stop. The first one counts.
pub fn watch_interrupts(asked: fn() -> bool) {
    let _ = ASKED.set(asked);
}

/// Whether the user of this thread wants it to stop.
pub fn interrupted() -> bool {
    if let Some(stop) = STOP.with_borrow(|stop| stop.as_ref().map(|stop| stop.load(Ordering::Relaxed))) {
        return stop;
    }
    ASKED.get().is_some_and(|asked| asked())
}

struct Entry<T> {
    generation: u64,
    value: T,
}

/// A value that is made anew in every process that asks for it. A parent's value is leaked in the child, never
/// dropped: another thread of the parent may have been changing it when the fork came.
pub struct PerProcess<T, F = fn() -> T> {
    current: AtomicPtr<Entry<T>>,
    make: F,
    /// Shared between threads only where its value may be.
    value: PhantomData<T>,
}

impl<T, F> std::fmt::Debug for PerProcess<T, F> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("PerProcess")
    }
}

/// Made by whichever thread comes first, dropped by whichever comes last: the value must be both `Send` and `Sync`.
impl<T: Send + Sync, F: Fn() -> T> PerProcess<T, F> {
    pub const fn new(make: F) -> PerProcess<T, F> {
        PerProcess { current: AtomicPtr::new(std::ptr::null_mut()), make, value: PhantomData }
    }

    pub fn get(&self) -> &T {
        let generation = GENERATION.load(Ordering::Relaxed);
        let found = self.current.load(Ordering::Acquire);
        // SAFETY: a pointer in `current` comes from Box::into_raw below and is freed only in `drop`.
        if let Some(entry) = unsafe { found.as_ref() }
            && entry.generation == generation
        {
            return &entry.value;
        }
        watch_forks();
        let fresh = Box::into_raw(Box::new(Entry { generation, value: (self.make)() }));
        match self.current.compare_exchange(found, fresh, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: `fresh` is ours and now owned by `self`; a stale `found` is leaked on purpose.
            Ok(_) => unsafe { &(*fresh).value },
            Err(winner) => {
                // SAFETY: nobody else has seen `fresh`; `winner` is live as `found` would be.
                unsafe {
                    drop(Box::from_raw(fresh));
                    &(*winner).value
                }
            }
        }
    }
}

impl<T, F> Drop for PerProcess<T, F> {
    fn drop(&mut self) {
        let found = *self.current.get_mut();
        // SAFETY: `&mut self`: nobody borrows from the entry; one of another generation is leaked, see above.
        unsafe {
            if found.as_ref().is_some_and(|entry| entry.generation == GENERATION.load(Ordering::Relaxed)) {
                drop(Box::from_raw(found));
            }
        }
    }
}
