//! Upsert: update the samples that have given keys, and append the others.

use std::collections::HashSet;

use penstock_error::{Error, Result};
use penstock_format::ids::PROVISIONAL;
use penstock_format::schema::ColumnSpec;
use penstock_format::transit::journal::Verb;

use super::keyed::given_keys;
use crate::commit::keys::text_of;
use crate::commit::transaction::Transaction;
use crate::store::journal::JournalCall;
use crate::write::check::{Input, check_lengths};
use crate::write::column::Stored;
use crate::write::media::Validate;

impl Transaction {
    /// Update the samples whose value in column `key` is given, and append the others. If a key is repeated, its last sample counts.
    /// Returns the row ids, which are provisional for new samples. The commit fails if another commit adds one of the keys in the
    /// meantime. Cost: reads the whole key column.
    pub fn upsert(&mut self, key: &str, inputs: Vec<Input>, validate: Validate) -> Result<Vec<i64>> {
        let call = JournalCall {
            verb: Verb::Upsert { key: key.to_owned() },
            row_ids: &[],
            decode: validate == Validate::Decode,
        };
        self.keeping(&call, inputs, |transaction, inputs| transaction.upsert_checked(key, inputs, validate))
    }

    fn upsert_checked(&mut self, key: &str, inputs: Vec<Input>, validate: Validate) -> Result<Vec<i64>> {
        let samples = check_lengths(&inputs).map_err(|error| error.context("cannot upsert"))?;
        let columns = self.check(inputs, validate, "upsert")?;
        let base = self.base.clone();
        let spec = base.column(key)?;
        let index = base.schema.columns.iter().position(|column| column.id == spec.id).unwrap_or_default();
        let given = columns[index].as_ref().ok_or_else(|| {
            Error::new("invalid-argument", format!("cannot upsert: the key column `{key}` is not given"))
                .hint("give one key for each sample")
        })?;
        let keys = given_keys(spec, given, "upsert")?;
        let (row_ids, is_new) = self.rows_for(spec, &keys)?;
        let (new, known): (Vec<usize>, Vec<usize>) = (0..samples).partition(|row| is_new[*row]);
        if !new.is_empty() {
            let take_new = |stored: &Stored| Stored { column: stored.column.take(&new), words: stored.words.clone() };
            self.append_stored(columns.iter().map(|column| column.as_ref().map(take_new)).collect(), new.len())?;
        }
        let others = columns.iter().enumerate().filter(|(at, column)| *at != index && column.is_some());
        if !known.is_empty() && others.count() > 0 {
            let updated = columns.iter().enumerate();
            let updated = updated
                .map(|(at, column)| column.as_ref().filter(|_| at != index).map(|stored| stored.column.take(&known)));
            self.update_stored(known.iter().map(|row| row_ids[*row]).collect(), updated.collect())?;
        }
        for (key, row_id) in keys.into_iter().zip(&row_ids) {
            self.reads.keys_of_column(spec, self.altered.as_ref()).insert(key, *row_id);
        }
        Ok(row_ids.into_iter().map(u64::cast_signed).collect())
    }

    /// Return the row id of each key, and whether its sample must be appended. New samples have the row ids that `append` will give.
    fn rows_for(&mut self, spec: &ColumnSpec, keys: &[Vec<u8>]) -> Result<(Vec<u64>, Vec<bool>)> {
        let mut found = self.find_keys(spec, keys, "upsert")?;
        let mut next = PROVISIONAL | self.samples();
        let (mut row_ids, mut is_new) = (Vec::with_capacity(keys.len()), Vec::with_capacity(keys.len()));
        for key in keys {
            let known = found.entry(key).or_default();
            is_new.push(known.is_none());
            row_ids.push(*known.get_or_insert(next));
            next += u64::from(is_new.last() == Some(&true));
        }
        Ok((row_ids, is_new))
    }

    /// Let all samples that are appended from now on have unique keys in a column. The commit fails if another commit adds one of them in the
    /// meantime. The samples of the snapshot are not looked at. Cost: about 100 bytes of memory per sample.
    pub fn keep_unique(&mut self, key: &str) -> Result<()> {
        self.state.check_open()?;
        self.reads.unique = Some(self.base.column(key)?.clone());
        Ok(())
    }

    /// Return the keys of samples before they are appended, if keys must be unique. Refuses those that the transaction has.
    pub(in crate::commit) fn new_keys(&self, columns: &[Option<Stored>]) -> Result<Vec<Vec<u8>>> {
        let Some(spec) = &self.reads.unique else { return Ok(Vec::new()) };
        let index = self.base.schema.columns.iter().position(|column| column.id == spec.id);
        let given = index.and_then(|index| columns.get(index)?.as_ref()).ok_or_else(|| {
            Error::new("invalid-argument", format!("cannot append: the key column `{}` is not given", spec.name))
                .column(&spec.name)
        })?;
        let keys = given_keys(spec, given, "append to")?;
        let known = self.reads.known_keys(spec.id);
        let mut new = HashSet::with_capacity(keys.len());
        match keys.iter().position(|key| known.is_some_and(|known| known.has(key)) || !new.insert(key)) {
            None => Ok(keys),
            Some(row) => Err(Error::new(
                "key-not-unique",
                format!("{} is also the key of an earlier sample", text_of(spec, &keys[row])),
            )
            .at_row(row as u64)
            .column(&spec.name)
            .hint("remove one of the two samples, leave out the later one (--on-error skip), or keep both (--mode append)")
            .context(format!("cannot append to column `{}`", spec.name))),
        }
    }

    /// Remember the keys of samples that were appended.
    pub(in crate::commit) fn insert_keys(&mut self, keys: Vec<Vec<u8>>, first: u64) {
        if let Some(spec) = self.reads.unique.clone() {
            let known = self.reads.keys_of_column(&spec, self.altered.as_ref());
            keys.into_iter().zip(first..).for_each(|(key, row_id)| known.insert(key, row_id));
        }
    }
}
