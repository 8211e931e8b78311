//! Read samples of fixed shape straight into the caller's buffer.

use std::sync::Arc;

use bytes::Bytes;
use penstock_error::{Error, Result};
use penstock_format::datafile::{Codec, Layout, UNIT_BYTES};
use penstock_format::schema::ColumnSpec;
use penstock_storage::Frozen;
use penstock_tensor::Dtype;

use super::blocks::stream::{UnitRun, stream_runs, streams};
use super::plan::ascending;
use super::reader::{ColumnRows, Nulls, Reader, set_null};
use super::tile_plan::Tiles;
use super::tiles::Targets;
use crate::prefetch::{PREFETCH_FROM_BYTES, ROWS_AHEAD, prefetch};
use crate::snapshot::own::OwnValue;
use crate::store::blocks::BlockKey;
use crate::store::datafile::{DataFile, Decoded};

/// A group with fewer rows is too small to prefetch on its own.
const FEW_ROWS: usize = 8 * ROWS_AHEAD;

/// The result: samples of equal size in the order requested, and a null flag for each. A sample of an earlier dtype is shorter, and fills the
/// first bytes of its place until it is converted.
struct Cells<'a> {
    out: &'a mut [u8],
    /// Size in bytes of a sample of the column's dtype.
    bytes: usize,
    count: usize,
    nulls: Nulls,
}

impl Cells<'_> {
    fn new(out: &mut [u8], count: usize) -> Cells<'_> {
        Cells { bytes: out.len().checked_div(count).unwrap_or(0), out, count, nulls: None }
    }

    /// Return the first bytes of a place. With more bytes than a sample has, this includes the samples that follow.
    #[inline]
    fn at(&mut self, place: u32, bytes: usize) -> &mut [u8] {
        &mut self.out[place as usize * self.bytes..][..bytes]
    }

    fn set_null(&mut self, place: u32) {
        let target = &mut self.out[place as usize * self.bytes..][..self.bytes];
        set_null(&mut self.nulls, self.count, place, target);
    }

    /// Copy a sample from one index to another.
    fn repeat(&mut self, first: u32, place: u32) {
        self.out
            .copy_within(first as usize * self.bytes..(first as usize + 1) * self.bytes, place as usize * self.bytes);
        if self.nulls.as_ref().is_some_and(|nulls| nulls[first as usize]) {
            set_null(&mut self.nulls, self.count, place, &mut []);
        }
    }
}

/// A sample stored as one plain block, its index in the result, and its size in bytes.
struct Straight {
    file: Arc<DataFile>,
    chunk: usize,
    block: usize,
    place: u32,
    cell: usize,
}

/// Samples in groups of a few rows, which are copied together so that each is prefetched early enough.
#[derive(Default)]
struct Scattered {
    /// Data files, each with the size of its samples.
    files: Vec<(Arc<DataFile>, usize)>,
    /// The index of the file, the index in the result, and the offset in the file.
    samples: Vec<(u32, u32, usize)>,
}

impl Scattered {
    /// Add rows of a chunk whose sample 0 begins at this offset, and whose samples have `cell` bytes.
    fn add(&mut self, file: &Arc<DataFile>, begin: usize, rows: &[(u64, u32)], cell: usize) {
        let number = self.files.len() as u32;
        self.files.push((file.clone(), cell));
        self.samples.extend(rows.iter().map(|(row, place)| (number, *place, begin + *row as usize * cell)));
    }

    fn copy(&self, cells: &mut Cells<'_>) {
        for (index, (number, place, offset)) in self.samples.iter().enumerate() {
            let (file, cell) = &self.files[*number as usize];
            if let (true, Some((number, _, ahead))) =
                (*cell >= PREFETCH_FROM_BYTES, self.samples.get(index + ROWS_AHEAD))
            {
                prefetch(&self.files[*number as usize].0.map, *ahead, *cell);
            }
            copy(cells.at(*place, *cell), &file.map[*offset..][..*cell]);
        }
    }
}

