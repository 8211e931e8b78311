//! Write one fragment: collect samples by column, cut and encode them when enough are waiting, and close the fragment when it
//! reaches a byte target.

use std::sync::Arc;

use penstock_error::Result;
use penstock_format::datafile::{ChunkBuilder, FILE_BYTES, Layout, OWN_FILE_BYTES, TAIL_BYTES};
use penstock_format::files::FileRef;
use penstock_format::ids::{PROVISIONAL, Run, data_name};
use penstock_format::manifest::Fragment;
use penstock_format::record::{FEATURE_STATISTICS, FEATURE_TILED};
use penstock_format::schema::ColumnSpec;
use penstock_tensor::{Column, Dtype};

use super::column::{ColumnWriter, Stored};
use super::encode;
use super::file::OpenFile;
use super::style::Style;
use crate::config::Config;
use crate::store::context::Context;

/// A column's samples are written when this many bytes are waiting.
const FLUSH_BYTES: usize = 8 << 20;

/// What to do with waiting samples that do not fill a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rest {
    Keep,
    /// Write these samples as a shorter block, because the fragment is being closed.
    Write,
}

/// The fragment being written.
pub struct FragmentWriter {
    context: Arc<Context>,
    pub columns: Vec<ColumnWriter>,
    pub files: Vec<OpenFile>,
    main: Option<usize>,
    samples: u64,
    /// The most bytes of words that a sample added.
    largest_addition: usize,
}

impl FragmentWriter {
    pub fn new(context: Arc<Context>, specs: &[ColumnSpec]) -> Result<FragmentWriter> {
        let columns = specs.iter().map(ColumnWriter::new).collect::<Result<_>>()?;
        Ok(FragmentWriter { context, columns, files: Vec::new(), main: None, samples: 0, largest_addition: 0 })
    }

    pub fn is_empty(&self) -> bool {
        self.samples == 0
    }

    /// Add `samples` samples. `columns` has one entry per column in schema order, or None for a column that is entirely null.
    pub fn push(&mut self, columns: Vec<Option<Stored>>, samples: usize) -> Result<()> {
        for (index, column) in columns.into_iter().enumerate() {
            match column {
                Some(Stored { column: Column::Pulled(pulled), .. }) if self.columns[index].dtype == Dtype::Bytes => {
                    self.push_streams(index, &pulled)?;
                }
                Some(Stored { column: Column::Pulled(pulled), .. }) => self.push_pulled(index, pulled)?,
                column => self.columns[index].push(column, samples)?,
            }
        }
        self.samples += samples as u64;
        let waiting: usize = self.columns.iter().map(ColumnWriter::waiting_bytes).sum();
        let all = waiting as u64 > Config::memory_bytes() / 4;
        for index in 0..self.columns.len() {
            if all || self.columns[index].waiting_bytes() >= FLUSH_BYTES {
                self.flush_column(index, Rest::Keep)?;
            }
        }
        Ok(())
    }

    /// Return whether these samples should begin a new fragment. One reason is a change of size: small values after large ones
    /// would use a block each, and large values do not fit the layout of small ones. The other reason is a column with values only
    /// in the earlier samples or only in these. Nulls in that column would need many zero bytes, whereas a new fragment can omit
    /// the column.
    pub fn wants_new_fragment(&self, columns: &[Option<Stored>], samples: usize) -> bool {
        let both = || self.columns.iter().zip(columns);
        if both().any(|(writer, column)| {
            column.as_ref().is_some_and(|stored| writer.shrinks(&stored.column) || writer.outgrown(&stored.column))
        }) {
            return true;
        }
        let left_out = both().filter(|(writer, column)| column.is_none() && writer.begun());
        let after: u64 = left_out.map(|(writer, _)| writer.fixed_bytes().saturating_mul(samples as u64)).sum();
        let first = both().filter(|(writer, column)| column.is_some() && !writer.begun());
        let before: u64 =
            first.map(|(writer, _)| writer.fixed_bytes().saturating_mul(writer.leading_nulls as u64)).sum();
        after.max(before) > FLUSH_BYTES as u64
    }

