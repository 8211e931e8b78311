//! Chooses the samples of a batch and fetches them, with stand-ins for those that are damaged.

use penstock_dataset::{HeldBlocks, check_text};
use penstock_error::{Error, Kind, Result};

use crate::batch::{ColumnValues, StepSamples};
use crate::engine::parts::PartialSamples;
use crate::engine::recipe::{OnCorrupt, Recipe};
use crate::order::mixture::SamplePlace;
use crate::source::reads::Reads;
use crate::transform::output::Output;

/// Maximum number of stand-ins to try for a sample.
const TRIES: usize = 16;

/// A damaged sample that must be replaced.
pub(super) struct Refused {
    pub(super) at: usize,
    pub place: SamplePlace,
    pub error: Error,
}

/// A batch whose samples have been chosen, and fetched if files are not mapped.
pub struct Started {
    pub samples: StepSamples,
    pub reads: Reads,
    pub(super) parts: Vec<PartialSamples>,
    /// Why the samples could not be fetched, if some of them are damaged.
    pub(super) failed: Option<Error>,
    pub(super) refused: Vec<Refused>,
}

impl Recipe {
    /// Choose the samples of a step and fetch them. `refused` lists places in the batch whose samples are replaced. A place listed n times
    /// gets its n-th stand-in. `lend` returns blocks of these samples that the loader keeps.
    pub fn start(
        &self,
        step: u64,
        refused: impl IntoIterator<Item = (usize, Error)>,
        lend: impl FnOnce(&[SamplePlace]) -> Option<HeldBlocks>,
    ) -> Result<Started> {
        let mut samples = self.samples(step);
        let mut known: Vec<Refused> = Vec::new();
        for (at, error) in refused {
            let tried = known.iter().filter(|refused| refused.at == at).count();
            let Some(ahead) = stand_ins(self.program.len()).nth(tried) else {
                return Err(error.context(format!("{} samples in a row are damaged", tried + 1)));
            };
            known.push(Refused { at, place: samples.places[at], error });
            let stand_in = (samples.draws[at] + ahead) % self.program.len();
            samples.places[at] = self.program.places(samples.epoch, [stand_in])[0];
            samples.valid[at] &= self.on_corrupt != OnCorrupt::Mask;
        }
        let (epoch, mut reads) = (samples.epoch, Reads::new(&self.sources, &samples.places)?);
        lend(&samples.places).iter().for_each(|held| reads.lend_all(held));
        let base = if epoch == self.base.0 { self.base.1 } else { 0 };
        let read = self.read(&mut reads, epoch, &samples.draws, |source, positions| match &self.windows[source] {
            None => Ok(Vec::new()),
            Some(window) => window.runs(&self.sources[source], epoch, positions, |run, steps| {
                self.program
                    .drawn(epoch, run, |draw| self.cut.is_mine(draw, base) && steps.has(self.step_of(epoch, draw)))
            }),
        });
        let (parts, failed) = match read {
            // A damaged object, such as a data file, could not be fetched. `begin` determines which samples need it.
            Err(error) if error.kind() == Kind::Corrupt && self.on_corrupt != OnCorrupt::Raise => {
                (Vec::new(), Some(error))
            }
            other => (other?, None),
        };
        Ok(Started { samples, reads, parts, failed, refused: known })
    }

    /// Start a batch again, with stand-ins for these samples as well.
    pub(super) fn restart(&self, started: Started, damaged: Vec<(usize, Error)>) -> Result<Started> {
        let refused = started.refused.into_iter().map(|refused| (refused.at, refused.error));
        self.start(started.samples.step, refused.chain(damaged), |_| None)
    }

    /// Read the values of a column. If damaged samples are replaced, invalid text also counts as damage.
    pub(super) fn values(&self, reads: &Reads, column: usize) -> Result<ColumnValues> {
        let values = reads.values(&self.sources, column)?;
        if let (ColumnValues::Raw(raw), false) = (&values, self.on_corrupt == OnCorrupt::Raise) {
            let spec = &self.sources[0].columns[column];
            (0..raw.len()).filter_map(|sample| raw.get(sample)).try_for_each(|value| check_text(spec, value))?;
        }
        Ok(values)
    }

    /// Find the unreadable samples of a batch by reading each one separately.
    pub(super) fn damaged(&self, samples: &StepSamples) -> Result<Vec<(usize, Error)>> {
        let mut damaged = Vec::new();
        for (at, (place, draw)) in samples.places.iter().zip(&samples.draws).enumerate() {
            match self.try_sample(*place, samples.epoch, *draw) {
                Err(error) if error.kind() == Kind::Corrupt => damaged.push((at, error)),
                other => other?,
            }
        }
        Ok(damaged)
    }

    fn try_sample(&self, place: SamplePlace, epoch: u64, draw: u64) -> Result<()> {
        let mut reads = Reads::new(&self.sources, &[place])?;
        let parts = self.read(&mut reads, epoch, &[draw], |_, _| Ok(Vec::new()))?;
        let in_parts: Vec<usize> = parts.iter().map(|parts| self.pipeline.outputs[parts.output].column).collect();
        let mut whole = (0..self.sources[0].columns.len()).filter(|column| !in_parts.contains(column));
        whole.try_for_each(|column| self.values(&reads, column).map(drop))
    }

    pub fn locate(&self, started: &Started, at: usize, output: &Output, error: Error) -> Error {
        let place = started.samples.places[at];
        let row_id = started.reads.row_ids()[at];
        let source = &self.sources[place.source];
        let position = source.absolute(place.position);
        let of = match source.files.as_ref() {
            Some(files) => format!(", file `{}`", files.path(position)),
            None if self.sources.len() > 1 => format!(" of `{}`", source.name),
            None => String::new(),
        };
        error
            .context(format!("cannot load `{}` of sample {position} (row id {row_id}){of}", output.name))
            .column(&source.columns[output.column].name)
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
        let free = (0..samples.min(seen.len() as u64 + 1))
            .map(|more| (far + more) % samples)
            .find(|ahead| !seen.contains(ahead))?;
        seen.push(free);
        Some(free)
    })
}
