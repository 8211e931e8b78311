//! A view: a whole snapshot or selected positions of it, with functions that read its samples, and scans of it.

pub mod codes;
mod positions;

use std::sync::Arc;

use numpy::ndarray::{ArrayView1, Axis};
use numpy::{PyArray1, PyReadonlyArray1};
use penstock_dataset::{
    Bits, Classes, Coder, FoundValue, Numbered, OnCorrupt, Own, Purpose, Reader, Selection, Snapshot, Stride, Tally,
    spread,
};
use penstock_error::Error;
use penstock_format::schema::ColumnSpec;
use penstock_loader::source::files::Files;
use penstock_loader::source::view::Source;
use penstock_tensor::slice::Slice;
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PySlice, PyTuple};

use crate::errors::OrRaise;
use crate::output::{self, Form, Request};
use crate::scan::Scan;
use codes::{Codes, Coding, columns, numbers};
use positions::{Positions, in_line, resolve, resolve_range};

#[pyclass(frozen, module = "penstock._core")]
pub struct View {
    snapshot: Arc<Snapshot>,
    selection: Selection,
    /// New values of a transaction.
    own: Vec<Own>,
    /// NumPy dtype of each column, looked up on the first take.
    numpy: output::NumpyTypes,
}

impl View {
    /// View all samples of a snapshot, or those that a description selects.
    pub fn new(py: Python<'_>, snapshot: Arc<Snapshot>, description: Option<Vec<u8>>) -> PyResult<View> {
        let selection = match description {
            None => Selection::all(&snapshot),
            Some(bytes) => py.detach(|| Selection::from_bytes(&snapshot, bytes)).or_raise(py)?,
        };
        Ok(View { numpy: output::NumpyTypes::new(&snapshot), snapshot, selection, own: Vec::new() })
    }

    pub fn of_transaction(snapshot: Arc<Snapshot>, own: Vec<Own>) -> View {
        View { numpy: output::NumpyTypes::new(&snapshot), selection: Selection::all(&snapshot), snapshot, own }
    }

    /// Return a view of other samples of the same snapshot.
    fn narrowed(&self, selection: Selection) -> View {
        View {
            numpy: output::NumpyTypes::new(&self.snapshot),
            snapshot: self.snapshot.clone(),
            selection,
            own: self.own.clone(),
        }
    }

    /// Return a source of a loader. Its columns are still to be chosen.
    pub fn source(&self, name: &str, files: Option<Arc<Files>>, codes: Vec<(String, Vec<i64>)>) -> Source {
        let (snapshot, selection) = (self.snapshot.clone(), self.selection.clone());
        Source { name: name.into(), snapshot, selection, columns: Vec::new(), files, codes }
    }

    /// Plan a read of samples in the snapshot.
    fn reader(&self, positions: Vec<u64>, on_corrupt: OnCorrupt) -> penstock_error::Result<Reader> {
        let mut reader = Reader::new(self.snapshot.clone(), positions, on_corrupt)?;
        reader.own = self.own.clone();
        Ok(reader)
    }

    fn len(&self) -> u64 {
        self.selection.len()
    }

    /// Map positions in the view to positions in the snapshot.
    fn resolve(&self, positions: &[i64]) -> penstock_error::Result<Vec<u64>> {
        match self.selection.is_all() {
            true => resolve(positions, self.len(), |position| position),
            false => resolve(positions, self.len(), |position| self.selection.at(position)),
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
    fn value(&self, py: Python<'_>, position: i64, column: &str) -> PyResult<(Reader, &ColumnSpec, FoundValue)> {
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
            let (start, end) = (start.min(self.len()), end.min(self.len()));
            let (mut positions, count) = (Vec::new(), end.saturating_sub(start));
            let reserved = positions.try_reserve_exact(count as usize);
            reserved.map_err(|_| PyMemoryError::new_err(format!("{count} positions do not fit into memory")))?;
            match self.selection.is_all() {
                true => positions.extend(start..start + count),
                false => self.selection.extend(Stride { first: start, step: 1, count }, &mut positions),
            }
            return Ok(positions);
        }
        let array: Positions<'_> = which.extract()?;
        let list = in_line(&array);
        if absolute { resolve(&list, self.snapshot.len(), |position| position) } else { self.resolve(&list) }
            .or_raise(py)
    }
}

#[pymethods]
impl View {
    fn __len__(&self) -> usize {
        self.len() as usize
    }

