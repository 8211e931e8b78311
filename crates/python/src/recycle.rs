//! NumPy arrays over memory of ours: recycled, or filled by a store.

use numpy::PyUntypedArray;
use numpy::ndarray::ArrayView1;
use penstock_dataset::Config;
use penstock_storage::{Frozen, Recycled};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Smaller arrays are NumPy's own: its allocator keeps such memory anyway.
pub const LEAST_BYTES: u64 = 1 << 20;

/// What an array lies in. Goes back when the last array that refers to it is gone.
#[pyclass(frozen, module = "penstock._core")]
pub struct Memory {
    _held: Box<dyn Send + Sync>,
}

/// An array of that many bytes with content to be filled; nothing where there is no memory, for NumPy to say so.
pub fn array<'py>(
    py: Python<'py>,
    bytes: u64,
    shape: &Bound<'py, PyTuple>,
    dtype: &Bound<'py, PyAny>,
) -> PyResult<Option<Bound<'py, PyUntypedArray>>> {
    let Some(memory) = usize::try_from(bytes).ok().and_then(|bytes| Recycled::new(bytes, Config::memory_bytes()).ok()) else {
        return Ok(None);
    };
    // SAFETY: recycled memory has that many bytes, and nobody else knows of it.
    unsafe { over(py, memory.memory(), bytes as usize, memory, shape, dtype) }.map(Some)
}

/// An array that is what a take has joined. The caller is the only one who still reads it.
pub fn filled<'py>(
    py: Python<'py>,
    joined: Frozen,
    shape: &Bound<'py, PyTuple>,
    dtype: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyUntypedArray>> {
    let (begin, bytes) = (joined.as_ref().as_ptr().cast_mut(), joined.as_ref().len());
    // SAFETY: what was joined lives as long as `joined`; the take that put it together is over, so nobody else reads it.
    unsafe { over(py, begin, bytes, joined, shape, dtype) }
}

/// An array over memory that `held` keeps.
///
/// # Safety
/// `begin` must have `bytes` initialised bytes for as long as `held` lives, to which nobody else refers.
pub unsafe fn over<'py>(
    py: Python<'py>,
    begin: *mut u8,
    bytes: usize,
    held: impl Send + Sync + 'static,
    shape: &Bound<'py, PyTuple>,
    dtype: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyUntypedArray>> {
    let memory = Bound::new(py, Memory { _held: Box::new(held) })?.into_any();
    // SAFETY: as the caller promises; `memory`, which the array holds, keeps it.
    let flat = unsafe {
        let view = ArrayView1::from_shape_ptr(bytes, begin.cast_const());
        numpy::PyArray1::borrow_from_array(&view, memory)
    };
    let array = flat.call_method1("view", (dtype,))?.call_method1("reshape", (shape,))?;
    Ok(array.cast_into()?)
}
