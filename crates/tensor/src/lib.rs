//! Element types, shapes and in-memory columns of values. This crate knows nothing about files.
//!
//! The `format` crate stores a [`Dtype`], `dataset` fills [`Ragged`] values, and `python` converts both for NumPy.

pub mod slice;

use std::fmt::{self, Debug};
use std::ops::Range;
use std::sync::Arc;

use penstock_error::{Error, Result};

/// The element type of a stored column. The discriminant is the number in `spec/format-v1.md` section 6.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Dtype {
    Bytes = 0,
    Bool = 1,
    Int8 = 2,
    Int16 = 3,
    Int32 = 4,
    Int64 = 5,
    Uint8 = 6,
    Uint16 = 7,
    Uint32 = 8,
    Uint64 = 9,
    Float16 = 10,
    Bfloat16 = 11,
    Float32 = 12,
    Float64 = 13,
    Complex64 = 14,
    Complex128 = 15,
    Timestamp = 16,
    Duration = 17,
    Time = 18,
}

const TABLE: &[(Dtype, &str, usize)] = &[
    (Dtype::Bytes, "bytes", 1),
    (Dtype::Bool, "bool", 1),
    (Dtype::Int8, "int8", 1),
    (Dtype::Int16, "int16", 2),
    (Dtype::Int32, "int32", 4),
    (Dtype::Int64, "int64", 8),
    (Dtype::Uint8, "uint8", 1),
    (Dtype::Uint16, "uint16", 2),
    (Dtype::Uint32, "uint32", 4),
    (Dtype::Uint64, "uint64", 8),
    (Dtype::Float16, "float16", 2),
    (Dtype::Bfloat16, "bfloat16", 2),
    (Dtype::Float32, "float32", 4),
    (Dtype::Float64, "float64", 8),
    (Dtype::Complex64, "complex64", 8),
    (Dtype::Complex128, "complex128", 16),
    (Dtype::Timestamp, "timestamp", 8),
    (Dtype::Duration, "duration", 8),
    (Dtype::Time, "time", 8),
];

impl Dtype {
    pub fn from_code(code: u8) -> Option<Dtype> {
        TABLE.get(code as usize).map(|row| row.0)
    }

    pub fn from_name(name: &str) -> Option<Dtype> {
        TABLE.iter().find(|row| row.1 == name && row.0 != Dtype::Bytes).map(|row| row.0)
    }

    pub fn name(self) -> &'static str {
        TABLE[self as usize].1
    }

    /// Return the size of one element in bytes.
    pub fn size(self) -> usize {
        TABLE[self as usize].2
    }

    /// Return whether another dtype represents each number of this one exactly.
    pub fn widens_to(self, wider: Dtype) -> bool {
        match (self.precision(), wider.precision()) {
            (Some((signed, bits, exponent)), Some((wider_signed, wider_bits, wider_exponent))) => {
                self != wider && signed <= wider_signed && bits <= wider_bits && exponent <= wider_exponent
            }
            _ => (self, wider) == (Dtype::Complex64, Dtype::Complex128),
        }
    }

    /// Return whether numbers may be negative, the bits of their significand, and the bits of their exponent. None for other values.
    fn precision(self) -> Option<(bool, u32, u32)> {
        let bits = 8 * self.size() as u32;
        Some(match self {
            Dtype::Uint8 | Dtype::Uint16 | Dtype::Uint32 | Dtype::Uint64 => (false, bits, 0),
            Dtype::Int8 | Dtype::Int16 | Dtype::Int32 | Dtype::Int64 => (true, bits - 1, 0),
            Dtype::Float16 => (true, 11, 5),
            Dtype::Bfloat16 => (true, 8, 8),
            Dtype::Float32 => (true, 24, 8),
            Dtype::Float64 => (true, 53, 11),
            _ => return None,
        })
    }
}

/// The shape that all samples of a column share. A dimension of `None` is free: its size may differ between samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape(pub Vec<Option<u64>>);

/// Format the sizes for messages, with `?` for a free dimension.
impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes: Vec<String> =
            self.0.iter().map(|size| size.map_or("?".to_owned(), |size| size.to_string())).collect();
        write!(f, "({})", sizes.join(", "))
    }
}

/// Format a count for messages. None means that the count overflowed.
pub fn counted(count: Option<u64>) -> String {
    count.map_or("more than 2^64".to_owned(), |count| count.to_string())
}

