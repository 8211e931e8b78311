//! Read samples of variable shape as slices of verified memory, so that the caller makes the only copy.

use bytes::Bytes;
use penstock_codec::widen;
use penstock_error::Result;
use penstock_format::classes::{ClassPlaces, Classes};
use penstock_format::cursor::malformed;
use penstock_format::datafile::{Codec, Layout, Packed};
use penstock_format::schema::ColumnSpec;
use penstock_storage::{Frozen, Slot};
use penstock_tensor::slice::elements;

use super::codes::no_class;
use super::reader::{ColumnRows, Reader};
use super::tile_plan::Tiles;
use super::tiles::Targets;
use crate::prefetch::prefetch;
use crate::store::datafile::Decoded;

/// Ragged values in the order requested.
pub struct RaggedValues {
    keep: Vec<Bytes>,
    extents: Vec<ValueRange>,
    /// Sizes of the free dimensions, `free_count` per sample.
    pub free: Vec<u64>,
    pub free_count: usize,
}

#[derive(Clone, Copy)]
struct ValueRange {
    keep: u32,
    begin: usize,
    bytes: usize,
}

/// Number of rows whose blocks are prefetched together, before any of those blocks is looked up. Random rows are rarely in the
/// processor's caches.
const ROWS_AT_ONCE: usize = 64;

/// Approximate size of the end offsets in a packed block that contains small values.
const HEAD_BYTES: usize = 256;

/// The value of `ValueRange::keep` for a null.
const NULL: u32 = u32::MAX;

impl RaggedValues {
    /// Wrap buffers as values that are not null. `free` has `free_count` sizes per value.
    pub fn of(values: Vec<Bytes>, free: Vec<u64>, free_count: usize) -> RaggedValues {
        let extents = values
            .iter()
            .enumerate()
            .map(|(index, value)| ValueRange { keep: index as u32, begin: 0, bytes: value.len() })
            .collect();
        RaggedValues { keep: values, extents, free, free_count }
    }

    /// Copy the values to `slot`, which has room for exactly these values. The current buffers may also contain many other bytes.
    pub fn move_to(&mut self, mut slot: Slot) {
        for extent in self.extents.iter_mut().filter(|extent| extent.keep != NULL) {
            let begin = slot.filled();
            slot.push(&self.keep[extent.keep as usize][extent.begin..extent.begin + extent.bytes]);
            *extent = ValueRange { keep: 0, begin, bytes: extent.bytes };
        }
        self.keep = vec![slot.freeze()];
    }

    /// Replace each value by the result of a function, with as many bytes.
    pub fn map(&mut self, convert: impl Fn(&[u8]) -> Vec<u8>) {
        for index in 0..self.len() {
            let value = self.get(index).map(|value| convert(value).into());
            self.replace(index, value);
        }
    }

    fn replace(&mut self, index: usize, value: Option<Bytes>) {
        let keep = if value.is_some() { self.keep.len() as u32 } else { NULL };
        self.extents[index] = ValueRange { keep, begin: 0, bytes: value.as_ref().map_or(0, Bytes::len) };
        self.keep.extend(value);
    }

    pub fn len(&self) -> usize {
        self.extents.len()
    }

    pub fn is_empty(&self) -> bool {
        self.extents.is_empty()
    }

    /// Return value `index`, or None if it is null.
    #[inline]
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        let extent = self.extents[index];
        (extent.keep != NULL).then(|| &self.keep[extent.keep as usize][extent.begin..extent.begin + extent.bytes])
    }

    pub fn free(&self, index: usize) -> &[u64] {
        &self.free[index * self.free_count..(index + 1) * self.free_count]
    }

    /// Return the total size in bytes of all buffers that hold values.
    pub fn held_bytes(&self) -> usize {
        self.keep.iter().map(Bytes::len).sum()
    }

    /// Return the total size of all values in bytes.
    pub fn value_bytes(&self) -> usize {
        self.extents.iter().map(|extent| extent.bytes).sum()
    }

    pub fn has_nulls(&self) -> bool {
        self.extents.iter().any(|extent| extent.keep == NULL)
    }

    /// Return all values in one contiguous buffer. Returns None if the store did not write the values in order.
    pub fn joined(&self, reader: &Reader) -> Option<Frozen> {
        Frozen::joined(reader.fetched.memory.as_ref()?, (0..self.len()).filter_map(|index| self.get(index)))
    }
}

