//! A column's samples that are waiting to be written, and the chunk to which these samples will be added.

use std::sync::Arc;

use penstock_error::Result;
use penstock_format::datafile::{Bounds, ChunkBuilder, Codec, Layout, SINGLE_BYTES, UNIT_BYTES};
use penstock_format::schema::ColumnSpec;
use penstock_tensor::slice::{Grid, SAMPLE_TILES, default_tile, elements, whole};
use penstock_tensor::{Column, Dtype, Ragged, Shape};

use super::style::Style;

/// Minimum number of small samples for which a new fragment is worthwhile.
const SAMPLES_WORTH_A_FRAGMENT: usize = 1000;

/// Values of one column in their stored form and, for a category column, the words that the codes refer to.
pub struct Stored {
    pub column: Column,
    /// For categories only: codes in `column` are indexes into this list, which only grows.
    pub words: Option<Arc<Vec<Arc<str>>>>,
}

impl Stored {
    pub fn split_off(&mut self, at: usize) -> Stored {
        Stored { column: self.column.split_off(at), words: self.words.clone() }
    }
}

pub struct ColumnWriter {
    pub spec: ColumnSpec,
    pub dtype: Dtype,
    pub shape: Shape,
    /// The sides of each tile, if the schema sets them.
    tile: Option<Vec<u64>>,
    pub codec: Codec,
    /// Number of nulls before the first value. These nulls are written only if a value follows.
    pub leading_nulls: usize,
    pub waiting: Option<Column>,
    pub chunk: Option<(usize, Style, ChunkBuilder)>,
    /// For each word in the transaction, the index in `words`, or `u32::MAX` if `words` lacks the word.
    local: Vec<u32>,
    words: Vec<Arc<str>>,
    words_bytes: usize,
    pub samples: usize,
    pub validity: Option<Vec<bool>>,
    /// The bounds of the values, if the column has an order.
    pub bounds: Option<Bounds>,
}

impl ColumnWriter {
    pub fn new(spec: &ColumnSpec) -> Result<ColumnWriter> {
        let (dtype, shape) = spec.kind.stored()?;
        let tile = spec.kind.tile().map(<[u64]>::to_vec);
        Ok(ColumnWriter {
            spec: spec.clone(),
            dtype,
            shape,
            tile,
            codec: spec.codec,
            leading_nulls: 0,
            waiting: None,
            chunk: None,
            local: Vec::new(),
            words: Vec::new(),
            words_bytes: 0,
            samples: 0,
            validity: None,
            bounds: spec.kind.has_bounds().then(Bounds::default),
        })
    }

    /// Return whether these samples should be packed, although earlier samples have separate blocks, or compressed, although earlier ones are not.
    pub fn shrinks(&self, column: &Column) -> bool {
        let is_plain = matches!(&self.chunk, Some((_, style, _)) if style.codec != self.codec);
        if is_plain && column.value_bytes() as u64 >= UNIT_BYTES {
            return true; // Values that are pulled have no bytes in memory.
        }
        let alone =
            matches!(&self.chunk, Some((_, style, _)) if matches!(style.layout, Layout::Single | Layout::Tiled));
        alone
            && !self.tiled_by_shape()
            && !matches!(column, Column::Pulled(_))
            && column.len() >= SAMPLES_WORTH_A_FRAGMENT
            && (column.value_bytes() as u64) < column.len() as u64 * SINGLE_BYTES / 2
    }

    /// Return whether these samples are too large for the layout chosen for earlier, smaller samples.
    pub fn outgrown(&self, column: &Column) -> bool {
        let Column::Pulled(pulled) = column else { return false };
        match &self.chunk {
            None => self.waiting.is_some() && !self.tiled_by_shape(),
            Some((_, style, _)) if self.dtype == Dtype::Bytes => {
                (style.layout, style.codec) != (Layout::Single, Codec::None)
            }
            Some((_, _, chunk)) if chunk.layout == Layout::Tiled => {
                let many =
                    |shape: &Vec<u64>| Grid::new(shape, &chunk.tile).tiles().is_none_or(|tiles| tiles > SAMPLE_TILES);
                self.tile.is_none() && !self.shape.is_fixed() && pulled.shapes.iter().any(many)
            }
            Some(_) => true,
        }
    }

