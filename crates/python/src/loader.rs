//! Creates a loader from JSON options and views, and converts its batches to Python values. The loader crate makes all decisions.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};

use numpy::{PyArray1, PyArrayMethods as _};
use penstock_error::Error;
use penstock_format::schema::ColumnSpec;
use penstock_loader::batch::{Batch, ColumnValues, Raw, StepSamples};
use penstock_loader::engine::recipe::Recipe;
use penstock_loader::engine::threads::{Budget, Engine, Stats};
use penstock_loader::source::files::FileValue;
use penstock_storage::{Io, Options};
use penstock_tensor::Shape;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};

use crate::errors::{OrRaise, interrupted};
use crate::lists::Weights;
use crate::output::{Form, batch_array, imported_ragged, numpy_dtype, strings};
use crate::recipe::{Declared, recipe};
use crate::view::View;

#[pyclass(frozen, module = "penstock._core")]
pub struct Loader {
    recipe: Arc<Recipe>,
    budget: Budget,
    stats: Arc<Stats>,
    engine: Mutex<Option<Arc<Engine>>>,
}

/// Files that contain the values of a column.
#[pyclass(frozen, module = "penstock._core")]
pub struct Files(Arc<penstock_loader::source::files::Files>);

#[pymethods]
impl Files {
    /// Open the files. `spec` is the column, as in a schema. Each entry is (name below `root`, file bytes, offset of the value,
    /// free sizes).
    #[new]
    fn new(
        py: Python<'_>,
        root: &str,
        io: &str,
        spec: &str,
        entries: Vec<(String, u64, u64, Vec<u64>)>,
    ) -> PyResult<Files> {
        let spec: ColumnSpec =
            serde_json::from_str(spec).map_err(|error| invalid(format!("cannot read files: {error}"))).or_raise(py)?;
        let options = Io::parse(io).and_then(|io| Options::new(Vec::new(), io)).or_raise(py)?;
        let storage = penstock_storage::open(root, &options).or_raise(py)?;
        let entry = |(name, file_bytes, begin, free)| FileValue { name, file_bytes, begin, free };
        let entries = entries.into_iter().map(entry).collect();
        Ok(Files(Arc::new(penstock_loader::source::files::Files {
            spec: ColumnSpec { id: u64::MAX, ..spec },
            storage,
            entries,
        })))
    }

    /// Return the request and byte counters.
    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.0.storage.counters().counts().entries()
    }
}

fn invalid(text: String) -> Error {
    Error::new("invalid-argument", text)
}

/// Check that consecutive batches fit in the budget. Each batch is in memory together with the one delivered before it.
fn fits(recipe: &Recipe, budget: Budget, batches: u64) -> penstock_error::Result<()> {
    let least = recipe.least_bytes();
    if least.saturating_mul(batches.min(2)) <= budget.memory_bytes {
        return Ok(());
    }
    let before = if batches > 1 { " and the previous batch holds the same amount" } else { "" };
    let text = format!(
        "cannot create a loader: a batch needs {least} bytes{before}, but memory_bytes is {}",
        budget.memory_bytes
    );
    Err(invalid(text).hint(format!("use a smaller batch, or memory_bytes={}", least.saturating_mul(2))))
}

#[pymethods]
impl Loader {
    /// Create a loader. `files` contains an additional column, or None, for each view.
    #[new]
    fn new(
        py: Python<'_>,
        views: Vec<PyRef<'_, View>>,
        files: Vec<Option<PyRef<'_, Files>>>,
        weights: Vec<Option<PyRef<'_, Weights>>>,
        declared: &str,
    ) -> PyResult<Loader> {
        let declared: Declared = serde_json::from_str(declared)
            .map_err(|error| invalid(format!("cannot create a loader: {error}")))
            .or_raise(py)?;
        let mut sources = Vec::with_capacity(views.len());
        for (((view, name), files), codes) in views.iter().zip(&declared.names).zip(files).zip(&declared.codes) {
            sources.push(view.source(name, files.map(|files| files.0.clone()), codes.clone()));
        }
        let weights = weights.into_iter().map(|weights| weights.map(|weights| weights.0.clone())).collect();
        let recipe = py.detach(|| recipe(&declared, sources, weights)).or_raise(py)?;
        let budget = Budget { threads: declared.threads, memory_bytes: declared.memory_bytes };
        fits(&recipe, budget, recipe.cut.steps()).or_raise(py)?;
        Ok(Loader { recipe: Arc::new(recipe), budget, stats: Arc::default(), engine: Mutex::default() })
    }

    /// List the columns that are read in parts, if their samples have blocks of their own.
    #[getter]
    fn columns_in_parts(&self) -> Vec<String> {
        let Recipe { pipeline, sources, .. } = &*self.recipe;
        let in_parts = pipeline.outputs.iter().filter(|output| output.in_parts);
        in_parts.map(|output| sources[0].columns[output.column].name.clone()).collect()
    }