impl Reader {
    /// Return large samples of fixed shape in one contiguous buffer. Returns None if any sample is null or if the store did not
    /// write the samples in order.
    pub fn joined(&self, column: &ColumnSpec) -> Option<Frozen> {
        let memory = self.fetched.memory.as_ref().filter(|_| !self.has_own(column))?;
        let mut samples: Vec<Bytes> = Vec::new();
        for group in &self.plan.groups {
            for located in self.located(group, column).ok()? {
                let source = self.rows_of(&located, column).ok()??;
                let entry = source.entry();
                if entry.dtype != column.kind.stored().ok()?.0
                    || entry.layout != Layout::Fixed
                    || entry.rows_per_block != 1
                    || entry.codec != Codec::None
                    || source.file.in_memory()
                {
                    return None; // Only large plain samples are written in place.
                }
                for (row, place) in source.rows.iter() {
                    if *place as usize != samples.len() || !entry.is_valid(*row) {
                        return None;
                    }
                    samples.push(self.fetched.get(source.file.key(source.chunk, entry.locate(*row).0, None)).ok()?);
                }
            }
        }
        Frozen::joined(memory, samples.iter().map(|sample| &sample[..]))
    }

    /// Copy samples of fixed shape into `out`, which has room for `self.plan.len()` samples of equal size. Nulls become zero bytes.
    pub fn fixed(&self, column: &ColumnSpec, out: &mut [u8]) -> Result<Nulls> {
        let own = self.own_values(column);
        let mut nulls = self.stored_fixed(column, out, &own)?;
        put_own(&own, self.plan.len(), out, &mut nulls);
        Ok(nulls)
    }

