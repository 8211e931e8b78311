//! Read slices of samples that have blocks of their own: tiles, or one block, which is treated as one tile. A slice is assembled from the
//! tiles that it overlaps. For plain tiles, only the checksum units that contain parts of the slice are read. All slices of a call are
//! planned together and read in groups, so that only one group is in memory in addition to the result (docs/design/0005-tiles.md).

use std::sync::Arc;

use bytes::Bytes;
use penstock_codec::widen;
use penstock_error::{Error, Result};
use penstock_format::datafile::{Codec, UNIT_BYTES};
use penstock_format::schema::ColumnSpec;
use penstock_tensor::Dtype;
use penstock_tensor::slice::{all_runs, runs};

use super::blocks::fill::BlockCaching;
use super::blocks::stream::{stream, stream_runs};
use super::blocks::{Fetched, Wanted};
use super::reader::{Nulls, Reader, set_null};
use super::tile_plan::{PlannedTiles, TileRead, TiledSample, Tiles};
use crate::parallel;
use crate::store::datafile::Decoded;

/// The buffers that slices are copied to.
pub(super) enum Targets<'a> {
    /// One buffer that contains slices of equal size, one after the other.
    Even { out: &'a mut [u8], bytes: usize },
    /// One buffer per slice.
    Each(Vec<&'a mut [u8]>),
}

impl Targets<'_> {
    pub fn get(&mut self, place: u32) -> &mut [u8] {
        match self {
            Targets::Even { out, bytes } => &mut out[place as usize * *bytes..][..*bytes],
            Targets::Each(buffers) => buffers[place as usize],
        }
    }

    /// Convert values of earlier dtypes, which are at the beginning of these places.
    pub fn widen(&mut self, earlier: &[(u32, Dtype)], dtype: Dtype) -> Result<()> {
        let mut narrow = Vec::new();
        for (place, from) in earlier {
            let target = self.get(*place);
            narrow.clear();
            narrow.extend_from_slice(&target[..target.len() / dtype.size() * from.size()]);
            widen(&narrow, *from, dtype, target)?;
        }
        Ok(())
    }

    /// Return all buffers.
    fn all(&mut self) -> Vec<&mut [u8]> {
        match self {
            Targets::Even { out, bytes } => out.chunks_mut((*bytes).max(1)).collect(),
            Targets::Each(buffers) => buffers.iter_mut().map(|buffer| &mut **buffer).collect(),
        }
    }
}

