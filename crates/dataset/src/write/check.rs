//! Check values against the type of their column. Each check returns the values in their stored form, or an error that names
//! the rows. `transaction` calls these checks before it stores any values.

use std::collections::HashMap;
use std::sync::Arc;

use penstock_error::{Error, Result};
use penstock_format::classes::Classes;
use penstock_format::schema::{ColumnKind, Content};
use penstock_tensor::slice::{Grid, elements, whole};
use penstock_tensor::{Column, Dtype, Pulled, Ragged, Shape};

use super::media::{Media, Validate, check_media, mode_of};

/// Values of a named column. Labels and categories are int64 codes (`Fixed`) or words (`Ragged`). If `words` is set, the values
/// are int64 indexes into that list.
pub struct Input {
    pub name: String,
    pub column: Column,
    pub words: Option<Arc<Ragged>>,
}

/// Check a column's values according to its kind, and convert them to their stored form. Categories are converted by `vocabulary`.
pub fn stored(kind: &ColumnKind, column: Column, words: Option<Arc<Ragged>>, validate: Validate) -> Result<Column> {
    match kind.content() {
        Content::Label(classes) => label_codes(classes, column, words),
        Content::Labels(classes) => check_labels(classes, column),
        Content::Text => check_text(column),
        Content::Image(mode) => check_media(column, Media::Image(mode_of(mode)), validate),
        Content::Mask => check_media(column, Media::Mask, validate),
        Content::Plain | Content::Word => {
            let (dtype, shape) = kind.stored()?;
            check_values(column, dtype, &shape, kind.tile())
        }
    }
}

/// Check that all columns have the same number of samples, and return that number.
pub fn check_lengths(inputs: &[Input]) -> Result<usize> {
    let Some(first) = inputs.first() else { return Ok(0) };
    match inputs.iter().find(|input| input.column.len() != first.column.len()) {
        None => Ok(first.column.len()),
        Some(other) => Err(Error::new(
            "column-lengths-differ",
            format!(
                "column `{}` has {} samples, but column `{}` has {}",
                first.name,
                first.column.len(),
                other.name,
                other.column.len()
            ),
        )
        .hint("give every column the same number of samples; use None for nulls")),
    }
}

/// Read codes as int64.
pub fn codes_of(data: &[u8], samples: usize) -> Result<impl Iterator<Item = i64> + '_> {
    if data.len() != samples * 8 {
        return Err(Error::new(
            "invalid-value",
            format!("codes have {} bytes for {samples} samples, expected int64", data.len()),
        ));
    }
    Ok(data
        .chunks_exact(8)
        .map(|code| i64::from_le_bytes([code[0], code[1], code[2], code[3], code[4], code[5], code[6], code[7]])))
}

/// Return the error for a label that the column does not have.
fn unknown_label(names: &[String], what: String, row: usize) -> Error {
    let known: Vec<&str> = names.iter().take(20).map(String::as_str).collect();
    Error::new("invalid-value", format!("contains {what}, which is not a label"))
        .hint(format!("labels: {}; for an open vocabulary, use ps.Category()", known.join(", ")))
        .at_row(row as u64)
}

/// Check lists of places in the list of classes, and convert them to codes.
fn check_labels(classes: &Classes, column: Column) -> Result<Column> {
    let names = &classes.names[..];
    let column = check_values(column, Dtype::Int64, &Shape::free(), None)?;
    let Column::Ragged(mut ragged) = column else {
        return Err(Error::new("invalid-value", "found a tensor, expected lists of labels"));
    };
    for row in (0..ragged.len()).filter(|row| !ragged.is_null(*row)) {
        let codes = ragged.value(row);
        let unknown = codes_of(codes, codes.len() / 8)?.find(|code| !(0..names.len() as i64).contains(code));
        if let Some(code) = unknown {
            return Err(unknown_label(names, format!("code {code}"), row));
        }
    }
    if classes.has_codes() {
        // Nulls are empty, so each of these is the place of a class.
        for code in ragged.data.as_chunks_mut::<8>().0 {
            *code = classes.code_of(u64::from_le_bytes(*code) as usize).unwrap_or_default().to_le_bytes();
        }
    }
    Ok(Column::Ragged(ragged))
}

