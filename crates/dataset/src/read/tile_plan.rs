//! Which tiles, and which of their checksum units, slices need, and how they are read.

use std::sync::Arc;

use penstock_format::datafile::{Codec, UNIT_BYTES};
use penstock_storage::{Access, RangeRequest, Read};
use penstock_tensor::Dtype;
use penstock_tensor::slice::{Slice, elements, runs, whole};

use super::blocks::Wanted;
use super::blocks::fill::BlockCaching;
use super::blocks::stream::{UnitRun, stream_ranges};
use super::reader::ColumnRows;
use crate::config::Config;
use crate::store::datafile::DataFile;

/// Longer parts of bytes bypass the block cache.
const PASSING_BYTES: u64 = 1 << 20;

/// A slice of one sample, and its index in the result.
pub struct TiledSample {
    pub place: u32,
    pub file: Arc<DataFile>,
    pub chunk: usize,
    pub row: u64,
    pub slice: Slice,
}

impl TiledSample {
    /// Return whether the slice is a whole sample that is tiled along its first dimension only. Its bytes are then the concatenated tiles.
    fn is_flat(&self) -> bool {
        let entry = &self.file.tail.chunks[self.chunk];
        let shape = entry.shape_of(self.row);
        let uncut = entry.tile.iter().zip(&shape).skip(1).all(|(side, size)| side >= size);
        uncut && self.slice == whole(&shape)
    }

    /// Return whether the sample is a value of bytes that is not compressed.
    fn is_plain_bytes(&self) -> bool {
        let entry = &self.file.tail.chunks[self.chunk];
        (entry.dtype, entry.codec) == (Dtype::Bytes, Codec::None)
    }

    /// Return the checksum units of a tile's block that the slice needs. Parts of a block can be read if it is plain and has several units.
    fn units(&self, tile: impl FnOnce() -> Slice, block: usize) -> Vec<usize> {
        let entry = &self.file.tail.chunks[self.chunk];
        let (_, count) = entry.units_of(block);
        if count < 2 || entry.codec != Codec::None {
            return (0..count).collect();
        }
        let mut needed = vec![false; count];
        runs(&tile(), &self.slice, entry.dtype.size(), |from, _, bytes| {
            needed[from / UNIT_BYTES as usize..=(from + bytes - 1) / UNIT_BYTES as usize].fill(true);
        });
        (0..count).filter(|unit| needed[*unit]).collect()
    }
}

/// The part of a sample that one tile provides.
pub struct TileRead {
    pub sample: usize,
    /// The tile's index in the sample, and the block's index in the chunk.
    pub tile: u64,
    pub block: usize,
    /// The checksum units of the block that the slice needs.
    pub units: Vec<usize>,
}

/// The tiled samples to be read from one column.
#[derive(Default)]
pub struct Tiles(Vec<TiledSample>);

impl Tiles {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn into_samples(self) -> Vec<TiledSample> {
        self.0
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

/// The tiles to read, by how they are read.
pub struct PlannedTiles {
    /// Whether the block cache keeps what is fetched.
    pub cache: BlockCaching,
    /// Tiles of whole samples whose bytes are the concatenated tiles, which are streamed into the result.
    pub flat: Vec<TileRead>,
    /// Other tiles that are streamed.
    pub scattered: Vec<TileRead>,
    /// Tiles that are mapped, or fetched in groups.
    pub others: Vec<TileRead>,
}

impl PlannedTiles {
    pub fn new(samples: &[TiledSample]) -> PlannedTiles {
        let mut reads = Vec::new();
        for (index, sample) in samples.iter().enumerate().filter(|(_, sample)| elements(&sample.slice) != Some(0)) {
            let Some((grid, first)) = sample.file.tail.chunks[sample.chunk].parts_of(sample.row) else { continue };
            reads.extend(grid.meeting(&sample.slice).into_iter().map(|tile| {
                let block = (first + tile) as usize;
                let units = sample.units(|| grid.tile(tile), block);
                TileRead { sample: index, tile, block, units }
            }));
        }
        let bytes = reads.iter().map(|read| read.bytes(samples)).sum();
        // Long parts of bytes are read one after the other, and rarely again.
        let passes = |read: &TileRead| samples[read.sample].is_plain_bytes();
        let cache = if bytes >= PASSING_BYTES && reads.iter().all(passes) {
            BlockCaching::Bypass
        } else {
            BlockCaching::of(bytes)
        };
        let (straight, others): (Vec<TileRead>, Vec<TileRead>) = reads.into_iter().partition(|read| {
            let sample = &samples[read.sample];
            cache == BlockCaching::Bypass
                && sample.file.access == Access::Streamed
                && !sample.file.in_memory()
                && sample.file.tail.chunks[sample.chunk].codec == Codec::None
        });
        let (flat, scattered) = straight.into_iter().partition(|read| samples[read.sample].is_flat());
        PlannedTiles { cache, flat, scattered, others }
    }

