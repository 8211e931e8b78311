//! An open data file, mapped or read in ranges: its tail, its blocks, and the checksum units that this process has verified.

use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};

use bytes::Bytes;
use penstock_error::{Context as _, Error, Result};
use penstock_format::cursor::malformed;
use penstock_format::datafile::{
    Chunk, Codec, FOOTER_BYTES, HEADER_BYTES, Layout, MAGIC, Packed, Tail, UNIT_BYTES, write_footer,
};
use penstock_format::files::{FilePlace, FileRef};
use penstock_format::ids::data_name;
use penstock_format::{Id, crc};
use penstock_storage::{Access, Read};

use super::blocks::{self, BlockKey};
use super::codecs;

pub struct DataFile {
    /// What the manifest says: another file than this one, if this one takes its place.
    asked: (Id, u64, u32),
    pub id: Id,
    pub file_bytes: u64,
    tail_crc: u32,
    place: FilePlace,
    /// The whole file, either mapped or read. Empty if blocks are fetched in ranges and verified as they arrive.
    pub map: Bytes,
    pub access: Access,
    pub tail: Tail,
    pub data_end: u64,
    /// For each chunk, one bit per checksum unit. A bit is set once its unit is verified, and setting it twice is harmless.
    verified: Vec<Vec<AtomicU64>>,
    /// Whether the access pattern last announced to the store was sequential. A new map is sequential by default.
    pub expected_in_order: AtomicBool,
    /// For each chunk, the number of units that are not verified yet.
    unverified: Vec<AtomicU64>,
}

impl DataFile {
    /// Map the file, and check its header and tail against the manifest.
    pub fn open(storage: &dyn Read, file: &FileRef, samples: u64) -> Result<DataFile> {
        let data_end = data_end(file)?;
        let map = storage.map(&data_name(file.id), file.file_bytes)?;
        storage.will_need(&map[data_end as usize..]);
        DataFile::whole(map, Access::Mapped, file, samples)
    }

    /// Open a data file whose bytes are all available.
    pub fn whole(map: Bytes, access: Access, file: &FileRef, samples: u64) -> Result<DataFile> {
        let data_end = data_end(file)?;
        if map[..8] != MAGIC[..] || map[8..24] != file.id.0[..] {
            return Err(malformed(format!(
                "cannot read `{}`: it is not a data file, or not the expected one",
                file.place.shown(file.id)
            )));
        }
        // The tail is copied, so that verified bytes cannot change afterwards and reads touch few pages.
        let tail = Bytes::copy_from_slice(&map[data_end as usize..(data_end + file.tail_bytes) as usize]);
        DataFile::assemble(map, access, tail, file, samples)
    }

    /// Open a data file from its tail alone. Blocks are fetched later.
    pub fn ranged(tail: Bytes, access: Access, file: &FileRef, samples: u64) -> Result<DataFile> {
        DataFile::assemble(Bytes::new(), access, tail, file, samples)
    }

    fn assemble(map: Bytes, access: Access, tail: Bytes, file: &FileRef, samples: u64) -> Result<DataFile> {
        let (name, data_end) = (file.place.shown(file.id), data_end(file)?);
        let found = crc(&tail);
        if found != file.tail_crc {
            let text =
                format!("cannot read the tail of `{name}`: crc32c {found:#010x}, expected {:#010x}", file.tail_crc);
            return Err(Error::new("object-checksum", text).hint("run `penstock verify`; restore the file from a copy"));
        }
        let tail = Tail::parse(tail, data_end).context(|| format!("cannot read the tail of `{name}`"))?;
        if tail.samples != samples {
            return Err(malformed(format!(
                "cannot read `{name}`: it has {} samples, expected {samples}",
                tail.samples
            )));
        }
        // Check all column ids, not only those that are read: a wrong id in the manifest would silently make a column null.
        if !tail.chunks.iter().map(|chunk| chunk.column).eq(file.columns.iter().copied()) {
            let found: Vec<u64> = tail.chunks.iter().map(|chunk| chunk.column).collect();
            return Err(malformed(format!(
                "cannot read `{name}`: it has the columns {found:?}, expected {:?}",
                file.columns
            )));
        }
        let bits = |chunk: &Chunk| if map.is_empty() { 0 } else { chunk.crcs.len().div_ceil(64) };
        let verified = tail.chunks.iter().map(|chunk| (0..bits(chunk)).map(|_| AtomicU64::new(0)).collect()).collect();
        let unverified = tail.chunks.iter().map(|chunk| AtomicU64::new(chunk.crcs.len() as u64)).collect();
        let expected_in_order = AtomicBool::new(true);
        let (id, file_bytes, tail_crc, place) = (file.id, file.file_bytes, file.tail_crc, file.place.clone());
        let asked = (id, file_bytes, tail_crc);
        Ok(DataFile {
            asked,
            id,
            file_bytes,
            tail_crc,
            place,
            map,
            access,
            tail,
            data_end,
            verified,
            expected_in_order,
            unverified,
        })
    }

