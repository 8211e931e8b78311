//! The reads that a batch needs from its sources, and the resulting column values.

use std::sync::Arc;

use penstock_dataset::{Extent, Foresight, Held, OnCorrupt, Purpose, Reader};
use penstock_error::Result;
use penstock_format::datafile::Codec;
use penstock_format::schema::ColumnSpec;
use penstock_tensor::Dtype;
use penstock_tensor::slice::Slice;

use crate::batch::{Array, Nulls, Raw, Values};
use crate::memory::{Memory, capacity, recycled};
use crate::order::mixture::Place;
use crate::source::view::{Source, value_type};

/// The samples of a batch that come from one source.
pub struct Share {
    source: usize,
    /// Positions in the view.
    positions: Vec<u64>,
    reader: Reader,
    /// For each position, its place in the batch.
    places: Vec<u32>,
    /// Whether the reader uses blocks lent by a window.
    lent: bool,
}

impl Share {
    /// Return why samples are read. A source that covers at least half of its snapshot will soon also need the neighbouring samples.
    fn purpose(&self, sources: &[Source]) -> Purpose {
        let source = &sources[self.source];
        if !self.lent && 2 * source.len() >= source.snapshot.len() { Purpose::Epoch } else { Purpose::Take }
    }
}

/// The reads for a batch, grouped by source.
pub struct Reads {
    pub shares: Vec<Share>,
    count: usize,
}

impl Reads {
    pub fn new(sources: &[Source], places: &[Place]) -> Result<Reads> {
        let mut shares = Vec::new();
        for (index, source) in sources.iter().enumerate() {
            let mine = || places.iter().enumerate().filter(move |(_, place)| place.source == index);
            let positions: Vec<u64> = mine().map(|(_, place)| place.position).collect();
            if !positions.is_empty() {
                let absolute = positions.iter().map(|position| source.absolute(*position)).collect();
                let reader = Reader::new(source.snapshot.clone(), absolute, OnCorrupt::Raise)?;
                shares.push(Share { source: index, positions, reader, places: mine().map(|(at, _)| at as u32).collect(), lent: false });
            }
        }
        Ok(Reads { shares, count: places.len() })
    }

    /// Use blocks that the loader keeps.
    pub fn lend_all(&mut self, held: &Held) {
        self.shares.iter_mut().for_each(|share| share.reader.lend(held));
    }

    /// Use blocks that a window holds, which `lend` returns. `specs` lists the columns of each source.
    pub fn lend(
        &mut self,
        specs: &[Vec<ColumnSpec>],
        lend: impl Fn(usize, &[&ColumnSpec], &[u64]) -> Result<Vec<Arc<Held>>>,
    ) -> Result<()> {
        for share in &mut self.shares {
            let columns: Vec<&ColumnSpec> = specs[share.source].iter().collect();
            let lent = lend(share.source, &columns, &share.positions)?;
            share.lent = !lent.is_empty();
            lent.iter().for_each(|held| share.reader.lend(held));
        }
        Ok(())
    }

    /// Return what is known of a column's values before they are read. Blocks that a window holds count as small. Cost: reads the tails of
    /// all columns that are not open.
    pub fn extents(&mut self, specs: &[Vec<ColumnSpec>], column: usize) -> Result<Vec<Extent>> {
        let mut all = vec![Extent::Null; self.count];
        for share in &mut self.shares {
            share.reader.open(&specs[share.source].iter().collect::<Vec<&ColumnSpec>>())?;
            for (place, extent) in share.places.iter().zip(share.reader.extents(&specs[share.source][column])?) {
                let is_held = share.lent && matches!(extent, Extent::Large { is_tiled: false, .. });
                all[*place as usize] = if is_held { Extent::Small } else { extent };
            }
        }
        Ok(all)
    }

    /// Leave the samples with a flag out of all reads of a column except `slices`.
    pub fn leave_out(&mut self, specs: &[Vec<ColumnSpec>], column: usize, flags: &[bool]) {
        for share in &mut self.shares {
            let own = share.places.iter().map(|place| flags[*place as usize]).collect();
            share.reader.leave_out(&specs[share.source][column], own);
        }
    }

    /// Read a slice of each sample of a column that has one. Each buffer has the size of its slice.
    pub fn slices(&self, specs: &[Vec<ColumnSpec>], column: usize, slices: &[Option<Slice>], outs: Vec<&mut [u8]>) -> Result<()> {
        let mut outs: Vec<Option<&mut [u8]>> = outs.into_iter().map(Some).collect();
        for share in &self.shares {
            let own_slices: Vec<Option<Slice>> = share.places.iter().map(|place| slices[*place as usize].clone()).collect();
            let own_outs = share.places.iter().map(|place| outs[*place as usize].take().unwrap_or_default()).collect();
            share.reader.slices(&specs[share.source][column], &own_slices, own_outs)?;
        }
        Ok(())
    }

