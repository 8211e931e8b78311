//! A transaction handle, which accepts prepared columns and row ids and commits once.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::ThreadId;

use numpy::{PyArray1, PyReadonlyArray1};
use penstock_dataset::{Input, Isolation, Receipt, Validate, check_texts, generation};
use penstock_error::{Context as _, Error, Result};
use penstock_format::schema::ColumnSpec;
use penstock_format::transit::stage::Stage;
use penstock_storage::Options;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors::OrRaise;
use crate::input::NO_OWNER;
use crate::versions::snapshot::Snapshot;
use crate::view::View;
use crate::{input, media};

#[pyclass(frozen, module = "penstock._core")]
pub struct Transaction {
    /// None after commit or abort.
    inner: Mutex<Option<penstock_dataset::Transaction>>,
    /// Detects a forked child, where a thread that no longer exists may hold the lock.
    generation: u64,
    options: Options,
    /// How many changes each thread has made.
    changes: Mutex<HashMap<ThreadId, u64>>,
}

/// What a commit returns: the snapshot's id, the first row id, the number of samples, and the new snapshot.
type Committed = (String, i64, u64, Snapshot);

fn committed((receipt, snapshot): (Receipt, penstock_dataset::Snapshot), options: &Options) -> Committed {
    let snapshot = Snapshot { inner: Arc::new(snapshot), options: options.clone() };
    (receipt.snapshot.to_string(), receipt.first_row_id, receipt.samples, snapshot)
}

/// Append samples to a snapshot as one commit, without the GIL from its beginning to its end. `columns` maps names to prepared values (see
/// `input`).
#[pyfunction]
pub fn append(
    py: Python<'_>,
    snapshot: &Snapshot,
    message: &str,
    author: &str,
    columns: &Bound<'_, PyDict>,
    validate: &str,
) -> PyResult<Committed> {
    let properties = "{}";
    let append = |inputs, validate| {
        check_texts(message, author, properties)?;
        let mut transaction = penstock_dataset::Transaction::begin(snapshot.inner.clone(), Isolation::Serializable)?;
        transaction.append(inputs, validate)?;
        transaction.commit(message, author, properties)
    };
    // No caller has this transaction, so a value cannot use it while it is read.
    Ok(committed(with_inputs(py, columns, validate, (0, NO_OWNER), append)?, &snapshot.options))
}

/// Begin a transaction on a snapshot. `mode` is whether it is serialisable, and the path of its journal. The commit's message, author and properties are checked now, before any data are
/// appended.
#[pyfunction]
pub fn begin(
    py: Python<'_>,
    snapshot: &Snapshot,
    message: &str,
    author: &str,
    properties: &str,
    mode: (bool, Option<PathBuf>),
) -> PyResult<Transaction> {
    let (serializable, journal) = mode;
    let isolation = if serializable { Isolation::Serializable } else { Isolation::Snapshot };
    let begun = py.detach(|| {
        check_texts(message, author, properties)?;
        match journal {
            Some(path) => penstock_dataset::Transaction::begin_with_journal(&snapshot.inner, isolation, &path),
            None => penstock_dataset::Transaction::begin(snapshot.inner.clone(), isolation),
        }
    });
    Ok(Transaction {
        inner: Mutex::new(Some(begun.or_raise(py)?)),
        generation: generation(),
        options: snapshot.options.clone(),
        changes: Mutex::default(),
    })
}

impl Transaction {
    /// Return a number that is unique among live transactions.
    fn address(&self) -> usize {
        std::ptr::from_ref(self) as usize
    }

    /// Refuse calls from a forked child, and calls made while this transaction is pulling a value in this thread. Both could
    /// deadlock.
    fn check_caller(&self, py: Python<'_>) -> PyResult<()> {
        if input::is_pulled_by(self.address()) {
            let text = "cannot use this transaction while it is reading a value in this thread";
            return Err(
                Error::new("transaction-closed", text).hint("raise an exception from the value to abort the append")
            )
            .or_raise(py);
        }
        if self.generation == generation() {
            return Ok(());
        }
        let text = "cannot use this transaction: this process was forked after the transaction began";
        Err(Error::new("transaction-closed", text).hint("begin a new transaction in this process")).or_raise(py)
    }
}

fn closed() -> Error {
    Error::new("transaction-closed", "cannot use this transaction: it has already been committed or aborted")
}

#[pymethods]
impl Transaction {
    /// Append samples. `columns` maps names to prepared values (see `input`). `first_row` is the first row's number in the user's
    /// input, for errors. Returns the provisional row id of the first sample.
    fn append(&self, py: Python<'_>, columns: &Bound<'_, PyDict>, validate: &str, first_row: u64) -> PyResult<i64> {
        self.write(py, columns, validate, first_row, penstock_dataset::Transaction::append)
    }

