//! Write one fragment: collect samples by column, cut and encode them when enough are waiting, and close at a byte target.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use penstock_error::{Error, Result};
use penstock_format::Id;
use penstock_format::datafile::{
    ChunkBuilder, Codec, FILE_BYTES, Layout, MAX_BLOCKS, OWN_FILE_BYTES, SINGLE_BYTES, TAIL_BYTES, Tail, write_header, write_tail,
};
use penstock_format::ids::{PROVISIONAL, Run, data_name};
use penstock_format::manifest::{FileRef, Fragment};
use penstock_format::record::FEATURE_TILED;
use penstock_format::schema::{CodecName, ColumnKind, ColumnSpec};
use penstock_storage::ObjectWriter;
use penstock_tensor::window::{Grid, SAMPLE_TILES, default_tile, elements, whole};
use penstock_tensor::{Column, Dtype, Pulled, Ragged, Shape, push_validity};

use crate::config::Config;
use crate::context::Context;
use crate::encode::{self, Encoded, Style};

/// Samples of one column are written when this many bytes are waiting.
const FLUSH_BYTES: usize = 8 << 20;

/// Files are written in multiples of this, the size of a huge page: maps of a file cached in large folios can use huge pages.
const WRITE_BYTES: usize = 2 << 20;

/// How far the last small block of a piece may extend beyond it.
const BLOCK_SLACK_BYTES: usize = 64 << 10;

/// Fewer small samples are not worth a new fragment.
const SAMPLES_WORTH_A_FRAGMENT: usize = 1000;

/// Values of one column in their stored form, and for a category the words of its codes.
pub struct Stored {
    pub column: Column,
    /// Category only: codes in `column` are places in this list, which only grows.
    pub words: Option<Arc<Vec<Arc<str>>>>,
}

struct ColumnWriter {
    spec: ColumnSpec,
    dtype: Dtype,
    shape: Shape,
    /// Sides of the tiles, if the schema sets them.
    tile: Option<Vec<u64>>,
    codec: Codec,
    /// Null samples before the first value. They are written only if a value follows.
    leading_nulls: usize,
    waiting: Option<Column>,
    chunk: Option<(usize, Style, ChunkBuilder)>,
    /// For each word of the transaction, its place in `words`, or `u32::MAX` if `words` lacks it.
    local: Vec<u32>,
    words: Vec<Arc<str>>,
    words_bytes: usize,
    samples: usize,
    validity: Option<Vec<bool>>,
}

struct OpenFile {
    id: Id,
    writer: Box<dyn ObjectWriter>,
    buffer: Vec<u8>,
    offset: u64,
}

impl OpenFile {
    fn create(context: &Context) -> Result<OpenFile> {
        // Do not write into another dataset's folder. If no dataset is found, the writer reports the error.
        if context.storage.moves()
            && let Err(error) = context.check_dataset()
            && error.code() == "dataset-replaced"
        {
            return Err(error);
        }
        let id = context.new_id()?;
        let buffer = write_header(id);
        Ok(OpenFile { id, writer: context.storage.writer(&data_name(id))?, offset: buffer.len() as u64, buffer })
    }

    /// Append a block at an aligned offset. Returns the offset.
    fn place(&mut self, bytes: &[u8], align: u64) -> Result<u64> {
        let offset = self.offset.next_multiple_of(align);
        self.buffer.resize(self.buffer.len() + (offset - self.offset) as usize, 0);
        self.buffer.extend_from_slice(bytes);
        self.offset = offset + bytes.len() as u64;
        if self.buffer.len() >= WRITE_BYTES {
            // Write whole pieces only, so that each write begins where the page cache can use one large folio.
            let whole = self.buffer.len() / WRITE_BYTES * WRITE_BYTES;
            let mut rest = Vec::with_capacity(WRITE_BYTES + BLOCK_SLACK_BYTES);
            rest.extend_from_slice(&self.buffer[whole..]);
            self.buffer.truncate(whole);
            self.writer.write(std::mem::replace(&mut self.buffer, rest))?;
        }
        Ok(offset)
    }

