//! NumPy arrays over memory that the core owns, either recycled or filled by a read.

use numpy::PyUntypedArray;
use numpy::ndarray::ArrayView1;
use penstock_dataset::Config;
use penstock_storage::{Frozen, Recycled};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Smaller arrays use memory from NumPy's own allocator, which reuses it anyway.
pub const LEAST_BYTES: u64 = 1 << 20;

/// The memory of an array. Released when the last array that refers to it is freed.
#[pyclass(frozen, module = "penstock._core")]
pub struct Memory {
    _held: Box<dyn Send + Sync>,
}

/// Make an array whose content the caller must fill. Returns None if memory is exhausted, so that NumPy reports the error.
pub fn array<'py>(
    py: Python<'py>,
    bytes: u64,
    shape: &Bound<'py, PyTuple>,
    dtype: &Bound<'py, PyAny>,
) -> PyResult<Option<Bound<'py, PyUntypedArray>>> {
    let Some(memory) = usize::try_from(bytes).ok().and_then(|bytes| Recycled::new(bytes, Config::memory_bytes()).ok()) else {
        return Ok(None);
    };
    // SAFETY: recycled memory has that many bytes, and no other reference to it exists.
    unsafe { over(py, memory.memory(), bytes as usize, memory, shape, dtype) }.map(Some)
}

/// Wrap the contiguous memory that a take has filled. No other code may still be reading it.
pub fn filled<'py>(
    py: Python<'py>,
    joined: Frozen,
    shape: &Bound<'py, PyTuple>,
    dtype: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyUntypedArray>> {
    let (begin, bytes) = (joined.as_ref().as_ptr().cast_mut(), joined.as_ref().len());
    // SAFETY: the memory lives as long as `joined`. The take that filled it is complete, so no other code reads it.
    unsafe { over(py, begin, bytes, joined, shape, dtype) }
}

/// Make an array over memory that `held` keeps alive.
///
/// # Safety
/// `begin` must point to `bytes` initialised bytes that live as long as `held` and have no other references.
pub unsafe fn over<'py>(
    py: Python<'py>,
    begin: *mut u8,
    bytes: usize,
    held: impl Send + Sync + 'static,
    shape: &Bound<'py, PyTuple>,
    dtype: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyUntypedArray>> {
    let memory = Bound::new(py, Memory { _held: Box::new(held) })?.into_any();
    // SAFETY: the caller guarantees the bytes; the array holds `memory`, which keeps them alive.
    let flat = unsafe {
        let view = ArrayView1::from_shape_ptr(bytes, begin.cast_const());
        numpy::PyArray1::borrow_from_array(&view, memory)
    };
    let array = flat.call_method1("view", (dtype,))?.call_method1("reshape", (shape,))?;
    Ok(array.cast_into()?)
}
