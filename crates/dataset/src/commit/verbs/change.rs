//! Update and delete samples in a transaction.

use std::sync::Arc;

use penstock_error::{Error, Result};
use penstock_format::ids::PROVISIONAL;
use penstock_format::transit::journal::Verb;
use penstock_tensor::Column;

use crate::commit::transaction::Transaction;
use crate::config::Config;
use crate::store::journal::JournalCall;
use crate::write::check::{Input, check_lengths};
use crate::write::media::Validate;

impl Transaction {
    /// Give some columns of existing or appended samples new values. If a row id is repeated, its last value counts. All values and
    /// row ids are checked before any value is stored.
    pub fn update(&mut self, row_ids: &[i64], inputs: Vec<Input>, validate: Validate) -> Result<()> {
        let call = JournalCall { verb: Verb::Update, row_ids, decode: validate == Validate::Decode };
        self.keeping(&call, inputs, |transaction, inputs| transaction.update_checked(row_ids, inputs, validate))
    }

    fn update_checked(&mut self, row_ids: &[i64], inputs: Vec<Input>, validate: Validate) -> Result<()> {
        let samples = check_lengths(&inputs).map_err(|error| error.context("cannot update"))?;
        if inputs.is_empty() || samples != row_ids.len() {
            let text =
                format!("cannot update: {} row ids for {samples} values in {} columns", row_ids.len(), inputs.len());
            return Err(Error::new("column-lengths-differ", text)
                .hint("give at least one column, and one value for each row id"));
        }
        self.find_row_ids(row_ids).map_err(|error| error.context("cannot update"))?;
        let columns = self.check(inputs, validate, "update")?;
        if samples == 0 {
            return Ok(());
        }
        let columns = columns.into_iter().map(|column| column.map(|stored| stored.column)).collect();
        self.update_stored(row_ids.iter().map(|row_id| row_id.cast_unsigned()).collect(), columns)
    }

    pub(in crate::commit) fn update_stored(&mut self, row_ids: Vec<u64>, columns: Vec<Option<Column>>) -> Result<()> {
        // Values of a source can be read during this call only.
        let pulled = columns.iter().flatten().any(|column| matches!(column, Column::Pulled(_)));
        if pulled {
            self.write_pending()?;
        }
        Arc::make_mut(&mut self.changed.pending).push(&row_ids, &self.base.schema, columns);
        if pulled || self.changed.pending.bytes() as u64 > Config::memory_bytes() / 8 {
            self.write_pending()?;
        }
        Ok(())
    }

    /// Delete existing or appended samples. A row id may be repeated.
    pub fn delete(&mut self, row_ids: &[i64]) -> Result<()> {
        self.state.check_open()?;
        self.find_row_ids(row_ids).map_err(|error| error.context("cannot delete"))?;
        let call = JournalCall { verb: Verb::Delete, row_ids, decode: false };
        self.keeping(&call, Vec::new(), |transaction, _| {
            transaction.changed.deleted.extend(row_ids.iter().map(|row_id| row_id.cast_unsigned()));
            Ok(())
        })
    }

    /// Check that these samples exist in this transaction. If one does not, that was read: the caller may catch the error.
    fn find_row_ids(&mut self, row_ids: &[i64]) -> Result<()> {
        self.check_row_ids(row_ids).inspect_err(|error| {
            self.note(Vec::new(), Some(error.row_id_list().iter().map(|row_id| row_id.cast_unsigned()).collect()));
        })
    }

    /// Check that these samples exist in this transaction.
    fn check_row_ids(&self, row_ids: &[i64]) -> Result<()> {
        let missing = |row_id: i64, why: &str| {
            let text = format!("cannot find row id {row_id}: {why} this transaction");
            Err(Error::new("row-id-not-found", text)
                .row_ids(vec![row_id])
                .hint("row ids come from `_row_id`, tx.append or receipt.row_ids"))
        };
        let mut existing = Vec::with_capacity(row_ids.len());
        for row_id in row_ids {
            if self.changed.deleted.contains(&row_id.cast_unsigned()) {
                return missing(*row_id, "its sample was deleted in");
            }
            match row_id.cast_unsigned() {
                appended if appended & PROVISIONAL == 0 => existing.push(*row_id),
                appended if appended & !PROVISIONAL < self.samples() => {}
                _ => return missing(*row_id, "no such sample was appended in"),
            }
        }
        self.base.positions_of(&existing).map(drop)
    }
}
