//! Where to cut a scan, for the Python generator that reads and yields record batches.

use pyo3::prelude::*;

use crate::errors::OrRaise;

#[pyclass(module = "penstock._core")]
pub struct Scan {
    pub inner: penstock_dataset::Scan,
}

#[pymethods]
impl Scan {
    /// Return what to read next: (start, end, whether the block cache keeps it). None at the end, or if `held` groups are enough.
    fn next(&mut self, py: Python<'_>, held: usize) -> PyResult<Option<(u64, u64, bool)>> {
        let stretch = py.detach(|| self.inner.next(held)).or_raise(py)?;
        Ok(stretch.map(|stretch| (stretch.rows.start, stretch.rows.end, stretch.keep)))
    }

    /// Report the size of the group that was read last. Returns how many of its rows fit one batch, and how many bytes one may have.
    fn took(&mut self, rows: u64, bytes: u64) -> (u64, u64) {
        (self.inner.took(rows, bytes), self.inner.batch_bytes())
    }
}
