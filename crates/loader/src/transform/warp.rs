//! Rotations and other affine changes of an image, and the way of its boxes and points along with it.
//!
//! Coordinates are those of the borders of pixels: the centre of the first pixel is (0.5, 0.5). The arithmetic follows torchvision v2
//! on uint8 tensors, but positions have 64 bits. Keypoints name pixels, so their coordinates are half a pixel smaller.

use std::borrow::Cow;
use std::ops::Range;

use penstock_error::{Error, Result};
use penstock_tensor::Dtype;
use serde::Deserialize;

use crate::order::random::Draws;
use crate::transform::cell::CutArray;

/// The parameters of RandomRotation and RandomAffine. Angles are in degrees.
#[derive(Debug, Clone, Deserialize)]
pub struct Affine {
    /// Whether it is a RandomRotation: positive angles turn it anticlockwise. Those of RandomAffine turn it clockwise.
    pub rotation: bool,
    degrees: [f64; 2],
    /// The largest shifts, relative to the width and the height.
    translate: Option<[f64; 2]>,
    scale: Option<[f64; 2]>,
    /// The ranges of the angles along x and y.
    shear: Option<[[f64; 2]; 2]>,
    /// Whether to mix four pixels, instead of choosing the nearest one.
    bilinear: bool,
    /// Whether the result is large enough for the whole image.
    pub expand: bool,
    /// The fixed point (x, y), or None for the centre.
    center: Option<[f64; 2]>,
    /// One value for all channels, or one per channel.
    pub fill: Vec<f32>,
    pub mask_fill: f32,
}

/// The largest scale, and the farthest centre in pixels. Beyond them, positions would lose their fractions.
const FAR: f64 = 1e6;

/// A linear map and a shift: x' = m[0] x + m[1] y + m[2], y' = m[3] x + m[4] y + m[5].
type Matrix = [f64; 6];

/// An affine change whose random numbers have been drawn.
pub struct Warp {
    /// From the image to the result.
    forward: Matrix,
    /// From the result to the image.
    back: Matrix,
    pub height: usize,
    pub width: usize,
    bilinear: bool,
    fill: Vec<f32>,
    mask_fill: f32,
}

impl Affine {
    pub fn name(&self) -> &'static str {
        if self.rotation { "RandomRotation" } else { "RandomAffine" }
    }

    /// Return what is wrong with the parameters, or None.
    pub fn wrong(&self) -> Option<String> {
        let ordered =
            |range: &[f64; 2], low: f64, high: f64| low <= range[0] && range[0] <= range[1] && range[1] <= high;
        if !ordered(&self.degrees, -FAR, FAR) {
            return Some(format!(
                "degrees={:?}, expected (low, high) with low <= high, from -{FAR} to {FAR}",
                self.degrees
            ));
        }
        if let Some(shifts) = self.translate.filter(|shifts| !shifts.iter().all(|shift| (0.0..=1.0).contains(shift))) {
            return Some(format!("translate={shifts:?}, expected two numbers from 0 to 1"));
        }
        if let Some(scale) = self.scale.filter(|scale| !ordered(scale, 1.0 / FAR, FAR)) {
            return Some(format!(
                "scale={scale:?}, expected (low, high) with 0 < low <= high, from {} to {FAR}",
                1.0 / FAR
            ));
        }
        if let Some(shear) = self.shear.filter(|shear| !shear.iter().all(|range| ordered(range, -89.0, 89.0))) {
            return Some(format!("shear={shear:?}, expected angles from -89 to 89, with low <= high"));
        }
        if self.expand && self.center.is_some() {
            return Some("expand=True shows the whole image, so center has no meaning: leave it out".into());
        }
        let far = |center: &[f64; 2]| !center.iter().all(|place| place.abs() <= FAR);
        self.center.filter(far).map(|center| format!("center={center:?}, expected two numbers from -{FAR} to {FAR}"))
    }

    /// Draw the random numbers for an image of the given size, in the order of torchvision.
    pub fn drawn(&self, height: usize, width: usize, draws: &mut Draws) -> Warp {
        let (w, h) = (width as f64, height as f64);
        let angle = draws.between(self.degrees[0], self.degrees[1]);
        let mut shift = |most: f64| if most > 0.0 { draws.between(-most, most).round_ties_even() } else { 0.0 };
        let shifts = self.translate.map_or([0.0; 2], |[x, y]| [shift(x * w), shift(y * h)]);
        let scale = self.scale.map_or(1.0, |[low, high]| draws.between(low, high));
        let shear = self.shear.map_or([0.0; 2], |ranges| ranges.map(|[low, high]| draws.between(low, high)));
        let linear = linear(if self.rotation { -angle } else { angle }, scale, shear);
        // Both matrices are relative to the centre of the image, until they are moved to its corner.
        let [x, y] = self.center.map_or([0.0; 2], |[x, y]| [x - w / 2.0, y - h / 2.0]);
        let [a, b, c, d] = linear;
        let forward = [a, b, shifts[0] + x - a * x - b * y, c, d, shifts[1] + y - c * x - d * y];
        let (to_height, to_width) = if self.expand { expanded(&inverse(&forward), h, w) } else { (height, width) };
        let forward = moved(&forward, [w / 2.0, h / 2.0], [to_width as f64 / 2.0, to_height as f64 / 2.0]);
        Warp {
            forward,
            back: inverse(&forward),
            height: to_height,
            width: to_width,
            bilinear: self.bilinear,
            fill: self.fill.clone(),
            mask_fill: self.mask_fill,
        }
    }
}

