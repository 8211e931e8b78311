//! Cuts a box out of an n-dimensional array. A single pass pads and mirrors the box, converts its values to another dtype, and
//! writes them to the output.

use std::cell::RefCell;

use half::{bf16, f16};
use penstock_error::{Error, Result};
use penstock_tensor::Dtype;

/// Maximum number of dimensions that `cut` supports.
pub const MAX_RANK: usize = 8;

/// A box in an array. Elements of the box that are outside the array get the value `fill`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cut {
    pub rank: usize,
    pub shape: [usize; MAX_RANK],
    pub origin: [i64; MAX_RANK],
    pub size: [usize; MAX_RANK],
    pub mirrored: [bool; MAX_RANK],
    pub fill: f64,
}

impl Cut {
    /// Return the box that covers a whole array.
    pub fn whole(shape: &[usize]) -> Cut {
        let mut cut = Cut {
            rank: shape.len(),
            shape: [1; MAX_RANK],
            origin: [0; MAX_RANK],
            size: [1; MAX_RANK],
            mirrored: [false; MAX_RANK],
            fill: 0.0,
        };
        cut.shape[..shape.len()].copy_from_slice(shape);
        cut.size[..shape.len()].copy_from_slice(shape);
        cut
    }

    pub fn size(&self) -> &[usize] {
        &self.size[..self.rank]
    }

    /// Return the number of elements in the box.
    pub fn elements(&self) -> usize {
        self.size().iter().product()
    }

    /// Narrow the box in one dimension to `size` elements starting at `begin`, counted after mirroring.
    pub fn narrow(&mut self, dimension: usize, begin: i64, size: usize) {
        let begin = if self.mirrored[dimension] { self.size[dimension] as i64 - begin - size as i64 } else { begin };
        self.origin[dimension] += begin;
        self.size[dimension] = size;
    }

    pub fn mirror(&mut self, dimension: usize) {
        self.mirrored[dimension] = !self.mirrored[dimension];
    }

    /// Return whether the cut is the array as it is.
    pub fn is_whole(&self) -> bool {
        !(0..self.rank).any(|dimension| self.changed(dimension))
    }

    /// Return whether the box differs from the whole array.
    pub fn is_narrowed(&self) -> bool {
        (0..self.rank).any(|dimension| self.origin[dimension] != 0 || self.size[dimension] != self.shape[dimension])
    }

    fn changed(&self, dimension: usize) -> bool {
        self.mirrored[dimension] || self.origin[dimension] != 0 || self.size[dimension] != self.shape[dimension]
    }
}

/// A conversion to another dtype that computes value · scale + bias. Either each channel (in the last dimension) has its own
/// factors, or all values share one pair.
#[derive(Debug, Clone, PartialEq)]
pub struct Convert {
    pub to: Dtype,
    pub scale: Vec<f32>,
    pub bias: Vec<f32>,
}

impl Convert {
    /// Return a conversion that only changes the dtype.
    pub fn cast(to: Dtype) -> Convert {
        Convert { to, scale: vec![1.0], bias: vec![0.0] }
    }

    /// Extend the conversion with (value - mean) / std.
    pub fn normalise(&mut self, mean: &[f32], std: &[f32]) {
        let channels = self.scale.len().max(mean.len()).max(std.len());
        // A list of one number is that of all channels.
        let repeated = |list: &[f32]| list.iter().copied().cycle().take(channels).collect::<Vec<f32>>();
        let (mean, std) = (repeated(mean), repeated(std));
        self.scale = repeated(&self.scale).iter().zip(&std).map(|(scale, std)| scale / std).collect();
        self.bias =
            repeated(&self.bias).iter().zip(&mean).zip(&std).map(|((bias, mean), std)| (bias - mean) / std).collect();
    }

    fn is_plain(&self) -> bool {
        self.scale.iter().all(|scale| *scale == 1.0) && self.bias.iter().all(|bias| *bias == 0.0)
    }
}

thread_local! {
    static ROW: RefCell<Row> = const { RefCell::new(Row { bytes: Vec::new(), of: (Vec::new(), Vec::new()), scale: Vec::new(), bias: Vec::new() }) };
}

struct Row {
    bytes: Vec<u8>,
    /// The factors per channel, before they are repeated in `scale` and `bias`.
    of: (Vec<f32>, Vec<f32>),
    /// The factors for each element in a row, so that the conversion loop needs no channel index.
    scale: Vec<f32>,
    bias: Vec<f32>,
}

