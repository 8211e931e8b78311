//! New samples that a transaction keeps in memory until they are worth a data file. Its reads see them meanwhile.

use std::sync::Arc;

use penstock_error::Result;
use penstock_format::ids::{PROVISIONAL, Run};
use penstock_format::manifest::Fragment;
use penstock_format::schema::{ColumnSpec, Schema};
use penstock_tensor::Column;

use super::column::Stored;
use super::fragments::FragmentsWriter;
use super::pending::own_value;
use super::vocabulary::Words;
use crate::snapshot::own::{Own, OwnValue, OwnValues};

/// The samples of one call.
struct Batch {
    /// The provisional counter of the first sample.
    first: u64,
    samples: usize,
    columns: Vec<Option<Column>>,
}

/// New samples, oldest first.
#[derive(Default, Clone)]
pub struct Fresh {
    batches: Vec<Arc<Batch>>,
    bytes: usize,
}

impl Fresh {
    /// Return the number of samples.
    pub fn samples(&self) -> u64 {
        self.batches.iter().map(|batch| batch.samples as u64).sum()
    }

    pub fn push(&mut self, first: u64, columns: Vec<Option<Stored>>, samples: usize) {
        self.bytes += bytes_of(&columns);
        // A list of words that is held here would be copied for each new word.
        let columns = columns.into_iter().map(|column| column.map(|stored| stored.column)).collect();
        self.batches.push(Arc::new(Batch { first, samples, columns }));
    }

    /// Return how many bytes the values would occupy with these ones. Returns None if these must be written at once.
    pub fn bytes_with(&self, columns: &[Option<Stored>]) -> Option<usize> {
        let pulled = columns.iter().flatten().any(|stored| matches!(stored.column, Column::Pulled(_)));
        (!pulled).then(|| self.bytes + bytes_of(columns))
    }

    /// Write the samples and forget them. `words` are those of the transaction.
    pub fn write(&mut self, writer: &mut FragmentsWriter, schema: &Schema, words: &Words) -> Result<()> {
        for batch in std::mem::take(self).batches {
            let Batch { samples, columns, .. } = Arc::try_unwrap(batch).unwrap_or_else(|shared| Batch {
                first: shared.first,
                samples: shared.samples,
                columns: shared.columns.clone(),
            });
            let stored = |(column, spec): (Option<Column>, &ColumnSpec)| {
                column.map(|column| Stored { column, words: words.of(spec.id) })
            };
            writer.push(columns.into_iter().zip(&schema.columns).map(stored).collect(), samples)?;
        }
        Ok(())
    }

    /// Return a fragment with the row ids of the samples. Its values are those in memory. None without samples.
    pub fn fragment(&self) -> Option<Fragment> {
        let (first, samples) = (self.batches.first()?.first, self.samples());
        Some(Fragment {
            samples,
            is_stage: false,
            runs: vec![Run { first: PROVISIONAL | first, count: samples }],
            files: Vec::new(),
        })
    }

    /// Return the values for reads. None without samples.
    pub fn own(&self, schema: Arc<Schema>) -> Option<Own> {
        (!self.batches.is_empty()).then(|| Arc::new(FreshValues { fresh: self.clone(), schema }) as Own)
    }
}

fn bytes_of(columns: &[Option<Stored>]) -> usize {
    columns.iter().flatten().map(|stored| stored.column.value_bytes()).sum()
}

struct FreshValues {
    fresh: Fresh,
    schema: Arc<Schema>,
}

impl OwnValues for FreshValues {
    fn changes(&self, column: u64) -> bool {
        let index = self.schema.columns.iter().position(|spec| spec.id == column);
        index.is_some_and(|index| self.fresh.batches.iter().any(|batch| batch.columns[index].is_some()))
    }

    fn find(&self, column: u64, row_id: u64) -> Option<OwnValue<'_>> {
        let counter = Some(row_id & !PROVISIONAL).filter(|_| row_id & PROVISIONAL != 0)?;
        let batches = &self.fresh.batches;
        let batch = &batches[batches.partition_point(|batch| batch.first <= counter).checked_sub(1)?];
        let row = (counter - batch.first) as usize;
        let index = self.schema.columns.iter().position(|spec| spec.id == column)?;
        own_value(batch.columns[index].as_ref().filter(|_| row < batch.samples)?, row)
    }
}