    /// Divide the tiles that are not streamed into groups, each of which fits in a sixteenth of the budget.
    pub fn groups(&self, samples: &[TiledSample]) -> Vec<&[TileRead]> {
        let (mut groups, mut rest) = (Vec::new(), &self.others[..]);
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits_in_memory = |read: &&TileRead| {
                bytes += read.bytes(samples);
                bytes <= Config::memory_bytes() / 16
            };
            let (group, later) = rest.split_at(rest.iter().take_while(fits_in_memory).count().max(1));
            groups.push(group);
            rest = later;
        }
        groups
    }

    /// Join the tiles of whole samples into runs, each of which is one streamed range. Returns the sample of each run as well.
    pub fn flat_runs(&self, samples: &[TiledSample], most_bytes: u64) -> (Vec<UnitRun>, Vec<usize>) {
        let (mut runs, mut owners): (Vec<UnitRun>, Vec<usize>) = Default::default();
        for (read, unit) in self.flat.iter().flat_map(|read| read.units.iter().map(move |unit| (read, *unit))) {
            let TiledSample { file, chunk, .. } = &samples[read.sample];
            let (from, to) = file.unit(*chunk, read.block, unit);
            match (runs.last_mut(), owners.last()) {
                (Some(run), Some(owner))
                    if *owner == read.sample && run.bounds().1 == from && to - run.bounds().0 <= most_bytes =>
                {
                    run.units.push((read.block, unit));
                }
                _ => {
                    runs.push(UnitRun { file: file.clone(), chunk: *chunk, units: vec![(read.block, unit)] });
                    owners.push(read.sample);
                }
            }
        }
        (runs, owners)
    }

    /// Return the ranges that are streamed.
    pub fn streamed(&self, samples: &[TiledSample], storage: &dyn Read) -> Vec<RangeRequest> {
        let (runs, _) = self.flat_runs(samples, storage.features().stream_bytes);
        let mut wanted: Vec<Wanted> = self.scattered.iter().flat_map(|read| read.wanted(samples)).collect();
        wanted.sort_by_key(|wanted| (wanted.key.0, wanted.offset));
        let order: Vec<usize> = (0..wanted.len()).collect();
        let scattered = stream_ranges(storage, &wanted, &order).1;
        runs.iter().map(UnitRun::range).chain(scattered).collect()
    }
}

impl TileRead {
    /// Return the bytes of memory that reading the tile takes.
    fn bytes(&self, samples: &[TiledSample]) -> u64 {
        let TiledSample { file, chunk, .. } = &samples[self.sample];
        let entry = &file.tail.chunks[*chunk];
        match &entry.raw_bytes {
            Some(raw_bytes) => raw_bytes.get(self.block),
            None => entry.stored_bytes.get(self.block).min(self.units.len() as u64 * UNIT_BYTES),
        }
    }

    /// Return the bytes to verify or decode before the tile can be copied. Fetched tiles are ready.
    pub fn work_bytes(&self, samples: &[TiledSample]) -> u64 {
        let TiledSample { file, chunk, .. } = &samples[self.sample];
        let entry = &file.tail.chunks[*chunk];
        let first = entry.units_of(self.block).0;
        match entry.codec {
            Codec::None if file.in_memory() => {
                self.units.iter().filter(|unit| !file.is_verified(*chunk, first + **unit)).count() as u64 * UNIT_BYTES
            }
            Codec::None => 0,
            _ => entry.stored_bytes.get(self.block),
        }
    }

    /// Return the checksum units to fetch, or the block if it is compressed. Empty if the data file is in memory.
    pub fn wanted(&self, samples: &[TiledSample]) -> Vec<Wanted> {
        let TiledSample { file, chunk, .. } = &samples[self.sample];
        match file.tail.chunks[*chunk].codec {
            _ if file.in_memory() => Vec::new(),
            Codec::None => self.units.iter().map(|unit| Wanted::new(file, *chunk, self.block, Some(*unit))).collect(),
            _ => vec![Wanted::new(file, *chunk, self.block, None)],
        }
    }

    /// Return the parts of the file that the slice needs.
    pub fn extents(&self, samples: &[TiledSample]) -> Vec<(usize, usize)> {
        let TiledSample { file, chunk, .. } = &samples[self.sample];
        let extent = |unit: &usize| file.unit(*chunk, self.block, *unit);
        match file.tail.chunks[*chunk].codec {
            Codec::None => self.units.iter().map(|unit| (extent(unit).0 as usize, extent(unit).1 as usize)).collect(),
            _ => {
                let entry = &file.tail.chunks[*chunk];
                let begin = entry.offset.get(self.block) as usize;
                vec![(begin, begin + entry.stored_bytes.get(self.block) as usize)]
            }
        }
    }
}
