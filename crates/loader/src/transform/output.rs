//! The outputs of a pipeline: their dtypes and shapes, checked when the loader is created.

use std::borrow::Cow;
use std::ops::Range;

use penstock_codec::cut::{Convert, MAX_RANK};
use penstock_codec::pixels::Pool;
use penstock_codec::{Mode, Orientation, decode_in};
use penstock_dataset::{Config, mode_of};
use penstock_error::{Error, Result};
use penstock_format::schema::ColumnSpec;
use penstock_tensor::{Dtype, Shape};

use crate::source::view::value_type;
use crate::transform::cell::{self, Cell, CutArray, Image};
use crate::transform::dtypes::{is_float, is_number, scale_between, unit_scale};
use crate::transform::operation::{Operation, padded_size, padding_of};

/// One output column of a batch.
#[derive(Debug, Clone)]
pub struct Output {
    pub name: String,
    /// Index of the source column.
    pub column: usize,
    pub role: Role,
    /// Shape of one sample, with None for each size that differs between samples.
    pub shape: Vec<Option<usize>>,
    pub dtype: Dtype,
    /// The dtype before transforms.
    pub stored_dtype: Dtype,
    pub stored_shape: Shape,
    pub convert: Option<Convert>,
    /// Whether samples are read in parts if they have blocks of their own.
    pub in_parts: bool,
    /// Whether images or masks become a list in every batch, instead of one array.
    pub listed: bool,
    /// Whether a transform changes more than the format of boxes.
    changed: bool,
}

/// The form of images and masks in a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MediaForm {
    /// Pixels.
    Decoded,
    /// The stored bytes.
    Stored,
}

/// The kind of a result, which determines the transforms that apply to it.
#[derive(Debug, Clone, PartialEq)]
pub enum Role {
    Image {
        orientation: Orientation,
        mode: Mode,
    },
    Mask,
    /// Boxes in this format, in the batch.
    Boxes(String),
    /// Keypoints with this many numbers per point.
    Keypoints(usize),
    Tensor,
    /// A result that no transform applies to.
    Other,
}

/// The stored value of one sample: its bytes and full shape, and the column of its own source. A null has no bytes.
#[derive(Clone)]
pub struct Input<'a> {
    pub bytes: Option<&'a [u8]>,
    pub shape: Vec<u64>,
    /// The part of the value that `bytes` has, or None if it has all.
    pub window: Option<&'a [Range<u64>]>,
    pub column: &'a ColumnSpec,
}

impl Output {
    pub fn new(name: String, column: usize, spec: &ColumnSpec, form: MediaForm) -> Result<Output> {
        let (dtype, stored) = value_type(spec)?;
        let (kind, is_decoded) = (&spec.kind, form == MediaForm::Decoded);
        let role = if let (Some((exif_orientation, mode)), true) = (kind.image(), is_decoded) {
            Role::Image { orientation: Orientation::of_column(exif_orientation), mode: mode_of(mode) }
        } else if kind.is_mask() && is_decoded {
            Role::Mask
        } else if let Some(format) = kind.box_format() {
            Role::Boxes(format.to_owned())
        } else if let Some(numbers) = kind.point_numbers() {
            Role::Keypoints(numbers as usize)
        } else if kind.is_array() && stored.0.len() <= MAX_RANK {
            Role::Tensor
        } else {
            Role::Other
        };
        let shape = match role {
            Role::Image { mode, .. } => vec![None, None, mode.form().map(|(channels, _)| channels)],
            Role::Mask => vec![None, None],
            _ => stored.0.iter().map(|size| size.map(|size| size as usize)).collect(),
        };
        let dtype = match &role {
            Role::Image { mode: Mode::Deep, .. } => Dtype::Uint16,
            Role::Image { .. } | Role::Mask => Dtype::Uint8,
            _ => dtype,
        };
        Ok(Output {
            name,
            column,
            role,
            shape,
            dtype,
            stored_dtype: dtype,
            stored_shape: stored,
            convert: None,
            in_parts: false,
            listed: false,
            changed: false,
        })
    }

