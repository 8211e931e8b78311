//! Read slices of tiled samples. A slice is assembled from the tiles that it overlaps. For plain tiles, only the checksum units that
//! contain parts of the slice are read. All slices of a call are planned together and read in groups, so that only one group is in memory
//! in addition to the result (docs/design/0005-tiles.md).

use std::sync::Arc;

use bytes::Bytes;
use penstock_codec::widen;
use penstock_error::{Error, Result};
use penstock_format::datafile::{Codec, Layout, UNIT_BYTES};
use penstock_format::record::FEATURE_TILED;
use penstock_format::schema::ColumnSpec;
use penstock_storage::Access;
use penstock_tensor::Dtype;
use penstock_tensor::slice::{Slice, elements, runs, whole};

use super::blocks::{Fetched, Wanted};
use super::fill::Cache;
use super::reader::{ColumnRows, Nulls, Reader, set_null};
use super::stream::{UnitRun, stream, stream_runs};
use crate::config::Config;
use crate::parallel;
use crate::store::datafile::{DataFile, Decoded};

/// A slice of one sample, and its index in the result.
struct TiledSample {
    place: u32,
    file: Arc<DataFile>,
    chunk: usize,
    row: u64,
    slice: Slice,
}

impl TiledSample {
    /// Return whether the slice is a whole sample that is tiled along its first dimension only. Its bytes are then the concatenated tiles.
    fn is_flat(&self) -> bool {
        let entry = &self.file.tail.chunks[self.chunk];
        let shape = entry.shape_of(self.row);
        let uncut = entry.tile.iter().zip(&shape).skip(1).all(|(side, size)| side >= size);
        uncut && self.slice == whole(&shape)
    }
}

/// The part of a sample that one tile provides.
struct TileRead {
    sample: usize,
    /// The tile's index in the sample, and the block's index in the chunk.
    tile: u64,
    block: usize,
}

/// The buffers that slices are copied to.
pub(super) enum Targets<'a> {
    /// One buffer that contains slices of equal size, one after the other.
    Even { out: &'a mut [u8], bytes: usize },
    /// One buffer per slice.
    Each(Vec<&'a mut [u8]>),
}

impl Targets<'_> {
    fn get(&mut self, place: u32) -> &mut [u8] {
        match self {
            Targets::Even { out, bytes } => &mut out[place as usize * *bytes..][..*bytes],
            Targets::Each(buffers) => buffers[place as usize],
        }
    }

    /// Return all buffers.
    fn all(&mut self) -> Vec<&mut [u8]> {
        match self {
            Targets::Even { out, bytes } => out.chunks_mut((*bytes).max(1)).collect(),
            Targets::Each(buffers) => buffers.iter_mut().map(|buffer| &mut **buffer).collect(),
        }
    }
}

/// The tiled samples to be read from one column.
#[derive(Default)]
pub(super) struct Tiles(Vec<TiledSample>);

impl Tiles {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Return the indices of the samples in the result.
    pub fn places(&self) -> Vec<u32> {
        self.0.iter().map(|sample| sample.place).collect()
    }

    /// Add a sample, or a slice of it. Returns the slice.
    pub fn add(&mut self, source: &ColumnRows<'_>, (row, place): (u64, u32), slice: Option<&Slice>) -> &Slice {
        let slice = slice.cloned().unwrap_or_else(|| whole(&source.entry().shape_of(row)));
        self.0.push(TiledSample { place, file: source.file.clone(), chunk: source.chunk, row, slice });
        &self.0[self.0.len() - 1].slice
    }
}

impl Reader {
    /// Return whether any sample may be tiled.
    pub fn has_tiles(&self) -> bool {
        self.snapshot.record().features_read & FEATURE_TILED != 0
    }