/// Return the matrix [a, b, c, d] that shears along x, then along y, scales, and turns clockwise.
fn linear(angle: f64, scale: f64, shear: [f64; 2]) -> [f64; 4] {
    let (sine, cosine) = turn(angle);
    let [x, y] = shear.map(|angle| angle.to_radians().tan());
    // Shearing along y, and then turning.
    let (a, c) = (cosine + sine * y, sine - cosine * y);
    [a, -a * x - sine, c, cosine - c * x].map(|number| number * scale)
}

/// Return sine and cosine of an angle in degrees. They are exact for multiples of 90.
fn turn(degrees: f64) -> (f64, f64) {
    match degrees.rem_euclid(360.0) {
        0.0 => (0.0, 1.0),
        90.0 => (1.0, 0.0),
        180.0 => (0.0, -1.0),
        270.0 => (-1.0, 0.0),
        _ => degrees.to_radians().sin_cos(),
    }
}

fn applied(m: &Matrix, x: f64, y: f64) -> (f64, f64) {
    (m[0] * x + m[1] * y + m[2], m[3] * x + m[4] * y + m[5])
}

fn inverse(m: &Matrix) -> Matrix {
    let det = m[0] * m[4] - m[1] * m[3];
    let [a, b, c, d] = [m[4] / det, -m[1] / det, -m[3] / det, m[0] / det];
    [a, b, -a * m[2] - b * m[5], c, d, -c * m[2] - d * m[5]]
}

/// Give a matrix other origins: `from` in its arguments, and `to` in its results.
fn moved(m: &Matrix, from: [f64; 2], to: [f64; 2]) -> Matrix {
    let (x, y) = applied(m, -from[0], -from[1]);
    [m[0], m[1], x + to[0], m[3], m[4], y + to[1]]
}

/// Return the height and width of a result that shows the whole image. SourcePixels: torchvision, which applies the map from the result to
/// the image to its corners, and ignores what is below a ten-thousandth of a pixel.
fn expanded(back: &Matrix, height: f64, width: f64) -> (usize, usize) {
    if back[0] == 0.0 && back[4] == 0.0 {
        return (width as usize, height as usize); // A quarter turn. Rounding the corners would add a pixel.
    }
    let corners =
        [(-0.5, -0.5), (-0.5, 0.5), (0.5, 0.5), (0.5, -0.5)].map(|(x, y)| applied(back, x * width, y * height));
    let side_length = |places: [f64; 4], size: f64| {
        let [low, high] = ends(places.map(|place| ((place + size / 2.0) * 1e4).trunc() * 1e-4));
        (high.ceil() - low.floor()).max(1.0) as usize
    };
    (side_length(corners.map(|corner| corner.1), height), side_length(corners.map(|corner| corner.0), width))
}

/// Return the lowest and the highest coordinate.
fn ends(places: [f64; 4]) -> [f64; 2] {
    [places.into_iter().fold(f64::INFINITY, f64::min), places.into_iter().fold(f64::NEG_INFINITY, f64::max)]
}

