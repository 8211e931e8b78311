//! The least and the greatest value of a chunk (spec section 6).

use bytes::Bytes;
use half::{bf16, f16};
use penstock_error::Result;
use penstock_tensor::{Column, Dtype, Shape};

use crate::cursor::{Cursor, Writer, malformed};

/// Bounds of text have at most this many bytes.
const TEXT_BYTES: usize = 16;
/// So many bytes of a text determine its bounds, however long it is.
pub const HEAD_BYTES: usize = TEXT_BYTES + 1;

const HAS_NAN: u8 = 1;
const HAS_SPAN: u8 = 2;
const IS_ONE: u8 = 4;
const IS_OPEN: u8 = 8;

/// The values of a chunk that are not null.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Bounds {
    pub has_nan: bool,
    /// The range that contains all others. None if there are none.
    pub span: Option<Span>,
}

/// A least and a greatest value, both included.
#[derive(Debug, Clone, PartialEq)]
pub enum Span {
    Signed(i64, i64),
    Unsigned(u64, u64),
    Float(f64, f64),
    /// Texts in the order of their bytes. Without an upper bound if it is not known.
    Text(Bytes, Option<Bytes>),
}

/// How values are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Class {
    Signed = 1,
    Unsigned = 2,
    Float = 3,
    Text = 4,
}

impl Class {
    /// Return how the values of a chunk are compared. None if they have no order.
    pub fn of(dtype: Dtype, shape: &Shape) -> Option<Class> {
        use Dtype::*;
        match dtype {
            Bytes => Some(Class::Text),
            _ if !shape.0.is_empty() => None,
            Int8 | Int16 | Int32 | Int64 | Timestamp | Duration | Time => Some(Class::Signed),
            Bool | Uint8 | Uint16 | Uint32 | Uint64 => Some(Class::Unsigned),
            Float16 | Bfloat16 | Float32 | Float64 => Some(Class::Float),
            Complex64 | Complex128 => None,
        }
    }

    pub fn from_code(code: u8) -> Option<Class> {
        [Class::Signed, Class::Unsigned, Class::Float, Class::Text].into_iter().find(|class| *class as u8 == code)
    }
}

impl Span {
    /// Return the span of a text. The bounds of long texts are shorter than them.
    pub fn of_text(text: &[u8]) -> Span {
        let cut = &text[..text.len().min(TEXT_BYTES)];
        let most = if text.len() <= TEXT_BYTES { Some(Bytes::copy_from_slice(text)) } else { above(cut) };
        Span::Text(Bytes::copy_from_slice(cut), most)
    }

    pub fn class(&self) -> Class {
        match self {
            Span::Signed(..) => Class::Signed,
            Span::Unsigned(..) => Class::Unsigned,
            Span::Float(..) => Class::Float,
            Span::Text(..) => Class::Text,
        }
    }

    /// Return the smallest span that contains both. None if they cannot be compared.
    pub fn or(&self, other: &Span) -> Option<Span> {
        Some(match (self, other) {
            (Span::Signed(least, most), Span::Signed(low, high)) => Span::Signed(*least.min(low), *most.max(high)),
            (Span::Unsigned(least, most), Span::Unsigned(low, high)) => {
                Span::Unsigned(*least.min(low), *most.max(high))
            }
            (Span::Float(least, most), Span::Float(low, high)) => Span::Float(least.min(*low), most.max(*high)),
            (Span::Text(least, most), Span::Text(low, high)) => {
                let most = most.as_ref().zip(high.as_ref()).map(|(most, high)| most.max(high).clone());
                Span::Text(least.min(low).clone(), most)
            }
            _ => return None,
        })
    }

    /// Return whether both spans may have a value in common. Numbers of all classes are compared. A number and a text may.
    pub fn meets(&self, other: &Span) -> bool {
        if let (Span::Text(least, most), Span::Text(low, high)) = (self, other) {
            return high.as_ref().is_none_or(|high| least <= high) && most.as_ref().is_none_or(|most| low <= most);
        }
        if let (Some((least, most)), Some((low, high))) = (self.as_whole(), other.as_whole()) {
            return least <= high && low <= most;
        }
        // Rounding keeps the order.
        let (Some((least, most)), Some((low, high))) = (self.as_float(), other.as_float()) else { return true };
        least <= high && low <= most
    }

    fn as_whole(&self) -> Option<(i128, i128)> {
        match self {
            Span::Signed(least, most) => Some(((*least).into(), (*most).into())),
            Span::Unsigned(least, most) => Some(((*least).into(), (*most).into())),
            Span::Float(..) | Span::Text(..) => None,
        }
    }

