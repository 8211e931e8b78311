//! Boxes of images that are erased, before or after the conversion to another dtype.

use penstock_codec::cut::{Convert, Cut, cut};
use penstock_error::Result;
use penstock_tensor::Dtype;

/// A box of an image that has one colour.
#[derive(Debug, Clone)]
pub struct Erased {
    pub top: usize,
    pub left: usize,
    pub height: usize,
    pub width: usize,
    /// One value for all channels, or one per channel.
    pub values: Vec<f32>,
}

/// Erase boxes from a converted image of shape (height, width, channels).
pub fn erase(out: &mut [u8], shape: &[usize], dtype: Dtype, erased: &[Erased]) -> Result<()> {
    for erased in erased {
        let values: Vec<u8> = erased.values.iter().flat_map(|value| value.to_ne_bytes()).collect();
        let mut bytes = vec![0; erased.values.len() * dtype.size()];
        cut(&values, Dtype::Float32, &Cut::whole(&[erased.values.len()]), Some(&Convert::cast(dtype)), &mut bytes)?;
        fill(out, [shape[0], shape[1], shape[2]], dtype.size(), erased, &bytes);
    }
    Ok(())
}

/// Fill a box with values of `size` bytes: one for all channels, or one for each.
pub fn fill(out: &mut [u8], [_, width, channels]: [usize; 3], size: usize, erased: &Erased, values: &[u8]) {
    let pixel: Vec<u8> = values.iter().copied().cycle().take(channels * size).collect();
    for row in erased.top..erased.top + erased.height {
        let begin = (row * width + erased.left) * pixel.len();
        out[begin..begin + erased.width * pixel.len()]
            .chunks_exact_mut(pixel.len())
            .for_each(|target| target.copy_from_slice(&pixel));
    }
}
