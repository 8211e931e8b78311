//! One batch in progress: its samples, their inputs, the memory for results, and the handling of damaged samples.

use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};

use penstock_codec::pixels::Pool;
use penstock_error::{Error, Kind, Result};

use crate::batch::{Array, Batch, Loose, Nulls, Raw, Values};
use crate::caught::caught;
use crate::engine::parts::Parts;
use crate::engine::recipe::{OnCorrupt, Recipe, Started};
use crate::memory::{Memory, Shared};
use crate::source::reads::ragged;
use crate::transform::output::{Input, Output};
use crate::transform::pipeline::Group;

pub struct Job {
    pub(super) started: Started,
    pub(super) plain: Vec<(usize, Values)>,
    pub(super) work: Vec<Work>,
    /// For each task, its group and its samples.
    pub(super) tasks: Vec<(usize, Range<usize>)>,
    pub(super) next: AtomicUsize,
    pub(super) bad: Mutex<Vec<(usize, Error)>>,
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
    Parts(Parts),
}

pub enum Target {
    Fixed {
        memory: Shared,
        bytes: usize,
        nulls: Mutex<Vec<usize>>,
    },
    /// The values are there already, with zeros for nulls.
    Made {
        memory: Memory,
        nulls: Mutex<Vec<usize>>,
    },
    Loose(Mutex<Vec<Option<Loose>>>),
}

impl Job {
    pub fn tasks(&self) -> usize {
        self.tasks.len()
    }

    pub fn needs(&self) -> Needs {
        self.needs
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
                self.bad.lock().unwrap_or_else(PoisonError::into_inner).push((at, error));
            }
        }
    }

    fn sample(&self, recipe: &Recipe, group: &Group, work: &Work, at: usize, pool: &Pool) -> Result<()> {
        let pipeline = &recipe.pipeline;
        let mut inputs = Vec::with_capacity(work.inputs.len());
        for (input, output) in work.inputs.iter().zip(&group.outputs) {
            let (shape, of) = (&pipeline.outputs[*output].stored_shape, pipeline.outputs[*output].column);
            let column = &recipe.specs[self.started.places[at].source][of];
            inputs.push(match input {
                Stored::Raw(raw) => Input { bytes: raw.get(at), shape: shape.fill(raw.free(at)), window: None, column },
                Stored::Parts(parts) => parts.input(at, &pipeline.outputs[*output], column),
                Stored::Fixed { memory, cell, nulls } => {
                    let there = !nulls.as_ref().is_some_and(|nulls| nulls[at]);
                    Input { bytes: there.then(|| memory.bytes_of(at * cell, *cell)), shape: shape.fill(&[]), window: None, column }
                }
            });
        }
        let cells = pipeline.sample(group, &inputs, self.started.epoch, self.started.draws[at], pool);
        let cells = cells.map_err(|error| recipe.locate(&self.started, at, &pipeline.outputs[group.outputs[0]], error))?;
        for ((cell, target), output) in cells.into_iter().zip(&work.targets).zip(&group.outputs) {
            let output = &pipeline.outputs[*output];
            let written = match target {
                Target::Loose(list) => cell.loose(output.convert(), output.box_format()).map(|loose| {
                    list.lock().unwrap_or_else(PoisonError::into_inner)[at] = loose;
                }),
                Target::Made { nulls, .. } => {
                    if cell.is_null() {
                        nulls.lock().unwrap_or_else(PoisonError::into_inner).push(at);
                    }
                    Ok(())
                }
                Target::Fixed { memory, bytes, nulls } => {
                    // SAFETY: each sample belongs to one task, one thread runs each task, and the parts of samples do not overlap.
                    let out = unsafe { memory.part(at * bytes, *bytes) };
                    if cell.is_null() {
                        out.fill(0);
                        nulls.lock().unwrap_or_else(PoisonError::into_inner).push(at);
                        Ok(())
                    } else {
                        cell.write(&output.sizes(), output.convert(), output.dtype, out)
                    }
                }
            };
            written.map_err(|error| recipe.locate(&self.started, at, output, error))?;
        }
        Ok(())
    }

    /// Return the batch. If samples are damaged, return a new job to run instead.
    pub fn finish(self, recipe: &Recipe) -> Result<std::result::Result<Batch, Job>> {
        let mut bad = self.bad.into_inner().unwrap_or_else(PoisonError::into_inner);
        let started = self.started;
        if !bad.is_empty() {
            bad.sort_by_key(|(at, _)| *at);
            let fatal = bad.iter().position(|(_, error)| error.kind() != Kind::Corrupt || recipe.on_corrupt == OnCorrupt::Raise);
            if let Some(fatal) = fatal {
                let positions = bad.iter().flat_map(|(_, error)| error.row_list().to_vec()).collect();
                let row_ids = bad.iter().flat_map(|(_, error)| error.row_id_list().to_vec()).collect();
                return Err(bad.swap_remove(fatal).1.rows(positions).row_ids(row_ids));
            }
            let again = recipe.start(started.step, started.again(bad), |_| None)?;
            return Ok(Err(recipe.begin(again)?));
        }
        let count = started.places.len();
        let mut columns: Vec<Option<Values>> = recipe.pipeline.outputs.iter().map(|_| None).collect();
        self.plain.into_iter().for_each(|(at, values)| columns[at] = Some(values));
        for (group, work) in recipe.pipeline.groups.iter().zip(self.work) {
            for (at, target) in group.outputs.iter().zip(work.targets) {
                let output = &recipe.pipeline.outputs[*at];
                let values = target.values(output, count).map_err(|(row, error)| recipe.locate(&started, row, output, error))?;
                columns[*at] = Some(values);
            }
        }
        let columns = recipe.pipeline.outputs.iter().zip(columns).filter_map(|(output, values)| Some((output.name.clone(), values?)));
        Ok(Ok(Batch {
            step: started.step,
            epoch: started.epoch,
            columns: columns.collect(),
            row_ids: recipe.row_ids.then(|| started.reads.row_ids()),
            places: started.places,
            draws: started.draws,
            valid: started.valid,
            refused: started.refused.into_iter().map(|refused| (refused.place, refused.error)).collect(),
        }))
    }
}