impl Reader {
    /// Read the slices of `tiles` into their targets.
    pub(super) fn read_tiles(
        &self,
        column: &ColumnSpec,
        tiles: Tiles,
        targets: &mut Targets<'_>,
        nulls: &mut Nulls,
    ) -> Result<()> {
        let samples = tiles.into_samples();
        let planned = PlannedTiles::new(&samples);
        let mut failed: Vec<Option<Error>> = samples.iter().map(|_| None).collect();
        self.stream_flat(&samples, &planned, targets, &mut failed)?;
        self.stream_tiles(&samples, &planned.scattered, targets, &mut failed)?;
        for group in planned.groups(&samples) {
            self.read_group(&samples, group, planned.cache, targets, &mut failed)?;
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
        planned: &PlannedTiles,
        targets: &mut Targets<'_>,
        failed: &mut [Option<Error>],
    ) -> Result<()> {
        let (runs, owners) = planned.flat_runs(samples, self.snapshot.context.reads().features().stream_bytes);
        let mut rest = targets.all();
        let mut outs = Vec::with_capacity(runs.len());
        for (run, sample) in runs.iter().zip(&owners) {
            let (begin, end) = run.bounds();
            let place = &mut rest[samples[*sample].place as usize];
            let (out, later) = std::mem::take(place).split_at_mut((end - begin) as usize);
            *place = later;
            outs.push(out);
        }
        for (sample, error) in owners.into_iter().zip(stream_runs(self.snapshot.context.reads(), &runs, outs)?) {
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
        reads.iter().for_each(|read| units.extend(read.units.iter().map(|unit| (read, *unit))));
        let wanted: Vec<Wanted> = units
            .iter()
            .map(|(read, unit)| {
                Wanted::new(&samples[read.sample].file, samples[read.sample].chunk, read.block, Some(*unit))
            })
            .collect();
        let errors = stream(self.snapshot.context.reads(), &wanted, |index, bytes| {
            let (read, unit) = units[index];
            let sample = &samples[read.sample];
            let entry = &sample.file.tail.chunks[sample.chunk];
            let Some((grid, _)) = entry.parts_of(sample.row) else { return };
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
        cache: BlockCaching,
        targets: &mut Targets<'_>,
        failed: &mut [Option<Error>],
    ) -> Result<()> {
        let wanted = group.iter().flat_map(|read| read.wanted(samples));
        let fetched = Fetched::of_tiles(&self.snapshot.context, wanted, cache)?;
        self.announce_tiles(samples, group);
        // Verify and decode on all threads, then copy.
        let work = group.iter().map(|read| read.work_bytes(samples)).sum::<u64>();
        let tiles = parallel::map(group.len(), work as usize, |index| self.tile(samples, &group[index], &fetched))?;
        for (read, tile) in group.iter().zip(tiles) {
            let sample = &samples[read.sample];
            let entry = &sample.file.tail.chunks[sample.chunk];
            let (Some((grid, _)), Ok(tile)) = (entry.parts_of(sample.row), &tile) else {
                failed[read.sample] = failed[read.sample].take().or(tile.err());
                continue;
            };
            let target = targets.get(sample.place);
            let (stored, size) = (grid.tile(read.tile), entry.dtype.size());
            match tile.whole() {
                Some(bytes) => all_runs(&stored, &sample.slice, size, |runs| runs.copy(bytes, target)),
                None => {
                    runs(&stored, &sample.slice, size, |from, to, bytes| tile.copy(from, &mut target[to..to + bytes]))
                }
            }
        }
        Ok(())
    }

    /// Announce to the store which parts of its maps will be read, unless this process has read them and they are still in memory.
    /// Neighbouring parts are announced together.
    fn announce_tiles(&self, samples: &[TiledSample], group: &[TileRead]) {
        let storage = self.snapshot.context.reads();
        let mapped = || group.iter().filter(|read| samples[read.sample].file.in_memory());
        let is_cold = |read: &TileRead| {
            let first = read.extents(samples).first().copied().unwrap_or_default();
            !storage.is_resident(&samples[read.sample].file.map[first.0..first.1.min(first.0 + 1)])
        };
        let is_known = mapped().all(|read| read.work_bytes(samples) == 0);
        if is_known && !mapped().step_by((group.len() / PROBES).max(1)).any(is_cold) {
            return;
        }
        let mut open: Option<(&TiledSample, usize, usize)> = None;
        let told = |(sample, begin, end): (&TiledSample, usize, usize)| storage.will_need(&sample.file.map[begin..end]);
        for read in mapped() {
            let sample = &samples[read.sample];
            for (begin, end) in read.extents(samples) {
                open = match open {
                    Some((before, first, last))
                        if Arc::ptr_eq(&before.file, &sample.file)
                            && (last..last + ANNOUNCED_GAP_BYTES).contains(&begin) =>
                    {
                        Some((before, first, end))
                    }
                    before => {
                        before.into_iter().for_each(told);
                        Some((sample, begin, end))
                    }
                };
            }
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
        let units = &read.units;
        if file.in_memory() {
            units.iter().try_for_each(|unit| file.verify_units(*chunk, read.block, *unit..*unit + 1))?;
            let (begin, bytes) = (entry.offset.get(read.block) as usize, entry.stored_bytes.get(read.block) as usize);
            return Ok(Tile::Mapped(&file.map[begin..begin + bytes]));
        }
        let first = units.first().copied().unwrap_or(0);
        let mut held = Vec::with_capacity(units.len());
        for unit in units {
            held.resize(*unit - first, Bytes::new()); // The units between the needed units are never read.
            held.push(fetched.get(file.key(*chunk, read.block, Some(*unit)))?);
        }
        Ok(Tile::Units { first, held })
    }
}

/// About this number of tiles of a group are looked up in memory.
const PROBES: usize = 8;

/// Reading a gap up to this length costs less than another system call.
const ANNOUNCED_GAP_BYTES: usize = 16 << 10;

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
    /// Return the bytes of the tile, if they are contiguous. A tile of one unit is.
    fn whole(&self) -> Option<&[u8]> {
        match self {
            Tile::Mapped(bytes) => Some(bytes),
            Tile::Decoded(bytes) => Some(bytes),
            Tile::Units { first: 0, held } if held.len() == 1 => Some(&held[0]),
            Tile::Units { .. } => None,
        }
    }

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
