//! The commits of a log, and the differences between two snapshots.

use std::sync::{Arc, Mutex, PoisonError};

use numpy::PyArray1;
use penstock_dataset::{Difference, Happened, History};
use penstock_format::SnapshotId;
use penstock_format::schema::Schema;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::errors::OrRaise;

/// The differences between two snapshots.
#[pyclass(module = "penstock._core")]
pub struct Diff {
    schema: Arc<Schema>,
    inner: penstock_dataset::Diff,
}

impl Diff {
    pub fn new(schema: Arc<Schema>, inner: penstock_dataset::Diff) -> Diff {
        Diff { schema, inner }
    }
}

#[pymethods]
impl Diff {
    /// Return the next (what happened, column, row ids), or None at the end.
    fn next<'py>(&mut self, py: Python<'py>) -> PyResult<Option<DiffEntry<'py>>> {
        let found = py.detach(|| self.inner.more()).or_raise(py)?;
        Ok(found.map(|Difference { what, row_ids }| {
            let (what, column) = match what {
                Happened::Added => ("added", None),
                Happened::Deleted => ("deleted", None),
                Happened::Changed(id) => {
                    ("changed", self.schema.columns.iter().find(|spec| spec.id == id).map(|spec| spec.name.clone()))
                }
                Happened::ColumnAdded(name) => ("column added", Some(name)),
                Happened::ColumnDropped(name) => ("column dropped", Some(name)),
                Happened::ColumnRenamed(name) => ("column renamed", Some(name)),
                Happened::ColumnWidened(name) => ("column widened", Some(name)),
            };
            (what, column, PyArray1::from_iter(py, row_ids.into_iter().map(u64::cast_signed)))
        }))
    }
}

type DiffEntry<'py> = (&'static str, Option<String>, Bound<'py, PyArray1<i64>>);

/// The commits of a log, which are read one by one.
#[pyclass(frozen, module = "penstock._core")]
pub struct Log {
    snapshot: Arc<penstock_dataset::Snapshot>,
    history: Mutex<History>,
}

impl Log {
    pub fn new(snapshot: Arc<penstock_dataset::Snapshot>) -> Log {
        Log { history: Mutex::new(History::new(snapshot.entry.clone())), snapshot }
    }
}

#[pymethods]
impl Log {
    /// Return the next commit as a dict, or None at the end.
    fn next(&self, py: Python<'_>) -> PyResult<Option<Py<PyDict>>> {
        let context = &self.snapshot.context;
        let next = py.detach(|| {
            let mut history = self.history.lock().unwrap_or_else(PoisonError::into_inner);
            history.next(context.storage.as_ref()).map_err(|error| context.or_replaced(error))
        });
        next.or_raise(py)?.map(|entry| commit(py, &entry.record)).transpose()
    }
}

fn commit(py: Python<'_>, record: &penstock_format::record::Record) -> PyResult<Py<PyDict>> {
    let answer = PyDict::new(py);
    answer.set_item("snapshot", record.snapshot().to_string())?;
    answer.set_item("number", record.number)?;
    answer.set_item("kind", record.kind.name())?;
    answer.set_item("time_us", record.time_us)?;
    answer.set_item("samples", record.live)?;
    let parents = record.parents.iter().map(|parent| SnapshotId {
        branch: parent.branch,
        number: parent.number,
        uuid: parent.uuid,
    });
    answer.set_item("parents", parents.map(|id| id.to_string()).collect::<Vec<_>>())?;
    let transactions = record.transactions.iter().map(|transaction| {
        let of_one = PyDict::new(py);
        of_one.set_item("message", &transaction.message)?;
        of_one.set_item("author", &transaction.author)?;
        of_one.set_item("samples_added", transaction.samples_added)?;
        of_one.set_item("samples_deleted", transaction.samples_deleted)?;
        of_one.set_item("properties", &transaction.properties)?;
        Ok(of_one)
    });
    answer.set_item("transactions", transactions.collect::<PyResult<Vec<_>>>()?)?;
    Ok(answer.unbind())
}
