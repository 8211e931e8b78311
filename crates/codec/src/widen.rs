//! Convert numbers to a dtype that represents all of them exactly, for columns whose dtype was widened. Where it may be, `Dtype::widens_to` decides.

use half::{bf16, f16};
use penstock_error::{Error, Result};
use penstock_tensor::Dtype;

/// Convert little-endian numbers. `out` has room for exactly as many.
pub fn widen(source: &[u8], from: Dtype, to: Dtype, out: &mut [u8]) -> Result<()> {
    if !from.widens_to(to) || source.len() / from.size() * to.size() != out.len() {
        let text =
            format!("cannot convert {} bytes of {} to {} bytes of {}", source.len(), from.name(), out.len(), to.name());
        return Err(Error::new("internal", text));
    }
    /// Convert from one type to any wider one. The casts are exact, because `widens_to` allows no others.
    macro_rules! convert {
        ($from:ty, $value:expr) => {
            match to {
                Dtype::Int16 => each(source, out, |bytes| ($value(<$from>::from_le_bytes(bytes)) as i16).to_le_bytes()),
                Dtype::Int32 => each(source, out, |bytes| ($value(<$from>::from_le_bytes(bytes)) as i32).to_le_bytes()),
                Dtype::Int64 => each(source, out, |bytes| ($value(<$from>::from_le_bytes(bytes)) as i64).to_le_bytes()),
                Dtype::Uint16 => {
                    each(source, out, |bytes| ($value(<$from>::from_le_bytes(bytes)) as u16).to_le_bytes())
                }
                Dtype::Uint32 => {
                    each(source, out, |bytes| ($value(<$from>::from_le_bytes(bytes)) as u32).to_le_bytes())
                }
                Dtype::Uint64 => {
                    each(source, out, |bytes| ($value(<$from>::from_le_bytes(bytes)) as u64).to_le_bytes())
                }
                Dtype::Float16 => {
                    each(source, out, |bytes| f16::from_f32($value(<$from>::from_le_bytes(bytes)) as f32).to_le_bytes())
                }
                Dtype::Bfloat16 => each(source, out, |bytes| {
                    bf16::from_f32($value(<$from>::from_le_bytes(bytes)) as f32).to_le_bytes()
                }),
                Dtype::Float32 => {
                    each(source, out, |bytes| ($value(<$from>::from_le_bytes(bytes)) as f32).to_le_bytes())
                }
                _ => each(source, out, |bytes| ($value(<$from>::from_le_bytes(bytes)) as f64).to_le_bytes()),
            }
        };
    }
    fn same<T>(value: T) -> T {
        value
    }
    match from {
        Dtype::Int8 => convert!(i8, same),
        Dtype::Int16 => convert!(i16, same),
        Dtype::Int32 => convert!(i32, same),
        Dtype::Uint8 => convert!(u8, same),
        Dtype::Uint16 => convert!(u16, same),
        Dtype::Uint32 => convert!(u32, same),
        Dtype::Float16 => convert!(f16, f16::to_f32),
        Dtype::Bfloat16 => convert!(bf16, bf16::to_f32),
        _ => convert!(f32, same), // Complex numbers are pairs of these.
    }
    Ok(())
}

fn each<const FROM: usize, const TO: usize>(source: &[u8], out: &mut [u8], convert: impl Fn([u8; FROM]) -> [u8; TO]) {
    for (target, value) in out.as_chunks_mut::<TO>().0.iter_mut().zip(source.as_chunks::<FROM>().0) {
        *target = convert(*value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extreme_values_are_kept() -> Result<()> {
        let widened = |source: &[u8], from, to| {
            let mut out = vec![0; source.len() / Dtype::size(from) * Dtype::size(to)];
            widen(source, from, to, &mut out).map(|()| out)
        };
        let numbers = |bytes: &[u8]| {
            bytes.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect::<Vec<f64>>()
        };
        assert_eq!(widened(&[0x80, 0x7f], Dtype::Int8, Dtype::Int16)?, [0x80, 0xff, 0x7f, 0]);
        assert_eq!(widened(&[0xff, 0x7f], Dtype::Uint16, Dtype::Int64)?, 32767i64.to_le_bytes());
        let int32 = [i32::MIN, -1, i32::MAX].map(i32::to_le_bytes).concat();
        assert_eq!(numbers(&widened(&int32, Dtype::Int32, Dtype::Float64)?), [-2_147_483_648.0, -1.0, 2_147_483_647.0]);
        let halves = [f16::MAX, f16::from_f32(-0.5)].map(f16::to_le_bytes).concat();
        assert_eq!(numbers(&widened(&halves, Dtype::Float16, Dtype::Float64)?), [65504.0, -0.5]);
        assert_eq!(widened(&f32::NAN.to_le_bytes(), Dtype::Float32, Dtype::Float64)?[7] & 0x7f, 0x7f);
        let pair = [1.5f32, -2.0].map(f32::to_le_bytes).concat();
        assert_eq!(numbers(&widened(&pair, Dtype::Complex64, Dtype::Complex128)?), [1.5, -2.0]);
        assert_eq!(widened(&[255], Dtype::Uint8, Dtype::Bfloat16)?, bf16::from_f32(255.0).to_le_bytes());
        assert!(
            widened(&[1], Dtype::Int8, Dtype::Uint16).is_err()
                && widened(&int32, Dtype::Int32, Dtype::Float32).is_err()
        );
        Ok(())
    }
}