impl Warp {
    /// Return the box around the four moved corners of a box, cut at the borders of the result.
    pub fn moved_box(&self, [x1, y1, x2, y2]: [f32; 4]) -> [f32; 4] {
        let corners = [(x1, y1), (x2, y1), (x2, y2), (x1, y2)].map(|(x, y)| applied(&self.forward, x.into(), y.into()));
        if corners.iter().any(|(x, y)| !(x + y).is_finite()) {
            return [f32::NAN; 4]; // `ends` would skip a coordinate that is not a number.
        }
        let side_length =
            |places: [f64; 4], size: usize| ends(places).map(|place| place.clamp(0.0, size as f64) as f32);
        let [left, right] = side_length(corners.map(|corner| corner.0), self.width);
        let [top, bottom] = side_length(corners.map(|corner| corner.1), self.height);
        [left, top, right, bottom]
    }

    pub fn move_point(&self, point: &mut [f32]) {
        let (x, y) = applied(&self.forward, f64::from(point[0]) + 0.5, f64::from(point[1]) + 0.5);
        (point[0], point[1]) = ((x - 0.5) as f32, (y - 0.5) as f32);
    }

    /// Change an image (height, width, channels), or a mask (height, width). Masks use the nearest pixel.
    pub fn array(&self, array: &CutArray<'_>) -> Result<CutArray<'static>> {
        let size = array.cut.size();
        let (channels, is_mask) = (array.cut.size[2], size.len() == 2); // A mask's third size is 1.
        let (bilinear, fill) = if is_mask { (false, vec![self.mask_fill]) } else { (self.bilinear, self.fill.clone()) };
        let fill: Vec<f32> = fill.iter().copied().cycle().take(channels).collect();
        let pixels =
            if array.cut.is_whole() { Cow::Borrowed(&array.data[..]) } else { Cow::Owned(array.materialised()?) };
        let source = SourcePixels { bytes: &pixels, height: size[0], width: size[1], channels, fill: &fill };
        let made = match (array.dtype, channels) {
            (Dtype::Uint8, 1) => self.filled::<u8, 1>(&source, bilinear),
            (Dtype::Uint8, 3) => self.filled::<u8, 3>(&source, bilinear),
            (Dtype::Uint8, _) => self.filled::<u8, 0>(&source, bilinear),
            (Dtype::Uint16, _) => self.filled::<u16, 0>(&source, bilinear),
            (Dtype::Float32, _) => self.filled::<f32, 0>(&source, bilinear),
            (dtype, _) => {
                return Err(Error::new("invalid-value", format!("cannot turn pixels of dtype {}", dtype.name())));
            }
        };
        Ok(CutArray::new(Cow::Owned(made), array.dtype, &[self.height, self.width, channels][..size.len()]))
    }

    /// Return the pixels of the result. `CHANNELS` is the number of channels, or 0 if it is known only at run time.
    fn filled<V: Value, const CHANNELS: usize>(&self, source: &SourcePixels<'_>, bilinear: bool) -> Vec<u8> {
        let channels = if CHANNELS == 0 { source.channels } else { CHANNELS };
        let mut beyond = vec![0; channels * V::SIZE];
        source.fill.iter().enumerate().for_each(|(channel, value)| V::write(*value, &mut beyond, channel));
        let mut out = vec![0; self.height * self.width * channels * V::SIZE];
        for (row, out) in out.chunks_exact_mut((self.width * channels * V::SIZE).max(1)).enumerate() {
            // The place in the image of the first pixel of the row. From here on, whole numbers are the centres of pixels.
            let (x, y) = applied(&self.back, 0.5, row as f64 + 0.5);
            let (x, y) = (x - 0.5, y - 0.5);
            let place = |column: usize| (x + self.back[0] * column as f64, y + self.back[3] * column as f64);
            // Plain loops, because the compiler does not inline closures into the adapters of iterators here.
            let size = channels * V::SIZE;
            let inner = if bilinear {
                let across = within(x, self.back[0], source.width, self.width);
                let down = within(y, self.back[3], source.height, self.width);
                across.start.max(down.start)..across.end.min(down.end)
            } else {
                0..0
            };
            let inner = inner.start..inner.end.max(inner.start);
            for column in (0..inner.start).chain(inner.end..self.width) {
                let pixel = &mut out[column * size..(column + 1) * size];
                if bilinear {
                    source.bilinear::<V, CHANNELS>(place(column), &beyond, pixel);
                } else {
                    source.nearest::<V, CHANNELS>(place(column), &beyond, pixel);
                }
            }
            let pixels = &mut out[inner.start * size..inner.end * size];
            source.inner::<V, CHANNELS>(place(inner.start), (self.back[0], self.back[3]), &beyond, pixels);
        }
        out
    }
}

/// Return the columns of a row at which a coordinate, and the next larger whole number, are inside the image. Leaves out columns at which
/// rounding might decide.
fn within(start: f64, step: f64, size: usize, columns: usize) -> Range<usize> {
    let most = size as f64 - 1.0;
    if step == 0.0 {
        return if (0.0..most).contains(&start) { 0..columns } else { 0..0 };
    }
    let ends = [-start / step, (most - start) / step];
    let column = |place: f64| place.clamp(0.0, columns as f64) as usize;
    column(ends[0].min(ends[1]).ceil() + 1.0)..column(ends[0].max(ends[1]).floor())
}

/// Pixels to read, and the values beyond their borders.
struct SourcePixels<'a> {
    bytes: &'a [u8],
    height: usize,
    width: usize,
    channels: usize,
    fill: &'a [f32],
}