    /// Return whether the view has all samples of its snapshot, because nothing was selected.
    fn is_all(&self) -> bool {
        self.selection.is_all()
    }

    /// Return the description of the selection, from which `Snapshot.view` makes the view again. With `origin`, it has the origin, too.
    fn description<'py>(&self, py: Python<'py>, origin: bool) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &self.selection.to_bytes(origin))
    }

    /// Return where the selection came from.
    fn origin(&self) -> String {
        self.selection.to_string()
    }

    /// Return how many bytes the selection holds.
    fn held_bytes(&self) -> u64 {
        self.selection.held_bytes()
    }

    /// Return the same view with another origin.
    fn named(&self, origin: &str) -> View {
        self.narrowed(self.selection.clone().named(origin))
    }

    /// Narrow the view to positions, to those that a mask of bools says, or to a range (first, step, count).
    fn select(&self, py: Python<'_>, which: &Bound<'_, PyAny>) -> PyResult<View> {
        if let Ok(range) = which.cast::<PyTuple>() {
            let (first, step, count) = range.extract()?;
            let strides = resolve_range(first, step, count, self.len()).or_raise(py)?;
            return Ok(self.narrowed(self.selection.part(&strides)));
        }
        if let Ok(mask) = which.extract::<PyReadonlyArray1<'_, bool>>() {
            let mask = mask.as_array();
            let word = |chosen: ArrayView1<'_, bool>| {
                chosen.iter().rev().fold(0, |word, is_chosen| word << 1 | u64::from(*is_chosen))
            };
            let words = mask.axis_chunks_iter(Axis(0), 64).map(word).collect();
            let bits = Bits::new(mask.len() as u64, words);
            return Ok(self.narrowed(py.detach(|| self.selection.mask(bits))));
        }
        let positions: Positions<'_> = which.extract()?;
        let positions = resolve(&in_line(&positions), self.len(), |position| position).or_raise(py)?;
        Ok(self.narrowed(py.detach(|| self.selection.pick(positions))))
    }

    /// Split the samples at random, at ascending bounds from 0 to 1. Returns a view for each part.
    fn split(&self, py: Python<'_>, seed: u64, bounds: Vec<f64>) -> PyResult<Vec<View>> {
        let parts =
            py.detach(|| penstock_dataset::split(&self.snapshot, &self.selection, seed, &bounds)).or_raise(py)?;
        Ok(parts.into_iter().map(|part| self.narrowed(part)).collect())
    }

    /// Number the values of a column of words or scalars: the code of nulls is 0. Returns the codes, and the value of each code after 0: a code of the
    /// vocabulary, or the bytes of a scalar.
    fn codes<'py>(&self, py: Python<'py>, column: &str) -> PyResult<(Codes, Bound<'py, PyArray1<u64>>)> {
        let spec = self.snapshot.column(column).or_raise(py)?.clone();
        let view = self.narrowed(self.selection.clone());
        let read = move |positions| numbers(view.reader(positions, OnCorrupt::Raise)?, &spec);
        let numbered = py.detach(|| Numbered::of(&self.selection, Box::new(read))).or_raise(py)?;
        let values = PyArray1::from_slice(py, &numbered.values);
        Ok((Codes(numbered), values))
    }

    /// Split each class of samples, given their codes. `classes` has the class of each code, and the number of each class.
    fn split_classes(
        &self,
        py: Python<'_>,
        codes: &Bound<'_, PyAny>,
        classes: (PyReadonlyArray1<'_, u32>, Positions<'_>),
        seed: u64,
        bounds: Vec<f64>,
    ) -> PyResult<Vec<View>> {
        let (class_of, numbers, codes) = (classes.0.as_slice()?, classes.1.as_slice()?, Coding::of(codes)?);
        let coder = codes.coder()?;
        let parts = py.detach(|| {
            let classes = Classes { codes: &*coder, class_of, numbers };
            penstock_dataset::by_class(&self.snapshot, &self.selection, &classes, seed, &bounds)
        });
        Ok(parts.or_raise(py)?.into_iter().map(|part| self.narrowed(part)).collect())
    }

    /// Count groups, given the codes of samples and how many there are. `classes` has the codes of classes, the class of each code, and the number of classes.
    /// Returns the size of each group and its least row id; the place, row id and class of each sample without a group; and the group, class and size of each pair.
    fn tally<'py>(
        &self,
        py: Python<'py>,
        codes: &Bound<'_, PyAny>,
        count: usize,
        classes: Option<(Bound<'_, PyAny>, PyReadonlyArray1<'_, u32>, usize)>,
    ) -> PyResult<[Vec<Bound<'py, PyArray1<i64>>>; 3]> {
        let codes = Coding::of(codes)?;
        let kinds = classes
            .as_ref()
            .map(|(codes, class_of, count)| PyResult::Ok((Coding::of(codes)?, class_of.as_slice()?, *count)))
            .transpose()?;
        let coder = codes.coder()?;
        let kinds = kinds
            .as_ref()
            .map(|(codes, class_of, count)| PyResult::Ok((codes.coder()?, *class_of, *count)))
            .transpose()?;
        let kinds = kinds.as_ref().map(|(coder, class_of, count)| (&**coder as &(dyn Coder + Send), *class_of, *count));
        let Tally { sizes, first, pairs, nulls } = py
            .detach(|| {
                let kinds = kinds.map(|(coder, class_of, count)| (coder as &dyn Coder, class_of, count));
                penstock_dataset::tally(&self.snapshot, &self.selection, (&*coder, count), kinds)
            })
            .or_raise(py)?;
        let list = |values: Vec<i64>| PyArray1::from_vec(py, values);
        let groups = vec![list(sizes.into_iter().map(u64::cast_signed).collect()), list(first)];
        let nulls = columns(&nulls, |(place, id, kind)| [*place, *id, (*kind).into()]).map(list).into();
        let pairs = columns(&pairs, |(group, kind, count)| [(*group).into(), (*kind).into(), count.cast_signed()])
            .map(list)
            .into();
        Ok([groups, nulls, pairs])
    }

    /// Return a view for each part, given the code of each sample and the part of each code. `nulls` has the places of samples without a value, and their parts.
    fn split_codes(
        &self,
        py: Python<'_>,
        codes: &Bound<'_, PyAny>,
        part_of: PyReadonlyArray1<'_, u32>,
        nulls: (Positions<'_>, PyReadonlyArray1<'_, u32>),
        parts: usize,
    ) -> PyResult<Vec<View>> {
        let (codes, part_of, nulls) =
            (Coding::of(codes)?, part_of.as_slice()?, (nulls.0.as_slice()?, nulls.1.as_slice()?));
        let coder = codes.coder()?;
        let parts =
            py.detach(|| penstock_dataset::by_code(&self.selection, (&*coder, part_of), nulls, parts)).or_raise(py)?;
        Ok(parts.into_iter().map(|part| self.narrowed(part)).collect())
    }

    /// Narrow the view to the `count` samples with the smallest hashes.
    fn sample(&self, py: Python<'_>, seed: u64, count: u64) -> PyResult<View> {
        Ok(self.narrowed(
            py.detach(|| penstock_dataset::sample(&self.snapshot, &self.selection, seed, count)).or_raise(py)?,
        ))
    }

    /// Return the place of the first of these positions of the snapshot that the view lacks.
    fn first_outside(&self, py: Python<'_>, positions: Positions<'_>) -> Option<usize> {
        let positions: Vec<u64> = in_line(&positions).iter().map(|position| position.cast_unsigned()).collect();
        py.detach(|| self.selection.first_outside(&positions))
    }

    /// Return the ranges that a take would request now, each as (object, begin, end).
    #[pyo3(signature = (which, columns=None))]
    fn ranges(
        &self,
        py: Python<'_>,
        which: &Bound<'_, PyAny>,
        columns: Option<Vec<String>>,
    ) -> PyResult<Vec<(String, u64, u64)>> {
        let specs = self.specs(columns.as_deref()).or_raise(py)?;
        let positions = self.which(py, which, false)?;
        let ranges = py.detach(|| self.reader(positions, OnCorrupt::Raise)?.ranges(&specs)).or_raise(py)?;
        Ok(ranges.into_iter().map(|range| (range.name.clone(), range.begin, range.end())).collect())
    }

    /// Plan a scan of these columns in batches of at most `batch_rows` rows.
    fn scan(&self, py: Python<'_>, columns: Vec<String>, batch_rows: u64) -> PyResult<Scan> {
        let specs = self.specs(Some(&columns)).or_raise(py)?;
        let scan = py
            .detach(|| penstock_dataset::Scan::new(self.snapshot.clone(), self.selection.clone(), &specs, batch_rows));
        Ok(Scan { inner: scan.or_raise(py)? })
    }

    /// Return the shapes of samples that can be read in parts, with None for each null. Returns None instead of a list if any of these
    /// samples cannot.
    fn shapes(
        &self,
        py: Python<'_>,
        positions: Positions<'_>,
        column: &str,
    ) -> PyResult<Option<Vec<Option<Vec<u64>>>>> {
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
            return Err(Error::new(
                "invalid-argument",
                format!("{} slices for {} samples", slices.len(), positions.len()),
            ))
            .or_raise(py);
        }
        output::slices(py, &self.snapshot, positions, spec, &slices)
    }

    /// Read a part of a value of bytes. Returns None for a null. The slice has no step.
    fn part<'py>(
        &self,
        py: Python<'py>,
        position: i64,
        column: &str,
        slice: &Bound<'_, PySlice>,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let (reader, spec, found) = self.value(py, position, column)?;
        let Some(bytes) = found.bytes() else { return Ok(None) };
        let part = slice.indices(bytes as isize)?;
        let (begin, is_plain) = match &found {
            FoundValue::Large { is_plain, .. } => (part.start as u64, *is_plain),
            _ => {
                return Ok(found
                    .small()
                    .map(|value| PyBytes::new(py, &value[part.start as usize..][..part.slicelength])));
            }
        };
        let read = |out: &mut [u8]| {
            py.detach(|| reader.read_part(spec, begin..begin + out.len() as u64, is_plain, out)).or_raise(py)
        };
        PyBytes::new_with(py, part.slicelength, read).map(Some)
    }

    /// Return the length in bytes of a value of bytes, and whether it is read in parts. None for a null.
    fn value_bytes(&self, py: Python<'_>, position: i64, column: &str) -> PyResult<Option<(u64, bool)>> {
        let found = self.value(py, position, column)?.2;
        Ok(found.bytes().map(|bytes| (bytes, matches!(found, FoundValue::Large { is_plain: true, .. }))))
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
            other => {
                return Err(Error::new(
                    "invalid-argument",
                    format!("on_corrupt=`{other}`, expected `raise` or `null`"),
                ))
                .or_raise(py);
            }
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

/// Return a number in [0, 1) for each of these numbers, which depends only on it and on the seed.
#[pyfunction]
pub fn chances<'py>(py: Python<'py>, seed: u64, numbers: Positions<'py>) -> Bound<'py, PyArray1<f64>> {
    PyArray1::from_iter(py, in_line(&numbers).iter().map(|number| spread::chance(seed, *number)))
}
