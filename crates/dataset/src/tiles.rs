//! Read windows of tiled samples. A window is assembled from the tiles that it meets, reading only the checksum units that hold
//! it. All windows of a call are planned together and read in groups, so that memory holds one group besides the result
//! (docs/design/0005-tiles.md).

use std::sync::Arc;

use bytes::Bytes;
use penstock_error::{Error, Kind, Result};
use penstock_format::datafile::{Codec, Layout, UNIT_BYTES};
use penstock_format::record::FEATURE_TILED;
use penstock_format::schema::ColumnSpec;
use penstock_tensor::window::{Window, elements, runs, whole};

use crate::config::Config;
use crate::context::Context;
use crate::datafile::{DataFile, Decoded};
use crate::fetch::{Fetched, Run, Wanted};
use crate::parallel;
use crate::plan::Plan;
use crate::read::{Nulls, OnCorrupt, Source, set_null};
use crate::snapshot::Snapshot;

/// A window of one sample, and its place in the answer.
struct Job {
    place: u32,
    file: Arc<DataFile>,
    chunk: usize,
    row: u64,
    window: Window,
}

impl Job {
    /// Return whether the window is a whole sample, cut along its first dimension only. Its tiles in order are then its bytes.
    fn is_flat(&self) -> bool {
        let entry = &self.file.tail.chunks[self.chunk];
        let shape = entry.shape_of(self.row);
        let uncut = entry.tile.iter().zip(&shape).skip(1).all(|(side, size)| side >= size);
        uncut && self.window == whole(&shape)
    }
}

/// The part of a job that one tile provides.
struct Part {
    job: usize,
    /// Number of the tile in its sample, and of its block in the chunk.
    tile: u64,
    block: usize,
}

/// The buffers that windows are copied to.
pub enum Targets<'a> {
    /// Windows of equal size, one after the other.
    Even { out: &'a mut [u8], bytes: usize },
    /// One buffer per window.
    Each(Vec<&'a mut [u8]>),
}

impl Targets<'_> {
    fn get(&mut self, place: u32) -> &mut [u8] {
        match self {
            Targets::Even { out, bytes } => &mut out[place as usize * *bytes..][..*bytes],
            Targets::Each(buffers) => buffers[place as usize],
        }
    }

    /// Return all buffers at once.
    fn all(&mut self) -> Vec<&mut [u8]> {
        match self {
            Targets::Even { out, bytes } => out.chunks_mut((*bytes).max(1)).collect(),
            Targets::Each(buffers) => buffers.iter_mut().map(|buffer| &mut **buffer).collect(),
        }
    }
}

/// Tiled samples of one column to read.
#[derive(Default)]
pub struct Tiles(Vec<Job>);

impl Tiles {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Return the places of the samples in the answer.
    pub fn places(&self) -> Vec<u32> {
        self.0.iter().map(|job| job.place).collect()
    }

    /// Add a sample, or a window of it. Returns the window.
    pub fn add(&mut self, source: &Source<'_>, (row, place): (u64, u32), window: Option<&Window>) -> &Window {
        let window = window.cloned().unwrap_or_else(|| whole(&source.entry().shape_of(row)));
        self.0.push(Job { place, file: source.file.clone(), chunk: source.chunk, row, window });
        &self.0[self.0.len() - 1].window
    }
}

impl Snapshot {
    /// Return whether any sample may be tiled.
    pub fn has_tiles(&self) -> bool {
        self.record().features_read & FEATURE_TILED != 0
    }

