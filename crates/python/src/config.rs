//! `configure`: the budgets of this process.

use penstock_dataset::Config;
use pyo3::prelude::*;

/// Set what is given; gives all as they are now: memory_bytes, threads, image_pixels.
#[pyfunction]
#[pyo3(signature = (memory_bytes=None, threads=None, image_pixels=None))]
pub fn configure(memory_bytes: Option<u64>, threads: Option<u64>, image_pixels: Option<u64>) -> (u64, usize, u64) {
    memory_bytes.map(Config::set_memory_bytes);
    threads.map(Config::set_threads);
    image_pixels.map(Config::set_image_pixels);
    (Config::memory_bytes(), Config::threads(), Config::limits().pixels)
}
