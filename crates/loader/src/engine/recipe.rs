//! A recipe contains everything that determines the content of batches. It also begins each batch.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize};

use penstock_dataset::{Held, check_text};
use penstock_error::{Error, Kind, Result};
use penstock_format::schema::ColumnSpec;

// Cycle with `job.rs`: a recipe begins jobs, and a job with damaged samples asks its recipe to begin it again.
use crate::batch::Values;
use crate::engine::job::{Job, Needs, Stored, Target, Work};
use crate::engine::parts::Parts;
use crate::memory::{Memory, Shared, capacity};
use crate::order::cut::BatchCut;
use crate::order::mixture::{Place, Program};
use crate::source::reads::Reads;
use crate::source::view::{Source, value_type};
use crate::source::window::Window;
use crate::transform::output::{Output, Role};
use crate::transform::pipeline::Pipeline;

/// How to handle a damaged sample. Storage errors never count as damage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnCorrupt {
    Raise,
    /// Replace the sample with another one, chosen by a fixed rule.
    Substitute,
    /// Replace the sample as `Substitute` does, and mark its place as invalid.
    Mask,
}

/// Everything that determines the content of batches.
pub struct Recipe {
    pub sources: Vec<Source>,
    /// The columns to read from each source.
    pub specs: Vec<Vec<ColumnSpec>>,
    pub program: Program,
    /// The window of each source, or None if the source's order has no windows or its files are mapped.
    pub windows: Vec<Option<Window>>,
    pub cut: BatchCut,
    /// Epoch and draw at which step 0 begins.
    pub base: (u64, u64),
    pub pipeline: Pipeline,
    pub row_ids: bool,
    pub on_corrupt: OnCorrupt,
    /// For each result, whether its samples are read in parts if they have blocks of their own.
    pub in_parts: Vec<bool>,
    /// Approximate bytes that a batch fetches from unmapped files.
    pub fetched_bytes: AtomicU64,
    /// Approximate upper limit on the bytes that windows hold.
    pub window_bytes: u64,
}

/// Maximum number of stand-ins to try for a sample.
const TRIES: usize = 16;

/// Approximate bytes that one task writes.
const TASK_BYTES: usize = 256 << 10;

/// Samples per task if inputs vary in size, as encoded images do.
const TASK_IMAGES: usize = 2;

/// A damaged sample that must be replaced.
pub(super) struct Refused {
    pub(super) at: usize,
    pub place: Place,
    pub error: Error,
}

/// A batch whose samples have been chosen, and fetched if files are not mapped.
pub struct Started {
    pub step: u64,
    pub epoch: u64,
    pub draws: Vec<u64>,
    pub places: Vec<Place>,
    pub valid: Vec<bool>,
    pub reads: Reads,
    parts: Vec<Parts>,
    /// Why the samples could not be fetched, if some of them are damaged.
    failed: Option<Error>,
    pub(super) refused: Vec<Refused>,
}

impl Started {
    /// List the samples that the next attempt must replace: those refused so far, then the new ones in `bad`.
    pub fn again(self, bad: Vec<(usize, Error)>) -> impl Iterator<Item = (usize, Error)> {
        self.refused.into_iter().map(|refused| (refused.at, refused.error)).chain(bad)
    }
}

/// Plain columns, work for the other columns, and the memory that both need.
type Read = (Vec<(usize, Values)>, Vec<Work>, Needs);

impl Recipe {
    /// Return the epoch and the first draw of a step.
    pub fn begin_of(&self, step: u64) -> (u64, u64) {
        let ((epoch, draw), whole) = (self.base, self.cut.steps());
        if whole == 0 {
            return self.base;
        }
        match step.checked_sub(self.cut.steps_from(draw)) {
            None => (epoch, draw + step * self.cut.global_batch),
            Some(later) => (epoch + 1 + later / whole, later % whole * self.cut.global_batch),
        }
    }

    /// Return the first step of the epoch that follows the one containing `step`.
    pub fn end_of_epoch(&self, step: u64) -> u64 {
        let (first, whole) = (self.cut.steps_from(self.base.1), self.cut.steps());
        match step.checked_sub(first) {
            Some(later) if whole > 0 => first + (later / whole + 1) * whole,
            _ => first,
        }
    }