/// Check that the codes of a list of labels are those of classes.
pub fn check_label_codes(codes: &[u8], classes: &Classes, places: &ClassPlaces<'_>) -> Result<()> {
    match codes.as_chunks::<8>().0.iter().map(|code| u64::from_le_bytes(*code)).find(|code| places.of(*code).is_none())
    {
        None => Ok(()),
        Some(code) => Err(malformed(no_class(code, classes))),
    }
}

/// A packed or single block that is being read.
struct OpenBlock {
    block: usize,
    keep: u32,
    begin: usize,
    bytes: usize,
    owned: Option<Bytes>,
    head: Option<Packed>,
}

impl Reader {
    /// Locate ragged samples in memory. Only compressed blocks and tiles are copied, and lists of labels to which classes were added.
    pub fn ragged(&self, column: &ColumnSpec) -> Result<RaggedValues> {
        let mut values = self.stored_ragged(column)?;
        if let Some(classes) = column.kind.classes().filter(|classes| classes.has_codes()) {
            let places = classes.places();
            let place = |code: &[u8; 8]| (places.of(u64::from_le_bytes(*code)).unwrap_or(0) as u64).to_le_bytes();
            values.map(|codes| codes.as_chunks::<8>().0.iter().flat_map(place).collect());
        }
        Ok(values)
    }

    /// Locate ragged samples as `ragged` does. Labels have the codes that files store.
    pub(crate) fn stored_ragged(&self, column: &ColumnSpec) -> Result<RaggedValues> {
        let (dtype, shape) = column.kind.stored()?;
        let free_count = if column.kind.is_array() { shape.free_count() } else { 0 };
        let mut values = RaggedValues {
            keep: Vec::new(),
            extents: vec![ValueRange { keep: NULL, begin: 0, bytes: 0 }; self.plan.len()],
            free: vec![0; self.plan.len() * free_count],
            free_count,
        };
        let (mut tiles, mut buffers, mut narrow) = (Tiles::default(), Vec::<Vec<u8>>::new(), Vec::new());
        self.each_group(column, self.left_out_of(column), true, |source, _| {
            let Some(source) = source else { return Ok(()) };
            if source.entry().dtype != dtype {
                narrow.extend(source.rows.iter().map(|(_, place)| (*place as usize, source.entry().dtype)));
            }
            if source.entry().layout == Layout::Tiled {
                buffers.resize_with(self.plan.len(), Vec::new);
                for (row, place) in source.rows.iter().filter(|(row, _)| source.entry().is_valid(*row)) {
                    let slice = tiles.add(source, (*row, *place), None);
                    buffers[*place as usize] =
                        vec![0; elements(slice).unwrap_or(0) as usize * source.entry().dtype.size()];
                    let sizes = source.entry().free.iter().map(|sizes| sizes.get(*row as usize));
                    values.free[*place as usize * free_count..]
                        .iter_mut()
                        .zip(sizes)
                        .for_each(|(free, size)| *free = size);
                }
                return Ok(());
            }
            let map = values.keep.len() as u32;
            values.keep.push(source.file.map.clone());
            let (entry, map_bytes, mut open) = (source.entry(), &source.file.map[..], None);
            let is_plain = source.file.in_memory() && entry.codec == Codec::None;
            for rows in source.rows.chunks(ROWS_AT_ONCE) {
                if is_plain {
                    let heads = rows.iter().map(|(row, _)| entry.offset.get(entry.locate(*row).0) as usize);
                    heads.for_each(|head| prefetch(map_bytes, head, HEAD_BYTES));
                }
                for (row, place) in rows.iter().filter(|(row, _)| entry.is_valid(*row)) {
                    match self.ragged_row(source, (*row, *place), map, &mut open, &mut values) {
                        Err(error) if self.passes(&error) => {}
                        other => other.map_err(|error| (error, *place))?,
                    }
                    if is_plain {
                        let extent = values.extents[*place as usize];
                        prefetch(map_bytes, extent.begin, extent.bytes);
                    }
                }
            }
            Ok(())
        })?;
        if !tiles.is_empty() {
            let (mut nulls, places) = (None, tiles.places());
            let outs = buffers.iter_mut().map(Vec::as_mut_slice).collect();
            self.read_tiles(column, tiles, &mut Targets::Each(outs), &mut nulls)?;
            for place in places.into_iter().filter(|place| nulls.as_ref().is_none_or(|nulls| !nulls[*place as usize])) {
                let value = std::mem::take(&mut buffers[place as usize]);
                values.replace(place as usize, Some(value.into()));
            }
        }
        for (place, earlier) in narrow {
            if let Some(value) = values.get(place) {
                let mut wide = vec![0; value.len() / earlier.size() * dtype.size()];
                widen(value, earlier, dtype, &mut wide)?;
                values.replace(place, Some(wide.into()));
            }
        }
        for (place, value) in self.own_values(column) {
            values.replace(place, value.bytes.map(Bytes::copy_from_slice));
            let sizes = values.free[place * free_count..].iter_mut().zip(value.free);
            sizes.for_each(|(free, size)| *free = *size);
        }
        if let Some(classes) = column.kind.listed_classes() {
            self.check_labels(column, classes, &mut values)?;
        }
        Ok(values)
    }