    /// Give these samples new values. `columns` and `first_row` have the same meaning as in `append`.
    fn update(
        &self,
        py: Python<'_>,
        row_ids: PyReadonlyArray1<'_, i64>,
        columns: &Bound<'_, PyDict>,
        validate: &str,
        first_row: u64,
    ) -> PyResult<()> {
        let row_ids = row_ids.as_slice()?;
        self.write(py, columns, validate, first_row, |inner, inputs, validate| inner.update(row_ids, inputs, validate))
    }

    /// Add a column, given as the JSON of a list of one. `fill` has its prepared value for samples without a value, or nothing.
    fn add_column(&self, py: Python<'_>, column: &str, fill: &Bound<'_, PyDict>) -> PyResult<()> {
        let specs: Vec<ColumnSpec> = serde_json::from_str(column)
            .map_err(|error| Error::new("invalid-schema", format!("cannot add a column: {error}")))
            .or_raise(py)?;
        self.write(py, fill, "header", 0, |inner, mut inputs, validate| {
            let spec = specs
                .into_iter()
                .next()
                .ok_or_else(|| Error::new("invalid-schema", "cannot add a column: none is given"))?;
            inner.add_column(spec, inputs.pop(), validate)
        })
    }

    fn drop_column(&self, py: Python<'_>, name: &str, force: bool) -> PyResult<()> {
        self.change(py, |inner| inner.drop_column(name, force))
    }

    fn rename_column(&self, py: Python<'_>, old: &str, new: &str) -> PyResult<()> {
        self.change(py, |inner| inner.rename_column(old, new))
    }

    fn add_classes(&self, py: Python<'_>, name: &str, classes: Vec<String>) -> PyResult<()> {
        self.change(py, |inner| inner.add_classes(name, &classes))
    }

    fn rename_class(&self, py: Python<'_>, name: &str, old: &str, new: &str) -> PyResult<()> {
        self.change(py, |inner| inner.rename_class(name, old, new))
    }

    fn widen_column(&self, py: Python<'_>, name: &str, dtype: &str) -> PyResult<()> {
        self.change(py, |inner| inner.widen_column(name, dtype))
    }

    /// Add stages, given as bytes. Returns the runs of row ids of each of them.
    fn add(&self, py: Python<'_>, stages: Vec<Vec<u8>>) -> PyResult<Vec<Vec<(i64, u64)>>> {
        let parse = |bytes: Vec<u8>| Stage::parse(&bytes.into()).context(|| "cannot add a stage".to_owned());
        let stages = stages.into_iter().map(parse).collect::<Result<Vec<Stage>>>().or_raise(py)?;
        let runs = self.change(py, |inner| inner.add(&stages))?;
        Ok(runs
            .into_iter()
            .map(|runs| runs.into_iter().map(|run| (run.first.cast_signed(), run.count)).collect())
            .collect())
    }

    /// Return the number of samples appended so far.
    fn samples(&self, py: Python<'_>) -> PyResult<u64> {
        self.locked(py, |inner| Ok(inner.samples()))
    }

    /// End the transaction without a commit. Returns the new samples as a stage.
    fn stage(&self, py: Python<'_>) -> PyResult<Py<PyBytes>> {
        self.check_caller(py)?;
        let stage = py.detach(|| self.take().ok_or_else(closed)?.into_stage());
        Ok(PyBytes::new(py, &stage.or_raise(py)?.encode()).unbind())
    }

    /// Return the columns that the transaction sees, as JSON.
    fn columns(&self, py: Python<'_>) -> PyResult<String> {
        self.locked(py, |inner| {
            serde_json::to_string(&inner.schema().columns).map_err(|error| Error::new("internal", error.to_string()))
        })
    }

    /// Delete these samples.
    fn delete(&self, py: Python<'_>, row_ids: PyReadonlyArray1<'_, i64>) -> PyResult<()> {
        let row_ids = row_ids.as_slice()?;
        self.change(py, |inner| inner.delete(row_ids))
    }

