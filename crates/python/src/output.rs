//! Converts columns to Python values: NumPy arrays filled in place, lists of str and bytes, images, and `penstock.Ragged`.

use std::sync::Arc;

use numpy::{PyArray1, PyArrayMethods as _, PyUntypedArray, PyUntypedArrayMethods as _};
use penstock_codec::{Mode, Orientation, Picture};
use penstock_dataset::{Config, Nulls, OnCorrupt, RaggedValues, Reader, Snapshot, mode_of, parallel_map};
use penstock_error::{Error, Kind, Result};
use penstock_format::schema::{ColumnKind, ColumnSpec};
use penstock_loader::batch::Array;
use penstock_storage::Frozen;
use penstock_tensor::slice::{Slice, elements, whole};
use penstock_tensor::{Dtype, Shape};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple};

use crate::errors::{OrRaise, raise};
use crate::made::Made;
use crate::recycle::{self, byte_strings};

/// The form in which a take returns columns.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// Images as pixels in the mode of their column, JSON as objects, ragged values as `Ragged`.
    Decoded,
    /// The same, with images in the channels and bits in which they are stored. For previews, which show every image.
    Shown,
    /// Media as the bytes that were appended, JSON as text.
    Stored,
    /// Every column as flat arrays, for Arrow: (values, nulls) or (data, offsets, shapes, nulls).
    Flat,
}

/// One take: its reader, its form, and the NumPy dtypes of its columns.
pub struct Request<'a> {
    pub reader: &'a Reader,
    pub form: Form,
    pub numpy: &'a NumpyTypes,
}

/// The NumPy dtype of each column, so that a take of one sample needs no look-up by name.
pub struct NumpyTypes(Vec<Made>);

impl NumpyTypes {
    pub fn new(snapshot: &Snapshot) -> NumpyTypes {
        NumpyTypes(snapshot.schema.columns.iter().map(|_| Made::new()).collect())
    }
}

static ZEROS: Made = Made::new();
static MASKED: Made = Made::new();
static DTYPE: Made = Made::new();
static LOADS: Made = Made::new();
static RAGGED: Made = Made::new();

/// Call `penstock.values.dtypes.numpy_dtype(name)`, which supports bfloat16 and times.
pub fn numpy_dtype<'py>(py: Python<'py>, dtype: Dtype) -> PyResult<Bound<'py, PyAny>> {
    DTYPE.import(py, "penstock.values.dtypes", "numpy_dtype")?.call1((dtype.name(),))
}

fn empty<'py>(
    py: Python<'py>,
    shape: &[u64],
    dtype: &Bound<'py, PyAny>,
    size: usize,
) -> PyResult<Bound<'py, PyUntypedArray>> {
    let bytes = shape.iter().try_fold(size as u64, |product, size| product.checked_mul(*size)).unwrap_or(u64::MAX);
    let shape = PyTuple::new(py, shape)?;
    if (recycle::LEAST_BYTES..1 << 47).contains(&bytes)
        && let Some(array) = recycle::array(py, bytes, &shape, dtype)?
    {
        return Ok(array);
    }
    // `zeros` instead of `empty`: creating a Rust slice over uninitialised bytes is undefined behaviour.
    Ok(ZEROS.import(py, "numpy", "zeros")?.call1((shape, dtype))?.cast_into::<PyUntypedArray>()?)
}

/// Return the memory of an array that the caller has just created and not yet shared.
fn memory<'a>(array: &'a mut Bound<'_, PyUntypedArray>, dtype: Dtype) -> &'a mut [u8] {
    let bytes = array.len() * dtype.size();
    if bytes == 0 {
        return &mut [];
    }
    // SAFETY: `empty` made this contiguous array of `bytes` bytes, which is not shared yet; u8 has no invalid values.
    unsafe { std::slice::from_raw_parts_mut((*array.as_array_ptr()).fields.data.cast::<u8>(), bytes) }
}

