//! Reads parts of tensors. If the first transforms of a result are crops, its samples' boxes are known before the bytes, so only these boxes
//! are read (docs/design/0005-tiles.md). Samples that share a block with others are read whole, and cut later.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::sync::Arc;

use penstock_dataset::{HeldBlocks, SampleExtent};
use penstock_error::Result;
use penstock_format::datafile::UNIT_BYTES;
use penstock_format::schema::ColumnSpec;
use penstock_tensor::slice::{Slice, elements};

use crate::batch::Raw;
use crate::engine::recipe::Recipe;
use crate::memory::Memory;
use crate::source::reads::Reads;
use crate::source::view::Source;
use crate::transform::crops::{Known, Need, needs};
use crate::transform::output::{Input, Output};
use crate::transform::pipeline::Pipeline;

/// Samples of one result, as far as a batch needs them.
pub struct PartialSamples {
    /// The index of the result.
    pub output: usize,
    memory: Memory,
    parts: Vec<PartialSample>,
    /// The samples that are read whole, or None before they are read.
    rest: Option<Raw>,
    /// Whether the memory is the result, with zeros for nulls.
    pub is_result: bool,
}

enum PartialSample {
    Null,
    Whole,
    Slice { begin: usize, bytes: usize, shape: Vec<u64>, slice: Slice },
}

/// What is to be read of one result.
pub struct Planned {
    pub output: usize,
    wanted: Vec<Wanted>,
}

impl Planned {
    /// Return the slice of each sample that is read in parts.
    pub fn slices(&self) -> Vec<Option<Slice>> {
        let slice =
            |wanted: &Wanted| if let Wanted::Slice { need, .. } = wanted { Some(need.slice.clone()) } else { None };
        self.wanted.iter().map(slice).collect()
    }
}

enum Wanted {
    Null,
    Whole,
    Slice { shape: Vec<u64>, need: Need },
}

/// Choose the results whose samples are read in parts, if they have blocks of their own.
pub fn choose_results_in_parts(pipeline: &mut Pipeline, sources: &[Source]) {
    for group in &pipeline.groups {
        for (place, at) in group.outputs.iter().enumerate() {
            let output = &pipeline.outputs[*at];
            let shape = &output.stored_shape;
            let is_large =
                !shape.is_fixed() || shape.fixed_bytes(output.stored_dtype).is_ok_and(|bytes| bytes > UNIT_BYTES);
            let is_tensor = sources[0].columns[output.column].kind.is_tensor();
            let in_files = sources.iter().any(|source| source.files_of(&source.columns[output.column]).is_some());
            let in_parts = is_tensor && is_large && !in_files && pipeline.begins_with_crop(group, place);
            pipeline.outputs[*at].in_parts = in_parts;
        }
    }
    // A column that another result needs whole is read once.
    let whole: Vec<usize> =
        pipeline.outputs.iter().filter(|output| !output.in_parts).map(|output| output.column).collect();
    pipeline.outputs.iter_mut().for_each(|output| output.in_parts &= !whole.contains(&output.column));
}

impl Recipe {
    /// Fetch what a batch needs, and read the parts of samples. `lend` returns blocks that a window holds.
    pub(super) fn read(
        &self,
        reads: &mut Reads,
        epoch: u64,
        draws: &[u64],
        lend: impl Fn(usize, &[u64]) -> Result<Vec<Arc<HeldBlocks>>>,
    ) -> Result<Vec<PartialSamples>> {
        reads.lend(lend)?;
        let planned = self.plan_parts(reads, epoch, draws)?;
        reads.fetch(&self.sources)?;
        planned.into_iter().map(|planned| self.read_parts(reads, planned)).collect()
    }

