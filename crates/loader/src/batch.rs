//! A finished batch: column values in their own memory, and the place, draw and validity of each sample.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use penstock_dataset::RaggedValues;
use penstock_tensor::Dtype;

use crate::memory::Memory;
use crate::order::mixture::SamplePlace;

pub type Nulls = Option<Vec<bool>>;

#[derive(Debug)]
pub struct Array {
    pub memory: Memory,
    pub dtype: Dtype,
    /// The shape of the whole batch. The first dimension is the number of samples.
    pub shape: Vec<u64>,
    pub nulls: Nulls,
}

pub enum ColumnValues {
    Array(Array),
    /// Values of different shapes in one array. `offsets` are in elements, and `shapes` contains `rank` sizes per sample.
    Ragged {
        values: Array,
        offsets: Vec<i64>,
        shapes: Vec<i64>,
        rank: usize,
    },
    /// Stored bytes, unchanged.
    Raw(Raw),
    /// Values of different shapes, each in its own memory, with None for each null.
    List(Vec<Option<Loose>>),
}

impl ColumnValues {
    fn bytes(&self) -> usize {
        match self {
            ColumnValues::Array(array) | ColumnValues::Ragged { values: array, .. } => array.memory.bytes(),
            ColumnValues::Raw(raw) => raw.value_bytes(),
            ColumnValues::List(list) => list.iter().flatten().map(|(data, ..)| data.len()).sum(),
        }
    }
}

/// One value: its bytes, dtype and shape.
pub type Loose = (Vec<u8>, Dtype, Vec<u64>);

/// Byte strings from one or more sources, usually in memory owned by the storage layer.
pub struct Raw {
    pub parts: Vec<RaggedValues>,
    /// For each sample, the part that contains it and its place in that part.
    pub index: Vec<(u32, u32)>,
    /// Bytes of memory that the strings occupy, excluding mapped files.
    pub own_bytes: u64,
}

impl Raw {
    pub fn len(&self) -> usize {
        self.index.len()
    }

    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    pub fn get(&self, sample: usize) -> Option<&[u8]> {
        let (part, place) = self.index[sample];
        self.parts[part as usize].get(place as usize)
    }

    /// Return the sizes of a sample's free dimensions.
    pub fn free(&self, sample: usize) -> &[u64] {
        let (part, place) = self.index[sample];
        self.parts[part as usize].free(place as usize)
    }

    pub fn value_bytes(&self) -> usize {
        self.parts.iter().map(RaggedValues::value_bytes).sum()
    }
}

/// The samples of a batch.
pub struct StepSamples {
    pub step: u64,
    pub epoch: u64,
    pub draws: Vec<u64>,
    pub places: Vec<SamplePlace>,
    /// False for samples that only pad the batch. With `OnCorrupt::Mask`, also false for samples that replace damaged ones.
    pub valid: Vec<bool>,
}

pub struct Batch {
    pub samples: StepSamples,
    pub columns: Vec<(String, ColumnValues)>,
    pub row_ids: Option<Vec<i64>>,
    /// Damaged samples that were replaced, each with its error.
    pub refused: Vec<(SamplePlace, penstock_error::Error)>,
}

impl Batch {
    /// Count the bytes of all values.
    pub fn bytes(&self) -> u64 {
        self.columns.iter().map(|(_, values)| values.bytes() as u64).sum()
    }

    pub fn give(&mut self, kept: &Arc<AtomicU64>) {
        for (_, values) in &mut self.columns {
            if let ColumnValues::Array(array) | ColumnValues::Ragged { values: array, .. } = values {
                array.memory.give(kept);
            }
        }
    }
}
