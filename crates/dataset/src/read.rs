//! Read the rows of a plan, one column at a time. `source` locates rows; `read_fixed` copies samples of fixed shape straight into
//! the caller's buffer. `ragged` reads samples of variable shape; `tiles` reads tiled samples.

use std::borrow::Cow;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use penstock_error::{Error, Kind, Result};
use penstock_format::cursor::Strings;
use penstock_format::datafile::{Chunk, Codec, Layout, UNIT_BYTES};
use penstock_format::ids::data_name;
use penstock_format::ints::unpack;
use penstock_format::schema::{ColumnKind, ColumnSpec};
use penstock_storage::Frozen;
use penstock_tensor::Dtype;

use crate::context::BlockKey;
use crate::datafile::{DataFile, Decoded};
use crate::fetch::Run;
use crate::plan::{Group, Plan, ascending};
use crate::snapshot::Snapshot;
use crate::tiles::{Targets, Tiles};

/// Whether each value is null, in the order requested. None if no value is null.
pub type Nulls = Option<Vec<bool>>;

/// The rows of a group, and the chunk that holds them for one column.
pub struct Source<'a> {
    pub file: Arc<DataFile>,
    pub chunk: usize,
    /// Ascending, except for uncompressed samples of fixed shape, which gain nothing from sorting.
    pub rows: Cow<'a, [(u64, u32)]>,
}

impl Source<'_> {
    pub fn entry(&self) -> &Chunk {
        &self.file.tail.chunks[self.chunk]
    }
}

/// How to treat a row that is corrupt.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum OnCorrupt {
    Raise,
    Null,
}

