//! The reads that a batch needs from its sources, and the resulting column values.

use std::sync::Arc;

use penstock_dataset::{Foresight, HeldBlocks, OnCorrupt, Purpose, RaggedValues, Reader, SampleExtent};
use penstock_error::Result;
use penstock_format::datafile::Codec;
use penstock_format::schema::ColumnSpec;
use penstock_tensor::Dtype;
use penstock_tensor::slice::Slice;

use crate::batch::{Array, ColumnValues, Nulls, Raw};
use crate::memory::{Memory, capacity, recycled};
use crate::order::mixture::SamplePlace;
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
    fn purpose(&self, source: &Source) -> Purpose {
        if !self.lent && 2 * source.len() >= source.snapshot.len() { Purpose::Epoch } else { Purpose::Take }
    }

    /// Return those slices of a batch that are of this share's samples.
    fn own_slices(&self, slices: &[Option<Slice>]) -> Vec<Option<Slice>> {
        self.places.iter().map(|place| slices[*place as usize].clone()).collect()
    }

    /// Copy samples of fixed shape, `cell` bytes each, into `out`. Label and category codes become int64.
    fn fixed(&self, source: &Source, column: usize, cell: usize, out: &mut [u8]) -> Result<Nulls> {
        let spec = &source.columns[column];
        if let Some(files) = source.files_of(spec) {
            return files.fixed(&self.reader.plan.positions, cell, out).map(|()| None);
        }
        if !spec.kind.has_codes() {
            return self.reader.fixed(spec, out);
        }
        let mut codes = vec![0i64; self.places.len()];
        let nulls = self.reader.codes(spec, &mut codes)?;
        if let Some(known) = source.codes_of(spec) {
            // Under a null, the code may be any number.
            codes.iter_mut().for_each(|code| *code = known.get(*code as usize).copied().unwrap_or(0));
        }
        out.as_chunks_mut::<8>().0.iter_mut().zip(codes).for_each(|(out, code)| *out = code.to_ne_bytes());
        Ok(nulls)
    }

    /// Return values of different lengths without copying them.
    fn ragged(&self, source: &Source, column: usize) -> Result<RaggedValues> {
        let spec = &source.columns[column];
        if let Some(files) = source.files_of(spec) {
            return files.raw(&self.reader.plan.positions);
        }
        let mut values = self.reader.ragged(spec)?;
        if let Some(known) = source.codes_of(spec) {
            values.map(|codes| joint_codes(codes, known));
        }
        Ok(values)
    }
}

/// The reads for a batch, grouped by source.
pub struct Reads {
    shares: Vec<Share>,
    count: usize,
}

impl Reads {
    pub fn new(sources: &[Source], places: &[SamplePlace]) -> Result<Reads> {
        let mut shares = Vec::new();
        for (index, source) in sources.iter().enumerate() {
            let own_places = || places.iter().enumerate().filter(move |(_, place)| place.source == index);
            let positions: Vec<u64> = own_places().map(|(_, place)| place.position).collect();
            if !positions.is_empty() {
                let absolute = positions.iter().map(|position| source.absolute(*position)).collect();
                let reader = Reader::new(source.snapshot.clone(), absolute, OnCorrupt::Raise)?;
                shares.push(Share {
                    source: index,
                    positions,
                    reader,
                    places: own_places().map(|(at, _)| at as u32).collect(),
                    lent: false,
                });
            }
        }
        Ok(Reads { shares, count: places.len() })
    }

    /// Use blocks that the loader keeps.
    pub fn lend_all(&mut self, held: &HeldBlocks) {
        self.shares.iter_mut().for_each(|share| share.reader.lend(held));
    }

    /// Use blocks that a window holds, which `lend` returns for the positions of a source.
    pub fn lend(&mut self, lend: impl Fn(usize, &[u64]) -> Result<Vec<Arc<HeldBlocks>>>) -> Result<()> {
        for share in &mut self.shares {
            let lent = lend(share.source, &share.positions)?;
            share.lent = !lent.is_empty();
            lent.iter().for_each(|held| share.reader.lend(held));
        }
        Ok(())
    }

    /// Return what is known of a column's values before they are read. Blocks that a window holds count as small. Cost: reads the tails of
    /// all columns that are not open.
    pub fn extents(&mut self, sources: &[Source], column: usize) -> Result<Vec<SampleExtent>> {
        let mut all = vec![SampleExtent::Null; self.count];
        for share in &mut self.shares {
            let source = &sources[share.source];
            share.reader.open(&source.specs())?;
            for (place, extent) in share.places.iter().zip(share.reader.extents(&source.columns[column])?) {
                let is_held = share.lent && matches!(extent, SampleExtent::Large { is_tiled: false, .. });
                all[*place as usize] = if is_held { SampleExtent::Small } else { extent };
            }
        }
        Ok(all)
    }

    /// Leave the samples with a flag out of all reads of a column except `slices`.
    pub fn leave_out(&mut self, sources: &[Source], column: usize, flags: &[bool]) {
        for share in &mut self.shares {
            let own_flags = share.places.iter().map(|place| flags[*place as usize]).collect();
            share.reader.leave_out(&sources[share.source].columns[column], own_flags);
        }
    }