/// Convert labels to codes as data files store them. The input contains places in the list of classes, names, or indexes into `words`.
pub fn label_codes(classes: &Classes, column: Column, words: Option<Arc<Ragged>>) -> Result<Column> {
    let (names, dtype) = (&classes.names[..], classes.dtype());
    let unknown = |what: String, row: usize| unknown_label(names, what, row);
    let (codes, validity): (Vec<i64>, _) = match column {
        Column::Fixed { data, validity, samples } if let Some(words) = words => {
            let places: HashMap<&[u8], i64> =
                names.iter().enumerate().map(|(code, name)| (name.as_bytes(), code as i64)).collect();
            let known: Vec<Option<i64>> = (0..words.len()).map(|word| places.get(words.value(word)).copied()).collect();
            let code_of = |(row, place): (usize, i64)| {
                let null = validity.as_ref().is_some_and(|validity| !validity[row]);
                let word = usize::try_from(place).ok().filter(|place| *place < known.len());
                match word.map(|word| (word, known[word])) {
                    _ if null => Ok(0),
                    Some((_, Some(code))) => Ok(code),
                    Some((word, None)) => {
                        Err(unknown(format!("`{}`", String::from_utf8_lossy(words.value(word))), row))
                    }
                    None => Err(unknown(format!("index {place} (there are {} words)", known.len()), row)),
                }
            };
            (codes_of(&data, samples)?.enumerate().map(code_of).collect::<Result<_>>()?, validity)
        }
        Column::Fixed { data, validity, samples } => (codes_of(&data, samples)?.collect(), validity),
        Column::Ragged(ragged) => {
            let places: HashMap<&[u8], i64> =
                names.iter().enumerate().map(|(code, name)| (name.as_bytes(), code as i64)).collect();
            let code_of = |row: usize| match ragged.is_null(row) {
                true => Ok(0),
                false => places
                    .get(ragged.value(row))
                    .copied()
                    .ok_or_else(|| unknown(format!("`{}`", String::from_utf8_lossy(ragged.value(row))), row)),
            };
            ((0..ragged.len()).map(code_of).collect::<Result<_>>()?, ragged.validity.clone())
        }
        Column::Pulled(_) => return Err(Error::new("invalid-value", "found a tensor, expected names or codes")),
    };
    let mut data = Vec::with_capacity(codes.len() * dtype.size());
    for (row, code) in codes.iter().enumerate() {
        let null = validity.as_ref().is_some_and(|validity| !validity[row]);
        if !null && !(0..names.len() as i64).contains(code) {
            return Err(unknown(format!("code {code}"), row));
        }
        let stored = if null { None } else { classes.code_of(*code as usize) };
        data.extend_from_slice(&stored.unwrap_or(0).to_le_bytes()[..dtype.size()]);
    }
    Ok(Column::Fixed { data, validity, samples: codes.len() })
}

/// Check that each value is valid UTF-8.
pub fn check_text(column: Column) -> Result<Column> {
    let Column::Ragged(ragged) = &column else {
        return Err(Error::new("invalid-value", "found numbers, expected text"));
    };
    check_utf8(ragged).map(|_| ())?;
    Ok(column)
}

/// Return the values as text.
pub fn texts_of(ragged: &Ragged) -> Result<Vec<&str>> {
    let (whole, mut begin) = (check_utf8(ragged)?, 0);
    let text = |end: &u64| &whole[std::mem::replace(&mut begin, *end as usize)..*end as usize];
    Ok(ragged.ends.iter().map(text).collect())
}

/// Return all values as a single text, after checking that each value is UTF-8.
fn check_utf8(ragged: &Ragged) -> Result<&str> {
    if let Ok(text) = std::str::from_utf8(&ragged.data)
        && ragged.ends.iter().all(|end| text.is_char_boundary(*end as usize))
    {
        return Ok(text);
    }
    let row = (0..ragged.len()).find(|row| std::str::from_utf8(ragged.value(*row)).is_err()).unwrap_or(0);
    let error = std::str::from_utf8(ragged.value(row)).err().map_or(String::new(), |error| format!(": {error}"));
    Err(Error::new("invalid-value", format!("is not UTF-8{error}"))
        .hint("decode it first, or use ps.Bytes()")
        .at_row(row as u64))
}