/// Read slices of tiled samples into new arrays.
pub fn slices<'py>(
    py: Python<'py>,
    snapshot: &Arc<Snapshot>,
    positions: Vec<u64>,
    spec: &ColumnSpec,
    slices: &[Option<Slice>],
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let (dtype, _) = spec.kind.stored().or_raise(py)?;
    let numpy = numpy_dtype(py, dtype)?;
    let sizes =
        |slice: &Option<Slice>| slice.iter().flatten().map(|range| range.end - range.start).collect::<Vec<u64>>();
    let mut arrays =
        slices.iter().map(|slice| empty(py, &sizes(slice), &numpy, dtype.size())).collect::<PyResult<Vec<_>>>()?;
    let outs: Vec<&mut [u8]> = arrays.iter_mut().map(|array| memory(array, dtype)).collect();
    py.detach(|| Reader::new(snapshot.clone(), positions, OnCorrupt::Raise)?.slices(spec, slices, outs))
        .or_raise(py)?;
    Ok(arrays.into_iter().map(Bound::into_any).collect())
}

fn masked<'py>(py: Python<'py>, array: Bound<'py, PyAny>, nulls: Nulls) -> PyResult<Bound<'py, PyAny>> {
    let Some(nulls) = nulls else { return Ok(array) };
    let shape: Vec<usize> = array.getattr("shape")?.extract()?;
    let mask = PyArray1::from_vec(py, nulls).into_any();
    let mask = match shape.len() {
        0 | 1 => mask,
        more => {
            let mut lead = vec![1usize; more];
            lead[0] = shape[0];
            let mask = mask.call_method1("reshape", (PyTuple::new(py, lead)?,))?;
            py.import("numpy")?.call_method1("broadcast_to", (mask, PyTuple::new(py, shape)?))?.call_method0("copy")?
        }
    };
    MASKED.import(py, "numpy.ma", "MaskedArray")?.call1((array, mask))
}