    /// Decide what is read in parts, and leave it out of the other reads.
    pub(super) fn plan_parts(&self, reads: &mut Reads, epoch: u64, draws: &[u64]) -> Result<Vec<Planned>> {
        let mut extents: HashMap<usize, Vec<SampleExtent>> = HashMap::new();
        for output in self.pipeline.outputs.iter().filter(|output| output.in_parts) {
            if let Entry::Vacant(missing) = extents.entry(output.column) {
                missing.insert(reads.extents(&self.sources, output.column)?);
            }
        }
        let mut planned: Vec<Planned> = Vec::new();
        for group in &self.pipeline.groups {
            let first = planned.len();
            let in_parts = group.outputs.iter().filter(|at| self.pipeline.outputs[**at].in_parts);
            planned.extend(in_parts.map(|at| Planned { output: *at, wanted: Vec::with_capacity(draws.len()) }));
            if planned.len() == first {
                continue;
            }
            for (at, draw) in draws.iter().enumerate() {
                let known: Vec<Known> = group.outputs.iter().map(|output| self.known(*output, &extents, at)).collect();
                let needs = needs(&group.transforms, &known, epoch, *draw);
                for planned in &mut planned[first..] {
                    let Some(place) = group.outputs.iter().position(|output| *output == planned.output) else {
                        continue;
                    };
                    let column = self.pipeline.outputs[planned.output].column;
                    planned.wanted.push(match (&extents[&column][at], &needs[place]) {
                        (SampleExtent::Null, _) => Wanted::Null,
                        (SampleExtent::Large { shape, .. }, Some(need)) => {
                            Wanted::Slice { shape: shape.clone(), need: need.clone() }
                        }
                        _ => Wanted::Whole,
                    });
                }
            }
        }
        for (column, extents) in extents {
            self.settle(reads, column, &extents, &mut planned);
        }
        Ok(planned)
    }

    /// Return what is known of one value before it is read.
    fn known(&self, output: usize, extents: &HashMap<usize, Vec<SampleExtent>>, at: usize) -> Known {
        let output = &self.pipeline.outputs[output];
        match extents.get(&output.column).map(|extents| &extents[at]) {
            _ if output.is_follower() => Known::Sizeless,
            Some(SampleExtent::Null) => Known::Sizeless,
            Some(SampleExtent::Large { shape, .. }) => Known::Shape(shape.clone()),
            Some(SampleExtent::Small) if output.stored_shape.is_fixed() => Known::Shape(output.stored_shape.fill(&[])),
            _ => Known::Unknown,
        }
    }

    /// Decide which samples of a column are read in parts, and leave them out of the other reads. Samples of fixed shape share one array, so
    /// all or none of them are read in parts.
    fn settle(&self, reads: &mut Reads, column: usize, extents: &[SampleExtent], planned: &mut Vec<Planned>) {
        let outputs = &self.pipeline.outputs;
        let is_mine = |planned: &Planned| outputs[planned.output].column == column;
        // Blocks that are fetched whole are joined into fewer requests. This costs less, unless the parts are small.
        let is_fetched =
            |extent: &SampleExtent| matches!(extent, SampleExtent::Large { is_tiled: false, is_fetched: true, .. });
        let (mut needed, mut whole) = (0, 0);
        for wanted in planned.iter().filter(|planned| is_mine(planned)).map(|planned| &planned.wanted) {
            for (wanted, _) in wanted.iter().zip(extents).filter(|(_, extent)| is_fetched(extent)) {
                let Wanted::Slice { shape, need } = wanted else { continue };
                needed += elements(&need.slice).unwrap_or(0);
                whole += shape.iter().product::<u64>();
            }
        }
        let mut in_parts: Vec<bool> = vec![true; extents.len()];
        for wanted in planned.iter().filter(|planned| is_mine(planned)).map(|planned| &planned.wanted) {
            for ((flag, wanted), extent) in in_parts.iter_mut().zip(wanted).zip(extents) {
                *flag &= matches!(wanted, Wanted::Slice { .. }) && !(2 * needed > whole && is_fetched(extent));
            }
        }
        let is_fixed = outputs.iter().any(|output| output.column == column && output.stored_shape.is_fixed());
        let mixed = (0..in_parts.len()).any(|at| !in_parts[at] && extents[at] != SampleExtent::Null);
        if !in_parts.contains(&true) || (is_fixed && mixed) {
            planned.retain(|planned| !is_mine(planned));
            return;
        }
        for wanted in planned.iter_mut().filter(|planned| is_mine(planned)).map(|planned| &mut planned.wanted) {
            for (wanted, _) in wanted.iter_mut().zip(&in_parts).filter(|(_, in_parts)| !**in_parts) {
                *wanted = if matches!(wanted, Wanted::Null) { Wanted::Null } else { Wanted::Whole };
            }
        }
        reads.leave_out(&self.sources, column, &in_parts);
    }

