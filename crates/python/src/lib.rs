//! The Python module `penstock._core`, with one file per concept. It converts values and makes no decisions.

mod config;
mod errors;
mod export;
mod input;
mod lists;
mod loader;
mod made;
mod media;
mod output;
mod recycle;
mod scan;
mod tier;
mod versions;
mod view;

use bitflags as _; // See Cargo.toml.
use numpy::{PyArray1, PyArrayMethods as _};
use pyo3::prelude::*;

/// An allocator that returns large freed blocks to the kernel, so that loaders and takes stay within their budgets.
#[global_allocator]
static ALLOCATOR: penstock_storage::Returning = penstock_storage::Returning;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = module.py();
    penstock_storage::process::watch_forks();
    penstock_storage::process::watch_interrupts(errors::interrupted);
    // Do the Python bindings' one-time look-ups here. Otherwise, one thread might do them while another forks (see `made`).
    let array = PyArray1::from_vec(py, vec![0i64]);
    array.try_readonly()?;
    py.get_type::<recycle::Memory>();
    module.add("VERSION", env!("CARGO_PKG_VERSION"))?;
    module.add("CODES", penstock_error::CODES.iter().map(|(code, kind)| (*code, kind.name())).collect::<Vec<_>>())?;
    module.add_class::<versions::snapshot::Snapshot>()?;
    module.add_class::<versions::transaction::Transaction>()?;
    module.add_class::<input::Words>()?;
    module.add_class::<view::View>()?;
    module.add_class::<view::codes::Codes>()?;
    module.add_class::<scan::Scan>()?;
    module.add_class::<errors::Stop>()?;
    module.add_class::<export::Output>()?;
    module.add_class::<loader::Loader>()?;
    module.add_class::<lists::Weights>()?;
    module.add_class::<loader::Files>()?;
    module.add_function(wrap_pyfunction!(view::chances, module)?)?;
    module.add_function(wrap_pyfunction!(versions::snapshot::create, module)?)?;
    module.add_function(wrap_pyfunction!(versions::snapshot::open, module)?)?;
    module.add_function(wrap_pyfunction!(versions::snapshot::doctor, module)?)?;
    module.add_function(wrap_pyfunction!(versions::snapshot::local_path, module)?)?;
    module.add_function(wrap_pyfunction!(versions::transaction::append, module)?)?;
    module.add_function(wrap_pyfunction!(versions::transaction::begin, module)?)?;
    module.add_function(wrap_pyfunction!(versions::branches::create_branch, module)?)?;
    module.add_function(wrap_pyfunction!(versions::branches::delete_branch, module)?)?;
    module.add_function(wrap_pyfunction!(versions::branches::branches, module)?)?;
    module.add_function(wrap_pyfunction!(versions::branches::branch_name, module)?)?;
    module.add_function(wrap_pyfunction!(versions::branches::merge, module)?)?;
    module.add_function(wrap_pyfunction!(versions::branches::cherry_pick, module)?)?;
    module.add_function(wrap_pyfunction!(versions::branches::reset, module)?)?;
    module.add_function(wrap_pyfunction!(versions::branches::compact, module)?)?;
    module.add_function(wrap_pyfunction!(versions::derived::attach, module)?)?;
    module.add_function(wrap_pyfunction!(versions::derived::detach, module)?)?;
    module.add_function(wrap_pyfunction!(versions::derived::attachments, module)?)?;
    module.add_function(wrap_pyfunction!(versions::derived::statistics, module)?)?;
    module.add_function(wrap_pyfunction!(versions::derived::may_have, module)?)?;
    module.add_function(wrap_pyfunction!(config::configure, module)?)?;
    module.add_function(wrap_pyfunction!(tier::cache::cache_status, module)?)?;
    module.add_function(wrap_pyfunction!(tier::cache::cache_verify, module)?)?;
    module.add_function(wrap_pyfunction!(tier::cache::cache_pin, module)?)?;
    module.add_function(wrap_pyfunction!(tier::cache::cache_evict, module)?)?;
    module.add_function(wrap_pyfunction!(tier::serve::serve, module)?)?;
    module.add_function(wrap_pyfunction!(tier::serve::check_serve, module)?)?;
    module.add_function(wrap_pyfunction!(tier::serve::load, module)?)?;
    module.add_function(wrap_pyfunction!(tier::serve::warm_objects, module)?)?;
    module.add_function(wrap_pyfunction!(media::check_media, module)?)?;
    module.add_function(wrap_pyfunction!(media::encode_png, module)?)?;
    module.add_function(wrap_pyfunction!(media::image_sizes, module)?)?;
    module.add_function(wrap_pyfunction!(media::mix_rows, module)?)?;
    module.add_function(wrap_pyfunction!(lists::last_places, module)?)?;
    module.add_function(wrap_pyfunction!(lists::numbers, module)?)?;
    module.add_function(wrap_pyfunction!(lists::texts, module)?)?;
    Ok(())
}