    /// Return the shapes of a plan's samples in the order requested, with None for a null. Returns None if any sample is not tiled.
    /// Cost: reads the tails of data files that are not open.
    pub fn shapes(&self, column: &ColumnSpec) -> Result<Option<Vec<Option<Vec<u64>>>>> {
        let mut shapes = vec![None; self.plan.len()];
        let mut tiled = !self.has_own(column);
        self.each_group(column, |source, rows| {
            let Some(source) = source else { return Ok(()) };
            let entry = source.entry();
            tiled &= entry.layout == Layout::Tiled;
            if tiled {
                let valid = rows.iter().filter(|(row, _)| entry.is_valid(*row));
                valid.for_each(|(row, place)| shapes[*place as usize] = Some(entry.shape_of(*row)));
            }
            Ok(())
        })?;
        Ok(tiled.then_some(shapes))
    }

    /// Read a slice of each sample in a plan into a buffer of the same size. Call `shapes` first to confirm that all samples are
    /// tiled. Buffers for nulls stay unchanged. Buffers for damaged samples are zeroed, or the call fails. A slice outside its
    /// sample is refused. Cost: reads the checksum units that contain the slices, or whole compressed tiles, and makes one copy.
    pub fn slices(&self, column: &ColumnSpec, slices: &[Slice], outs: Vec<&mut [u8]>) -> Result<Nulls> {
        let (mut tiles, mut narrow, mut nulls) = (Tiles::default(), Tiles::default(), None);
        // The buffers of samples in files with an earlier dtype.
        let mut buffers: Vec<(Vec<u8>, Dtype)> = Vec::new();
        let dtype = column.kind.stored()?.0;
        self.each_group(column, |source, rows| {
            for (row, place) in rows {
                let Some(source) = source.filter(|source| source.entry().is_valid(*row)) else {
                    set_null(&mut nulls, self.plan.len(), *place, &mut []);
                    continue;
                };
                let (slice, shape) = (&slices[*place as usize], source.entry().shape_of(*row));
                let bytes = elements(slice).and_then(|elements| usize::try_from(elements).ok()?.checked_mul(dtype.size()));
                let inside = slice.len() == shape.len() && slice.iter().zip(&shape).all(|(range, size)| range.end <= *size);
                if source.entry().layout != Layout::Tiled || !inside || bytes != Some(outs[*place as usize].len()) {
                    let text = format!("the slice {slice:?} is not inside a tiled sample of shape {shape:?}");
                    return Err((Error::new("invalid-argument", text), *place));
                }
                match source.entry().dtype {
                    current if current == dtype => drop(tiles.add(source, (*row, *place), Some(slice))),
                    earlier => {
                        buffers.resize_with(self.plan.len(), || (Vec::new(), dtype));
                        narrow.add(source, (*row, *place), Some(slice));
                        buffers[*place as usize] = (vec![0; outs[*place as usize].len() / dtype.size() * earlier.size()], earlier);
                    }
                }
            }
            Ok(())
        })?;
        let mut targets = Targets::Each(outs);
        self.read_tiles(column, tiles, &mut targets, &mut nulls)?;
        if !narrow.is_empty() {
            let places = narrow.places();
            self.read_tiles(
                column,
                narrow,
                &mut Targets::Each(buffers.iter_mut().map(|(buffer, _)| &mut buffer[..]).collect()),
                &mut nulls,
            )?;
            for place in places {
                let (values, earlier) = &buffers[place as usize];
                widen(values, *earlier, dtype, targets.get(place))?;
            }
        }
        Ok(nulls)
    }