    /// Copy samples as `fixed` does, without the new values of a transaction. Those that have one may be left as they are.
    pub(super) fn stored_fixed(
        &self,
        column: &ColumnSpec,
        out: &mut [u8],
        own: &[(usize, OwnValue<'_>)],
    ) -> Result<Nulls> {
        let dtype = column.kind.stored()?.0;
        // Bools are checked all together.
        let mut hidden = Vec::new();
        if dtype != Dtype::Bool && !own.is_empty() {
            hidden.resize(self.plan.len(), false);
            own.iter().for_each(|(place, _)| hidden[*place] = true);
        }
        let (mut tiles, mut straight, mut scattered, mut earlier) =
            (Tiles::default(), Vec::new(), Scattered::default(), Vec::new());
        let mut cells = Cells::new(out, self.plan.len());
        self.each_group(column, &hidden, true, |source, rows| {
            let Some(source) = source else {
                rows.iter().for_each(|(_, place)| cells.set_null(*place));
                return Ok(());
            };
            let (entry, file) = (source.entry(), &source.file);
            let cell = cells.bytes / dtype.size() * entry.dtype.size();
            if entry.dtype != dtype {
                earlier.extend(rows.iter().map(|(_, place)| (*place, entry.dtype)));
            }
            match entry.raw_bytes {
                _ if entry.layout == Layout::Tiled => {
                    for (row, place) in source.rows.iter() {
                        match entry.is_valid(*row) {
                            true => drop(tiles.add(source, (*row, *place), None)),
                            false => cells.set_null(*place),
                        }
                    }
                    Ok(())
                }
                None if let Some(begin) = file.plain(source.chunk, cell) => {
                    match source.rows.len() < FEW_ROWS.min(self.plan.len()) {
                        true => scattered.add(file, begin, &source.rows, cell),
                        false => copy_plain(&file.map[begin..], &source.rows, cell, &mut cells),
                    }
                    Ok(())
                }
                None if !file.in_memory() && streams(file, entry) => {
                    for (row, place) in ascending(&source.rows).iter() {
                        let (block, place) = (*row as usize, *place);
                        match entry.is_valid(*row) {
                            true => {
                                straight.push(Straight { file: file.clone(), chunk: source.chunk, block, place, cell })
                            }
                            false => cells.set_null(place),
                        }
                    }
                    Ok(())
                }
                None if file.in_memory() => self.copy_mapped(source, cell, &mut cells),
                _ => self.copy_decoded(source, cell, &mut cells),
            }
        })?;
        scattered.copy(&mut cells);
        if !straight.is_empty() {
            self.read_straight(column, &straight, &mut cells)?;
        }
        let Cells { out, bytes, mut nulls, .. } = cells;
        let mut targets = Targets::Even { out, bytes };
        if !tiles.is_empty() {
            self.read_tiles(column, tiles, &mut targets, &mut nulls)?;
        }
        targets.widen(&earlier, dtype)?;
        if dtype == Dtype::Bool {
            self.check_bool_values(column, 0..self.plan.len() as u32, &mut targets, &mut nulls)?;
        }
        Ok(nulls)
    }

    /// Stream samples directly into the result. Each sample is one block.
    fn read_straight(&self, column: &ColumnSpec, samples: &[Straight], cells: &mut Cells<'_>) -> Result<()> {
        let storage = self.snapshot.context.reads();
        let (mut sources, mut doubles): (Vec<Option<&Straight>>, Vec<(u32, u32)>) =
            (vec![None; self.plan.len()], Vec::new());
        let mut before: Option<(BlockKey, u32)> = None;
        for sample in samples {
            let key = sample.file.key(sample.chunk, sample.block, None);
            match before.filter(|(known, _)| *known == key) {
                Some((_, first)) => doubles.push((first, sample.place)),
                None => {
                    before = Some((key, sample.place));
                    sources[sample.place as usize] = Some(sample);
                }
            }
        }
        // The largest number of whole units in a streamed range.
        let step = (storage.features().stream_bytes / UNIT_BYTES) as usize;
        let (mut runs, mut places, mut targets) = (Vec::new(), Vec::new(), Vec::new());
        for (place, target) in cells.out.chunks_mut(cells.bytes.max(1)).enumerate() {
            let Some(Straight { file, chunk, block, cell, .. }) = sources[place] else { continue };
            let count = file.tail.chunks[*chunk].units_of(*block).1;
            for (first, target) in (0..count).step_by(step).zip(target[..*cell].chunks_mut(step * UNIT_BYTES as usize))
            {
                let units = (first..(first + step).min(count)).map(|unit| (*block, unit)).collect();
                runs.push(UnitRun { file: file.clone(), chunk: *chunk, units });
                places.push(place as u32);
                targets.push(target);
            }
        }
        for (place, error) in places.into_iter().zip(stream_runs(storage, &runs, targets)?) {
            match error {
                None => {}
                Some(error) if self.passes(&error) => cells.set_null(place),
                Some(error) => return Err(self.locate(error, column, place)),
            }
        }
        doubles.into_iter().for_each(|(first, place)| cells.repeat(first, place));
        Ok(())
    }

    /// Copy rows directly from the map: runs of neighbours together, others one by one. Later rows are prefetched, because their order looks random to the
    /// hardware prefetcher.
    fn copy_mapped(
        &self,
        source: &ColumnRows<'_>,
        cell: usize,
        cells: &mut Cells<'_>,
    ) -> std::result::Result<(), (Error, u32)> {
        let (entry, file) = (source.entry(), &source.file);
        let map = &file.map[..];
        let offset = |block: usize, inner: u64| entry.offset.get(block) as usize + inner as usize * cell;
        let mut next = 0;
        while let Some((row, place)) = source.rows.get(next) {
            if let (true, Some((ahead, _))) = (cell >= PREFETCH_FROM_BYTES, source.rows.get(next + ROWS_AHEAD)) {
                let (block, inner) = entry.locate(*ahead);
                prefetch(map, offset(block, inner), cell);
            }
            if !entry.is_valid(*row) {
                cells.set_null(*place);
                next += 1;
                continue;
            }
            let (block, inner) = entry.locate(*row);
            let run = run_of(&source.rows[next..], || match entry.validity {
                None if cell == cells.bytes => entry.rows_of(block) - inner,
                _ => 1,
            });
            next += run;
            match file.verify(source.chunk, block) {
                Ok(()) => copy(cells.at(*place, run * cell), &map[offset(block, inner)..][..run * cell]),
                Err(error) if self.passes(&error) => (0..run as u32).for_each(|after| cells.set_null(place + after)),
                Err(error) => return Err((error, *place)),
            }
        }
        Ok(())
    }

    /// Copy rows of blocks that are compressed or not mapped. Consecutive rows of one block share one look-up.
    fn copy_decoded(
        &self,
        source: &ColumnRows<'_>,
        cell: usize,
        cells: &mut Cells<'_>,
    ) -> std::result::Result<(), (Error, u32)> {
        let (entry, file) = (source.entry(), &source.file);
        let mut open: Option<(usize, Decoded)> = None;
        for (row, place) in source.rows.iter() {
            if !entry.is_valid(*row) {
                cells.set_null(*place);
                continue;
            }
            let (block, inner) = entry.locate(*row);
            if !matches!(&open, Some((open, _)) if *open == block) {
                match self.block(file, source.chunk, block) {
                    Ok(decoded) => open = Some((block, decoded)),
                    Err(error) if self.passes(&error) => {
                        cells.set_null(*place);
                        continue;
                    }
                    Err(error) => return Err((error, *place)),
                }
            }
            if let Some((_, decoded)) = &open {
                cells.at(*place, cell).copy_from_slice(&decoded.bytes(file)[inner as usize * cell..][..cell]);
            }
        }
        Ok(())
    }
}

/// Put the new values of a transaction in their places.
pub(super) fn put_own(own: &[(usize, OwnValue<'_>)], count: usize, out: &mut [u8], nulls: &mut Nulls) {
    let bytes = out.len().checked_div(count).unwrap_or(0);
    for (place, value) in own {
        let target = &mut out[place * bytes..(place + 1) * bytes];
        match value.bytes {
            None => set_null(nulls, count, *place as u32, target),
            Some(value) => {
                target.copy_from_slice(value);
                nulls.iter_mut().for_each(|nulls| nulls[*place] = false);
            }
        }
    }
}

/// Return how many of the first rows are neighbours that follow each other in the result, too, up to `most` if there are several.
#[inline]
fn run_of(rows: &[(u64, u32)], most: impl FnOnce() -> u64) -> usize {
    let (row, place) = rows[0];
    let follows = |index: usize| {
        rows.get(index).is_some_and(|next| *next == (row + index as u64, place.wrapping_add(index as u32)))
    };
    if !follows(1) {
        return 1;
    }
    let most = rows.len().min(most() as usize);
    (1..most).find(|index| !follows(*index)).unwrap_or(most)
}

/// Copy rows that are contiguous and verified. This is the innermost loop of an epoch.
fn copy_plain(samples: &[u8], rows: &[(u64, u32)], cell: usize, cells: &mut Cells<'_>) {
    let (begin, first) = rows[0];
    if cell == cells.bytes && in_order(rows) {
        return copy(cells.at(first, rows.len() * cell), &samples[begin as usize * cell..][..rows.len() * cell]);
    }
    for (index, (row, place)) in rows.iter().enumerate() {
        if let (true, Some((ahead, _))) = (cell >= PREFETCH_FROM_BYTES, rows.get(index + ROWS_AHEAD)) {
            prefetch(samples, *ahead as usize * cell, cell);
        }
        copy(cells.at(*place, cell), &samples[*row as usize * cell..][..cell]);
    }
}

/// Return whether all rows are neighbours that follow each other in the result, too.
fn in_order(rows: &[(u64, u32)]) -> bool {
    let ((row, place), last) = (rows[0], rows.len() - 1);
    // Others are excluded at once.
    rows[last] == (row + last as u64, place.wrapping_add(last as u32)) && run_of(rows, || u64::MAX) == rows.len()
}

/// Copy a slice. For 8-byte values, this avoids the memmove call that `copy_from_slice` makes.
#[inline]
fn copy(target: &mut [u8], source: &[u8]) {
    match (target.as_chunks_mut::<8>(), source.as_chunks::<8>()) {
        (([target], []), ([source], [])) => *target = *source,
        _ => target.copy_from_slice(source),
    }
}