    /// Let the file take the place of the one that a manifest lists.
    pub fn instead_of(self, file: &FileRef) -> DataFile {
        DataFile { asked: (file.id, file.file_bytes, file.tail_crc), ..self }
    }

    /// Return the footer that the file must have.
    pub fn footer(&self) -> Vec<u8> {
        write_footer(self.data_end, self.file_bytes - self.data_end - FOOTER_BYTES, self.tail_crc)
    }

    /// Return what has the file, for messages.
    pub fn shown(&self) -> String {
        self.place.shown(self.id)
    }

    /// Return whether a manifest entry describes this file. Another manifest may use the same id for different content.
    pub fn is(&self, file: &FileRef, samples: u64) -> bool {
        let in_place = self.asked.0 == self.id;
        self.asked == (file.id, file.file_bytes, file.tail_crc)
            && self.tail.samples == samples
            && (!in_place || self.data_end + file.tail_bytes + FOOTER_BYTES == self.file_bytes)
            && self.tail.chunks.iter().map(|chunk| chunk.column).eq(file.columns.iter().copied())
    }

    /// Return how much memory the file uses, in bytes. Mapped pages belong to the page cache and are not counted.
    pub fn held_bytes(&self) -> u64 {
        let chunks: u64 = self.tail.chunks.iter().map(Chunk::held_bytes).sum();
        let marks: usize =
            self.verified.iter().map(|units| size_of::<(Vec<AtomicU64>, AtomicU64)>() + size_of_val(&units[..])).sum();
        let of_tail = self.file_bytes - self.data_end + chunks + marks as u64;
        of_tail + if self.access.is_mapped() { 0 } else { self.map.len() as u64 }
    }

    /// Return whether `map` contains the whole file. Otherwise, blocks are fetched.
    pub fn in_memory(&self) -> bool {
        !self.map.is_empty()
    }

    /// Return the index of a column's chunk.
    pub fn chunk_of(&self, column: u64) -> Option<usize> {
        self.tail.chunks.iter().position(|chunk| chunk.column == column)
    }

    /// Return the range of a block's stored bytes in the map, after verifying any units that are not verified yet.
    #[inline]
    pub fn stored(&self, chunk: usize, block: usize) -> Result<std::ops::Range<usize>> {
        self.verify(chunk, block)?;
        let entry = &self.tail.chunks[chunk];
        let offset = entry.offset.get(block) as usize;
        Ok(offset..offset + entry.stored_bytes.get(block) as usize)
    }

    /// Verify the checksum units of a block that this process has not verified yet.
    #[inline]
    pub fn verify(&self, chunk: usize, block: usize) -> Result<()> {
        let entry = &self.tail.chunks[chunk];
        if entry.first_unit.is_none() && self.is_verified(chunk, block) {
            return Ok(()); // This is the common case: one unit per block, already verified.
        }
        self.verify_units(chunk, block, 0..entry.units_of(block).1)
    }

    /// Verify the given checksum units of a block, except for units that this process has already verified.
    pub fn verify_units(&self, chunk: usize, block: usize, mut units: std::ops::Range<usize>) -> Result<()> {
        let first = self.tail.chunks[chunk].units_of(block).0;
        units.try_for_each(|unit| match self.is_verified(chunk, first + unit) {
            true => Ok(()),
            false => self.verify_unit(chunk, block, unit, first + unit),
        })
    }

    /// Return whether this process has verified a checksum unit of a chunk.
    #[inline]
    pub fn is_verified(&self, chunk: usize, unit: usize) -> bool {
        self.verified[chunk][unit / 64].load(Relaxed) >> (unit % 64) & 1 == 1
    }

    #[cold]
    fn verify_unit(&self, chunk: usize, block: usize, unit: usize, index: usize) -> Result<()> {
        let (begin, end) = self.unit(chunk, block, unit);
        self.check_unit(chunk, block, unit, index, &self.map[begin as usize..end as usize])?;
        let before = self.verified[chunk][index / 64].fetch_or(1 << (index % 64), Relaxed);
        if before >> (index % 64) & 1 == 0 {
            self.unverified[chunk].fetch_sub(1, Relaxed);
        }
        Ok(())
    }

    /// Return the offsets at which a block's checksum unit begins and ends in the file.
    pub fn unit(&self, chunk: usize, block: usize, unit: usize) -> (u64, u64) {
        let entry = &self.tail.chunks[chunk];
        let (offset, at) = (entry.offset.get(block), unit as u64 * UNIT_BYTES);
        (offset + at, offset + (at + UNIT_BYTES).min(entry.stored_bytes.get(block)))
    }