    /// Fetch the blocks that the columns need, unless files are mapped.
    pub fn fetch(&mut self, sources: &[Source], specs: &[Vec<ColumnSpec>]) -> Result<()> {
        for share in &mut self.shares {
            let columns: Vec<&ColumnSpec> = specs[share.source].iter().collect();
            let purpose = share.purpose(sources);
            share.reader.fetch(&columns, purpose)?;
        }
        Ok(())
    }

    /// Return the positions of the samples that come from a source.
    pub fn positions(&self, source: usize) -> impl Iterator<Item = u64> {
        self.shares.iter().filter(move |share| share.source == source).flat_map(|share| share.positions.iter().copied())
    }

    /// Plan as if a window held the blocks of a source.
    pub fn set_lent(&mut self, source: usize) {
        self.shares.iter_mut().filter(|share| share.source == source).for_each(|share| share.lent = true);
    }

    /// Note what `fetch` and the reads of all columns would request, by source. Columns that are kept have no blocks to fetch. `parts` contains
    /// the slices of columns that are read in parts.
    pub fn foresee(
        &mut self,
        (sources, specs): (&[Source], &[Vec<ColumnSpec>]),
        is_kept: impl Fn(usize, &ColumnSpec) -> bool,
        parts: &[(usize, Vec<Option<Slice>>)],
        foresight: &mut Foresight,
        noted: &mut [(u64, u64)],
    ) -> Result<()> {
        for share in self.shares.iter_mut().filter(|share| !sources[share.source].snapshot.is_mapped()) {
            let columns: Vec<&ColumnSpec> = specs[share.source].iter().collect();
            let before = (foresight.requests, foresight.bytes);
            if !share.lent {
                let others: Vec<&ColumnSpec> = columns.iter().copied().filter(|column| !is_kept(share.source, column)).collect();
                share.reader.foresee_blocks(&others, share.purpose(sources), foresight)?;
            }
            share.reader.foresee_others(&columns, foresight)?;
            for (column, slices) in parts {
                let own: Vec<Option<Slice>> = share.places.iter().map(|place| slices[*place as usize].clone()).collect();
                share.reader.foresee_slices(&specs[share.source][*column], &own, foresight)?;
            }
            noted[share.source].0 += foresight.requests - before.0;
            noted[share.source].1 += foresight.bytes - before.1;
        }
        Ok(())
    }

    pub fn row_ids(&self) -> Vec<i64> {
        let mut ids = vec![0; self.count];
        for share in &self.shares {
            share.places.iter().zip(share.reader.plan.row_ids()).for_each(|(place, id)| ids[*place as usize] = id);
        }
        ids
    }

    /// Copy samples of fixed shape, `cell` bytes each, into `out`. Label and category codes become int64.
    pub fn fixed(&self, sources: &[Source], specs: &[Vec<ColumnSpec>], column: usize, cell: usize, out: &mut [u8]) -> Result<Nulls> {
        let read = |share: &Share, out: &mut [u8]| -> Result<Nulls> {
            let spec = &specs[share.source][column];
            if let Some(files) = sources[share.source].files_of(spec) {
                return files.fixed(&share.reader.plan.positions, cell, out).map(|()| None);
            }
            if !spec.kind.has_codes() {
                return share.reader.fixed(spec, out);
            }
            let mut codes = vec![0i64; share.places.len()];
            let nulls = share.reader.codes(spec, &mut codes)?;
            if let Some(known) = sources[share.source].codes_of(spec) {
                // Under a null, the code may be any number.
                codes.iter_mut().for_each(|code| *code = known.get(*code as usize).copied().unwrap_or(0));
            }
            out.as_chunks_mut::<8>().0.iter_mut().zip(codes).for_each(|(out, code)| *out = code.to_ne_bytes());
            Ok(nulls)
        };
        if let [share] = &self.shares[..] {
            return read(share, out);
        }
        let mut nulls: Nulls = None;
        for share in &self.shares {
            let mut own = vec![0; share.places.len() * cell];
            let own_nulls = read(share, &mut own)?;
            for (index, place) in share.places.iter().enumerate() {
                out[*place as usize * cell..][..cell].copy_from_slice(&own[index * cell..][..cell]);
                if own_nulls.as_ref().is_some_and(|nulls| nulls[index]) {
                    nulls.get_or_insert_with(|| vec![false; self.count])[*place as usize] = true;
                }
            }
        }
        Ok(nulls)
    }

    /// Release the fetched blocks.
    pub fn release(&mut self) {
        self.shares.iter_mut().for_each(|share| share.reader.release());
    }