    /// Update the samples with these keys, and append the others. Returns their row ids.
    fn upsert<'py>(
        &self,
        py: Python<'py>,
        key: &str,
        columns: &Bound<'_, PyDict>,
        validate: &str,
        first_row: u64,
    ) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let row_ids = self
            .write(py, columns, validate, first_row, |inner, inputs, validate| inner.upsert(key, inputs, validate))?;
        Ok(PyArray1::from_vec(py, row_ids))
    }

    /// Update the samples with these keys. Returns the rows whose keys no sample has.
    fn update_on<'py>(
        &self,
        py: Python<'py>,
        key: &str,
        columns: &Bound<'_, PyDict>,
        validate: &str,
        first_row: u64,
    ) -> PyResult<Bound<'py, PyArray1<u64>>> {
        let missing = self.write(py, columns, validate, first_row, |inner, inputs, validate| {
            inner.update_on(key, inputs, validate)
        })?;
        Ok(PyArray1::from_vec(py, missing))
    }

    /// Let appended samples have unique keys in the column `key`, and let the commit fail if another one has the text `once`.
    fn begin_import(&self, py: Python<'_>, key: Option<&str>, once: Option<&str>) -> PyResult<()> {
        self.locked(py, |inner| {
            once.into_iter().for_each(|once| inner.only_once(once));
            key.map_or(Ok(()), |key| inner.keep_unique(key))
        })
    }

    /// Return the samples as this transaction sees them: a snapshot and a view of it, which also has the values in memory.
    fn view(&self, py: Python<'_>) -> PyResult<(Snapshot, View)> {
        let (snapshot, own) = self.locked(py, |inner| inner.view())?;
        Ok((Snapshot { inner: snapshot.clone(), options: self.options.clone() }, View::of_transaction(snapshot, own)))
    }

    /// Record that these columns were read, of the samples with these row ids or of all samples.
    fn note_read(
        &self,
        py: Python<'_>,
        columns: Vec<String>,
        row_ids: Option<PyReadonlyArray1<'_, i64>>,
    ) -> PyResult<()> {
        let row_ids = row_ids.as_ref().map(|row_ids| row_ids.as_slice()).transpose()?;
        self.locked(py, |inner| inner.note_read(&columns, row_ids))
    }

    /// Commit all changes.
    fn commit(&self, py: Python<'_>, message: &str, author: &str, properties: &str) -> PyResult<Committed> {
        self.check_caller(py)?;
        let done = py.detach(|| self.take().ok_or_else(closed)?.commit(message, author, properties));
        Ok(committed(done.or_raise(py)?, &self.options))
    }

    /// Return how many calls of an earlier process were repeated from the journal.
    fn restored(&self, py: Python<'_>) -> PyResult<u64> {
        self.locked(py, |inner| Ok(inner.restored()))
    }

    /// Return how many changes the calling thread has made.
    fn changes(&self) -> u64 {
        self.changes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&std::thread::current().id())
            .copied()
            .unwrap_or_default()
    }

    /// Return a number that the journal determines, if there is one.
    fn journal_mark(&self, py: Python<'_>) -> PyResult<Option<u32>> {
        self.locked(py, |inner| Ok(inner.journal_mark()))
    }

    /// Abort and discard all changes, or all except those in a journal.
    fn abort(&self, py: Python<'_>, keep: bool) -> PyResult<()> {
        if self.generation != generation() {
            return Ok(()); // Only the parent process may abort.
        }
        self.check_caller(py)?;
        py.detach(|| self.take().filter(|_| !keep).map_or(Ok(()), penstock_dataset::Transaction::abort)).or_raise(py)
    }
}

impl Transaction {
    fn take(&self) -> Option<penstock_dataset::Transaction> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Run `work` on the transaction.
    fn locked<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut penstock_dataset::Transaction) -> Result<T> + Send,
    ) -> PyResult<T> {
        self.check_caller(py)?;
        py.detach(|| work(self.inner.lock().unwrap_or_else(PoisonError::into_inner).as_mut().ok_or_else(closed)?))
            .or_raise(py)
    }

    /// Run `work`, which changes the transaction if it succeeds.
    fn change<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut penstock_dataset::Transaction) -> Result<T> + Send,
    ) -> PyResult<T> {
        self.locked(py, |inner| work(inner).inspect(|_| self.count()))
    }

    fn count(&self) {
        *self.changes.lock().unwrap_or_else(PoisonError::into_inner).entry(std::thread::current().id()).or_default() +=
            1;
    }

    /// Convert the columns and pass them to `write`.
    fn write<T: Send>(
        &self,
        py: Python<'_>,
        columns: &Bound<'_, PyDict>,
        validate: &str,
        first_row: u64,
        write: impl FnOnce(&mut penstock_dataset::Transaction, Vec<Input>, Validate) -> Result<T> + Send,
    ) -> PyResult<T> {
        self.check_caller(py)?;
        with_inputs(py, columns, validate, (first_row, self.address()), |inputs, validate| {
            let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            write(inner.as_mut().ok_or_else(closed)?, inputs, validate).inspect(|_| self.count())
        })
    }
}

/// Convert columns and pass them to `write`, which runs without the GIL. `place` is the first row's number in the user's input, and the
/// owner of the values that `write` pulls.
fn with_inputs<T: Send>(
    py: Python<'_>,
    columns: &Bound<'_, PyDict>,
    validate: &str,
    (first_row, owner): (u64, usize),
    write: impl FnOnce(Vec<Input>, Validate) -> Result<T> + Send,
) -> PyResult<T> {
    let validate = media::validate(py, validate)?;
    let raised = input::Raised::default();
    let mut inputs = Vec::with_capacity(columns.len());
    for (name, values) in columns {
        let name: String = name.extract()?;
        inputs.push(input::input(py, &values, &name, first_row, &raised, owner)?);
    }
    let written = py.detach(|| write(inputs, validate));
    match raised.lock().unwrap_or_else(PoisonError::into_inner).take() {
        Some(error) => Err(error),
        None => written.map_err(|error| error.shift_rows(first_row)).or_raise(py),
    }
}
