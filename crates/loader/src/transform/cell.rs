//! Values that transforms are applied to. Motions, which `operation` chooses, change the geometry of values. The values are then
//! written to their places in a batch. An image usually stays encoded until it is written.

use std::borrow::Cow;
use std::ops::Range;

use penstock_codec::cut::{Convert, Cut};
use penstock_codec::pixels::Pool;
use penstock_codec::region::Encoded;
use penstock_codec::resize::Geometry;
use penstock_codec::{Limits, Orientation, Picture, cut, decode_mask, resize};
use penstock_error::{Error, Result};
use penstock_tensor::Dtype;

use crate::batch::Loose;
use crate::transform::erased::{Erased, erase};

/// A value that transforms are applied to.
pub enum Cell<'a> {
    Null,
    Image(Image<'a>),
    Array(CutArray<'a>),
    Boxes(Vec<[f32; 4]>),
    /// The points of objects. Each point begins with x and y. The two sizes are the number of points per object and the
    /// number of values per point.
    Points(Vec<f32>, [usize; 2]),
}

/// An RGB image with pending geometry changes.
pub struct Image<'a> {
    pub(super) pixels: ImageData<'a>,
    pub geometry: Geometry,
    /// Whether to reverse the order of pixel columns, and that of pixel rows, after the geometry is applied.
    pub mirrored: [bool; 2],
}

pub enum ImageData<'a> {
    Encoded(Encoded<'a>),
    Rgb(Vec<u8>, usize, usize),
}

/// An n-dimensional array and its pending cut.
pub struct CutArray<'a> {
    pub data: Cow<'a, [u8]>,
    pub dtype: Dtype,
    pub cut: Cut,
    /// The part of the array that `data` has, or None if it has all. The cut lies inside of it, apart from padding.
    pub window: Option<&'a [Range<u64>]>,
    /// Boxes to erase after the conversion.
    pub erased: Vec<Erased>,
}

impl<'a> Image<'a> {
    pub fn open(bytes: &'a [u8], limits: Limits, orientation: Orientation, pool: &'a Pool) -> Result<Image<'a>> {
        let encoded = Encoded::open(bytes, limits, orientation, pool)?;
        let (width, height) = encoded.size();
        Ok(Image {
            pixels: ImageData::Encoded(encoded),
            geometry: Geometry::whole(width, height),
            mirrored: [false; 2],
        })
    }

    /// Return the width and height.
    pub fn size(&self) -> (usize, usize) {
        self.geometry.size()
    }

    /// Decode into `out`, which has exactly the required size.
    fn write(&self, out: &mut [u8]) -> Result<()> {
        match &self.pixels {
            ImageData::Encoded(encoded) => resize::decode(encoded, &self.geometry, out)?,
            ImageData::Rgb(data, width, height) => {
                resize::resize_pixels(data, (*width, *height), 3, 8, &self.geometry, out)?
            }
        }
        let row_bytes = self.size().0 * 3;
        if self.mirrored[0] {
            out.chunks_exact_mut(row_bytes).for_each(|row| row.as_chunks_mut::<3>().0.reverse());
        }
        if self.mirrored[1] {
            let rows = out.len() / row_bytes;
            for row in 0..rows / 2 {
                let (upper, lower) = out.split_at_mut((rows - 1 - row) * row_bytes);
                upper[row * row_bytes..][..row_bytes].swap_with_slice(&mut lower[..row_bytes]);
            }
        }
        Ok(())
    }

    pub fn array(&self) -> Result<CutArray<'static>> {
        let (width, height) = self.size();
        Ok(CutArray::new(Cow::Owned(self.decode()?), Dtype::Uint8, &[height, width, 3]))
    }

    pub fn decode(&self) -> Result<Vec<u8>> {
        let (width, height) = self.size();
        let mut out = vec![0; width * height * 3];
        self.write(&mut out)?;
        Ok(out)
    }
}

impl<'a> CutArray<'a> {
    pub fn new(data: Cow<'a, [u8]>, dtype: Dtype, shape: &[usize]) -> CutArray<'a> {
        CutArray { data, dtype, cut: Cut::whole(shape), window: None, erased: Vec::new() }
    }

    /// Write the values of the cut, converted, into `out`.
    fn write(&self, convert: Option<&Convert>, out: &mut [u8]) -> Result<()> {
        let mut cut = self.cut;
        for (dimension, range) in self.window.into_iter().flatten().enumerate() {
            cut.shape[dimension] = (range.end - range.start) as usize;
            cut.origin[dimension] -= range.start as i64;
        }
        cut::cut(&self.data, self.dtype, &cut, convert, out)
    }

    pub fn materialised(&self) -> Result<Vec<u8>> {
        let mut out = vec![0; self.cut.elements() * self.dtype.size()];
        self.write(None, &mut out)?;
        Ok(out)
    }
}

impl Cell<'_> {
    pub fn is_null(&self) -> bool {
        matches!(self, Cell::Null)
    }

