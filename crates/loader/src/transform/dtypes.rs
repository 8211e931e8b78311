//! What dtypes of pixels and numbers mean for transforms: their largest values, and the factors between them.

use penstock_tensor::Dtype;

/// Return whether values are real numbers with fractions.
pub fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::Float16 | Dtype::Bfloat16 | Dtype::Float32 | Dtype::Float64)
}

/// Return whether values are bools or real numbers, rather than complex numbers or times.
pub fn is_number(dtype: Dtype) -> bool {
    use Dtype::{Complex64, Complex128, Duration, Time, Timestamp};
    !matches!(dtype, Complex64 | Complex128 | Timestamp | Duration | Time)
}

/// Return the largest value of an integer dtype, or None for others.
fn largest(dtype: Dtype) -> Option<f32> {
    Some(match dtype {
        Dtype::Uint8 => 255.0,
        Dtype::Int8 => 127.0,
        Dtype::Uint16 => 65_535.0,
        Dtype::Int16 => 32_767.0,
        Dtype::Uint32 => u32::MAX as f32,
        Dtype::Int32 => i32::MAX as f32,
        Dtype::Uint64 => u64::MAX as f32,
        Dtype::Int64 => i64::MAX as f32,
        _ => return None,
    })
}

/// Return the factor that scales integers to at most 1. Floating-point values are not scaled.
pub fn unit_scale(dtype: Dtype) -> f32 {
    largest(dtype).map_or(1.0, |largest| 1.0 / largest)
}

/// Return whether values of this dtype cannot be `fill`.
pub fn is_unfit(fill: f64, dtype: Dtype) -> bool {
    let bits = 8 * dtype.size() as i32;
    let (least, end) = match dtype {
        Dtype::Bool => (0.0, 2.0),
        Dtype::Uint8 | Dtype::Uint16 | Dtype::Uint32 | Dtype::Uint64 => (0.0, 2f64.powi(bits)),
        Dtype::Int8 | Dtype::Int16 | Dtype::Int32 | Dtype::Int64 => (-2f64.powi(bits - 1), 2f64.powi(bits - 1)),
        _ => return false,
    };
    !(least <= fill && fill < end) || fill.fract() != 0.0
}

/// Return the factor by which torchvision scales values to another dtype. Results of whole numbers are then rounded down. Returns None if
/// float32 cannot represent the products.
pub fn scale_between(from: Dtype, to: Dtype) -> Option<f32> {
    let largest = |dtype: Dtype| largest(dtype).filter(|_| dtype.size() <= 2);
    match (is_float(from), is_float(to)) {
        (true, true) => Some(1.0),
        (false, true) => Some(unit_scale(from)),
        (true, false) => Some(largest(to)? + 1.0 - 1e-3),
        (false, false) => Some((largest(to)? + 1.0) / (largest(from)? + 1.0)),
    }
}