    /// Read the slices of `tiles` into their targets.
    pub(super) fn read_tiles(&self, column: &ColumnSpec, tiles: Tiles, targets: &mut Targets<'_>, nulls: &mut Nulls) -> Result<()> {
        let samples = tiles.0;
        let mut reads = Vec::new();
        for (index, sample) in samples.iter().enumerate().filter(|(_, sample)| elements(&sample.slice) != Some(0)) {
            let Some((grid, first)) = sample.file.tail.chunks[sample.chunk].grid_of(sample.row) else { continue };
            reads.extend(grid.meeting(&sample.slice).into_iter().map(|tile| TileRead {
                sample: index,
                tile,
                block: (first + tile) as usize,
            }));
        }
        let bytes_of = |read: &TileRead| {
            let entry = &samples[read.sample].file.tail.chunks[samples[read.sample].chunk];
            entry.raw_bytes.as_ref().unwrap_or(&entry.stored_bytes).get(read.block)
        };
        let cache = Cache::of(reads.iter().map(bytes_of).sum());
        let mut failed: Vec<Option<Error>> = samples.iter().map(|_| None).collect();
        let (straight, reads): (Vec<TileRead>, Vec<TileRead>) = reads.into_iter().partition(|read| {
            let sample = &samples[read.sample];
            cache == Cache::Bypass
                && sample.file.access == Access::Streamed
                && !sample.file.in_memory()
                && sample.file.tail.chunks[sample.chunk].codec == Codec::None
        });
        let (flat, scattered): (Vec<TileRead>, Vec<TileRead>) = straight.into_iter().partition(|read| samples[read.sample].is_flat());
        self.stream_flat(&samples, &flat, targets, &mut failed)?;
        self.stream_tiles(&samples, &scattered, targets, &mut failed)?;
        let mut rest = &reads[..];
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |read: &&TileRead| {
                bytes += bytes_of(read);
                bytes <= Config::memory_bytes() / 16
            };
            let (group, later) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            rest = later;
            self.read_group(&samples, group, cache, targets, &mut failed)?;
        }
        for (sample, error) in samples.iter().zip(failed) {
            match error {
                None => {}
                Some(error) if self.passes(&error) => {
                    set_null(nulls, self.plan.len(), sample.place, targets.get(sample.place));
                }
                Some(error) => return Err(self.locate(error, column, sample.place)),
            }
        }
        Ok(())
    }

    /// Read whole samples whose bytes are the concatenated tiles. The device can write directly into the targets.
    fn stream_flat(
        &self,
        samples: &[TiledSample],
        reads: &[TileRead],
        targets: &mut Targets<'_>,
        failed: &mut [Option<Error>],
    ) -> Result<()> {
        let most = self.snapshot.context.storage.stream_bytes();
        let (mut runs, mut owners): (Vec<UnitRun>, Vec<usize>) = Default::default();
        for (read, unit) in reads.iter().flat_map(|read| read.units(samples).into_iter().map(move |unit| (read, unit))) {
            let TiledSample { file, chunk, .. } = &samples[read.sample];
            let (from, to) = file.unit(*chunk, read.block, unit);
            match (runs.last_mut(), owners.last()) {
                (Some(run), Some(owner)) if *owner == read.sample && run.bounds().1 == from && to - run.bounds().0 <= most => {
                    run.units.push((read.block, unit));
                }
                _ => {
                    runs.push(UnitRun { file: file.clone(), chunk: *chunk, units: vec![(read.block, unit)] });
                    owners.push(read.sample);
                }
            }
        }
        let mut rest = targets.all();
        let mut outs = Vec::with_capacity(runs.len());
        for (run, sample) in runs.iter().zip(&owners) {
            let (begin, end) = run.bounds();
            let place = &mut rest[samples[*sample].place as usize];
            let (out, later) = std::mem::take(place).split_at_mut((end - begin) as usize);
            *place = later;
            outs.push(out);
        }
        for (sample, error) in owners.into_iter().zip(stream_runs(self.snapshot.context.storage.as_ref(), &runs, outs)?) {
            failed[sample] = failed[sample].take().or(error);
        }
        Ok(())
    }

    /// Stream the units of a large read, and copy the needed bytes of each unit as it arrives.
    fn stream_tiles(
        &self,
        samples: &[TiledSample],
        reads: &[TileRead],
        targets: &mut Targets<'_>,
        failed: &mut [Option<Error>],
    ) -> Result<()> {
        let mut units: Vec<(&TileRead, usize)> = Vec::new();
        reads.iter().for_each(|read| units.extend(read.units(samples).into_iter().map(|unit| (read, unit))));
        let wanted: Vec<Wanted> = units
            .iter()
            .map(|(read, unit)| Wanted::new(&samples[read.sample].file, samples[read.sample].chunk, read.block, Some(*unit)))
            .collect();
        let errors = stream(self.snapshot.context.storage.as_ref(), &wanted, |index, bytes| {
            let (read, unit) = units[index];
            let sample = &samples[read.sample];
            let entry = &sample.file.tail.chunks[sample.chunk];
            let Some((grid, _)) = entry.grid_of(sample.row) else { return };
            let (target, begin) = (targets.get(sample.place), unit * UNIT_BYTES as usize);
            runs(&grid.tile(read.tile), &sample.slice, entry.dtype.size(), |from, to, length| {
                // The part of the run that this unit contains.
                let (low, high) = (from.max(begin), (from + length).min(begin + bytes.len()));
                if low < high {
                    target[to + low - from..to + high - from].copy_from_slice(&bytes[low - begin..high - begin]);
                }
            });
        })?;
        for ((read, _), error) in units.iter().zip(errors) {
            failed[read.sample] = failed[read.sample].take().or(error);
        }
        Ok(())
    }

    fn read_group(
        &self,
        samples: &[TiledSample],
        group: &[TileRead],
        cache: Cache,
        targets: &mut Targets<'_>,
        failed: &mut [Option<Error>],
    ) -> Result<()> {
        let wanted = group.iter().flat_map(|read| {
            let sample = &samples[read.sample];
            let units = match sample.file.tail.chunks[sample.chunk].codec {
                _ if sample.file.in_memory() => Vec::new(),
                Codec::None => read.units(samples).into_iter().map(Some).collect(),
                _ => vec![None],
            };
            units.into_iter().map(|unit| Wanted::new(&sample.file, sample.chunk, read.block, unit))
        });
        let fetched = Fetched::of_tiles(&self.snapshot.context, wanted, cache)?;
        self.announce_tiles(samples, group);
        // Verify and decode on all threads, then copy.
        let work = group
            .iter()
            .map(|read| samples[read.sample].file.tail.chunks[samples[read.sample].chunk].stored_bytes.get(read.block))
            .sum::<u64>();
        let tiles = parallel::map(group.len(), work as usize, |index| self.tile(samples, &group[index], &fetched))?;
        for (read, tile) in group.iter().zip(tiles) {
            let sample = &samples[read.sample];
            let entry = &sample.file.tail.chunks[sample.chunk];
            let (Some((grid, _)), Ok(tile)) = (entry.grid_of(sample.row), &tile) else {
                failed[read.sample] = failed[read.sample].take().or(tile.err());
                continue;
            };
            let target = targets.get(sample.place);
            runs(&grid.tile(read.tile), &sample.slice, entry.dtype.size(), |from, to, bytes| tile.copy(from, &mut target[to..to + bytes]));
        }
        Ok(())
    }

    /// Announce to the store which parts of its maps will be read. Neighbouring parts are announced together.
    fn announce_tiles(&self, samples: &[TiledSample], group: &[TileRead]) {
        let mut open: Option<(&TiledSample, usize, usize)> = None;
        let told =
            |(sample, begin, end): (&TiledSample, usize, usize)| self.snapshot.context.storage.will_need(&sample.file.map[begin..end]);
        for read in group.iter().filter(|read| samples[read.sample].file.in_memory()) {
            let sample = &samples[read.sample];
            let entry = &sample.file.tail.chunks[sample.chunk];
            let begin = entry.offset.get(read.block) as usize;
            let end = begin + entry.stored_bytes.get(read.block) as usize;
            open = match open {
                Some((before, first, last))
                    if Arc::ptr_eq(&before.file, &sample.file) && (last..last + ANNOUNCED_GAP_BYTES).contains(&begin) =>
                {
                    Some((before, first, end))
                }
                before => {
                    before.into_iter().for_each(told);
                    Some((sample, begin, end))
                }
            };
        }
        open.into_iter().for_each(told);
    }

    /// Return the verified and decoded bytes of the tile for this read.
    fn tile<'a>(&self, samples: &'a [TiledSample], read: &TileRead, fetched: &Fetched) -> Result<Tile<'a>> {
        let TiledSample { file, chunk, .. } = &samples[read.sample];
        let entry = &file.tail.chunks[*chunk];
        if entry.codec != Codec::None {
            return Ok(
                match match file.in_memory() {
                    true => file.block(*chunk, read.block)?,
                    false => Decoded::Owned(fetched.get(file.key(*chunk, read.block, None))?),
                } {
                    Decoded::Mapped(range) => Tile::Mapped(&file.map[range]),
                    Decoded::Owned(bytes) => Tile::Decoded(bytes),
                },
            );
        }
        let units = read.units(samples);
        if file.in_memory() {
            units.into_iter().try_for_each(|unit| file.verify_units(*chunk, read.block, unit..unit + 1))?;
            let (begin, bytes) = (entry.offset.get(read.block) as usize, entry.stored_bytes.get(read.block) as usize);
            return Ok(Tile::Mapped(&file.map[begin..begin + bytes]));
        }
        let first = units.first().copied().unwrap_or(0);
        let mut held = Vec::with_capacity(units.len());
        for unit in units {
            held.resize(unit - first, Bytes::new()); // The units between the needed units are never read.
            held.push(fetched.get(file.key(*chunk, read.block, Some(unit)))?);
        }
        Ok(Tile::Units { first, held })
    }
}