    /// Return how many of these samples come before one that adds a word to a full tail. Returns at least one for an empty fragment.
    /// A tail is full at `limit` bytes, but at least at twice the words that one sample added: a new file would need those words too.
    pub fn fitting(&mut self, columns: &[Option<Stored>], samples: usize, limit: usize) -> usize {
        let pairs = self.columns.iter().zip(columns);
        let mut added: Vec<_> = pairs.filter_map(|(writer, column)| writer.new_word_bytes(column.as_ref()?)).collect();
        if added.is_empty() {
            return samples;
        }
        let mut bytes = self.tail_bytes(self.main, ColumnWriter::tail_bytes);
        for row in 0..samples {
            let more = added.iter_mut().filter_map(Iterator::next).sum::<usize>();
            if more > 0 && bytes >= limit.max(2 * self.largest_addition) {
                return row;
            }
            self.largest_addition = self.largest_addition.max(more);
            bytes += more;
        }
        samples
    }

    /// Return the size of a file's tail, or of a part of it. Columns that have no file yet belong to the main file.
    fn tail_bytes(&self, file: Option<usize>, of_column: fn(&ColumnWriter) -> usize) -> usize {
        let inside = |column: &&ColumnWriter| column.file() == file || (file == self.main && column.file().is_none());
        self.columns.iter().filter(inside).map(of_column).sum()
    }

    /// Return whether a byte target has been reached. Words are left to `fitting`: samples that repeat them need no new file.
    pub fn is_full(&self) -> bool {
        let mut files = (0..self.files.len()).map(Some).chain([self.main]);
        self.files.iter().any(|file| file.offset >= FILE_BYTES)
            || files.any(|file| self.tail_bytes(file, ColumnWriter::index_bytes) >= TAIL_BYTES)
    }

    pub fn flush_column(&mut self, index: usize, rest: Rest) -> Result<()> {
        let column = &mut self.columns[index];
        let Some(mut waiting) = column.waiting.take() else { return Ok(()) };
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
            _ if rest == Rest::Write => waiting.len(),
            rows => waiting.len() / rows as usize * rows as usize,
        };
        let later = waiting.split_off(rows);
        let now = waiting;
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

    /// Begin the chunk of a column whose samples have about `mean_bytes` bytes each. `tile` is empty unless they are tiled.
    pub fn open_chunk(&mut self, index: usize, style: Style, tile: Vec<u64>, mean_bytes: u64) -> Result<()> {
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

    /// Return the file for a column with this mean sample size. The file is created if necessary.
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

    /// Write waiting samples, tails and footers, and make the files durable. Files of at most `inline` bytes remain in memory. `first` is the
    /// first sample's provisional counter. Returns the fragment, and the feature bits that its readers need.
    pub fn close(mut self, first: u64, inline: u64) -> Result<(Fragment, u64)> {
        for index in 0..self.columns.len() {
            self.flush_column(index, Rest::Write)?;
        }
        let tiled = self
            .columns
            .iter()
            .any(|column| matches!(&column.chunk, Some((_, style, _)) if style.layout == Layout::Tiled));
        let statistics = self.columns.iter().any(ColumnWriter::has_bounds);
        let mut files: Vec<FileRef> = Vec::new();
        for (index, file) in std::mem::take(&mut self.files).into_iter().enumerate() {
            let chunks: Vec<ChunkBuilder> = self.columns.iter_mut().filter_map(|column| column.finish(index)).collect();
            match file.finish(self.samples, &chunks, inline) {
                Ok(done) => files.push(done),
                Err(error) => {
                    for done in files {
                        let _ = self.context.delete(&data_name(done.id)); // An orphaned file is harmless.
                    }
                    return Err(error);
                }
            }
        }
        let runs = vec![Run { first: PROVISIONAL | first, count: self.samples }];
        let features = if tiled { FEATURE_TILED } else { 0 } | if statistics { FEATURE_STATISTICS } else { 0 };
        Ok((Fragment { samples: self.samples, is_stage: false, runs, files }, features))
    }
}