    /// Return the number of a step, counted from the start of epoch 0.
    pub fn number_of(&self, step: u64) -> u64 {
        let (epoch, draw) = self.begin_of(step);
        epoch * self.cut.steps() + draw / self.cut.global_batch
    }

    /// Return the epoch and the first draw of the step with this number. This is the inverse of `number_of`.
    pub fn begin_of_number(&self, number: u64) -> (u64, u64) {
        let whole = self.cut.steps().max(1);
        (number / whole, number % whole * self.cut.global_batch)
    }

    /// Return the step that contains the given draw of an epoch.
    fn step_of(&self, epoch: u64, draw: u64) -> u64 {
        match epoch - self.base.0 {
            0 => (draw - self.base.1) / self.cut.global_batch,
            later => self.cut.steps_from(self.base.1) + (later - 1) * self.cut.steps() + draw / self.cut.global_batch,
        }
    }

    /// Return the size of a full batch in bytes, counting only results of fixed shape.
    pub fn least_bytes(&self) -> u64 {
        let outputs = self.pipeline.outputs.iter().filter(|output| output.is_fixed());
        outputs.map(|output| output.sample_bytes() as u64).sum::<u64>() * self.cut.batch()
    }

    /// Return whether the size of a batch is known before its samples are read.
    pub fn is_sized(&self) -> bool {
        self.pipeline.groups.iter().flat_map(|group| &group.outputs).all(|at| self.pipeline.outputs[*at].is_fixed())
    }

