//! Find samples by their keys in a transaction, and update those that have given keys.

use std::collections::HashMap;

use penstock_error::{Error, Result};
use penstock_format::schema::ColumnSpec;
use penstock_format::transit::journal::Verb;

use crate::commit::keys::{NOBODY, each_key, keys_of, not_unique};
use crate::commit::transaction::{Isolation, Transaction};
use crate::store::journal::JournalCall;
use crate::write::check::{Input, check_lengths};
use crate::write::column::Stored;
use crate::write::media::Validate;

impl Transaction {
    /// Give the samples whose value in column `key` is given new values in the other columns. If a key is repeated, its last values count.
    /// Returns the rows of the input whose keys no sample has; their values are not looked at. What was found and what was not are reads.
    /// Cost: reads the whole key column.
    pub fn update_on(&mut self, key: &str, inputs: Vec<Input>, validate: Validate) -> Result<Vec<u64>> {
        let call = JournalCall {
            verb: Verb::UpdateOn { key: key.to_owned() },
            row_ids: &[],
            decode: validate == Validate::Decode,
        };
        self.keeping(&call, inputs, |transaction, inputs| transaction.update_on_checked(key, inputs, validate))
    }

    fn update_on_checked(&mut self, key: &str, inputs: Vec<Input>, validate: Validate) -> Result<Vec<u64>> {
        check_lengths(&inputs).map_err(|error| error.context("cannot update"))?;
        let (given, mut others): (Vec<Input>, Vec<Input>) = inputs.into_iter().partition(|input| input.name == key);
        let base = self.base.clone();
        let spec = base.column(key)?;
        if given.is_empty() || others.is_empty() {
            let what = if given.is_empty() {
                format!("the key column `{key}` is not given")
            } else {
                "no column besides the key is given".into()
            };
            return Err(Error::new("invalid-argument", format!("cannot update: {what}"))
                .hint("give the keys, and the new values of at least one column"));
        }
        let keys = self.keys_to_find(spec, given)?;
        let found = self.find_keys(spec, &keys, "update")?;
        let rows: Vec<Option<u64>> = keys.iter().map(|key| found.get(&key[..]).copied().flatten()).collect();
        let (known, missing): (Vec<usize>, Vec<usize>) = (0..keys.len()).partition(|row| rows[*row].is_some());
        if !missing.is_empty() {
            others.iter_mut().for_each(|input| input.column = input.column.take(&known));
        }
        let columns = self.check(others, validate, "update").map_err(|error| among(error, &known))?;
        if !known.is_empty() {
            let columns = columns.into_iter().map(|column| column.map(|stored| stored.column)).collect();
            self.update_stored(rows.iter().copied().flatten().collect(), columns)?;
        }
        if self.reads.isolation == Isolation::Serializable {
            for (key, row_id) in keys.iter().zip(&rows) {
                self.reads.keys_of_column(spec, self.altered.as_ref()).insert(key.clone(), row_id.unwrap_or(NOBODY));
            }
        }
        Ok(missing.into_iter().map(|row| row as u64).collect())
    }

    /// Return the keys to look for. Words of a category that are looked for are not added to it.
    fn keys_to_find(&mut self, spec: &ColumnSpec, given: Vec<Input>) -> Result<Vec<Vec<u8>>> {
        let before = self.words.mark();
        let mut columns = self.check(given, Validate::Header, "update")?;
        let keys = columns.iter_mut().find_map(Option::take).map(|stored| given_keys(spec, &stored, "update"));
        self.words.return_to(&before);
        keys.unwrap_or_else(|| Ok(Vec::new()))
    }

    /// Return the sample that has each of these keys, or None. If two samples have one of them, that was read: the caller may catch the error.
    pub(super) fn find_keys<'a>(
        &mut self,
        spec: &ColumnSpec,
        keys: &'a [Vec<u8>],
        verb: &str,
    ) -> Result<HashMap<&'a [u8], Option<u64>>> {
        let (snapshot, own) = self.view()?;
        let mut found: HashMap<&[u8], Option<u64>> = keys.iter().map(|key| (&key[..], None)).collect();
        let mut twice = None;
        each_key(&snapshot, &own, spec, (0..snapshot.len()).collect(), |row_id, key| {
            let Some((key, known)) = key.and_then(|key| Some((key, found.get_mut(key)?))) else { return };
            match known {
                Some(other) => {
                    twice.get_or_insert_with(|| ([*other, row_id], not_unique(spec, key, *other, row_id)));
                }
                None => *known = Some(row_id),
            }
        })?;
        match twice {
            None => Ok(found),
            Some((rows, error)) => {
                self.note(vec![spec.id], Some(rows.to_vec()));
                Err(error.context(format!("cannot {verb}")))
            }
        }
    }
}

/// Give an error about some of the rows of the input their numbers there.
fn among(error: Error, rows: &[usize]) -> Error {
    let number = |row: u64| rows.get(row as usize).map_or(row, |row| *row as u64);
    let numbers = error.row_list().iter().map(|row| number(*row)).collect();
    let error = match error.row() {
        Some(row) => error.at_row(number(row)),
        None => error,
    };
    error.rows(numbers)
}

/// Return the bytes of each value as a key, or None for a null. Empty for columns that cannot be keys.
pub(super) fn keys_in(spec: &ColumnSpec, given: &Stored) -> Vec<Option<Vec<u8>>> {
    let (mut keys, none) = (Vec::new(), std::sync::Arc::default());
    if spec.kind.is_exact() {
        keys_of(&given.column, given.words.as_ref().unwrap_or(&none), |key| keys.push(key.map(<[u8]>::to_vec)));
    }
    keys
}

/// Return the bytes of each key. Nulls, and columns whose values are not exact, are refused.
pub(super) fn given_keys(spec: &ColumnSpec, given: &Stored, verb: &str) -> Result<Vec<Vec<u8>>> {
    if !spec.kind.is_exact() {
        let text = format!("column `{}` cannot be a key", spec.name);
        return Err(Error::new("invalid-argument", text)
            .hint("a key is a whole number, bool, timestamp, duration, time, text, bytes, label or category"));
    }
    let keys = keys_in(spec, given);
    match keys.iter().position(Option::is_none) {
        None => Ok(keys.into_iter().flatten().collect()),
        Some(row) => Err(Error::new("invalid-value", "is null, but a key must not be null")
            .at_row(row as u64)
            .column(&spec.name)
            .context(format!("cannot {verb} column `{}`", spec.name))),
    }
}
