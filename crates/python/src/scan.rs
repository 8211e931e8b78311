//! The groups of rows in which Python reads a scan.

use pyo3::prelude::*;

use crate::errors::OrRaise;

/// Divides a scan into groups of rows. A Python generator reads and yields the record batches.
#[pyclass(module = "penstock._core")]
pub struct Scan {
    pub inner: penstock_dataset::Scan,
}

#[pymethods]
impl Scan {
    /// Return the next rows to read, as (start, end, whether the block cache keeps them). Returns None at the end, or if
    /// the `held` groups that the caller already has are enough.
    fn next(&mut self, py: Python<'_>, held: usize) -> PyResult<Option<(u64, u64, bool)>> {
        let stretch = py.detach(|| self.inner.next(held)).or_raise(py)?;
        Ok(stretch.map(|stretch| (stretch.rows.start, stretch.rows.end, stretch.keep)))
    }

    /// Record the size of the last group that was read. Returns how many of its rows fit in a batch, and the maximum number of
    /// bytes per batch.
    fn took(&mut self, rows: u64, bytes: u64) -> (u64, u64) {
        (self.inner.took(rows, bytes), self.inner.batch_bytes())
    }
}
