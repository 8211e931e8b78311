//! Python objects that are made once.

use std::sync::OnceLock;

use pyo3::prelude::*;

/// A Python object, made by whoever asks first. Unlike `PyOnceLock` it holds no lock while it is made, which may let go of the
/// GIL: a child that another thread forks just then would wait for it for ever. Two threads may make one each; the first counts.
pub struct Made(OnceLock<Py<PyAny>>);

impl Made {
    pub const fn new() -> Made {
        Made(OnceLock::new())
    }

    pub fn get<'py>(&self, py: Python<'py>, make: impl FnOnce() -> PyResult<Bound<'py, PyAny>>) -> PyResult<&Bound<'py, PyAny>> {
        if let Some(object) = self.0.get() {
            return Ok(object.bind(py));
        }
        let object = make()?.unbind();
        Ok(self.0.get_or_init(|| object).bind(py))
    }

    /// What a module has by that name.
    pub fn import<'py>(&self, py: Python<'py>, module: &str, name: &str) -> PyResult<&Bound<'py, PyAny>> {
        self.get(py, || py.import(module)?.getattr(name))
    }
}