impl Snapshot {
    /// Locate the rows of a group. None if its fragment leaves the column out.
    pub fn source<'a>(&self, plan: &Plan, group: &'a Group, column: &ColumnSpec) -> Result<Option<Source<'a>>> {
        let fragment = group.fragment();
        let Some(file) = fragment.files.iter().find(|file| file.columns.contains(&column.id)) else { return Ok(None) };
        let file = match plan.fetched.file(file.id) {
            Some(known) if known.is(file, fragment.samples) => known.clone(),
            _ => self.context.file(file, fragment.samples)?,
        };
        let chunk = file.chunk_of(column.id).ok_or_else(|| {
            penstock_format::cursor::malformed(format!(
                "data file `{}` has no column {}, but its manifest lists it",
                data_name(file.id),
                column.id
            ))
        })?;
        let entry = &file.tail.chunks[chunk];
        check_stored_as(&file, entry, column)?;
        let any_order = entry.layout == Layout::Fixed && entry.raw_bytes.is_none();
        let rows = if any_order { Cow::Borrowed(&group.rows[..]) } else { group.ascending() };
        let source = Source { file, chunk, rows };
        self.announce(&source);
        Ok(Some(source))
    }

    /// Announce the rows to the store: a run of neighbours as sequential, other rows as random, and large random samples one by one.
    /// A small random sample has a page or two, and is not worth a system call if it is in memory already.
    fn announce(&self, source: &Source<'_>) {
        if !self.context.storage.mapped() {
            return;
        }
        let (entry, map, storage) = (source.entry(), &source.file.map, self.context.storage.as_ref());
        let (low, high) = source.rows.iter().fold((u64::MAX, 0), |(low, high), (row, _)| (low.min(*row), high.max(*row)));
        let in_order = source.rows.len() > 1 && high - low < 2 * source.rows.len() as u64;
        if source.file.expected_in_order.swap(in_order, Relaxed) != in_order {
            storage.will_read(map, in_order);
        }
        if !in_order && entry.rows_per_block == 1 && entry.layout != Layout::Tiled {
            for (row, _) in source.rows.iter() {
                let bytes = entry.stored_bytes.get(*row as usize) as usize;
                let begin = entry.offset.get(*row as usize) as usize;
                if bytes >= ANNOUNCE_BYTES {
                    storage.will_need(&map[begin..begin + bytes]);
                }
            }
        }
    }

    /// Run `read` for every group. An error names the position and the column.
    pub fn each_source(
        &self,
        plan: &Plan,
        column: &ColumnSpec,
        lenient: bool,
        mut read: impl FnMut(Option<&Source<'_>>, &[(u64, u32)]) -> std::result::Result<(), (Error, u32)>,
    ) -> Result<()> {
        for group in &plan.groups {
            let first = group.rows.first().map_or(0, |(_, place)| *place);
            let source = match self.source(plan, group, column) {
                Err(error) if lenient && error.kind() == Kind::Corrupt => None,
                other => other.map_err(|error| self.locate_error(error, plan, column, first))?,
            };
            read(source.as_ref(), &group.rows).map_err(|(error, place)| self.locate_error(error, plan, column, place))?;
        }
        Ok(())
    }

    pub fn locate_error(&self, error: Error, plan: &Plan, column: &ColumnSpec, place: u32) -> Error {
        let position = plan.positions.get(place as usize).copied().unwrap_or(0);
        let row_ids = plan.row_ids().get(place as usize).copied().into_iter().collect();
        let error = error.context(format!("cannot read sample {position} of column `{}`", column.name)).column(&column.name);
        error.rows(vec![place.into()]).row_ids(row_ids)
    }

    /// Return large samples of fixed shape as one stretch of memory, if none is null and the store wrote them there in order.
    pub fn joined(&self, plan: &Plan, column: &ColumnSpec) -> Option<Frozen> {
        let memory = plan.fetched.memory.as_ref()?;
        let mut samples: Vec<Bytes> = Vec::new();
        for group in &plan.groups {
            let source = self.source(plan, group, column).ok()??;
            let entry = source.entry();
            if entry.layout != Layout::Fixed || entry.rows_per_block != 1 || entry.codec != Codec::None || !source.file.ranged {
                return None; // Small samples can be copied as cheaply.
            }
            for (row, place) in source.rows.iter() {
                if *place as usize != samples.len() || !entry.is_valid(*row) {
                    return None;
                }
                samples.push(plan.fetched.get(source.file.key(source.chunk, entry.locate(*row).0, None)).ok()?);
            }
        }
        Frozen::joined(memory, samples.iter().map(|sample| &sample[..]))
    }

    /// Copy samples of fixed shape into `out`, which has room for `plan.len()` samples of equal size. Nulls become zero bytes.
    pub fn read_fixed(&self, plan: &Plan, column: &ColumnSpec, out: &mut [u8], on_corrupt: OnCorrupt) -> Result<Nulls> {
        let (mut nulls, mut tiles, mut straight) = (None, Tiles::default(), Vec::new());
        let cell = if plan.is_empty() { 0 } else { out.len() / plan.len() };
        let lenient = on_corrupt == OnCorrupt::Null;
        self.each_source(plan, column, lenient, |source, rows| {
            let Some(source) = source else {
                rows.iter().for_each(|(_, place)| set_null(&mut nulls, plan.len(), *place, &mut out[*place as usize * cell..][..cell]));
                return Ok(());
            };
            match source.entry().raw_bytes {
                _ if source.entry().layout == Layout::Tiled => {
                    for (row, place) in source.rows.iter() {
                        match source.entry().is_valid(*row) {
                            true => drop(tiles.add(source, (*row, *place), None)),
                            false => set_null(&mut nulls, plan.len(), *place, &mut out[*place as usize * cell..][..cell]),
                        }
                    }
                    Ok(())
                }
                None if let Some(begin) = source.file.plain(source.chunk, cell) => {
                    copy_plain(&source.file.map[begin..], &source.rows, cell, out);
                    Ok(())
                }
                None if source.file.ranged && self.streams(source.entry()) => {
                    let entry = source.entry();
                    for (row, place) in ascending(&source.rows).iter() {
                        match entry.is_valid(*row) {
                            true => straight.push(Straight {
                                file: source.file.clone(),
                                chunk: source.chunk,
                                block: *row as usize,
                                place: *place,
                            }),
                            false => set_null(&mut nulls, plan.len(), *place, &mut out[*place as usize * cell..][..cell]),
                        }
                    }
                    Ok(())
                }
                None if !source.file.ranged => self.copy_mapped(source, cell, out, lenient, plan.len(), &mut nulls),
                _ => self.copy_decoded(plan, source, cell, out, lenient, &mut nulls),
            }
        })?;
        if !straight.is_empty() {
            self.read_straight(plan, column, &straight, cell, out, lenient, &mut nulls)?;
        }
        if !tiles.is_empty() {
            self.read_tiles(plan, column, tiles, &mut Targets::Even { out, bytes: cell }, on_corrupt, &mut nulls)?;
        }
        if column.kind.stored()?.0 == Dtype::Bool {
            for (place, sample) in out.chunks_mut(cell.max(1)).enumerate() {
                match check_bools(sample) {
                    Err(_) if lenient => set_null(&mut nulls, plan.len(), place as u32, sample),
                    other => other.map_err(|error| self.locate_error(error, plan, column, place as u32))?,
                }
            }
        }
        Ok(nulls)
    }

    /// Stream samples, each of which is one block, straight to their places.
    fn read_straight(
        &self,
        plan: &Plan,
        column: &ColumnSpec,
        samples: &[Straight],
        cell: usize,
        out: &mut [u8],
        lenient: bool,
        nulls: &mut Nulls,
    ) -> Result<()> {
        let (mut sources, mut doubles): (Vec<Option<&Straight>>, Vec<(u32, u32)>) = (vec![None; plan.len()], Vec::new());
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
        // The most whole units that one streamed range can have.
        let step = (self.context.storage.stream_bytes() / UNIT_BYTES) as usize;
        let (mut runs, mut places, mut targets) = (Vec::new(), Vec::new(), Vec::new());
        for (place, target) in out.chunks_mut(cell).enumerate() {
            let Some(Straight { file, chunk, block, .. }) = sources[place] else { continue };
            let count = file.tail.chunks[*chunk].units_of(*block).1;
            for (first, target) in (0..count).step_by(step).zip(target.chunks_mut(step * UNIT_BYTES as usize)) {
                let units = (first..(first + step).min(count)).map(|unit| (*block, unit)).collect();
                runs.push(Run { file: file.clone(), chunk: *chunk, units });
                places.push(place as u32);
                targets.push(target);
            }
        }
        for (place, error) in places.into_iter().zip(self.stream_runs(&runs, targets)?) {
            match error {
                None => {}
                Some(error) if lenient && error.kind() == Kind::Corrupt => {
                    set_null(nulls, plan.len(), place, &mut out[place as usize * cell..][..cell]);
                }
                Some(error) => return Err(self.locate_error(error, plan, column, place)),
            }
        }
        for (first, place) in doubles {
            out.copy_within(first as usize * cell..(first as usize + 1) * cell, place as usize * cell);
            if nulls.as_ref().is_some_and(|nulls| nulls[first as usize]) {
                set_null(nulls, plan.len(), place, &mut []);
            }
        }
        Ok(())
    }

    /// Copy rows straight out of the map. Later rows are prefetched: their order looks random to the processor, so its own
    /// prefetcher cannot predict them.
    fn copy_mapped(
        &self,
        source: &Source<'_>,
        cell: usize,
        out: &mut [u8],
        lenient: bool,
        count: usize,
        nulls: &mut Nulls,
    ) -> std::result::Result<(), (Error, u32)> {
        let (entry, file) = (source.entry(), &source.file);
        let map = &file.map[..];
        let offset_of = |row: u64| {
            let (block, inner) = entry.locate(row);
            (block, entry.offset.get(block) as usize + inner as usize * cell)
        };
        for (index, (row, place)) in source.rows.iter().enumerate() {
            if let (true, Some((ahead, _))) = (cell >= PREFETCH_FROM_BYTES, source.rows.get(index + ROWS_AHEAD)) {
                prefetch(map, offset_of(*ahead).1, cell);
            }
            let target = &mut out[*place as usize * cell..][..cell];
            if !entry.is_valid(*row) {
                set_null(nulls, count, *place, target);
                continue;
            }
            let (block, offset) = offset_of(*row);
            match file.verify(source.chunk, block) {
                Ok(()) => copy(target, &map[offset..][..cell]),
                Err(error) if lenient && error.kind() == Kind::Corrupt => set_null(nulls, count, *place, target),
                Err(error) => return Err((error, *place)),
            }
        }
        Ok(())
    }

    /// Copy rows of blocks that are compressed or not mapped. Consecutive rows of one block share its look-up.
    fn copy_decoded(
        &self,
        plan: &Plan,
        source: &Source<'_>,
        cell: usize,
        out: &mut [u8],
        lenient: bool,
        nulls: &mut Nulls,
    ) -> std::result::Result<(), (Error, u32)> {
        let (entry, file) = (source.entry(), &source.file);
        let mut open: Option<(usize, Decoded)> = None;
        for (row, place) in source.rows.iter() {
            let target = &mut out[*place as usize * cell..][..cell];
            if !entry.is_valid(*row) {
                set_null(nulls, plan.len(), *place, target);
                continue;
            }
            let (block, inner) = entry.locate(*row);
            if !matches!(&open, Some((open, _)) if *open == block) {
                match file.block(&self.context, &plan.fetched, source.chunk, block) {
                    Ok(decoded) => open = Some((block, decoded)),
                    Err(error) if lenient && error.kind() == Kind::Corrupt => {
                        set_null(nulls, plan.len(), *place, target);
                        continue;
                    }
                    Err(error) => return Err((error, *place)),
                }
            }
            if let Some((_, decoded)) = &open {
                target.copy_from_slice(&decoded.bytes(file)[inner as usize * cell..][..cell]);
            }
        }
        Ok(())
    }

    /// Read the codes of a label or category column as int64. Category codes refer to this snapshot's vocabulary.
    pub fn read_codes(&self, plan: &Plan, column: &ColumnSpec, out: &mut [i64], on_corrupt: OnCorrupt) -> Result<Nulls> {
        let (dtype, _) = column.kind.stored()?;
        let mut stored = vec![0u8; plan.len() * dtype.size()];
        let mut nulls = self.read_fixed(plan, column, &mut stored, on_corrupt)?;
        for (place, code) in out.iter_mut().enumerate() {
            *code = unpack(&stored, dtype.size() as u8, place) as i64;
        }
        match &column.kind {
            ColumnKind::Label { names } => {
                // A null has code 0, even if there are no names.
                let limit = names.len().max(1) as i64;
                for (place, code) in out.iter_mut().enumerate().filter(|(_, code)| **code >= limit) {
                    let why = format!("it has code {code}, but there are {} names", names.len());
                    *code = self.null_instead(why, plan, column, place as u32, &mut nulls, on_corrupt)?;
                }
            }
            _ => self.globalise(plan, column, out, &mut nulls, on_corrupt)?,
        }
        Ok(nulls)
    }

    /// Map the file-local codes of a category to codes of the vocabulary.
    fn globalise(&self, plan: &Plan, column: &ColumnSpec, codes: &mut [i64], nulls: &mut Nulls, on_corrupt: OnCorrupt) -> Result<()> {
        let none = Strings::default();
        for group in &plan.groups {
            let source = match self.source(plan, group, column) {
                // The rows of this group are null already.
                Err(error) if on_corrupt == OnCorrupt::Null && error.kind() == Kind::Corrupt => continue,
                other => other?,
            };
            let Some(source) = source else { continue };
            let dictionary = source.entry().dictionary.as_ref().unwrap_or(&none);
            let (vocabulary, known) = self.codes_of_file(source.file.id, column.id, dictionary.len())?;
            for (_, place) in source.rows.iter() {
                let place = *place as usize;
                if nulls.as_ref().is_some_and(|nulls| nulls[place]) {
                    continue;
                }
                codes[place] = match known.code(codes[place], dictionary, &vocabulary) {
                    Some(code) => code.into(),
                    None => {
                        let why = format!("it has code {}, which stands for no word", codes[place]);
                        self.null_instead(why, plan, column, place as u32, nulls, on_corrupt)?
                    }
                };
            }
        }
        Ok(())
    }

    /// Handle a code without a word or name: raise an error, or make the sample null and return 0, the code of a null.
    fn null_instead(
        &self,
        why: String,
        plan: &Plan,
        column: &ColumnSpec,
        place: u32,
        nulls: &mut Nulls,
        on_corrupt: OnCorrupt,
    ) -> Result<i64> {
        if on_corrupt == OnCorrupt::Raise {
            return Err(self.locate_error(penstock_format::cursor::malformed(why), plan, column, place));
        }
        set_null(nulls, plan.len(), place, &mut []);
        Ok(0)
    }
}

