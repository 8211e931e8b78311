//! NumPy arrays over memory that the core owns, either recycled or filled by a read, and `bytes` objects, whose memory stays for the next ones.

use numpy::PyUntypedArray;
use numpy::ndarray::ArrayView1;
use penstock_dataset::Config;
use penstock_storage::{Frozen, Recycled, hold_heap};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

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
    let Some(memory) = usize::try_from(bytes).ok().and_then(|bytes| Recycled::new(bytes, Config::memory_bytes()).ok())
    else {
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

/// Copies of at least this many bytes run without the GIL.
const COPY_WITHOUT_GIL_BYTES: usize = 64 << 10;

/// More than the size of a `bytes` object in addition to its bytes.
const OBJECT_BYTES: usize = 64;

/// Make one `bytes` object per sample, with a single copy.
pub fn byte_strings<'py, 'a>(
    py: Python<'py>,
    count: usize,
    bytes: usize,
    get: impl Fn(usize) -> Option<&'a [u8]> + Sync,
) -> PyResult<Bound<'py, PyAny>> {
    if bytes < COPY_WITHOUT_GIL_BYTES {
        let objects = (0..count).map(|index| get(index).map(|value| PyBytes::new(py, value)));
        return Ok(PyList::new(py, objects.collect::<Vec<_>>())?.into_any());
    }
    let mut objects: Vec<Option<Bound<'py, PyBytes>>> = Vec::with_capacity(count);
    let mut targets: Vec<(usize, usize)> = Vec::with_capacity(count);
    let (mut last, mut largest) = (0, 0);
    for index in 0..count {
        let Some(value) = get(index) else {
            objects.push(None);
            continue;
        };
        // SAFETY: with a null source, the call allocates a bytes object of that length, uninitialised; it returns null on error.
        let object = unsafe {
            Bound::from_owned_ptr_or_err(
                py,
                pyo3::ffi::PyBytes_FromStringAndSize(std::ptr::null(), value.len() as isize),
            )?
        };
        // SAFETY: the object is a bytes object with no other references.
        let data = unsafe { pyo3::ffi::PyBytes_AsString(object.as_ptr()) };
        targets.push((index, data as usize));
        (last, largest) = (last.max(data as usize), largest.max(value.len()));
        objects.push(Some(object.cast_into::<PyBytes>()?));
    }
    hold_heap(last, largest + OBJECT_BYTES);
    py.detach(|| {
        for (index, target) in targets {
            if let Some(value) = get(index) {
                // SAFETY: `target` has value.len() bytes, is not shared until the list is returned, and cannot overlap the source.
                unsafe { std::ptr::copy_nonoverlapping(value.as_ptr(), target as *mut u8, value.len()) };
            }
        }
    });
    Ok(PyList::new(py, objects)?.into_any())
}