/// An error, and the place in the batch of the sample that causes it.
type Misfit = (usize, Error);

/// Stack images of the same size and dtype into one array. A list that contains a null remains a list: the caller refuses nulls
/// unless it has asked for a list.
fn stacked(mut list: Vec<Option<Loose>>, output: &Output) -> std::result::Result<Values, Misfit> {
    let Some(Some((_, dtype, shape))) = list.first().filter(|_| list.iter().all(Option::is_some)) else { return Ok(Values::List(list)) };
    let unequal = |(_, other, size): &Loose| (other, size) != (dtype, shape);
    if let Some((row, (_, other, size))) = list.iter().flatten().enumerate().find(|(_, loose)| unequal(loose)) {
        let text = format!(
            "its shape is {size:?} {}, but the first one of the batch has {shape:?} {}, expected one shape for all samples",
            other.name(),
            dtype.name()
        );
        let name = &output.name;
        let hint = format!("add T.Resize((height, width)) or a crop; or write ragged=[\"{name}\"] for a list in every batch");
        return Err((row, Error::new("invalid-value", text).hint(hint)));
    }
    let (dtype, shape) = (*dtype, std::iter::once(list.len() as u64).chain(shape.iter().copied()).collect());
    if list.len() == 1 {
        let memory = Memory::of(list.pop().flatten().map(|(data, ..)| data).unwrap_or_default());
        return Ok(Values::Array(Array { memory, dtype, shape, nulls: None }));
    }
    let mut memory = Memory::new(list.iter().flatten().map(|(data, ..)| data.len()).sum()).map_err(|error| (0_usize, error))?;
    let mut rest = memory.slice();
    for (data, ..) in list.drain(..).flatten() {
        let (place, later) = rest.split_at_mut(data.len());
        place.copy_from_slice(&data);
        rest = later;
    }
    Ok(Values::Array(Array { memory, dtype, shape, nulls: None }))
}

impl Target {
    /// Return the values of a result. An error names the place in the batch that causes it.
    fn values(self, output: &Output, count: usize) -> std::result::Result<Values, Misfit> {
        let array = |memory: Memory, nulls: Mutex<Vec<usize>>| {
            let null_places = nulls.into_inner().unwrap_or_else(PoisonError::into_inner);
            let mut nulls = (!null_places.is_empty()).then(|| vec![false; count]);
            null_places.into_iter().for_each(|at| nulls.iter_mut().for_each(|nulls| nulls[at] = true));
            let shape = std::iter::once(count as u64).chain(output.sizes().into_iter().map(|size| size as u64)).collect();
            Ok(Values::Array(Array { memory, dtype: output.dtype, shape, nulls }))
        };
        match self {
            Target::Fixed { memory, nulls, .. } => array(memory.into_inner(), nulls),
            Target::Made { memory, nulls } => array(memory, nulls),
            Target::Loose(list) => {
                let list = list.into_inner().unwrap_or_else(PoisonError::into_inner);
                if output.is_media() {
                    return if output.listed { Ok(Values::List(list)) } else { stacked(list, output) };
                }
                let values = list.iter().map(|loose| loose.as_ref().map(|(data, _, shape)| (&data[..], shape.clone())));
                ragged(values, output.dtype, output.shape.len()).map_err(|error| (0, error))
            }
        }
    }
}