    /// Refuse codes that refer to no name, or make their samples null.
    fn check_labels(&self, column: &ColumnSpec, classes: &Classes, values: &mut RaggedValues) -> Result<()> {
        let places = classes.places();
        for place in 0..values.len() {
            match check_label_codes(values.get(place).unwrap_or_default(), classes, &places) {
                Err(error) if self.passes(&error) => {
                    values.replace(place, None);
                    values.free[place] = 0;
                }
                other => other.map_err(|error| self.locate(error, column, place as u32))?,
            }
        }
        Ok(())
    }

    /// Locate one sample. `open` contains the previous row's block.
    #[inline]
    fn ragged_row(
        &self,
        source: &ColumnRows<'_>,
        (row, place): (u64, u32),
        map: u32,
        open: &mut Option<OpenBlock>,
        values: &mut RaggedValues,
    ) -> Result<()> {
        let (entry, file) = (source.entry(), &source.file);
        let (block, inner) = entry.locate(row);
        if !matches!(open, Some(open) if open.block == block) {
            *open = Some(self.open_block(source, block, map, values)?);
        }
        let Some(opened) = open else { return Ok(()) };
        let body = match &opened.owned {
            Some(bytes) => &bytes[..],
            None => &file.map[opened.begin..opened.begin + opened.bytes],
        };
        let (range, inner) = match &opened.head {
            Some(head) => (head.range(body, inner as usize)?, inner as usize),
            None => (0..body.len(), 0),
        };
        let extent = ValueRange { keep: opened.keep, begin: opened.begin + range.start, bytes: range.len() };
        if values.free_count > 0 {
            let at = place as usize * values.free_count;
            match &opened.head {
                Some(head) => {
                    let cell = entry.shape.fixed_bytes(entry.dtype)?;
                    let mut free = Vec::with_capacity(values.free_count);
                    head.free(body, inner, range.len(), cell, &mut free, values.free_count)?;
                    values.free[at..at + values.free_count].copy_from_slice(&free);
                }
                None => entry
                    .free
                    .iter()
                    .enumerate()
                    .for_each(|(dimension, sizes)| values.free[at + dimension] = sizes.get(block)),
            }
        }
        values.extents[place as usize] = extent;
        Ok(())
    }

    fn open_block(
        &self,
        source: &ColumnRows<'_>,
        block: usize,
        map: u32,
        values: &mut RaggedValues,
    ) -> Result<OpenBlock> {
        let (entry, file) = (source.entry(), &source.file);
        let decoded = self.block(file, source.chunk, block)?;
        let head = match entry.layout {
            Layout::Packed => Some(file.packed(source.chunk, block, decoded.bytes(file))?),
            _ => None,
        };
        Ok(match decoded {
            Decoded::Mapped(range) => {
                OpenBlock { block, keep: map, begin: range.start, bytes: range.len(), owned: None, head }
            }
            Decoded::Owned(bytes) => {
                values.keep.push(bytes.clone());
                OpenBlock {
                    block,
                    keep: values.keep.len() as u32 - 1,
                    begin: 0,
                    bytes: bytes.len(),
                    owned: Some(bytes),
                    head,
                }
            }
        })
    }
}
