//! The Python module `penstock._core`: one file per noun, conversions only, no decisions.

mod config;
mod errors;
mod input;
mod loader;
mod media;
mod output;
mod recycle;
mod snapshot;
mod transaction;
mod view;

use pyo3::prelude::*;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    penstock_storage::process::watch_interrupts(errors::interrupted);
    module.add("VERSION", env!("CARGO_PKG_VERSION"))?;
    module.add("CODES", penstock_error::CODES.iter().map(|(code, kind)| (*code, kind.name())).collect::<Vec<_>>())?;
    module.add_class::<snapshot::Snapshot>()?;
    module.add_class::<transaction::Transaction>()?;
    module.add_class::<view::View>()?;
    module.add_class::<errors::Stop>()?;
    module.add_class::<loader::Loader>()?;
    module.add_class::<loader::Weights>()?;
    module.add_class::<loader::Files>()?;
    module.add_function(wrap_pyfunction!(snapshot::create, module)?)?;
    module.add_function(wrap_pyfunction!(snapshot::open, module)?)?;
    module.add_function(wrap_pyfunction!(snapshot::doctor, module)?)?;
    module.add_function(wrap_pyfunction!(config::configure, module)?)?;
    module.add_function(wrap_pyfunction!(media::check_media, module)?)?;
    Ok(())
}