/// Reading a gap up to this length costs less than another system call.
const ANNOUNCED_GAP_BYTES: usize = 16 << 10;

impl TileRead {
    /// Return the checksum units of the tile's block that the slice needs.
    fn units(&self, samples: &[TiledSample]) -> Vec<usize> {
        let sample = &samples[self.sample];
        let entry = &sample.file.tail.chunks[sample.chunk];
        let (_, count) = entry.units_of(self.block);
        let in_parts = count > 1 && entry.codec == Codec::None;
        let Some((grid, _)) = entry.grid_of(sample.row).filter(|_| in_parts) else { return (0..count).collect() };
        let mut needed = vec![false; count];
        runs(&grid.tile(self.tile), &sample.slice, entry.dtype.size(), |from, _, bytes| {
            needed[from / UNIT_BYTES as usize..=(from + bytes - 1) / UNIT_BYTES as usize].fill(true);
        });
        (0..count).filter(|unit| needed[*unit]).collect()
    }
}

/// The bytes that are needed from a tile.
enum Tile<'a> {
    Mapped(&'a [u8]),
    Decoded(Bytes),
    /// Checksum units, starting with `first`.
    Units {
        first: usize,
        held: Vec<Bytes>,
    },
}

impl Tile<'_> {
    /// Copy the bytes at offset `from` in the tile to `out`.
    fn copy(&self, mut from: usize, mut out: &mut [u8]) {
        match self {
            Tile::Mapped(bytes) => out.copy_from_slice(&bytes[from..from + out.len()]),
            Tile::Decoded(bytes) => out.copy_from_slice(&bytes[from..from + out.len()]),
            Tile::Units { first, held } => {
                while !out.is_empty() {
                    let unit = &held[from / UNIT_BYTES as usize - first][from % UNIT_BYTES as usize..];
                    let (now, later) = out.split_at_mut(unit.len().min(out.len()));
                    now.copy_from_slice(&unit[..now.len()]);
                    from += now.len();
                    out = later;
                }
            }
        }
    }
}