/// Maximum number of tensor dimensions, as in NumPy 1.
pub const MAX_DIMENSIONS: usize = 32;

impl Shape {
    pub fn scalar() -> Shape {
        Shape(Vec::new())
    }

    /// Return the shape for text, bytes and media, which has one free dimension.
    pub fn free() -> Shape {
        Shape(vec![None])
    }

    pub fn free_count(&self) -> usize {
        self.0.iter().filter(|size| size.is_none()).count()
    }

    pub fn is_fixed(&self) -> bool {
        self.free_count() == 0
    }

    /// Return the product of the fixed dimensions and the element size. If no dimension is free, this is the sample size in bytes.
    /// Otherwise, it is the size of one "cell" of the free dimensions.
    pub fn fixed_bytes(&self, dtype: Dtype) -> Result<u64> {
        self.0
            .iter()
            .flatten()
            .try_fold(dtype.size() as u64, |product, size| product.checked_mul(*size))
            .filter(|bytes| *bytes < 1 << 48)
            .ok_or_else(|| Error::new("invalid-schema", format!("a sample of shape {self} has 2^48 bytes or more")))
    }

    /// Return the shape of a sample whose free dimensions have the sizes `free`.
    pub fn fill(&self, free: &[u64]) -> Vec<u64> {
        let mut free = free.iter();
        self.0.iter().map(|size| size.unwrap_or_else(|| free.next().copied().unwrap_or(0))).collect()
    }
}

/// The values of n samples in one column, to be written to a dataset.
#[derive(Debug, Clone)]
pub enum Column {
    /// n samples of equal size, stored back to back.
    Fixed { data: Vec<u8>, validity: Option<Vec<bool>>, samples: usize },
    /// n samples of different sizes.
    Ragged(Ragged),
    /// n samples that are too large for memory.
    Pulled(Pulled),
}

/// n large samples that are fetched part by part from a source while they are written.
#[derive(Debug, Clone)]
pub struct Pulled {
    /// Shape of each sample. A null's shape is ignored. Bytes have none, because their length is not known before they end.
    pub shapes: Vec<Vec<u64>>,
    pub validity: Option<Vec<bool>>,
    pub source: Arc<dyn Pull>,
}

/// A source of large samples, which is read part by part.
pub trait Pull: Debug + Send + Sync {
    /// Call `take` once with the bytes of a slice of sample `row`. Bytes have no slices: they are passed to `take` piece by piece, once.
    fn pull(&self, row: usize, slice: &[Range<u64>], take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()>;
}

/// Chosen samples of a source.
#[derive(Debug)]
struct Chosen {
    source: Arc<dyn Pull>,
    samples: Vec<usize>,
}

impl Pull for Chosen {
    fn pull(&self, row: usize, slice: &[Range<u64>], take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        self.source.pull(self.samples[row], slice, take)
    }
}

/// n values of different sizes in one buffer.
#[derive(Debug, Clone, Default)]
pub struct Ragged {
    pub data: Vec<u8>,
    /// `ends[i]` is the offset in `data` at which value i ends.
    pub ends: Vec<u64>,
    /// Sizes of the free dimensions. All values have the same number of sizes.
    pub free: Vec<u64>,
    pub validity: Option<Vec<bool>>,
}

impl Ragged {
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Append one value. `None` appends a null.
    pub fn push(&mut self, value: Option<&[u8]>, free: &[u64]) {
        if let Some(value) = value {
            self.data.extend_from_slice(value);
        }
        self.ends.push(self.data.len() as u64);
        self.free.extend_from_slice(free);
        push_validity(&mut self.validity, self.ends.len(), value.is_some());
    }

    pub fn value(&self, index: usize) -> &[u8] {
        let begin = if index == 0 { 0 } else { self.ends[index - 1] as usize };
        &self.data[begin..self.ends[index] as usize]
    }

