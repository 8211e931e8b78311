//! Read all data files of a snapshot, so that a cache has them.

use penstock_error::Result;
use penstock_format::ids::data_name;
use penstock_storage::RangeRequest;

use crate::snapshot::Snapshot;

/// Bytes per request, and bytes that are read at once.
const RANGE_BYTES: u64 = 8 << 20;
const READ_BYTES: u64 = 64 << 20;

/// Read all data files of a snapshot and discard their bytes. Calls `progress` with the number of files and bytes so far. Memory: 64 MiB.
pub fn warm(snapshot: &Snapshot, mut progress: impl FnMut(u64, u64)) -> Result<(u64, u64)> {
    let storage = snapshot.context.reads();
    let mut files: Vec<(String, u64)> = Vec::new();
    snapshot.each_file(None, |file, _| {
        if file.is_object() {
            files.push((data_name(file.id), file.file_bytes));
        }
        Ok(())
    })?;
    files.sort();
    files.dedup();
    let (mut done_files, mut done_bytes) = (0, 0);
    let (mut ranges, mut waiting_bytes): (Vec<RangeRequest>, u64) = (Vec::new(), 0);
    let count = files.len();
    for (index, (name, bytes)) in files.into_iter().enumerate() {
        for begin in (0..bytes).step_by(RANGE_BYTES as usize) {
            let length = RANGE_BYTES.min(bytes - begin);
            ranges.push(RangeRequest::plain(&name, begin, length, Some(bytes)));
            waiting_bytes += length;
            let last = index + 1 == count && begin + length == bytes;
            if waiting_bytes >= READ_BYTES || last {
                storage.fetch(std::mem::take(&mut ranges)).into_iter().collect::<Result<Vec<_>>>()?;
                done_bytes += std::mem::take(&mut waiting_bytes);
                done_files = index as u64 + u64::from(begin + length == bytes);
                progress(done_files, done_bytes);
            }
        }
    }
    Ok((done_files, done_bytes))
}