/// Check that a chunk has the dtype and shape of the schema.
pub fn check_stored_as(file: &DataFile, chunk: &Chunk, column: &ColumnSpec) -> Result<()> {
    let (dtype, shape) = column.kind.stored()?;
    if chunk.dtype == dtype && chunk.shape == shape {
        return Ok(());
    }
    Err(penstock_format::cursor::malformed(format!(
        "data file `{}` stores `{}` as {} {:?}, expected {} {:?}",
        data_name(file.id),
        column.name,
        chunk.dtype.name(),
        chunk.shape.0,
        dtype.name(),
        shape.0
    )))
}

/// Check that bools are 0 or 1. NumPy and Arrow would read other values differently.
pub fn check_bools(bytes: &[u8]) -> Result<()> {
    match bytes.iter().find(|byte| **byte > 1) {
        None => Ok(()),
        Some(byte) => Err(penstock_format::cursor::malformed(format!("a bool is {byte}, expected 0 or 1"))),
    }
}

/// A sample that is one plain block, and its place in the answer.
struct Straight {
    file: Arc<DataFile>,
    chunk: usize,
    block: usize,
    place: u32,
}

/// Copy rows that are contiguous and verified. This is the inner loop of an epoch.
fn copy_plain(samples: &[u8], rows: &[(u64, u32)], cell: usize, out: &mut [u8]) {
    for (index, (row, place)) in rows.iter().enumerate() {
        if let (true, Some((ahead, _))) = (cell >= PREFETCH_FROM_BYTES, rows.get(index + ROWS_AHEAD)) {
            prefetch(samples, *ahead as usize * cell, cell);
        }
        copy(&mut out[*place as usize * cell..][..cell], &samples[*row as usize * cell..][..cell]);
    }
}

