//! Unique keys: find the samples that have given keys, in a transaction and in commits made in the meantime.

use std::collections::HashMap;
use std::sync::Arc;

use penstock_error::{Error, Result};
use penstock_format::ids::PROVISIONAL;
use penstock_format::rows::RowIds;
use penstock_format::schema::ColumnSpec;
use penstock_tensor::Column;

use super::conflict::AGAIN;
use super::manifest::stored::WordList;
use crate::config::Config;
use crate::read::fetch::Purpose;
use crate::read::plan::Plan;
use crate::read::reader::{OnCorrupt, Reader};
use crate::snapshot::Snapshot;
use crate::snapshot::own::Own;
use crate::write::pending::own_value;

/// Keys that a transaction inserted, found or did not find, by their bytes. The key of a category is the word, not its code.
pub struct Keys {
    pub column: ColumnSpec,
    keys: HashMap<Vec<u8>, u64>,
    /// The fill value, if the transaction added the column. Samples of other commits have it.
    fill: Option<Vec<u8>>,
}

/// The row id of a key that no sample has.
pub const NOBODY: u64 = u64::MAX;

/// At most this many samples are read at once to look for keys.
const SAMPLES: u64 = 1 << 16;

impl Keys {
    pub fn new(column: ColumnSpec, fill: Option<Vec<u8>>) -> Keys {
        Keys { column, keys: HashMap::new(), fill }
    }

    /// Add a key and the sample that has it, or `NOBODY`.
    pub fn insert(&mut self, key: Vec<u8>, row_id: u64) {
        self.keys.insert(key, row_id);
    }

    pub fn has(&self, key: &[u8]) -> bool {
        self.keys.get(key).is_some_and(|row_id| *row_id != NOBODY)
    }

    /// Return the row ids of existing samples that have the keys.
    pub fn existing(&self) -> Arc<RowIds> {
        Arc::new(self.keys.values().copied().filter(|row_id| row_id & PROVISIONAL == 0).collect())
    }

    /// Return the first of these samples that has one of the keys although another sample has it, and the key as text. Row ids without a
    /// sample are left out. Cost: reads the key column of the samples.
    pub fn other_with_key(&self, snapshot: &Arc<Snapshot>, row_ids: &RowIds) -> Result<Option<(u64, String)>> {
        let (column, mut found) = (&self.column, None);
        let Some(now) = snapshot.schema.column_by_id(column.id) else {
            return self.other_with_fill(snapshot, row_ids);
        };
        let dtype = |spec: &ColumnSpec| spec.kind.stored().ok().map(|(dtype, _)| dtype);
        if dtype(now) != dtype(column) {
            let text = format!(
                "cannot commit: another commit, made in the meantime, changed the dtype of the key column `{}`",
                column.name
            );
            return Err(Error::new("conflict", text).column(&column.name).hint(AGAIN));
        }
        snapshot.each_position_of(row_ids, |positions| {
            each_key(snapshot, &[], column, positions, |row_id, key| {
                let clash = key.filter(|key| self.keys.get(*key).is_some_and(|own| *own != row_id));
                if let (None, Some(key)) = (&found, clash) {
                    found = Some((row_id, text_of(column, key)));
                }
            })
        })?;
        Ok(found)
    }

    /// Do the same for a column that only this transaction has: all samples there have its fill value.
    fn other_with_fill(&self, snapshot: &Arc<Snapshot>, row_ids: &RowIds) -> Result<Option<(u64, String)>> {
        let with_own = self.fill.as_ref().and_then(|fill| Some((fill, *self.keys.get(fill)?)));
        let Some((fill, own)) = with_own else { return Ok(None) };
        let mut found = None;
        snapshot.each_position_of(row_ids, |positions| {
            let plan = Plan::new(snapshot, positions)?;
            let other = plan.row_ids().into_iter().map(i64::cast_unsigned).find(|row_id| *row_id != own);
            found = found.or(other);
            Ok(())
        })?;
        Ok(found.map(|row_id| (row_id, text_of(&self.column, fill))))
    }
}

/// Visit the key of each of these samples, with its row id, or None for a null.
pub fn each_key(
    snapshot: &Arc<Snapshot>,
    own: &[Own],
    column: &ColumnSpec,
    positions: Vec<u64>,
    mut visit: impl FnMut(u64, Option<&[u8]>),
) -> Result<()> {
    let step = SAMPLES.min((Config::memory_bytes() / 1024).max(1)) as usize;
    for positions in positions.chunks(step) {
        let mut reader = Reader::new(snapshot.clone(), positions.to_vec(), OnCorrupt::Raise)?;
        reader.own = own.to_vec();
        reader.fetch(&[column], Purpose::Scan { keep: true })?;
        let mut words = WordList::default();
        let stored = reader.stored(column, &mut words)?;
        let row_ids = reader.plan.row_ids();
        let mut row = 0;
        keys_of(&stored, &words.words, |key| {
            visit(row_ids[row].cast_unsigned(), key);
            row += 1;
        });
    }
    Ok(())
}

/// Visit the keys in a column, which are nulls or the bytes of values. `words` are those of a category.
pub fn keys_of(column: &Column, words: &[Arc<str>], mut visit: impl FnMut(Option<&[u8]>)) {
    for row in 0..column.len() {
        let value = own_value(column, row).and_then(|value| value.bytes);
        let word =
            |code: &[u8]| words.get(u32::from_le_bytes(*code.first_chunk()?) as usize).map(|word| word.as_bytes());
        visit(if words.is_empty() { value } else { value.and_then(word) });
    }
}

/// Return a key for messages.
pub fn text_of(column: &ColumnSpec, key: &[u8]) -> String {
    let number = || key.iter().rev().fold(0i64, |value, byte| value << 8 | i64::from(*byte));
    match column.kind.stored() {
        Ok((dtype, shape)) if shape.is_fixed() && dtype.size() == key.len() && dtype.size() <= 8 => {
            let unused = 64 - 8 * key.len() as u32;
            (number() << unused >> unused).to_string()
        }
        _ => format!("{:?}", String::from_utf8_lossy(key)),
    }
}

/// Make the error for a key that two samples have.
pub fn not_unique(column: &ColumnSpec, key: &[u8], one: u64, other: u64) -> Error {
    let text = format!("`{}` is not a key: two samples have {}", column.name, text_of(column, key));
    let row_ids = vec![one.cast_signed(), other.cast_signed()];
    Error::new("key-not-unique", text)
        .column(&column.name)
        .row_ids(row_ids)
        .hint("delete one of the samples, or use another key")
}
