//! What a cache must know to read ahead for a loader: the bytes that each sample needs, and the samples of each step.

use std::collections::HashMap;
use std::sync::Arc;

use penstock_cache::{Cached, Future, Member, Need, Object, Plan};
use penstock_dataset::{OnCorrupt, Reader};
use penstock_error::{Error, Result};
use penstock_format::schema::ColumnSpec;

use crate::engine::recipe::Recipe;

/// Samples whose bytes are looked up at a time.
const LOOKED_UP: u64 = 4096;
/// A larger source is read without a plan, because a plan keeps about 100 bytes for each sample.
const MOST_SAMPLES: u64 = 16 << 20;

/// The future of one source of a loader. Its steps are counted from the start of epoch 0, so that loaders of one order count alike, whatever
/// step they begin with.
struct SourceFuture {
    recipe: Arc<Recipe>,
    source: usize,
    /// The engine makes every `stride`-th step.
    begin: u64,
    stride: u64,
}

/// Return the number of a recipe's step 0, counted from the start of epoch 0, or 0 if the recipe begins inside of a batch.
fn first_number(recipe: &Recipe) -> u64 {
    if recipe.base.1.is_multiple_of(recipe.cut.global_batch) { recipe.number_of(0) } else { 0 }
}

/// Return the sources that are read through a cache, each with its cache and its future. `begin` and `stride` are those of the engine's steps.
fn futures(recipe: &Arc<Recipe>, begin: u64, stride: u64) -> impl Iterator<Item = (&Cached, SourceFuture)> {
    recipe.sources.iter().enumerate().filter_map(move |(number, source)| {
        let cached = source.snapshot.context.cached.as_ref()?;
        let is_planned = source.len() <= MOST_SAMPLES && recipe.windows[number].is_none() && recipe.cut.steps() > 0;
        is_planned.then(|| (cached, SourceFuture { recipe: recipe.clone(), source: number, begin, stride }))
    })
}

/// The running plans of a loader, one for each source that is read through a cache.
#[derive(Default)]
pub struct Plans {
    plans: Vec<Plan>,
    first_number: u64,
}

impl Plans {
    /// Start plans for every `stride`-th step of `begin..end`.
    pub fn start(recipe: &Arc<Recipe>, begin: u64, end: u64, stride: u64) -> Result<Plans> {
        let first_number = first_number(recipe);
        let start = |(cached, future): (&Cached, SourceFuture)| {
            Plan::start(cached.clone(), Arc::new(future), first_number + end)
        };
        Ok(Plans { plans: futures(recipe, begin, stride).map(start).collect::<Result<_>>()?, first_number })
    }

    /// Move the end to an earlier or later step.
    pub fn set_end(&self, end: u64) {
        self.plans.iter().for_each(|plan| plan.set_until(self.first_number + end));
    }

    /// Wait until the pages of a step are cached, as far as the plans keep them.
    pub fn before(&self, step: u64) {
        self.plans.iter().for_each(|plan| plan.before(self.first_number + step));
    }

    /// Note that a step has been read.
    pub fn after(&self, step: u64) {
        self.plans.iter().for_each(|plan| plan.after(self.first_number + step));
    }
}

/// What an epoch would read of sources that are read through a cache.
#[derive(Default)]
pub struct EpochReads {
    /// Data files that are in memory as a whole.
    pub memory_bytes: u64,
    pub cached_bytes: u64,
    pub cold_bytes: u64,
    pub requests: u64,
}

/// Return what an epoch from step `begin` on would read. Returns None if no source is read through a cache with a plan. Cost: reads the tails of
/// all data files.
pub fn foreseen(recipe: &Arc<Recipe>, begin: u64) -> Result<Option<EpochReads>> {
    let mut all: Option<EpochReads> = None;
    for (cached, future) in futures(recipe, begin, 1) {
        let reads = all.get_or_insert_default();
        let foreseen = Plan::foresee(cached, &future)?;
        reads.cached_bytes += foreseen.cached_bytes;
        reads.cold_bytes += foreseen.cold_bytes;
        reads.requests += foreseen.requests;
        let mut files = HashMap::new();
        each_part(recipe, future.source, |_, reader, columns| {
            files.extend(reader.files_in_memory(columns)?);
            Ok(())
        })?;
        reads.memory_bytes += files.values().sum::<u64>();
    }
    Ok(all)
}

/// Call `visit` for some thousand samples of a source at a time: the first of them, their reader, and the columns that are stored in data files.
pub fn each_part(
    recipe: &Recipe,
    source: usize,
    mut visit: impl FnMut(u64, &mut Reader, &[&ColumnSpec]) -> Result<()>,
) -> Result<()> {
    let source = &recipe.sources[source];
    let columns: Vec<&ColumnSpec> = source.columns.iter().filter(|spec| source.files_of(spec).is_none()).collect();
    for first in (0..source.len()).step_by(LOOKED_UP as usize) {
        if penstock_storage::process::interrupted() {
            return Err(Error::new("interrupted", "the loader was closed"));
        }
        let positions =
            (first..source.len().min(first + LOOKED_UP)).map(|position| source.absolute(position)).collect();
        visit(first, &mut Reader::new(source.snapshot.clone(), positions, OnCorrupt::Raise)?, &columns)?;
    }
    Ok(())
}

impl Future for SourceFuture {
    fn samples(&self) -> u32 {
        self.recipe.sources[self.source].len() as u32
    }

    fn needs(&self) -> Result<(Vec<Object>, Vec<Need>)> {
        let (mut objects, mut numbers, mut needs): (Vec<Object>, HashMap<_, u32>, Vec<Need>) =
            (Vec::new(), HashMap::new(), Vec::new());
        each_part(&self.recipe, self.source, |first, reader, columns| {
            let in_parts = |column: &ColumnSpec| self.recipe.is_in_parts(self.source, column);
            reader.each_need(columns, in_parts, |place, file, file_bytes, begin, end| {
                let object = *numbers.entry(file).or_insert_with(|| {
                    objects.push(Object { name: penstock_format::ids::data_name(file).into(), bytes: file_bytes });
                    objects.len() as u32 - 1
                });
                needs.push(Need { sample: first as u32 + place, object, begin, end });
            })
        })?;
        Ok((objects, needs))
    }

    fn epoch_steps(&self) -> u64 {
        self.recipe.cut.steps()
    }

    fn member(&self) -> Member {
        Member { rank: self.recipe.cut.rank, begin: first_number(&self.recipe) + self.begin, stride: self.stride }
    }

    fn samples_of(&self, step: u64, rank: u64) -> Vec<u32> {
        let Some(step) = step.checked_sub(first_number(&self.recipe)) else { return Vec::new() };
        let places = self.recipe.samples_of_rank(step, rank).places;
        places.into_iter().filter(|place| place.source == self.source).map(|place| place.position as u32).collect()
    }
}
