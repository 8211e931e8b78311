//! Encodes the header, tail index and footer of a data file.

use std::sync::Arc;

use penstock_tensor::{Dtype, Shape};

use super::{Bounds, Codec, FOOTER_BYTES, Layout, MAGIC};
use crate::cursor::{Writer, crc};
use crate::id::Id;
use crate::ints::IntArray;

/// One column of a tail that is being written.
#[derive(Debug, Clone)]
pub struct ChunkBuilder {
    pub column: u64,
    pub dtype: Dtype,
    pub layout: Layout,
    pub codec: Codec,
    pub shape: Shape,
    pub rows_per_block: u64,
    pub first_row: Vec<u64>,
    pub offset: Vec<u64>,
    pub stored_bytes: Vec<u64>,
    pub raw_bytes: Vec<u64>,
    pub crcs: Vec<u64>,
    pub free: Vec<Vec<u64>>,
    pub tile: Vec<u64>,
    pub first_tile: Vec<u64>,
    pub validity: Option<Vec<bool>>,
    pub dictionary: Option<Vec<Arc<str>>>,
    pub bounds: Option<Bounds>,
}

impl ChunkBuilder {
    fn write(&self, writer: &mut Writer) {
        writer.varint(self.column);
        writer.u8(self.dtype as u8);
        writer.u8(self.layout as u8);
        writer.u8(self.codec as u8);
        writer.list(&self.shape.0, |writer, size| writer.varint(size.map_or(0, |size| size + 1)));
        writer.varint(self.rows_per_block);
        writer.varint(self.offset.len() as u64);
        if self.rows_per_block == 0 {
            IntArray::write(writer, &self.first_row);
        }
        IntArray::write(writer, &vec![0; self.offset.len()]);
        IntArray::write(writer, &self.offset);
        IntArray::write(writer, &self.stored_bytes);
        if self.codec != Codec::None {
            IntArray::write(writer, &self.raw_bytes);
        }
        IntArray::write(writer, &self.crcs);
        for free in &self.free {
            IntArray::write(writer, free);
        }
        if self.layout == Layout::Tiled {
            writer.varints(&self.tile);
            IntArray::write(writer, &self.first_tile);
        }
        writer.option(self.validity.as_ref(), |writer, valid| {
            let mut bits = vec![0u8; valid.len().div_ceil(8)];
            for (index, _) in valid.iter().enumerate().filter(|(_, valid)| **valid) {
                bits[index / 8] |= 1 << (index % 8);
            }
            writer.0.extend_from_slice(&bits);
        });
        writer.option(self.dictionary.as_ref(), |writer, words| writer.list(words, |writer, word| writer.string(word)));
        writer.option(self.bounds.as_ref(), |writer, bounds| bounds.write(writer));
    }

    /// Estimate how many bytes this column occupies in the tail.
    pub fn tail_bytes(&self) -> usize {
        self.offset.len() * 8
            + self.first_row.len() * 4
            + self.crcs.len() * 4
            + self.free.iter().map(|free| free.len() * 4).sum::<usize>()
            + self.first_tile.len() * 4
            + 64
    }
}

/// Encode the header of a data file.
pub fn write_header(id: Id) -> Vec<u8> {
    let mut header = MAGIC.to_vec();
    header.extend_from_slice(&id.0);
    header
}

/// Encode the tail and footer of a file whose blocks end at `data_end`. Returns the bytes, the tail's length and the tail's crc.
pub fn write_tail(samples: u64, chunks: &[ChunkBuilder], data_end: u64) -> (Vec<u8>, u64, u32) {
    let mut writer = Writer::default();
    writer.varint(samples);
    writer.varint(0);
    writer.list(chunks, |writer, chunk| chunk.write(writer));
    let (tail_bytes, tail_crc) = (writer.0.len() as u64, crc(&writer.0));
    writer.0.extend_from_slice(&write_footer(data_end, tail_bytes, tail_crc));
    (writer.0, tail_bytes, tail_crc)
}

/// Encode the footer, which repeats the sizes and the tail crc from the manifest.
pub fn write_footer(data_end: u64, tail_bytes: u64, tail_crc: u32) -> Vec<u8> {
    Writer::written(|writer| {
        writer.u64(data_end);
        writer.u32(tail_bytes as u32);
        writer.u32(tail_crc);
        writer.u64(data_end + tail_bytes + FOOTER_BYTES);
        writer.0.extend_from_slice(&[1, 0, 0, 0]);
        writer.0.extend_from_slice(b"PNSD");
    })
}
