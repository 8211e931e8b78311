//! A snapshot, with functions to create or open a dataset, list commits, verify data and measure sizes.

use std::collections::BTreeMap;
use std::sync::Arc;

use numpy::{PyArray1, PyArray2, PyArrayMethods as _};
use penstock_cache::Tiered;
use penstock_dataset::{CACHE_POLICY, Context, Incomplete, ManifestPart, Report, file_cache_bytes};
use penstock_error::Error;
use penstock_format::SnapshotId;
use penstock_format::names::NameKind;
use penstock_format::overlay::Overlay;
use penstock_format::rows::RowIds;
use penstock_format::schema::ColumnSpec;
use penstock_storage::{Io, Options};
use pyo3::exceptions::PyRuntimeWarning;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::errors::{OrRaise, Progress, exception};
use crate::versions::history::{Diff, Log};
use crate::view::View;

/// Runs of row ids: an array (k, 2) of first row ids and numbers of row ids.
type Runs<'py> = Bound<'py, PyArray2<i64>>;

#[pyclass(frozen, module = "penstock._core")]
pub struct Snapshot {
    pub inner: Arc<penstock_dataset::Snapshot>,
    pub options: Options,
}

/// Parse the `storage_options` and `io` arguments.
fn options(given: Option<Vec<(String, String)>>, io: &str) -> penstock_error::Result<Options> {
    Options::new(given.unwrap_or_default(), Io::parse(io)?)
}

/// Open a store behind its cache. If the cache fails, warn and read without it.
fn opened(uri: &str, options: &Options) -> penstock_error::Result<Tiered> {
    penstock_cache::open(uri, options, CACHE_POLICY, |error| {
        let text = std::ffi::CString::new(format!("{}; reads go to the store", error.message())).unwrap_or_default();
        // A filter may turn the warning into an exception, but nothing is wrong with the dataset.
        let _ = Python::attach(|py| PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &text, 1));
    })
}

/// Create a dataset. `columns` contains the columns of the schema, as JSON.
#[pyfunction]
// Over 6 parameters: Python passes each by name.
#[pyo3(signature = (uri, columns, message, author, storage_options=None, io="auto"))]
pub fn create(
    py: Python<'_>,
    uri: &str,
    columns: &str,
    message: &str,
    author: &str,
    storage_options: Option<Vec<(String, String)>>,
    io: &str,
) -> PyResult<Snapshot> {
    let columns: Vec<ColumnSpec> = serde_json::from_str(columns)
        .map_err(|error| Error::new("invalid-schema", format!("cannot create dataset: {error}")))
        .or_raise(py)?;
    let options = options(storage_options, io).or_raise(py)?;
    let made = py.detach(|| penstock_dataset::create(opened(uri, &options)?, columns, message, author));
    Ok(Snapshot { inner: Arc::new(made.or_raise(py)?), options })
}

/// Open the newest snapshot of a branch, or the one at a time in microseconds, or the given snapshot. `incomplete` permits a copy in which
/// objects are missing.
#[pyfunction]
#[pyo3(signature = (uri, snapshot=None, storage_options=None, io="auto", incomplete=false, tag=None, branch=("main".into(), None)))]
// Over 6 parameters: Python passes each by name.
pub fn open(
    py: Python<'_>,
    uri: &str,
    snapshot: Option<&str>,
    storage_options: Option<Vec<(String, String)>>,
    io: &str,
    incomplete: bool,
    tag: Option<&str>,
    branch: (String, Option<i64>),
) -> PyResult<Snapshot> {
    let options = options(storage_options, io).or_raise(py)?;
    let mut early = None;
    let opened = py.detach(|| {
        let incomplete = if incomplete { Incomplete::Permit } else { Incomplete::Refuse };
        let context = Context::with(opened(uri, &options)?, incomplete);
        match (snapshot, tag, &branch) {
            (Some(id), ..) => penstock_dataset::Snapshot::open_at(context, id),
            (_, Some(tag), _) => penstock_dataset::Snapshot::open_tag(context, tag),
            (_, _, (name, time_us)) => {
                penstock_dataset::Snapshot::open_branch(context, name, *time_us, |text| early = Some(text))
            }
        }
    });
    let inner = Arc::new(opened.or_raise(py)?);
    if let Some(text) = early {
        // The warning names the caller of `ps.open`.
        PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &std::ffi::CString::new(text).unwrap_or_default(), 2)?;
    }
    Ok(Snapshot { inner, options })
}

