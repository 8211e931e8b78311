//! Write samples of a snapshot again, under the row ids that they have.

use std::collections::HashMap;
use std::sync::Arc;

use penstock_error::Result;
use penstock_format::ids::{Run, data_name};
use penstock_format::manifest::{FRAGMENT_RUNS, Fragment};
use penstock_format::rows::RowIds;
use penstock_format::schema::ColumnSpec;
use penstock_tensor::Column;

use super::stored::WordList;
use crate::read::fetch::Purpose;
use crate::read::reader::{OnCorrupt, Reader};
use crate::read::scan::GroupSize;
use crate::snapshot::Snapshot;
use crate::write::column::Stored;
use crate::write::fragments::FragmentsWriter;

/// Row ids, and the position of the first of them. The others follow.
pub type PlacedRun = (Run, u64);

/// Samples that were written again.
#[derive(Default)]
pub struct Rewritten {
    pub fragments: Vec<Fragment>,
    /// Feature bits required to read the files.
    pub features: u64,
    /// The watched samples without a value, by column.
    pub nulls: HashMap<u64, RowIds>,
}

/// Write these samples as fragments that list these columns. `puts` gets the names of their files. The result says which of the samples `watched` have no
/// value, by column. Cost: reads and writes each value once, and holds an eighth of the memory budget, or one value.
pub fn rewritten(
    snapshot: &Arc<Snapshot>,
    specs: &[&ColumnSpec],
    rows: &[PlacedRun],
    watched: &HashMap<u64, RowIds>,
    puts: &mut Vec<String>,
) -> Result<Rewritten> {
    let mut writer = FragmentsWriter::new(snapshot.context.clone(), specs.iter().map(|spec| (*spec).clone()).collect());
    let mut nulls: HashMap<u64, Vec<u64>> = HashMap::new();
    let mut lists: HashMap<u64, WordList> = HashMap::new();
    // A manifest page must not become much larger than usual.
    let done = rows.chunks(FRAGMENT_RUNS).try_for_each(|rows| {
        let each = |(run, position): &PlacedRun| {
            let (run, position) = (*run, *position);
            (0..run.count).map(move |index| (run.first + index, position + index))
        };
        let (mut rest, mut group) = (rows.iter().flat_map(each), GroupSize::default());
        loop {
            let (ids, positions): (Vec<u64>, Vec<u64>) = rest.by_ref().take(group.samples).unzip();
            if ids.is_empty() {
                return writer.finish();
            }
            let mut reader = Reader::new(snapshot.clone(), positions, OnCorrupt::Raise)?;
            reader.leave_out_large(specs)?;
            reader.fetch(specs, Purpose::Scan { keep: false })?;
            let stored = |spec: &&ColumnSpec| {
                let list = lists.entry(spec.id).or_default();
                let column = reader.stored(spec, list)?;
                if let Some(watched) = watched.get(&spec.id) {
                    let is_watched = |id: &u64| watched.count_in(*id..id + 1) > 0;
                    nulls
                        .entry(spec.id)
                        .or_default()
                        .extend(null_places(&column).map(|place| ids[place]).filter(is_watched));
                }
                let words = spec.kind.is_category().then(|| Arc::new(list.words.clone()));
                Ok(Stored { column, words })
            };
            let columns = specs.iter().map(stored).collect::<Result<Vec<Stored>>>()?;
            let bytes = columns.iter().map(|stored| stored.column.value_bytes()).sum();
            writer.push(columns.into_iter().map(Some).collect(), ids.len())?;
            group.note(ids.len(), bytes);
        }
    });
    if let Err(error) = done {
        writer.delete();
        return Err(error);
    }
    let mut fragments = std::mem::take(&mut writer.fragments);
    puts.extend(fragments.iter().flat_map(|fragment| &fragment.files).map(|file| data_name(file.id)));
    number(&mut fragments, rows);
    let nulls = nulls.into_iter().map(|(column, ids)| (column, ids.into_iter().collect())).collect();
    Ok(Rewritten { fragments, features: writer.features, nulls })
}

/// Give the samples of fragments these row ids, in order.
fn number(fragments: &mut [Fragment], rows: &[PlacedRun]) {
    let mut rest = rows.iter().map(|(run, _)| *run);
    let mut begun: Option<Run> = None;
    for fragment in fragments {
        let (mut missing, mut runs) = (fragment.samples, Vec::<Run>::new());
        while missing > 0
            && let Some(run) = begun.take().or_else(|| rest.next())
        {
            let count = run.count.min(missing);
            missing -= count;
            match runs.last_mut().filter(|last| last.end() == run.first) {
                Some(last) => last.count += count,
                None => runs.push(Run { first: run.first, count }),
            }
            begun = (count < run.count).then_some(Run { first: run.first + count, count: run.count - count });
        }
        fragment.runs = runs;
    }
}

fn null_places(column: &Column) -> impl Iterator<Item = usize> {
    let validity = match column {
        Column::Fixed { validity, .. } => validity.as_deref(),
        Column::Ragged(ragged) => ragged.validity.as_deref(),
        Column::Pulled(pulled) => pulled.validity.as_deref(),
    };
    validity.into_iter().flatten().enumerate().filter(|(_, valid)| !**valid).map(|(place, _)| place)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fragments_get_the_row_ids_in_order() {
        let fragment = |samples| Fragment { samples, is_stage: false, runs: Vec::new(), files: Vec::new() };
        let mut fragments = [3, 4, 1].map(fragment);
        let run = |first, count| Run { first, count };
        number(&mut fragments, &[(run(10, 2), 0), (run(12, 3), 2), (run(20, 1), 5), (run(1, 2), 6)]);
        assert_eq!(fragments[0].runs, [run(10, 3)]);
        assert_eq!(fragments[1].runs, [run(13, 2), run(20, 1), run(1, 1)]);
        assert_eq!(fragments[2].runs, [run(2, 1)]);
    }
}