    /// Append a block and list it in its chunk.
    fn add(&mut self, chunk: &mut ChunkBuilder, block: &Encoded<'_>, align: u64) -> Result<()> {
        chunk.offset.push(self.place(&block.stored, align)?);
        chunk.stored_bytes.push(block.stored.len() as u64);
        chunk.raw_bytes.push(block.raw_bytes);
        chunk.crcs.extend(block.crcs.iter().map(|crc| u64::from(*crc)));
        Ok(())
    }

    /// Write tail and footer, and make the content durable.
    fn finish(mut self, samples: u64, chunks: &[ChunkBuilder]) -> Result<FileRef> {
        let (tail, tail_bytes, tail_crc) = write_tail(samples, chunks, self.offset);
        // A tail that readers would refuse must not be committed, whatever the cause.
        Tail::parse(Bytes::copy_from_slice(&tail[..tail_bytes as usize]), self.offset)
            .map_err(|error| Error::new("internal", format!("a written data file cannot be read back: {}", error.message())))?;
        self.buffer.extend_from_slice(&tail);
        self.flush()?;
        self.writer.finish()?;
        let columns = chunks.iter().map(|chunk| chunk.column).collect();
        Ok(FileRef { id: self.id, file_bytes: self.offset + tail.len() as u64, tail_bytes, tail_crc, columns })
    }

    fn flush(&mut self) -> Result<()> {
        self.writer.write(std::mem::take(&mut self.buffer))
    }
}

/// The fragment being written.
pub struct FragmentWriter {
    context: Arc<Context>,
    columns: Vec<ColumnWriter>,
    files: Vec<OpenFile>,
    main: Option<usize>,
    samples: u64,
}

impl FragmentWriter {
    pub fn new(context: Arc<Context>, specs: &[ColumnSpec]) -> Result<FragmentWriter> {
        let columns = specs.iter().map(ColumnWriter::new).collect::<Result<_>>()?;
        Ok(FragmentWriter { context, columns, files: Vec::new(), main: None, samples: 0 })
    }

    pub fn is_empty(&self) -> bool {
        self.samples == 0
    }

    /// Add `samples` samples: one entry per column in schema order, None for a column of nulls.
    pub fn push(&mut self, columns: Vec<Option<Stored>>, samples: usize) -> Result<()> {
        for (index, column) in columns.into_iter().enumerate() {
            match column {
                Some(Stored { column: Column::Pulled(pulled), .. }) => self.push_pulled(index, pulled)?,
                column => self.columns[index].push(column, samples)?,
            }
        }
        self.samples += samples as u64;
        let waiting: usize = self.columns.iter().map(ColumnWriter::waiting_bytes).sum();
        let all = waiting as u64 > Config::memory_bytes() / 4;
        for index in 0..self.columns.len() {
            if all || self.columns[index].waiting_bytes() >= FLUSH_BYTES {
                self.flush_column(index, false)?;
            }
        }
        Ok(())
    }