impl SourcePixels<'_> {
    /// Return the bytes of a pixel, or None outside the image.
    #[inline(always)]
    fn pixel<V: Value, const CHANNELS: usize>(&self, x: i64, y: i64) -> Option<&[u8]> {
        let size = if CHANNELS == 0 { self.channels } else { CHANNELS } * V::SIZE;
        let inside = (x as u64) < self.width as u64 && (y as u64) < self.height as u64;
        if inside { self.bytes[(y as usize * self.width + x as usize) * size..].get(..size) } else { None }
    }

    #[inline(always)]
    fn nearest<V: Value, const CHANNELS: usize>(&self, (x, y): (f64, f64), beyond: &[u8], out: &mut [u8]) {
        // Adding and subtracting this number rounds half to even.
        const WHOLE: f64 = 6_755_399_441_055_744.0;
        let (x, y) = ((x + WHOLE) - WHOLE, (y + WHOLE) - WHOLE);
        match self.pixel::<V, CHANNELS>(x as i64, y as i64) {
            Some(pixel) => out.copy_from_slice(pixel),
            None => out.copy_from_slice(beyond),
        }
    }

    /// Mix four pixels for each pixel of a part of a row, where all of them are inside the image. Positions are counted in parts of 2^-32.
    #[inline(always)]
    fn inner<V: Value, const CHANNELS: usize>(
        &self,
        from: (f64, f64),
        step: (f64, f64),
        beyond: &[u8],
        out: &mut [u8],
    ) {
        let channels = if CHANNELS == 0 { self.channels } else { CHANNELS };
        let (pixel, row) = (channels * V::SIZE, self.width * channels * V::SIZE);
        let counted = |place: f64| (place * 4_294_967_296.0) as i64;
        let (mut x, mut y, right, down) = (counted(from.0), counted(from.1), counted(step.0), counted(step.1));
        let fraction = |place: i64| ((place >> 8) as i32 & 0xff_ffff) as f32 * (1.0 / 16_777_216.0);
        for column in 0..out.len() / pixel {
            // Where rounding leaves the image after all, this is beyond the pixels.
            let begin = ((y >> 32) as usize).wrapping_mul(row).wrapping_add(((x >> 32) as usize).wrapping_mul(pixel));
            let (across, lower) = (fraction(x), fraction(y));
            let weights =
                [(1.0 - across) * (1.0 - lower), across * (1.0 - lower), (1.0 - across) * lower, across * lower];
            let place = column * pixel;
            // For pixels of three bytes, the compiler uses vector instructions for the byte after them as well.
            let more = usize::from(CHANNELS == 3 && V::SIZE == 1);
            let group = |begin: usize| self.bytes.get(begin..begin.wrapping_add(2 * pixel + more));
            let (above, below) = (group(begin), group(begin.wrapping_add(row)));
            let (Some(above), Some(below)) = (above, below) else {
                let place_of = |from: f64, step: f64| from + step * column as f64;
                self.bilinear::<V, CHANNELS>(
                    (place_of(from.0, step.0), place_of(from.1, step.1)),
                    beyond,
                    &mut out[place..place + pixel],
                );
                continue;
            };
            if let ([a, b, c, d, e, f, g], [h, i, j, k, l, m, n], true) = (above, below, more == 1) {
                let bytes = mixed([[*a, *b, *c, *d], [*d, *e, *f, *g], [*h, *i, *j, *k], [*k, *l, *m, *n]], weights);
                match out.get_mut(place..place + 4) {
                    Some(out) => out.copy_from_slice(&bytes), // The next pixel overwrites the fourth byte.
                    None => out[place..].copy_from_slice(&bytes[..3]),
                }
            } else {
                for channel in 0..channels {
                    let upper = V::read(above, channel) * weights[0] + V::read(above, channels + channel) * weights[1];
                    let value =
                        upper + V::read(below, channel) * weights[2] + V::read(below, channels + channel) * weights[3];
                    V::write(value, &mut out[place..place + pixel], channel);
                }
            }
            (x, y) = (x + right, y + down);
        }
    }

    #[inline(always)]
    fn bilinear<V: Value, const CHANNELS: usize>(&self, (x, y): (f64, f64), beyond: &[u8], out: &mut [u8]) {
        if x <= -1.0 || y <= -1.0 || x >= self.width as f64 || y >= self.height as f64 {
            return out.copy_from_slice(beyond);
        }
        let channels = if CHANNELS == 0 { self.channels } else { CHANNELS };
        let (left, top) = (floor(x), floor(y));
        let (right, lower) = ((x - left as f64) as f32, (y - top as f64) as f32);
        let weights = [(1.0 - right) * (1.0 - lower), right * (1.0 - lower), (1.0 - right) * lower, right * lower];
        let places = [(left, top), (left + 1, top), (left, top + 1), (left + 1, top + 1)];
        let pixels = places.map(|(x, y)| self.pixel::<V, CHANNELS>(x, y));
        // As torchvision does, pixels beyond the border count as 0, and the result is then mixed with the fill value.
        let share: f32 =
            pixels.iter().zip(weights).map(|(pixel, weight)| if pixel.is_some() { weight } else { 0.0 }).sum();
        for channel in 0..channels {
            let value = |pixel: &Option<&[u8]>| pixel.map_or(0.0, |pixel| V::read(pixel, channel));
            let sum: f32 = pixels.iter().zip(weights).map(|(pixel, weight)| value(pixel) * weight).sum();
            V::write(self.fill[channel] + (sum - self.fill[channel]) * share, out, channel);
        }
    }
}

