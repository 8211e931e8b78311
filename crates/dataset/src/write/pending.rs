//! Collect the new values of samples until they are written as overlays. The last value of a sample counts.

use std::collections::HashMap;
use std::sync::Arc;

use penstock_error::Result;
use penstock_format::ids::PROVISIONAL;
use penstock_format::schema::{ColumnSpec, Schema};
use penstock_tensor::Column;

use super::column::Stored;
use super::fragments::FragmentsWriter;
use super::vocabulary::Words;
use crate::store::context::Context;

/// The new values given by one call.
struct Update {
    row_ids: Vec<u64>,
    /// One entry per column of the schema. None for a column that keeps its values.
    columns: Vec<Option<Column>>,
}

/// New values that are not yet written.
#[derive(Default)]
pub struct Pending {
    updates: Vec<Update>,
    bytes: usize,
}

/// Written values: some columns of the samples with these row ids, which ascend and are either all provisional or all final.
pub struct Changed {
    pub columns: Vec<u64>,
    pub row_ids: Vec<u64>,
    pub writer: FragmentsWriter,
}

impl Pending {
    pub fn push(&mut self, row_ids: Vec<u64>, columns: Vec<Option<Column>>) {
        self.bytes += row_ids.len() * size_of::<u64>() + columns.iter().flatten().map(Column::value_bytes).sum::<usize>();
        self.updates.push(Update { row_ids, columns });
    }

    /// Return how many bytes the values occupy.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Write the values. Columns that change for the same samples share files. If a write fails, the files written so far are deleted.
    pub fn write(&mut self, context: &Arc<Context>, schema: &Schema, words: &Words) -> Result<Vec<Changed>> {
        let Pending { updates, .. } = std::mem::take(self);
        let mut written = Vec::new();
        for (places, columns) in by_places(&updates, schema.columns.len()) {
            let split = places.partition_point(|(row_id, _)| row_id & PROVISIONAL == 0);
            for places in [&places[..split], &places[split..]].into_iter().filter(|places| !places.is_empty()) {
                let picks: Vec<(usize, usize)> = places.iter().map(|(_, place)| *place).collect();
                let gathered = columns.iter().map(|index| {
                    // A column has values in some of the updates only, but all picks are from those.
                    let sources: Vec<&Column> = updates.iter().filter_map(|update| update.columns[*index].as_ref()).collect();
                    let nth = |update: usize| updates[..update].iter().filter(|update| update.columns[*index].is_some()).count();
                    let nth: Vec<usize> = (0..updates.len()).map(nth).collect();
                    let picks: Vec<(usize, usize)> = picks.iter().map(|(update, row)| (nth[*update], *row)).collect();
                    Some(Stored { column: Column::gather(&sources, &picks), words: words.of(schema.columns[*index].id) })
                });
                let specs: Vec<ColumnSpec> = columns.iter().map(|index| schema.columns[*index].clone()).collect();
                let ids = specs.iter().map(|spec| spec.id).collect();
                let mut writer = FragmentsWriter::new(context.clone(), specs);
                let done = writer.push(gathered.collect(), picks.len()).and_then(|()| writer.finish());
                written.push(Changed { columns: ids, row_ids: places.iter().map(|(row_id, _)| *row_id).collect(), writer });
                if let Err(error) = done {
                    written.iter_mut().for_each(|changed: &mut Changed| changed.writer.delete());
                    return Err(error);
                }
            }
        }
        Ok(written)
    }
}

/// The samples with new values, each with the last update that has it and the place there.
type Places = Vec<(u64, (usize, usize))>;

/// Find the last value of each sample in each column, and join the columns that change for the same samples in the same updates.
fn by_places(updates: &[Update], columns: usize) -> Vec<(Places, Vec<usize>)> {
    // Columns that occur in the same updates have the same places.
    let mut alike: Vec<(Vec<bool>, Vec<usize>)> = Vec::new();
    for index in 0..columns {
        let occurs: Vec<bool> = updates.iter().map(|update| update.columns[index].is_some()).collect();
        match alike.iter_mut().find(|(known, _)| *known == occurs) {
            Some((_, columns)) => columns.push(index),
            None if occurs.contains(&true) => alike.push((occurs, vec![index])),
            None => {}
        }
    }
    let places = |occurs: &[bool]| {
        let mut last: HashMap<u64, (usize, usize)> = HashMap::new();
        for (number, update) in updates.iter().enumerate().filter(|(number, _)| occurs[*number]) {
            last.extend(update.row_ids.iter().enumerate().map(|(row, row_id)| (*row_id, (number, row))));
        }
        let mut places: Places = last.into_iter().collect();
        places.sort_unstable();
        places
    };
    alike.into_iter().map(|(occurs, columns)| (places(&occurs), columns)).collect()
}
