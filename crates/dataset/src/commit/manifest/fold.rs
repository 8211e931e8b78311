//! Join small overlays when a root is written, so that their number grows only with the logarithm of the number of updates.

use std::collections::HashMap;
use std::sync::Arc;

use penstock_error::{Kind, Result};
use penstock_format::datafile::Chunk;
use penstock_format::files::FileRef;
use penstock_format::overlay::Overlay;
use penstock_format::schema::ColumnSpec;

use super::overlays::write_values;
use super::stored::WordList;
use crate::config::Config;
use crate::read::fetch::Purpose;
use crate::read::reader::{OnCorrupt, Reader};
use crate::snapshot::Snapshot;
use crate::write::pending::Pending;

/// A root may have this many overlays with values before the newest of them are joined.
const OVERLAYS: usize = 8;

/// Join the newest of these overlays of a snapshot, if there are many. The overlays have values and are in manifest order. Damaged
/// overlays are left as they are. Cost: reads and writes the joined values once.
pub fn folded(snapshot: &Snapshot, overlays: Vec<Overlay>, puts: &mut Vec<String>) -> Result<Vec<Overlay>> {
    // Those without files are quick to read.
    if overlays.iter().filter(|overlay| !overlay.files.is_empty()).count() <= OVERLAYS {
        return Ok(overlays);
    }
    let begin = first_to_join(&sizes(snapshot, &overlays)?, Config::memory_bytes() / 8);
    if overlays.len() - begin < 2 {
        return Ok(overlays);
    }
    match joined(snapshot, &overlays[begin..], puts) {
        Ok(joined) => Ok(overlays[..begin].iter().cloned().chain(joined).collect()),
        Err(error) if matches!(error.kind(), Kind::Corrupt | Kind::NotFound) => Ok(overlays),
        Err(error) => Err(error),
    }
}

/// Return the first overlay to join, given their sizes in bytes: the oldest one that is at most twice as large as all newer ones
/// together. Afterwards, each overlay is more than twice as large as all newer ones, so there are few. A value is rewritten only a
/// logarithmic number of times.
fn first_to_join(bytes: &[u64], most: u64) -> usize {
    let (mut first, mut sum) = (bytes.len(), 0u64);
    for (index, size) in bytes.iter().enumerate().rev() {
        if sum.saturating_add(*size) > most {
            break;
        }
        if *size <= 2 * sum || sum == 0 {
            first = index;
        }
        sum += size;
    }
    first
}

/// Return how much memory each overlay takes when its values are read. Overlays that cannot be read have the largest size. Cost: reads
/// their tails concurrently.
fn sizes(snapshot: &Snapshot, overlays: &[Overlay]) -> Result<Vec<u64>> {
    let context = &snapshot.context;
    context
        .open_tails(overlays.iter().flat_map(|overlay| overlay.files.iter().map(|file| (file, overlay.rows.ids()))))?;
    let size = |overlay: &Overlay| {
        let decoded = |chunk: &Chunk| chunk.decoded_bytes().iter().fold(0, u64::saturating_add);
        let of_file = |file: &FileRef| {
            Ok(context.file(file, overlay.rows.ids())?.tail.chunks.iter().map(decoded).fold(0, u64::saturating_add))
        };
        let values = overlay.files.iter().map(of_file).sum::<Result<u64>>().unwrap_or(u64::MAX);
        overlay.rows.ids().saturating_mul(ROW_BYTES).saturating_add(values)
    };
    Ok(overlays.iter().map(size).collect())
}

/// Memory for a row id while overlays are joined, in each of a few columns.
const ROW_BYTES: u64 = 64;

/// Read the values of overlays, oldest first, and write the newest value of each sample.
fn joined(snapshot: &Snapshot, overlays: &[Overlay], puts: &mut Vec<String>) -> Result<Vec<Overlay>> {
    let (context, schema) = (&snapshot.context, &snapshot.schema);
    let row_ids = context.row_ids(overlays.iter().map(|overlay| &overlay.rows))?;
    let (mut pending, mut lists) = (Pending::default(), HashMap::<u64, WordList>::new());
    for (overlay, ids) in overlays.iter().zip(row_ids) {
        let alone = Arc::new(snapshot.of_files(overlay.files.clone(), ids.len()));
        // A column that the files lack is null here, so these columns have no fill values.
        let schema = alone.schema.clone();
        let specs: Vec<&ColumnSpec> = schema.columns.iter().filter(|spec| overlay.columns.contains(&spec.id)).collect();
        let mut reader = Reader::new(alone, (0..ids.len()).collect(), OnCorrupt::Raise)?;
        reader.fetch(&specs, Purpose::Take)?;
        let mut columns: Vec<_> = schema.columns.iter().map(|_| None).collect();
        for (index, spec) in schema.columns.iter().enumerate().filter(|(_, spec)| overlay.columns.contains(&spec.id)) {
            columns[index] = Some(reader.stored(spec, lists.entry(spec.id).or_default())?);
        }
        pending.push(&ids.iter().collect::<Vec<u64>>(), &schema, columns);
    }
    Ok(write_values(context, schema, &mut pending, lists, puts)?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlays_of_like_size_are_joined() {
        assert_eq!(first_to_join(&[], 100), 0);
        assert_eq!(first_to_join(&[1, 1, 1], 100), 0);
        assert_eq!(first_to_join(&[90, 5, 9, 3, 4], 100), 1, "90 is more than twice 21");
        assert_eq!(first_to_join(&[90, 5, 9, 3, 4], 12), 3);
        assert_eq!(first_to_join(&[5, 200], 100), 2, "too large to be read at once");
        assert_eq!(first_to_join(&[200, 1, 200, 1], 1000), 0, "small ones between large ones are joined as well");
    }

    #[test]
    fn the_number_of_overlays_and_the_rewritten_bytes_grow_slowly() {
        let (mut overlays, mut written, commits) = (Vec::<u64>::new(), 0u64, 10_000u64);
        for commit in 1..=commits {
            overlays.push(100);
            if commit % 14 == 0 && overlays.len() > OVERLAYS {
                let sum = overlays.split_off(first_to_join(&overlays, u64::MAX)).iter().sum();
                overlays.push(sum);
                written += sum;
            }
            assert!(overlays.len() < 14 + 12, "{overlays:?}");
        }
        assert!(written < 100 * commits * 12, "{written}");
    }
}