    pub fn is_null(&self, index: usize) -> bool {
        self.validity.as_ref().is_some_and(|validity| !validity[index])
    }
}

/// Record whether value `count - 1` is present. The validity list is created when the first null is added.
pub fn push_validity(validity: &mut Option<Vec<bool>>, count: usize, valid: bool) {
    match validity {
        Some(list) => list.push(valid),
        None if valid => {}
        None => {
            let mut list = vec![true; count];
            list[count - 1] = false;
            *validity = Some(list);
        }
    }
}

impl Column {
    pub fn len(&self) -> usize {
        match self {
            Column::Fixed { samples, .. } => *samples,
            Column::Ragged(ragged) => ragged.len(),
            Column::Pulled(pulled) => pulled.shapes.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Split off the samples starting at index `at`, as `Vec::split_off` does.
    pub fn split_off(&mut self, at: usize) -> Column {
        let later = |validity: &mut Option<Vec<bool>>| validity.as_mut().map(|list| list.split_off(at));
        match self {
            Column::Fixed { data, validity, samples } => {
                let cell = data.len().checked_div(*samples).unwrap_or(0);
                let rest = std::mem::replace(samples, at) - at;
                Column::Fixed { data: data.split_off(at * cell), validity: later(validity), samples: rest }
            }
            Column::Ragged(Ragged { data, ends, free, validity }) => {
                let begin = if at == 0 { 0 } else { ends[at - 1] };
                let counts = free.len().checked_div(ends.len()).unwrap_or(0);
                let ends = ends.split_off(at).into_iter().map(|end| end - begin).collect();
                let free = free.split_off(at * counts);
                Column::Ragged(Ragged { data: data.split_off(begin as usize), ends, free, validity: later(validity) })
            }
            Column::Pulled(Pulled { shapes, validity, source }) => {
                let source = Arc::new(Chosen { source: source.clone(), samples: (at..shapes.len()).collect() });
                Column::Pulled(Pulled { shapes: shapes.split_off(at), validity: later(validity), source })
            }
        }
    }

    /// Return the samples in these rows, in this order.
    pub fn take(&self, rows: &[usize]) -> Column {
        let taken_validity = |validity: &Option<Vec<bool>>| {
            let taken = validity.as_ref().map(|validity| rows.iter().map(|row| validity[*row]).collect::<Vec<bool>>());
            taken.filter(|taken| taken.contains(&false))
        };
        match self {
            Column::Fixed { data, validity, samples } => {
                let cell = data.len().checked_div(*samples).unwrap_or(0);
                let mut values = Vec::with_capacity(rows.len() * cell);
                rows.iter().for_each(|row| values.extend_from_slice(&data[row * cell..(row + 1) * cell]));
                Column::Fixed { data: values, validity: taken_validity(validity), samples: rows.len() }
            }
            Column::Ragged(ragged) => {
                let (mut values, each) = (Ragged::default(), ragged.free.len().checked_div(ragged.len()).unwrap_or(0));
                for row in rows {
                    let value = (!ragged.is_null(*row)).then(|| ragged.value(*row));
                    values.push(value, &ragged.free[row * each..(row + 1) * each]);
                }
                Column::Ragged(values)
            }
            Column::Pulled(Pulled { shapes, validity, source }) => {
                let shapes = rows.iter().map(|row| shapes[*row].clone()).collect();
                let source = Arc::new(Chosen { source: source.clone(), samples: rows.to_vec() });
                Column::Pulled(Pulled { shapes, validity: taken_validity(validity), source })
            }
        }
    }

    /// Return how many bytes this column's values occupy in memory.
    pub fn value_bytes(&self) -> usize {
        match self {
            Column::Fixed { data, .. } => data.len(),
            Column::Ragged(ragged) => ragged.data.len(),
            Column::Pulled(_) => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_codes_and_sizes_agree() {
        for (index, (dtype, name, size)) in TABLE.iter().enumerate() {
            assert_eq!(Dtype::from_code(index as u8), Some(*dtype));
            assert_eq!(dtype.name(), *name);
            assert_eq!(dtype.size(), *size);
        }
        assert_eq!(Dtype::from_code(19), None);
        assert_eq!(Dtype::from_name("bfloat16"), Some(Dtype::Bfloat16));
    }

    #[test]
    fn shapes_fill_and_refuse_absurd_sizes() {
        let shape = Shape(vec![None, Some(4), None]);
        assert_eq!(shape.fill(&[7, 9]), vec![7, 4, 9]);
        assert_eq!(shape.free_count(), 2);
        assert!(Shape(vec![Some(1 << 40), Some(1 << 20)]).fixed_bytes(Dtype::Int8).is_err());
    }

    #[derive(Debug)]
    struct Rows;

    impl Pull for Rows {
        fn pull(&self, row: usize, _: &[Range<u64>], take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
            take(&[row as u8])
        }
    }

    #[test]
    fn samples_are_taken_from_columns_of_every_form() -> Result<()> {
        let rows = [3, 2, 1, 3, 0];
        let mut ragged = Ragged::default();
        for value in [Some(&b"ab"[..]), None, Some(b"c"), Some(b"xyz")] {
            ragged.push(value, &[value.map_or(0, <[u8]>::len) as u64, 7]);
        }
        let Column::Ragged(found) = Column::Ragged(ragged).take(&rows) else { panic!("a ragged column") };
        let values: Vec<Option<&[u8]>> = (0..5).map(|at| (!found.is_null(at)).then(|| found.value(at))).collect();
        assert_eq!(values, [Some(&b"xyz"[..]), Some(b"c"), None, Some(b"xyz"), Some(b"ab")]);
        assert_eq!(found.free, [3, 7, 1, 7, 0, 7, 3, 7, 2, 7]);
        let fixed = Column::Fixed {
            data: vec![0, 1, 2, 3, 4, 5, 8, 9],
            validity: Some(vec![true, false, true, true]),
            samples: 4,
        };
        let Column::Fixed { data, validity, samples } = fixed.take(&rows) else { panic!("a fixed column") };
        assert_eq!((data, samples), (vec![8, 9, 4, 5, 2, 3, 8, 9, 0, 1], 5));
        assert_eq!(validity, Some(vec![true, true, false, true, true]));
        let Column::Fixed { validity: None, .. } = fixed.take(&[0, 2]) else { panic!("no nulls are taken") };
        let pulled = Pulled {
            shapes: vec![vec![1], vec![2], vec![3]],
            validity: Some(vec![true, false, true]),
            source: Arc::new(Rows),
        };
        let Column::Pulled(found) = Column::Pulled(pulled).take(&[2, 1]) else { panic!("a pulled column") };
        assert_eq!((found.shapes, found.validity), (vec![vec![3], vec![2]], Some(vec![true, false])));
        found.source.pull(0, &[], &mut |bytes| {
            assert_eq!(bytes, [2]);
            Ok(())
        })
    }

    #[test]
    fn columns_split_at_every_row() -> Result<()> {
        let values: [Option<&[u8]>; 4] = [Some(b"ab"), None, Some(b"cde"), Some(b"")];
        for at in 0..=4 {
            let mut ragged = Ragged::default();
            values.iter().enumerate().for_each(|(row, value)| ragged.push(*value, &[row as u64, 7]));
            let mut column = Column::Ragged(ragged);
            let Column::Ragged(later) = column.split_off(at) else { panic!("a ragged column") };
            let Column::Ragged(first) = column else { panic!("a ragged column") };
            for (row, value) in values.iter().enumerate() {
                let (part, place) = if row < at { (&first, row) } else { (&later, row - at) };
                assert_eq!((part.value(place), part.is_null(place)), (value.unwrap_or(b""), value.is_none()));
                assert_eq!(part.free[2 * place..2 * place + 2], [row as u64, 7]);
            }
            let mut fixed =
                Column::Fixed { data: (0..8).collect(), validity: Some(vec![true, false, true, true]), samples: 4 };
            let Column::Fixed { data, validity, samples } = fixed.split_off(at) else { panic!("a fixed column") };
            assert_eq!((data, samples, fixed.len()), ((2 * at as u8..8).collect(), 4 - at, at));
            assert_eq!(validity.as_deref(), Some(&[true, false, true, true][at..]));
            let mut pulled =
                Column::Pulled(Pulled { shapes: vec![vec![1]; 4], validity: None, source: Arc::new(Rows) });
            let Column::Pulled(later) = pulled.split_off(at) else { panic!("a pulled column") };
            assert_eq!((pulled.len(), later.shapes.len()), (at, 4 - at));
            for row in 0..later.shapes.len() {
                later.source.pull(row as _, &[], &mut |bytes| {
                    assert_eq!(bytes, [(at + row) as u8]);
                    Ok(())
                })?;
            }
        }
        Ok(())
    }

    #[test]
    fn a_first_null_makes_the_list() {
        let mut ragged = Ragged::default();
        ragged.push(Some(b"ab"), &[]);
        ragged.push(None, &[]);
        ragged.push(Some(b"c"), &[]);
        assert_eq!(ragged.validity, Some(vec![true, false, true]));
        assert_eq!(ragged.value(2), b"c");
        assert!(ragged.is_null(1));
    }
}