impl Request<'_> {
    /// Read columns into a dict from name to values, in the requested order.
    pub fn batch<'py>(&self, py: Python<'py>, columns: Option<Vec<String>>) -> PyResult<Bound<'py, PyDict>> {
        let batch = PyDict::new(py);
        match columns {
            None => {
                for index in 0..self.reader.snapshot.schema.columns.len() {
                    let spec = &self.reader.snapshot.schema.columns[index];
                    batch.set_item(&spec.name, self.column(py, index, spec)?)?;
                }
            }
            Some(names) => {
                for name in &names {
                    let values = match name.as_str() {
                        "_row_id" => PyArray1::from_vec(py, self.reader.plan.row_ids()).into_any(),
                        "_position" => {
                            PyArray1::from_iter(py, self.reader.plan.positions.iter().map(|position| *position as i64))
                                .into_any()
                        }
                        name => {
                            let spec = self.reader.snapshot.column(name).or_raise(py)?;
                            let index = self.reader.snapshot.schema.column(name).map_or(0, |(index, _)| index);
                            self.column(py, index, spec)?
                        }
                    };
                    batch.set_item(name, values)?;
                }
            }
        }
        Ok(batch)
    }

    fn column<'py>(&self, py: Python<'py>, index: usize, spec: &ColumnSpec) -> PyResult<Bound<'py, PyAny>> {
        let (dtype, shape) = spec.kind.stored().or_raise(py)?;
        if spec.kind.has_codes() {
            return self.codes(py, spec);
        }
        if shape.is_fixed() {
            return self.fixed(py, index, spec, dtype, &shape);
        }
        if let Some(parts) = self.tiled(py, spec, dtype)? {
            return self.ragged_array(py, parts, &shape);
        }
        let values = py.detach(|| self.reader.ragged(spec)).or_raise(py)?;
        self.ragged(py, spec, dtype, &shape, &values)
    }

    fn ragged<'py>(
        &self,
        py: Python<'py>,
        spec: &ColumnSpec,
        dtype: Dtype,
        shape: &Shape,
        values: &RaggedValues,
    ) -> PyResult<Bound<'py, PyAny>> {
        let refuse = |index: usize, why: &str| {
            let error = penstock_format::cursor::malformed(why).column(&spec.name);
            let error = self.reader.locate(error, spec, index as u32);
            (self.reader.on_corrupt == OnCorrupt::Raise).then(|| raise(py, error))
        };
        if self.form == Form::Flat {
            if spec.kind.is_utf8() {
                let is_invalid =
                    |index: &usize| values.get(*index).is_some_and(|text| std::str::from_utf8(text).is_err());
                if let Some(index) = py.detach(|| (0..values.len()).find(is_invalid)) {
                    let text = "it is not UTF-8";
                    return Err(
                        refuse(index, text).unwrap_or_else(|| raise(py, penstock_format::cursor::malformed(text)))
                    );
                }
            }
            return self.flat(py, dtype, shape, values);
        }
        if spec.kind.is_array() {
            return self.ragged_array(py, self.flat(py, dtype, shape, values)?, shape);
        }
        if spec.kind.is_media() && self.form != Form::Stored {
            return self.pictures(py, spec, values);
        }
        strings(py, &spec.kind, self.form, (values.len(), values.value_bytes()), |index| values.get(index), &refuse)
    }

    fn ragged_array<'py>(
        &self,
        py: Python<'py>,
        parts: Bound<'py, PyAny>,
        shape: &Shape,
    ) -> PyResult<Bound<'py, PyAny>> {
        match self.form {
            Form::Flat => Ok(parts),
            _ => imported_ragged(py, parts, shape),
        }
    }

    /// Works like `flat`, for ragged samples that are all tiled. Their sizes are known in advance, so they are read directly
    /// into one array. Returns None if any sample is not tiled.
    fn tiled<'py>(&self, py: Python<'py>, spec: &ColumnSpec, dtype: Dtype) -> PyResult<Option<Bound<'py, PyAny>>> {
        if dtype == Dtype::Bytes || spec.kind.listed_classes().is_some() || !self.reader.has_tiles() {
            return Ok(None); // Bytes are never tiled, but a column of nulls would look tiled. `ragged` checks labels.
        }
        let Some(shapes) = py.detach(|| self.reader.shapes(spec, true)).or_raise(py)? else { return Ok(None) };
        let rank = spec.kind.stored().or_raise(py)?.1.0.len();
        let slices: Vec<Option<Slice>> = shapes.iter().map(|shape| shape.as_deref().map(whole)).collect();
        let count = |index: usize| slices[index].as_ref().and_then(|slice| elements(slice)).unwrap_or(0);
        let mut offsets = vec![0i64];
        (0..shapes.len()).for_each(|index| offsets.push(offsets[index] + count(index) as i64));
        let total = offsets[shapes.len()] as u64;
        let mut array = empty(py, &[total], &numpy_dtype(py, dtype)?, dtype.size())?;
        let mut rest = memory(&mut array, dtype);
        let mut outs = Vec::with_capacity(shapes.len());
        for index in 0..shapes.len() {
            let (out, later) = rest.split_at_mut(count(index) as usize * dtype.size());
            outs.push(out);
            rest = later;
        }
        let read = || self.reader.slices(spec, &slices, outs);
        let nulls = py.detach(read).or_raise(py)?.map(|nulls| PyArray1::from_vec(py, nulls));
        let sizes =
            shapes.iter().flat_map(|shape| (0..rank).map(|axis| shape.as_ref().map_or(0, |shape| shape[axis] as i64)));
        let sizes = PyArray1::from_iter(py, sizes).reshape([shapes.len(), rank])?;
        Ok(Some((array, PyArray1::from_vec(py, offsets), sizes, nulls).into_pyobject(py)?.into_any()))
    }

    fn fixed<'py>(
        &self,
        py: Python<'py>,
        index: usize,
        spec: &ColumnSpec,
        dtype: Dtype,
        shape: &Shape,
    ) -> PyResult<Bound<'py, PyAny>> {
        let numpy = self.numpy.0[index].get(py, || numpy_dtype(py, dtype))?;
        let mut sizes = vec![self.reader.plan.len() as u64];
        sizes.extend(shape.0.iter().flatten());
        let bytes = self.reader.plan.len() * shape.fixed_bytes(dtype).or_raise(py)? as usize;
        if let Some(joined) = self.large(py, dtype, bytes, || self.reader.joined(spec)) {
            let array = recycle::filled(py, joined, &PyTuple::new(py, sizes)?, numpy)?;
            return self.finish(py, array.into_any(), None);
        }
        let mut array = empty(py, &sizes, numpy, dtype.size())?;
        let out = memory(&mut array, dtype);
        let nulls = py.detach(|| self.reader.fixed(spec, out)).or_raise(py)?;
        self.finish(py, array.into_any(), nulls)
    }

    /// Return contiguous memory that can become the array without a copy. It must contain all values, be aligned for the dtype,
    /// and be large enough to justify the memory that it keeps alive.
    fn large(
        &self,
        py: Python<'_>,
        dtype: Dtype,
        bytes: usize,
        joined: impl FnOnce() -> Option<Frozen> + Send,
    ) -> Option<Frozen> {
        let is_aligned_array = |joined: &Frozen| {
            let found = joined.as_ref();
            found.len() == bytes && (found.as_ptr() as usize).is_multiple_of(dtype.size())
        };
        let worth = self.reader.is_placed() && bytes as u64 >= recycle::LEAST_BYTES;
        if worth { py.detach(joined).filter(is_aligned_array) } else { None }
    }

    fn codes<'py>(&self, py: Python<'py>, spec: &ColumnSpec) -> PyResult<Bound<'py, PyAny>> {
        let mut codes = vec![0i64; self.reader.plan.len()];
        let nulls = py.detach(|| self.reader.codes(spec, &mut codes)).or_raise(py)?;
        self.finish(py, PyArray1::from_vec(py, codes).into_any(), nulls)
    }

    fn finish<'py>(&self, py: Python<'py>, array: Bound<'py, PyAny>, nulls: Nulls) -> PyResult<Bound<'py, PyAny>> {
        match self.form {
            Form::Flat => {
                let nulls = nulls.map(|nulls| PyArray1::from_vec(py, nulls));
                Ok((array, nulls).into_pyobject(py)?.into_any())
            }
            _ => masked(py, array, nulls),
        }
    }

    /// Make flat arrays: (data, offsets (n+1) in elements, shapes (n, ndim) | None, nulls | None).
    fn flat<'py>(
        &self,
        py: Python<'py>,
        dtype: Dtype,
        shape: &Shape,
        values: &RaggedValues,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (size, bytes) = (dtype.size() as u64, values.value_bytes());
        let numpy = numpy_dtype(py, if dtype == Dtype::Bytes { Dtype::Uint8 } else { dtype })?;
        let elements = bytes as u64 / size;
        let joined = self.large(py, dtype, bytes, || values.joined(self.reader));
        let to_copy = joined.is_none();
        let mut array = match joined {
            Some(joined) => recycle::filled(py, joined, &PyTuple::new(py, [elements])?, &numpy)?,
            None => empty(py, &[elements], &numpy, dtype.size())?,
        };
        let mut rest = to_copy.then(|| memory(&mut array, dtype));
        let (mut offsets, mut shapes) = (Vec::with_capacity(values.len() + 1), Vec::new());
        py.detach(|| {
            let mut at = 0;
            offsets.push(0i64);
            for index in 0..values.len() {
                if let Some(value) = values.get(index) {
                    if let Some(out) = rest.take() {
                        let (target, later) = out.split_at_mut(value.len());
                        target.copy_from_slice(value);
                        rest = Some(later);
                    }
                    at += value.len() as u64;
                }
                offsets.push((at / size) as i64);
                if values.free_count > 0 {
                    shapes.extend(shape.fill(values.free(index)).into_iter().map(|size| size as i64));
                }
            }
        });
        let shapes = if values.free_count > 0 {
            Some(PyArray1::from_vec(py, shapes).reshape([values.len(), shape.0.len()])?)
        } else {
            None
        };
        let nulls = values
            .has_nulls()
            .then(|| PyArray1::from_iter(py, (0..values.len()).map(|index| values.get(index).is_none())));
        Ok((array, PyArray1::from_vec(py, offsets), shapes, nulls).into_pyobject(py)?.into_any())
    }

    /// Decode images on all threads, without the GIL.
    fn pictures<'py>(&self, py: Python<'py>, spec: &ColumnSpec, values: &RaggedValues) -> PyResult<Bound<'py, PyAny>> {
        let limits = Config::limits();
        let decode = |index: usize| -> Result<Option<Picture>> {
            let Some(bytes) = values.get(index) else { return Ok(None) };
            match spec.kind.image() {
                Some((exif_orientation, mode)) => {
                    let mode = if self.form == Form::Shown { Mode::Stored } else { mode_of(mode) };
                    penstock_codec::decode_in(bytes, limits, Orientation::of_column(exif_orientation), mode).map(Some)
                }
                None => penstock_codec::decode_mask(bytes, limits).map(Some),
            }
        };
        // One stored byte decodes to about ten bytes of pixels.
        let decoded =
            py.detach(|| parallel_map(values.len(), values.value_bytes().saturating_mul(10), decode)).or_raise(py)?;
        let list = PyList::empty(py);
        let mut refused: Vec<(usize, Error)> = Vec::new();
        for (index, picture) in decoded.into_iter().enumerate() {
            match picture {
                Ok(Some(picture)) => list.append(pixels(py, picture, spec.kind.is_mask())?)?,
                Ok(None) => list.append(py.None())?,
                Err(error) if self.reader.on_corrupt == OnCorrupt::Null && error.kind() == Kind::Corrupt => {
                    list.append(py.None())?
                }
                Err(error) => refused.push((index, error)),
            }
        }
        match refused.first() {
            None => Ok(list.into_any()),
            Some((index, error)) => {
                let ids = self.reader.plan.row_ids();
                let text = format!(
                    "cannot read sample {} (row id {}) of column `{}`",
                    self.reader.plan.positions[*index], ids[*index], spec.name
                );
                let positions = refused.iter().map(|(index, _)| self.reader.plan.positions[*index]).collect();
                let row_ids = refused.iter().map(|(index, _)| ids[*index]).collect();
                Err(raise(py, error.clone().context(text).column(&spec.name).rows(positions).row_ids(row_ids)))
            }
        }
    }
}

