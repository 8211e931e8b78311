//! A view: a whole snapshot or selected positions of it, with functions that read its samples, and scans of it.

use std::borrow::Cow;
use std::sync::Arc;

use numpy::{PyArray1, PyReadonlyArray1};
use penstock_dataset::{Found, OnCorrupt, Own, Purpose, Reader, Snapshot, out_of_range};
use penstock_error::Error;
use penstock_format::schema::ColumnSpec;
use penstock_loader::source::view::Source;
use penstock_tensor::slice::Slice;
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PySlice, PyTuple};

use crate::errors::OrRaise;
use crate::output::{self, Form, Request};

#[pyclass(frozen, module = "penstock._core")]
pub struct View {
    snapshot: Arc<Snapshot>,
    positions: Option<Arc<Vec<u64>>>,
    /// New values of a transaction.
    own: Vec<Own>,
    /// NumPy dtype of each column, looked up on the first take.
    numpy: output::NumpyTypes,
}

impl View {
    pub fn new(py: Python<'_>, snapshot: Arc<Snapshot>, positions: Option<Positions<'_>>) -> PyResult<View> {
        let len = snapshot.len();
        let positions = positions.map(|positions| resolve(&in_line(&positions), len, |position| position)).transpose().or_raise(py)?;
        Ok(View { numpy: output::NumpyTypes::new(&snapshot), snapshot, positions: positions.map(Arc::new), own: Vec::new() })
    }

    pub fn of_transaction(snapshot: Arc<Snapshot>, own: Vec<Own>) -> View {
        View { numpy: output::NumpyTypes::new(&snapshot), snapshot, positions: None, own }
    }

    pub fn source(&self, name: &str) -> Source {
        Source { name: name.into(), snapshot: self.snapshot.clone(), selection: self.positions.clone(), files: None, codes: Vec::new() }
    }

    /// Plan a read of samples in the snapshot.
    fn reader(&self, positions: Vec<u64>, on_corrupt: OnCorrupt) -> penstock_error::Result<Reader> {
        let mut reader = Reader::new(self.snapshot.clone(), positions, on_corrupt)?;
        reader.own = self.own.clone();
        Ok(reader)
    }

    fn len(&self) -> u64 {
        self.positions.as_ref().map_or(self.snapshot.len(), |positions| positions.len() as u64)
    }

    /// Map positions in the view to positions in the snapshot.
    fn resolve(&self, positions: &[i64]) -> penstock_error::Result<Vec<u64>> {
        match &self.positions {
            None => resolve(positions, self.len(), |position| position),
            Some(chosen) => resolve(positions, self.len(), |position| chosen[position as usize]),
        }
    }

    /// Return each requested stored column once, without virtual columns.
    fn specs(&self, names: Option<&[String]>) -> penstock_error::Result<Vec<&ColumnSpec>> {
        let virtual_column = |name: &str| matches!(name, "_row_id" | "_position");
        match names {
            None => Ok(self.snapshot.schema.columns.iter().collect()),
            Some(names) => {
                let first = |(index, name): &(usize, &String)| !virtual_column(name) && !names[..*index].contains(name);
                names.iter().enumerate().filter(first).map(|(_, name)| self.snapshot.column(name)).collect()
            }
        }
    }

    /// Find a value of bytes. Returns the reader of its parts as well.
    fn value(&self, py: Python<'_>, position: i64, column: &str) -> PyResult<(Reader, &ColumnSpec, Found)> {
        py.detach(|| {
            let spec = self.snapshot.column(column)?;
            let mut reader = self.reader(self.resolve(&[position])?, OnCorrupt::Raise)?;
            let found = reader.find_value(spec)?;
            Ok((reader, spec, found))
        })
        .or_raise(py)
    }

    /// Resolve `which`, as `take` accepts it, to positions in the snapshot.
    fn which(&self, py: Python<'_>, which: &Bound<'_, PyAny>, absolute: bool) -> PyResult<Vec<u64>> {
        if let Ok(range) = which.cast::<PyTuple>() {
            let (start, end): (u64, u64) = range.extract()?;
            let selection = self.positions.as_ref().filter(|_| !absolute);
            let len = if absolute { self.snapshot.len() } else { self.len() };
            let (start, end) = (start.min(len), end.min(len));
            return Ok(match selection {
                None => {
                    let mut all = Vec::new();
                    let reserved = all.try_reserve_exact(end.saturating_sub(start) as usize);
                    reserved.map_err(|_| PyMemoryError::new_err(format!("{} positions do not fit into memory", end - start)))?;
                    all.extend(start..end);
                    all
                }
                Some(chosen) => chosen[start as usize..end as usize].to_vec(),
            });
        }
        let array: Positions<'_> = which.extract()?;
        let list = in_line(&array);
        if absolute { resolve(&list, self.snapshot.len(), |position| position) } else { self.resolve(&list) }.or_raise(py)
    }
}

