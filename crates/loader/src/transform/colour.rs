//! Transforms that change pixels but move none: colours, blurring and erasing. Images have 8 bits, and 1 or 3 channels.
//!
//! The arithmetic follows torchvision v2 on uint8 tensors step by step. Results differ by at most one level per step, because its
//! fused additions round differently.

use std::borrow::Cow;

use penstock_error::{Error, Result};
use penstock_tensor::Dtype;

use crate::order::random::Draws;
use crate::transform::cell::{Cell, CutArray};
use crate::transform::erased::{Erased, fill};
use crate::transform::grey::{grey_byte, make_grey};
use crate::transform::operation::{Operation, random_sides};

/// A change of pixels whose random numbers have been drawn.
enum Change {
    Brightness(f32),
    Contrast(f32),
    Saturation(f32),
    Hue(f32),
    Grey(usize),
    Blur { kernels: [Vec<f32>; 2] },
    Erase { erased: Erased, converted: bool },
}

/// Return whether an operation changes pixels and moves none.
pub fn is_colour(operation: &Operation) -> bool {
    matches!(
        operation,
        Operation::ColorJitter { .. }
            | Operation::Grayscale { .. }
            | Operation::GaussianBlur { .. }
            | Operation::RandomErasing { .. }
    )
}

/// Return how many copies of an image, with 8 bits per value, are made while its pixels change.
pub fn copies(operation: &Operation) -> u64 {
    match operation {
        Operation::GaussianBlur { .. } => 6, // One of them has 32 bits per value.
        Operation::RandomAffine(_) => 2,
        operation if is_colour(operation) => 2,
        _ => 0,
    }
}

