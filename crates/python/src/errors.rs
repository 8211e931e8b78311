//! Converts core errors to Python exceptions of the matching class, which `penstock.errors.make` creates.

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use pyo3::prelude::*;

use crate::made::Made;

static MAKE: Made = Made::new();

thread_local! {
    /// The exception that a signal handler raised while this thread waited.
    static RAISED: Cell<Option<PyErr>> = const { Cell::new(None) };
}

/// A flag that stops a read-ahead thread when its results are no longer needed.
#[pyclass(frozen, module = "penstock._core")]
pub struct Stop(Arc<AtomicBool>);

#[pymethods]
impl Stop {
    #[new]
    fn new() -> Stop {
        Stop(Arc::default())
    }

    /// Let this flag end waits in the current thread once it is set.
    fn heed(&self) {
        penstock_storage::process::heed(self.0.clone());
    }

    fn set(&self) {
        self.0.store(true, Relaxed);
    }
}

/// Run pending signal handlers and return whether one raised an exception, such as KeyboardInterrupt for Ctrl-C. Always returns
/// false outside the main thread.
pub fn interrupted() -> bool {
    let raised = Python::attach(|py| py.check_signals()).err();
    let came = raised.is_some();
    if came {
        RAISED.set(raised);
    }
    came
}

/// Convert an error to an exception. Importing `penstock.errors` fails only if the package is incomplete.
pub fn raise(py: Python<'_>, error: penstock_error::Error) -> PyErr {
    let code = error.code();
    let (rows, row_ids) = (error.row_list().to_vec(), error.row_id_list().to_vec());
    let place = (error.column_name(), error.object_name(), error.commit_id());
    let said = (error.prefix(), error.row(), error.reason());
    let made = MAKE.import(py, "penstock.errors", "make").and_then(|make| {
        make.call1((format!("{:?}", error.kind()), error.code(), said, error.hint_text(), rows, row_ids, place))
    });
    let made = match made {
        Ok(exception) => PyErr::from_value(exception),
        Err(error) => error,
    };
    // Raise the signal handler's own exception. An unknown commit state becomes the cause of that exception.
    match matches!(code, "interrupted" | "commit-state-unknown").then(|| RAISED.take()).flatten() {
        None => made,
        Some(raised) => {
            raised.set_cause(py, (code != "interrupted").then_some(made));
            raised
        }
    }
}

/// Converts the error in a result to an exception.
pub trait OrRaise<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> OrRaise<T> for penstock_error::Result<T> {
    fn or_raise(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|error| raise(py, error))
    }
}

/// Make the exception object for an error that is reported instead of raised.
pub fn exception(py: Python<'_>, error: penstock_error::Error) -> Py<PyAny> {
    raise(py, error).into_value(py).into_any()
}

/// A function of the user that hears of two growing counts, until it fails.
pub struct Progress {
    call: Option<Py<PyAny>>,
    failed: Option<PyErr>,
}

impl Progress {
    pub fn new(call: Option<Py<PyAny>>) -> Progress {
        Progress { call, failed: None }
    }

    pub fn report(&mut self, first: u64, second: u64) {
        if let (Some(call), None) = (&self.call, &self.failed) {
            self.failed = Python::attach(|py| call.call1(py, (first, second)).err());
        }
    }

    pub fn has_failed(&self) -> bool {
        self.failed.is_some()
    }

    /// Raise the error of the function, if any.
    pub fn ended(self) -> PyResult<()> {
        self.failed.map_or(Ok(()), Err)
    }
}