/// Write a box of `source`, an array of `dtype`, into `out`.
pub fn cut(source: &[u8], dtype: Dtype, cut: &Cut, convert: Option<&Convert>, out: &mut [u8]) -> Result<()> {
    let convert = convert.filter(|convert| convert.to != dtype || !convert.is_plain());
    let changed = (0..cut.rank).rev().find(|dimension| cut.changed(*dimension));
    // Converted rows span at most two dimensions, so that their factors stay in the CPU cache.
    let inner = changed.unwrap_or(0).max(if convert.is_some() { cut.rank.saturating_sub(2) } else { 0 });
    if cut.rank == 0 || (convert.is_none() && changed.is_none()) {
        match convert {
            None => out.copy_from_slice(source),
            Some(convert) => ROW.with_borrow_mut(|row| {
                row.factors(convert, 1);
                convert_row(source, dtype, &row.scale, &row.bias, convert.to, out)
            })?,
        }
        return Ok(());
    }
    // The box fully covers the dimensions after `inner`, so they form one cell. A row is a line of cells along `inner`.
    let cell = cut.shape[inner + 1..cut.rank].iter().product::<usize>() * dtype.size();
    let row_elements = cut.size[inner..cut.rank].iter().product::<usize>();
    let rows: usize = cut.size[..inner].iter().product();
    let out_bytes = row_elements * convert.map_or(dtype, |convert| convert.to).size();
    if out_bytes == 0 || rows == 0 {
        return Ok(());
    }
    ROW.with_borrow_mut(|scratch| {
        if let Some(convert) = convert {
            let channels = convert.scale.len();
            let last = cut.size[cut.rank - 1];
            if channels > 1 && channels != last {
                return Err(Error::new(
                    "invalid-argument",
                    format!("cannot normalise: values have {last} channels, expected {channels}"),
                ));
            }
            scratch.factors(convert, row_elements);
        }
        let Row { bytes, scale, bias, .. } = scratch;
        let mut index = [0usize; MAX_RANK];
        for out in out.chunks_exact_mut(out_bytes) {
            let row = row_begin(cut, inner, &index).map(|begin| &source[begin * cell..]);
            match convert {
                None => cut_row(row, cell, dtype, cut, inner, out)?,
                Some(convert) => match whole_row(row, cell, cut, inner) {
                    Some(row) => convert_row(row, dtype, scale, bias, convert.to, out)?,
                    None => {
                        bytes.resize(row_elements * dtype.size(), 0);
                        cut_row(row, cell, dtype, cut, inner, bytes)?;
                        convert_row(bytes, dtype, scale, bias, convert.to, out)?;
                    }
                },
            }
            for dimension in (0..inner).rev() {
                index[dimension] += 1;
                if index[dimension] < cut.size[dimension] {
                    break;
                }
                index[dimension] = 0;
            }
        }
        Ok(())
    })
}

impl Row {
    fn factors(&mut self, convert: &Convert, elements: usize) {
        let channels = convert.scale.len();
        if self.scale.len() != elements || self.of.0 != convert.scale || self.of.1 != convert.bias {
            self.of = (convert.scale.clone(), convert.bias.clone());
            self.scale = (0..elements).map(|at| convert.scale[at % channels]).collect();
            self.bias = (0..elements).map(|at| convert.bias[at % channels]).collect();
        }
    }
}

/// Return the source cell at which row `index` begins (at position 0 along `inner`), or None if the row is outside the array.
#[inline]
fn row_begin(cut: &Cut, inner: usize, index: &[usize; MAX_RANK]) -> Option<usize> {
    let mut begin = 0;
    for (dimension, at) in index.iter().enumerate().take(inner) {
        let at = if cut.mirrored[dimension] { cut.size[dimension] - 1 - at } else { *at };
        let at = at as i64 + cut.origin[dimension];
        if at < 0 || at >= cut.shape[dimension] as i64 {
            return None;
        }
        begin = (begin + at as usize) * cut.shape[dimension + 1];
    }
    Some(begin)
}

/// Return the required part of a row, or None if the row needs mirroring or padding. `row` is the source data from the start of
/// the row, or None for a row outside the array.
#[inline]
fn whole_row<'a>(row: Option<&'a [u8]>, cell: usize, cut: &Cut, inner: usize) -> Option<&'a [u8]> {
    let (origin, size) = (cut.origin[inner], cut.size[inner]);
    if cut.mirrored[inner] || origin < 0 || origin as usize + size > cut.shape[inner] {
        return None;
    }
    Some(&row?[origin as usize * cell..][..size * cell])
}