    /// Verify unit `unit` of a block against the chunk's checksum `index`.
    fn check_unit(&self, chunk: usize, block: usize, unit: usize, index: usize, bytes: &[u8]) -> Result<()> {
        let found = crc(bytes);
        let expected = self.tail.chunks[chunk].crcs.get(index) as u32;
        if found != expected {
            let (begin, end) = self.unit(chunk, block, unit);
            let text = format!(
                "cannot read block {block}: crc32c {found:#010x}, expected {expected:#010x} (data file `{}`, bytes {begin}..{end})",
                self.shown(),
            );
            let error = Error::new("block-checksum", text).object(self.shown());
            return Err(error.hint("run `penstock verify`; restore the file from a copy"));
        }
        Ok(())
    }

    /// Verify the fetched bytes of a block, or of one unit of a block.
    pub fn verify_stored(&self, chunk: usize, block: usize, unit: Option<usize>, stored: &[u8]) -> Result<()> {
        let (first, count) = self.tail.chunks[chunk].units_of(block);
        match unit {
            Some(unit) => self.check_unit(chunk, block, unit, first + unit, stored),
            None => {
                let mut units = stored.chunks(UNIT_BYTES as usize).chain(std::iter::repeat(&[][..]));
                (0..count).try_for_each(|unit| {
                    self.check_unit(chunk, block, unit, first + unit, units.next().unwrap_or_default())
                })
            }
        }
    }

    /// Return the offset of a chunk's sample 0, if the chunk's samples of `cell` bytes are contiguous and all verified.
    /// Sample i then begins `i · cell` bytes later and needs no further checks.
    pub fn plain(&self, chunk: usize, cell: usize) -> Option<usize> {
        let entry = &self.tail.chunks[chunk];
        let back_to_back = entry.layout == Layout::Fixed
            && entry.rows_per_block > 0
            && entry.raw_bytes.is_none()
            && entry.validity.is_none()
            && entry.offset.is_line_of(entry.rows_per_block * cell as u64);
        (self.in_memory() && back_to_back && self.unverified[chunk].load(Relaxed) == 0)
            .then(|| entry.offset.get(0) as usize)
    }

    /// Return the cache key of a decoded block, or of one checksum unit.
    pub fn key(&self, chunk: usize, block: usize, unit: Option<usize>) -> BlockKey {
        (self.id, self.tail_crc, chunk as u32, block as u32, unit.map_or(u32::MAX, |unit| unit as u32))
    }

    /// Return a decoded block of an in-memory file. An uncompressed block is returned as a range of the map.
    #[inline]
    pub fn block(&self, chunk: usize, block: usize) -> Result<Decoded> {
        let stored = self.stored(chunk, block)?;
        match self.tail.chunks[chunk].codec {
            Codec::None => Ok(Decoded::Mapped(stored)),
            _ => {
                let decode = || self.decoded(chunk, block, self.map.slice(stored.clone()));
                blocks::get_or_decode(self.key(chunk, block, None), decode).map(Decoded::Owned)
            }
        }
    }

    /// Decode the stored bytes of a block.
    pub fn decoded(&self, chunk: usize, block: usize, stored: Bytes) -> Result<Bytes> {
        let entry = &self.tail.chunks[chunk];
        let Some(raw_bytes) = entry.raw_bytes.as_ref().map(|raw| raw.get(block) as usize) else { return Ok(stored) };
        if entry.codec == Codec::None {
            return Ok(stored);
        }
        let raw = codecs::decode(entry.codec, &stored, raw_bytes);
        let raw =
            raw.map(Bytes::from).context(|| format!("cannot decode block {block} of data file `{}`", self.shown()));
        raw.map_err(|error| error.object(self.shown()))
    }

    /// Parse the head of a packed block.
    pub fn packed(&self, chunk: usize, block: usize, bytes: &[u8]) -> Result<Packed> {
        let entry = &self.tail.chunks[chunk];
        debug_assert_eq!(entry.layout, Layout::Packed);
        Packed::parse(bytes, entry.rows_of(block) as usize, entry.dtype, &entry.shape)
            .context(|| format!("cannot read block {block} of data file `{}`", self.shown()))
            .map_err(|error| error.object(self.shown()))
    }
}

/// Return the offset at which the blocks end and the tail begins.
fn data_end(file: &FileRef) -> Result<u64> {
    let end = file
        .file_bytes
        .checked_sub(FOOTER_BYTES)
        .and_then(|end| end.checked_sub(file.tail_bytes))
        .filter(|end| *end >= HEADER_BYTES);
    end.ok_or_else(|| {
        malformed(format!(
            "cannot read `{}`: a tail of {} bytes does not fit in a file of {} bytes",
            file.place.shown(file.id),
            file.tail_bytes,
            file.file_bytes
        ))
    })
}

/// The content of a decoded block.
pub enum Decoded {
    /// A range of the file's map.
    Mapped(std::ops::Range<usize>),
    Owned(Bytes),
}

impl Decoded {
    pub fn bytes<'a>(&'a self, file: &'a DataFile) -> &'a [u8] {
        match self {
            Decoded::Mapped(range) => &file.map[range.clone()],
            Decoded::Owned(bytes) => bytes,
        }
    }
}
