//! Collect the new values of samples until they are written as overlays. The last value of a sample counts.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use penstock_error::Result;
use penstock_format::ids::PROVISIONAL;
use penstock_format::schema::{ColumnSpec, Schema};
use penstock_tensor::Column;
use rustc_hash::FxHashMap;

use super::column::Stored;
use super::fragments::FragmentsWriter;
use super::vocabulary::Words;
use crate::snapshot::own::{OwnValue, OwnValues};
use crate::store::context::Context;

/// New values that are not yet written, by column id.
#[derive(Default, Clone)]
pub struct Pending {
    columns: HashMap<u64, PendingColumn>,
    calls: u64,
    bytes: usize,
}

/// New values of one column.
#[derive(Clone)]
struct PendingColumn {
    /// For each row id, the place of its last value.
    places: FxHashMap<u64, usize>,
    column: Column,
    /// The same for columns that were changed by the same calls, and so have the same row ids.
    calls: u64,
}

/// Written values: some columns of the samples with these row ids, which ascend and are either all provisional or all final.
pub struct Changed {
    pub columns: Vec<u64>,
    pub row_ids: Vec<u64>,
    pub writer: FragmentsWriter,
}

impl Pending {
    /// Return whether any value is of a sample that the transaction appended.
    pub fn has_appended(&self) -> bool {
        self.columns.values().any(|values| values.places.keys().any(|row_id| row_id & PROVISIONAL != 0))
    }

    /// Add new values, given by one call. `columns` has an entry for each column of the schema, or None for those that keep their values.
    /// Values that are pulled must be written before the next call.
    pub fn push(&mut self, row_ids: &[u64], schema: &Schema, columns: Vec<Option<Column>>) {
        self.calls += 1;
        for (spec, column) in schema.columns.iter().zip(columns) {
            let Some(column) = column else { continue };
            match self.columns.entry(spec.id) {
                Entry::Vacant(free) => {
                    let places = row_ids.iter().enumerate().map(|(place, row_id)| (*row_id, place)).collect();
                    self.bytes += free.insert(PendingColumn { places, column, calls: self.calls }).bytes();
                }
                Entry::Occupied(mut known) => {
                    let known = known.get_mut();
                    let before = known.bytes();
                    known.push(row_ids, column, self.calls);
                    self.bytes += known.bytes().saturating_sub(before);
                }
            }
        }
    }

    pub fn is_empty(&self) -> bool {
        self.columns.is_empty()
    }

    /// Return how many bytes the values occupy.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Write the values and forget them. Columns that change for the same samples share files. If a write fails, the files written so far
    /// are deleted. Files of at most `inline` bytes remain in memory.
    pub fn write(
        &mut self,
        context: &Arc<Context>,
        schema: &Schema,
        words: &Words,
        inline: u64,
    ) -> Result<Vec<Changed>> {
        let Pending { columns, .. } = std::mem::take(self);
        let mut written: Vec<Changed> = Vec::new();
        for (mut row_ids, specs) in alike(&columns, schema) {
            let split = row_ids.partition_point(|row_id| row_id & PROVISIONAL == 0);
            let appended = row_ids.split_off(split);
            for row_ids in [row_ids, appended].into_iter().filter(|row_ids| !row_ids.is_empty()) {
                let stored = |spec: &&ColumnSpec| {
                    let PendingColumn { places, column, .. } = &columns[&spec.id];
                    let rows: Vec<usize> = row_ids.iter().map(|row_id| places[row_id]).collect();
                    Some(Stored { column: column.take(&rows), words: words.of(spec.id) })
                };
                let mut writer =
                    FragmentsWriter::new(context.clone(), specs.iter().map(|spec| (*spec).clone()).collect())
                        .keeping(inline);
                let done =
                    writer.push(specs.iter().map(stored).collect(), row_ids.len()).and_then(|()| writer.finish());
                written.push(Changed { columns: specs.iter().map(|spec| spec.id).collect(), row_ids, writer });
                if let Err(error) = done {
                    written.iter_mut().for_each(|changed| changed.writer.delete());
                    return Err(error);
                }
            }
        }
        Ok(written)
    }
}

