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
mod recipe;
mod recycle;
mod scan;
mod tier;
mod versions;
mod view;

use bitflags as _; // See Cargo.toml.
use numpy::{PyArray1, PyArrayMethods as _};
use pyo3::prelude::*;

use crate::tier::{cache, serve};
use crate::versions::{branches, derived, snapshot, transaction};

/// An allocator that returns large freed blocks to the kernel, so that loaders and takes stay within their budgets.
#[global_allocator]
static ALLOCATOR: penstock_storage::Returning = penstock_storage::Returning;

/// Add functions to a module, each line those of one file.
macro_rules! add_functions {
    ($module:ident: $($file:ident: $($function:ident),*;)*) => {
        $($($module.add_function(wrap_pyfunction!($file::$function, $module)?)?;)*)*
    };
}

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
    module.add(
        "CODES",
        penstock_error::CODES.iter().map(|(code, kind)| (*code, format!("{kind:?}"))).collect::<Vec<_>>(),
    )?;
    module.add_class::<snapshot::Snapshot>()?;
    module.add_class::<transaction::Transaction>()?;
    module.add_class::<input::Words>()?;
    module.add_class::<view::View>()?;
    module.add_class::<view::codes::Codes>()?;
    module.add_class::<scan::Scan>()?;
    module.add_class::<errors::Stop>()?;
    module.add_class::<export::Output>()?;
    module.add_class::<loader::Loader>()?;
    module.add_class::<lists::Weights>()?;
    module.add_class::<loader::Files>()?;
    add_functions! {
        module:
            view: chances;
            snapshot: create, open, doctor, local_path;
            transaction: append, begin;
            branches: create_branch, delete_branch, branches, branch_name, merge, cherry_pick, reset, compact;
            derived: attach, detach, attachments, statistics, may_have;
            config: configure;
            cache: cache_status, cache_verify, cache_pin, cache_evict;
            serve: serve, check_serve, load, warm_objects;
            media: check_media, encode_png, image_sizes, mix_rows;
            lists: last_places, numbers, texts;
    }
    Ok(())
}