/// Return the pixels of a picture as an array (H, W, C), or (H, W) if `flat` is true.
fn pixels<'py>(py: Python<'py>, picture: Picture, flat: bool) -> PyResult<Bound<'py, PyAny>> {
    let dtype = if picture.bits == 16 { Dtype::Uint16 } else { Dtype::Uint8 };
    let shape = [picture.height, picture.width, picture.channels];
    let line = PyArray1::from_vec(py, picture.data).into_any();
    let line = if dtype == Dtype::Uint16 { line.call_method1("view", (numpy_dtype(py, dtype)?,))? } else { line };
    line.call_method1("reshape", (PyTuple::new(py, &shape[..if flat { 2 } else { 3 }])?,))
}

/// Call `penstock.ragged.from_core`.
pub fn imported_ragged<'py>(py: Python<'py>, parts: Bound<'py, PyAny>, shape: &Shape) -> PyResult<Bound<'py, PyAny>> {
    RAGGED.import(py, "penstock.ragged", "from_core")?.call1((parts, PyTuple::new(py, &shape.0)?))
}

/// Handles text or JSON that must have been invalid when it was written, since its checksum matches. Returns the exception, or
/// None to return a null for the sample.
pub type Refuse<'a> = &'a dyn Fn(usize, &str) -> Option<PyErr>;

