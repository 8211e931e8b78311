//! Write one data file: the blocks, then the tail and the footer.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use penstock_error::{Error, Result};
use penstock_format::datafile::{ChunkBuilder, Tail, UNIT_BYTES, write_header, write_tail};
use penstock_format::files::{FilePlace, FileRef};
use penstock_format::ids::data_name;
use penstock_format::manifest::Statistics;
use penstock_format::{Id, crc};
use penstock_storage::ObjectWriter;

use super::encode::EncodedBlock;
use crate::store::context::Context;

/// Files are written in multiples of this size, which is the size of a huge page. If the page cache then uses large folios, maps
/// can use huge pages.
const WRITE_BYTES: usize = 2 << 20;

/// How far a piece's last small block may extend beyond the end of the piece.
const BLOCK_SLACK_BYTES: usize = 64 << 10;

pub struct OpenFile {
    id: Id,
    /// The object, once its first piece is full.
    writer: Option<Box<dyn ObjectWriter>>,
    context: Arc<Context>,
    buffer: Vec<u8>,
    pub offset: u64,
}

/// A block that is written piece by piece.
#[derive(Default)]
pub struct GrowingBlock {
    /// Where it begins, once its first checksum unit is written.
    offset: Option<u64>,
    pub bytes: u64,
    /// The beginning of a checksum unit.
    unit: Vec<u8>,
}

impl OpenFile {
    pub fn create(context: &Arc<Context>) -> Result<OpenFile> {
        let id = context.new_id()?;
        let buffer = write_header(id);
        Ok(OpenFile { id, writer: None, context: context.clone(), offset: buffer.len() as u64, buffer })
    }

    fn begin(context: &Context, id: Id) -> Result<Box<dyn ObjectWriter>> {
        // Do not write into another dataset's folder. If no dataset is found, the writer reports the error.
        if context.storage.moves()
            && let Err(error) = context.check_dataset()
            && error.code() == "dataset-replaced"
        {
            return Err(error);
        }
        context.storage.writer(&data_name(id))
    }

    /// Append bytes at an aligned offset. Returns the offset.
    fn place(&mut self, bytes: &[u8], align: u64) -> Result<u64> {
        let offset = self.offset.next_multiple_of(align);
        self.buffer.resize(self.buffer.len() + (offset - self.offset) as usize, 0);
        self.buffer.extend_from_slice(bytes);
        self.offset = offset + bytes.len() as u64;
        if self.buffer.len() >= WRITE_BYTES {
            // Write only whole pieces, so that each write begins where the page cache can use one large folio.
            let whole = self.buffer.len() / WRITE_BYTES * WRITE_BYTES;
            let mut rest = Vec::with_capacity(WRITE_BYTES + BLOCK_SLACK_BYTES);
            rest.extend_from_slice(&self.buffer[whole..]);
            self.buffer.truncate(whole);
            let piece = std::mem::replace(&mut self.buffer, rest);
            self.write(piece)?;
        }
        Ok(offset)
    }

    /// Append a block and record it in its chunk.
    pub fn add(&mut self, chunk: &mut ChunkBuilder, block: &EncodedBlock<'_>, align: u64) -> Result<()> {
        chunk.offset.push(self.place(&block.stored, align)?);
        chunk.stored_bytes.push(block.stored.len() as u64);
        chunk.raw_bytes.push(block.raw_bytes);
        chunk.crcs.extend(block.crcs.iter().map(|crc| u64::from(*crc)));
        Ok(())
    }

    /// Append a piece of a plain block whose length is not known yet.
    pub fn grow(&mut self, chunk: &mut ChunkBuilder, block: &mut GrowingBlock, mut piece: &[u8]) -> Result<()> {
        block.bytes += piece.len() as u64;
        while !piece.is_empty() {
            let (now, later) = piece.split_at(piece.len().min(UNIT_BYTES as usize - block.unit.len()));
            block.unit.extend_from_slice(now);
            piece = later;
            if block.unit.len() as u64 == UNIT_BYTES {
                self.place_unit(chunk, block, 4096)?;
            }
        }
        Ok(())
    }

    fn place_unit(&mut self, chunk: &mut ChunkBuilder, block: &mut GrowingBlock, first_align: u64) -> Result<()> {
        chunk.crcs.push(u64::from(crc(&block.unit)));
        let at = self.place(&block.unit, if block.offset.is_none() { first_align } else { 1 })?;
        block.offset.get_or_insert(at);
        block.unit.clear();
        Ok(())
    }

    /// Append the rest of a growing block, and record it in its chunk.
    pub fn end(&mut self, chunk: &mut ChunkBuilder, mut block: GrowingBlock) -> Result<()> {
        if !block.unit.is_empty() {
            self.place_unit(chunk, &mut block, 8)?;
        }
        chunk.offset.push(block.offset.map_or_else(|| self.place(&[], 8), Ok)?);
        chunk.stored_bytes.push(block.bytes);
        chunk.raw_bytes.push(block.bytes);
        Ok(())
    }

    /// Write the tail and the footer, and make the file's content durable. A file of at most `inline` bytes remains in memory.
    pub fn finish(mut self, samples: u64, chunks: &[ChunkBuilder], inline: u64) -> Result<FileRef> {
        let (tail, tail_bytes, tail_crc) = write_tail(samples, chunks, self.offset);
        // A tail that readers would refuse must never be committed.
        let read = Tail::parse(Bytes::copy_from_slice(&tail[..tail_bytes as usize]), self.offset).map_err(|error| {
            Error::new("internal", format!("a written data file cannot be read back: {}", error.message()))
        })?;
        let statistics = read.chunks.iter().map(|chunk| (chunk.column, Statistics::of(chunk))).collect();
        self.context.caches.get().note_statistics(self.id, statistics);
        self.buffer.extend_from_slice(&tail);
        let file_bytes = self.offset + tail.len() as u64;
        let buffer = std::mem::take(&mut self.buffer);
        let place = match self.writer {
            None if file_bytes <= inline => FilePlace::Inline(buffer.into()),
            _ => {
                self.write(buffer)?;
                self.writer.take().map_or(Ok(()), ObjectWriter::finish)?;
                self.context.storage.counters().put_bytes.fetch_add(file_bytes, Relaxed);
                FilePlace::Object
            }
        };
        let columns = chunks.iter().map(|chunk| chunk.column).collect();
        Ok(FileRef { id: self.id, file_bytes, tail_bytes, tail_crc, columns, place })
    }

    fn write(&mut self, piece: Vec<u8>) -> Result<()> {
        match &mut self.writer {
            Some(writer) => writer.write(piece),
            None => self.writer.insert(OpenFile::begin(&self.context, self.id)?).write(piece),
        }
    }
}