/// Examine a location. Returns (name, good | None, (value, unit) | None, finding, advice) for each check.
#[pyfunction]
#[pyo3(signature = (uri, storage_options=None, io="auto"))]
pub fn doctor(
    py: Python<'_>,
    uri: &str,
    storage_options: Option<Vec<(String, String)>>,
    io: &str,
) -> PyResult<Vec<Found>> {
    let options = options(storage_options, io).or_raise(py)?;
    let findings =
        py.detach(|| penstock_dataset::examine(&Context::new(penstock_storage::open(uri, &options)?))).or_raise(py)?;
    Ok(findings
        .into_iter()
        .map(|found| (found.name, found.good, found.measured, found.finding, found.advice))
        .collect())
}

/// Return the local path that a path or a file URI names, or None for a URI of another store.
#[pyfunction]
pub fn local_path(py: Python<'_>, uri: &str) -> PyResult<Option<String>> {
    Ok(penstock_storage::local_path(uri).or_raise(py)?.map(|path| path.display().to_string()))
}

type Found = (&'static str, Option<bool>, Option<(f64, &'static str)>, String, String);

impl Snapshot {
    /// Return the same snapshot without a cache, to verify the objects of the store.
    fn uncached(&self) -> penstock_error::Result<Arc<penstock_dataset::Snapshot>> {
        let Context { storage, cached, incomplete, .. } = self.inner.context.as_ref();
        if cached.is_none() {
            return Ok(self.inner.clone());
        }
        let context = Context::with(penstock_storage::open(storage.uri(), &self.options)?, *incomplete);
        penstock_dataset::Snapshot::at(context, self.inner.entry.clone()).map(Arc::new)
    }
}

#[pymethods]
impl Snapshot {
    #[getter]
    fn uri(&self) -> &str {
        self.inner.context.storage.uri()
    }

    /// Return whether data files are mapped instead of fetched by range.
    #[getter]
    fn mapped(&self) -> bool {
        self.inner.is_mapped()
    }

    #[getter]
    fn id(&self) -> String {
        self.inner.id().to_string()
    }

    #[getter]
    fn number(&self) -> u64 {
        self.inner.id().number
    }

    #[getter]
    fn dataset_id(&self) -> String {
        self.inner.record().dataset.to_string()
    }

    /// Return the columns of the schema, as JSON.
    #[getter]
    fn columns(&self, py: Python<'_>) -> PyResult<String> {
        serde_json::to_string(&self.inner.schema.columns)
            .map_err(|error| Error::new("internal", error.to_string()))
            .or_raise(py)
    }

    fn __len__(&self) -> usize {
        self.inner.len() as usize
    }

    /// Open the newest snapshot of this branch, which shares caches and counters with this one.
    fn refresh(&self, py: Python<'_>) -> PyResult<Snapshot> {
        let newest = py.detach(|| self.inner.refreshed()).or_raise(py)?;
        Ok(Snapshot { inner: Arc::new(newest), options: self.options.clone() })
    }

    /// Return `storage_options` without secrets, and `io`, to open the dataset in another process.
    fn options(&self) -> (Vec<(String, String)>, &'static str) {
        (self.options.without_secrets().into_iter().collect(), self.options.io.name())
    }

    /// View all samples, or those that the description of a selection says.
    #[pyo3(signature = (description=None))]
    fn view(&self, py: Python<'_>, description: Option<Vec<u8>>) -> PyResult<View> {
        View::new(py, self.inner.clone(), description)
    }