    /// Return the shapes of the samples of a plan in the order requested; a null has none. None if a sample is not tiled.
    /// Cost: reads the tails of data files that are not open.
    pub fn shapes(&self, plan: &Plan, column: &ColumnSpec, on_corrupt: OnCorrupt) -> Result<Option<Vec<Option<Vec<u64>>>>> {
        let mut shapes = vec![None; plan.len()];
        let mut tiled = true;
        self.each_source(plan, column, on_corrupt == OnCorrupt::Null, |source, rows| {
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

    /// Read a window of each sample of a plan into buffers of the same sizes. `shapes` must have returned that all samples are tiled.
    /// Buffers of nulls stay unchanged. A window outside its sample is refused. Cost: reads the checksum units that hold the windows,
    /// and makes one copy.
    pub fn read_windows(
        &self,
        plan: &Plan,
        column: &ColumnSpec,
        windows: &[Window],
        outs: Vec<&mut [u8]>,
        on_corrupt: OnCorrupt,
    ) -> Result<Nulls> {
        let (mut tiles, mut nulls) = (Tiles::default(), None);
        let size = column.kind.stored()?.0.size();
        self.each_source(plan, column, on_corrupt == OnCorrupt::Null, |source, rows| {
            for (row, place) in rows {
                let Some(source) = source.filter(|source| source.entry().is_valid(*row)) else {
                    set_null(&mut nulls, plan.len(), *place, &mut []);
                    continue;
                };
                let (window, shape) = (&windows[*place as usize], source.entry().shape_of(*row));
                let bytes = elements(window).and_then(|elements| usize::try_from(elements).ok()?.checked_mul(size));
                let inside = window.len() == shape.len() && window.iter().zip(&shape).all(|(range, size)| range.end <= *size);
                if source.entry().layout != Layout::Tiled || !inside || bytes != Some(outs[*place as usize].len()) {
                    let text = format!("the window {window:?} is not inside a tiled sample of shape {shape:?}");
                    return Err((Error::new("invalid-argument", text), *place));
                }
                tiles.add(source, (*row, *place), Some(window));
            }
            Ok(())
        })?;
        self.read_tiles(plan, column, tiles, &mut Targets::Each(outs), on_corrupt, &mut nulls)?;
        Ok(nulls)
    }

    /// Read the windows of `tiles` into their targets.
    pub fn read_tiles(
        &self,
        plan: &Plan,
        column: &ColumnSpec,
        tiles: Tiles,
        targets: &mut Targets<'_>,
        on_corrupt: OnCorrupt,
        nulls: &mut Nulls,
    ) -> Result<()> {
        let jobs = tiles.0;
        let mut parts = Vec::new();
        for (index, job) in jobs.iter().enumerate().filter(|(_, job)| elements(&job.window) != Some(0)) {
            let Some((grid, first)) = job.file.tail.chunks[job.chunk].grid_of(job.row) else { continue };
            parts.extend(grid.meeting(&job.window).into_iter().map(|tile| Part { job: index, tile, block: (first + tile) as usize }));
        }
        let bytes_of = |part: &Part| {
            let entry = &jobs[part.job].file.tail.chunks[jobs[part.job].chunk];
            entry.raw_bytes.as_ref().unwrap_or(&entry.stored_bytes).get(part.block)
        };
        // The cache does not keep tiles that would fill more than half of it.
        let cached = parts.iter().map(bytes_of).sum::<u64>() <= Context::block_cache_bytes() / 2;
        let mut failed: Vec<Option<Error>> = jobs.iter().map(|_| None).collect();
        let (straight, parts): (Vec<Part>, Vec<Part>) = parts.into_iter().partition(|part| {
            let job = &jobs[part.job];
            !cached && job.file.ranged && job.file.tail.chunks[job.chunk].codec == Codec::None && self.context.storage.stream_bytes() > 0
        });
        let (flat, scattered): (Vec<Part>, Vec<Part>) = straight.into_iter().partition(|part| jobs[part.job].is_flat());
        self.stream_flat(&jobs, &flat, targets, &mut failed)?;
        self.stream_tiles(&jobs, &scattered, targets, &mut failed)?;
        let mut rest = &parts[..];
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |part: &&Part| {
                bytes += bytes_of(part);
                bytes <= Config::memory_bytes() / 16
            };
            let (group, later) = rest.split_at(rest.iter().take_while(fits).count().max(1));
            rest = later;
            self.read_group(&jobs, group, cached, targets, &mut failed)?;
        }
        for (job, error) in jobs.iter().zip(failed) {
            match error {
                None => {}
                Some(error) if on_corrupt == OnCorrupt::Null && error.kind() == Kind::Corrupt => {
                    set_null(nulls, plan.len(), job.place, targets.get(job.place));
                }
                Some(error) => return Err(self.locate_error(error, plan, column, job.place)),
            }
        }
        Ok(())
    }

    /// Read whole samples whose tiles in order are their bytes. The device can write directly to their places.
    fn stream_flat(&self, jobs: &[Job], parts: &[Part], targets: &mut Targets<'_>, failed: &mut [Option<Error>]) -> Result<()> {
        let most = self.context.storage.stream_bytes();
        let (mut runs, mut owners): (Vec<Run>, Vec<usize>) = Default::default();
        for (part, unit) in parts.iter().flat_map(|part| part.units(jobs).into_iter().map(move |unit| (part, unit))) {
            let Job { file, chunk, .. } = &jobs[part.job];
            let (from, to) = file.unit(*chunk, part.block, unit);
            match (runs.last_mut(), owners.last()) {
                (Some(run), Some(owner)) if *owner == part.job && run.bounds().1 == from && to - run.bounds().0 <= most => {
                    run.units.push((part.block, unit));
                }
                _ => {
                    runs.push(Run { file: file.clone(), chunk: *chunk, units: vec![(part.block, unit)] });
                    owners.push(part.job);
                }
            }
        }
        let mut rest = targets.all();
        let mut outs = Vec::with_capacity(runs.len());
        for (run, job) in runs.iter().zip(&owners) {
            let (begin, end) = run.bounds();
            let place = &mut rest[jobs[*job].place as usize];
            let (out, later) = std::mem::take(place).split_at_mut((end - begin) as usize);
            *place = later;
            outs.push(out);
        }
        for (job, error) in owners.into_iter().zip(self.stream_runs(&runs, outs)?) {
            failed[job] = failed[job].take().or(error);
        }
        Ok(())
    }

    /// Stream the units of a large read, and copy the needed bytes of each unit as it arrives.
    fn stream_tiles(&self, jobs: &[Job], parts: &[Part], targets: &mut Targets<'_>, failed: &mut [Option<Error>]) -> Result<()> {
        let mut units: Vec<(&Part, usize)> = Vec::new();
        parts.iter().for_each(|part| units.extend(part.units(jobs).into_iter().map(|unit| (part, unit))));
        let wanted: Vec<Wanted> =
            units.iter().map(|(part, unit)| Wanted::new(&jobs[part.job].file, jobs[part.job].chunk, part.block, Some(*unit))).collect();
        let errors = self.stream(&wanted, |index, bytes| {
            let (part, unit) = units[index];
            let job = &jobs[part.job];
            let entry = &job.file.tail.chunks[job.chunk];
            let Some((grid, _)) = entry.grid_of(job.row) else { return };
            let (target, begin) = (targets.get(job.place), unit * UNIT_BYTES as usize);
            runs(&grid.tile(part.tile), &job.window, entry.dtype.size(), |from, to, length| {
                // The part of the run that is in this unit.
                let (low, high) = (from.max(begin), (from + length).min(begin + bytes.len()));
                if low < high {
                    target[to + low - from..to + high - from].copy_from_slice(&bytes[low - begin..high - begin]);
                }
            });
        })?;
        for ((part, _), error) in units.iter().zip(errors) {
            failed[part.job] = failed[part.job].take().or(error);
        }
        Ok(())
    }

    fn read_group(
        &self,
        jobs: &[Job],
        group: &[Part],
        cached: bool,
        targets: &mut Targets<'_>,
        failed: &mut [Option<Error>],
    ) -> Result<()> {
        let wanted = group.iter().flat_map(|part| {
            let job = &jobs[part.job];
            let units = match job.file.tail.chunks[job.chunk].codec {
                _ if !job.file.ranged => Vec::new(),
                Codec::None => part.units(jobs).into_iter().map(Some).collect(),
                _ => vec![None],
            };
            units.into_iter().map(|unit| Wanted::new(&job.file, job.chunk, part.block, unit))
        });
        let fetched = self.fetch_tiles(wanted, cached)?;
        self.announce_tiles(jobs, group);
        // Verify and decode on all threads, then copy.
        let work = group.iter().map(|part| jobs[part.job].file.tail.chunks[jobs[part.job].chunk].stored_bytes.get(part.block)).sum::<u64>();
        let tiles = parallel::map(group.len(), work as usize, |index| self.tile(jobs, &group[index], &fetched))?;
        for (part, tile) in group.iter().zip(tiles) {
            let job = &jobs[part.job];
            let entry = &job.file.tail.chunks[job.chunk];
            let (Some((grid, _)), Ok(tile)) = (entry.grid_of(job.row), &tile) else {
                failed[part.job] = failed[part.job].take().or(tile.err());
                continue;
            };
            let target = targets.get(job.place);
            runs(&grid.tile(part.tile), &job.window, entry.dtype.size(), |from, to, bytes| tile.copy(from, &mut target[to..to + bytes]));
        }
        Ok(())
    }

    /// Announce to the store which parts of its maps will be read. Neighbours are announced together.
    fn announce_tiles(&self, jobs: &[Job], group: &[Part]) {
        let mut open: Option<(&Job, usize, usize)> = None;
        let told = |(job, begin, end): (&Job, usize, usize)| self.context.storage.will_need(&job.file.map[begin..end]);
        for part in group.iter().filter(|part| !jobs[part.job].file.ranged) {
            let job = &jobs[part.job];
            let entry = &job.file.tail.chunks[job.chunk];
            let begin = entry.offset.get(part.block) as usize;
            let end = begin + entry.stored_bytes.get(part.block) as usize;
            open = match open {
                Some((before, first, last))
                    if Arc::ptr_eq(&before.file, &job.file) && (last..last + ANNOUNCED_GAP_BYTES).contains(&begin) =>
                {
                    Some((before, first, end))
                }
                before => {
                    before.into_iter().for_each(told);
                    Some((job, begin, end))
                }
            };
        }
        open.into_iter().for_each(told);
    }

    /// Return the verified and decoded bytes of a part's tile.
    fn tile<'a>(&self, jobs: &'a [Job], part: &Part, fetched: &Fetched) -> Result<Tile<'a>> {
        let Job { file, chunk, .. } = &jobs[part.job];
        let entry = &file.tail.chunks[*chunk];
        if entry.codec != Codec::None {
            return Ok(match file.block(&self.context, fetched, *chunk, part.block)? {
                Decoded::Mapped(range) => Tile::Mapped(&file.map[range]),
                Decoded::Owned(bytes) => Tile::Decoded(bytes),
            });
        }
        let units = part.units(jobs);
        if !file.ranged {
            units.into_iter().try_for_each(|unit| file.verify_units(*chunk, part.block, unit..unit + 1))?;
            let (begin, bytes) = (entry.offset.get(part.block) as usize, entry.stored_bytes.get(part.block) as usize);
            return Ok(Tile::Mapped(&file.map[begin..begin + bytes]));
        }
        let first = units.first().copied().unwrap_or(0);
        let mut held = Vec::with_capacity(units.len());
        for unit in units {
            held.resize(unit - first, Bytes::new()); // Units between needed units are never read.
            held.push(fetched.get(file.key(*chunk, part.block, Some(unit)))?);
        }
        Ok(Tile::Units { first, held })
    }
}