    /// Add samples that are not in memory. They are written immediately, so that memory holds at most one slab of one sample.
    fn push_pulled(&mut self, index: usize, pulled: Pulled) -> Result<()> {
        self.flush_column(index, false)?;
        let column = &mut self.columns[index];
        let valid = |row: usize| pulled.validity.as_ref().is_none_or(|validity| validity[row]);
        if column.chunk.is_none() {
            let bytes = |row: &usize| elements(&whole(&pulled.shapes[*row])).unwrap_or(0);
            let Some(largest) = (0..pulled.shapes.len()).filter(|row| valid(*row)).max_by_key(bytes) else {
                column.leading_nulls += pulled.shapes.len();
                return Ok(());
            };
            let bytes = bytes(&largest).saturating_mul(column.dtype.size() as u64);
            let shapes: Vec<&[u64]> = (0..pulled.shapes.len()).filter(|row| valid(*row)).map(|row| &pulled.shapes[row][..]).collect();
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

    /// Return whether these samples should begin a new fragment. One reason is a change of size: small values after large ones would
    /// use a block each, and large values do not fit the layout of small ones. The other reason is a column that is left out but was
    /// given before, or vice versa: nulls would fill it with many zero bytes, while a new fragment can leave the column out.
    pub fn wants_new_fragment(&self, columns: &[Option<Stored>], samples: usize) -> bool {
        let both = || self.columns.iter().zip(columns);
        if both()
            .any(|(writer, column)| column.as_ref().is_some_and(|stored| writer.shrinks(&stored.column) || writer.outgrown(&stored.column)))
        {
            return true;
        }
        let left_out = both().filter(|(writer, column)| column.is_none() && writer.begun());
        let after: u64 = left_out.map(|(writer, _)| writer.fixed_bytes().saturating_mul(samples as u64)).sum();
        let first = both().filter(|(writer, column)| column.is_some() && !writer.begun());
        let before: u64 = first.map(|(writer, _)| writer.fixed_bytes().saturating_mul(writer.leading_nulls as u64)).sum();
        after.max(before) > FLUSH_BYTES as u64
    }

    /// Return whether a byte target is reached.
    pub fn is_full(&self) -> bool {
        let tail_of =
            |file: usize| self.columns.iter().filter(|column| column.file() == Some(file)).map(ColumnWriter::tail_bytes).sum::<usize>();
        (0..self.files.len()).any(|file| self.files[file].offset >= FILE_BYTES || tail_of(file) >= TAIL_BYTES)
            || self.columns.iter().any(|column| column.tail_bytes() >= TAIL_BYTES)
    }

    fn flush_column(&mut self, index: usize, last: bool) -> Result<()> {
        let column = &mut self.columns[index];
        let Some(waiting) = column.waiting.take() else { return Ok(()) };
        if column.chunk.is_none() {
            let mean = waiting.value_bytes() as u64 / waiting.len().max(1) as u64;
            let style = match column.tiled_by_shape() {
                true => Style::tiled(column.codec),
                false => Style::choose(column.dtype, &column.shape, column.codec, mean)?,
            };
            let tile = if style.layout == Layout::Tiled { column.tile_of_waiting(&waiting) } else { Vec::new() };
            self.open_chunk(index, style, tile, mean)?;
        }
        let column = &mut self.columns[index];
        if matches!(&column.chunk, Some((_, style, _)) if style.layout == Layout::Tiled) {
            return self.write_tiled(index, &waiting);
        }
        let Some((file, style, mut chunk)) = column.chunk.take() else { return Ok(()) };
        // A block with a fixed number of rows may be shorter only at the end of the fragment.
        let rows = match style.rows_per_block {
            0 | 1 => waiting.len(),
            _ if last => waiting.len(),
            rows => waiting.len() / rows as usize * rows as usize,
        };
        let (now, later) = split(waiting, rows);
        let target = &mut self.files[file];
        for block in encode::encode(&now, &style, self.columns[index].dtype, &self.columns[index].shape)? {
            let written = &mut self.columns[index].samples;
            chunk.first_row.push(*written as u64);
            *written += block.rows as usize;
            target.add(&mut chunk, &block, style.align_of(block.raw_bytes))?;
        }
        if let (Layout::Single, Column::Ragged(ragged), true) = (style.layout, &now, chunk.dtype != Dtype::Bytes) {
            let count = chunk.free.len();
            for (dimension, sizes) in chunk.free.iter_mut().enumerate() {
                sizes.extend(ragged.free.iter().skip(dimension).step_by(count));
            }
        }
        let column = &mut self.columns[index];
        column.waiting = (!later.is_empty()).then_some(later);
        column.chunk = Some((file, style, chunk));
        Ok(())
    }

    /// Begin the chunk of a column whose samples have about `mean_bytes` bytes. `tile` is empty unless they are tiled.
    fn open_chunk(&mut self, index: usize, style: Style, tile: Vec<u64>, mean_bytes: u64) -> Result<()> {
        let file = self.file_for(mean_bytes)?;
        let column = &mut self.columns[index];
        let mut chunk = column.chunk_builder(&style);
        if style.layout == Layout::Tiled {
            chunk.tile = tile;
            chunk.first_tile.push(0);
        }
        column.chunk = Some((file, style, chunk));
        Ok(())
    }

    /// Write samples tile by tile. Samples that are not in memory are pulled in slabs of whole tiles, at most an eighth of the budget.
    fn write_tiled(&mut self, index: usize, samples: &Column) -> Result<()> {
        let column = &mut self.columns[index];
        let Some((file, style, chunk)) = &mut column.chunk else { return Err(Error::new("internal", "tiles without a chunk")) };
        let (target, size) = (&mut self.files[*file], column.dtype.size());
        for row in 0..samples.len() {
            let valid = column.validity.as_ref().is_none_or(|validity| validity[column.samples]);
            let shape = match samples {
                Column::Pulled(pulled) => pulled.shapes[row].clone(),
                Column::Ragged(ragged) => column.shape.fill(free_of(ragged, &column.shape, row)),
                Column::Fixed { .. } => return Err(Error::new("internal", "fixed samples in a tiled chunk")),
            };
            let sample_bytes = elements(&whole(&shape)).and_then(|elements| elements.checked_mul(size as u64)).unwrap_or(u64::MAX);
            let grid = Grid::new(&shape, &chunk.tile); // For a null without a shape it has no axes, and is not used.
            let before = chunk.offset.len();
            let tiles = if valid { grid.tiles() } else { Some(0) };
            if tiles.is_none_or(|tiles| before as u64 + tiles > MAX_BLOCKS) {
                let text = format!("of shape {shape:?} has {tiles:?} tiles of {:?}, at most {MAX_BLOCKS} fit in a data file", chunk.tile);
                let hint = "append fewer samples at once, or make the dataset with larger tiles";
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
                return Err(Error::new("internal", format!("sample {row} has {} tiles, expected {wanted:?}", chunk.offset.len() - before)));
            }
            chunk.first_tile.push(chunk.offset.len() as u64);
            let free = (0..column.shape.0.len()).filter(|axis| column.shape.0[*axis].is_none());
            chunk.free.iter_mut().zip(free).for_each(|(sizes, axis)| sizes.push(if valid { shape[axis] } else { 0 }));
            column.samples += 1;
        }
        Ok(())
    }

    /// Return the file for a column of this mean sample size. Creates the file if needed.
    fn file_for(&mut self, mean_bytes: u64) -> Result<usize> {
        if mean_bytes >= OWN_FILE_BYTES {
            self.files.push(OpenFile::create(&self.context)?);
            return Ok(self.files.len() - 1);
        }
        match self.main {
            Some(main) => Ok(main),
            None => {
                self.files.push(OpenFile::create(&self.context)?);
                self.main = Some(self.files.len() - 1);
                Ok(self.files.len() - 1)
            }
        }
    }

    /// Write waiting samples, tails and footers, and make the files durable. `first` is the provisional counter of the first sample.
    /// Returns the fragment, and the feature bits that its readers need.
    pub fn close(mut self, first: u64) -> Result<(Fragment, u64)> {
        for index in 0..self.columns.len() {
            self.flush_column(index, true)?;
        }
        let tiled = self.columns.iter().any(|column| matches!(&column.chunk, Some((_, style, _)) if style.layout == Layout::Tiled));
        let mut files: Vec<FileRef> = Vec::new();
        for (index, file) in std::mem::take(&mut self.files).into_iter().enumerate() {
            let chunks: Vec<ChunkBuilder> = self.columns.iter_mut().filter_map(|column| column.finish(index)).collect();
            match file.finish(self.samples, &chunks) {
                Ok(done) => files.push(done),
                Err(error) => {
                    for done in files {
                        let _ = self.context.storage.delete(&data_name(done.id)); // An orphan is harmless; the collector finds it.
                    }
                    return Err(error);
                }
            }
        }
        let written: u64 = files.iter().map(|file| file.file_bytes).sum();
        self.context.storage.counters().put_bytes.fetch_add(written, std::sync::atomic::Ordering::Relaxed);
        let runs = vec![Run { first: PROVISIONAL | first, count: self.samples }];
        Ok((Fragment { samples: self.samples, live: self.samples, runs, files }, if tiled { FEATURE_TILED } else { 0 }))
    }
}

impl ColumnWriter {
    fn new(spec: &ColumnSpec) -> Result<ColumnWriter> {
        let (dtype, shape) = spec.kind.stored()?;
        let codec = match spec.codec {
            CodecName::None => Codec::None,
            CodecName::Lz4 => Codec::Lz4,
            CodecName::Zstd => Codec::Zstd,
        };
        let tile = match &spec.kind {
            ColumnKind::Tensor { tile, .. } => tile.clone(),
            _ => None,
        };
        Ok(ColumnWriter {
            spec: spec.clone(),
            dtype,
            shape,
            tile,
            codec,
            leading_nulls: 0,
            waiting: None,
            chunk: None,
            local: Vec::new(),
            words: Vec::new(),
            words_bytes: 0,
            samples: 0,
            validity: None,
        })
    }

    /// Return whether these samples should be packed, while earlier ones have separate blocks.
    fn shrinks(&self, column: &Column) -> bool {
        let alone = matches!(&self.chunk, Some((_, style, _)) if matches!(style.layout, Layout::Single | Layout::Tiled));
        alone
            && !self.tiled_by_shape()
            && !matches!(column, Column::Pulled(_))
            && column.len() >= SAMPLES_WORTH_A_FRAGMENT
            && (column.value_bytes() as u64) < column.len() as u64 * SINGLE_BYTES / 2
    }

    /// Return whether these samples are too large for the layout that was chosen for smaller ones.
    fn outgrown(&self, column: &Column) -> bool {
        let Column::Pulled(pulled) = column else { return false };
        match &self.chunk {
            None => self.waiting.is_some() && !self.tiled_by_shape(),
            Some((_, _, chunk)) if chunk.layout == Layout::Tiled => {
                let many = |shape: &Vec<u64>| Grid::new(shape, &chunk.tile).tiles().is_none_or(|tiles| tiles > SAMPLE_TILES);
                self.tile.is_none() && !self.shape.is_fixed() && pulled.shapes.iter().any(many)
            }
            Some(_) => true,
        }
    }

    /// Return whether all samples are tiled because of the schema, whatever their sizes.
    fn tiled_by_shape(&self) -> bool {
        self.tile.is_some()
            || (self.shape.is_fixed() && Style::tiles(self.dtype, &self.shape, self.shape.fixed_bytes(self.dtype).unwrap_or(0)))
    }

    /// Choose the tile for waiting samples.
    fn tile_of_waiting(&self, column: &Column) -> Vec<u64> {
        let shapes: Vec<Vec<u64>> = match column {
            Column::Ragged(ragged) if self.dtype != Dtype::Bytes && !self.shape.is_fixed() => {
                (0..ragged.len()).map(|row| self.shape.fill(free_of(ragged, &self.shape, row))).collect()
            }
            _ => vec![self.shape.fill(&[])],
        };
        let size = |shape: &&Vec<u64>| elements(&whole(shape)).unwrap_or(u64::MAX);
        let largest = shapes.iter().max_by_key(size).cloned().unwrap_or_default();
        self.tile_for(&shapes.iter().map(Vec::as_slice).collect::<Vec<_>>(), &largest)
    }

    /// Choose the tile for samples of these shapes: the schema's tile, else the default tile of the largest sample. If that cuts a
    /// sample into too many tiles, as for a tall sample after a wide one, use the default tile of the longest sides.
    fn tile_for(&self, shapes: &[&[u64]], largest: &[u64]) -> Vec<u64> {
        if let Some(tile) = &self.tile {
            return tile.clone();
        }
        let tile = default_tile(largest, self.dtype.size() as u64);
        let many = |shape: &&[u64]| Grid::new(shape, &tile).tiles().is_none_or(|tiles| tiles > SAMPLE_TILES);
        if tile.contains(&0) || !shapes.iter().any(many) {
            return tile;
        }
        let longest = |axis: usize| shapes.iter().map(|shape| shape[axis]).max().unwrap_or(1);
        default_tile(&(0..largest.len()).map(longest).collect::<Vec<_>>(), self.dtype.size() as u64)
    }

    /// Return whether a sample of this fragment has a value.
    fn begun(&self) -> bool {
        self.waiting.is_some() || self.chunk.is_some()
    }

    /// Return the stored bytes of a null: those of a sample of fixed shape, or 0 if nulls are empty.
    fn fixed_bytes(&self) -> u64 {
        if self.shape.is_fixed() && !self.tiled_by_shape() { self.shape.fixed_bytes(self.dtype).unwrap_or(0) } else { 0 }
    }

    fn push(&mut self, stored: Option<Stored>, samples: usize) -> Result<()> {
        let begun = self.begun();
        let stored = match stored {
            None if !begun => {
                self.leading_nulls += samples;
                return Ok(());
            }
            None => Stored { column: self.nulls(samples)?, words: None },
            Some(stored) => stored,
        };
        if !begun && self.leading_nulls > 0 {
            let count = std::mem::take(&mut self.leading_nulls);
            let nulls = self.nulls(count)?;
            self.add(nulls);
        }
        let mut column = if self.tiled_by_shape() { stretched(stored.column) } else { stored.column };
        if let Some(words) = stored.words {
            self.localise(&mut column, &words);
        }
        self.add(column);
        Ok(())
    }

    /// Map codes of the transaction's words to codes of this fragment's dictionary.
    fn localise(&mut self, column: &mut Column, words: &[Arc<str>]) {
        let Column::Fixed { data, validity, .. } = column else { return };
        self.local.resize(words.len(), u32::MAX);
        for (index, code) in data.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let mut place = 0;
            if validity.as_ref().is_none_or(|validity| validity[index]) {
                let given = u32::from_le_bytes(*code) as usize;
                place = self.local[given];
                if place == u32::MAX {
                    place = self.words.len() as u32;
                    self.local[given] = place;
                    self.words_bytes += words[given].len() + 2;
                    self.words.push(words[given].clone());
                }
            }
            *code = place.to_le_bytes();
        }
    }

    fn nulls(&self, samples: usize) -> Result<Column> {
        let validity = Some(vec![false; samples]);
        Ok(match self.shape.is_fixed() && !self.tiled_by_shape() {
            true => Column::Fixed { data: vec![0; samples * self.shape.fixed_bytes(self.dtype)? as usize], validity, samples },
            false => {
                let free = if self.dtype == Dtype::Bytes { 0 } else { samples * self.shape.free_count() };
                Column::Ragged(Ragged { data: Vec::new(), ends: vec![0; samples], free: vec![0; free], validity })
            }
        })
    }

    /// Append to the waiting samples. Their validity moves to `self.validity`, which covers the whole fragment.
    fn add(&mut self, mut column: Column) {
        let before = self.chunk_samples();
        let validity = match &mut column {
            Column::Fixed { validity, .. } => validity.take(),
            Column::Ragged(ragged) => ragged.validity.take(),
            Column::Pulled(pulled) => pulled.validity.take(),
        };
        let validity = validity.filter(|validity| self.validity.is_some() || validity.contains(&false));
        match (&mut self.validity, validity) {
            (None, None) => {}
            (Some(list), None) => list.resize(before + column.len(), true),
            (list, Some(more)) => list.get_or_insert_with(|| vec![true; before]).extend(more),
        }
        match (&mut self.waiting, column) {
            (Some(Column::Fixed { data, samples, .. }), Column::Fixed { data: more, samples: count, .. }) => {
                data.extend_from_slice(&more);
                *samples += count;
            }
            (Some(Column::Ragged(ragged)), Column::Ragged(more)) => {
                let base = ragged.data.len() as u64;
                ragged.data.extend_from_slice(&more.data);
                ragged.ends.extend(more.ends.iter().map(|end| base + end));
                ragged.free.extend_from_slice(&more.free);
            }
            (waiting, column) => *waiting = Some(column),
        }
    }

    /// Return the number of samples so far, written and waiting.
    fn chunk_samples(&self) -> usize {
        self.samples + self.waiting.as_ref().map_or(0, Column::len)
    }

    fn waiting_bytes(&self) -> usize {
        self.waiting.as_ref().map_or(0, |column| column.value_bytes() + column.len() * 9)
    }

    fn file(&self) -> Option<usize> {
        self.chunk.as_ref().map(|(file, _, _)| *file)
    }

    fn tail_bytes(&self) -> usize {
        let validity = self.validity.as_ref().map_or(0, |validity| validity.len() / 8);
        self.chunk.as_ref().map_or(0, |(_, _, chunk)| chunk.tail_bytes()) + validity + self.words_bytes
    }

    fn chunk_builder(&self, style: &Style) -> ChunkBuilder {
        let free =
            if matches!(style.layout, Layout::Single | Layout::Tiled) && self.dtype != Dtype::Bytes { self.shape.free_count() } else { 0 };
        ChunkBuilder {
            column: self.spec.id,
            dtype: self.dtype,
            layout: style.layout,
            codec: style.codec,
            shape: self.shape.clone(),
            rows_per_block: style.rows_per_block,
            first_row: Vec::new(),
            offset: Vec::new(),
            stored_bytes: Vec::new(),
            raw_bytes: Vec::new(),
            crcs: Vec::new(),
            free: vec![Vec::new(); free],
            tile: Vec::new(),
            first_tile: Vec::new(),
            validity: None,
            dictionary: None,
        }
    }

    /// Take the chunk if it belongs to file `index`.
    fn finish(&mut self, index: usize) -> Option<ChunkBuilder> {
        let (_, _, mut chunk) = self.chunk.take_if(|(file, _, _)| *file == index)?;
        chunk.validity = self.validity.take();
        chunk.dictionary = (!self.words.is_empty()).then(|| std::mem::take(&mut self.words));
        Some(chunk)
    }
}

/// Return the sizes of the free dimensions of one value.
fn free_of<'a>(ragged: &'a Ragged, shape: &Shape, row: usize) -> &'a [u64] {
    let count = shape.free_count();
    &ragged.free[row * count..(row + 1) * count]
}