/// Apply a transform to the images among `cells[on]`. All of them change in the same way.
pub fn apply(operation: &Operation, cells: &mut [Cell<'_>], on: &[usize], draws: &mut Draws) -> Result<()> {
    let size = on.iter().find_map(|at| match &cells[*at] {
        Cell::Image(image) => Some([image.size().1, image.size().0]),
        Cell::Array(array) if array.cut.rank == 3 => Some([array.cut.size()[0], array.cut.size()[1]]),
        _ => None,
    });
    let Some(size) = size else { return Ok(()) };
    let changes = changes(operation, size, draws)?;
    for at in on.iter().filter(|_| !changes.is_empty()) {
        let cell = &mut cells[*at];
        if let Cell::Image(image) = cell {
            *cell = Cell::Array(image.array()?);
        }
        match cell {
            Cell::Array(array) if array.cut.rank == 3 => change(array, &changes)?,
            _ => {}
        }
    }
    Ok(())
}

fn changes(operation: &Operation, [height, width]: [usize; 2], draws: &mut Draws) -> Result<Vec<Change>> {
    Ok(match operation {
        Operation::ColorJitter { brightness, contrast, saturation, hue } => {
            let mut order = [0, 1, 2, 3];
            (1..4).rev().for_each(|last| order.swap(last, draws.below(last as u64 + 1) as usize));
            let ranges = [brightness, contrast, saturation, hue];
            let mut factors = ranges.map(|range| range.map(|[low, high]| draws.between(low, high) as f32));
            let change = |kind: usize| {
                factors[kind].take().map(|factor| match kind {
                    0 => Change::Brightness(factor),
                    1 => Change::Contrast(factor),
                    2 => Change::Saturation(factor),
                    _ => Change::Hue(factor),
                })
            };
            order.into_iter().filter_map(change).collect()
        }
        Operation::Grayscale { channels, p } => {
            draws.by_chance(*p).then_some(Change::Grey(*channels)).into_iter().collect()
        }
        Operation::GaussianBlur { kernel, sigma } => {
            let sigma = draws.between(sigma[0], sigma[1]) as f32;
            if kernel[0] / 2 >= width || kernel[1] / 2 >= height {
                let text = format!(
                    "GaussianBlur with a kernel of {kernel:?} (width, height) does not fit an image of {width} × {height}"
                );
                return Err(Error::new("invalid-value", text).hint("use a smaller kernel, or add a Resize first"));
            }
            vec![Change::Blur { kernels: [gaussian(kernel[0], sigma), gaussian(kernel[1], sigma)] }]
        }
        Operation::RandomErasing { p, scale, ratio, value, converted } => {
            let erased = if draws.by_chance(*p) { erased_box(height, width, scale, ratio, draws) } else { None };
            let change = |(top, left, height, width)| Change::Erase {
                erased: Erased { top, left, height, width, values: value.clone() },
                converted: *converted,
            };
            erased.map(change).into_iter().collect()
        }
        _ => vec![],
    })
}

/// Choose the box of a RandomErasing as torchvision does: top, left, height and width. Returns None if no box fits.
fn erased_box(
    height: usize,
    width: usize,
    scale: &[f64; 2],
    ratio: &[f64; 2],
    draws: &mut Draws,
) -> Option<(usize, usize, usize, usize)> {
    for _ in 0..10 {
        let (h, w) = random_sides(height * width, scale, ratio, draws);
        if h < height && w < width {
            return Some((
                draws.below((height - h) as u64 + 1) as usize,
                draws.below((width - w) as u64 + 1) as usize,
                h,
                w,
            ));
        }
    }
    None
}

fn change(array: &mut CutArray<'_>, changes: &[Change]) -> Result<()> {
    if let [Change::Erase { erased, converted: true }] = changes {
        array.erased.push(erased.clone());
        return Ok(());
    }
    let mut size = [array.cut.size()[0], array.cut.size()[1], array.cut.size()[2]];
    let mut pixels = match &mut array.data {
        Cow::Owned(data) if array.cut.is_whole() => std::mem::take(data),
        _ => array.materialised()?,
    };
    changes.iter().for_each(|change| changed(&mut pixels, &mut size, change));
    *array = CutArray::new(Cow::Owned(pixels), Dtype::Uint8, &size);
    Ok(())
}

/// Change the pixels of an image of shape (height, width, channels).
fn changed(pixels: &mut Vec<u8>, size: &mut [usize; 3], change: &Change) {
    match (change, size[2]) {
        (Change::Brightness(factor), _) => through_table(pixels, |value| blend(value, 0.0, *factor) as u8),
        (Change::Contrast(factor), channels) => {
            let mean = mean_grey(pixels, channels);
            through_table(pixels, |value| blend(value, mean, *factor) as u8);
        }
        (Change::Saturation(factor), 3) => in_groups(pixels, |group| saturated(group, *factor)),
        (Change::Hue(shift), 3) => in_groups(pixels, |group| shifted(group, *shift)),
        (Change::Grey(3), 3) => make_grey(pixels),
        (Change::Grey(1), 3) => {
            *pixels = pixels.as_chunks::<3>().0.iter().map(grey_byte).collect();
            size[2] = 1;
        }
        (Change::Grey(3), _) => {
            *pixels = pixels.iter().flat_map(|value| [*value; 3]).collect();
            size[2] = 3;
        }
        (Change::Blur { kernels }, _) => *pixels = blurred(pixels, *size, kernels),
        (Change::Erase { erased, .. }, _) => {
            let bytes: Vec<u8> = erased.values.iter().map(|value| *value as u8).collect();
            fill(pixels, *size, 1, erased, &bytes);
        }
        (Change::Saturation(_) | Change::Hue(_) | Change::Grey(_), _) => {} // An image with one channel has no colour.
    }
}

/// Mix a value with another one. Converting the result to a byte truncates it, as in torchvision.
#[inline(always)]
fn blend(value: f32, other: f32, ratio: f32) -> f32 {
    smaller(larger(value * ratio + other * (1.0 - ratio), 0.0), 255.0)
}

#[inline(always)]
fn grey_of(r: f32, g: f32, b: f32) -> f32 {
    r * 0.2989 + g * 0.587 + b * 0.114
}

/// Round a number below 2^23 down. Unlike `floor`, this needs no call, so the compiler can use vector instructions.
#[inline(always)]
fn floor(value: f32) -> f32 {
    let near = (value + WHOLE) - WHOLE;
    if near > value { near - 1.0 } else { near }
}

/// Round a number from 0 to 255 down to a byte.
#[inline(always)]
fn floor_byte(value: f32) -> u8 {
    (floor(value) + WHOLE).to_bits() as u8
}

/// From this number on, all floats are whole.
const WHOLE: f32 = 8_388_608.0;

fn mean_grey(pixels: &[u8], channels: usize) -> f32 {
    let sum: u64 = match channels {
        3 => pixels.as_chunks::<3>().0.iter().map(|pixel| u64::from(grey_byte(pixel))).sum(),
        _ => pixels.iter().map(|value| u64::from(*value)).sum(),
    };
    (sum as f64 / (pixels.len() / channels).max(1) as f64) as f32
}

fn through_table(pixels: &mut [u8], function: impl Fn(f32) -> u8) {
    let mut table = [0; 256];
    (0..=255u8).for_each(|value| table[usize::from(value)] = function(f32::from(value)));
    pixels.iter_mut().for_each(|value| *value = table[usize::from(*value)]);
}

/// How many pixels are converted together. Their channels lie in lists of fixed length, so the compiler can use vector instructions.
const GROUP_PIXELS: usize = 64;

/// The three channels of a group of pixels.
type PixelGroup = [[f32; GROUP_PIXELS]; 3];

/// Change the pixels of an image of three channels group by group. Results are rounded down, and must be from 0 to 255.
fn in_groups(pixels: &mut [u8], change: impl Fn(&mut PixelGroup)) {
    let (groups, rest) = pixels.as_chunks_mut::<{ 3 * GROUP_PIXELS }>();
    groups.iter_mut().for_each(|group| in_group(group, &change));
    let mut last = [0; 3 * GROUP_PIXELS];
    last[..rest.len()].copy_from_slice(rest);
    in_group(&mut last, &change);
    rest.copy_from_slice(&last[..rest.len()]);
}

fn channels_of(bytes: &[u8; 3 * GROUP_PIXELS]) -> PixelGroup {
    let mut group = [[0f32; GROUP_PIXELS]; 3];
    for at in 0..GROUP_PIXELS {
        (0..3).for_each(|channel| group[channel][at] = f32::from(bytes[3 * at + channel]));
    }
    group
}

fn in_group(bytes: &mut [u8; 3 * GROUP_PIXELS], change: &impl Fn(&mut PixelGroup)) {
    let mut group = channels_of(bytes);
    change(&mut group);
    let mut whole = [[0u8; GROUP_PIXELS]; 3];
    for (whole, values) in whole.iter_mut().zip(&group) {
        for at in 0..GROUP_PIXELS {
            whole[at] = floor_byte(values[at]);
        }
    }
    for at in 0..GROUP_PIXELS {
        (0..3).for_each(|channel| bytes[3 * at + channel] = whole[channel][at]);
    }
}

fn saturated([r, g, b]: &mut PixelGroup, factor: f32) {
    for at in 0..GROUP_PIXELS {
        let grey = floor(grey_of(r[at], g[at], b[at]));
        (r[at], g[at], b[at]) = (blend(r[at], grey, factor), blend(g[at], grey, factor), blend(b[at], grey, factor));
    }
}

/// Shift the hue of pixels by a part of the colour circle, from -0.5 to 0.5.
fn shifted([red, green, blue]: &mut PixelGroup, shift: f32) {
    for at in 0..GROUP_PIXELS {
        let (r, g, b) = (red[at] / 255.0, green[at] / 255.0, blue[at] / 255.0);
        let (low, high) = (smaller(smaller(r, g), b), larger(larger(r, g), b));
        let range = high - low;
        let saturation = range / if high == 0.0 { 1.0 } else { high };
        let divisor = if range == 0.0 { 1.0 } else { range };
        let (rc, gc, bc) = ((high - r) / divisor, (high - g) / divisor, (high - b) / divisor);
        let later = if high == g { rc + 2.0 - bc } else { gc + 4.0 - rc };
        let sixth = if high == r { bc - gc } else { later };
        let hue = sixth * (1.0 / 6.0) + shift;
        let hue = if hue < 0.0 { hue + 1.0 } else { hue };
        let hue = if hue < 0.0 { hue + 1.0 } else { hue };
        let place = if hue >= 1.0 { hue - 1.0 } else { hue } * 6.0;
        // The distance of each channel's own hue decides how much of the saturation it loses.
        let channel = |own: f32| {
            let far = own + place;
            let far = if far >= 6.0 { far - 6.0 } else { far };
            let lost = smaller(larger(smaller(far, 4.0 - far), 0.0), 1.0);
            // torchvision multiplies by almost 256, so that each byte gets an equal share of the range from 0 to 1.
            smaller(larger(high - high * saturation * lost, 0.0), 1.0) * (255.0 + 1.0 - 1e-3)
        };
        (red[at], green[at], blue[at]) = (channel(5.0), channel(3.0), channel(1.0));
    }
}

/// Return the smaller of two numbers, neither of which is NaN. Unlike `f32::min`, this is one instruction.
#[inline(always)]
fn smaller(one: f32, other: f32) -> f32 {
    if one < other { one } else { other }
}

#[inline(always)]
fn larger(one: f32, other: f32) -> f32 {
    if one > other { one } else { other }
}

/// Return the weights of a Gaussian kernel, whose sum is 1.
fn gaussian(size: usize, sigma: f32) -> Vec<f32> {
    let half = (size - 1) as f32 / 2.0;
    let weights: Vec<f32> = (0..size).map(|place| (-0.5 * ((place as f32 - half) / sigma).powi(2)).exp()).collect();
    let sum: f32 = weights.iter().sum();
    weights.into_iter().map(|weight| weight / sum).collect()
}

/// Blur an image, along its width and then along its height. Beyond the border, the image continues as in a mirror.
fn blurred(pixels: &[u8], [height, width, channels]: [usize; 3], [across, down]: &[Vec<f32>; 2]) -> Vec<u8> {
    let mirrored = |place: isize, size: usize| -> usize {
        let last = size as isize - 1;
        let place = place.abs();
        (if place > last { 2 * last - place } else { place }) as usize
    };
    let row_values = width * channels;
    let (half_across, half_down) = (across.len() / 2, down.len() / 2);
    let mut between = vec![0f32; height * row_values];
    let mut padded = vec![0f32; (width + 2 * half_across) * channels];
    for (row, out) in pixels.chunks_exact(row_values).zip(between.chunks_exact_mut(row_values)) {
        for (place, target) in padded.chunks_exact_mut(channels).enumerate() {
            let from = mirrored(place as isize - half_across as isize, width) * channels;
            target.iter_mut().zip(&row[from..from + channels]).for_each(|(target, value)| *target = f32::from(*value));
        }
        for (tap, weight) in across.iter().enumerate() {
            let shifted = &padded[tap * channels..tap * channels + row_values];
            out.iter_mut().zip(shifted).for_each(|(sum, value)| *sum += value * weight);
        }
    }
    let mut made = Vec::with_capacity(pixels.len());
    let mut sums = vec![0f32; row_values];
    for row in 0..height {
        sums.fill(0.0);
        for (tap, weight) in down.iter().enumerate() {
            let from = mirrored(row as isize + tap as isize - half_down as isize, height) * row_values;
            sums.iter_mut().zip(&between[from..from + row_values]).for_each(|(sum, value)| *sum += value * weight);
        }
        made.extend(sums.iter().map(|sum| sum.round_ties_even() as u8));
    }
    made
}
