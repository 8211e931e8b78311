//! Read samples in the form in which they are written, to write them again elsewhere.

use std::collections::HashMap;
use std::fmt::{Debug, Formatter};
use std::ops::Range;
use std::sync::Arc;

use penstock_error::Result;
use penstock_format::schema::ColumnSpec;
use penstock_tensor::{Column, Pull, Pulled, Ragged};

use crate::read::ragged::RaggedValues;
use crate::read::reader::{OnCorrupt, Reader};
use crate::snapshot::Snapshot;

/// Values of bytes of this size or larger are read again piece by piece while they are written.
pub const LARGE_BYTES: u64 = 8 << 20;

/// How many bytes of such a value are read at once.
pub const PIECE_BYTES: u64 = 8 << 20;

/// Values of bytes of a snapshot, of which the large ones are read when they are written.
struct LargeValues {
    snapshot: Arc<Snapshot>,
    column: ColumnSpec,
    positions: Vec<u64>,
    /// All other values.
    values: RaggedValues,
}

impl Debug for LargeValues {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "values of {}", self.column.name)
    }
}

impl Pull for LargeValues {
    fn pull(&self, row: usize, _: &[Range<u64>], take: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
        if let Some(value) = self.values.get(row) {
            return take(value);
        }
        let mut reader = Reader::new(self.snapshot.clone(), vec![self.positions[row]], OnCorrupt::Raise)?;
        let bytes = reader.find_value(&self.column)?.bytes().unwrap_or(0);
        let mut piece = vec![0; bytes.min(PIECE_BYTES) as usize];
        (0..bytes).step_by(PIECE_BYTES as usize).try_for_each(|begin| {
            let end = (begin + PIECE_BYTES).min(bytes);
            let part = &mut piece[..(end - begin) as usize];
            reader.read_part(&self.column, begin..end, true, part)?;
            take(part)
        })
    }
}

/// Words of a category column that were read, and their codes in that list.
#[derive(Default)]
pub struct WordList {
    pub words: Vec<Arc<str>>,
    codes: HashMap<u32, u32>,
}

impl Reader {
    /// Let `fetch` leave out large values of bytes. `stored` then returns the values of their column as a source, and this
    /// function returns true. Cost: reads unopened tails.
    pub fn leave_out_large(&mut self, columns: &[&ColumnSpec]) -> Result<bool> {
        let mut any = false;
        for column in columns {
            let large = self.large_values(column, LARGE_BYTES)?;
            if large.contains(&true) {
                self.leave_out(column, large);
                any = true;
            }
        }
        Ok(any)
    }

    /// Return the values of a column. `words` lists those of categories so far, and gets the new ones. Call `fetch` first.
    pub fn stored(&self, column: &ColumnSpec, words: &mut WordList) -> Result<Column> {
        let samples = self.plan.len();
        let valid = |nulls: Option<Vec<bool>>| nulls.map(|nulls| nulls.into_iter().map(|null| !null).collect());
        let (dtype, shape) = column.kind.stored()?;
        if column.kind.is_category() {
            let mut codes = vec![0; samples];
            let nulls = self.codes(column, &mut codes)?;
            let vocabulary = self.snapshot.vocabulary(column.id)?;
            let mut data = Vec::with_capacity(samples * size_of::<u32>());
            for (place, code) in codes.into_iter().enumerate() {
                let null = nulls.as_ref().is_some_and(|nulls| nulls[place]);
                let own = if null {
                    0
                } else {
                    words.code(code as u32, |code| vocabulary.word(code).unwrap_or_default().into())
                };
                data.extend_from_slice(&own.to_le_bytes());
            }
            return Ok(Column::Fixed { data, validity: valid(nulls), samples });
        }
        if shape.is_fixed() {
            let mut data = vec![0; samples * shape.fixed_bytes(dtype)? as usize];
            let nulls = self.fixed(column, &mut data)?;
            return Ok(Column::Fixed { data, validity: valid(nulls), samples });
        }
        let values = self.stored_ragged(column)?;
        let large = self.left_out_of(column);
        if !large.is_empty() {
            let validity =
                Some(large.iter().enumerate().map(|(row, large)| *large || values.get(row).is_some()).collect());
            let (snapshot, positions) = (self.snapshot.clone(), self.plan.positions.clone());
            let source = Arc::new(LargeValues { snapshot, column: column.clone(), positions, values });
            return Ok(Column::Pulled(Pulled { shapes: vec![Vec::new(); samples], validity, source }));
        }
        let mut stored = Ragged::default();
        (0..values.len()).for_each(|index| stored.push(values.get(index), values.free(index)));
        Ok(Column::Ragged(stored))
    }
}

impl WordList {
    fn code(&mut self, code: u32, word: impl FnOnce(u32) -> Arc<str>) -> u32 {
        *self.codes.entry(code).or_insert_with(|| {
            self.words.push(word(code));
            self.words.len() as u32 - 1
        })
    }
}