/// Copy the required part of a row to `out`, mirrored and padded as `cut` specifies.
fn cut_row(row: Option<&[u8]>, cell: usize, dtype: Dtype, cut: &Cut, inner: usize, out: &mut [u8]) -> Result<()> {
    let (origin, size, there) = (cut.origin[inner], cut.size[inner], cut.shape[inner] as i64);
    let (low, high) = ((-origin).clamp(0, size as i64) as usize, (there - origin).clamp(0, size as i64) as usize);
    let Some(row) = row.filter(|_| low < high) else { return fill(out, cut.fill, dtype) };
    let row = &row[(origin + low as i64) as usize * cell..][..(high - low) * cell];
    if cut.mirrored[inner] {
        let (low, high) = (size - high, size - low);
        fill(&mut out[..low * cell], cut.fill, dtype)?;
        fill(&mut out[high * cell..], cut.fill, dtype)?;
        mirror(row, cell, &mut out[low * cell..high * cell]);
    } else {
        fill(&mut out[..low * cell], cut.fill, dtype)?;
        fill(&mut out[high * cell..], cut.fill, dtype)?;
        out[low * cell..high * cell].copy_from_slice(row);
    }
    Ok(())
}

/// Copy cells in reverse order.
fn mirror(row: &[u8], cell: usize, out: &mut [u8]) {
    match cell {
        1 => out.iter_mut().zip(row.iter().rev()).for_each(|(out, byte)| *out = *byte),
        3 => out
            .as_chunks_mut::<3>()
            .0
            .iter_mut()
            .zip(row.as_chunks::<3>().0.iter().rev())
            .for_each(|(out, pixel)| *out = *pixel),
        4 => out
            .as_chunks_mut::<4>()
            .0
            .iter_mut()
            .zip(row.as_chunks::<4>().0.iter().rev())
            .for_each(|(out, pixel)| *out = *pixel),
        _ => out
            .chunks_exact_mut(cell)
            .zip(row.chunks_exact(cell).rev())
            .for_each(|(out, pixel)| out.copy_from_slice(pixel)),
    }
}

fn fill(out: &mut [u8], value: f64, dtype: Dtype) -> Result<()> {
    if value == 0.0 {
        out.fill(0);
        return Ok(());
    }
    out.chunks_exact_mut(dtype.size()).try_for_each(|out| store(out, dtype, value))
}

fn convert_row(row: &[u8], dtype: Dtype, scale: &[f32], bias: &[f32], to: Dtype, out: &mut [u8]) -> Result<()> {
    if scale.len() == 1 {
        let (scale, bias) = (scale[0], bias[0]);
        return match (dtype, to) {
            (Dtype::Uint8, Dtype::Float32) => {
                let out = out.as_chunks_mut::<4>().0;
                out.iter_mut()
                    .zip(row)
                    .for_each(|(out, value)| *out = (f32::from(*value) * scale + bias).to_ne_bytes());
                Ok(())
            }
            _ => general(row, dtype, |_| (scale, bias), to, out),
        };
    }
    match (dtype, to) {
        (Dtype::Uint8, Dtype::Float32) => {
            let out = out.as_chunks_mut::<4>().0;
            for (((out, value), scale), bias) in out.iter_mut().zip(row).zip(scale).zip(bias) {
                *out = (f32::from(*value) * scale + bias).to_ne_bytes();
            }
            Ok(())
        }
        _ => general(row, dtype, |at| (scale[at], bias[at]), to, out),
    }
}

fn general(row: &[u8], dtype: Dtype, factors: impl Fn(usize) -> (f32, f32), to: Dtype, out: &mut [u8]) -> Result<()> {
    for (at, (value, out)) in row.chunks_exact(dtype.size()).zip(out.chunks_exact_mut(to.size())).enumerate() {
        let (scale, bias) = factors(at);
        let value = load(value, dtype)?;
        store(out, to, if scale == 1.0 && bias == 0.0 { value } else { value * f64::from(scale) + f64::from(bias) })?;
    }
    Ok(())
}

/// Read one element as a number.
pub fn load(bytes: &[u8], dtype: Dtype) -> Result<f64> {
    macro_rules! as_number {
        ($kind:ty) => {
            <$kind>::from_ne_bytes(bytes.try_into().unwrap_or_default()) as f64
        };
    }
    Ok(match dtype {
        Dtype::Bool | Dtype::Uint8 => bytes[0].into(),
        Dtype::Int8 => as_number!(i8),
        Dtype::Int16 => as_number!(i16),
        Dtype::Int32 => as_number!(i32),
        Dtype::Int64 => as_number!(i64),
        Dtype::Uint16 => as_number!(u16),
        Dtype::Uint32 => as_number!(u32),
        Dtype::Uint64 => as_number!(u64),
        Dtype::Float16 => f16::from_ne_bytes(bytes.try_into().unwrap_or_default()).to_f64(),
        Dtype::Bfloat16 => bf16::from_ne_bytes(bytes.try_into().unwrap_or_default()).to_f64(),
        Dtype::Float32 => as_number!(f32),
        Dtype::Float64 => as_number!(f64),
        other => return Err(Error::new("invalid-argument", format!("cannot convert {} values", other.name()))),
    })
}