    /// Write an image or array into its place in the batch. Refuses any shape other than `shape`.
    pub fn write(&self, shape: &[usize], convert: Option<&Convert>, dtype: Dtype, out: &mut [u8]) -> Result<()> {
        let refuse =
            |found: &[usize]| Err(Error::new("invalid-value", format!("its shape is {found:?}, expected {shape:?}")));
        match self {
            Cell::Image(image) if convert.is_some() => Cell::Array(image.array()?).write(shape, convert, dtype, out),
            Cell::Image(image) => {
                let (width, height) = image.size();
                if [height, width, 3] == shape { image.write(out) } else { refuse(&[height, width, 3]) }
            }
            Cell::Array(array) if array.cut.size() != shape => refuse(array.cut.size()),
            Cell::Array(array) if convert.is_none() && array.dtype != dtype => {
                let text = format!("its values are {}, expected {}", array.dtype.name(), dtype.name());
                Err(Error::new("invalid-value", text).hint("add ToDtype"))
            }
            Cell::Array(array) => {
                array.write(convert, out)?;
                erase(out, shape, dtype, &array.erased)
            }
            _ => Err(Error::new("internal", "only images and arrays can be written to a batch array")),
        }
    }

    /// Return the bytes, dtype and shape of a result whose shape differs between samples. Returns None for a null.
    pub fn loose(self, convert: Option<&Convert>, boxes: &str) -> Result<Option<Loose>> {
        let bytes = |numbers: &[f32]| numbers.iter().flat_map(|number| number.to_ne_bytes()).collect::<Vec<u8>>();
        Ok(Some(match self {
            Cell::Null => return Ok(None),
            Cell::Image(image) if convert.is_some() => return Cell::Array(image.array()?).loose(convert, boxes),
            Cell::Image(image) => {
                let (width, height) = image.size();
                (image.decode()?, Dtype::Uint8, vec![height as u64, width as u64, 3])
            }
            Cell::Array(array) => {
                let to = convert.map_or(array.dtype, |convert| convert.to);
                let mut out = vec![0; array.cut.elements() * to.size()];
                array.write(convert, &mut out)?;
                erase(&mut out, array.cut.size(), to, &array.erased)?;
                (out, to, array.cut.size().iter().map(|size| *size as u64).collect())
            }
            Cell::Boxes(rows) => {
                let numbers: Vec<f32> = rows.iter().flat_map(|row| from_xyxy(*row, boxes)).collect();
                (bytes(&numbers), Dtype::Float32, vec![rows.len() as u64, 4])
            }
            Cell::Points(numbers, [points, each]) => {
                let objects = numbers.len().checked_div(points * each).unwrap_or(0);
                (bytes(&numbers), Dtype::Float32, vec![objects as u64, points as u64, each as u64])
            }
        }))
    }
}

/// The formats of boxes.
pub const FORMATS: [&str; 3] = ["xyxy", "xywh", "cxcywh"];

/// Convert a box to its corners.
pub fn to_xyxy(row: [f32; 4], format: &str) -> [f32; 4] {
    let [a, b, c, d] = row;
    match format {
        "xywh" => [a, b, a + c, b + d],
        "cxcywh" => [a - c / 2.0, b - d / 2.0, a + c / 2.0, b + d / 2.0],
        _ => row,
    }
}

fn from_xyxy(row: [f32; 4], format: &str) -> [f32; 4] {
    let [x1, y1, x2, y2] = row;
    match format {
        "xywh" => [x1, y1, x2 - x1, y2 - y1],
        "cxcywh" => [(x1 + x2) / 2.0, (y1 + y2) / 2.0, x2 - x1, y2 - y1],
        _ => row,
    }
}

/// Decode a mask into class numbers of shape (H, W).
pub fn mask(bytes: &[u8], limits: Limits) -> Result<CutArray<'static>> {
    let Picture { height, width, bits, data, .. } = decode_mask(bytes, limits)?;
    Ok(CutArray::new(Cow::Owned(data), dtype_of(bits), &[height, width]))
}

/// Wrap a decoded image as an array of shape (H, W, C).
pub fn picture(picture: Picture) -> CutArray<'static> {
    let Picture { height, width, channels, bits, data } = picture;
    CutArray::new(Cow::Owned(data), dtype_of(bits), &[height, width, channels])
}

fn dtype_of(bits: u8) -> Dtype {
    if bits == 16 { Dtype::Uint16 } else { Dtype::Uint8 }
}