/// Mix four groups of four bytes. The compiler uses vector instructions for lists of this length, so pixels of three bytes are read with
/// the byte after them.
#[inline(always)]
fn mixed(groups: [[u8; 4]; 4], weights: [f32; 4]) -> [u8; 4] {
    let mut sums = [0f32; 4];
    for number in 0..4 {
        for channel in 0..4 {
            sums[channel] += f32::from(groups[number][channel]) * weights[number];
        }
    }
    // From 2^23 on, all floats are whole, so adding it rounds half to even.
    let mut bytes = [0; 4];
    for channel in 0..4 {
        bytes[channel] = (sums[channel] + 8_388_608.0).to_bits() as u8;
    }
    bytes
}

#[inline(always)]
fn floor(value: f64) -> i64 {
    let whole = value as i64;
    whole - i64::from(value < whole as f64)
}

/// The value of one channel of a pixel.
trait Value {
    const SIZE: usize;
    fn read(bytes: &[u8], at: usize) -> f32;
    /// Round half to even, unless values are floats.
    fn write(value: f32, bytes: &mut [u8], at: usize);
}

/// Round half to even. Adding this number moves the fraction out of a float, which needs no call.
#[inline(always)]
fn rounded(value: f32) -> f32 {
    const WHOLE: f32 = 12_582_912.0;
    (value + WHOLE) - WHOLE
}

impl Value for u8 {
    const SIZE: usize = 1;
    #[inline(always)]
    fn read(bytes: &[u8], at: usize) -> f32 {
        bytes[at].into()
    }
    #[inline(always)]
    fn write(value: f32, bytes: &mut [u8], at: usize) {
        bytes[at] = rounded(value) as u8;
    }
}

impl Value for u16 {
    const SIZE: usize = 2;
    #[inline(always)]
    fn read(bytes: &[u8], at: usize) -> f32 {
        u16::from_ne_bytes([bytes[2 * at], bytes[2 * at + 1]]).into()
    }
    #[inline(always)]
    fn write(value: f32, bytes: &mut [u8], at: usize) {
        bytes[2 * at..2 * at + 2].copy_from_slice(&(rounded(value) as u16).to_ne_bytes());
    }
}

impl Value for f32 {
    const SIZE: usize = 4;
    #[inline(always)]
    fn read(bytes: &[u8], at: usize) -> f32 {
        let bytes = &bytes[4 * at..4 * at + 4];
        f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
    }
    #[inline(always)]
    fn write(value: f32, bytes: &mut [u8], at: usize) {
        bytes[4 * at..4 * at + 4].copy_from_slice(&value.to_ne_bytes());
    }
}
