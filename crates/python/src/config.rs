//! The `configure` function, which sets the budgets of this process.

use penstock_dataset::{Config, fit_budget};
use pyo3::prelude::*;

/// Set the given budgets and return the current values of memory_bytes, threads, image_pixels and inline_bytes.
#[pyfunction]
#[pyo3(signature = (memory_bytes=None, threads=None, image_pixels=None, inline_bytes=None))]
pub fn configure(
    memory_bytes: Option<u64>,
    threads: Option<u64>,
    image_pixels: Option<u64>,
    inline_bytes: Option<u64>,
) -> (u64, usize, u64, u64) {
    if let Some(memory_bytes) = memory_bytes {
        Config::set_memory_bytes(memory_bytes);
        fit_budget();
    }
    threads.into_iter().for_each(Config::set_threads);
    image_pixels.into_iter().for_each(Config::set_image_pixels);
    inline_bytes.into_iter().for_each(Config::set_inline_bytes);
    (Config::memory_bytes(), Config::threads(), Config::limits().pixels, Config::inline_bytes())
}
