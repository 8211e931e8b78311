//! A transaction handle: takes prepared columns, commits once.

use std::sync::{Arc, Mutex, PoisonError};

use penstock_dataset::Input;
use penstock_error::Error;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::OrRaise;
use crate::snapshot::Snapshot;
use crate::{input, media};

#[pyclass(frozen, module = "penstock._core")]
pub struct Transaction {
    /// Empty once it is committed or given up.
    inner: Mutex<Option<penstock_dataset::Transaction>>,
}

impl Transaction {
    pub fn begin(py: Python<'_>, base: Arc<penstock_dataset::Snapshot>) -> PyResult<Transaction> {
        let inner = penstock_dataset::Transaction::begin(base).or_raise(py)?;
        Ok(Transaction { inner: Mutex::new(Some(inner)) })
    }
}

fn closed() -> Error {
    Error::new("transaction-closed", "cannot go on with this transaction: it is committed or was given up")
}

#[pymethods]
impl Transaction {
    /// Add samples: name → prepared values (see `penstock.schema`).
    fn append(&self, py: Python<'_>, columns: &Bound<'_, PyDict>, validate: &str) -> PyResult<()> {
        let validate = media::validate(py, validate)?;
        let mut inputs = Vec::with_capacity(columns.len());
        for (name, values) in columns {
            let name: String = name.extract()?;
            let column = input::column(py, &values, &name)?;
            inputs.push(Input { name, column });
        }
        py.detach(|| {
            let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            inner.as_mut().ok_or_else(closed)?.append(inputs, validate)
        })
        .or_raise(py)
    }

    /// Commit: (snapshot id, first row id, samples, the new snapshot).
    fn commit(&self, py: Python<'_>, message: &str, author: &str, properties: &str) -> PyResult<(String, i64, u64, Snapshot)> {
        let (receipt, snapshot) = py
            .detach(|| {
                let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner).take();
                inner.ok_or_else(closed)?.commit(message, author, properties)
            })
            .or_raise(py)?;
        Ok((receipt.snapshot.to_string(), receipt.first_row_id, receipt.samples, Snapshot { inner: Arc::new(snapshot) }))
    }

    /// Give up; nothing of it stays.
    fn abort(&self, py: Python<'_>) {
        py.detach(|| drop(self.inner.lock().unwrap_or_else(PoisonError::into_inner).take()));
    }
}
