//! State that belongs to one process. A forked child starts with fresh state, so an inherited lock cannot block it.
//! A lock that the child keeps using must be held under `no_fork`.

use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Once, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Number of forks between the first process and this one.
static GENERATION: AtomicU64 = AtomicU64::new(0);

/// A thread read-locks this while it holds a lock that a child will use. A fork write-locks it and so waits for those threads.
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

/// Register the fork handlers. Call this when the library is loaded, because a child forked during the call would wait forever.
pub fn watch_forks() {
    static WATCH: Once = Once::new();
    // SAFETY: the handlers only take and release a lock that is held briefly, and increment an atomic counter.
    WATCH.call_once(|| unsafe {
        libc::pthread_atfork(Some(before_fork), Some(parent_after_fork), Some(child_after_fork));
    });
}

/// Delay forks while the guard exists. Acquire it before any lock that a child keeps using, and at most once per thread.
pub fn no_fork() -> RwLockReadGuard<'static, ()> {
    watch_forks();
    GATE.read().unwrap_or_else(PoisonError::into_inner)
}

/// Return a number that differs between a forked child and its parent.
pub fn generation() -> u64 {
    watch_forks();
    GENERATION.load(Ordering::Relaxed)
}

static ASKED: OnceLock<fn() -> bool> = OnceLock::new();

thread_local! {
    static STOP: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Make this worker thread stop waiting when `stop` is set. The thread then ignores the function passed to `watch_interrupts`.
pub fn heed(stop: Arc<AtomicBool>) {
    STOP.set(Some(stop));
}

/// Set the function that threads poll while they wait for the network. It returns whether the user wants them to stop.
/// Only the first call has an effect.
pub fn watch_interrupts(asked: fn() -> bool) {
    let _ = ASKED.set(asked);
}

/// Return whether the user wants this thread to stop.
pub fn interrupted() -> bool {
    if let Some(stop) = STOP.with_borrow(|stop| stop.as_ref().map(|stop| stop.load(Ordering::Relaxed))) {
        return stop;
    }
    ASKED.get().is_some_and(|asked| asked())
}

struct OfProcess<T> {
    generation: u64,
    value: T,
}

/// A value that each process creates on first use. A child leaks its parent's value and never drops it: another thread
/// of the parent may have been changing it during the fork.
pub struct PerProcess<T, F = fn() -> T> {
    current: AtomicPtr<OfProcess<T>>,
    make: F,
    /// Makes this type `Send` and `Sync` only if `T` is.
    value: PhantomData<T>,
}

impl<T, F> std::fmt::Debug for PerProcess<T, F> {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.write_str("PerProcess")
    }
}

/// Any thread may create the value, use it or drop it, so the value must be both `Send` and `Sync`.
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
        let fresh = Box::into_raw(Box::new(OfProcess { generation, value: (self.make)() }));
        match self.current.compare_exchange(found, fresh, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: `self` now owns `fresh`. A stale `found` is leaked on purpose.
            Ok(_) => unsafe { &(*fresh).value },
            Err(winner) => {
                // SAFETY: no other thread has seen `fresh`; `winner` is valid for the same reason as `found`.
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
        // SAFETY: `&mut self` rules out other borrows of the entry. An entry from another generation is leaked, as described above.
        unsafe {
            if found.as_ref().is_some_and(|entry| entry.generation == GENERATION.load(Ordering::Relaxed)) {
                drop(Box::from_raw(found));
            }
        }
    }
}