/// Convert samples of fixed shape to the ragged form, in which nulls are empty.
fn stretched(column: Column) -> Column {
    match column {
        Column::Fixed { data, validity: None, samples } => {
            let cell = (data.len() / samples.max(1)) as u64;
            Column::Ragged(Ragged { data, ends: (1..=samples as u64).map(|end| end * cell).collect(), free: Vec::new(), validity: None })
        }
        Column::Fixed { data, validity: Some(valid), samples } => {
            let (cell, mut ragged) = (data.len() / samples.max(1), Ragged::default());
            (0..samples).for_each(|row| ragged.push(valid[row].then(|| &data[row * cell..(row + 1) * cell]), &[]));
            Column::Ragged(ragged)
        }
        other => other,
    }
}

/// Split a column into its first `rows` samples and the rest. It has no validity: `ColumnWriter::add` has moved that.
fn split(column: Column, rows: usize) -> (Column, Column) {
    match column {
        Column::Fixed { mut data, samples, .. } => {
            let cell = data.len().checked_div(samples).unwrap_or(0);
            let rest = data.split_off(rows * cell);
            (Column::Fixed { data, validity: None, samples: rows }, Column::Fixed { data: rest, validity: None, samples: samples - rows })
        }
        // Ragged columns are always written whole.
        ragged => (ragged, Column::Ragged(Ragged::default())),
    }
}