    /// Return values of different lengths, which the batch may keep. Values in a run, or in a block with many other values, are
    /// copied, because they would keep a lot of other memory alive.
    pub fn kept(&self, sources: &[Source], specs: &[Vec<ColumnSpec>], column: usize) -> Result<Raw> {
        let mut raw = self.raw(sources, specs, column)?;
        for (share, part) in self.shares.iter().zip(&mut raw.parts) {
            let source = &sources[share.source];
            let spec = &specs[share.source][column];
            // Mapped, uncompressed values are in the page cache and do not count as memory.
            if source.files_of(spec).is_some() || (source.mapped() && spec.codec == Codec::None) {
                continue;
            }
            if share.lent || part.held_bytes() > part.value_bytes() * 5 / 4 {
                part.move_to(recycled(part.value_bytes())?.slot());
            }
            raw.own_bytes += capacity(part.value_bytes()) as u64;
        }
        Ok(raw)
    }

    /// Return values of different lengths without copying them.
    fn raw(&self, sources: &[Source], specs: &[Vec<ColumnSpec>], column: usize) -> Result<Raw> {
        let (mut parts, mut index, mut own_bytes) = (Vec::new(), vec![(0, 0); self.count], 0);
        for share in &self.shares {
            let spec = &specs[share.source][column];
            let part = parts.len() as u32;
            parts.push(match sources[share.source].files_of(spec) {
                Some(files) => {
                    let values = files.raw(&share.reader.plan.positions)?;
                    own_bytes += values.value_bytes() as u64;
                    values
                }
                None => {
                    let mut values = share.reader.ragged(spec)?;
                    if let Some(known) = sources[share.source].codes_of(spec) {
                        values.map(|codes| joint_codes(codes, known));
                    }
                    values
                }
            });
            share.places.iter().enumerate().for_each(|(row, place)| index[*place as usize] = (part, row as u32));
        }
        Ok(Raw { parts, index, own_bytes })
    }

    /// Read a column without applying transforms.
    pub fn values(&self, sources: &[Source], specs: &[Vec<ColumnSpec>], column: usize) -> Result<Values> {
        let spec = &specs[0][column];
        let (dtype, shape) = value_type(spec)?;
        if shape.is_fixed() {
            let cell = shape.fixed_bytes(dtype)? as usize;
            let mut memory = Memory::new(cell * self.count)?;
            let nulls = self.fixed(sources, specs, column, cell, memory.slice())?;
            let shape = std::iter::once(self.count as u64).chain(shape.0.iter().flatten().copied()).collect();
            return Ok(Values::Array(Array { memory, dtype, shape, nulls }));
        }
        if !spec.kind.is_array() {
            return self.kept(sources, specs, column).map(Values::Raw);
        }
        let raw = self.raw(sources, specs, column)?;
        let values = (0..raw.len()).map(|sample| raw.get(sample).map(|value| (value, shape.fill(raw.free(sample)))));
        ragged(values, dtype, shape.0.len())
    }
}

/// Convert a list of labels to the codes of all sources together.
fn joint_codes(codes: &[u8], known: &[i64]) -> Vec<u8> {
    let codes = codes.as_chunks::<8>().0.iter().map(|code| i64::from_le_bytes(*code));
    codes.flat_map(|code| known.get(code as usize).copied().unwrap_or(0).to_le_bytes()).collect()
}

/// Concatenate values of the same dtype and rank into a ragged array.
pub fn ragged<'a>(values: impl Iterator<Item = Option<(&'a [u8], Vec<u64>)>> + Clone, dtype: Dtype, rank: usize) -> Result<Values> {
    let bytes = values.clone().flatten().map(|(value, _)| value.len()).sum();
    let mut memory = Memory::new(bytes)?;
    let (mut rest, mut offsets, mut shapes, mut nulls) = (memory.slice(), vec![0i64], Vec::new(), Vec::new());
    for value in values {
        let mut end = offsets[offsets.len() - 1];
        nulls.push(value.is_none());
        if let Some((value, shape)) = value {
            let (target, later) = rest.split_at_mut(value.len());
            target.copy_from_slice(value);
            rest = later;
            end += (value.len() / dtype.size()) as i64;
            shapes.extend(shape.into_iter().map(|size| size as i64));
        } else {
            shapes.extend(std::iter::repeat_n(0, rank));
        }
        offsets.push(end);
    }
    let nulls = Some(nulls).filter(|nulls| nulls.contains(&true));
    let shape = vec![(bytes / dtype.size()) as u64];
    Ok(Values::Ragged { values: Array { memory, dtype, shape, nulls }, offsets, shapes, rank })
}
