//! Transforms as data, and their effect on one sample. Names, defaults and units follow torchvision v2.
//!
//! All geometry changes are combinations of four motions: crop, resize and two mirrors. A crop that extends beyond the image
//! pads it. A transform draws its random numbers once and applies the same motions to all columns in its `on` list. `motion`
//! implements the motions.

use penstock_codec::resize::{Filter, Resized};
use penstock_error::{Error, Result};
use serde::Deserialize;

use crate::order::random::Draws;
use crate::transform::cell::Cell;
use crate::transform::motion::{Motion, moved, sanitise};
use crate::transform::warp::Affine;

/// A transform, and the results to which it is applied jointly.
#[derive(Debug, Clone, Deserialize)]
pub struct Transform {
    pub on: Vec<String>,
    #[serde(flatten)]
    pub operation: Operation,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case")]
pub enum Operation {
    /// `size` is either one number, for the shorter side, or height and width.
    Resize {
        size: Vec<usize>,
        max_size: Option<usize>,
        #[serde(with = "Interpolation")]
        interpolation: Filter,
        antialias: bool,
        fast: bool,
    },
    CenterCrop {
        size: Vec<usize>,
    },
    /// `padding` contains the left, top, right and bottom padding. For tensors, it contains the padding before and after each
    /// dimension of `size`.
    RandomCrop {
        size: Vec<usize>,
        padding: Option<Vec<i64>>,
        pad_if_needed: bool,
        fill: f64,
    },
    RandomResizedCrop {
        size: [usize; 2],
        scale: [f64; 2],
        ratio: [f64; 2],
        #[serde(with = "Interpolation")]
        interpolation: Filter,
        antialias: bool,
        fast: bool,
    },
    RandomHorizontalFlip {
        p: f64,
    },
    RandomVerticalFlip {
        p: f64,
    },
    Pad {
        padding: Vec<i64>,
        fill: f64,
    },
    Normalize {
        mean: Vec<f32>,
        std: Vec<f32>,
    },
    ToDtype {
        dtype: String,
        scale: bool,
    },
    ConvertBoxes {
        format: String,
    },
    SanitizeBoundingBoxes {
        min_size: f32,
        min_area: f32,
    },
    TokenChunks {
        length: usize,
        pad: f64,
        random: bool,
    },
    /// Ranges of the factors. Hue is a part of the colour circle.
    ColorJitter {
        brightness: Option<[f64; 2]>,
        contrast: Option<[f64; 2]>,
        saturation: Option<[f64; 2]>,
        hue: Option<[f64; 2]>,
    },
    Grayscale {
        channels: usize,
        p: f64,
    },
    /// `kernel` contains the width and the height.
    GaussianBlur {
        kernel: [usize; 2],
        sigma: [f64; 2],
    },
    /// `converted` is true after ToDtype or Normalize. The values are then those of the result.
    RandomErasing {
        p: f64,
        scale: [f64; 2],
        ratio: [f64; 2],
        value: Vec<f32>,
        #[serde(default)]
        converted: bool,
    },
    /// RandomRotation and RandomAffine.
    RandomAffine(Affine),
}

/// The names of filters.
#[derive(Deserialize)]
#[serde(remote = "Filter", rename_all = "kebab-case")]
enum Interpolation {
    Nearest,
    NearestExact,
    Bilinear,
    Bicubic,
    Lanczos,
}

impl Operation {
    pub fn name(&self) -> &'static str {
        match self {
            Operation::Resize { .. } => "Resize",
            Operation::CenterCrop { .. } => "CenterCrop",
            Operation::RandomCrop { .. } => "RandomCrop",
            Operation::RandomResizedCrop { .. } => "RandomResizedCrop",
            Operation::RandomHorizontalFlip { .. } => "RandomHorizontalFlip",
            Operation::RandomVerticalFlip { .. } => "RandomVerticalFlip",
            Operation::Pad { .. } => "Pad",
            Operation::Normalize { .. } => "Normalize",
            Operation::ToDtype { .. } => "ToDtype",
            Operation::ConvertBoxes { .. } => "ConvertBoxes",
            Operation::SanitizeBoundingBoxes { .. } => "SanitizeBoundingBoxes",
            Operation::TokenChunks { .. } => "TokenChunks",
            Operation::ColorJitter { .. } => "ColorJitter",
            Operation::Grayscale { .. } => "Grayscale",
            Operation::GaussianBlur { .. } => "GaussianBlur",
            Operation::RandomErasing { .. } => "RandomErasing",
            Operation::RandomAffine(affine) => affine.name(),
        }
    }
}

