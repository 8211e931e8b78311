//! A journal: a local file of frames, each of which is durable before the next one is added. It knows nothing about their content.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, IoSlice, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use penstock_error::{Error, Result};

use crate::kernel;

/// A head precedes each body: the length of the body, the CRC-32C of the length, and that of the body. Frames begin at multiples of its size, so
/// that a head is in one sector of the disk.
const HEAD_BYTES: u64 = 16;

/// The file begins with this.
const MAGIC: &[u8; HEAD_BYTES as usize] = b"PNSTKJ1\n\0\0\0\0\0\0\0\0";

pub struct Journal {
    file: File,
    path: PathBuf,
    /// The end of the durable frames, and of those that were written.
    durable: u64,
    written: u64,
    /// Where the next frame is read.
    read: u64,
}

impl Journal {
    /// Open a journal, or create it, and lock it against other processes. `read_frame` returns its frames.
    pub fn open(path: &Path) -> Result<Journal> {
        let failed = |error: io::Error| failure(path, "open", &error);
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).map_err(failed)?;
        match kernel::flock(&file, true) {
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                let text = format!("cannot open the journal `{}`: another transaction uses it", path.display());
                return Err(
                    Error::new("journal-in-use", text).hint("give each transaction a journal of its own, or wait until the other one ends")
                );
            }
            locked => locked.map_err(failed)?,
        }
        let length = file.metadata().map_err(failed)?.len();
        let mut head = [0; MAGIC.len()];
        if length < head.len() as u64 {
            // A new file, or one whose creator ended before its first frame.
            file.set_len(0).and_then(|()| file.write_all(MAGIC)).and_then(|()| file.sync_all()).map_err(failed)?;
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
        } else {
            file.read_exact(&mut head).map_err(failed)?;
            if head != *MAGIC {
                let text = format!("cannot open the journal `{}`: it is not a journal", path.display());
                return Err(
                    Error::new("invalid-argument", text).hint("give the path of a new file, or of a journal that a transaction left")
                );
            }
        }
        let begin = MAGIC.len() as u64;
        Ok(Journal { file, path: path.to_owned(), durable: begin, written: length.max(begin), read: begin })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Return the next frame. After the last one, cut off an incomplete frame, and return None: frames can be added from then on.
    pub fn read_frame(&mut self) -> Result<Option<Bytes>> {
        let left = self.written - self.read;
        let mut head = [0; HEAD_BYTES as usize];
        if left >= HEAD_BYTES {
            self.read_at(self.read, &mut head)?;
        }
        if left >= HEAD_BYTES && head != [0; HEAD_BYTES as usize] {
            let length = length_of(&head);
            if head[8..12] != sum(&[&head[..8]]).to_le_bytes() {
                return Err(self.damaged());
            }
            if length.next_multiple_of(HEAD_BYTES) <= left - HEAD_BYTES {
                let mut body = vec![0; length as usize];
                self.read_at(self.read + HEAD_BYTES, &mut body)?;
                let end = self.read + HEAD_BYTES + length.next_multiple_of(HEAD_BYTES);
                if head[12..] == sum(&[&body]).to_le_bytes() {
                    self.read = end;
                    return Ok(Some(body.into()));
                }
                // Each frame is synced before the next one is written, so only the last one may be incomplete.
                if end < self.written {
                    return Err(self.damaged());
                }
            }
        }
        self.durable = self.read;
        self.undo()?;
        Ok(None)
    }

    fn damaged(&self) -> Error {
        let text = format!("cannot read the journal `{}`: the frame at byte {} is damaged", self.path.display(), self.read);
        Error::new("object-checksum", text).hint("restore the file from a copy, or delete it to discard its changes")
    }

    fn read_at(&mut self, begin: u64, bytes: &mut [u8]) -> Result<()> {
        let found = self.file.seek(SeekFrom::Start(begin)).and_then(|_| self.file.read_exact(bytes));
        found.map_err(|error| failure(&self.path, "read", &error))
    }

    /// Write a frame. It counts once `sync` succeeds, and `undo` removes it.
    pub fn add(&mut self, parts: &[&[u8]]) -> Result<()> {
        let length: u64 = parts.iter().map(|part| part.len() as u64).sum();
        let mut head = [0; HEAD_BYTES as usize];
        head[..8].copy_from_slice(&length.to_le_bytes());
        let crcs = [sum(&[&length.to_le_bytes()]), sum(parts)];
        head[8..12].copy_from_slice(&crcs[0].to_le_bytes());
        head[12..].copy_from_slice(&crcs[1].to_le_bytes());
        let pad = vec![0; (length.next_multiple_of(HEAD_BYTES) - length) as usize];
        let written = self.file.seek(SeekFrom::Start(self.durable)).and_then(|_| {
            let mut slices: Vec<IoSlice> =
                [&head[..]].into_iter().chain(parts.iter().copied()).chain([&pad[..]]).map(IoSlice::new).collect();
            let mut rest = &mut slices[..];
            IoSlice::advance_slices(&mut rest, 0);
            while !rest.is_empty() {
                match self.file.write_vectored(rest) {
                    Ok(0) => return Err(ErrorKind::WriteZero.into()),
                    Ok(count) => IoSlice::advance_slices(&mut rest, count),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(())
        });
        self.written = self.durable + HEAD_BYTES + length.next_multiple_of(HEAD_BYTES);
        written.map_err(|error| {
            let _ = self.undo(); // A frame that remains is incomplete.
            failure(&self.path, "write", &error)
        })
    }

    /// Make the last frame durable.
    pub fn sync(&mut self) -> Result<()> {
        self.file.sync_data().map_err(|error| failure(&self.path, "sync", &error))?;
        self.durable = self.written;
        Ok(())
    }

    /// Remove the last frame, which was not synced.
    pub fn undo(&mut self) -> Result<()> {
        self.file.set_len(self.durable).map_err(|error| failure(&self.path, "cut", &error))?;
        self.written = self.durable;
        Ok(())
    }

    /// Delete the file, and release the lock.
    pub fn remove(self) -> Result<()> {
        std::fs::remove_file(&self.path).map_err(|error| failure(&self.path, "delete", &error))
    }
}

fn length_of(head: &[u8]) -> u64 {
    head.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

fn sum(parts: &[&[u8]]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    parts.iter().for_each(|part| digest.update(part));
    digest.finalize() as u32
}

fn failure(path: &Path, verb: &str, error: &io::Error) -> Error {
    let text = format!("cannot {verb} the journal `{}`: {error}", path.display());
    match error.kind() {
        ErrorKind::NotFound => Error::new("source-not-found", text).hint("create the folder first"),
        ErrorKind::PermissionDenied => Error::new("permission-denied", text),
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => {
            Error::new("no-space", text).hint("free space, and open the journal again: it has all changes before this one")
        }
        _ => Error::new("storage-failed", text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frames(path: &Path) -> Result<(Journal, Vec<Bytes>)> {
        let (mut journal, mut found) = (Journal::open(path)?, Vec::new());
        while let Some(frame) = journal.read_frame()? {
            found.push(frame);
        }
        Ok((journal, found))
    }

    #[test]
    fn an_incomplete_last_frame_is_cut_off_and_other_damage_is_an_error() -> Result<()> {
        let folder = std::env::temp_dir().join(format!("penstock-journal-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("journal");
        let (mut journal, found) = frames(&path)?;
        assert!(found.is_empty() && Journal::open(&path).is_err_and(|error| error.code() == "journal-in-use"));
        for parts in [[&b"one"[..], b" two"], [b"", b""], [b"refused", b""], [b"three", b"!"]] {
            journal.add(&parts)?;
            if parts[0] == b"refused" { journal.undo()? } else { journal.sync()? }
        }
        drop(journal);
        let expected = [&b"one two"[..], b"", b"three!"];
        assert_eq!(frames(&path)?.1, expected);
        let whole = std::fs::read(&path).unwrap();
        let last = whole.len() - 32;
        for length in 0..whole.len() {
            std::fs::write(&path, &whole[..length]).unwrap();
            let (mut journal, found) = frames(&path)?;
            assert_eq!(found, expected[..found.len()], "{length}");
            journal.add(&[b"more"])?;
            journal.sync()?;
            drop(journal);
            assert_eq!(frames(&path)?.1.last().unwrap(), &b"more"[..], "{length}");
        }
        for byte in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[byte] ^= 1;
            std::fs::write(&path, &damaged).unwrap();
            match frames(&path) {
                // The last frame may be incomplete, and nothing depends on padding.
                Ok((_, found)) => assert!((byte >= last && found.len() == 2) || found == expected, "{byte}"),
                Err(error) => assert!(["object-checksum", "invalid-argument"].contains(&error.code())),
            }
        }
        std::fs::remove_dir_all(&folder).unwrap();
        Ok(())
    }
}