    fn as_float(&self) -> Option<(f64, f64)> {
        match self {
            Span::Float(least, most) => Some((*least, *most)),
            _ => self.as_whole().map(|(least, most)| (least as f64, most as f64)),
        }
    }

    /// Return the span in another class, which a column has since it was widened. None if a bound is not the same number there.
    pub fn as_class(self, class: Class) -> Option<Span> {
        let is_exact = |value: f64| value.abs() <= (1u64 << 53) as f64;
        match (self, class) {
            (span, class) if span.class() == class => Some(span),
            (Span::Unsigned(least, most), Class::Signed) => {
                Some(Span::Signed(least.try_into().ok()?, most.try_into().ok()?))
            }
            (Span::Unsigned(least, most), Class::Float) => {
                Some(Span::Float(least as f64, most as f64)).filter(|_| is_exact(most as f64))
            }
            (Span::Signed(least, most), Class::Float) => {
                Some(Span::Float(least as f64, most as f64)).filter(|_| is_exact(least as f64) && is_exact(most as f64))
            }
            _ => None,
        }
    }
}

/// Return a text above all that begin with this one.
fn above(text: &[u8]) -> Option<Bytes> {
    let last = text.iter().rposition(|byte| *byte != u8::MAX)?;
    let mut above = text[..=last].to_vec();
    above[last] += 1;
    Some(above.into())
}

impl Bounds {
    /// Add other values of one chunk, which are all compared in the same way.
    pub fn include(&mut self, other: &Bounds) {
        if let Some(both) = self.or(other) {
            *self = both;
        }
    }

    /// Return the bounds of the values of both. None if they cannot be compared: then nothing is known.
    pub fn or(&self, other: &Bounds) -> Option<Bounds> {
        let span = match (&self.span, &other.span) {
            (Some(span), Some(more)) => Some(span.or(more)?),
            (span, more) => span.clone().or_else(|| more.clone()),
        };
        Some(Bounds { has_nan: self.has_nan || other.has_nan, span })
    }

    /// Return the bounds of the values of a column without dimensions, or of texts. `valid` says which are not null.
    pub fn of(column: &Column, dtype: Dtype, valid: Option<&[bool]>) -> Bounds {
        match column {
            Column::Fixed { data, .. } => Bounds::of_fixed(data, dtype, valid),
            Column::Ragged(ragged) => {
                let texts =
                    (0..ragged.len()).filter(|row| valid.is_none_or(|valid| valid[*row])).map(|row| ragged.value(row));
                Bounds { has_nan: false, span: span_of_texts(texts) }
            }
            Column::Pulled(_) => Bounds::default(),
        }
    }

    /// Return the bounds of numbers or times that are stored one after the other.
    pub fn of_fixed(data: &[u8], dtype: Dtype, valid: Option<&[bool]>) -> Bounds {
        macro_rules! whole {
            ($number:ty, $span:ident) => {{
                let numbers =
                    data.as_chunks::<{ size_of::<$number>() }>().0.iter().map(|bytes| <$number>::from_le_bytes(*bytes));
                let ends = |(least, most): ($number, $number), number: $number| (least.min(number), most.max(number));
                let none = (<$number>::MAX, <$number>::MIN);
                let (least, most) = match valid {
                    None => numbers.fold(none, ends),
                    Some(valid) => {
                        numbers.zip(valid).filter(|(_, valid)| **valid).map(|(number, _)| number).fold(none, ends)
                    }
                };
                Bounds { has_nan: false, span: (least <= most).then(|| Span::$span(least.into(), most.into())) }
            }};
        }
        macro_rules! float {
            ($number:ty) => {{
                let numbers =
                    data.as_chunks::<{ size_of::<$number>() }>().0.iter().map(|bytes| <$number>::from_le_bytes(*bytes));
                let ends = |(least, most, nan): ($number, $number, bool), number: $number| {
                    (
                        if number < least { number } else { least },
                        if number > most { number } else { most },
                        nan | (number != number),
                    )
                };
                let none = (<$number>::INFINITY, <$number>::NEG_INFINITY, false);
                let (least, most, has_nan) = match valid {
                    None => numbers.fold(none, ends),
                    Some(valid) => {
                        numbers.zip(valid).filter(|(_, valid)| **valid).map(|(number, _)| number).fold(none, ends)
                    }
                };
                Bounds { has_nan, span: (least <= most).then(|| Span::Float(least.into(), most.into())) }
            }};
        }
        match dtype {
            Dtype::Int8 => whole!(i8, Signed),
            Dtype::Int16 => whole!(i16, Signed),
            Dtype::Int32 => whole!(i32, Signed),
            Dtype::Int64 | Dtype::Timestamp | Dtype::Duration | Dtype::Time => whole!(i64, Signed),
            Dtype::Bool | Dtype::Uint8 => whole!(u8, Unsigned),
            Dtype::Uint16 => whole!(u16, Unsigned),
            Dtype::Uint32 => whole!(u32, Unsigned),
            Dtype::Uint64 => whole!(u64, Unsigned),
            Dtype::Float32 => float!(f32),
            Dtype::Float64 => float!(f64),
            Dtype::Float16 => of_halves(data, valid, |bits| f16::from_bits(bits).to_f32()),
            Dtype::Bfloat16 => of_halves(data, valid, |bits| bf16::from_bits(bits).to_f32()),
            Dtype::Bytes | Dtype::Complex64 | Dtype::Complex128 => Bounds::default(),
        }
    }

