//! Write one data file: the blocks, then the tail and the footer.

use bytes::Bytes;
use penstock_error::{Error, Result};
use penstock_format::Id;
use penstock_format::datafile::{ChunkBuilder, Tail, write_header, write_tail};
use penstock_format::files::FileRef;
use penstock_format::ids::data_name;
use penstock_storage::ObjectWriter;

use super::encode::Encoded;
use crate::store::context::Context;

/// Files are written in multiples of this size, which is the size of a huge page. If the page cache then uses large folios, maps
/// can use huge pages.
const WRITE_BYTES: usize = 2 << 20;

/// How far a piece's last small block may extend beyond the end of the piece.
const BLOCK_SLACK_BYTES: usize = 64 << 10;

pub struct OpenFile {
    id: Id,
    writer: Box<dyn ObjectWriter>,
    buffer: Vec<u8>,
    pub offset: u64,
}

impl OpenFile {
    pub fn create(context: &Context) -> Result<OpenFile> {
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
            // Write only whole pieces, so that each write begins where the page cache can use one large folio.
            let whole = self.buffer.len() / WRITE_BYTES * WRITE_BYTES;
            let mut rest = Vec::with_capacity(WRITE_BYTES + BLOCK_SLACK_BYTES);
            rest.extend_from_slice(&self.buffer[whole..]);
            self.buffer.truncate(whole);
            self.writer.write(std::mem::replace(&mut self.buffer, rest))?;
        }
        Ok(offset)
    }

    /// Append a block and record it in its chunk.
    pub fn add(&mut self, chunk: &mut ChunkBuilder, block: &Encoded<'_>, align: u64) -> Result<()> {
        chunk.offset.push(self.place(&block.stored, align)?);
        chunk.stored_bytes.push(block.stored.len() as u64);
        chunk.raw_bytes.push(block.raw_bytes);
        chunk.crcs.extend(block.crcs.iter().map(|crc| u64::from(*crc)));
        Ok(())
    }

    /// Write the tail and the footer, and make the file's content durable.
    pub fn finish(mut self, samples: u64, chunks: &[ChunkBuilder]) -> Result<FileRef> {
        let (tail, tail_bytes, tail_crc) = write_tail(samples, chunks, self.offset);
        // A tail that readers would refuse must never be committed.
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