/// Positions are passed as arrays, because a Python list would be built and read element by element.
pub type Positions<'py> = PyReadonlyArray1<'py, i64>;

/// Return the numbers as a slice, copying them if the array is not contiguous.
fn in_line<'a>(array: &'a Positions<'_>) -> Cow<'a, [i64]> {
    array.as_slice().map_or_else(|_| Cow::Owned(array.as_array().to_vec()), Cow::Borrowed)
}

/// Resolve and check positions. Negative positions count from the end, as in NumPy.
fn resolve(positions: &[i64], len: u64, map: impl Fn(u64) -> u64) -> penstock_error::Result<Vec<u64>> {
    let one = |(place, position): (usize, &i64)| {
        let at = if *position < 0 { position + len as i64 } else { *position };
        if at < 0 || at as u64 >= len { Err(out_of_range(*position, len).rows(vec![place as u64])) } else { Ok(map(at as u64)) }
    };
    positions.iter().enumerate().map(one).collect()
}

#[pymethods]
impl View {
    fn __len__(&self) -> usize {
        self.len() as usize
    }

    /// Return the positions in the snapshot, or None for all of them.
    fn positions<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyArray1<i64>>> {
        self.positions.as_ref().map(|positions| PyArray1::from_iter(py, positions.iter().map(|position| *position as i64)))
    }

    /// Narrow the view further.
    fn select(&self, py: Python<'_>, positions: Positions<'_>) -> PyResult<View> {
        let positions = self.resolve(&in_line(&positions)).or_raise(py)?;
        let (snapshot, own) = (self.snapshot.clone(), self.own.clone());
        Ok(View { numpy: output::NumpyTypes::new(&snapshot), snapshot, positions: Some(Arc::new(positions)), own })
    }

    /// Return the ranges that a take would request now, each as (object, begin, end).
    #[pyo3(signature = (which, columns=None))]
    fn ranges(&self, py: Python<'_>, which: &Bound<'_, PyAny>, columns: Option<Vec<String>>) -> PyResult<Vec<(String, u64, u64)>> {
        let specs = self.specs(columns.as_deref()).or_raise(py)?;
        let positions = self.which(py, which, false)?;
        let ranges = py.detach(|| self.reader(positions, OnCorrupt::Raise)?.ranges(&specs)).or_raise(py)?;
        Ok(ranges.into_iter().map(|range| (range.name.clone(), range.begin, range.end())).collect())
    }

    /// Plan a scan of these columns in batches of at most `batch_rows` rows.
    fn scan(&self, py: Python<'_>, columns: Vec<String>, batch_rows: u64) -> PyResult<Scan> {
        let specs = self.specs(Some(&columns)).or_raise(py)?;
        let scan = py.detach(|| penstock_dataset::Scan::new(self.snapshot.clone(), self.positions.clone(), &specs, batch_rows));
        Ok(Scan { inner: scan.or_raise(py)? })
    }

    /// Return the shapes of samples that can be read in parts, with None for each null. Returns None instead of a list if any of these
    /// samples cannot.
    fn shapes(&self, py: Python<'_>, positions: Positions<'_>, column: &str) -> PyResult<Option<Vec<Option<Vec<u64>>>>> {
        let positions = self.resolve(&in_line(&positions)).or_raise(py)?;
        let spec = self.snapshot.column(column).or_raise(py)?;
        py.detach(|| {
            let mut reader = self.reader(positions, OnCorrupt::Raise)?;
            reader.open(&[spec])?;
            reader.shapes(spec, false)
        })
        .or_raise(py)
    }

