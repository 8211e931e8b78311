//! Reads the inputs of a batch, reserves memory for its results, and divides the work into tasks.

use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;

use penstock_error::{Kind, Result};

use crate::batch::ColumnValues;
use crate::engine::job::{Job, Needs, Stored, Target, Work};
use crate::engine::recipe::{OnCorrupt, Recipe};
use crate::engine::started::Started;
use crate::memory::{Memory, capacity};
use crate::source::reads::Reads;
use crate::source::view::value_type;
use crate::transform::output::Role;
use crate::transform::pipeline::OutputGroup;

/// Approximate bytes that one task writes.
const TASK_BYTES: usize = 256 << 10;

/// Samples per task if inputs vary in size, as encoded images do.
const TASK_IMAGES: usize = 2;

/// Plain columns, work for the other columns, and the memory that both need.
type Gathered = (Vec<(usize, ColumnValues)>, Vec<Work>, Needs);

impl Recipe {
    /// Read the inputs of a batch. Plain columns are copied into the batch immediately.
    pub fn begin(&self, mut started: Started) -> Result<Job> {
        loop {
            match self.gather(&mut started) {
                Ok(gathered) => {
                    started.reads.release();
                    return Ok(job(started, gathered));
                }
                Err(error) if error.kind() == Kind::Corrupt && self.on_corrupt != OnCorrupt::Raise => {
                    let damaged = self.damaged(&started.samples)?;
                    if damaged.is_empty() {
                        return Err(error);
                    }
                    started = self.restart(started, damaged)?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn gather(&self, started: &mut Started) -> Result<Gathered> {
        if let Some(error) =
            started.failed.take().filter(|_| self.pipeline.outputs.iter().any(|output| output.in_parts))
        {
            return Err(error);
        }
        let (mut parts, reads, count) =
            (std::mem::take(&mut started.parts), &started.reads, started.samples.places.len());
        let (mut bytes, mut loose_bytes, mut scratch_bytes) = (0, 0, 0);
        let mut plain = Vec::with_capacity(self.pipeline.plain.len());
        for at in &self.pipeline.plain {
            let values = self.values(reads, self.pipeline.outputs[*at].column)?;
            bytes += match &values {
                ColumnValues::Array(array) | ColumnValues::Ragged { values: array, .. } => {
                    capacity(array.memory.bytes()) as u64
                }
                ColumnValues::Raw(raw) => raw.own_bytes,
                ColumnValues::List(_) => 0,
            };
            plain.push((*at, values));
        }
        let mut work = Vec::with_capacity(self.pipeline.groups.len());
        for group in &self.pipeline.groups {
            let (mut inputs, mut targets) = (Vec::new(), Vec::new());
            for at in &group.outputs {
                let output = &self.pipeline.outputs[*at];
                let mut input = match parts.iter().position(|parts| parts.output == *at) {
                    Some(place) => {
                        self.complete(&mut parts[place], reads)?;
                        Stored::Parts(parts.swap_remove(place))
                    }
                    None => self.input(reads, output.column, count)?,
                };
                bytes += match &input {
                    Stored::Fixed { memory, .. } => capacity(memory.bytes()) as u64,
                    Stored::Raw(raw) => raw.own_bytes,
                    Stored::Parts(parts) => capacity(parts.bytes()) as u64 + parts.rest_bytes(),
                };
                targets.push(match &mut input {
                    Stored::Parts(parts) if parts.is_result => Target::array(parts.take()?, None),
                    _ if output.is_fixed() => {
                        let memory = Memory::new(output.sample_bytes() * count)?;
                        bytes += capacity(memory.bytes()) as u64;
                        Target::array(memory, Some(output.sample_bytes()))
                    }
                    _ => Target::Loose(Mutex::new((0..count).map(|_| None).collect())),
                });
                inputs.push(input);
            }
            for (place, (input, at)) in inputs.iter().zip(&group.outputs).enumerate() {
                let output = &self.pipeline.outputs[*at];
                let (mut made, mut largest) = (0, 0);
                for row in 0..count {
                    let Some((own_bytes, scratch)) = self.result_bytes(group, place, input, row) else { continue };
                    made += own_bytes;
                    largest = largest.max(own_bytes);
                    scratch_bytes = scratch_bytes.max(scratch);
                }
                // Images exist twice while they are being stacked.
                let is_stacked = count > 1 && !output.listed && largest * count as u64 == made;
                if !output.is_fixed() {
                    loose_bytes += if is_stacked { 2 * made } else { made };
                }
            }
            work.push(Work { inputs, targets });
        }
        Ok((plain, work, Needs { bytes: bytes + loose_bytes, held_bytes: bytes, scratch_bytes }))
    }

    /// Estimate the bytes of one value of a result, and the scratch bytes needed to make it. Results such as boxes are about as large as their
    /// inputs. Returns None for a null.
    fn result_bytes(&self, group: &OutputGroup, place: usize, input: &Stored, row: usize) -> Option<(u64, u64)> {
        let output = &self.pipeline.outputs[group.outputs[place]];
        let sizes = match input {
            Stored::Fixed { .. } => output.stored_shape.fill(&[]),
            Stored::Parts(parts) => parts.sizes(row, output)?,
            Stored::Raw(raw) => {
                let stored = raw.get(row)?;
                if output.role != Role::Tensor {
                    return Some(self.pipeline.media_bytes(group, place, stored).unwrap_or((stored.len() as u64, 0)));
                }
                output.stored_shape.fill(raw.free(row))
            }
        };
        Some(self.pipeline.tensor_bytes(group, place, &sizes))
    }

    fn input(&self, reads: &Reads, column: usize, count: usize) -> Result<Stored> {
        let (dtype, shape) = value_type(&self.sources[0].columns[column])?;
        if !shape.is_fixed() {
            return Ok(Stored::Raw(reads.kept(&self.sources, column)?));
        }
        let cell = shape.fixed_bytes(dtype)? as usize;
        let mut memory = Memory::new(cell * count)?;
        let nulls = reads.fixed(&self.sources, column, cell, memory.slice())?;
        Ok(Stored::Fixed { memory, cell, nulls })
    }
}

/// Divide the work of a batch into tasks.
fn job(started: Started, (plain, work, needs): Gathered) -> Job {
    let (mut tasks, count) = (Vec::new(), started.samples.places.len());
    for (group, work) in work.iter().enumerate() {
        let each = match work.inputs.iter().any(|input| matches!(input, Stored::Raw(_))) {
            true => TASK_IMAGES,
            false => (TASK_BYTES / work.targets.iter().map(Target::written_bytes).sum::<usize>().max(1)).max(1),
        };
        tasks.extend((0..count).step_by(each).map(|begin| (group, begin..(begin + each).min(count))));
    }
    Job { started, plain, work, tasks, next: AtomicUsize::new(0), failed: Mutex::default(), needs }
}
