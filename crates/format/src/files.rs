//! References to data files, as fragments and overlays list them (spec section 5).

use std::collections::HashSet;

use penstock_error::{Error, Result};

use crate::cursor::{Cursor, Writer, malformed};
use crate::id::Id;

/// A reference to a data file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileRef {
    pub id: Id,
    pub file_bytes: u64,
    pub tail_bytes: u64,
    pub tail_crc: u32,
    pub columns: Vec<u64>,
}

impl FileRef {
    /// Parse the files of a fragment or an overlay. Each file and each column may be listed once.
    pub fn parse_list(cursor: &mut Cursor) -> Result<Vec<FileRef>> {
        let files = cursor.list(22, |cursor| {
            match cursor.u8()? {
                0 => {}
                other => return Err(Error::new("unknown-feature", format!("a data file reference has the unknown kind {other}"))),
            }
            Ok(FileRef {
                id: cursor.id()?,
                file_bytes: cursor.varint()?,
                tail_bytes: cursor.varint()?,
                tail_crc: cursor.u32()?,
                columns: cursor.list(1, Cursor::varint)?,
            })
        })?;
        let mut named = HashSet::new();
        if !files.iter().all(|file: &FileRef| file.columns.iter().all(|column| named.insert(*column))) {
            return Err(malformed("a fragment or overlay refers to a column twice"));
        }
        let mut ids = HashSet::new();
        if !files.iter().all(|file: &FileRef| ids.insert(file.id)) {
            return Err(malformed("a fragment or overlay refers to a data file twice"));
        }
        Ok(files)
    }

    pub fn write_list(files: &[FileRef], writer: &mut Writer) {
        writer.list(files, |writer, file| {
            writer.u8(0);
            writer.id(file.id);
            writer.varint(file.file_bytes);
            writer.varint(file.tail_bytes);
            writer.u32(file.tail_crc);
            writer.list(&file.columns, |writer, column| writer.varint(*column));
        });
    }
}