    /// Return whether all samples have the same shape, so that the batch is one array.
    pub fn is_fixed(&self) -> bool {
        self.shape.iter().all(Option::is_some)
    }

    /// Return whether the result is an image. Layouts apply only to images.
    pub fn is_image(&self) -> bool {
        matches!(self.role, Role::Image { .. })
    }

    /// Return whether colour transforms change the result: an image, or a tensor with the shape of one.
    fn is_picture(&self) -> bool {
        self.shape.len() == 3 && matches!(self.role, Role::Image { .. } | Role::Tensor)
    }

    /// Return whether the result consists of pixels, which become one array or a list of arrays, but never a ragged array.
    pub fn is_media(&self) -> bool {
        matches!(self.role, Role::Image { .. } | Role::Mask)
    }

    /// Return whether the result follows the sizes of others: boxes or keypoints.
    pub fn is_follower(&self) -> bool {
        matches!(self.role, Role::Boxes(_) | Role::Keypoints(_))
    }

    pub fn sizes(&self) -> Vec<usize> {
        self.shape.iter().flatten().copied().collect()
    }

    /// Count the bytes of a sample of fixed shape.
    pub fn sample_bytes(&self) -> usize {
        self.sizes().iter().product::<usize>() * self.dtype.size()
    }

    pub fn box_format(&self) -> &str {
        if let Role::Boxes(format) = &self.role { format } else { "xyxy" }
    }