/// Write one element. Values outside the dtype's range are clipped, as a Rust `as` cast does.
fn store(out: &mut [u8], dtype: Dtype, value: f64) -> Result<()> {
    match dtype {
        Dtype::Bool => out[0] = u8::from(value != 0.0),
        Dtype::Uint8 => out[0] = value as u8,
        Dtype::Int8 => out.copy_from_slice(&(value as i8).to_ne_bytes()),
        Dtype::Int16 => out.copy_from_slice(&(value as i16).to_ne_bytes()),
        Dtype::Int32 => out.copy_from_slice(&(value as i32).to_ne_bytes()),
        Dtype::Int64 => out.copy_from_slice(&(value as i64).to_ne_bytes()),
        Dtype::Uint16 => out.copy_from_slice(&(value as u16).to_ne_bytes()),
        Dtype::Uint32 => out.copy_from_slice(&(value as u32).to_ne_bytes()),
        Dtype::Uint64 => out.copy_from_slice(&(value as u64).to_ne_bytes()),
        Dtype::Float16 => out.copy_from_slice(&f16::from_f64(value).to_ne_bytes()),
        Dtype::Bfloat16 => out.copy_from_slice(&bf16::from_f64(value).to_ne_bytes()),
        Dtype::Float32 => out.copy_from_slice(&(value as f32).to_ne_bytes()),
        Dtype::Float64 => out.copy_from_slice(&value.to_ne_bytes()),
        other => return Err(Error::new("invalid-argument", format!("cannot convert values to {}", other.name()))),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Compute the expected result of `cut`, element by element.
    fn plainly(source: &[u8], cut: &Cut) -> Vec<u8> {
        let mut out = Vec::new();
        let mut index = vec![0usize; cut.rank];
        for _ in 0..cut.elements() {
            let at: Option<usize> = (0..cut.rank).try_fold(0, |at, d| {
                let place = if cut.mirrored[d] { cut.size[d] - 1 - index[d] } else { index[d] } as i64 + cut.origin[d];
                (place >= 0 && place < cut.shape[d] as i64).then(|| at * cut.shape[d] + place as usize)
            });
            out.push(at.map_or(cut.fill as u8, |at| source[at]));
            for d in (0..cut.rank).rev() {
                index[d] += 1;
                if index[d] < cut.size[d] {
                    break;
                }
                index[d] = 0;
            }
        }
        out
    }

    proptest! {
        #[test]
        fn boxes_are_what_they_should_be(
            dimensions in prop::collection::vec((1usize..6, -4i64..5, 1usize..8, any::<bool>()), 1..4), channels in 1usize..5, fill in 0u8..3,
        ) {
            let mut shape: Vec<usize> = dimensions.iter().map(|d| d.0).collect();
            shape.push(channels);
            let mut wanted = Cut::whole(&shape);
            wanted.fill = fill.into();
            for (d, (_, begin, size, mirrored)) in dimensions.iter().enumerate() {
                if *mirrored {
                    wanted.mirror(d);
                }
                wanted.narrow(d, *begin, *size);
            }
            let source: Vec<u8> = (0..shape.iter().product::<usize>()).map(|i| i as u8 | 4).collect();
            let mut out = vec![9; wanted.elements()];
            cut(&source, Dtype::Uint8, &wanted, None, &mut out).unwrap();
            prop_assert_eq!(&out, &plainly(&source, &wanted));
            let mut convert = Convert::cast(Dtype::Float32);
            let mean: Vec<f32> = (0..channels).map(|c| c as f32).collect();
            convert.normalise(&mean, &[2.0]);
            let mut floats = vec![9; wanted.elements() * 4];
            cut(&source, Dtype::Uint8, &wanted, Some(&convert), &mut floats).unwrap();
            for (at, (byte, float)) in out.iter().zip(floats.as_chunks::<4>().0).enumerate() {
                prop_assert_eq!(f32::from_ne_bytes(*float), (f32::from(*byte) - (at % channels) as f32) / 2.0);
            }
        }
    }

    #[test]
    fn dtypes_convert() {
        let values = [-3.5f32, 0.0, 1.25, 300.0];
        let source: Vec<u8> = values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        for to in [Dtype::Float16, Dtype::Bfloat16, Dtype::Float64, Dtype::Int16] {
            let mut out = vec![0; 4 * to.size()];
            cut(&source, Dtype::Float32, &Cut::whole(&[4]), Some(&Convert::cast(to)), &mut out).unwrap();
            let back: Vec<f64> = out.chunks_exact(to.size()).map(|bytes| load(bytes, to).unwrap()).collect();
            let expected = if to == Dtype::Int16 { vec![-3.0, 0.0, 1.0, 300.0] } else { vec![-3.5, 0.0, 1.25, 300.0] };
            assert_eq!(back, expected);
        }
        assert!(
            cut(&source, Dtype::Complex64, &Cut::whole(&[2]), Some(&Convert::cast(Dtype::Float32)), &mut [0; 8])
                .is_err()
        );
    }
}
