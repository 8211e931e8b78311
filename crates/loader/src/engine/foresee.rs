//! What an epoch would request of stores, which `explain` reports. Its steps are planned one after the other, as the engine does, but nothing
//! is read.

use std::collections::HashSet;
use std::sync::Arc;

use penstock_dataset::{Foresight, OnCorrupt, Purpose, Reader};
use penstock_error::{Error, Result};
use penstock_format::schema::ColumnSpec;
use penstock_tensor::slice::Slice;

use crate::engine::kept::{Kept, KeptBytes};
use crate::engine::recipe::Recipe;
use crate::source::reads::{Reads, note};
use crate::source::window::Steps;

/// Steps beyond this number of draws are estimated from those before.
const MOST_DRAWS: u64 = 1 << 17;

/// Return the requests and bytes of an epoch by source, if the block cache is empty at first. The second result is what the loader
/// keeps, or None. `workers` processes share the budget. Cost: reads the tails of the data files that the planned steps need.
#[allow(clippy::type_complexity)]
pub fn foreseen_requests(
    recipe: &Arc<Recipe>,
    memory_bytes: u64,
    workers: u64,
) -> Result<(Vec<(f64, f64)>, Option<KeptBytes>)> {
    if recipe.sources.iter().all(|source| source.snapshot.is_mapped()) {
        return Ok((vec![(0.0, 0.0); recipe.sources.len()], None));
    }
    let (mut kept, mut bytes, mut noted) = (None, None, vec![(0, 0); recipe.sources.len()]);
    for begin in 0..workers {
        let steps = Steps { begin, stride: workers };
        kept = Kept::of(recipe, memory_bytes / workers, steps, recipe.cut.steps())?;
        let Some((foreseen, of_worker)) = kept.as_ref().and_then(Kept::foresee) else { continue };
        bytes.get_or_insert_with(KeptBytes::default).add(of_worker);
        noted.iter_mut().zip(foreseen).for_each(|(noted, more)| *noted = (noted.0 + more.0, noted.1 + more.1));
    }
    kept = kept.filter(|_| bytes.is_some());
    let others = foreseen_of_others(recipe, kept.as_ref())?;
    let all = others.into_iter().zip(noted).map(|(other, noted)| (other.0 + noted.0 as f64, other.1 + noted.1 as f64));
    Ok((all.collect(), bytes))
}

/// Return the requests and bytes of what is not kept.
fn foreseen_of_others(recipe: &Recipe, kept: Option<&Kept>) -> Result<Vec<(f64, f64)>> {
    let steps = recipe.cut.steps();
    let planned = steps.min(MOST_DRAWS / recipe.cut.batch().max(1)).max(steps.min(16));
    let mut foresight = Foresight::default();
    let mut runs: Vec<HashSet<u64>> = recipe.sources.iter().map(|_| HashSet::new()).collect();
    let (mut all, mut half) = (vec![(0, 0); recipe.sources.len()], Vec::new());
    for step in 0..planned {
        if penstock_storage::process::interrupted() {
            return Err(Error::new("interrupted", "explain() was interrupted"));
        }
        if step == planned / 2 {
            half = all.clone();
        }
        recipe.foresee(step, kept, &mut foresight, &mut runs, &mut all)?;
    }
    // At first, the block cache fills. Later steps are like those of the second half.
    let later = |(all, half): (u64, u64)| {
        all as f64 + (all - half) as f64 * (steps - planned) as f64 / (planned - planned / 2).max(1) as f64
    };
    let half = half.into_iter().chain(std::iter::repeat((0, 0)));
    Ok(all.into_iter().zip(half).map(|(all, half)| (later((all.0, half.0)), later((all.1, half.1)))).collect())
}

impl Recipe {
    /// Note what a step would request, by source. `runs` are those that windows hold already.
    fn foresee(
        &self,
        step: u64,
        kept: Option<&Kept>,
        foresight: &mut Foresight,
        runs: &mut [HashSet<u64>],
        noted: &mut [(u64, u64)],
    ) -> Result<()> {
        let samples = self.samples(step);
        let mut reads = Reads::new(&self.sources, &samples.places)?;
        for (number, window) in self.windows.iter().enumerate() {
            let Some(window) = window else { continue };
            let missing: Vec<u64> =
                window.numbers(reads.positions(number)).into_iter().filter(|run| runs[number].insert(*run)).collect();
            reads.set_lent(number);
            let source = &self.sources[number];
            let positions = missing
                .iter()
                .flat_map(|run| window.range(source, *run))
                .map(|position| source.absolute(position))
                .collect();
            let mut reader = Reader::new(source.snapshot.clone(), positions, OnCorrupt::Raise)?;
            reader.foresee_blocks(&source.specs(), Purpose::Scan { keep: false }, foresight)?;
            note(foresight, &mut noted[number]);
        }
        let planned = self.plan_parts(&mut reads, samples.epoch, &samples.draws)?;
        let parts: Vec<(usize, Vec<Option<Slice>>)> =
            planned.iter().map(|planned| (self.pipeline.outputs[planned.output].column, planned.slices())).collect();
        let is_kept = |source: usize, column: &ColumnSpec| kept.is_some_and(|kept| kept.has(source, column));
        reads.foresee(&self.sources, is_kept, &parts, foresight, noted)
    }
}