    /// Return the words of a category, ordered by code.
    fn vocabulary<'py>(&self, py: Python<'py>, column: &str) -> PyResult<Bound<'py, PyList>> {
        let words =
            py.detach(|| self.inner.column(column).and_then(|spec| self.inner.vocabulary(spec.id))).or_raise(py)?;
        PyList::new(py, words.iter())
    }

    /// Return another snapshot of this dataset, by its id, or by the name of a tag or a branch.
    fn at(&self, py: Python<'_>, snapshot: Option<&str>, name: Option<&str>) -> PyResult<Snapshot> {
        let context = self.inner.context.clone();
        let opened = py.detach(|| match (snapshot, name) {
            (Some(id), _) => penstock_dataset::Snapshot::open_at(context, id),
            (None, name) => penstock_dataset::Snapshot::open_name(context, name.unwrap_or_default()),
        });
        Ok(Snapshot { inner: Arc::new(opened.or_raise(py)?), options: self.options.clone() })
    }

    /// Begin to compare this snapshot with a later one.
    fn diff(&self, py: Python<'_>, other: &Snapshot) -> PyResult<Diff> {
        let (one, other) = (self.inner.clone(), other.inner.clone());
        let diff = py.detach(|| {
            one.context.hold_to(other.record().dataset)?;
            penstock_dataset::Diff::new(one, other.clone())
        });
        Ok(Diff::new(other.schema.clone(), diff.or_raise(py)?))
    }

    /// Return whether a commit succeeded whose state was unknown, given the id of its snapshot.
    fn resolve(&self, py: Python<'_>, snapshot: &str) -> PyResult<bool> {
        let context = &self.inner.context;
        py.detach(|| {
            context.check_dataset()?;
            penstock_dataset::resolve(context.storage.as_ref(), &SnapshotId::parse(snapshot)?)
        })
        .or_raise(py)
    }

    /// Pin this snapshot under a name, until the pin is removed.
    fn pin(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        py.detach(|| penstock_dataset::pin(&self.inner.context, name, self.inner.id())).or_raise(py)
    }

    /// Give a snapshot a tag: this one, or the one with this id.
    fn create_tag(&self, py: Python<'_>, name: &str, snapshot: Option<&str>) -> PyResult<()> {
        py.detach(|| {
            let target = match snapshot {
                None => self.inner.id(),
                // The snapshot must exist.
                Some(id) => penstock_dataset::Snapshot::open_at(self.inner.context.clone(), id)?.id(),
            };
            penstock_dataset::create_tag(&self.inner.context, name, target)
        })
        .or_raise(py)
    }

    fn delete_tag(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        py.detach(|| penstock_dataset::delete_tag(&self.inner.context, name)).or_raise(py)
    }

    /// Return all tags: name → snapshot id.
    fn tags(&self, py: Python<'_>) -> PyResult<BTreeMap<String, String>> {
        let tags = py.detach(|| penstock_dataset::names(&self.inner.context, NameKind::Tag)).or_raise(py)?;
        Ok(tags.into_iter().map(|(name, target)| (name, target.to_string())).collect())
    }

    /// Return all pins: name → snapshot id.
    fn pins(&self, py: Python<'_>) -> PyResult<BTreeMap<String, String>> {
        let pins = py.detach(|| penstock_dataset::names(&self.inner.context, NameKind::Pin)).or_raise(py)?;
        Ok(pins.into_iter().map(|(name, target)| (name, target.to_string())).collect())
    }

    /// Remove a pin. Returns whether it existed.
    fn unpin(&self, py: Python<'_>, name: &str) -> PyResult<bool> {
        py.detach(|| penstock_dataset::unpin(&self.inner.context, name)).or_raise(py)
    }

    /// Begin to list this commit and its ancestors, newest first.
    fn log(&self) -> Log {
        Log::new(self.inner.clone())
    }

    /// Return how caches name the store.
    fn identity(&self) -> String {
        penstock_cache::store_key(&self.inner.context.storage.identity())
    }

    /// Read all data files, so that the cache has them. Calls `progress(data_files, data_bytes)` periodically. Returns the last counts.
    #[pyo3(signature = (progress=None))]
    fn warm(&self, py: Python<'_>, progress: Option<Py<PyAny>>) -> PyResult<(u64, u64)> {
        let mut progress = Progress::new(progress);
        let warmed = py.detach(|| penstock_dataset::warm(&self.inner, |files, bytes| progress.report(files, bytes)));
        progress.ended()?;
        warmed.or_raise(py)
    }

    /// Check every byte and call `progress(data_files, data_bytes)` periodically.
    #[pyo3(signature = (progress=None))]
    fn verify(&self, py: Python<'_>, progress: Option<Py<PyAny>>) -> PyResult<Py<PyDict>> {
        let mut progress = Progress::new(progress);
        let report: Report = py
            .detach(|| {
                penstock_dataset::verify(self.uncached()?.as_ref(), |report| {
                    progress.report(report.data_files, report.data_bytes)
                })
            })
            .or_raise(py)?;
        progress.ended()?;
        let answer = PyDict::new(py);
        for (name, value) in [
            ("commits", report.commits),
            ("fragments", report.fragments),
            ("data_files", report.data_files),
            ("data_bytes", report.data_bytes),
            ("samples", report.samples),
        ] {
            answer.set_item(name, value)?;
        }
        answer.set_item("unreferenced_objects", report.unreferenced.map(|found| found.objects))?;
        answer.set_item("unreferenced_bytes", report.unreferenced.map(|found| found.bytes))?;
        let problems: Vec<(String, Py<PyAny>)> =
            report.problems.into_iter().map(|problem| (problem.object, exception(py, problem.error))).collect();
        answer.set_item("problems", problems)?;
        Ok(answer.unbind())
    }

    /// Count the objects that no snapshot refers to, and their bytes. None if they cannot be counted.
    fn unreferenced(&self, py: Python<'_>) -> PyResult<Option<(u64, u64)>> {
        let found = py.detach(|| penstock_dataset::unreferenced(&self.uncached()?.context)).or_raise(py)?;
        Ok(found.map(|found| (found.objects, found.bytes)))
    }

    /// Return a number that is the same for all handles that share counters.
    fn handle(&self) -> usize {
        Arc::as_ptr(&self.inner.context) as usize
    }

    /// Return this handle's request and byte counters.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.inner.context.storage.counters().counts().entries()
    }

    /// Estimate sizes of these columns in bytes, as (stored, one decoded block for each column with shared blocks, one decoded sample). Reads the
    /// manifest and a few tails.
    fn column_bytes(&self, py: Python<'_>, columns: Vec<String>) -> PyResult<(u64, u64, f64)> {
        py.detach(|| {
            let ids = columns
                .iter()
                .map(|name| Ok(self.inner.column(name)?.id))
                .collect::<penstock_error::Result<Vec<u64>>>()?;
            let bytes = self.inner.column_bytes(&ids)?;
            Ok((bytes.stored, bytes.blocks, bytes.decoded_of_sample))
        })
        .or_raise(py)
    }

    /// Return the bytes of data files that stay in memory when these columns are read, as (all files, largest file, cache
    /// limit). Reads the manifest.
    fn kept_bytes(&self, py: Python<'_>, columns: Vec<String>) -> PyResult<(u64, u64, u64)> {
        py.detach(|| {
            let ids = columns
                .iter()
                .map(|name| Ok(self.inner.column(name)?.id))
                .collect::<penstock_error::Result<Vec<u64>>>()?;
            self.inner.kept_bytes(&ids).map(|(all, largest)| (all, largest, file_cache_bytes()))
        })
        .or_raise(py)
    }

    /// Count what the snapshot consists of. Reads the manifest.
    fn structure(&self, py: Python<'_>) -> PyResult<Vec<(&'static str, u64)>> {
        let (record, overlays) = (self.inner.record(), self.inner.overlays.all());
        let (mut fragments, mut files, mut bytes) = (0, 0, 0);
        py.detach(|| {
            self.inner.each_fragment(|_| {
                fragments += 1;
                Ok(())
            })?;
            self.inner.each_file(None, |file, _| {
                (files, bytes) = (files + 1, bytes + file.file_bytes);
                Ok(())
            })
        })
        .or_raise(py)?;
        let changed = overlays.iter().filter(|overlay| overlay.has_values());
        let count = |is: fn(&Overlay) -> bool| {
            overlays.iter().filter(|overlay| is(overlay)).map(|overlay| overlay.rows.ids()).sum::<u64>()
        };
        Ok(vec![
            ("samples", record.live),
            ("deleted_samples", count(Overlay::is_deletion)),
            ("absent_samples", count(Overlay::is_absence)),
            ("overlay_samples", changed.clone().map(|overlay| overlay.rows.ids()).sum()),
            ("fragments", fragments),
            ("pages", self.inner.parts.iter().filter(|part| matches!(part, ManifestPart::Page(_))).count() as u64),
            ("overlays", changed.count() as u64),
            ("data_files", files),
            ("data_bytes", bytes),
        ])
    }

    /// Return the samples to which no update gave a value in a column: those that were appended without it, and those whose value may be null.
    /// Each is an array of runs (k, 2): the first row id and the number of row ids.
    fn without_value<'py>(&self, py: Python<'py>, column: &str) -> PyResult<(Runs<'py>, Runs<'py>)> {
        let (lacking, others) = py.detach(|| self.inner.without_value(self.inner.column(column)?)).or_raise(py)?;
        let runs = |ids: RowIds| {
            let flat: Vec<i64> = ids
                .runs_in(0..u64::MAX)
                .iter()
                .flat_map(|(run, _)| [run.first.cast_signed(), run.count as i64])
                .collect();
            let shape = [flat.len() / 2, 2];
            PyArray1::from_vec(py, flat).reshape(shape)
        };
        Ok((runs(lacking)?, runs(others)?))
    }

    /// Return the name, stored bytes, number of blocks, and number of data files of each column. Reads all tails.
    fn layout(&self, py: Python<'_>) -> PyResult<Vec<(String, u64, u64, u64)>> {
        py.detach(|| {
            let mut rows: Vec<(u64, (String, u64, u64, u64))> =
                self.inner.schema.columns.iter().map(|column| (column.id, (column.name.clone(), 0, 0, 0))).collect();
            self.inner.each_file(None, |reference, samples| {
                let file = self.inner.context.file(reference, samples)?;
                for chunk in &file.tail.chunks {
                    if let Some((_, row)) = rows.iter_mut().find(|(id, _)| *id == chunk.column) {
                        row.1 += chunk.stored_bytes.iter().sum::<u64>();
                        row.2 += chunk.blocks() as u64;
                        row.3 += 1;
                    }
                }
                Ok(())
            })?;
            Ok(rows.into_iter().map(|(_, row)| row).collect())
        })
        .or_raise(py)
    }
}