/// Check that the values' lengths match the shape. Nulls of fixed shape become zeros.
pub fn check_values(column: Column, dtype: Dtype, shape: &Shape, tile: Option<&[u64]>) -> Result<Column> {
    let cell = shape.fixed_bytes(dtype)?;
    match column {
        Column::Pulled(pulled) => {
            check_pulled(&pulled, dtype, shape, tile)?;
            Ok(Column::Pulled(pulled))
        }
        Column::Fixed { mut data, validity, samples } => {
            if !shape.is_fixed() || data.len() as u64 != samples as u64 * cell {
                return Err(Error::new(
                    "invalid-value",
                    format!(
                        "found {} bytes for {samples} samples of shape {shape} and dtype {}",
                        data.len(),
                        dtype.name()
                    ),
                ));
            }
            for row in validity.iter().flatten().enumerate().filter(|(_, valid)| !**valid).map(|(row, _)| row) {
                data[row * cell as usize..(row + 1) * cell as usize].fill(0);
            }
            if dtype == Dtype::Bool && data.iter().any(|byte| *byte > 1) {
                return Err(Error::new("invalid-value", "a bool is neither 0 nor 1"));
            }
            Ok(Column::Fixed { data, validity, samples })
        }
        Column::Ragged(ragged) => {
            let free_count = shape.free_count();
            let has_stated_shape = |row: usize| {
                let free = &ragged.free[row * free_count..(row + 1) * free_count];
                ragged.is_null(row)
                    || free.iter().try_fold(cell, |product, size| product.checked_mul(*size))
                        == Some(ragged.value(row).len() as u64)
            };
            let wanted = if dtype == Dtype::Bytes { 0 } else { ragged.len() * free_count };
            if ragged.free.len() != wanted || (wanted > 0 && !(0..ragged.len()).all(has_stated_shape)) {
                return Err(Error::new(
                    "invalid-value",
                    format!("values do not fit shape {shape} and dtype {}", dtype.name()),
                ));
            }
            Ok(Column::Ragged(ragged))
        }
    }
}

/// Check the shapes of samples that are not in memory.
fn check_pulled(pulled: &Pulled, dtype: Dtype, shape: &Shape, tile: Option<&[u64]>) -> Result<()> {
    let valid = |row: usize| pulled.validity.as_ref().is_none_or(|validity| validity[row]);
    if dtype == Dtype::Bytes {
        return Ok(()); // They end where their source ends.
    }
    for (row, found) in pulled.shapes.iter().enumerate().filter(|(row, _)| valid(*row)) {
        let fits = found.len() == shape.0.len()
            && shape.0.iter().zip(found).all(|(wanted, size)| wanted.is_none_or(|wanted| wanted == *size));
        let bytes = elements(&whole(found)).and_then(|elements| elements.checked_mul(dtype.size() as u64));
        if !fits || bytes.is_none_or(|bytes| bytes >= 1 << 48) {
            let text = format!("has the shape {found:?}, expected {shape} and less than 2^48 bytes");
            return Err(Error::new("invalid-value", text).at_row(row as u64));
        }
        if let Some(tiles) =
            tile.and_then(|tile| Grid::new(found, tile).tiles()).filter(|tiles| *tiles > TILES_A_SAMPLE)
        {
            let text = format!(
                "of shape {found:?} has {tiles} tiles of {:?}, but at most {TILES_A_SAMPLE} are supported",
                tile.unwrap_or_default()
            );
            return Err(Error::new("invalid-value", text)
                .hint("create the dataset with larger tiles")
                .at_row(row as u64));
        }
    }
    Ok(())
}

/// Maximum number of tiles in a sample. With more tiles, reading the tail would take longer than reading a typical slice.
const TILES_A_SAMPLE: u64 = 1 << 20;
