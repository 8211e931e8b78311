//! Values in transit through the transforms: motions change their geometry, then they are written to their places in a batch. An image
//! stays encoded until it is written. `transform` chooses the motions.

use std::borrow::Cow;

use penstock_codec::cut::{self, Convert, Cut};
use penstock_codec::pixels::Pool;
use penstock_codec::region::{Encoded, Region};
use penstock_codec::resize::{self, Filter, Geometry, Resized};
use penstock_codec::{Limits, Picture, decode_mask};
use penstock_error::{Error, Result};
use penstock_tensor::Dtype;

use crate::batch::Loose;

/// A value in transit through the transforms.
pub enum Item<'a> {
    Null,
    Image(Image<'a>),
    Array(Array<'a>),
    Boxes(Vec<[f32; 4]>),
    /// Points of objects, x and y first. The sizes are points per object and numbers per point.
    Points(Vec<f32>, [usize; 2]),
}

/// An RGB image with pending geometry.
pub struct Image<'a> {
    pixels: Pixels<'a>,
    geometry: Geometry,
    /// Whether columns and rows are reversed, after the geometry.
    mirrored: [bool; 2],
}

enum Pixels<'a> {
    Encoded(Encoded<'a>),
    Rgb(Vec<u8>, usize, usize),
}

/// An n-dimensional array and the pending cut of it.
pub struct Array<'a> {
    pub data: Cow<'a, [u8]>,
    pub dtype: Dtype,
    pub cut: Cut,
}

impl<'a> Image<'a> {
    pub fn open(bytes: &'a [u8], limits: Limits, upright: bool, pool: &'a Pool) -> Result<Image<'a>> {
        let encoded = Encoded::open(bytes, limits, upright, pool)?;
        let (width, height) = encoded.size();
        Ok(Image { pixels: Pixels::Encoded(encoded), geometry: Geometry::whole(width, height), mirrored: [false; 2] })
    }

    /// Return width and height.
    pub fn size(&self) -> (usize, usize) {
        self.geometry.size()
    }

    /// Decode into `out`, which has exactly the required size.
    fn write(&self, out: &mut [u8]) -> Result<()> {
        match &self.pixels {
            Pixels::Encoded(encoded) => resize::decode(encoded, &self.geometry, out)?,
            Pixels::Rgb(data, width, height) => resize::resize_pixels(data, (*width, *height), 3, 8, &self.geometry, out)?,
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

    fn array(&self) -> Result<Array<'static>> {
        let (width, height) = self.size();
        Ok(Array::new(Cow::Owned(self.decode()?), Dtype::Uint8, &[height, width, 3]))
    }

    fn decode(&self) -> Result<Vec<u8>> {
        let (width, height) = self.size();
        let mut out = vec![0; width * height * 3];
        self.write(&mut out)?;
        Ok(out)
    }
}