    /// Read a slice of each sample of a column that has one. Each buffer has the size of its slice.
    pub fn slices(
        &self,
        sources: &[Source],
        column: usize,
        slices: &[Option<Slice>],
        outs: Vec<&mut [u8]>,
    ) -> Result<()> {
        let mut outs: Vec<Option<&mut [u8]>> = outs.into_iter().map(Some).collect();
        for share in &self.shares {
            let own_outs = share.places.iter().map(|place| outs[*place as usize].take().unwrap_or_default()).collect();
            share.reader.slices(&sources[share.source].columns[column], &share.own_slices(slices), own_outs)?;
        }
        Ok(())
    }

    /// Fetch the blocks that the columns need, unless files are mapped.
    pub fn fetch(&mut self, sources: &[Source]) -> Result<()> {
        for share in &mut self.shares {
            let source = &sources[share.source];
            let purpose = share.purpose(source);
            share.reader.fetch(&source.specs(), purpose)?;
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
        sources: &[Source],
        is_kept: impl Fn(usize, &ColumnSpec) -> bool,
        parts: &[(usize, Vec<Option<Slice>>)],
        foresight: &mut Foresight,
        noted: &mut [(u64, u64)],
    ) -> Result<()> {
        for share in self.shares.iter_mut().filter(|share| !sources[share.source].snapshot.is_mapped()) {
            let source = &sources[share.source];
            if !share.lent {
                let mut fetched = source.specs();
                fetched.retain(|column| !is_kept(share.source, column));
                share.reader.foresee_blocks(&fetched, share.purpose(source), foresight)?;
            }
            share.reader.foresee_others(&source.specs(), foresight)?;
            for (column, slices) in parts {
                share.reader.foresee_slices(&source.columns[*column], &share.own_slices(slices), foresight)?;
            }
            note(foresight, &mut noted[share.source]);
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
    pub fn fixed(&self, sources: &[Source], column: usize, cell: usize, out: &mut [u8]) -> Result<Nulls> {
        if let [share] = &self.shares[..] {
            return share.fixed(&sources[share.source], column, cell, out);
        }
        let mut nulls: Nulls = None;
        for share in &self.shares {
            let mut values = vec![0; share.places.len() * cell];
            let share_nulls = share.fixed(&sources[share.source], column, cell, &mut values)?;
            for (index, place) in share.places.iter().enumerate() {
                out[*place as usize * cell..][..cell].copy_from_slice(&values[index * cell..][..cell]);
                if share_nulls.as_ref().is_some_and(|nulls| nulls[index]) {
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
    pub fn kept(&self, sources: &[Source], column: usize) -> Result<Raw> {
        let mut raw = self.raw(sources, column)?;
        for (share, part) in self.shares.iter().zip(&mut raw.parts) {
            let source = &sources[share.source];
            let spec = &source.columns[column];
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
    fn raw(&self, sources: &[Source], column: usize) -> Result<Raw> {
        let (mut parts, mut index, mut own_bytes) = (Vec::new(), vec![(0, 0); self.count], 0);
        for (part, share) in self.shares.iter().enumerate() {
            let source = &sources[share.source];
            let values = share.ragged(source, column)?;
            if source.files_of(&source.columns[column]).is_some() {
                own_bytes += values.value_bytes() as u64;
            }
            parts.push(values);
            share.places.iter().enumerate().for_each(|(row, place)| index[*place as usize] = (part as u32, row as u32));
        }
        Ok(Raw { parts, index, own_bytes })
    }

    /// Read a column without applying transforms.
    pub fn values(&self, sources: &[Source], column: usize) -> Result<ColumnValues> {
        let spec = &sources[0].columns[column];
        let (dtype, shape) = value_type(spec)?;
        if shape.is_fixed() {
            let cell = shape.fixed_bytes(dtype)? as usize;
            let mut memory = Memory::new(cell * self.count)?;
            let nulls = self.fixed(sources, column, cell, memory.slice())?;
            let shape = std::iter::once(self.count as u64).chain(shape.0.iter().flatten().copied()).collect();
            return Ok(ColumnValues::Array(Array { memory, dtype, shape, nulls }));
        }
        if !spec.kind.is_array() {
            return self.kept(sources, column).map(ColumnValues::Raw);
        }
        let raw = self.raw(sources, column)?;
        let values = (0..raw.len()).map(|sample| raw.get(sample).map(|value| (value, shape.fill(raw.free(sample)))));
        ragged(values, dtype, shape.0.len())
    }
}

/// Note the requests and bytes that were foreseen since the last call.
pub fn note(foresight: &mut Foresight, (requests, bytes): &mut (u64, u64)) {
    *requests += std::mem::take(&mut foresight.requests);
    *bytes += std::mem::take(&mut foresight.bytes);
}

/// Convert a list of labels to the codes of all sources together.
fn joint_codes(codes: &[u8], known: &[i64]) -> Vec<u8> {
    let codes = codes.as_chunks::<8>().0.iter().map(|code| i64::from_le_bytes(*code));
    codes.flat_map(|code| known.get(code as usize).copied().unwrap_or(0).to_le_bytes()).collect()
}

/// Concatenate values of the same dtype and rank into a ragged array.
pub fn ragged<'a>(
    values: impl Iterator<Item = Option<(&'a [u8], Vec<u64>)>> + Clone,
    dtype: Dtype,
    rank: usize,
) -> Result<ColumnValues> {
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
    Ok(ColumnValues::Ragged { values: Array { memory, dtype, shape, nulls }, offsets, shapes, rank })
}
