//! One batch in progress: its samples, their inputs, the memory for results, and the handling of damaged samples.

use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};

use penstock_codec::pixels::Pool;
use penstock_error::{Error, Kind, Result};

use crate::batch::{Array, Batch, ColumnValues, Loose, Nulls, Raw};
use crate::caught::caught;
use crate::engine::parts::PartialSamples;
use crate::engine::recipe::{OnCorrupt, Recipe};
use crate::engine::started::Started;
use crate::memory::{Memory, Shared};
use crate::source::reads::ragged;
use crate::transform::output::{Input, Output};
use crate::transform::pipeline::OutputGroup;

pub struct Job {
    pub(super) started: Started,
    pub(super) plain: Vec<(usize, ColumnValues)>,
    pub(super) work: Vec<Work>,
    /// For each task, its group and its samples.
    pub(super) tasks: Vec<(usize, Range<usize>)>,
    pub(super) next: AtomicUsize,
    /// The samples that could not be made, and why.
    pub(super) failed: Mutex<Vec<(usize, Error)>>,
    pub(super) needs: Needs,
}

/// How much of the budget a batch needs.
#[derive(Debug, Clone, Copy, Default)]
pub struct Needs {
    /// Inputs and results together.
    pub bytes: u64,
    /// The part of `bytes` that is allocated before the first sample is made.
    pub held_bytes: u64,
    /// Maximum temporary memory needed to make one sample.
    pub scratch_bytes: u64,
}

/// A group's inputs, and the memory for its results.
pub struct Work {
    pub inputs: Vec<Stored>,
    pub targets: Vec<Target>,
}

/// The stored values of a column.
pub enum Stored {
    Raw(Raw),
    Fixed { memory: Memory, cell: usize, nulls: Nulls },
    Parts(PartialSamples),
}

pub enum Target {
    Array {
        memory: Shared,
        /// The bytes that each sample writes, or None if the values are there already, with zeros for nulls.
        sample_bytes: Option<usize>,
        nulls: Mutex<Vec<usize>>,
    },
    Loose(Mutex<Vec<Option<Loose>>>),
}

impl Job {
    /// Return the memory that the batch needs if so many threads make its samples, and nothing else.
    pub fn alone_bytes(&self, threads: usize) -> u64 {
        self.needs.bytes + self.needs.scratch_bytes * self.tasks.len().min(threads) as u64
    }

    /// Claim the next task, or return None if all tasks are claimed.
    pub fn claim(&self) -> Option<usize> {
        if self.next.load(Relaxed) >= self.tasks.len() {
            return None;
        }
        Some(self.next.fetch_add(1, Relaxed)).filter(|task| *task < self.tasks.len())
    }

    /// Run a task with pixel memory from `pool`. `finish` handles the errors.
    pub fn run(&self, recipe: &Recipe, task: usize, pool: &Pool) {
        let (group, samples) = self.tasks[task].clone();
        for at in samples {
            let done = caught(|| self.sample(recipe, &recipe.pipeline.groups[group], &self.work[group], at, pool));
            if let Err(error) = done {
                self.failed.lock().unwrap_or_else(PoisonError::into_inner).push((at, error));
            }
        }
    }

    fn sample(&self, recipe: &Recipe, group: &OutputGroup, work: &Work, at: usize, pool: &Pool) -> Result<()> {
        let (pipeline, samples) = (&recipe.pipeline, &self.started.samples);
        let mut inputs = Vec::with_capacity(work.inputs.len());
        for (input, output) in work.inputs.iter().zip(&group.outputs) {
            let output = &pipeline.outputs[*output];
            let shape = &output.stored_shape;
            let column = &recipe.sources[samples.places[at].source].columns[output.column];
            inputs.push(match input {
                Stored::Raw(raw) => Input { bytes: raw.get(at), shape: shape.fill(raw.free(at)), window: None, column },
                Stored::Parts(parts) => parts.input(at, output, column),
                Stored::Fixed { memory, cell, nulls } => {
                    let there = !nulls.as_ref().is_some_and(|nulls| nulls[at]);
                    Input {
                        bytes: there.then(|| memory.bytes_of(at * cell, *cell)),
                        shape: shape.fill(&[]),
                        window: None,
                        column,
                    }
                }
            });
        }
        let cells = pipeline.sample(group, &inputs, samples.epoch, samples.draws[at], pool);
        let cells =
            cells.map_err(|error| recipe.locate(&self.started, at, &pipeline.outputs[group.outputs[0]], error))?;
        for ((cell, target), output) in cells.into_iter().zip(&work.targets).zip(&group.outputs) {
            let output = &pipeline.outputs[*output];
            let written = match target {
                Target::Loose(list) => cell.loose(output.convert.as_ref(), output.box_format()).map(|loose| {
                    list.lock().unwrap_or_else(PoisonError::into_inner)[at] = loose;
                }),
                Target::Array { memory, sample_bytes, nulls } => {
                    if cell.is_null() {
                        nulls.lock().unwrap_or_else(PoisonError::into_inner).push(at);
                    }
                    // SAFETY: each sample belongs to one task, one thread runs each task, and the parts of samples do not overlap.
                    match sample_bytes.map(|bytes| unsafe { memory.part(at * bytes, bytes) }) {
                        Some(out) if cell.is_null() => {
                            out.fill(0);
                            Ok(())
                        }
                        Some(out) => cell.write(&output.sizes(), output.convert.as_ref(), output.dtype, out),
                        None => Ok(()),
                    }
                }
            };
            written.map_err(|error| recipe.locate(&self.started, at, output, error))?;
        }
        Ok(())
    }

