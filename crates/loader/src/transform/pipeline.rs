//! The results of a batch, their source columns, and the transforms in between. All are checked before any data are read.

use std::collections::HashMap;

use penstock_codec::pixels::Pool;
use penstock_codec::{Outline, outline};
use penstock_error::{Error, Result};
use penstock_format::schema::ColumnSpec;

use crate::order::random::{Draws, Purpose, key};
use crate::transform::cell::Cell;
use crate::transform::check::check;
use crate::transform::colour::{self, copies, is_colour};
use crate::transform::crops;
use crate::transform::operation::{self, Operation, Transform};
use crate::transform::output::{Input, MediaForm, Output, Role};

/// Results that share transforms and are therefore made together, sample by sample.
#[derive(Debug, Clone)]
pub struct OutputGroup {
    /// Indices of results.
    pub outputs: Vec<usize>,
    /// For each transform: the key of its random numbers, the operation, and the positions of its results in `outputs`. The key
    /// depends on the transform's index among all transforms of the pipeline.
    pub transforms: Vec<(u64, Operation, Vec<usize>)>,
}

#[derive(Debug, Clone)]
pub struct Pipeline {
    pub outputs: Vec<Output>,
    pub groups: Vec<OutputGroup>,
    /// Results that are delivered as read, without transforms or decoding.
    pub plain: Vec<usize>,
}

impl Pipeline {
    /// Check results and transforms, and group them. `outputs` contains the name and column index of each result.
    pub fn new(
        outputs: Vec<(String, usize)>,
        specs: &[ColumnSpec],
        transforms: &[Transform],
        form: MediaForm,
        seed: u64,
    ) -> Result<Pipeline> {
        let made = outputs
            .into_iter()
            .map(|(name, column)| Output::new(name, column, &specs[column], form))
            .collect::<Result<Vec<_>>>();
        let mut pipeline = Pipeline { outputs: made?, groups: Vec::new(), plain: Vec::new() };
        let places: HashMap<String, usize> =
            pipeline.outputs.iter().enumerate().map(|(at, output)| (output.name.clone(), at)).collect();
        // The group of each result. Every transform merges the groups of its results.
        let mut group: Vec<usize> = (0..pipeline.outputs.len()).collect();
        let mut touched = vec![false; group.len()];
        let mut ons = Vec::new();
        for transform in transforms {
            let on = transform.on.iter().map(|name| {
                places.get(name).copied().ok_or_else(|| {
                    let names: Vec<&str> = pipeline.outputs.iter().map(|output| output.name.as_str()).collect();
                    let text =
                        format!("{} applies to `{name}`, which the loader does not return", transform.operation.name());
                    Error::new("invalid-argument", text).hint(format!("the loader returns {}", names.join(", ")))
                })
            });
            let on = on.collect::<Result<Vec<usize>>>()?;
            if on.is_empty() {
                return Err(Error::new("invalid-argument", format!("{} has an empty on=", transform.operation.name())));
            }
            let mut operation = transform.operation.clone();
            if let Operation::RandomErasing { converted, .. } = &mut operation {
                *converted = on.iter().any(|at| pipeline.outputs[*at].convert.is_some());
            }
            check(&operation, &on, &pipeline.outputs)?;
            let erases = |(earlier, of): &(Operation, Vec<usize>)| {
                matches!(earlier, Operation::RandomErasing { converted: true, .. })
                    && on.iter().any(|at| of.contains(at))
            };
            if matches!(operation, Operation::Normalize { .. } | Operation::ToDtype { .. }) && ons.iter().any(erases) {
                let text =
                    format!("{} comes after RandomErasing, whose values are those of the result", operation.name());
                return Err(Error::new("invalid-argument", text)
                    .hint("put RandomErasing last, or before the first ToDtype or Normalize"));
            }
            for at in &on {
                pipeline.outputs[*at].transformed(&operation)?;
                touched[*at] = true;
                let (old, new) = (group[*at], group[on[0]]);
                group.iter_mut().filter(|group| **group == old).for_each(|group| *group = new);
            }
            ons.push((operation, on));
        }
        for root in 0..group.len() {
            let outputs: Vec<usize> = (0..group.len()).filter(|at| group[*at] == root).collect();
            let decoded = |at: &usize| matches!(pipeline.outputs[*at].role, Role::Image { .. } | Role::Mask);
            if !outputs.iter().any(|at| touched[*at] || decoded(at)) {
                pipeline.plain.extend(outputs);
                continue;
            }
            let inside = |on: &[usize]| {
                on.iter().map(|at| outputs.iter().position(|output| output == at)).collect::<Option<Vec<usize>>>()
            };
            let random = |number: usize| key(&[seed, Purpose::Transform as u64, number as u64]);
            let transforms = ons.iter().enumerate();
            let transforms = transforms
                .filter_map(|(number, (operation, on))| Some((random(number), operation.clone(), inside(on)?)));
            pipeline.groups.push(OutputGroup { transforms: transforms.collect(), outputs });
        }
        pipeline.plain.sort_unstable();
        Ok(pipeline)
    }

