//! Stored and decoded sizes of columns, used for budgets, window orders and `info`.

use std::collections::HashMap;

use penstock_error::{Error, Kind, Result};
use penstock_format::datafile::Chunk;
use penstock_format::files::FileRef;

use super::Snapshot;
use crate::store::context::file_cache_bytes;
use crate::store::files::whole_bytes;

/// Sizes of several columns, in bytes.
#[derive(Debug, Clone, Copy)]
pub struct ColumnBytes {
    /// Stored size in data files.
    pub stored: u64,
    /// Size from the first to the last block of each column in each file, including blocks of other columns in between.
    pub spanned: u64,
    pub decoded: u64,
    /// The memory needed to read one sample: one decoded block for each column whose samples share blocks.
    pub blocks: u64,
    /// Decoded size of one sample. Each column contributes its mean over the fragments that have the column, because a read
    /// may need only those fragments.
    pub decoded_of_sample: f64,
}

/// Maximum number of tails read for a size estimate.
const TAILS_READ: usize = 16;

/// Memory that an open data file uses per column, in addition to the tail.
const COLUMN_BYTES: u64 = (size_of::<Chunk>() + 64) as u64;

impl Snapshot {
    /// Return the sizes of these columns over all samples, or an estimate if more than `TAILS_READ` data files contain them.
    /// Cost: reads the manifest and at most `TAILS_READ` tails. The result is deterministic, as window orders require.
    pub fn column_bytes(&self, columns: &[u64]) -> Result<ColumnBytes> {
        let mut files: Vec<(FileRef, u64)> = Vec::new();
        self.each_file(Some(columns), |file, samples| {
            files.push((file.clone(), samples));
            Ok(())
        })?;
        let count = files.len().min(TAILS_READ);
        let looked: Vec<&(FileRef, u64)> = (0..count).map(|index| &files[index * files.len() / count]).collect();
        // A damaged file is left out of the estimate. Reading a sample from that file reports the damage, and the caller decides how to
        // handle it.
        let may_be_left_out = |error: &Error| error.kind() == Kind::Corrupt && looked.len() > 1;
        self.context.open_tails(looked.iter().map(|(file, samples)| (file, *samples)))?;
        let (mut spanned, mut looked_at_bytes) = (0u128, 0u128);
        let (mut blocks, mut sizes): (HashMap<u64, u64>, HashMap<u64, (u128, u128)>) = Default::default();
        let mut damage = None;
        for (file, samples) in &looked {
            let opened = match self.context.file(file, *samples) {
                Err(error) if may_be_left_out(&error) => {
                    damage = Some(error);
                    continue;
                }
                other => other?,
            };
            let tail = &opened.tail;
            looked_at_bytes += u128::from(file.file_bytes);
            for chunk in tail.chunks.iter().filter(|chunk| columns.contains(&chunk.column)) {
                let raw: u128 = chunk.decoded_bytes().iter().map(u128::from).sum();
                let (stored, decoded) = sizes.entry(chunk.column).or_default();
                *stored += chunk.stored_bytes.iter().map(u128::from).sum::<u128>();
                *decoded += raw;
                spanned += u128::from(chunk.span_bytes());
                if chunk.rows_per_block != 1 {
                    let mean = (raw / chunk.blocks().max(1) as u128) as u64;
                    blocks.entry(chunk.column).and_modify(|most| *most = mean.max(*most)).or_insert(mean);
                }
            }
        }
        if let Some(error) = damage.filter(|_| looked_at_bytes == 0) {
            return Err(error);
        }
        let total: u128 = files.iter().map(|(file, _)| u128::from(file.file_bytes)).sum();
        let scaled_to_all = |read: u128| (total * read / looked_at_bytes.max(1)) as u64;
        let mut samples: HashMap<u64, u64> = HashMap::new();
        for (file, of_file) in &files {
            file.columns.iter().for_each(|column| *samples.entry(*column).or_default() += of_file);
        }
        let of_sample = |column: &u64, bytes: u128| {
            scaled_to_all(bytes) as f64 / samples.get(column).map_or(1.0, |samples| *samples as f64)
        };
        // Sum in column order, because floating-point sums depend on the order.
        let each =
            columns.iter().filter_map(|column| sizes.get(column).map(|(stored, decoded)| (column, *stored, *decoded)));
        Ok(ColumnBytes {
            stored: scaled_to_all(each.clone().map(|(_, stored, _)| stored).sum()),
            spanned: scaled_to_all(spanned),
            decoded: scaled_to_all(each.clone().map(|(_, _, decoded)| decoded).sum()),
            blocks: blocks.into_values().sum(),
            decoded_of_sample: each.map(|(column, _, decoded)| of_sample(column, decoded)).sum(),
        })
    }

    /// Return how many bytes unmapped data files keep in memory when these columns are read: the total, and the largest file's
    /// share. Cost: reads the manifest.
    pub fn kept_bytes(&self, columns: &[u64]) -> Result<(u64, u64)> {
        let (mut all, mut largest, mut whole) = (0, 0, 0);
        self.each_file(Some(columns), |file, _| {
            // The offset marks of word lists use at most a quarter of the tail's size, and a parsed chunk uses `COLUMN_BYTES`.
            let kept = file.tail_bytes + file.tail_bytes / 4 + file.columns.len() as u64 * COLUMN_BYTES;
            (all, largest, whole) = (all + kept, kept.max(largest), whole + whole_bytes(file));
            Ok(())
        })?;
        // Small files are kept whole if they all fit into the cache.
        let fits = all + whole <= file_cache_bytes();
        Ok((all + if fits { whole } else { 0 }, largest))
    }
}
