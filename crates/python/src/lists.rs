//! Converts lists of plain Python numbers and strings to arrays in one pass. `penstock/values/` calls these functions,
//! and searches mixed lists for the offending row.

use std::sync::Arc;

use numpy::{Element, PyArray1, PyReadonlyArray1};
use penstock_loader::order::sequence::Alias;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyInt, PyList, PyString};

use crate::errors::OrRaise;

/// The values and their validity flags. The flags are None if all values are valid.
type NumberArray<'py> = (Bound<'py, PyAny>, Option<Bound<'py, PyArray1<bool>>>);

/// Whether each row has a value. Nothing is allocated until the first null.
#[derive(Default)]
struct Validity(Vec<bool>);

impl Validity {
    fn null(&mut self, row: usize, rows: usize) {
        if self.0.is_empty() {
            self.0 = vec![true; rows];
        }
        self.0[row] = false;
    }

    fn array<'py>(self, py: Python<'py>) -> Option<Bound<'py, PyArray1<bool>>> {
        (!self.0.is_empty()).then(|| PyArray1::from_vec(py, self.0))
    }
}

/// Return the places at which ids occur for the last time, in ascending order. Returns None if few ids are repeated.
#[pyfunction]
pub fn last_places<'py>(
    py: Python<'py>,
    ids: PyReadonlyArray1<'py, i64>,
) -> PyResult<Option<Bound<'py, PyArray1<i64>>>> {
    let ids = ids.as_slice()?;
    let mut sorted: Vec<(i64, usize)> = ids.iter().enumerate().map(|(place, id)| (*id, place)).collect();
    sorted.sort_unstable();
    let same = |one: &(i64, usize), other: &(i64, usize)| one.0 == other.0;
    let mut last: Vec<i64> =
        sorted.chunk_by(same).filter_map(|each| each.last()).map(|(_, place)| *place as i64).collect();
    last.sort_unstable();
    Ok((last.len() < ids.len() - ids.len() / 4).then(|| PyArray1::from_vec(py, last)))
}

/// Convert a list of None and either `int`, `float` or `bool`, as `kind` specifies ("i", "u", "f" or "b"). Returns None if the
/// list contains anything else, including subclasses, or a number outside the range of int64, uint64 or float64. A list of
/// floats may contain integers up to 2^`bits`, which floats with so many bits represent exactly.
#[pyfunction]
pub fn numbers<'py>(py: Python<'py>, list: &Bound<'py, PyList>, kind: char, bits: u32) -> Option<NumberArray<'py>> {
    match kind {
        'i' => collect(
            py,
            list,
            |item| if item.is_exact_instance_of::<PyInt>() { item.extract::<i64>().ok() } else { None },
        ),
        'u' => collect(
            py,
            list,
            |item| if item.is_exact_instance_of::<PyInt>() { item.extract::<u64>().ok() } else { None },
        ),
        'b' => collect(py, list, |item| item.cast_exact::<PyBool>().ok().map(|value| value.is_true())),
        'f' => collect(py, list, |item| {
            if let Ok(float) = item.cast_exact::<PyFloat>() {
                return Some(float.value());
            }
            let whole = if item.is_exact_instance_of::<PyInt>() { item.extract::<i64>().ok() } else { None };
            whole.filter(|whole| whole.unsigned_abs() <= 1 << bits.min(53)).map(|whole| whole as f64)
        }),
        _ => None,
    }
}

fn collect<'py, T: Element + Default>(
    py: Python<'py>,
    list: &Bound<'py, PyList>,
    value: impl Fn(&Bound<'py, PyAny>) -> Option<T>,
) -> Option<NumberArray<'py>> {
    let (mut values, mut validity) = (Vec::with_capacity(list.len()), Validity::default());
    for (row, item) in list.iter().enumerate() {
        values.push(match value(&item) {
            Some(value) => value,
            None if item.is_none() => {
                validity.null(row, list.len());
                T::default()
            }
            None => return None,
        });
    }
    Some((PyArray1::from_vec(py, values).into_any(), validity.array(py)))
}

/// The bytes of all texts, their offsets (rows + 1,), and a validity flag per row. The flags are None if no row is null.
type Texts<'py> = (Bound<'py, PyArray1<u8>>, Bound<'py, PyArray1<i64>>, Option<Bound<'py, PyArray1<bool>>>);

/// Join the UTF-8 bytes of a list of `str` and None. Returns None if the list contains anything else, including subclasses, or
/// invalid text.
#[pyfunction]
pub fn texts<'py>(py: Python<'py>, list: &Bound<'py, PyList>) -> Option<Texts<'py>> {
    let (mut data, mut offsets, mut validity) = (Vec::new(), Vec::with_capacity(list.len() + 1), Validity::default());
    offsets.push(0);
    for (row, item) in list.iter().enumerate() {
        if let Ok(text) = item.cast_exact::<PyString>() {
            data.extend_from_slice(text.to_str().ok()?.as_bytes());
        } else if item.is_none() {
            validity.null(row, list.len());
        } else {
            return None;
        }
        offsets.push(data.len() as i64);
    }
    Some((PyArray1::from_vec(py, data), PyArray1::from_vec(py, offsets), validity.array(py)))
}

/// An alias table that several loaders may share.
#[pyclass(frozen, module = "penstock._core")]
pub struct Weights(pub Arc<Alias>);

#[pymethods]
impl Weights {
    #[new]
    fn new(py: Python<'_>, weights: PyReadonlyArray1<'_, f64>) -> PyResult<Weights> {
        let weights = weights.as_slice()?;
        py.detach(|| Alias::new(weights)).map(|alias| Weights(Arc::new(alias))).or_raise(py)
    }
}
