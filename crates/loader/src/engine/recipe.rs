//! A recipe contains everything that determines the content of batches, and translates steps into samples.

use std::sync::atomic::AtomicU64;

use penstock_error::Result;
use penstock_format::schema::ColumnSpec;

use crate::batch::StepSamples;
use crate::order::cut::BatchCut;
use crate::order::mixture::Program;
use crate::source::view::Source;
use crate::source::window::Window;
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
    pub program: Program,
    /// The window of each source, or None if the source's order has no windows or its files are mapped.
    pub windows: Vec<Option<Window>>,
    pub cut: BatchCut,
    /// Epoch and draw at which step 0 begins.
    pub base: (u64, u64),
    pub pipeline: Pipeline,
    pub row_ids: bool,
    pub on_corrupt: OnCorrupt,
    /// Approximate bytes that a batch fetches from unmapped files.
    pub fetched_bytes: AtomicU64,
    /// Approximate upper limit on the bytes that windows hold.
    pub window_bytes: u64,
}

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
    pub(super) fn step_of(&self, epoch: u64, draw: u64) -> u64 {
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
        for source in &self.sources {
            let columns: Vec<u64> = source.columns.iter().map(|spec| spec.id).collect();
            if !source.snapshot.is_mapped_now(&columns)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Return the samples of a step for this rank, before damaged ones are replaced.
    pub fn samples(&self, step: u64) -> StepSamples {
        self.samples_of_rank(step, self.cut.rank)
    }

    /// Return the samples of a step for a rank.
    pub fn samples_of_rank(&self, step: u64, rank: u64) -> StepSamples {
        let (epoch, begin) = self.begin_of(step);
        let part = BatchCut { rank, ..self.cut }.part(begin);
        let draws: Vec<u64> = part.all_draws().collect();
        let places = self.program.places(epoch, draws.iter().copied());
        let mut valid = vec![true; draws.len()];
        part.surplus.iter().for_each(|(at, _)| valid[*at] = false);
        StepSamples { step, epoch, draws, places, valid }
    }

    /// Return whether large samples of a source's column are read in parts.
    pub fn is_in_parts(&self, source: usize, column: &ColumnSpec) -> bool {
        let mut in_parts = self.pipeline.outputs.iter().filter(|output| output.in_parts);
        in_parts.any(|output| self.sources[source].columns[output.column].id == column.id)
    }
}
