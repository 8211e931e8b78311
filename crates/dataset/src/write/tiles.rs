//! Write samples that are not in memory: tensors tile by tile, which are pulled from their source in slabs, and bytes piece by piece.

use std::ops::Range;

use penstock_error::{Error, Result};
use penstock_format::datafile::{Bounds, Codec, HEAD_BYTES, Layout, MAX_BLOCK_BYTES, MAX_BLOCKS, OWN_FILE_BYTES};
use penstock_tensor::slice::{Grid, elements, whole};
use penstock_tensor::{Column, Pulled, counted, push_validity};

use super::column::{Stored, free_of};
use super::encode;
use super::file::GrowingBlock;
use super::fragment::{FragmentWriter, Rest};
use super::style::Style;
use crate::config::Config;

// This file and `fragment.rs` depend on each other: both implement `FragmentWriter` and share its columns and files.
impl FragmentWriter {
    /// Add samples that are not in memory. The samples are written immediately, so that at most one slab of one sample is in
    /// memory at a time.
    pub fn push_pulled(&mut self, index: usize, pulled: Pulled) -> Result<()> {
        self.flush_column(index, Rest::Keep)?;
        let column = &mut self.columns[index];
        let valid = |row: usize| pulled.validity.as_ref().is_none_or(|validity| validity[row]);
        if column.chunk.is_none() {
            let bytes = |row: &usize| elements(&whole(&pulled.shapes[*row])).unwrap_or(0);
            let Some(largest) = (0..pulled.shapes.len()).filter(|row| valid(*row)).max_by_key(bytes) else {
                // A fragment that does not list the column would have its fill value instead.
                if column.spec.fill.is_some() {
                    let nulls = column.nulls(pulled.shapes.len())?;
                    return column.push(Some(Stored { column: nulls, words: None }), pulled.shapes.len());
                }
                column.leading_nulls += pulled.shapes.len();
                return Ok(());
            };
            let bytes = bytes(&largest).saturating_mul(column.dtype.size() as u64);
            let shapes: Vec<&[u64]> =
                (0..pulled.shapes.len()).filter(|row| valid(*row)).map(|row| &pulled.shapes[row][..]).collect();
            let tile = column.tile_for(&shapes, &pulled.shapes[largest]);
            self.open_chunk(index, Style::tiled(self.columns[index].codec), tile, bytes)?;
        }
        let column = &mut self.columns[index];
        let nulls = std::mem::take(&mut column.leading_nulls);
        if nulls > 0 {
            column.validity = Some(vec![false; nulls]);
            let nulls = column.nulls(nulls)?;
            self.write_tiled(index, &nulls)?;
        }
        let column = &mut self.columns[index];
        let before = column.samples;
        (0..pulled.shapes.len()).for_each(|row| push_validity(&mut column.validity, before + row + 1, valid(row)));
        self.write_tiled(index, &Column::Pulled(pulled))
    }

    /// Add values of bytes, which are read from their sources now. Each becomes one block. It is plain whatever the column's codec is, because a
    /// codec needs the whole block, also to read a part of it.
    pub fn push_streams(&mut self, index: usize, pulled: &Pulled) -> Result<()> {
        self.flush_column(index, Rest::Keep)?;
        if self.columns[index].chunk.is_none() {
            let style = Style { layout: Layout::Single, codec: Codec::None, rows_per_block: 1, align: 8 };
            self.open_chunk(index, style, Vec::new(), OWN_FILE_BYTES)?;
        }
        let column = &mut self.columns[index];
        let nulls = std::mem::take(&mut column.leading_nulls);
        if nulls > 0 {
            let nulls = column.nulls(nulls)?;
            column.add(nulls);
            self.flush_column(index, Rest::Keep)?;
        }
        let column = &mut self.columns[index];
        let Some((file, _, chunk)) = &mut column.chunk else {
            return Err(Error::new("internal", "bytes without a chunk"));
        };
        let target = &mut self.files[*file];
        for row in 0..pulled.shapes.len() {
            let valid = pulled.validity.as_ref().is_none_or(|validity| validity[row]);
            let mut block = GrowingBlock::default();
            let mut head = Vec::new();
            if valid {
                pulled.source.pull(row, &[], &mut |piece| {
                    if block.bytes + piece.len() as u64 > MAX_BLOCK_BYTES {
                        return Err(too_long().at_row(row as u64).column(&column.spec.name));
                    }
                    head.extend_from_slice(&piece[..piece.len().min(HEAD_BYTES - head.len())]);
                    target.grow(chunk, &mut block, piece)
                })?;
                // Text that a compaction or a merge copies is not in memory either.
                column.bounds.iter_mut().for_each(|bounds| bounds.include(&Bounds::of_words([&head[..]].into_iter())));
            }
            target.end(chunk, block)?;
            chunk.first_row.push(column.samples as u64);
            column.samples += 1;
            push_validity(&mut column.validity, column.samples, valid);
        }
        Ok(())
    }