    /// Set the mean bytes that are fetched for a sample, if files are not mapped.
    fn expect(&self, sample_bytes: u64) {
        self.recipe.fetched_bytes.store(sample_bytes * self.recipe.cut.batch(), Relaxed);
    }

    /// Count the steps in an epoch.
    #[getter]
    fn steps(&self) -> u64 {
        self.recipe.cut.steps()
    }

    /// Count the steps in the first epoch, starting at step 0.
    #[getter]
    fn first_steps(&self) -> u64 {
        self.recipe.cut.steps_from(self.recipe.base.1)
    }

    /// Return the epoch of a step and its first draw.
    fn begin_of(&self, step: u64) -> (u64, u64) {
        self.recipe.begin_of(step)
    }

    /// Return the first step of the epoch that follows the one containing `step`.
    fn end_of_epoch(&self, step: u64) -> u64 {
        self.recipe.end_of_epoch(step)
    }

    /// Return the number of a step, counted from the start of epoch 0.
    fn number_of(&self, step: u64) -> u64 {
        self.recipe.number_of(step)
    }

    /// Return the epoch and the first draw of the step with this number.
    fn begin_of_number(&self, number: u64) -> (u64, u64) {
        self.recipe.begin_of_number(number)
    }

    /// Return the bytes of a full batch, counting only results of fixed shape.
    #[getter]
    fn least_bytes(&self) -> u64 {
        self.recipe.least_bytes()
    }

    /// Count the draws in an epoch.
    #[getter]
    fn epoch_samples(&self) -> u64 {
        self.recipe.program.len()
    }

    /// List the name, dtype and shape of each result, and whether it is an image. Free sizes are None.
    fn results(&self) -> Vec<(String, String, Vec<Option<usize>>, bool)> {
        let outputs = self.recipe.pipeline.outputs.iter();
        outputs
            .map(|output| {
                (output.name.clone(), output.dtype.name().to_owned(), output.shape.clone(), output.is_image())
            })
            .collect()
    }

    /// Start making the batch of every `stride`-th step in `begin..end`, counted from `base`. If the engine is already at `begin`,
    /// only change its end.
    #[pyo3(signature = (begin, end, stride=1))]
    fn start(&self, py: Python<'_>, begin: u64, end: u64, stride: u64) -> PyResult<()> {
        if let Some(engine) = self.engine()
            && py.detach(|| engine.continues_with(begin))
        {
            engine.set_end(end);
            return Ok(());
        }
        fits(&self.recipe, self.budget, end.saturating_sub(begin).div_ceil(stride.max(1))).or_raise(py)?;
        self.close(py);
        let engine = py
            .detach(|| Engine::start(self.recipe.clone(), self.budget, begin, end, stride.max(1), self.stats.clone()))
            .or_raise(py)?;
        *self.engine.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(engine));
        Ok(())
    }

    /// Return the next batch and its metadata, or None after the last batch.
    fn next<'py>(&self, py: Python<'py>) -> PyResult<Option<(Bound<'py, PyDict>, Bound<'py, PyDict>)>> {
        let Some(engine) = self.engine() else { return Ok(None) };
        let batch = py.detach(|| engine.next(interrupted)).or_raise(py)?;
        batch.map(|batch| self.give(py, batch)).transpose()
    }

    /// Stop all threads and wait for them to finish.
    fn close(&self, py: Python<'_>) {
        let engine = self.engine.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(engine) = engine {
            py.detach(|| engine.close());
        }
    }

    /// Return the draws, sources, positions in the view, and validity of the samples of a step.
    #[allow(clippy::type_complexity)]
    fn places<'py>(
        &self,
        py: Python<'py>,
        step: u64,
    ) -> (Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<bool>>)
    {
        let StepSamples { draws, places, valid, .. } = py.detach(|| self.recipe.samples(step));
        (
            PyArray1::from_iter(py, draws.into_iter().map(|draw| draw as i64)),
            PyArray1::from_iter(py, places.iter().map(|place| place.source as i64)),
            PyArray1::from_iter(py, places.iter().map(|place| place.position as i64)),
            PyArray1::from_vec(py, valid),
        )
    }

    /// Return the bytes that an epoch would find in memory and in caches, and what it would fetch: bytes and requests. None without a cache.
    fn foreseen(&self, py: Python<'_>, begin: u64) -> PyResult<Option<(u64, u64, u64, u64)>> {
        let foreseen = py.detach(|| penstock_loader::engine::ahead::foreseen(&self.recipe, begin)).or_raise(py)?;
        Ok(foreseen.map(|reads| (reads.memory_bytes, reads.cached_bytes, reads.cold_bytes, reads.requests)))
    }

    /// Return the requests and bytes of an epoch by source, if nothing is cached at first, and the fields of `KeptBytes`.
    #[allow(clippy::type_complexity)]
    fn foreseen_requests(
        &self,
        py: Python<'_>,
        workers: u64,
    ) -> PyResult<(Vec<(f64, f64)>, Option<(u64, u64, u64, u64)>)> {
        let (recipe, memory_bytes) = (&self.recipe, self.budget.memory_bytes);
        let foreseen =
            py.detach(|| penstock_loader::engine::foresee::foreseen_requests(recipe, memory_bytes, workers.max(1)));
        foreseen
            .or_raise(py)
            .map(|(noted, kept)| (noted, kept.map(|kept| (kept.all, kept.room, kept.twice, kept.again))))
    }

    /// Return the current counters, in nanoseconds and bytes.
    fn stats(&self) -> BTreeMap<&'static str, u64> {
        let Stats { fetch_ns, gather_ns, transform_ns, kept_bytes, peak_bytes } = &*self.stats;
        let times = [("fetch_ns", fetch_ns), ("gather_ns", gather_ns), ("transform_ns", transform_ns)];
        let sizes = [("kept_bytes", &**kept_bytes), ("peak_bytes", peak_bytes)];
        times.into_iter().chain(sizes).map(|(name, value)| (name, value.load(Relaxed))).collect()
    }
}

