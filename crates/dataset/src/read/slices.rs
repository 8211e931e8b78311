//! Read a slice of each sample, if the samples have blocks of their own. `tiles` reads the blocks.

use std::sync::atomic::Ordering::Relaxed;

use penstock_error::{Error, Result};
use penstock_format::datafile::{Codec, Layout};
use penstock_format::record::FEATURE_TILED;
use penstock_format::schema::ColumnSpec;
use penstock_storage::Pattern;
use penstock_tensor::Dtype;
use penstock_tensor::slice::{Slice, elements};

use super::reader::{ColumnRows, Nulls, Reader, check_bools, set_null};
use super::tile_plan::Tiles;
use super::tiles::Targets;

/// What is known of a sample before it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SampleExtent {
    Null,
    /// It shares a block with other samples, or is too small for reads of its parts.
    Small,
    /// It has blocks of its own, so `slices` can read a part of it.
    Large {
        shape: Vec<u64>,
        is_tiled: bool,
        /// Whether its blocks are not compressed.
        is_plain: bool,
        /// Whether its blocks must be fetched, because its data file is not in memory.
        is_fetched: bool,
    },
}

impl Reader {
    /// Return whether any sample may be tiled.
    pub fn has_tiles(&self) -> bool {
        self.snapshot.record().features_read & FEATURE_TILED != 0
    }

    /// Return the shapes of a plan's samples in the order requested, with None for a null. Returns None if any sample cannot be read in
    /// parts or, with `tiled`, is not tiled. Cost: reads the tails of data files that are not open.
    pub fn shapes(&self, column: &ColumnSpec, tiled: bool) -> Result<Option<Vec<Option<Vec<u64>>>>> {
        if self.has_own(column) {
            return Ok(None);
        }
        let shape = |extent: SampleExtent| match extent {
            SampleExtent::Null => Some(None),
            SampleExtent::Large { shape, is_tiled, .. } if is_tiled || !tiled => Some(Some(shape)),
            _ => None,
        };
        Ok(self.extents(column)?.into_iter().map(shape).collect())
    }

    /// Return what is known of a plan's samples in the order requested. Values of a transaction are not considered. Cost: reads the tails of
    /// data files that are not open.
    pub fn extents(&self, column: &ColumnSpec) -> Result<Vec<SampleExtent>> {
        let mut extents = vec![SampleExtent::Null; self.plan.len()];
        self.each_divisible(column, |source, rows| {
            let entry = source.entry();
            let (is_tiled, is_plain) = (entry.layout == Layout::Tiled, entry.codec == Codec::None);
            let is_fetched = !source.file.in_memory();
            for (row, place) in rows.iter().filter(|(row, _)| entry.is_valid(*row)) {
                extents[*place as usize] = match entry.is_divisible(*row) {
                    true => SampleExtent::Large { shape: entry.shape_of(*row), is_tiled, is_plain, is_fetched },
                    false => SampleExtent::Small,
                };
            }
            Ok(())
        })?;
        Ok(extents)
    }

    /// Leave out samples from reads of a column, except from `slices`. `flags` has one flag per place in the result.
    pub fn leave_out(&mut self, column: &ColumnSpec, flags: Vec<bool>) {
        self.left_out.push((column.id, flags));
    }

    /// Run `read` for the rows of every file, without announcing them to the store. Damaged files are left out if the reader returns nulls for them.
    pub(super) fn each_divisible(
        &self,
        column: &ColumnSpec,
        mut read: impl FnMut(&ColumnRows<'_>, &[(u64, u32)]) -> std::result::Result<(), (Error, u32)>,
    ) -> Result<()> {
        self.each_group(column, &[], false, |source, rows| source.map_or(Ok(()), |source| read(source, rows)))
    }

    /// Read a slice of each sample in a plan into a buffer of the same size, except of samples without a slice. Call `extents` or `shapes`
    /// first to confirm that the samples have blocks of their own. Buffers for nulls stay unchanged. Buffers for damaged samples are zeroed,
    /// or the call fails. A slice outside its sample is refused. Cost: reads the checksum units that contain the slices, or whole compressed
    /// blocks, and makes one copy.
    pub fn slices(&self, column: &ColumnSpec, slices: &[Option<Slice>], outs: Vec<&mut [u8]>) -> Result<Nulls> {
        let (mut tiles, mut earlier, mut nulls) = (Tiles::default(), Vec::new(), None);
        let dtype = column.kind.stored()?.0;
        let mut there = vec![false; self.plan.len()];
        self.each_divisible(column, |source, rows| {
            self.announce_scattered(source);
            for (row, place) in rows.iter().filter(|(row, _)| source.entry().is_valid(*row)) {
                there[*place as usize] = true;
                let (Some(slice), shape) = (&slices[*place as usize], source.entry().shape_of(*row)) else { continue };
                let bytes =
                    elements(slice).and_then(|elements| usize::try_from(elements).ok()?.checked_mul(dtype.size()));
                let inside =
                    slice.len() == shape.len() && slice.iter().zip(&shape).all(|(range, size)| range.end <= *size);
                if source.entry().parts_of(*row).is_none() || !inside || bytes != Some(outs[*place as usize].len()) {
                    let text = format!("the slice {slice:?} is not inside a divisible sample of shape {shape:?}");
                    return Err((Error::new("invalid-argument", text), *place));
                }
                if source.entry().dtype != dtype {
                    earlier.push((*place, source.entry().dtype));
                }
                tiles.add(source, (*row, *place), Some(slice));
            }
            Ok(())
        })?;
        (0..)
            .zip(&there)
            .filter(|(_, there)| !**there)
            .for_each(|(place, _)| set_null(&mut nulls, self.plan.len(), place, &mut []));
        let (places, mut targets) = (tiles.places(), Targets::Each(outs));
        self.read_tiles(column, tiles, &mut targets, &mut nulls)?;
        targets.widen(&earlier, dtype)?;
        if dtype == Dtype::Bool {
            self.check_bool_values(column, places, &mut targets, &mut nulls)?;
        }
        Ok(nulls)
    }

    /// Refuse samples with a bool that is neither 0 nor 1, or make them null.
    pub(super) fn check_bool_values(
        &self,
        column: &ColumnSpec,
        places: impl IntoIterator<Item = u32>,
        targets: &mut Targets<'_>,
        nulls: &mut Nulls,
    ) -> Result<()> {
        for place in places {
            let sample = targets.get(place);
            match check_bools(sample) {
                Err(error) if self.passes(&error) => set_null(nulls, self.plan.len(), place, sample),
                other => other.map_err(|error| self.locate(error, column, place))?,
            }
        }
        Ok(())
    }

    /// Announce to the store that a map is read in scattered parts, so that it reads nothing beside them.
    fn announce_scattered(&self, source: &ColumnRows<'_>) {
        if source.file.access.is_mapped() && source.file.expected_in_order.swap(false, Relaxed) {
            self.snapshot.context.reads().will_read(&source.file.map, Pattern::Random);
        }
    }
}