impl<'a> Array<'a> {
    pub fn new(data: Cow<'a, [u8]>, dtype: Dtype, shape: &[usize]) -> Array<'a> {
        Array { data, dtype, cut: Cut::whole(shape) }
    }

    fn materialised(&self) -> Result<Vec<u8>> {
        let mut out = vec![0; self.cut.elements() * self.dtype.size()];
        cut::cut(&self.data, self.dtype, &self.cut, None, &mut out)?;
        Ok(out)
    }
}

/// A change of geometry, the same for all columns of a transform.
pub enum Motion {
    /// For each leading dimension, the start and size of the box.
    Crop {
        boxes: Vec<(i64, usize)>,
        fill: f64,
    },
    Resize(Resized),
    Mirror(usize),
}

/// Apply a motion to one column; `size` is the size of the leading column before the motion.
pub fn moved(item: &mut Item<'_>, motion: &Motion, size: &[usize]) -> Result<()> {
    if let Item::Image(image) = item
        && let Motion::Crop { boxes, .. } = motion
    {
        let (width, height) = image.size();
        let ([(top, h), (left, w)], true) = (&boxes[..], boxes.len() == 2) else { return Ok(()) };
        let inside = *top >= 0 && *left >= 0 && *top as usize + h <= height && *left as usize + w <= width && *h > 0 && *w > 0;
        if !inside {
            *item = Item::Array(image.array()?);
        }
    }
    match (item, motion) {
        (Item::Image(image), Motion::Crop { boxes, .. }) => {
            let (width, height) = image.size();
            let (top, h, left, w) = (boxes[0].0 as usize, boxes[0].1, boxes[1].0 as usize, boxes[1].1);
            // Mirroring comes last, so a mirrored image is cut from the opposite side.
            let left = if image.mirrored[0] { width - left - w } else { left };
            let top = if image.mirrored[1] { height - top - h } else { top };
            let window = &mut image.geometry.window;
            *window = Region { left: window.left + left, top: window.top + top, width: w, height: h };
            if image.geometry.resized.is_none() {
                let crop = &mut image.geometry.crop;
                let window = image.geometry.window;
                *crop = Region { left: crop.left + window.left, top: crop.top + window.top, width: w, height: h };
                image.geometry.window = Region::whole(w, h);
            }
        }
        (Item::Image(image), Motion::Resize(resized)) => {
            if image.size() == (resized.width, resized.height) {
                return Ok(());
            }
            // Nearest filters pick pixels of the mirrored image, so it is mirrored first: the origin is a different corner, and a tie at a
            // centre falls the other way.
            if image.geometry.resized.is_some() || (image.mirrored.contains(&true) && resized.filter.is_nearest()) {
                let (width, height) = image.size();
                let pixels = Pixels::Rgb(image.decode()?, width, height);
                *image = Image { pixels, geometry: Geometry::whole(width, height), mirrored: [false; 2] };
            }
            image.geometry.resized = Some(*resized);
            image.geometry.window = Region::whole(resized.width, resized.height);
        }
        (Item::Image(image), Motion::Mirror(dimension)) => image.mirrored[1 - dimension] ^= true,
        (Item::Array(array), Motion::Crop { boxes, fill }) => {
            let beyond = boxes.iter().zip(array.cut.size()).any(|((begin, wanted), size)| *begin < 0 || *begin as usize + wanted > *size);
            if beyond && (array.cut.fill != *fill || array.cut.is_narrowed()) {
                // Earlier padding keeps its fill, and the new box must not bring back pixels that were cut away.
                let (size, data) = (array.cut.size().to_vec(), array.materialised()?);
                *array = Array::new(Cow::Owned(data), array.dtype, &size);
                array.cut.fill = *fill;
            }
            boxes.iter().enumerate().for_each(|(dimension, (begin, size))| array.cut.narrow(dimension, *begin, *size));
        }
        (Item::Array(array), Motion::Mirror(dimension)) => array.cut.mirror(*dimension),
        (Item::Array(array), Motion::Resize(resized)) => {
            let (from_height, from_width) = (array.cut.size[0], array.cut.size[1]);
            let (height, width) = (resized.height, resized.width);
            if (from_height, from_width) == (height, width) {
                return Ok(());
            }
            // Class numbers of a mask must not be interpolated.
            let resized = if array.cut.rank == 3 { *resized } else { Resized { filter: Filter::Nearest, ..*resized } };
            let geometry =
                Geometry { crop: Region::whole(from_width, from_height), resized: Some(resized), window: Region::whole(width, height) };
            let (channels, size) = (array.cut.size[2], array.dtype.size()); // A mask's third size is 1.
            let mut out = vec![0; height * width * channels * size];
            resize::resize_pixels(&array.materialised()?, (from_width, from_height), channels, 8 * size as u8, &geometry, &mut out)?;
            *array = Array::new(Cow::Owned(out), array.dtype, &[height, width, channels][..array.cut.rank]);
        }
        (Item::Boxes(rows), motion) => rows.iter_mut().for_each(|row| {
            let [x1, y1, x2, y2] = *row;
            *row = match motion {
                Motion::Crop { boxes, .. } => {
                    let ((top, h), (left, w)) = (boxes[0], boxes[1]);
                    let x = |x: f32| (x - left as f32).clamp(0.0, w as f32);
                    let y = |y: f32| (y - top as f32).clamp(0.0, h as f32);
                    [x(x1), y(y1), x(x2), y(y2)]
                }
                Motion::Resize(Resized { width, height, .. }) => {
                    let (x, y) = (*width as f32 / size[1] as f32, *height as f32 / size[0] as f32);
                    [x1 * x, y1 * y, x2 * x, y2 * y]
                }
                Motion::Mirror(1) => [size[1] as f32 - x2, y1, size[1] as f32 - x1, y2],
                Motion::Mirror(_) => [x1, size[0] as f32 - y2, x2, size[0] as f32 - y1],
            }
        }),
        (Item::Points(numbers, [_, each]), motion) => numbers.chunks_exact_mut(*each).for_each(|point| match motion {
            Motion::Crop { boxes, .. } => {
                point[0] -= boxes[1].0 as f32;
                point[1] -= boxes[0].0 as f32;
            }
            Motion::Resize(Resized { width, height, .. }) => {
                point[0] *= *width as f32 / size[1] as f32;
                point[1] *= *height as f32 / size[0] as f32;
            }
            Motion::Mirror(1) => point[0] = size[1] as f32 - 1.0 - point[0],
            Motion::Mirror(_) => point[1] = size[0] as f32 - 1.0 - point[1],
        }),
        (Item::Null, _) => {}
    }
    Ok(())
}

/// Drop boxes that are too small, together with their rows in the other columns.
pub fn sanitise(items: &mut [Item<'_>], on: &[usize], min_size: f32, min_area: f32) -> Result<()> {
    let keep: Vec<bool> = match on.iter().find_map(|at| if let Item::Boxes(rows) = &items[*at] { Some(rows) } else { None }) {
        Some(rows) => {
            rows.iter().map(|[x1, y1, x2, y2]| x2 - x1 >= min_size && y2 - y1 >= min_size && (x2 - x1) * (y2 - y1) >= min_area).collect()
        }
        None => return Ok(()),
    };
    let kept = |index: &usize| keep[*index];
    for at in on {
        let rows = match &items[*at] {
            Item::Boxes(rows) => rows.len(),
            Item::Array(array) => array.cut.size().first().copied().unwrap_or(0),
            _ => keep.len(),
        };
        if rows != keep.len() {
            return Err(Error::new("invalid-value", format!("{} boxes, but {rows} rows in a column that follows them", keep.len())));
        }
        match &mut items[*at] {
            Item::Boxes(rows) => *rows = (0..rows.len()).filter(kept).map(|index| rows[index]).collect(),
            Item::Array(array) => {
                let (data, mut size) = (array.materialised()?, array.cut.size().to_vec());
                let row_bytes = data.len().checked_div(keep.len()).unwrap_or(0);
                let data = (0..keep.len()).filter(kept).flat_map(|index| data[index * row_bytes..][..row_bytes].to_vec()).collect();
                size[0] = keep.iter().filter(|keep| **keep).count();
                *array = Array::new(Cow::Owned(data), array.dtype, &size);
            }
            Item::Points(numbers, _) => {
                let each = numbers.len().checked_div(keep.len()).unwrap_or(0);
                *numbers = (0..keep.len()).filter(kept).flat_map(|index| numbers[index * each..][..each].to_vec()).collect();
            }
            _ => {}
        }
    }
    Ok(())
}

impl Item<'_> {
    pub fn is_null(&self) -> bool {
        matches!(self, Item::Null)
    }

    /// Write an image or array into its place in the batch. Refuses any shape other than `shape`.
    pub fn write(&self, shape: &[usize], convert: Option<&Convert>, dtype: Dtype, out: &mut [u8]) -> Result<()> {
        let refuse = |found: &[usize]| Err(Error::new("invalid-value", format!("its shape is {found:?}, expected {shape:?}")));
        match self {
            Item::Image(image) if convert.is_some() => Item::Array(image.array()?).write(shape, convert, dtype, out),
            Item::Image(image) => {
                let (width, height) = image.size();
                if [height, width, 3] == shape { image.write(out) } else { refuse(&[height, width, 3]) }
            }
            Item::Array(array) if array.cut.size() != shape => refuse(array.cut.size()),
            Item::Array(array) if convert.is_none() && array.dtype != dtype => {
                let text = format!("its values are {}, expected {}", array.dtype.name(), dtype.name());
                Err(Error::new("invalid-value", text).hint("add ToDtype"))
            }
            Item::Array(array) => cut::cut(&array.data, array.dtype, &array.cut, convert, out),
            _ => Err(Error::new("internal", "there is no array to write")),
        }
    }

    /// Return bytes, dtype and shape, for results whose shape differs between samples; None for a null.
    pub fn loose(self, convert: Option<&Convert>, boxes: &str) -> Result<Option<Loose>> {
        let bytes = |numbers: &[f32]| numbers.iter().flat_map(|number| number.to_ne_bytes()).collect::<Vec<u8>>();
        Ok(Some(match self {
            Item::Null => return Ok(None),
            Item::Image(image) if convert.is_some() => return Item::Array(image.array()?).loose(convert, boxes),
            Item::Image(image) => {
                let (width, height) = image.size();
                (image.decode()?, Dtype::Uint8, vec![height as u64, width as u64, 3])
            }
            Item::Array(array) => {
                let to = convert.map_or(array.dtype, |convert| convert.to);
                let mut out = vec![0; array.cut.elements() * to.size()];
                cut::cut(&array.data, array.dtype, &array.cut, convert, &mut out)?;
                (out, to, array.cut.size().iter().map(|size| *size as u64).collect())
            }
            Item::Boxes(rows) => {
                let numbers: Vec<f32> = rows.iter().flat_map(|row| from_xyxy(*row, boxes)).collect();
                (bytes(&numbers), Dtype::Float32, vec![rows.len() as u64, 4])
            }
            Item::Points(numbers, [points, each]) => {
                let objects = numbers.len().checked_div(points * each).unwrap_or(0);
                (bytes(&numbers), Dtype::Float32, vec![objects as u64, points as u64, each as u64])
            }
        }))
    }
}

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

/// Decode a mask into class numbers, (H, W).
pub fn mask(bytes: &[u8], limits: Limits) -> Result<Array<'static>> {
    let Picture { height, width, bits, data, .. } = decode_mask(bytes, limits)?;
    Ok(Array::new(Cow::Owned(data), dtype_of(bits), &[height, width]))
}

/// Wrap a decoded image as an array, (H, W, C).
pub fn picture(picture: Picture) -> Array<'static> {
    let Picture { height, width, channels, bits, data } = picture;
    Array::new(Cow::Owned(data), dtype_of(bits), &[height, width, channels])
}

fn dtype_of(bits: u8) -> Dtype {
    if bits == 16 { Dtype::Uint16 } else { Dtype::Uint8 }
}
