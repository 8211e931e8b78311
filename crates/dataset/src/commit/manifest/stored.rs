//! Read samples in the form in which they are written, to write them again elsewhere.

use std::collections::HashMap;
use std::sync::Arc;

use penstock_error::Result;
use penstock_format::schema::{ColumnKind, ColumnSpec};
use penstock_tensor::{Column, Ragged};

use crate::read::reader::Reader;

/// Words of a category column that were read, and their codes in that list.
#[derive(Default)]
pub struct WordList {
    pub words: Vec<Arc<str>>,
    codes: HashMap<u32, u32>,
}

impl Reader {
    /// Return the values of a column. `words` lists those of categories so far, and gets the new ones. Call `fetch` first.
    pub fn stored(&self, column: &ColumnSpec, words: &mut WordList) -> Result<Column> {
        let samples = self.plan.len();
        let valid = |nulls: Option<Vec<bool>>| nulls.map(|nulls| nulls.into_iter().map(|null| !null).collect());
        let (dtype, shape) = column.kind.stored()?;
        if matches!(column.kind, ColumnKind::Category) {
            let mut codes = vec![0; samples];
            let nulls = self.codes(column, &mut codes)?;
            let vocabulary = self.snapshot.vocabulary(column.id)?;
            let mut data = Vec::with_capacity(samples * size_of::<u32>());
            for (place, code) in codes.into_iter().enumerate() {
                let null = nulls.as_ref().is_some_and(|nulls| nulls[place]);
                let own = if null { 0 } else { words.code(code as u32, |code| vocabulary.word(code).unwrap_or_default().into()) };
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