    /// Return the bounds of words.
    pub fn of_words<'a>(words: impl Iterator<Item = &'a [u8]>) -> Bounds {
        Bounds { has_nan: false, span: span_of_texts(words) }
    }

    pub fn write(&self, writer: &mut Writer) {
        let nan = if self.has_nan { HAS_NAN } else { 0 };
        let Some(span) = &self.span else { return writer.u8(nan) };
        let (is_one, is_open) = match span {
            Span::Signed(least, most) => (least == most, false),
            Span::Unsigned(least, most) => (least == most, false),
            Span::Float(least, most) => (least.to_bits() == most.to_bits(), false),
            Span::Text(least, most) => (most.as_ref() == Some(least), most.is_none()),
        };
        writer.u8(nan | HAS_SPAN | if is_one { IS_ONE } else { 0 } | if is_open { IS_OPEN } else { 0 });
        let mut write_ends = |least: u64, most: u64| {
            writer.u64(least);
            if !is_one {
                writer.u64(most);
            }
        };
        match span {
            Span::Signed(least, most) => write_ends(least.cast_unsigned(), most.cast_unsigned()),
            Span::Unsigned(least, most) => write_ends(*least, *most),
            Span::Float(least, most) => write_ends(least.to_bits(), most.to_bits()),
            Span::Text(least, most) => {
                writer.bytes(least);
                most.iter().filter(|_| !is_one).for_each(|most| writer.bytes(most));
            }
        }
    }

    pub fn parse(cursor: &mut Cursor, class: Option<Class>) -> Result<Bounds> {
        let flags = cursor.u8()?;
        let has_nan = flags & HAS_NAN != 0;
        let invalid = |what: &str| Err(malformed(format!("bounds of values {what}")));
        if flags & !(HAS_NAN | HAS_SPAN | IS_ONE | IS_OPEN) != 0
            || flags & HAS_SPAN == 0 && flags & !HAS_NAN != 0
            || has_nan && class != Some(Class::Float)
        {
            return invalid("have invalid flags");
        }
        if flags & HAS_SPAN == 0 {
            return Ok(Bounds { has_nan, span: None });
        }
        let (is_one, is_open) = (flags & IS_ONE != 0, flags & IS_OPEN != 0);
        let Some(class) = class.filter(|class| !is_open || !is_one && *class == Class::Text) else {
            return invalid("belong to a column without bounds, or lack a maximum");
        };
        let (span, is_sound) = match class {
            Class::Text => {
                let least = cursor.bytes()?;
                let most = match is_open {
                    true => None,
                    false => Some(if is_one { least.clone() } else { cursor.bytes()? }),
                };
                let is_sound = most.as_ref().is_none_or(|most| least <= *most && most.len() <= TEXT_BYTES)
                    && least.len() <= TEXT_BYTES;
                (Span::Text(least, most), is_sound)
            }
            class => {
                let least = cursor.u64()?;
                let most = if is_one { least } else { cursor.u64()? };
                match class {
                    Class::Signed => (
                        Span::Signed(least.cast_signed(), most.cast_signed()),
                        least.cast_signed() <= most.cast_signed(),
                    ),
                    Class::Unsigned => (Span::Unsigned(least, most), least <= most),
                    _ => (
                        Span::Float(f64::from_bits(least), f64::from_bits(most)),
                        f64::from_bits(least) <= f64::from_bits(most),
                    ),
                }
            }
        };
        if is_sound {
            Ok(Bounds { has_nan, span: Some(span) })
        } else {
            invalid("have a minimum above the maximum, or are not numbers")
        }
    }
}

