//! Python objects that are created only once.

use std::sync::OnceLock;

use pyo3::prelude::*;

/// A Python object that the first caller creates. Creating it may release the GIL. Unlike `PyOnceLock`, this type therefore holds
/// no lock during the call. Otherwise, a child process forked by another thread at that moment would wait forever. If two threads
/// both create an object, the first object is kept.
pub struct Made(OnceLock<Py<PyAny>>);

impl Made {
    pub const fn new() -> Made {
        Made(OnceLock::new())
    }

    pub fn get<'py>(
        &self,
        py: Python<'py>,
        make: impl FnOnce() -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<&Bound<'py, PyAny>> {
        if let Some(object) = self.0.get() {
            return Ok(object.bind(py));
        }
        let object = make()?.unbind();
        Ok(self.0.get_or_init(|| object).bind(py))
    }

    /// Import a module and return its attribute `name`.
    pub fn import<'py>(&self, py: Python<'py>, module: &str, name: &str) -> PyResult<&Bound<'py, PyAny>> {
        self.get(py, || py.import(module)?.getattr(name))
    }
}