    /// Update shape and dtype for a transform that `check` has accepted.
    pub fn transformed(&mut self, operation: &Operation) -> Result<()> {
        self.changed |= !matches!(operation, Operation::ConvertBoxes { .. });
        let name = self.name.clone();
        let misfit = |text: String| {
            Err(Error::new("invalid-argument", format!("{} does not fit `{name}`: {text}", operation.name())))
        };
        let spatial = matches!(self.role, Role::Image { .. } | Role::Mask | Role::Tensor);
        match operation {
            Operation::Normalize { mean, std } => self.normalize(mean, std).or_else(misfit)?,
            Operation::ToDtype { dtype, scale } => self.convert_to(dtype, *scale).or_else(misfit)?,
            Operation::RandomErasing { .. } => {}
            Operation::ConvertBoxes { format } => self.role = Role::Boxes(format.clone()),
            _ if self.convert.is_some() && spatial => {
                return misfit("it must come before ToDtype and Normalize".into());
            }
            Operation::Resize { size, .. } if spatial => {
                let known = if let [height, width] = size[..] { [Some(height), Some(width)] } else { [None, None] };
                self.shape[..2].copy_from_slice(&known);
            }
            Operation::CenterCrop { size } | Operation::RandomCrop { size, .. } if spatial => {
                if let Operation::RandomCrop { padding, pad_if_needed: false, .. } = operation
                    && let Some(dimension) = self.lacks(size, padding.as_deref())
                {
                    return misfit(format!(
                        "it has fewer than {} elements in dimension {dimension}; see pad_if_needed",
                        size[dimension]
                    ));
                }
                size.iter().enumerate().for_each(|(dimension, size)| self.shape[dimension] = Some(*size));
            }
            Operation::Grayscale { channels, .. } if self.is_picture() => self.shape[2] = Some(*channels),
            Operation::RandomResizedCrop { size, .. } if spatial => {
                (self.shape[0], self.shape[1]) = (Some(size[0]), Some(size[1]))
            }
            Operation::TokenChunks { length, .. } => self.shape[0] = Some(*length),
            Operation::RandomAffine(affine) if affine.expand && spatial => self.shape[..2].fill(None),
            Operation::Pad { padding, .. } if spatial => {
                for dimension in 0..padding.len() / 2 {
                    self.shape[dimension] = self.shape[dimension].map(|size| padded_size(size, padding, dimension));
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Convert to floating point with these means and deviations. Returns why the result does not fit as an error.
    fn normalize(&mut self, mean: &[f32], std: &[f32]) -> std::result::Result<(), String> {
        let channels = self.shape.last().copied().flatten();
        let fits_channels = |list: &[f32]| list.len() == 1 || Some(list.len()) == channels || channels.is_none();
        if !fits_channels(mean) || !fits_channels(std) {
            return Err(format!(
                "{} means and {} deviations for {:?} channels",
                mean.len(),
                std.len(),
                channels.unwrap_or(1)
            ));
        }
        let source = self.dtype;
        let convert = self.convert.get_or_insert_with(|| Convert {
            to: Dtype::Float32,
            scale: vec![unit_scale(source)],
            bias: vec![0.0],
        });
        if !is_float(convert.to) {
            return Err(format!("ToDtype already converted it to {}, expected floating point", convert.to.name()));
        }
        convert.normalise(mean, std);
        self.dtype = convert.to;
        Ok(())
    }

    /// Convert to a dtype, from the range of the current one to that of the new one if `is_scaled`. Returns why the result does not fit as an error.
    fn convert_to(&mut self, dtype: &str, is_scaled: bool) -> std::result::Result<(), String> {
        let to = Dtype::from_name(dtype).filter(|to| is_number(*to));
        let to = to.ok_or_else(|| format!("cannot convert to dtype `{dtype}`"))?;
        if self.convert.is_some() && !is_float(self.dtype) {
            return Err(format!(
                "ToDtype already converted it to {}; a conversion to whole numbers comes last",
                self.dtype.name()
            ));
        }
        let scale = if is_scaled { scale_between(self.dtype, to) } else { Some(1.0) };
        let scale = scale.ok_or_else(|| {
            format!("cannot scale {} to {}; convert it to float32 first", self.dtype.name(), to.name())
        })?;
        let convert = self.convert.get_or_insert_with(|| Convert::cast(to));
        convert.to = to;
        convert.scale.iter_mut().chain(&mut convert.bias).for_each(|factor| *factor *= scale);
        self.dtype = to;
        Ok(())
    }

    /// Return a dimension that is known to be too small for a crop, or None.
    fn lacks(&self, size: &[usize], padding: Option<&[i64]>) -> Option<usize> {
        size.iter().enumerate().position(|(dimension, wanted)| {
            let (before, after) = padding.map_or((0, 0), |padding| padding_of(padding, dimension));
            self.shape[dimension].is_some_and(|size| size as i64 + before + after < *wanted as i64)
        })
    }

    pub fn cell<'a>(&self, input: &Input<'a>, pool: &'a Pool) -> Result<Cell<'a>> {
        let Some(bytes) = input.bytes else { return Ok(Cell::Null) };
        let sizes = || input.shape.iter().map(|size| *size as usize).collect::<Vec<_>>();
        let numbers =
            || bytes.as_chunks::<4>().0.iter().map(|number| f32::from_ne_bytes(*number)).collect::<Vec<f32>>();
        Ok(match &self.role {
            Role::Image { orientation, mode: Mode::Rgb } => {
                Cell::Image(Image::open(bytes, Config::limits(), *orientation, pool)?)
            }
            Role::Image { orientation, mode } => {
                Cell::Array(cell::picture(decode_in(bytes, Config::limits(), *orientation, *mode)?))
            }
            Role::Mask => Cell::Array(cell::mask(bytes, Config::limits())?),
            Role::Boxes(format) => match input.column.kind.box_format() {
                // Boxes that stay as they are must not be rounded.
                Some(stored) if self.changed || stored != format => {
                    Cell::Boxes(numbers().as_chunks::<4>().0.iter().map(|row| cell::to_xyxy(*row, stored)).collect())
                }
                _ => Cell::Array(CutArray::new(Cow::Borrowed(bytes), self.stored_dtype, &sizes())),
            },
            Role::Keypoints(each) => {
                Cell::Points(numbers(), [input.shape.get(1).map_or(1, |points| *points as usize), *each])
            }
            _ => Cell::Array(CutArray {
                window: input.window,
                ..CutArray::new(Cow::Borrowed(bytes), self.stored_dtype, &sizes())
            }),
        })
    }
}