    /// Make these results lists in every batch. Other images and masks become one array.
    pub fn list(&mut self, names: &[String]) {
        self.outputs.iter_mut().for_each(|output| output.listed = names.contains(&output.name));
    }

    /// Estimate the bytes of a result and the scratch bytes needed to make it, from the header of its stored image. Returns None
    /// if the result is not an image or a mask, or if the header has no size.
    pub fn media_bytes(&self, group: &OutputGroup, place: usize, stored: &[u8]) -> Option<(u64, u64)> {
        let output = &self.outputs[group.outputs[place]];
        let Outline { width, height, decoder_bytes } = if output.is_media() { outline(stored)? } else { return None };
        let channels = if let Role::Image { mode, .. } = &output.role {
            mode.form().map_or(8, |(channels, bits)| channels * bits as usize / 8)
        } else {
            2
        };
        let mine = group.transforms.iter().filter(|(_, _, on)| on.contains(&place)).map(|(_, operation, _)| operation);
        let pixels = |height: usize, width: usize| height as u64 * width as u64;
        // Resizing makes an intermediate image in which one side already has its final size. This is the height for 8-bit
        // pixels and the width for 16-bit pixels.
        let shallow =
            matches!(&output.role, Role::Image { mode, .. } if mode.form().is_some_and(|(_, bits)| bits == 8));
        let ((to_height, to_width), between) = mine.fold(((height, width), 0), |(from, between), operation| {
            let mut to = [from.0, from.1];
            operation::resize(operation, &mut to);
            let to = (to[0], to[1]);
            let (down, across) = (pixels(to.0, from.1), pixels(from.0, to.1));
            let passes = if shallow { down } else { down.max(across) };
            let own = if operation::resizes(operation) { passes } else { copies(operation) * pixels(to.0, to.1) };
            // A later operation may need all pixels that an earlier one added, and copy them.
            let (before, after) = (pixels(from.0, from.1), pixels(to.0, to.1));
            let enlarged = if before.max(after) > pixels(height, width) { before + after } else { 0 };
            (to, between.max(own).max(enlarged))
        });
        let made = pixels(to_height, to_width)
            * channels as u64
            * if output.convert.is_some() { output.dtype.size() as u64 } else { 1 };
        // The decoder's output is counted twice, because it may be copied before it reaches its place in the batch.
        Some((made, (2 * pixels(height, width) + between) * channels.max(3) as u64 + decoder_bytes))
    }

    /// Estimate the bytes of a result that is a tensor, and the scratch bytes needed to make it, from its stored shape.
    pub fn tensor_bytes(&self, group: &OutputGroup, place: usize, shape: &[u64]) -> (u64, u64) {
        let output = &self.outputs[group.outputs[place]];
        let mut sizes: Vec<usize> = shape.iter().map(|size| *size as usize).collect();
        let values = |sizes: &[usize]| sizes.iter().map(|size| *size as u64).product::<u64>();
        let mut scratch = 0;
        for (_, operation, _) in group.transforms.iter().filter(|(_, _, on)| on.contains(&place)) {
            let before = values(&sizes);
            operation::resize(operation, &mut sizes);
            // Most operations may copy the value as it was, and make the new one.
            let own = (before + values(&sizes)).max(copies(operation) * values(&sizes));
            scratch = scratch.max(own * output.stored_dtype.size() as u64);
        }
        (values(&sizes) * output.dtype.size() as u64, scratch)
    }

    /// Return whether a result of a group is a tensor that is cropped before anything needs its values.
    pub fn begins_with_crop(&self, group: &OutputGroup, place: usize) -> bool {
        self.outputs[group.outputs[place]].role == Role::Tensor && crops::begins_with_crop(&group.transforms, place)
    }

    /// Make one sample of a group and apply all its transforms. `inputs` contains the stored value of each result, and `pool`
    /// provides memory for pixels.
    pub fn sample<'a>(
        &self,
        group: &OutputGroup,
        inputs: &[Input<'a>],
        epoch: u64,
        draw: u64,
        pool: &'a Pool,
    ) -> Result<Vec<Cell<'a>>> {
        let cells = group.outputs.iter().zip(inputs).map(|(at, input)| self.outputs[*at].cell(input, pool));
        let mut cells = cells.collect::<Result<Vec<Cell<'a>>>>()?;
        let mut lost = false;
        for (key, operation, on) in &group.transforms {
            let draws = &mut Draws::new(*key, epoch, draw);
            match is_colour(operation) {
                true => colour::apply(operation, &mut cells, on, draws)?,
                false => operation::apply(operation, &mut cells, on, draws, &mut lost)?,
            }
        }
        Ok(cells)
    }
}
