//! Files that exports write to a store: any store but a local folder, in which Python writes itself.

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};

use penstock_error::Error;
use penstock_storage::{Io, ObjectWriter, Options, Store};
use pyo3::prelude::*;

use crate::errors::OrRaise;

/// A folder of a store. One file is written at a time; it appears as a whole when it is finished.
#[pyclass(frozen, module = "penstock._core")]
pub struct Output {
    store: Arc<dyn Store>,
    writer: Mutex<Option<Box<dyn ObjectWriter>>>,
}

impl Output {
    fn in_file(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Option<Box<dyn ObjectWriter>>) -> Result<(), Error> + Send,
    ) -> PyResult<()> {
        py.detach(|| work(&mut self.writer.lock().unwrap_or_else(PoisonError::into_inner))).or_raise(py)
    }
}

#[pymethods]
impl Output {
    #[new]
    fn new(py: Python<'_>, uri: &str, storage_options: Option<Vec<(String, String)>>) -> PyResult<Output> {
        let store = py.detach(|| {
            penstock_storage::open(uri, &Options::new(storage_options.unwrap_or_default(), Io::parse("auto")?)?)
        });
        Ok(Output { store: store.or_raise(py)?, writer: Mutex::default() })
    }

    /// Return the name of an object in the folder, at any depth, that is not one of these, or None. Empty objects, which represent folders, do not count.
    fn other(&self, py: Python<'_>, own: Vec<String>) -> PyResult<Option<String>> {
        let mut found = None;
        let mut see = |name: &str| {
            found = Some(name.to_owned()).filter(|name| !name.ends_with('/') && !own.contains(name));
            if found.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        py.detach(|| self.store.survey(&mut see)).or_raise(py)?;
        Ok(found)
    }

    /// Begin a file. Another one that is not finished is discarded.
    fn begin(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        self.in_file(py, |writer| {
            *writer = Some(self.store.writer(name)?);
            Ok(())
        })
    }

    /// Append bytes to the file.
    fn write(&self, py: Python<'_>, bytes: &[u8]) -> PyResult<()> {
        self.in_file(py, |writer| match writer {
            Some(writer) => writer.write(bytes.to_vec()),
            None => Err(Error::new("internal", "cannot write: no file was started")),
        })
    }

    /// Make the file visible.
    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        self.in_file(py, |writer| writer.take().map_or(Ok(()), |writer| writer.finish()))
    }

    /// Discard the file that was begun, and delete others by name.
    fn delete(&self, py: Python<'_>, names: Vec<String>) -> PyResult<()> {
        self.in_file(py, |writer| {
            *writer = None;
            names.iter().try_for_each(|name| self.store.delete(name))
        })
    }
}
