//! Memory of large arrays, used again once Python has let go of them: the kernel clears fresh pages, which costs as much as
//! copying into them.

use std::sync::{Mutex, PoisonError};

use numpy::PyUntypedArray;
use numpy::ndarray::ArrayView1;
use penstock_dataset::Config;
use penstock_storage::Buffer;
use penstock_storage::process::PerProcess;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Smaller arrays are NumPy's own: its allocator keeps such memory anyway.
pub const LEAST_BYTES: u64 = 1 << 20;
/// Buffers are multiples of this, so that one fits the next array of about the same size.
const STEP_BYTES: usize = 2 << 20;

static IDLE: PerProcess<Mutex<Vec<Buffer>>> = PerProcess::new(|| Mutex::new(Vec::new()));

/// What an array lies in. Goes back when the last array that refers to it is gone.
#[pyclass(frozen, module = "penstock._core")]
struct Memory(Option<Buffer>);

impl Drop for Memory {
    fn drop(&mut self) {
        let Some(buffer) = self.0.take().filter(|buffer| buffer.bytes() as u64 <= Config::memory_bytes() / 2) else { return };
        let mut idle = IDLE.get().lock().unwrap_or_else(PoisonError::into_inner);
        idle.push(buffer);
        // The newest is kept whatever it is; older ones as long as all take no more than a quarter of the budget.
        while idle.len() > 1 && idle.iter().map(Buffer::bytes).sum::<usize>() as u64 > Config::memory_bytes() / 4 {
            idle.remove(0);
        }
    }
}

/// An array of that many bytes with content to be filled; nothing where there is no memory, for NumPy to say so.
pub fn array<'py>(
    py: Python<'py>,
    bytes: u64,
    shape: &Bound<'py, PyTuple>,
    dtype: &Bound<'py, PyAny>,
) -> PyResult<Option<Bound<'py, PyUntypedArray>>> {
    let Some(length) = usize::try_from(bytes).ok().and_then(|bytes| bytes.checked_next_multiple_of(STEP_BYTES)) else { return Ok(None) };
    let idle = {
        let mut idle = IDLE.get().lock().unwrap_or_else(PoisonError::into_inner);
        idle.iter().position(|buffer| buffer.bytes() == length).map(|at| idle.swap_remove(at))
    };
    let Some(buffer) = idle.or_else(|| Buffer::new(length).ok()) else { return Ok(None) };
    let begin = buffer.memory();
    let memory = Bound::new(py, Memory(Some(buffer)))?.into_any();
    // SAFETY: the buffer has that many bytes, any of which are good ones, and lives as long as `memory`, which the array holds.
    let flat = unsafe {
        let view = ArrayView1::from_shape_ptr(bytes as usize, begin.cast_const());
        numpy::PyArray1::borrow_from_array(&view, memory)
    };
    let array = flat.call_method1("view", (dtype,))?.call_method1("reshape", (shape,))?;
    Ok(Some(array.cast_into()?))
}
