//! What a transaction read, which other commits must not change in the meantime.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use penstock_format::ids::PROVISIONAL;
use penstock_format::rows::RowIds;
use penstock_format::schema::ColumnSpec;

use crate::commit::changes::{Altered, NO_COLUMN, RowsRead};
use crate::commit::keys::Keys;

/// Whether a transaction's reads count when it is committed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    /// The result is as if the transactions had run one after another: a commit fails if another commit changed what was read.
    Serializable,
    /// Only writes count.
    Snapshot,
}

/// The reads of a transaction, and its keys.
pub struct TransactionReads {
    pub isolation: Isolation,
    pub all: ReadSet,
    /// Reads since the last frame of the journal.
    pub unkept: ReadSet,
    /// The keys that were added, matched or looked for.
    pub keys: Vec<Keys>,
    /// The column in which all appended samples have unique keys.
    pub unique: Option<ColumnSpec>,
}

impl TransactionReads {
    pub fn new(isolation: Isolation) -> TransactionReads {
        TransactionReads {
            isolation,
            all: ReadSet::default(),
            unkept: ReadSet::default(),
            keys: Vec::new(),
            unique: None,
        }
    }

    /// Return the reads that count.
    pub fn counted(&self) -> Vec<RowsRead> {
        let noted = if self.isolation == Isolation::Serializable { self.all.existing() } else { Vec::new() };
        // Keys are unique whatever the isolation, so the samples that were updated by their keys must keep them.
        let keys = self.keys.iter().map(|keys| RowsRead { columns: vec![keys.column.id], rows: Some(keys.existing()) });
        noted.into_iter().chain(keys).collect()
    }

    /// Return the keys of a column, if it was used as a key.
    pub fn known_keys(&self, column: u64) -> Option<&Keys> {
        self.keys.iter().find(|keys| keys.column.id == column)
    }

    /// Return the keys of a column, to which others will be added. `altered` has the fill value of a new column.
    pub fn keys_of_column(&mut self, spec: &ColumnSpec, altered: Option<&Altered>) -> &mut Keys {
        let known = self.keys.iter().position(|keys| keys.column.id == spec.id);
        let at = known.unwrap_or_else(|| {
            let fill = altered.and_then(|altered| altered.fills.get(&spec.id).cloned());
            self.keys.push(Keys::new(spec.clone(), fill));
            self.keys.len() - 1
        });
        &mut self.keys[at]
    }
}

/// Reads so far: row ids by columns, or None for all rows.
#[derive(Default)]
pub struct ReadSet(HashMap<Vec<u64>, Option<Rows>>);

struct Rows {
    ids: Vec<u64>,
    /// Repeated row ids are removed when there are this many.
    limit: usize,
}

/// The first limit of the row ids of reads.
const READS: usize = 1 << 18;

impl ReadSet {
    /// Add rows of columns, or all rows. Without columns, only the existence of the rows was read.
    pub fn note(&mut self, mut columns: Vec<u64>, row_ids: Option<Vec<u64>>) {
        columns.sort_unstable();
        if columns.is_empty() {
            columns.push(NO_COLUMN);
        }
        match (self.0.entry(columns), row_ids) {
            (Entry::Occupied(mut known), None) => drop(known.insert(None)),
            (Entry::Vacant(free), row_ids) => drop(free.insert(row_ids.map(|ids| Rows { ids, limit: READS }))),
            (Entry::Occupied(mut known), Some(row_ids)) => {
                if let Some(Rows { ids, limit }) = known.get_mut() {
                    ids.extend(row_ids);
                    if ids.len() > *limit {
                        ids.sort_unstable();
                        ids.dedup();
                        *limit = READS.max(2 * ids.len());
                    }
                }
            }
        }
    }

    /// Return all reads so far.
    pub fn all(&self) -> Vec<(Vec<u64>, Option<Vec<u64>>)> {
        self.0.iter().map(|(columns, rows)| (columns.clone(), rows.as_ref().map(|rows| rows.ids.clone()))).collect()
    }

    /// Return the reads, without those of samples that the transaction appended.
    pub fn existing(&self) -> Vec<RowsRead> {
        let existing = |rows: &Rows| {
            Arc::new(rows.ids.iter().copied().filter(|row_id| row_id & PROVISIONAL == 0).collect::<RowIds>())
        };
        self.0
            .iter()
            .map(|(columns, rows)| RowsRead { columns: columns.clone(), rows: rows.as_ref().map(existing) })
            .collect()
    }
}
