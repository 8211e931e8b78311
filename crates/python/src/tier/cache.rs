//! The caches of this machine: their counts and their upkeep. Datasets use them through `open`.

use std::ops::ControlFlow;
use std::path::Path;

use penstock_cache::upkeep::{self, Checked};
use penstock_cache::{Counts, Drive, Drives, Spec};
use penstock_error::Error;
use pyo3::prelude::*;

use crate::errors::{OrRaise, Progress, interrupted};

/// Names and values.
type Numbers = Vec<(&'static str, u64)>;

/// The folder of a drive, its counts, and those of each store on it.
type Status = (String, Numbers, Vec<(String, Numbers)>);

fn failed(folder: &Path, error: impl std::fmt::Display) -> Error {
    Error::new("storage-failed", format!("cannot use cache `{}`: {error}", folder.display()))
}

/// Open the drives of an existing cache, whatever size is given. A drive that fails is an error here.
fn opened(cache: &str) -> penstock_error::Result<Drives> {
    let drives = Drives::open(&Spec::parse(cache)?.existing()?)?;
    match drives.failed.first() {
        Some((folder, error)) => Err(failed(folder, error)),
        None => Ok(drives),
    }
}

/// Return the folder of each drive, its counts, and the counts of each store on it.
#[pyfunction]
pub fn cache_status(py: Python<'_>, cache: &str) -> PyResult<Vec<Status>> {
    let status = py.detach(|| {
        let numbers = |counts: &Counts| counts.entries().to_vec();
        let of_drive = |drive: &Drive| {
            let (total, stores) = drive
                .usage
                .total()
                .and_then(|total| Ok((total, drive.usage.stores()?)))
                .map_err(|error| failed(drive.folder(), error))?;
            let stores = stores.iter().map(|record| (record.store.clone(), numbers(&record.counts))).collect();
            Ok((drive.folder().display().to_string(), numbers(&total), stores))
        };
        opened(cache)?.drives.iter().map(of_drive).collect::<penstock_error::Result<Vec<_>>>()
    });
    status.or_raise(py)
}

/// Verify each page of each drive, and count again. Calls `progress(extents, pages)` after each extent. Returns the folder of each drive and
/// what was found.
#[pyfunction]
#[pyo3(signature = (cache, progress=None))]
pub fn cache_verify(py: Python<'_>, cache: &str, progress: Option<Py<PyAny>>) -> PyResult<Vec<(String, Numbers)>> {
    let mut progress = Progress::new(progress);
    let verified = py.detach(|| {
        let mut see = |checked: &Checked| {
            progress.report(checked.extents, checked.pages);
            if progress.has_failed() || interrupted() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        let mut of_drive = |drive: &Drive| {
            let found = upkeep::verify(drive, &mut see).map_err(|error| failed(drive.folder(), error))?;
            let numbers = vec![
                ("extents", found.extents),
                ("pages", found.pages),
                ("corrupt_pages", found.corrupt_pages),
                ("other_files", found.other_files),
                ("counted_bytes", found.counted_bytes),
                ("bytes", found.bytes),
            ];
            Ok((drive.folder().display().to_string(), numbers))
        };
        opened(cache)?.drives.iter().map(&mut of_drive).collect::<penstock_error::Result<Vec<_>>>()
    });
    progress.ended()?;
    verified.or_raise(py)
}

/// Choose whether a store is never evicted by age.
#[pyfunction]
pub fn cache_pin(py: Python<'_>, cache: &str, store: &str, pinned: bool) -> PyResult<()> {
    let pin = |drive: &Drive| drive.usage.pin(store, pinned).map_err(|error| failed(drive.folder(), error));
    py.detach(|| opened(cache)?.drives.iter().try_for_each(pin)).or_raise(py)
}

/// Remove what a cache holds of a store, or of all stores. Returns the bytes that were freed.
#[pyfunction]
#[pyo3(signature = (cache, store=None))]
pub fn cache_evict(py: Python<'_>, cache: &str, store: Option<&str>) -> PyResult<u64> {
    let freed = py.detach(|| {
        let of_drive = |drive: &Drive| {
            upkeep::clear(drive, &|key| store.is_none_or(|store| key.store() == store))
                .map_err(|error| failed(drive.folder(), error))
        };
        opened(cache)?.drives.iter().map(of_drive).sum::<penstock_error::Result<u64>>()
    });
    freed.or_raise(py)
}
