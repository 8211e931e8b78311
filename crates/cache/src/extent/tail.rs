//! The identity of an extent, the layout of its file, and the end of the file: the identity, a note of its owner, and a footer.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use super::pages::{EXTENT_BYTES, PAGE_BYTES, STRETCH_BYTES};
use crate::place::mix;

const MAGIC: &[u8; 8] = b"PSEXT\0\0\x01";
pub const FOOTER_BYTES: u64 = 32;
/// Limit on an identity and a note: an S3 key has at most 1,024 bytes, and a store's root is a path or a URI.
const MOST_TAIL_BYTES: u64 = 16 << 10;

/// Return how caches name the store with this identity. Their keys have a line for each part.
pub fn store_key(identity: &str) -> String {
    identity.replace('\n', " ")
}

/// The identity of a part of an object: its store, name and version, and its place in the object.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Key {
    /// Store, name and version, on a line each.
    pub identity: String,
    pub extent: u32,
}

impl Key {
    pub fn new(store: &str, name: &str, version: &str, extent: u32) -> Key {
        Key { identity: format!("{store}\n{name}\n{version}"), extent }
    }

    /// Return a hash that identifies the extent. Checksums and locks depend on it.
    pub fn hash(&self) -> u64 {
        self.hash_of(&self.identity)
    }

    /// Return a hash for the place of the extent. All versions of an object share it, so that one place shows which version is cached. Two keys with
    /// the same place only push each other out, because the footer has the identity.
    pub fn place(&self) -> u64 {
        let object = self.store().len() + 1 + object_of(self.name()).len();
        let unversioned = [&self.identity[..object], "\n"].concat();
        self.hash_of(if unversioned.len() < self.identity.len() { &unversioned } else { &self.identity })
    }

    /// Return whether the name has a version, so that other keys share its place.
    pub fn is_versioned(&self) -> bool {
        self.name().contains('?')
    }

    fn hash_of(&self, identity: &str) -> u64 {
        crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, identity.as_bytes()) ^ mix(u64::from(self.extent))
    }

    pub fn store(&self) -> &str {
        self.identity.split('\n').next().unwrap_or_default()
    }

    pub fn name(&self) -> &str {
        self.identity.split('\n').nth(1).unwrap_or_default()
    }
}

/// Return the name of an object without its version, which follows a `?`.
pub fn object_of(name: &str) -> &str {
    name.split_once('?').map_or(name, |(object, _)| object)
}

/// Where the parts of an extent's file begin.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExtentLayout {
    pub data_bytes: u64,
    pub table: u64,
    pub stamps: u64,
    pub identity: u64,
    pub footer: u64,
}

impl ExtentLayout {
    pub fn of(object_bytes: u64, extent: u32, identity_bytes: u64, note_bytes: u64) -> Option<ExtentLayout> {
        let data_bytes = object_bytes.checked_sub(u64::from(extent) * EXTENT_BYTES)?.min(EXTENT_BYTES);
        let table = data_bytes.next_multiple_of(8);
        let stamps = table + 4 * data_bytes.div_ceil(PAGE_BYTES);
        let identity = stamps + 4 * data_bytes.div_ceil(STRETCH_BYTES);
        let layout =
            ExtentLayout { data_bytes, table, stamps, identity, footer: identity + identity_bytes + note_bytes };
        (data_bytes > 0 && identity_bytes + note_bytes <= MOST_TAIL_BYTES).then_some(layout)
    }

    pub fn file_bytes(&self) -> u64 {
        self.footer + FOOTER_BYTES
    }

    pub fn overhead_bytes(&self, file_bytes: u64) -> u64 {
        file_bytes.saturating_sub(self.table).next_multiple_of(PAGE_BYTES) + 2 * PAGE_BYTES
    }
}

/// What the end of a file says.
pub struct Tail {
    pub layout: ExtentLayout,
    pub object_bytes: u64,
    pub key: Key,
    pub note: Vec<u8>,
}

/// Return the end of a file, from the identity on.
pub fn tail(key: &Key, object_bytes: u64, note: &[u8]) -> Vec<u8> {
    let mut tail = [key.identity.as_bytes(), note].concat();
    let mut footer = Vec::with_capacity(FOOTER_BYTES as usize);
    footer.extend_from_slice(MAGIC);
    footer.extend_from_slice(&object_bytes.to_le_bytes());
    footer.extend_from_slice(&key.extent.to_le_bytes());
    footer.extend_from_slice(&(key.identity.len() as u32).to_le_bytes());
    footer.extend_from_slice(&(note.len() as u32).to_le_bytes());
    footer.extend_from_slice(&crc_of_footer(&tail, &footer).to_le_bytes());
    tail.extend_from_slice(&footer);
    tail
}

/// Read the end of a file. Returns None if it is damaged. Cost: three calls.
pub fn read_tail(file: &File) -> io::Result<Option<Tail>> {
    let Some(footer_at) = file.metadata()?.len().checked_sub(FOOTER_BYTES) else { return Ok(None) };
    let mut footer = [0; FOOTER_BYTES as usize];
    if !is_read(file.read_exact_at(&mut footer, footer_at))? {
        return Ok(None);
    }
    let (words, _) = footer.as_chunks::<4>();
    let [_, _, low, high, extent, identity_bytes, note_bytes, crc] =
        std::array::from_fn(|at| u32::from_le_bytes(words[at]));
    let object_bytes = u64::from(low) | u64::from(high) << 32;
    let (identity_bytes, note_bytes) = (u64::from(identity_bytes), u64::from(note_bytes));
    let layout = ExtentLayout::of(object_bytes, extent, identity_bytes, note_bytes);
    let Some(layout) = layout.filter(|layout| layout.footer == footer_at) else { return Ok(None) };
    let mut identity = vec![0; (identity_bytes + note_bytes) as usize];
    if !is_read(file.read_exact_at(&mut identity, layout.identity))?
        || &footer[..8] != MAGIC
        || crc != crc_of_footer(&identity, &footer)
    {
        return Ok(None);
    }
    let note = identity.split_off(identity_bytes as usize);
    let Ok(identity) = String::from_utf8(identity) else { return Ok(None) };
    Ok(Some(Tail { layout, object_bytes, key: Key { identity, extent }, note }))
}

fn crc_of_footer(identity: &[u8], footer: &[u8]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    digest.update(identity);
    digest.update(&footer[..28]);
    digest.finalize() as u32
}

/// Return whether all bytes were read. Another process may have cut the file.
fn is_read(read: io::Result<()>) -> io::Result<bool> {
    match read {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        other => other.map(|()| true),
    }
}