/// Copy a slice. Values of 8 bytes avoid the call of memmove in `copy_from_slice`.
#[inline]
fn copy(target: &mut [u8], source: &[u8]) {
    match (target.as_chunks_mut::<8>(), source.as_chunks::<8>()) {
        (([target], []), ([source], [])) => *target = *source,
        _ => target.copy_from_slice(source),
    }
}

/// Smaller samples are not announced: page faults load them.
const ANNOUNCE_BYTES: usize = 16 << 10;

/// How many rows ahead of the current row are prefetched.
const ROWS_AHEAD: usize = 4;
/// Smaller rows are not prefetched. Many share a page, so a look-up of each place would cost more than it saves.
const PREFETCH_FROM_BYTES: usize = 256;
/// Cache lines to prefetch per page: enough that the hardware prefetcher continues the stream. The hardware can keep far more
/// requests in flight than software.
const LINES_A_PAGE: usize = 4;
const LINE_BYTES: usize = 64;
const PAGE_BYTES: usize = 4096;

/// Hint to the processor that `bytes` bytes at `offset` of the map are needed soon.
#[inline]
pub fn prefetch(map: &[u8], offset: usize, bytes: usize) {
    let end = (offset + bytes.min(PAGE_BYTES)).min(map.len());
    let next_page = (map.as_ptr() as usize + offset + 1).next_multiple_of(PAGE_BYTES) - map.as_ptr() as usize;
    for start in [offset, next_page] {
        for line in (start..end).step_by(LINE_BYTES).take(LINES_A_PAGE) {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the address lies inside `map`; a prefetch reads nothing and cannot fault.
            unsafe {
                std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(map.as_ptr().add(line).cast());
            }
            #[cfg(not(target_arch = "x86_64"))]
            let _ = line;
        }
    }
}

pub fn set_null(nulls: &mut Nulls, count: usize, place: u32, target: &mut [u8]) {
    nulls.get_or_insert_with(|| vec![false; count])[place as usize] = true;
    target.fill(0);
}