    /// Return whether the schema requires all samples to be tiled, regardless of their sizes.
    pub fn tiled_by_shape(&self) -> bool {
        self.tile.is_some()
            || (self.shape.is_fixed()
                && Style::tiles(self.dtype, &self.shape, self.shape.fixed_bytes(self.dtype).unwrap_or(0)))
    }

    /// Choose the tile size for the waiting samples.
    pub fn tile_of_waiting(&self, column: &Column) -> Vec<u64> {
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

    /// Choose the tile size for samples of these shapes: the schema's tile, else the default tile for the largest sample. If any
    /// sample would have too many such tiles, use the default tile for the longest sides.
    pub fn tile_for(&self, shapes: &[&[u64]], largest: &[u64]) -> Vec<u64> {
        if let Some(tile) = &self.tile {
            return tile.clone();
        }
        let tile = default_tile(largest, self.dtype.size() as u64);
        let has_too_many_tiles =
            |shape: &&[u64]| Grid::new(shape, &tile).tiles().is_none_or(|tiles| tiles > SAMPLE_TILES);
        if tile.contains(&0) || !shapes.iter().any(has_too_many_tiles) {
            return tile;
        }
        let longest = |axis: usize| shapes.iter().map(|shape| shape[axis]).max().unwrap_or(1);
        default_tile(&(0..largest.len()).map(longest).collect::<Vec<_>>(), self.dtype.size() as u64)
    }

    /// Return whether any sample of this fragment has a value in this column.
    pub fn begun(&self) -> bool {
        self.waiting.is_some() || self.chunk.is_some()
    }

    /// Return the stored size of a null in bytes: the sample size if the shape is fixed, or 0 if nulls are empty.
    pub fn fixed_bytes(&self) -> u64 {
        if self.shape.is_fixed() && !self.tiled_by_shape() {
            self.shape.fixed_bytes(self.dtype).unwrap_or(0)
        } else {
            0
        }
    }

    pub fn push(&mut self, stored: Option<Stored>, samples: usize) -> Result<()> {
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

    /// Return, for each sample, how many bytes its word adds to the dictionary. None if the samples have no words.
    pub fn new_word_bytes<'a>(&'a self, stored: &'a Stored) -> Option<impl Iterator<Item = usize> + 'a> {
        let (Column::Fixed { data, .. }, Some(words)) = (&stored.column, &stored.words) else { return None };
        let mut counted = vec![false; words.len()];
        Some(data.as_chunks::<4>().0.iter().map(move |code| {
            let given = u32::from_le_bytes(*code) as usize;
            let known = self.local.get(given).is_some_and(|place| *place != u32::MAX);
            // A null has code 0, even if the word list is empty.
            let first = counted.get_mut(given).is_some_and(|counted| !std::mem::replace(counted, true));
            if first && !known { dictionary_bytes(&words[given]) } else { 0 }
        }))
    }

    /// Return the code of each word in the dictionary, and its size there.
    pub fn words_by_code(&self) -> impl Iterator<Item = (usize, usize)> {
        let used = self.local.iter().enumerate().filter(|(_, place)| **place != u32::MAX);
        used.map(|(code, place)| (code, dictionary_bytes(&self.words[*place as usize])))
    }

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
                    self.words_bytes += dictionary_bytes(&words[given]);
                    self.words.push(words[given].clone());
                }
            }
            *code = place.to_le_bytes();
        }
    }

    pub fn nulls(&self, samples: usize) -> Result<Column> {
        let validity = Some(vec![false; samples]);
        Ok(match self.shape.is_fixed() && !self.tiled_by_shape() {
            true => Column::Fixed {
                data: vec![0; samples * self.shape.fixed_bytes(self.dtype)? as usize],
                validity,
                samples,
            },
            false => {
                let free = if self.dtype == Dtype::Bytes { 0 } else { samples * self.shape.free_count() };
                Column::Ragged(Ragged { data: Vec::new(), ends: vec![0; samples], free: vec![0; free], validity })
            }
        })
    }

    /// Append to the waiting samples. Their validity moves to `self.validity`, which covers the whole fragment.
    pub fn add(&mut self, mut column: Column) {
        let before = self.chunk_samples();
        let validity = match &mut column {
            Column::Fixed { validity, .. } => validity.take(),
            Column::Ragged(ragged) => ragged.validity.take(),
            Column::Pulled(pulled) => pulled.validity.take(),
        };
        if let Some(bounds) = &mut self.bounds {
            bounds.include(&Bounds::of(&column, self.dtype, validity.as_deref()));
        }
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

    /// Return whether the chunk will have the bounds of its values.
    pub fn has_bounds(&self) -> bool {
        self.chunk.is_some() && self.bounds.is_some()
    }

    pub fn waiting_bytes(&self) -> usize {
        self.waiting.as_ref().map_or(0, |column| column.value_bytes() + column.len() * 9)
    }

    pub fn file(&self) -> Option<usize> {
        self.chunk.as_ref().map(|(file, _, _)| *file)
    }

    pub fn tail_bytes(&self) -> usize {
        self.index_bytes() + self.words_bytes
    }

    /// Return the size of this column's tail without its words.
    pub fn index_bytes(&self) -> usize {
        let validity = self.validity.as_ref().map_or(0, |validity| validity.len() / 8);
        self.chunk.as_ref().map_or(0, |(_, _, chunk)| chunk.tail_bytes()) + validity
    }

    pub fn chunk_builder(&self, style: &Style) -> ChunkBuilder {
        let free = if matches!(style.layout, Layout::Single | Layout::Tiled) && self.dtype != Dtype::Bytes {
            self.shape.free_count()
        } else {
            0
        };
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
            bounds: None,
        }
    }

    /// Take the chunk if it belongs to file `index`.
    pub fn finish(&mut self, index: usize) -> Option<ChunkBuilder> {
        let (_, _, mut chunk) = self.chunk.take_if(|(file, _, _)| *file == index)?;
        chunk.validity = self.validity.take();
        chunk.bounds = self.bounds.take();
        chunk.dictionary = (!self.words.is_empty()).then(|| std::mem::take(&mut self.words));
        Some(chunk)
    }
}

/// Return how many bytes a word occupies in the tail.
fn dictionary_bytes(word: &str) -> usize {
    word.len() + 2
}

/// Return the sizes of one value's free dimensions.
pub fn free_of<'a>(ragged: &'a Ragged, shape: &Shape, row: usize) -> &'a [u64] {
    let count = shape.free_count();
    &ragged.free[row * count..(row + 1) * count]
}

/// Convert samples of fixed shape to the ragged form, in which nulls are empty.
fn stretched(column: Column) -> Column {
    match column {
        Column::Fixed { data, validity: None, samples } => {
            let cell = (data.len() / samples.max(1)) as u64;
            Column::Ragged(Ragged {
                data,
                ends: (1..=samples as u64).map(|end| end * cell).collect(),
                free: Vec::new(),
                validity: None,
            })
        }
        Column::Fixed { data, validity: Some(valid), samples } => {
            let (cell, mut ragged) = (data.len() / samples.max(1), Ragged::default());
            (0..samples).for_each(|row| ragged.push(valid[row].then(|| &data[row * cell..(row + 1) * cell]), &[]));
            Column::Ragged(ragged)
        }
        other => other,
    }
}
