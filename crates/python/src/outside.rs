//! Run work without the GIL, so that other Python threads run meanwhile.
//!
//! Before Python 3.14, a daemon thread that takes the GIL while the interpreter exits is ended by unwinding its stack. Rust aborts the
//! process when it meets such an unwinding. Here, such a thread sleeps before it takes the GIL, as it would in Python 3.14.

use std::cell::Cell;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use penstock_storage::process::PerProcess;
use pyo3::prelude::*;

/// The thread that ends the interpreter. Only this thread, and those that it starts in exit handlers, may still take the GIL.
static ENDING: PerProcess<OnceLock<ThreadId>> = PerProcess::new(OnceLock::new);
thread_local! {
    /// Whether this thread's first call came after the end had begun. None before that call.
    static LATE: Cell<Option<bool>> = const { Cell::new(None) };
}
/// How many threads are about to take the GIL.
static RETURNING: PerProcess<AtomicUsize> = PerProcess::new(AtomicUsize::default);

pub trait Outside {
    fn outside<T: Send, F: Send + FnOnce() -> T>(self, work: F) -> T;
}

impl Outside for Python<'_> {
    fn outside<T: Send, F: Send + FnOnce() -> T>(self, work: F) -> T {
        if LATE.get().is_none() {
            LATE.set(Some(ENDING.get().get().is_some()));
        }
        let result = self.detach(|| {
            let result = work();
            RETURNING.get().fetch_add(1, SeqCst);
            sleep_if_ending();
            result
        });
        RETURNING.get().fetch_sub(1, SeqCst);
        result
    }
}

/// Run work with the GIL in a thread that does not hold it. Returns None if another thread is ending the interpreter.
pub fn inside<T>(work: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    RETURNING.get().fetch_add(1, SeqCst);
    let result = may_return().then(|| Python::attach(work));
    RETURNING.get().fetch_sub(1, SeqCst);
    result
}

/// Sleep forever if another thread is ending the interpreter.
fn sleep_if_ending() {
    if !may_return() {
        RETURNING.get().fetch_sub(1, SeqCst);
        loop {
            thread::park();
        }
    }
}

fn may_return() -> bool {
    ENDING.get().get().is_none_or(|ending| *ending == thread::current().id() || LATE.get() == Some(true))
}

/// An exit handler: from now on, no other thread that runs now takes the GIL. Waits for those that are about to take it.
#[pyfunction]
pub fn end(py: Python<'_>) {
    let _ = ENDING.get().set(thread::current().id());
    let until = Instant::now() + Duration::from_secs(5);
    py.detach(|| {
        while RETURNING.get().load(SeqCst) > 0 && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    });
}
