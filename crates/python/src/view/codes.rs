//! Codes of the values of a column, for splits by value and by group.

use numpy::PyReadonlyArray1;
use penstock_dataset::{Coder, Nulls, Numbered, Purpose, Reader};
use penstock_error::Result;
use penstock_format::ints::unpack;
use penstock_format::schema::ColumnSpec;
use pyo3::prelude::*;

/// Codes of the values of a column, which are found by reading it.
#[pyclass(frozen, module = "penstock._core")]
pub struct Codes(pub Numbered);

/// Codes of samples, in 1, 2 or 4 bytes each, or found by reading their column.
pub enum Coding<'py> {
    One(PyReadonlyArray1<'py, u8>),
    Two(PyReadonlyArray1<'py, u16>),
    Four(PyReadonlyArray1<'py, u32>),
    Read(Bound<'py, Codes>),
}

impl<'py> Coding<'py> {
    pub fn of(codes: &Bound<'py, PyAny>) -> PyResult<Coding<'py>> {
        if let Ok(codes) = codes.cast::<Codes>() {
            return Ok(Coding::Read(codes.clone()));
        }
        if let Ok(codes) = codes.extract() {
            return Ok(Coding::One(codes));
        }
        if let Ok(codes) = codes.extract() {
            return Ok(Coding::Two(codes));
        }
        Ok(Coding::Four(codes.extract()?))
    }

    pub fn coder(&self) -> PyResult<Box<dyn Coder + Send + '_>> {
        Ok(match self {
            Coding::One(codes) => Box::new(codes.as_slice()?),
            Coding::Two(codes) => Box::new(codes.as_slice()?),
            Coding::Four(codes) => Box::new(codes.as_slice()?),
            Coding::Read(codes) => Box::new(&codes.get().0),
        })
    }
}

/// Read the values of a column of words or scalars as numbers: codes of the vocabulary, or the bytes of a scalar.
pub fn numbers(mut reader: Reader, spec: &ColumnSpec) -> Result<(Vec<u64>, Nulls)> {
    let count = reader.plan.len();
    reader.fetch(&[spec], Purpose::Scan { keep: false })?;
    if spec.kind.has_codes() {
        let mut codes = vec![0; count];
        let nulls = reader.codes(spec, &mut codes)?;
        return Ok((codes.into_iter().map(i64::cast_unsigned).collect(), nulls));
    }
    let (dtype, shape) = spec.kind.stored()?;
    let bytes = shape.fixed_bytes(dtype)? as usize;
    let mut stored = vec![0; bytes * count];
    let nulls = reader.fixed(spec, &mut stored)?;
    Ok(((0..count).map(|place| unpack(&stored, bytes as u8, place)).collect(), nulls))
}

/// Return each of three numbers of all rows.
pub fn columns<T>(rows: &[T], of: impl Fn(&T) -> [i64; 3]) -> [Vec<i64>; 3] {
    std::array::from_fn(|column| rows.iter().map(|row| of(row)[column]).collect())
}