/// Reading a gap up to this length costs less than another system call.
const ANNOUNCED_GAP_BYTES: usize = 16 << 10;

impl Part {
    /// Return the checksum units of the tile's block that the window needs.
    fn units(&self, jobs: &[Job]) -> Vec<usize> {
        let job = &jobs[self.job];
        let entry = &job.file.tail.chunks[job.chunk];
        let (_, count) = entry.units_of(self.block);
        let in_parts = count > 1 && entry.codec == Codec::None;
        let Some((grid, _)) = entry.grid_of(job.row).filter(|_| in_parts) else { return (0..count).collect() };
        let mut needed = vec![false; count];
        runs(&grid.tile(self.tile), &job.window, entry.dtype.size(), |from, _, bytes| {
            needed[from / UNIT_BYTES as usize..=(from + bytes - 1) / UNIT_BYTES as usize].fill(true);
        });
        (0..count).filter(|unit| needed[*unit]).collect()
    }
}

/// The bytes of a tile that are needed.
enum Tile<'a> {
    Mapped(&'a [u8]),
    Decoded(Bytes),
    /// Checksum units from `first` on.
    Units {
        first: usize,
        held: Vec<Bytes>,
    },
}

impl Tile<'_> {
    /// Copy the bytes at `from` of the tile to `out`.
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