    /// Write samples tile by tile. Samples that are not in memory are pulled in slabs of whole tiles. A slab uses at most an eighth of the
    /// budget, unless a single tile is larger.
    pub fn write_tiled(&mut self, index: usize, samples: &Column) -> Result<()> {
        let column = &mut self.columns[index];
        let Some((file, style, chunk)) = &mut column.chunk else {
            return Err(Error::new("internal", "tiles without a chunk"));
        };
        let (target, size) = (&mut self.files[*file], column.dtype.size());
        for row in 0..samples.len() {
            let valid = column.validity.as_ref().is_none_or(|validity| validity[column.samples]);
            let shape = match samples {
                Column::Pulled(pulled) => pulled.shapes[row].clone(),
                Column::Ragged(ragged) => column.shape.fill(free_of(ragged, &column.shape, row)),
                Column::Fixed { .. } => {
                    return Err(Error::new("internal", "a tiled chunk cannot hold samples in fixed form"));
                }
            };
            let sample_bytes =
                elements(&whole(&shape)).and_then(|elements| elements.checked_mul(size as u64)).unwrap_or(u64::MAX);
            let grid = Grid::new(&shape, &chunk.tile); // If a null has no shape, the grid has no axes and is not used.
            let before = chunk.offset.len();
            let tiles = if valid { grid.tiles() } else { Some(0) };
            if tiles.is_none_or(|tiles| before as u64 + tiles > MAX_BLOCKS) {
                let text = format!(
                    "of shape {shape:?} has {} tiles of {:?}, but a data file holds at most {MAX_BLOCKS}",
                    counted(tiles),
                    chunk.tile
                );
                let hint = "append fewer samples at once, or create the dataset with larger tiles";
                return Err(Error::new("invalid-value", text).hint(hint).at_row(row as u64).column(&column.spec.name));
            }
            let mut write = |slab: &[Range<u64>], bytes: &[u8]| -> Result<()> {
                for block in encode::encode_tiles(&grid, slab, bytes, style.codec, size)? {
                    let raw_bytes = if chunk.offset.len() == before { sample_bytes } else { block.raw_bytes };
                    target.add(chunk, &block, style.align_of(raw_bytes))?;
                }
                Ok(())
            };
            match samples {
                _ if !valid || sample_bytes == 0 => {}
                Column::Pulled(pulled) => {
                    for slab in grid.slabs(size as u64, Config::memory_bytes() / 8) {
                        pulled.source.pull(row, &slab, &mut |bytes| write(&slab, bytes))?;
                    }
                }
                Column::Ragged(ragged) => write(&whole(&shape), ragged.value(row))?,
                Column::Fixed { .. } => {}
            }
            let wanted = if valid { grid.tiles() } else { Some(0) };
            if Some((chunk.offset.len() - before) as u64) != wanted {
                return Err(Error::new(
                    "internal",
                    format!("sample {row} has {} tiles, expected {}", chunk.offset.len() - before, counted(wanted)),
                ));
            }
            chunk.first_tile.push(chunk.offset.len() as u64);
            let free = (0..column.shape.0.len()).filter(|axis| column.shape.0[*axis].is_none());
            chunk.free.iter_mut().zip(free).for_each(|(sizes, axis)| sizes.push(if valid { shape[axis] } else { 0 }));
            column.samples += 1;
        }
        Ok(())
    }
}

fn too_long() -> Error {
    Error::new("invalid-value", format!("has more than {MAX_BLOCK_BYTES} bytes")).hint("store it as several values")
}