    /// Read the parts of one result into new memory.
    fn read_parts(&self, reads: &Reads, Planned { output: index, wanted }: Planned) -> Result<PartialSamples> {
        let output = &self.pipeline.outputs[index];
        let is_result = output.is_fixed()
            && output.convert.is_none()
            && wanted.iter().all(|wanted| match wanted {
                Wanted::Null => true,
                Wanted::Whole => false,
                Wanted::Slice { need, .. } => need.is_result,
            });
        let bytes_of = |wanted: &Wanted| match wanted {
            _ if is_result => output.sample_bytes(),
            Wanted::Slice { need, .. } => elements(&need.slice).unwrap_or(0) as usize * output.stored_dtype.size(),
            _ => 0,
        };
        let mut memory = Memory::new(wanted.iter().map(bytes_of).sum())?;
        let (mut rest, mut begin, mut outs) = (memory.slice(), 0, Vec::with_capacity(wanted.len()));
        let (mut parts, mut slices) = (Vec::with_capacity(wanted.len()), Vec::with_capacity(wanted.len()));
        for wanted in wanted {
            let bytes = bytes_of(&wanted);
            let (out, later) = rest.split_at_mut(bytes);
            rest = later;
            match wanted {
                Wanted::Slice { shape, need } => {
                    outs.push(out);
                    slices.push(Some(need.slice.clone()));
                    parts.push(PartialSample::Slice { begin, bytes, shape, slice: need.slice });
                }
                other => {
                    out.fill(0);
                    outs.push(&mut []);
                    slices.push(None);
                    parts.push(if matches!(other, Wanted::Null) { PartialSample::Null } else { PartialSample::Whole });
                }
            }
            begin += bytes;
        }
        reads.slices(&self.sources, output.column, &slices, outs)?;
        Ok(PartialSamples { output: index, memory, parts, rest: None, is_result })
    }

    /// Read the samples that are not read in parts.
    pub(super) fn complete(&self, parts: &mut PartialSamples, reads: &Reads) -> Result<()> {
        if parts.parts.iter().any(|part| matches!(part, PartialSample::Whole)) {
            parts.rest = Some(reads.kept(&self.sources, self.pipeline.outputs[parts.output].column)?);
        }
        Ok(())
    }
}

impl PartialSamples {
    pub fn bytes(&self) -> usize {
        self.memory.bytes()
    }

    /// Return the bytes of memory of the samples that are not read in parts, excluding mapped files.
    pub fn rest_bytes(&self) -> u64 {
        self.rest.as_ref().map_or(0, |rest| rest.own_bytes)
    }

    /// Take the memory, which is the result.
    pub fn take(&mut self) -> Result<Memory> {
        Ok(std::mem::replace(&mut self.memory, Memory::new(0)?))
    }

    /// Return the sizes of what was read of a sample, or None for a null.
    pub fn sizes(&self, at: usize, output: &Output) -> Option<Vec<u64>> {
        match &self.parts[at] {
            PartialSample::Null => None,
            PartialSample::Whole => self.rest.as_ref().map(|rest| output.stored_shape.fill(rest.free(at))),
            PartialSample::Slice { slice, .. } => {
                Some(slice.iter().map(|range: &Range<u64>| range.end - range.start).collect())
            }
        }
    }

    /// Return the stored value of a sample. If the memory is the result, the value has no bytes.
    pub fn input<'a>(&'a self, at: usize, output: &Output, column: &'a ColumnSpec) -> Input<'a> {
        match &self.parts[at] {
            PartialSample::Null => Input { bytes: None, shape: output.stored_shape.fill(&[]), window: None, column },
            PartialSample::Whole => {
                let free = self.rest.as_ref().map_or(&[][..], |rest| rest.free(at));
                Input {
                    bytes: self.rest.as_ref().and_then(|rest| rest.get(at)),
                    shape: output.stored_shape.fill(free),
                    window: None,
                    column,
                }
            }
            PartialSample::Slice { begin, bytes, shape, slice } => {
                let bytes = if self.is_result { &[][..] } else { self.memory.bytes_of(*begin, *bytes) };
                Input { bytes: Some(bytes), shape: shape.clone(), window: Some(slice), column }
            }
        }
    }
}