impl Loader {
    fn engine(&self) -> Option<Arc<Engine>> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn give<'py>(&self, py: Python<'py>, batch: Batch) -> PyResult<(Bound<'py, PyDict>, Bound<'py, PyDict>)> {
        let bytes = batch.bytes();
        let (columns, nulls, about) = (PyDict::new(py), PyDict::new(py), PyDict::new(py));
        for ((name, values), output) in batch.columns.into_iter().zip(&self.recipe.pipeline.outputs) {
            let spec = &self.recipe.sources[0].columns[output.column];
            let value = match values {
                ColumnValues::Array(array) => {
                    if let Some(list) = &array.nulls {
                        nulls.set_item(&name, PyArray1::from_slice(py, list))?;
                    }
                    batch_array(py, array)?
                }
                ColumnValues::Ragged { values, offsets, shapes, rank } => {
                    let own = values.nulls.as_ref().map(|nulls| PyArray1::from_slice(py, nulls));
                    let flat = batch_array(py, values)?;
                    let count = offsets.len() - 1;
                    let shapes = PyArray1::from_vec(py, shapes).reshape([count, rank])?;
                    imported_ragged(
                        py,
                        (flat, PyArray1::from_vec(py, offsets), shapes, own).into_pyobject(py)?.into_any(),
                        &Shape(output.shape.iter().map(|size| size.map(|size| size as u64)).collect()),
                    )?
                }
                ColumnValues::Raw(raw) => raw_strings(py, spec, &raw)?,
                ColumnValues::List(list) => {
                    let items = PyList::empty(py);
                    for loose in list {
                        let Some((data, dtype, shape)) = loose else {
                            items.append(py.None())?;
                            continue;
                        };
                        let array = PyArray1::from_vec(py, data).call_method1("view", (numpy_dtype(py, dtype)?,))?;
                        items.append(array.call_method1("reshape", (PyTuple::new(py, shape)?,))?)?;
                    }
                    items.into_any()
                }
            };
            columns.set_item(name, value)?;
        }
        let StepSamples { step, epoch, draws, places, valid } = batch.samples;
        let positions = places.iter().map(|place| self.recipe.sources[place.source].absolute(place.position) as i64);
        about.set_item("position", PyArray1::from_iter(py, positions))?;
        about.set_item("source", PyArray1::from_iter(py, places.iter().map(|place| place.source as i64)))?;
        about.set_item("draw", PyArray1::from_iter(py, draws.iter().map(|draw| *draw as i64)))?;
        about.set_item("valid", PyArray1::from_vec(py, valid))?;
        about.set_item("bytes", bytes)?;
        about.set_item("step", step)?;
        about.set_item("epoch", epoch)?;
        about.set_item("nulls", nulls)?;
        if let Some(row_ids) = batch.row_ids {
            about.set_item("row_id", PyArray1::from_vec(py, row_ids))?;
        }
        let refused = batch.refused.iter().map(|(place, error)| {
            let position = self.recipe.sources[place.source].absolute(place.position);
            (place.source, position, error.code(), error.message().to_owned())
        });
        about.set_item("refused", refused.collect::<Vec<_>>())?;
        Ok((columns, about))
    }
}

fn raw_strings<'py>(py: Python<'py>, spec: &ColumnSpec, raw: &Raw) -> PyResult<Bound<'py, PyAny>> {
    let refuse = |index: usize, why: &str| {
        let error = penstock_format::cursor::malformed(why)
            .column(&spec.name)
            .context(format!("cannot read column `{}`", spec.name));
        Some(crate::errors::raise(py, error.rows(vec![index as u64])))
    };
    strings(py, &spec.kind, Form::Decoded, (raw.len(), raw.value_bytes()), |index| raw.get(index), &refuse)
}