/// Convert the `count` values of a column of text, JSON or bytes, which have `bytes` bytes together.
pub fn strings<'py, 'a>(
    py: Python<'py>,
    kind: &ColumnKind,
    form: Form,
    (count, bytes): (usize, usize),
    get: impl Fn(usize) -> Option<&'a [u8]> + Sync,
    refuse: Refuse<'_>,
) -> PyResult<Bound<'py, PyAny>> {
    if !kind.is_utf8() {
        return byte_strings(py, count, bytes, get);
    }
    let loads = if kind.is_json() && form != Form::Stored { Some(LOADS.import(py, "json", "loads")?) } else { None };
    let list = PyList::new(py, (0..count).map(|_| py.None()))?;
    for index in 0..count {
        let Some(bytes) = get(index) else { continue };
        let text = PyString::from_bytes(py, bytes);
        let (value, name) = match loads {
            Some(loads) => (text.and_then(|text| loads.call1((text,))), "JSON"),
            None => (text.map(Bound::into_any), "UTF-8"),
        };
        match value {
            Ok(value) => list.set_item(index, value)?,
            Err(error) => refuse(index, &format!("it is not {name}: {}", error.value(py))).map_or(Ok(()), Err)?,
        }
    }
    Ok(list.into_any())
}

/// Make an array of what a loader has filled.
pub fn batch_array<'py>(py: Python<'py>, array: Array) -> PyResult<Bound<'py, PyAny>> {
    let Array { memory, dtype, shape, .. } = array;
    let (begin, bytes) = (memory.begin(), memory.bytes());
    // SAFETY: the memory has that many bytes, the engine has filled it, and only this batch owns it.
    Ok(unsafe { recycle::over(py, begin, bytes, memory, &PyTuple::new(py, shape)?, &numpy_dtype(py, dtype)?) }?
        .into_any())
}