/// Return the span of numbers of two bytes.
fn of_halves(data: &[u8], valid: Option<&[bool]>, number: fn(u16) -> f32) -> Bounds {
    let numbers: Vec<u8> =
        data.as_chunks::<2>().0.iter().flat_map(|bits| number(u16::from_le_bytes(*bits)).to_le_bytes()).collect();
    Bounds::of_fixed(&numbers, Dtype::Float32, valid)
}

/// Return the span of texts, by their first bytes and their lengths.
fn span_of_texts<'a>(texts: impl Iterator<Item = &'a [u8]>) -> Option<Span> {
    let mut ends: Option<(&[u8], &[u8])> = None;
    for text in texts {
        let (least, most) = ends.get_or_insert((text, text));
        if text < *least {
            *least = text;
        }
        if text > *most {
            *most = text;
        }
    }
    ends.and_then(|(least, most)| Span::of_text(least).or(&Span::of_text(most)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(bounds: &Bounds, class: Option<Class>) -> Result<Bounds> {
        Bounds::parse(&mut Cursor::new(Writer::written(|writer| bounds.write(writer)).into()), class)
    }

    #[test]
    fn bounds_are_read_as_they_were_written() {
        let text = |text: &str| Bytes::copy_from_slice(text.as_bytes());
        let spans = [
            Span::Signed(i64::MIN, -1),
            Span::Unsigned(u64::MAX, u64::MAX),
            Span::Float(f64::NEG_INFINITY, 0.5),
            Span::Text(text(""), Some(text("zebra"))),
            Span::Text(text("a"), None),
        ];
        for span in spans {
            let bounds = Bounds { has_nan: span.class() == Class::Float, span: Some(span.clone()) };
            assert_eq!(written(&bounds, Some(span.class())).unwrap(), bounds);
        }
        assert_eq!(written(&Bounds::default(), None).unwrap(), Bounds::default());
        let turned = Bounds { has_nan: false, span: Some(Span::Signed(1, 0)) };
        assert_eq!(written(&turned, Some(Class::Signed)).unwrap_err().code(), "object-malformed");
        let nan = Bounds { has_nan: false, span: Some(Span::Float(f64::NAN, f64::NAN)) };
        assert!(written(&nan, Some(Class::Float)).is_err());
        assert!(written(&Bounds { has_nan: true, span: None }, Some(Class::Text)).is_err());
    }

    #[test]
    fn long_texts_are_cut_below_and_raised_above() {
        let long = "abcdefghijklmnopqrstuvwxyz".as_bytes();
        assert_eq!(
            Span::of_text(long),
            Span::Text(Bytes::from_static(b"abcdefghijklmnop"), Some(Bytes::from_static(b"abcdefghijklmnoq")))
        );
        assert_eq!(Span::of_text(&[255; 20]), Span::Text(Bytes::from_static(&[255; 16]), None));
        assert!(Span::of_text(long).meets(&Span::of_text(b"abcdefghijklmnopz")));
        assert!(!Span::of_text(long).meets(&Span::of_text(b"b")));
    }

    #[test]
    fn floats_may_be_infinite_or_nan() {
        let bounds_of = |numbers: &[f32], valid: Option<&[bool]>| {
            let data: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            let Bounds { has_nan, span } = Bounds::of_fixed(&data, Dtype::Float32, valid);
            (has_nan, span)
        };
        let infinity = f32::INFINITY;
        assert_eq!(bounds_of(&[infinity], None), (false, Some(Span::Float(f64::INFINITY, f64::INFINITY))));
        assert_eq!(
            bounds_of(&[-infinity, -infinity], None),
            (false, Some(Span::Float(f64::NEG_INFINITY, f64::NEG_INFINITY)))
        );
        assert_eq!(bounds_of(&[f32::NAN], None), (true, None));
        assert_eq!(bounds_of(&[f32::NAN, 2.0], None), (true, Some(Span::Float(2.0, 2.0))));
        assert_eq!(bounds_of(&[f32::NAN, infinity], None), (true, Some(Span::Float(f64::INFINITY, f64::INFINITY))));
        assert_eq!(bounds_of(&[1.0, 2.0], Some(&[false, false])), (false, None));
        assert_eq!(bounds_of(&[0.0, 2.0, 1.0], Some(&[false, true, true])), (false, Some(Span::Float(1.0, 2.0))));
        assert_eq!(bounds_of(&[], None), (false, None));
    }
}