    /// Return whether any source must be fetched.
    pub fn fetches(&self) -> Result<bool> {
        for (source, specs) in self.sources.iter().zip(&self.specs) {
            let columns: Vec<u64> = specs.iter().map(|spec| spec.id).collect();
            if !source.snapshot.is_mapped_now(&columns)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Return the samples of a step for this rank, before damaged ones are replaced.
    pub fn places(&self, step: u64) -> (u64, Vec<u64>, Vec<Place>, Vec<bool>) {
        self.places_of(step, self.cut.rank)
    }

    /// Return the samples of a step for a rank.
    pub fn places_of(&self, step: u64, rank: u64) -> (u64, Vec<u64>, Vec<Place>, Vec<bool>) {
        let (epoch, begin) = self.begin_of(step);
        let part = BatchCut { rank, ..self.cut }.part(begin);
        let draws: Vec<u64> = part.all_draws().collect();
        let places = self.program.places(epoch, draws.iter().copied());
        let mut valid = vec![true; draws.len()];
        part.surplus.iter().for_each(|(at, _)| valid[*at] = false);
        (epoch, draws, places, valid)
    }

    /// Choose the samples of a step and fetch them. `refused` lists places in the batch whose samples are replaced. A place listed n times
    /// gets its n-th stand-in. `lend` returns blocks of these samples that the loader keeps.
    pub fn start(
        &self,
        step: u64,
        refused: impl IntoIterator<Item = (usize, Error)>,
        lend: impl FnOnce(&[Place]) -> Option<Held>,
    ) -> Result<Started> {
        let (epoch, draws, mut places, mut valid) = self.places(step);
        let mut known: Vec<Refused> = Vec::new();
        for (at, error) in refused {
            let tried = known.iter().filter(|refused| refused.at == at).count();
            let Some(ahead) = stand_ins(self.program.len()).nth(tried) else {
                return Err(error.context(format!("{} samples in a row are damaged", tried + 1)));
            };
            known.push(Refused { at, place: places[at], error });
            let instead = (draws[at] + ahead) % self.program.len();
            places[at] = self.program.places(epoch, [instead])[0];
            valid[at] &= self.on_corrupt != OnCorrupt::Mask;
        }
        let mut reads = Reads::new(&self.sources, &places)?;
        lend(&places).iter().for_each(|held| reads.lend_all(held));
        let base = if epoch == self.base.0 { self.base.1 } else { 0 };
        let read = self.read(&mut reads, (epoch, &draws), |source, columns, positions| match &self.windows[source] {
            None => Ok(Vec::new()),
            Some(window) => window.runs(&self.sources[source], columns, epoch, positions, |run, steps| {
                self.program.drawn(epoch, run, |draw| self.cut.is_mine(draw, base) && steps.has(self.step_of(epoch, draw)))
            }),
        });
        let (parts, failed) = match read {
            // A damaged object, such as a data file, could not be fetched. `begin` determines which samples need it.
            Err(error) if error.kind() == Kind::Corrupt && self.on_corrupt != OnCorrupt::Raise => (Vec::new(), Some(error)),
            other => (other?, None),
        };
        Ok(Started { step, epoch, draws, places, valid, reads, parts, failed, refused: known })
    }

    /// Read the inputs of a batch. Plain columns are copied into the batch immediately.
    pub fn begin(&self, mut started: Started) -> Result<Job> {
        loop {
            match self.gathered(&mut started) {
                Ok(read) => {
                    started.reads.release();
                    return Ok(self.job(started, read));
                }
                Err(error) if error.kind() == Kind::Corrupt && self.on_corrupt != OnCorrupt::Raise => {
                    let bad = self.damaged(&started)?;
                    if bad.is_empty() {
                        return Err(error);
                    }
                    started = self.start(started.step, started.again(bad), |_| None)?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn job(&self, started: Started, (plain, work, needs): Read) -> Job {
        let mut tasks = Vec::new();
        for (group, work) in work.iter().enumerate() {
            let count = started.places.len();
            let each = match work.inputs.iter().any(|input| matches!(input, Stored::Raw(_))) {
                true => TASK_IMAGES,
                false => {
                    let sample: usize =
                        work.targets.iter().map(|target| if let Target::Fixed { bytes, .. } = target { *bytes } else { 0 }).sum();
                    (TASK_BYTES / sample.max(1)).max(1)
                }
            };
            tasks.extend((0..count).step_by(each).map(|begin| (group, begin..(begin + each).min(count))));
        }
        Job { started, plain, work, tasks, next: AtomicUsize::new(0), bad: Mutex::default(), needs }
    }

    fn gathered(&self, started: &mut Started) -> Result<Read> {
        if let Some(error) = started.failed.take().filter(|_| self.in_parts.contains(&true)) {
            return Err(error);
        }
        let (mut parts, reads, count) = (std::mem::take(&mut started.parts), &started.reads, started.places.len());
        let (mut bytes, mut loose_bytes, mut scratch_bytes) = (0, 0, 0);
        let mut plain = Vec::with_capacity(self.pipeline.plain.len());
        for at in &self.pipeline.plain {
            let values = self.values(reads, self.pipeline.outputs[*at].column)?;
            bytes += match &values {
                Values::Array(array) | Values::Ragged { values: array, .. } => capacity(array.memory.bytes()) as u64,
                Values::Raw(raw) => raw.own_bytes,
                Values::List(_) => 0,
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
                if let Stored::Parts(parts) = &mut input
                    && parts.is_result
                {
                    targets.push(Target::Made { memory: parts.take()?, nulls: Mutex::default() });
                } else if output.is_fixed() {
                    let memory = Memory::new(output.sample_bytes() * count)?;
                    bytes += capacity(memory.bytes()) as u64;
                    targets.push(Target::Fixed { memory: Shared::new(memory), bytes: output.sample_bytes(), nulls: Mutex::default() });
                } else {
                    targets.push(Target::Loose(Mutex::new((0..count).map(|_| None).collect())));
                }
                inputs.push(input);
            }
            for (place, (input, at)) in inputs.iter().zip(&group.outputs).enumerate() {
                let output = &self.pipeline.outputs[*at];
                let fixed = output.is_fixed();
                // Results such as boxes are about as large as their inputs. Images exist twice while they are being stacked.
                let size_of = |row: usize| match input {
                    Stored::Fixed { .. } => Some(self.pipeline.tensor_bytes(group, place, &output.stored_shape.fill(&[]))),
                    Stored::Parts(parts) => parts.sizes(row, output).map(|sizes| self.pipeline.tensor_bytes(group, place, &sizes)),
                    Stored::Raw(raw) => raw.get(row).map(|stored| match output.role {
                        Role::Tensor => self.pipeline.tensor_bytes(group, place, &output.stored_shape.fill(raw.free(row))),
                        _ => self.pipeline.media_bytes(group, place, stored).unwrap_or((stored.len() as u64, 0)),
                    }),
                };
                let each = (0..count).filter_map(size_of);
                let (made, largest, scratch) = each.fold((0, 0, 0), |(all, largest, scratch): (u64, u64, u64), (made, beside)| {
                    (all + made, largest.max(made), scratch.max(beside))
                });
                let stacks = count > 1 && !output.listed && largest * count as u64 == made;
                loose_bytes += if fixed { 0 } else { made + if stacks { made } else { 0 } };
                scratch_bytes = scratch_bytes.max(scratch);
            }
            work.push(Work { inputs, targets });
        }
        Ok((plain, work, Needs { bytes: bytes + loose_bytes, held_bytes: bytes, scratch_bytes }))
    }

    fn input(&self, reads: &Reads, column: usize, count: usize) -> Result<Stored> {
        let (dtype, shape) = value_type(&self.specs[0][column])?;
        if !shape.is_fixed() {
            return Ok(Stored::Raw(reads.kept(&self.sources, &self.specs, column)?));
        }
        let cell = shape.fixed_bytes(dtype)? as usize;
        let mut memory = Memory::new(cell * count)?;
        let nulls = reads.fixed(&self.sources, &self.specs, column, cell, memory.slice())?;
        Ok(Stored::Fixed { memory, cell, nulls })
    }

    /// Read the values of a column. If damaged samples are replaced, invalid text also counts as damage.
    fn values(&self, reads: &Reads, column: usize) -> Result<Values> {
        let values = reads.values(&self.sources, &self.specs, column)?;
        if let (Values::Raw(raw), false) = (&values, self.on_corrupt == OnCorrupt::Raise) {
            let spec = &self.specs[0][column];
            (0..raw.len()).filter_map(|sample| raw.get(sample)).try_for_each(|value| check_text(spec, value))?;
        }
        Ok(values)
    }

    /// Find the unreadable samples of a batch by reading each one separately.
    fn damaged(&self, started: &Started) -> Result<Vec<(usize, Error)>> {
        let mut bad = Vec::new();
        for (at, place) in started.places.iter().enumerate() {
            let mut reads = Reads::new(&self.sources, &[*place])?;
            let tried = self.read(&mut reads, (started.epoch, &started.draws[at..=at]), |_, _, _| Ok(Vec::new())).and_then(|parts| {
                let in_parts = |column: &usize| parts.iter().any(|parts| self.pipeline.outputs[parts.output].column == *column);
                let mut whole = (0..self.specs[0].len()).filter(|column| !in_parts(column));
                whole.try_for_each(|column| self.values(&reads, column).map(drop))
            });
            match tried {
                Err(error) if error.kind() == Kind::Corrupt => bad.push((at, error)),
                other => other?,
            }
        }
        Ok(bad)
    }

    pub fn locate(&self, started: &Started, at: usize, output: &Output, error: Error) -> Error {
        let place = started.places[at];
        let row_id = started.reads.row_ids()[at];
        let position = self.sources[place.source].absolute(place.position);
        let source = &self.sources[place.source];
        let of = match source.files.as_ref() {
            Some(files) => format!(", file `{}`", files.path(position)),
            None if self.sources.len() > 1 => format!(" of `{}`", source.name),
            None => String::new(),
        };
        error
            .context(format!("cannot load `{}` of sample {position} (row id {row_id}){of}", output.name))
            .column(&self.specs[place.source][output.column].name)
            .rows(vec![position])
            .row_ids(vec![row_id])
    }
}

/// Return the distances, in draws, from a damaged draw to its stand-ins, in the order in which to try them. Distances grow and
/// wrap around at the end of the epoch. Each stand-in is a different draw.
fn stand_ins(samples: u64) -> impl Iterator<Item = u64> {
    let mut seen = vec![0];
    (0..TRIES as u64).map_while(move |tried| {
        let far = (2 << tried) - 1;
        let free = (0..samples.min(seen.len() as u64 + 1)).map(|more| (far + more) % samples).find(|ahead| !seen.contains(ahead))?;
        seen.push(free);
        Some(free)
    })
}
