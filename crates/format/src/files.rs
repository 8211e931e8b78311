//! References to data files, as fragments and overlays list them (spec section 5).

use std::collections::HashSet;

use bytes::Bytes;
use penstock_error::{Error, Result};

use crate::cursor::{Cursor, Magic, Writer, malformed, unseal};
use crate::id::Id;
use crate::ids::{RECORD_BYTES, data_name, record_name};

/// Data files of a transaction that have at most this many bytes together are stored in the commit record.
pub const INLINE_DATA_BYTES: u64 = 2048;

/// Where a data file is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FilePlace {
    /// In an object of its own, which is named by the file's id.
    Object,
    /// In the manifest page, or in the root. A transaction's file is in memory until it is stored.
    Inline(Bytes),
    /// In a commit record, beginning at this byte of the record.
    Record { branch: u64, number: u64, offset: u64 },
}

impl FilePlace {
    /// Return what has the data file `id`, for messages.
    pub fn shown(&self, id: Id) -> String {
        match self {
            FilePlace::Object => data_name(id),
            FilePlace::Inline(_) => format!("d/{id}, which is in a page or a root"),
            FilePlace::Record { branch, number, .. } => record_name(*branch, *number),
        }
    }
}

/// A reference to a data file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRef {
    pub id: Id,
    pub file_bytes: u64,
    pub tail_bytes: u64,
    pub tail_crc: u32,
    pub columns: Vec<u64>,
    pub place: FilePlace,
}

impl FileRef {
    /// Parse the files of a fragment or an overlay. Each file and each column may be listed once.
    pub fn parse_list(cursor: &mut Cursor) -> Result<Vec<FileRef>> {
        let files = cursor.list(22, |cursor| {
            let kind = cursor.u8()?;
            let (id, file_bytes, tail_bytes, tail_crc) =
                (cursor.id()?, cursor.varint()?, cursor.varint()?, cursor.u32()?);
            let columns = cursor.varints()?;
            let place = match kind {
                0 => FilePlace::Object,
                1 => FilePlace::Inline(cursor.bytes()?),
                2 => FilePlace::Record { branch: cursor.varint()?, number: cursor.varint()?, offset: cursor.varint()? },
                other => {
                    return Err(Error::new(
                        "unknown-feature",
                        format!("a data file reference has unknown kind {other}"),
                    ));
                }
            };
            let fits = match &place {
                FilePlace::Object => true,
                FilePlace::Inline(bytes) => bytes.len() as u64 == file_bytes && file_bytes <= INLINE_DATA_BYTES,
                FilePlace::Record { offset, .. } => file_bytes <= INLINE_DATA_BYTES && *offset <= RECORD_BYTES as u64,
            };
            match fits {
                true => Ok(FileRef { id, file_bytes, tail_bytes, tail_crc, columns, place }),
                false => Err(malformed(format!("a data file of {file_bytes} bytes cannot be at {place:?}"))),
            }
        })?;
        let (mut columns, mut ids) = (HashSet::new(), HashSet::new());
        if !files.iter().flat_map(|file| &file.columns).all(|column| columns.insert(*column)) {
            return Err(malformed("a fragment or overlay refers to a column twice"));
        }
        if !files.iter().all(|file: &FileRef| ids.insert(file.id)) {
            return Err(malformed("a fragment or overlay refers to a data file twice"));
        }
        Ok(files)
    }

    pub fn write_list(files: &[FileRef], writer: &mut Writer) {
        writer.list(files, |writer, file| {
            writer.u8(match file.place {
                FilePlace::Object => 0,
                FilePlace::Inline(_) => 1,
                FilePlace::Record { .. } => 2,
            });
            writer.id(file.id);
            writer.varint(file.file_bytes);
            writer.varint(file.tail_bytes);
            writer.u32(file.tail_crc);
            writer.varints(&file.columns);
            match &file.place {
                FilePlace::Object => {}
                FilePlace::Inline(bytes) => writer.bytes(bytes),
                FilePlace::Record { branch, number, offset } => {
                    [branch, number, offset].into_iter().for_each(|value| writer.varint(*value))
                }
            }
        });
    }

    /// Return the name of the object that has the file, and the offset there. If the file is in memory, this is the name that it would have.
    pub fn object(&self) -> (String, u64) {
        match self.place {
            FilePlace::Object | FilePlace::Inline(_) => (data_name(self.id), 0),
            FilePlace::Record { branch, number, offset } => (record_name(branch, number), offset),
        }
    }

    /// Return whether the file is an object of its own.
    pub fn is_object(&self) -> bool {
        self.place == FilePlace::Object
    }
}

/// A reader follows at most this many forwarding objects in a row.
pub const FORWARDINGS: usize = 8;

/// Parse the forwarding object of a data file. Returns the file that takes its place.
pub fn parse_forwarding(bytes: &Bytes, from: &FileRef) -> Result<FileRef> {
    let (found, file) = unseal(Magic::Forwarding, bytes, |cursor| {
        let found = cursor.id()?;
        let (id, file_bytes, tail_bytes, tail_crc) = (cursor.id()?, cursor.varint()?, cursor.varint()?, cursor.u32()?);
        Ok((
            found,
            FileRef { id, file_bytes, tail_bytes, tail_crc, columns: from.columns.clone(), place: FilePlace::Object },
        ))
    })?;
    match found == from.id {
        true => Ok(file),
        false => Err(malformed(format!("it is the forwarding object of data file `{found}`"))),
    }
}
