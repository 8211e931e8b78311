//! `configure`: the budgets of this process.

use penstock_dataset::Config;
use pyo3::prelude::*;

/// Set what is given; gives all as they are now: memory_bytes, threads, image_pixels.
#[pyfunction]
#[pyo3(signature = (memory_bytes=None, threads=None, image_pixels=None))]
pub fn configure(memory_bytes: Option<u64>, threads: Option<u64>, image_pixels: Option<u64>) -> (u64, usize, u64) {
    if let Some(_memory_bytes) = memory_bytes {
        Config::set_memory_bytes(_memory_bytes)
    }
    if let Some(_threads) = threads {
        Config::set_threads(_threads)
    }
    if let Some(_image_pixels) = image_pixels {
        Config::set_image_pixels(_image_pixels)
    }
    (Config::memory_bytes(), Config::threads(), Config::limits().pixels)
}
