//! Reads and writes the primitives of spec section 1 and the envelope around every metadata object.

use bytes::Bytes;
use penstock_error::{Error, Result};

use crate::id::Id;

/// Return the CRC-32C of the bytes.
pub fn crc(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// Return the error for bytes that violate the spec.
pub fn malformed(what: impl Into<String>) -> Error {
    Error::new("object-malformed", what).hint("run `penstock verify` to see what else is damaged")
}

/// A read position in a byte string. Every read is bounds-checked.
pub struct Cursor {
    bytes: Bytes,
    at: usize,
}

impl Cursor {
    pub fn new(bytes: Bytes) -> Cursor {
        Cursor { bytes, at: 0 }
    }

    pub fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// Return the next `count` bytes without copying them.
    pub fn take(&mut self, count: usize) -> Result<Bytes> {
        if count > self.left() {
            return Err(malformed(format!("expected {count} bytes at offset {}, but {} remain", self.at, self.left())));
        }
        let slice = self.bytes.slice(self.at..self.at + count);
        self.at += count;
        Ok(slice)
    }

    /// Return all remaining bytes without copying them.
    pub fn rest(&mut self) -> Result<Bytes> {
        self.take(self.left())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        if N > self.left() {
            return Err(malformed(format!("expected {N} bytes at offset {}, but {} remain", self.at, self.left())));
        }
        array.copy_from_slice(&self.bytes[self.at..self.at + N]);
        self.at += N;
        Ok(array)
    }

    pub fn u8(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    pub fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub fn id(&mut self) -> Result<Id> {
        Ok(Id(self.array()?))
    }

    pub fn varint(&mut self) -> Result<u64> {
        let mut value = 0u64;
        for shift in (0..70).step_by(7) {
            let byte = self.u8()?;
            let part = u64::from(byte & 0x7f);
            if shift == 63 && part > 1 {
                break;
            }
            value |= part << shift;
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(malformed(format!("the varint before offset {} does not fit in 64 bits", self.at)))
    }

    /// Read a signed varint: 0, -1, 1, -2, 2, … are 0, 1, 2, 3, 4, …
    pub fn signed(&mut self) -> Result<i64> {
        let value = self.varint()?;
        Ok((value >> 1).cast_signed() ^ -((value & 1).cast_signed()))
    }

    /// Read the count of a list whose entries take at least `each` bytes. Fails if the remaining bytes cannot hold that many entries.
    pub fn count(&mut self, each: usize) -> Result<usize> {
        let count = self.varint()?;
        if count > (self.left() / each.max(1)) as u64 {
            return Err(malformed(format!("a list claims to have {count} entries in {} bytes", self.left())));
        }
        Ok(count as usize)
    }

    pub fn list<T>(&mut self, each: usize, mut read: impl FnMut(&mut Cursor) -> Result<T>) -> Result<Vec<T>> {
        let count = self.count(each)?;
        (0..count).map(|_| read(self)).collect()
    }

    pub fn bytes(&mut self) -> Result<Bytes> {
        let count = self.count(1)?;
        self.take(count)
    }

    pub fn string(&mut self) -> Result<String> {
        let bytes = self.bytes()?;
        String::from_utf8(bytes.to_vec()).map_err(|_| malformed("a string is not UTF-8"))
    }

    /// Read a list of strings without copying them. Most strings are ASCII, so one check covers many of them. Checking each one
    /// separately would take five times as long.
    pub fn strings(&mut self) -> Result<Strings> {
        let (count, mut marks) = (self.count(1)?, Vec::new());
        let (mut stretch_end, mut ascii) = (0, false);
        for index in 0..count {
            if index % EACH_MARK == 0 {
                marks.push(
                    u32::try_from(self.at)
                        .map_err(|_| malformed(format!("a string starts at offset {}, beyond 2^32", self.at)))?,
                );
            }
            let length = self.count(1)?;
            let end = self.at + length;
            if end > stretch_end {
                stretch_end = self.bytes.len().min(end.max(self.at + STRETCH_BYTES));
                ascii = self.bytes[self.at..stretch_end].is_ascii();
            }
            if !ascii {
                std::str::from_utf8(&self.bytes[self.at..end]).map_err(|_| malformed("a string is not UTF-8"))?;
            }
            self.at = end;
        }
        Ok(Strings { bytes: self.bytes.clone(), count, marks })
    }

    /// Read a flag byte, which must be 0 or 1.
    pub fn flag(&mut self) -> Result<bool> {
        match self.u8()? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(malformed(format!("a flag byte is {other}, expected 0 or 1"))),
        }
    }

    /// Read a flag byte, and the value that follows it if it is 1.
    pub fn option<T>(&mut self, read: impl FnOnce(&mut Cursor) -> Result<T>) -> Result<Option<T>> {
        Ok(if self.flag()? { Some(read(self)?) } else { None })
    }

    /// Read a list of varints.
    pub fn varints(&mut self) -> Result<Vec<u64>> {
        self.list(1, Cursor::varint)
    }

    pub fn end(&self) -> Result<()> {
        match self.left() {
            0 => Ok(()),
            left => Err(malformed(format!("{left} bytes remain at offset {}, expected the end", self.at))),
        }
    }
}

/// Number of strings per stored offset. A look-up starts at the last stored offset at or before the string.
const EACH_MARK: usize = 16;

/// Number of bytes that one ASCII check covers.
const STRETCH_BYTES: usize = 4096;

/// A list of strings that are read in place from their object. Each string is checked once, when the list is read.
#[derive(Debug, Clone, Default)]
pub struct Strings {
    bytes: Bytes,
    count: usize,
    /// Offset of the length prefix of every `EACH_MARK`th string.
    marks: Vec<u32>,
}

impl Strings {
    pub fn len(&self) -> usize {
        self.count
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Return the string at `index`, or None if `index` is out of range.
    pub fn get(&self, index: usize) -> Option<&str> {
        let begin = *self.marks.get(index / EACH_MARK)? as usize;
        let mut rest =
            Rest { bytes: &self.bytes[begin..], left: (self.count - index / EACH_MARK * EACH_MARK).min(EACH_MARK) };
        rest.nth(index % EACH_MARK)
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        let begin = self.marks.first().map_or(0, |mark| *mark as usize);
        Rest { bytes: &self.bytes[begin..], left: self.count }
    }

    /// Return how many bytes of memory this list occupies in addition to the object.
    pub fn held_bytes(&self) -> u64 {
        size_of_val(&self.marks[..]) as u64
    }
}

/// An iterator over consecutive strings.
struct Rest<'a> {
    bytes: &'a [u8],
    left: usize,
}

impl<'a> Iterator for Rest<'a> {
    type Item = &'a str;

    fn next(&mut self) -> Option<&'a str> {
        self.left = self.left.checked_sub(1)?;
        let (mut length, mut at) = (0usize, 0);
        loop {
            let byte = *self.bytes.get(at)?;
            length |= usize::from(byte & 0x7f) << (7 * at);
            at += 1;
            if byte & 0x80 == 0 {
                break;
            }
        }
        let (text, rest) = self.bytes[at..].split_at(length);
        self.bytes = rest;
        std::str::from_utf8(text).ok()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Rest<'_> {}

/// The counterpart of [`Cursor`] for writing.
#[derive(Default)]
pub struct Writer(pub Vec<u8>);

impl Writer {
    /// Return the bytes that `write` writes.
    pub fn written(write: impl FnOnce(&mut Writer)) -> Vec<u8> {
        let mut writer = Writer::default();
        write(&mut writer);
        writer.0
    }

    pub fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub fn u16(&mut self, value: u16) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub fn u32(&mut self, value: u32) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub fn u64(&mut self, value: u64) {
        self.0.extend_from_slice(&value.to_le_bytes());
    }

    pub fn id(&mut self, id: Id) {
        self.0.extend_from_slice(&id.0);
    }

    pub fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    /// Write what `Cursor::signed` reads.
    pub fn signed(&mut self, value: i64) {
        self.varint((value << 1 ^ value >> 63).cast_unsigned());
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.varint(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }

    pub fn string(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    pub fn list<T>(&mut self, items: &[T], mut write: impl FnMut(&mut Writer, &T)) {
        self.varint(items.len() as u64);
        for item in items {
            write(self, item);
        }
    }

    /// Write what `Cursor::option` reads.
    pub fn option<T>(&mut self, item: Option<T>, write: impl FnOnce(&mut Writer, T)) {
        self.u8(item.is_some().into());
        if let Some(item) = item {
            write(self, item);
        }
    }

    /// Write a list of varints.
    pub fn varints(&mut self, values: &[u64]) {
        self.list(values, |writer, value| writer.varint(*value));
    }
}

/// The kind of the metadata object in an envelope.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Magic {
    Record,
    Root,
    Page,
    Words,
    RowIds,
    Names,
    Stage,
    Stages,
    Statistics,
    Attachment,
    Forwarding,
}

impl Magic {
    /// Return the first bytes of the object, and what messages call it.
    fn bytes_and_noun(self) -> (&'static [u8; 4], &'static str) {
        match self {
            Magic::Record => (b"PNSL", "commit record"),
            Magic::Root => (b"PNSR", "manifest root"),
            Magic::Page => (b"PNSP", "manifest page"),
            Magic::Words => (b"PNSW", "words object"),
            Magic::RowIds => (b"PNSO", "row ids"),
            Magic::Names => (b"PNSN", "names record"),
            Magic::Stage => (b"PNSG", "stage"),
            Magic::Stages => (b"PNST", "stages object"),
            Magic::Statistics => (b"PNSS", "statistics object"),
            Magic::Attachment => (b"PNSA", "attachment"),
            Magic::Forwarding => (b"PNSF", "forwarding object"),
        }
    }

    pub fn bytes(self) -> &'static [u8; 4] {
        self.bytes_and_noun().0
    }
}

const VERSION: u16 = 2;
const HEADER_BYTES: usize = 8;
const CRC_BYTES: usize = 4;

/// Wrap a body in the envelope of spec section 1.
pub fn seal(magic: Magic, body: impl FnOnce(&mut Writer)) -> Vec<u8> {
    Writer::written(|writer| {
        writer.0.extend_from_slice(magic.bytes());
        writer.u16(VERSION);
        writer.u16(0); // Reserved.
        body(writer);
        writer.u32(crc(&writer.0));
    })
}

/// Check an envelope and read its body, which `body` must read to the end.
pub fn unseal<T>(magic: Magic, bytes: &Bytes, body: impl FnOnce(&mut Cursor) -> Result<T>) -> Result<T> {
    let mut cursor = open_envelope(magic, bytes)?;
    let read = body(&mut cursor)?;
    cursor.end()?;
    Ok(read)
}

/// Check an envelope and return a cursor over its body.
fn open_envelope(magic: Magic, bytes: &Bytes) -> Result<Cursor> {
    let (expected_start, noun) = magic.bytes_and_noun();
    if bytes.len() < HEADER_BYTES + CRC_BYTES {
        return Err(Error::new(
            "object-truncated",
            format!("cannot read {noun}: {} bytes, expected at least {}", bytes.len(), HEADER_BYTES + CRC_BYTES),
        ));
    }
    let end = bytes.len() - CRC_BYTES;
    let mut trailer = Cursor::new(bytes.slice(end..));
    let (found, expected) = (crc(&bytes[..end]), trailer.u32()?);
    if found != expected {
        return Err(Error::new(
            "object-checksum",
            format!("cannot read {noun}: crc32c {found:#010x}, expected {expected:#010x}"),
        ));
    }
    let mut cursor = Cursor::new(bytes.slice(..end));
    let start = cursor.take(4)?;
    if &start[..] != expected_start {
        return Err(malformed(format!("cannot read {noun}: magic {:?}, expected {expected_start:?}", &start[..])));
    }
    let version = cursor.u16()?;
    if version != VERSION {
        let hint = match version < VERSION {
            true => "it was made before the first release; import its sources again with `penstock import`",
            false => "a newer Penstock wrote this dataset; upgrade Penstock",
        };
        let text = format!("cannot read {noun}: format version {version}, expected {VERSION}");
        return Err(Error::new("unsupported-format", text).hint(hint));
    }
    if cursor.u16()? != 0 {
        return Err(malformed(format!("cannot read {noun}: reserved bytes are not zero")));
    }
    Ok(cursor)
}
