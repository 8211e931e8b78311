//! Run work without the GIL, so that other Python threads run meanwhile.
//!
//! Before Python 3.14, a daemon thread that takes the GIL while the interpreter is finalized is ended by unwinding its stack. Rust crashes
//! when it meets such an unwinding. Here, such a thread sleeps before it takes the GIL, as it would in Python 3.14. A thread that waits
//! for the GIL while finalization begins would still crash. So once our exit handler has run, other threads wait a while before they
//! take the GIL: finalization usually begins in that time. Then they run for a while, because exit handlers may join them.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use penstock_storage::process::PerProcess;
use pyo3::prelude::*;

/// For how long a thread waits for finalization to begin.
const WAIT: Duration = Duration::from_millis(20);
/// For how long it then runs before it waits again.
const RUN: Duration = Duration::from_millis(100);
/// How long our exit handler waits for threads that are about to take the GIL.
const PATIENCE: Duration = Duration::from_secs(5);

/// The thread that runs the exit handlers.
static ENDING: PerProcess<OnceLock<ThreadId>> = PerProcess::new(OnceLock::new);
/// How many threads are about to take the GIL.
static RETURNING: PerProcess<AtomicUsize> = PerProcess::new(AtomicUsize::default);
thread_local! {
    /// The end of the time in which this thread runs. None before it has waited.
    static RUNS_UNTIL: Cell<Option<Instant>> = const { Cell::new(None) };
}

pub trait Outside {
    fn outside<T: Send, F: Send + FnOnce() -> T>(self, work: F) -> T;
}

impl Outside for Python<'_> {
    fn outside<T: Send, F: Send + FnOnce() -> T>(self, work: F) -> T {
        let result = self.detach(|| {
            let result = work();
            announce();
            result
        });
        RETURNING.get().fetch_sub(1, SeqCst);
        result
    }
}

/// Run work with the GIL in a thread that does not hold it.
pub fn inside<T>(work: impl FnOnce(Python<'_>) -> T) -> T {
    announce();
    Python::attach(|py| {
        RETURNING.get().fetch_sub(1, SeqCst);
        work(py)
    })
}

/// Count this thread as one that is about to take the GIL. If the interpreter is ending, wait first, and do not return if it is finalized.
fn announce() {
    let returning = RETURNING.get();
    returning.fetch_add(1, SeqCst);
    let Some(ending) = ENDING.get().get() else { return };
    if *ending == thread::current().id() {
        return;
    }
    returning.fetch_sub(1, SeqCst);
    let now = Instant::now();
    if RUNS_UNTIL.get().is_none_or(|until| until < now) {
        while now.elapsed() < WAIT && !finalized() {
            thread::sleep(Duration::from_millis(1));
        }
        RUNS_UNTIL.set(Some(Instant::now() + RUN));
    }
    while finalized() {
        thread::park();
    }
    returning.fetch_add(1, SeqCst);
}

/// Return whether finalization has begun. The function has another name before Python 3.13 and is not in the limited API.
fn finalized() -> bool {
    static FOUND: OnceLock<Option<extern "C" fn() -> c_int>> = OnceLock::new();
    let found = FOUND.get_or_init(|| {
        [c"Py_IsFinalizing", c"_Py_IsFinalizing"].into_iter().find_map(|name| {
            // SAFETY: the name is a C string, and both functions have this signature. They may be called without the GIL.
            unsafe {
                let found = libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr());
                std::mem::transmute::<*mut libc::c_void, Option<extern "C" fn() -> c_int>>(found)
            }
        })
    });
    found.is_some_and(|found| found() != 0)
}

/// Our exit handler. Waits for threads that are about to take the GIL.
#[pyfunction]
pub fn end(py: Python<'_>) {
    let _ = ENDING.get().set(thread::current().id());
    let until = Instant::now() + PATIENCE;
    py.detach(|| {
        while RETURNING.get().load(SeqCst) > 0 && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    });
}