/// Apply a transform to the columns `cells[on]` of one sample. The first image, mask or tensor determines the size. `lost` says whether
/// boxes were removed because their image is null.
pub fn apply(
    operation: &Operation,
    cells: &mut [Cell<'_>],
    on: &[usize],
    draws: &mut Draws,
    lost: &mut bool,
) -> Result<()> {
    if let Operation::SanitizeBoundingBoxes { min_size, min_area } = operation {
        return sanitise(cells, on, (*min_size, *min_area), *lost);
    }
    if let Operation::ConvertBoxes { .. } = operation {
        return Ok(()); // Boxes are corners until they are written in the format of their result.
    }
    let lead = on.iter().find_map(|at| size_of(&cells[*at]));
    let Some(size) = lead else {
        // The leading column is null, so the boxes and keypoints that follow it cannot be moved, and none are left.
        *lost = true;
        on.iter().for_each(|at| match &mut cells[*at] {
            Cell::Boxes(rows) => rows.clear(),
            Cell::Points(numbers, _) => numbers.clear(),
            _ => {}
        });
        return Ok(());
    };
    for at in on {
        if let Some(other) = size_of(&cells[*at])
            && other[..2.min(other.len())] != size[..2.min(size.len())]
        {
            let text = format!(
                "{} applies to columns of different sizes: {:?} and {:?} (height, width)",
                operation.name(),
                &size[..2.min(size.len())],
                &other[..2.min(other.len())]
            );
            return Err(Error::new("invalid-value", text));
        }
    }
    for motion in motions(operation, &size, draws)? {
        let size = on.iter().find_map(|at| size_of(&cells[*at])).unwrap_or_default();
        on.iter().try_for_each(|at| moved(&mut cells[*at], &motion, &size))?;
    }
    Ok(())
}

/// Return the sizes of all dimensions, height and width first. Returns None for nulls, boxes and keypoints.
fn size_of(cell: &Cell<'_>) -> Option<Vec<usize>> {
    match cell {
        Cell::Image(image) => Some(vec![image.size().1, image.size().0]),
        Cell::Array(array) => Some(array.cut.size().to_vec()),
        _ => None,
    }
}

/// Return the motions of an operation on columns of this size, after drawing its random numbers.
pub fn motions(operation: &Operation, size: &[usize], draws: &mut Draws) -> Result<Vec<Motion>> {
    let (height, width) = (size[0], size.get(1).copied().unwrap_or(1));
    Ok(match operation {
        Operation::Resize { size, max_size, interpolation, antialias, fast } => {
            let (height, width) = resized(height, width, size, *max_size);
            vec![Motion::Resize(Resized { width, height, filter: *interpolation, antialias: *antialias, fast: *fast })]
        }
        Operation::CenterCrop { size: wanted } => {
            let boxes = wanted.iter().zip(size).map(|(wanted, size)| (centre(*size, *wanted), *wanted)).collect();
            vec![Motion::Crop { boxes, fill: 0.0 }]
        }
        Operation::RandomCrop { size: wanted, padding, pad_if_needed, fill } => {
            let mut boxes = Vec::with_capacity(wanted.len());
            for (dimension, wanted) in wanted.iter().enumerate() {
                let (before, after) = padding.as_ref().map_or((0, 0), |padding| padding_of(padding, dimension));
                let (mut low, mut high) = (-before, size[dimension] as i64 + after);
                if high - low < *wanted as i64 {
                    if !pad_if_needed {
                        let text = format!(
                            "RandomCrop of {wanted} does not fit dimension {dimension}, whose size is {}",
                            high - low
                        );
                        return Err(
                            Error::new("invalid-value", text).hint("use pad_if_needed=True, or add a Resize first")
                        );
                    }
                    // Like torchvision, pad each side by the whole difference.
                    let missing = *wanted as i64 - (high - low);
                    (low, high) = (low - missing, high + missing);
                }
                boxes.push((low + draws.below((high - low - *wanted as i64) as u64 + 1) as i64, *wanted));
            }
            vec![Motion::Crop { boxes, fill: *fill }]
        }
        Operation::RandomResizedCrop { size, scale, ratio, interpolation, antialias, fast } => {
            let boxes = resized_crop(height, width, scale, ratio, draws);
            let [height, width] = *size;
            let resized = Resized { width, height, filter: *interpolation, antialias: *antialias, fast: *fast };
            vec![Motion::Crop { boxes, fill: 0.0 }, Motion::Resize(resized)]
        }
        Operation::RandomHorizontalFlip { p } => draws.by_chance(*p).then_some(Motion::Mirror(1)).into_iter().collect(),
        Operation::RandomVerticalFlip { p } => draws.by_chance(*p).then_some(Motion::Mirror(0)).into_iter().collect(),
        Operation::Pad { padding, fill } => {
            let padded = |(dimension, size): (usize, &usize)| {
                (-padding_of(padding, dimension).0, padded_size(*size, padding, dimension))
            };
            vec![Motion::Crop {
                boxes: size.iter().take(padding.len() / 2).enumerate().map(padded).collect(),
                fill: *fill,
            }]
        }
        Operation::TokenChunks { length, pad, random } => {
            let spare = size[0].saturating_sub(*length) as u64;
            let begin = if *random { draws.below(spare + 1) } else { 0 };
            vec![Motion::Crop { boxes: vec![(begin as i64, *length)], fill: *pad }]
        }
        Operation::RandomAffine(affine) => vec![Motion::Warp(affine.drawn(height, width, draws))],
        _ => vec![],
    })
}

/// Change the sizes of an image's or a tensor's dimensions as an operation does. If they depend on random numbers, choose the largest.
pub fn resize(operation: &Operation, sizes: &mut [usize]) {
    match (operation, sizes) {
        (Operation::CenterCrop { size } | Operation::RandomCrop { size, .. }, sizes) => {
            sizes.iter_mut().zip(size).for_each(|(size, wanted)| *size = *wanted);
        }
        (Operation::Pad { padding, .. }, sizes) => {
            let dimensions = (padding.len() / 2).min(sizes.len());
            (0..dimensions).for_each(|dimension| sizes[dimension] = padded_size(sizes[dimension], padding, dimension));
        }
        (Operation::TokenChunks { length, .. }, [first, ..]) => *first = *length,
        (Operation::Grayscale { channels: to, .. }, [_, _, channels]) => *channels = *to,
        (Operation::Resize { size, max_size, .. }, [height, width, ..]) => {
            (*height, *width) = resized(*height, *width, size, *max_size)
        }
        (Operation::RandomResizedCrop { size, .. }, [height, width, ..]) => (*height, *width) = (size[0], size[1]),
        (Operation::RandomAffine(affine), [height, width, ..]) if affine.expand => {
            let diagonal = (*height as f64).hypot(*width as f64) as usize + 2;
            (*height, *width) = (diagonal, diagonal);
        }
        _ => {}
    }
}

/// Return whether an operation interpolates pixels. Interpolation takes two passes.
pub fn resizes(operation: &Operation) -> bool {
    match operation {
        Operation::Resize { interpolation, .. } | Operation::RandomResizedCrop { interpolation, .. } => {
            !interpolation.is_nearest()
        }
        _ => false,
    }
}

/// Return the size of a dimension after padding.
pub fn padded_size(size: usize, padding: &[i64], dimension: usize) -> usize {
    let (before, after) = padding_of(padding, dimension);
    (size as i64 + before + after).max(0) as usize
}

/// Return the padding before and after a dimension. If there are four numbers, they are [left, top, right, bottom]. Otherwise,
/// each dimension has [before, after].
pub fn padding_of(padding: &[i64], dimension: usize) -> (i64, i64) {
    match padding.len() {
        4 => (padding[1 - dimension.min(1)], padding[3 - dimension.min(1)]),
        _ => (padding[2 * dimension], padding[2 * dimension + 1]),
    }
}

/// Return the start of a centred crop, rounded half to even as in torchvision. An image smaller than the crop is padded. If the
/// padding is odd, the left or top side gets one pixel less than the opposite side.
fn centre(size: usize, wanted: usize) -> i64 {
    if wanted > size {
        return -(((wanted - size) / 2) as i64);
    }
    ((size as f64 - wanted as f64) / 2.0).round_ties_even() as i64
}

/// Return the height and width after a resize.
fn resized(height: usize, width: usize, size: &[usize], max_size: Option<usize>) -> (usize, usize) {
    if let [to_height, to_width] = size {
        return (*to_height, *to_width);
    }
    let wanted = size.first().copied().unwrap_or(1);
    let (short, long) = (height.min(width), height.max(width));
    let (mut new_short, mut new_long) = (wanted, (wanted as u64 * long as u64 / short as u64) as usize);
    if let Some(most) = max_size.filter(|most| new_long > *most) {
        new_short = (most as u64 * new_short as u64 / new_long as u64) as usize;
        new_long = most;
    }
    let (new_short, new_long) = (new_short.max(1), new_long.max(1));
    if height <= width { (new_short, new_long) } else { (new_long, new_short) }
}

/// Choose the sides of a box with a part of an area: `scale` is the range of the part, and `ratio` that of the first side to the second.
pub fn random_sides(area: usize, scale: &[f64; 2], ratio: &[f64; 2], draws: &mut Draws) -> (usize, usize) {
    let target = area as f64 * draws.between(scale[0], scale[1]);
    let aspect = draws.between(ratio[0].ln(), ratio[1].ln()).exp();
    ((target * aspect).sqrt().round_ties_even() as usize, (target / aspect).sqrt().round_ties_even() as usize)
}

/// Choose the box for a RandomResizedCrop as torchvision does.
fn resized_crop(
    height: usize,
    width: usize,
    scale: &[f64; 2],
    ratio: &[f64; 2],
    draws: &mut Draws,
) -> Vec<(i64, usize)> {
    for _ in 0..10 {
        let (w, h) = random_sides(height * width, scale, ratio, draws);
        if (1..=width).contains(&w) && (1..=height).contains(&h) {
            let top = draws.below((height - h) as u64 + 1);
            return vec![(top as i64, h), (draws.below((width - w) as u64 + 1) as i64, w)];
        }
    }
    let found = width as f64 / height as f64;
    let (w, h) = match found {
        found if found < ratio[0] => (width, ((width as f64 / ratio[0]).round_ties_even() as usize).clamp(1, height)),
        found if found > ratio[1] => (((height as f64 * ratio[1]).round_ties_even() as usize).clamp(1, width), height),
        _ => (width, height),
    };
    vec![(((height - h) / 2) as i64, h), (((width - w) / 2) as i64, w)]
}
