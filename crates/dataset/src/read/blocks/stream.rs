//! Read large plain values directly into the result, bypassing the cache.

use std::sync::Arc;

use penstock_error::{Error, Result};
use penstock_format::datafile::{Chunk, Codec, Layout, UNIT_BYTES};
use penstock_format::ids::data_name;
use penstock_storage::{Access, RangeRequest, Read};

use super::Wanted;
use crate::store::datafile::DataFile;

/// Ranges streamed from a local device include gaps of up to this length.
const STREAM_GAP_BYTES: u64 = 16 << 10;

/// Checksum units of uncompressed blocks that are contiguous in their file.
pub struct UnitRun {
    pub file: Arc<DataFile>,
    pub chunk: usize,
    /// Pairs (block, unit).
    pub units: Vec<(usize, usize)>,
}

impl UnitRun {
    /// Return the offsets at which the run begins and ends in the file.
    pub fn bounds(&self) -> (u64, u64) {
        let bound =
            |at: Option<&(usize, usize)>| at.map_or((0, 0), |(block, unit)| self.file.unit(self.chunk, *block, *unit));
        (bound(self.units.first()).0, bound(self.units.last()).1)
    }

    pub fn range(&self) -> RangeRequest {
        let (begin, end) = self.bounds();
        RangeRequest::plain(&data_name(self.file.id), begin, end - begin, Some(self.file.file_bytes))
    }

    fn verify(&self, bytes: &[u8]) -> Result<()> {
        let (mut rest, chunk) = (bytes, self.chunk);
        self.units.iter().try_for_each(|(block, unit)| {
            let (begin, end) = self.file.unit(chunk, *block, *unit);
            let (now, later) = rest.split_at((end - begin) as usize);
            rest = later;
            self.file.verify_stored(chunk, *block, Some(*unit), now)
        })
    }
}

/// Read uncompressed checksum units, and pass each to `copy` once it is verified, in any order. Nothing is cached.
/// Returns an error for each damaged unit. Requires a store that streams.
pub fn stream(storage: &dyn Read, wanted: &[Wanted], mut copy: impl FnMut(usize, &[u8])) -> Result<Vec<Option<Error>>> {
    let mut failed: Vec<Option<Error>> = wanted.iter().map(|_| None).collect();
    let mut order: Vec<usize> = (0..wanted.len()).collect();
    for again in [true, false] {
        order.sort_by_key(|index| (wanted[*index].key.0, wanted[*index].offset)); // Damaged units are listed in order of arrival.
        let (members, ranges) = stream_ranges(storage, wanted, &order);
        order.clear();
        let answers = storage.stream(&ranges, None, &mut |range, bytes| {
            for index in &members[range] {
                let Wanted { file, chunk, block, unit, offset, bytes: length, .. } = &wanted[*index];
                let begin = (offset - ranges[range].begin) as usize;
                let stored = &bytes[begin..begin + *length as usize];
                match file.verify_stored(*chunk, *block, *unit, stored) {
                    Ok(()) => copy(*index, stored),
                    Err(_) if again => order.push(*index), // The transfer may have damaged the unit.
                    Err(error) => failed[*index] = Some(error),
                }
            }
        });
        answers.into_iter().collect::<Result<()>>()?;
        if order.is_empty() {
            break;
        }
    }
    Ok(failed)
}

/// Read runs of uncompressed checksum units into their targets and verify the units there. Returns an error for each damaged run.
/// Requires a store that streams.
pub fn stream_runs(storage: &dyn Read, runs: &[UnitRun], mut targets: Vec<&mut [u8]>) -> Result<Vec<Option<Error>>> {
    let mut failed: Vec<Option<Error>> = runs.iter().map(|_| None).collect();
    let ranges: Vec<RangeRequest> = runs.iter().map(UnitRun::range).collect();
    let see = &mut |index: usize, bytes: &[u8]| failed[index] = runs[index].verify(bytes).err();
    storage.stream(&ranges, Some(&mut targets), see).into_iter().collect::<Result<()>>()?;
    for index in 0..runs.len() {
        if failed[index].is_some() {
            // The transfer may have damaged the run, so read it again, but only once.
            let see = &mut |_: usize, bytes: &[u8]| failed[index] = runs[index].verify(bytes).err();
            let answers = storage.stream(&ranges[index..index + 1], Some(&mut targets[index..index + 1]), see);
            answers.into_iter().collect::<Result<()>>()?;
        }
    }
    Ok(failed)
}

/// Join nearby units into ranges that the store can stream. Returns the members of each range, and the ranges.
pub fn stream_ranges(storage: &dyn Read, wanted: &[Wanted], order: &[usize]) -> (Vec<Vec<usize>>, Vec<RangeRequest>) {
    let most = storage.features().stream_bytes;
    let (mut members, mut ranges): (Vec<Vec<usize>>, Vec<RangeRequest>) = (Vec::new(), Vec::new());
    for index in order {
        let Wanted { key, file, offset, bytes, .. } = &wanted[*index];
        let end = offset + bytes;
        match (members.last_mut(), ranges.last_mut()) {
            (Some(members), Some(range))
                if wanted[members[0]].key.0 == key.0
                    && offset.saturating_sub(range.end()) <= STREAM_GAP_BYTES
                    && end.max(range.end()) - range.begin <= most =>
            {
                members.push(*index);
                range.pieces[0].bytes = (end.max(range.end()) - range.begin) as usize;
            }
            _ => {
                members.push(vec![*index]);
                ranges.push(RangeRequest::plain(&data_name(key.0), *offset, *bytes, Some(file.file_bytes)));
            }
        }
    }
    (members, ranges)
}

/// Return whether every take streams this chunk's samples directly into the result. The samples must be large and uncompressed,
/// and the store must stream.
pub fn streams(file: &DataFile, entry: &Chunk) -> bool {
    entry.layout == Layout::Fixed
        && entry.rows_per_block == 1
        && entry.codec == Codec::None
        && file.access == Access::Streamed
        && !entry.stored_bytes.is_empty()
        && entry.stored_bytes.get(0) >= UNIT_BYTES
}