    /// Return the batch. If samples are damaged, return the batch started again with stand-ins.
    pub fn finish(self, recipe: &Recipe) -> Result<std::result::Result<Batch, Started>> {
        let mut failed = self.failed.into_inner().unwrap_or_else(PoisonError::into_inner);
        let started = self.started;
        if !failed.is_empty() {
            failed.sort_by_key(|(at, _)| *at);
            let fatal = failed
                .iter()
                .position(|(_, error)| error.kind() != Kind::Corrupt || recipe.on_corrupt == OnCorrupt::Raise);
            if let Some(fatal) = fatal {
                let positions = failed.iter().flat_map(|(_, error)| error.row_list().to_vec()).collect();
                let row_ids = failed.iter().flat_map(|(_, error)| error.row_id_list().to_vec()).collect();
                return Err(failed.swap_remove(fatal).1.rows(positions).row_ids(row_ids));
            }
            return recipe.restart(started, failed).map(Err);
        }
        let count = started.samples.places.len();
        let outputs = &recipe.pipeline.outputs;
        let mut columns: Vec<Option<ColumnValues>> = outputs.iter().map(|_| None).collect();
        self.plain.into_iter().for_each(|(at, values)| columns[at] = Some(values));
        for (group, work) in recipe.pipeline.groups.iter().zip(self.work) {
            for (at, target) in group.outputs.iter().zip(work.targets) {
                let values = target.values(&outputs[*at], count);
                columns[*at] = Some(values.map_err(|(row, error)| recipe.locate(&started, row, &outputs[*at], error))?);
            }
        }
        let columns = outputs.iter().zip(columns).filter_map(|(output, values)| Some((output.name.clone(), values?)));
        Ok(Ok(Batch {
            columns: columns.collect(),
            row_ids: recipe.row_ids.then(|| started.reads.row_ids()),
            samples: started.samples,
            refused: started.refused.into_iter().map(|refused| (refused.place, refused.error)).collect(),
        }))
    }
}

/// An error, and the place in the batch of the sample that causes it.
type Misfit = (usize, Error);

/// Stack images of the same size and dtype into one array. A list that contains a null remains a list: the caller refuses nulls
/// unless it has asked for a list.
fn stacked(mut list: Vec<Option<Loose>>, output: &Output) -> std::result::Result<ColumnValues, Misfit> {
    let Some(Some((_, dtype, shape))) = list.first().filter(|_| list.iter().all(Option::is_some)) else {
        return Ok(ColumnValues::List(list));
    };
    let unequal = |(_, other, size): &Loose| (other, size) != (dtype, shape);
    if let Some((row, (_, other, size))) = list.iter().flatten().enumerate().find(|(_, loose)| unequal(loose)) {
        let text = format!(
            "its shape is {size:?} {}, but the first one in the batch has {shape:?} {}, expected one shape for all samples",
            other.name(),
            dtype.name()
        );
        let name = &output.name;
        let hint =
            format!("add T.Resize((height, width)) or a crop; or write ragged=[\"{name}\"] for a list in every batch");
        return Err((row, Error::new("invalid-value", text).hint(hint)));
    }
    let (dtype, shape) = (*dtype, std::iter::once(list.len() as u64).chain(shape.iter().copied()).collect());
    if list.len() == 1 {
        let memory = Memory::of(list.pop().flatten().map(|(data, ..)| data).unwrap_or_default());
        return Ok(ColumnValues::Array(Array { memory, dtype, shape, nulls: None }));
    }
    let mut memory =
        Memory::new(list.iter().flatten().map(|(data, ..)| data.len()).sum()).map_err(|error| (0_usize, error))?;
    let mut rest = memory.slice();
    for (data, ..) in list.drain(..).flatten() {
        let (place, later) = rest.split_at_mut(data.len());
        place.copy_from_slice(&data);
        rest = later;
    }
    Ok(ColumnValues::Array(Array { memory, dtype, shape, nulls: None }))
}

impl Target {
    pub fn array(memory: Memory, sample_bytes: Option<usize>) -> Target {
        Target::Array { memory: Shared::new(memory), sample_bytes, nulls: Mutex::default() }
    }

    /// Return the bytes that each sample writes, as far as they are known.
    pub fn written_bytes(&self) -> usize {
        if let Target::Array { sample_bytes: Some(bytes), .. } = self { *bytes } else { 0 }
    }

    /// Return the values of a result. An error names the place in the batch that causes it.
    fn values(self, output: &Output, count: usize) -> std::result::Result<ColumnValues, Misfit> {
        match self {
            Target::Array { memory, nulls, .. } => {
                let null_places = nulls.into_inner().unwrap_or_else(PoisonError::into_inner);
                let mut nulls = (!null_places.is_empty()).then(|| vec![false; count]);
                null_places.into_iter().for_each(|at| nulls.iter_mut().for_each(|nulls| nulls[at] = true));
                let shape =
                    std::iter::once(count as u64).chain(output.sizes().into_iter().map(|size| size as u64)).collect();
                Ok(ColumnValues::Array(Array { memory: memory.into_inner(), dtype: output.dtype, shape, nulls }))
            }
            Target::Loose(list) => {
                let list = list.into_inner().unwrap_or_else(PoisonError::into_inner);
                if output.is_media() {
                    return if output.listed { Ok(ColumnValues::List(list)) } else { stacked(list, output) };
                }
                let values = list.iter().map(|loose| loose.as_ref().map(|(data, _, shape)| (&data[..], shape.clone())));
                ragged(values, output.dtype, output.shape.len()).map_err(|error| (0, error))
            }
        }
    }
}
