//! Checks media before they are stored.

use numpy::{PyReadonlyArray1, PyReadwriteArray1};
use penstock_dataset::{Config, Media, Validate, check_media as check, mode_of};
use penstock_error::Error;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::{OrRaise, exception};

/// Parse the `validate` argument.
pub fn validate(py: Python<'_>, name: &str) -> PyResult<Validate> {
    match name {
        "header" => Ok(Validate::Header),
        "decode" => Ok(Validate::Decode),
        other => Err(Error::new("invalid-argument", format!("validate=`{other}`, expected `header` or `decode`")))
            .or_raise(py),
    }
}

/// Encode the pixels of an image as PNG. `shape` is (height, width, channels) of uint8.
#[pyfunction]
pub fn encode_png<'py>(
    py: Python<'py>,
    shape: (usize, usize, usize),
    pixels: PyReadonlyArray1<'py, u8>,
) -> PyResult<Bound<'py, PyBytes>> {
    let (height, width, channels) = shape;
    let encoded = penstock_codec::encode_png(height, width, channels, 8, pixels.as_slice()?).or_raise(py)?;
    Ok(PyBytes::new(py, &encoded))
}

/// Mix each of `rows` rows with the one before it, in place: `share · row + (1 - share) · other`. The first row is mixed with the last one.
#[pyfunction]
pub fn mix_rows(py: Python<'_>, mut values: PyReadwriteArray1<'_, f32>, rows: usize, share: f32) -> PyResult<()> {
    let values = values.as_slice_mut()?;
    let size = values.len().checked_div(rows).unwrap_or(0);
    py.detach(|| {
        let mix = |row: &mut [f32], other: &[f32]| {
            row.iter_mut().zip(other).for_each(|(value, other)| *value = *value * share + other * (1.0 - share));
        };
        let last = values[values.len() - size..].to_vec();
        for row in (1..rows).rev() {
            let (before, after) = values.split_at_mut(row * size);
            mix(&mut after[..size], &before[(row - 1) * size..]);
        }
        mix(&mut values[..size], &last);
    });
    Ok(())
}

/// Return the height and width of each image, `upright` or as stored. Returns None for an image whose header cannot be read.
#[pyfunction]
pub fn image_sizes(values: Vec<Option<Bound<'_, PyBytes>>>, upright: bool) -> Vec<Option<(u64, u64)>> {
    let limits = Config::limits();
    let size = |bytes: &[u8]| {
        let header = penstock_codec::probe(bytes, limits).ok()?;
        let turned = upright && penstock_codec::exif::orientation(bytes) >= 5;
        Some(if turned { (header.width, header.height) } else { (header.height, header.width) })
    };
    values.iter().map(|value| size(value.as_ref()?.as_bytes())).collect()
}

/// Check images in a mode, or masks if `mode` is None. Returns an exception for each invalid value and None for each valid one. Parses
/// all headers or decodes all pixels, using all threads.
#[pyfunction]
#[pyo3(signature = (values, mode, how))]
pub fn check_media(
    py: Python<'_>,
    values: Vec<Option<Bound<'_, PyBytes>>>,
    mode: Option<&str>,
    how: &str,
) -> PyResult<Vec<Option<Py<PyAny>>>> {
    let how = validate(py, how)?;
    let unknown = |name: &str| Error::new("invalid-argument", format!("mode=`{name}` is not an image mode"));
    let parsed = |name: &str| serde_json::from_value(name.into()).map_err(|_| unknown(name));
    let kind =
        mode.map_or(Ok(Media::Mask), |name| parsed(name).map(|mode| Media::Image(mode_of(mode)))).or_raise(py)?;
    let slices: Vec<Option<&[u8]>> = values.iter().map(|value| value.as_ref().map(|value| value.as_bytes())).collect();
    let bytes = slices.iter().flatten().map(|slice| slice.len()).sum();
    let found = py.detach(|| check(slices.len(), bytes, |index| slices[index], kind, how)).or_raise(py)?;
    Ok(found.into_iter().map(|error| error.map(|error| exception(py, error))).collect())
}
