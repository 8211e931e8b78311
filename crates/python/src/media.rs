//! Encode arrays as PNG, and look at media before they are stored.

use numpy::{PyReadonlyArray1, PyUntypedArrayMethods as _};
use penstock_dataset::{Validate, check_media as check};
use penstock_error::Error;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::{OrRaise, exception};

/// PNG of (height, width, channels) pixels of 8 or 16 bits, given as bytes in native order.
#[pyfunction]
pub fn encode_png<'py>(
    py: Python<'py>,
    height: usize,
    width: usize,
    channels: usize,
    bits: u8,
    data: PyReadonlyArray1<'py, u8>,
) -> PyResult<Bound<'py, PyBytes>> {
    let pixels = data.as_slice()?;
    debug_assert_eq!(data.len(), pixels.len());
    let png = py.detach(|| penstock_codec::encode_png(height, width, channels, bits, pixels)).or_raise(py)?;
    Ok(PyBytes::new(py, &png))
}

/// "header" or "decode".
pub fn validate(py: Python<'_>, name: &str) -> PyResult<Validate> {
    match name {
        "header" => Ok(Validate::Header),
        "decode" => Ok(Validate::Decode),
        other => Err(Error::new("invalid-argument", format!("validate=`{other}`, expected `header` or `decode`"))).or_raise(py),
    }
}

/// The exception of every value that is refused, else None. Cost: header or all pixels of each, on all threads.
#[pyfunction]
pub fn check_media(py: Python<'_>, values: Vec<Option<Bound<'_, PyBytes>>>, mask: bool, mode: &str) -> PyResult<Vec<Option<Py<PyAny>>>> {
    let mode = validate(py, mode)?;
    let slices: Vec<Option<&[u8]>> = values.iter().map(|value| value.as_ref().map(|value| value.as_bytes())).collect();
    let bytes = slices.iter().flatten().map(|slice| slice.len()).sum();
    let found = py.detach(|| check(slices.len(), bytes, |index| slices[index], mask, mode)).or_raise(py)?;
    Ok(found.into_iter().map(|error| error.map(|error| exception(py, error))).collect())
}