/// Join the columns that change for the same samples. Returns the row ids of each group in ascending order, and its columns.
fn alike<'a>(columns: &HashMap<u64, PendingColumn>, schema: &'a Schema) -> Vec<(Vec<u64>, Vec<&'a ColumnSpec>)> {
    let mut by_calls: Vec<(u64, Vec<&ColumnSpec>)> = Vec::new();
    for spec in &schema.columns {
        let Some(PendingColumn { calls, .. }) = columns.get(&spec.id) else { continue };
        match by_calls.iter_mut().find(|(known, _)| known == calls) {
            Some((_, specs)) => specs.push(spec),
            None => by_calls.push((*calls, vec![spec])),
        }
    }
    // Different calls may have changed the same samples.
    let mut alike: Vec<(Vec<u64>, Vec<&ColumnSpec>)> = Vec::new();
    for (_, mut specs) in by_calls {
        let mut row_ids: Vec<u64> = columns[&specs[0].id].places.keys().copied().collect();
        row_ids.sort_unstable();
        match alike.iter_mut().find(|(known, _)| *known == row_ids) {
            Some((_, known)) => known.append(&mut specs),
            None => alike.push((row_ids, specs)),
        }
    }
    alike
}

impl PendingColumn {
    fn push(&mut self, row_ids: &[u64], new: Column, call: u64) {
        // Any function that differs for different sequences of calls.
        self.calls = self.calls.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ call;
        if let (
            Column::Fixed { data, validity, samples },
            Column::Fixed { data: from, validity: valid, samples: count },
        ) = (&mut self.column, &new)
        {
            let cell = from.len().checked_div(*count).unwrap_or(0);
            for (row, row_id) in row_ids.iter().enumerate() {
                let place = *self.places.entry(*row_id).or_insert(*samples);
                let (value, given) =
                    (&from[row * cell..(row + 1) * cell], valid.as_ref().is_none_or(|valid| valid[row]));
                if place == *samples {
                    *samples += 1;
                    data.extend_from_slice(value);
                    validity.iter_mut().for_each(|validity| validity.push(true));
                } else {
                    data[place * cell..(place + 1) * cell].copy_from_slice(value);
                }
                if !given || validity.is_some() {
                    validity.get_or_insert_with(|| vec![true; *samples])[place] = given;
                }
            }
            return;
        }
        let before = self.column.len();
        self.places.extend(row_ids.iter().enumerate().map(|(row, row_id)| (*row_id, before + row)));
        match (&mut self.column, new) {
            (Column::Ragged(all), Column::Ragged(new)) => {
                let each = new.free.len().checked_div(new.len()).unwrap_or(0);
                for row in 0..new.len() {
                    all.push((!new.is_null(row)).then(|| new.value(row)), &new.free[row * each..(row + 1) * each]);
                }
            }
            // Columns of one kind have one form, except for values that are pulled, which are written at once.
            (all, new) => *all = new,
        }
    }

    /// Return how many bytes the values occupy.
    fn bytes(&self) -> usize {
        self.places.len().max(self.column.len()) * size_of::<(u64, usize)>() + self.column.value_bytes()
    }

    fn get(&self, row_id: u64) -> Option<OwnValue<'_>> {
        own_value(&self.column, *self.places.get(&row_id)?)
    }
}

/// Return a value in memory. Values that are pulled are not.
pub fn own_value(column: &Column, place: usize) -> Option<OwnValue<'_>> {
    Some(match column {
        Column::Fixed { data, validity, samples } => {
            let cell = data.len().checked_div(*samples).unwrap_or(0);
            let valid = validity.as_ref().is_none_or(|validity| validity[place]);
            OwnValue { bytes: valid.then(|| &data[place * cell..(place + 1) * cell]), free: &[] }
        }
        Column::Ragged(ragged) => {
            let each = ragged.free.len().checked_div(ragged.len()).unwrap_or(0);
            let bytes = (!ragged.is_null(place)).then(|| ragged.value(place));
            OwnValue { bytes, free: &ragged.free[place * each..(place + 1) * each] }
        }
        Column::Pulled(_) => return None,
    })
}

impl OwnValues for Pending {
    fn changes(&self, column: u64) -> bool {
        self.columns.contains_key(&column)
    }

    fn find(&self, column: u64, row_id: u64) -> Option<OwnValue<'_>> {
        self.columns.get(&column)?.get(row_id)
    }
}