    /// Read a slice of each of these samples, which all have a shape in `shapes`. A slice has one (low, high) pair per dimension.
    fn slices<'py>(
        &self,
        py: Python<'py>,
        positions: Positions<'_>,
        column: &str,
        slices: Vec<Vec<(u64, u64)>>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let positions = self.resolve(&in_line(&positions)).or_raise(py)?;
        let spec = self.snapshot.column(column).or_raise(py)?;
        let slice = |slice: Vec<(u64, u64)>| slice.into_iter().map(|(low, high)| low..high.max(low)).collect::<Slice>();
        let slices: Vec<Option<Slice>> = slices.into_iter().map(|one| Some(slice(one))).collect();
        if slices.len() != positions.len() {
            return Err(Error::new("invalid-argument", format!("{} slices for {} samples", slices.len(), positions.len()))).or_raise(py);
        }
        output::slices(py, &self.snapshot, positions, spec, &slices)
    }

    /// Read a part of a value of bytes. Returns None for a null. The slice has no step.
    fn part<'py>(&self, py: Python<'py>, position: i64, column: &str, slice: &Bound<'_, PySlice>) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let (reader, spec, found) = self.value(py, position, column)?;
        let Some(bytes) = found.bytes() else { return Ok(None) };
        let part = slice.indices(bytes as isize)?;
        let (begin, is_plain) = match &found {
            Found::Large { is_plain, .. } => (part.start as u64, *is_plain),
            _ => return Ok(found.small().map(|value| PyBytes::new(py, &value[part.start as usize..][..part.slicelength]))),
        };
        let read = |out: &mut [u8]| py.detach(|| reader.read_part(spec, begin..begin + out.len() as u64, is_plain, out)).or_raise(py);
        PyBytes::new_with(py, part.slicelength, read).map(Some)
    }

    /// Return the length in bytes of a value of bytes, and whether it is read in parts. None for a null.
    fn value_bytes(&self, py: Python<'_>, position: i64, column: &str) -> PyResult<Option<(u64, bool)>> {
        let found = self.value(py, position, column)?.2;
        Ok(found.bytes().map(|bytes| (bytes, matches!(found, Found::Large { is_plain: true, .. }))))
    }

    /// Return the positions in the snapshot that have these row ids.
    fn positions_of<'py>(&self, py: Python<'py>, row_ids: Positions<'_>) -> PyResult<Bound<'py, PyArray1<i64>>> {
        let row_ids = in_line(&row_ids);
        let found = py.detach(|| self.snapshot.positions_of(&row_ids)).or_raise(py)?;
        Ok(PyArray1::from_iter(py, found.into_iter().map(|position| position as i64)))
    }

    /// Read samples. `which` is an int64 array of positions in this view, or a (start, end) pair. With `absolute`, positions
    /// refer to the snapshot. `form` is "decoded", "shown", "stored" or "flat". Scans pass `scan`, which determines whether the block
    /// cache keeps the blocks that are read.
    // Over 6 parameters: Python passes each by name.
    #[pyo3(signature = (which, columns=None, form="decoded", on_corrupt="raise", absolute=false, scan=None))]
    fn take<'py>(
        &self,
        py: Python<'py>,
        which: &Bound<'py, PyAny>,
        columns: Option<Vec<String>>,
        form: &str,
        on_corrupt: &str,
        absolute: bool,
        scan: Option<bool>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let form = match form {
            "decoded" => Form::Decoded,
            "shown" => Form::Shown,
            "stored" => Form::Stored,
            _ => Form::Flat,
        };
        let on_corrupt = match on_corrupt {
            "raise" => OnCorrupt::Raise,
            "null" => OnCorrupt::Null,
            other => return Err(Error::new("invalid-argument", format!("on_corrupt=`{other}`, expected `raise` or `null`"))).or_raise(py),
        };
        let positions = self.which(py, which, absolute)?;
        let specs = self.specs(columns.as_deref()).or_raise(py)?;
        let reader = py.detach(|| {
            let mut reader = self.reader(positions, on_corrupt)?;
            reader.fetch(&specs, scan.map_or(Purpose::Take, |keep| Purpose::Scan { keep }))?;
            Ok(reader)
        });
        let reader = reader.or_raise(py)?;
        Request { reader: &reader, form, numpy: &self.numpy }.batch(py, columns)
    }
}

/// Divides a scan into groups of rows. A Python generator reads and yields the record batches.
#[pyclass(module = "penstock._core")]
pub struct Scan {
    inner: penstock_dataset::Scan,
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
