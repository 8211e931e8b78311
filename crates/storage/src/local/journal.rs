//! A journal: a local file of frames, each of which is durable before the next one is added. It knows nothing about their content.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, IoSlice, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use penstock_error::{Error, Result};

use crate::kernel;

/// A head precedes each body: the length of the body, the CRC-32C of the length and of the head's place, and that of the body. Frames begin at
/// multiples of its size, so that a head is in one sector of the disk.
const HEAD_BYTES: u64 = 16;

/// The file begins with this.
const MAGIC: &[u8; HEAD_BYTES as usize] = b"PNSTKJ1\n\0\0\0\0\0\0\0\0";

pub struct Journal {
    file: File,
    path: PathBuf,
    /// The end of the frames that count, and of what was written.
    end: u64,
    written: u64,
    /// The head of a frame whose body is written, but which does not count yet.
    head: Option<[u8; HEAD_BYTES as usize]>,
}

impl Journal {
    /// Open a journal, or create it, and lock it against other processes. `read_frame` returns its frames.
    pub fn open(path: &Path) -> Result<Journal> {
        if path.as_os_str().is_empty() || path.as_os_str().as_encoded_bytes().contains(&0) {
            let text = format!("cannot open the journal {path:?}: the path is empty or contains a null character");
            return Err(Error::new("invalid-argument", text));
        }
        // The folder in which the process is may change.
        let path = std::path::absolute(path).map_err(|error| failure(path, "open", &error))?;
        let failed = |error: io::Error| failure(&path, "open", &error);
        let mut file = loop {
            let file =
                OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path).map_err(failed)?;
            match kernel::flock(&file, true) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    let text = format!("cannot open the journal `{}`: another transaction uses it", path.display());
                    return Err(Error::new("journal-in-use", text).hint(
                        "give each transaction a journal of its own, or wait until the other process and its forks end",
                    ));
                }
                locked => locked.map_err(failed)?,
            }
            // The last user may have deleted it before the lock was free.
            if is_at(&file, &path).map_err(failed)? {
                break file;
            }
        };
        let path = path.canonicalize().map_err(failed)?;
        let failed = |error: io::Error| failure(&path, "open", &error);
        let length = file.metadata().map_err(failed)?.len();
        let mut head = vec![0; length.min(HEAD_BYTES) as usize];
        file.read_exact(&mut head).map_err(failed)?;
        if *head != MAGIC[..head.len()] {
            let text = format!("cannot open the journal `{}`: it is not a journal", path.display());
            return Err(Error::new("invalid-argument", text)
                .hint("give the path of a new file, or of a journal that a transaction left behind"));
        }
        if length < HEAD_BYTES {
            // A new file, or one whose creator ended before its first frame.
            file.seek(SeekFrom::Start(0))
                .and_then(|_| file.write_all(MAGIC))
                .and_then(|()| file.sync_all())
                .map_err(failed)?;
            let folder = path.parent().unwrap_or(Path::new("/"));
            File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
        }
        Ok(Journal { file, path, end: HEAD_BYTES, written: length.max(HEAD_BYTES), head: None })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Return the next frame. After the last one, cut off what was not finished, and return None: frames can be added from then on.
    pub fn read_frame(&mut self) -> Result<Option<Bytes>> {
        if let Some((body, end)) = self.frame_at(self.end)? {
            self.end = end;
            if end > self.written {
                // Only padding is missing.
                self.file.set_len(end).map_err(|error| failure(&self.path, "write", &error))?;
                self.written = end;
            }
            return Ok(Some(body));
        }
        // Each frame is synced before the next one is written, so only the last one may be unfinished. Nothing may follow it.
        for later in (self.end + HEAD_BYTES..self.written).step_by(HEAD_BYTES as usize) {
            if self.frame_at(later)?.is_some() {
                let text = format!(
                    "cannot read the journal `{}`: the frame at byte {} is damaged",
                    self.path.display(),
                    self.end
                );
                return Err(Error::new("object-checksum", text)
                    .hint("restore the file from a copy, or delete it to discard its changes"));
            }
        }
        self.undo()?;
        // The last process may have ended before its last sync.
        self.file.sync_all().map_err(|error| failure(&self.path, "sync", &error))?;
        Ok(None)
    }

    /// Return the body of the frame that begins here, and its end. Returns None if the frame is not whole.
    fn frame_at(&mut self, begin: u64) -> Result<Option<(Bytes, u64)>> {
        let left = self.written.saturating_sub(begin);
        let mut head = [0; HEAD_BYTES as usize];
        if left < HEAD_BYTES {
            return Ok(None);
        }
        self.read_at(begin, &mut head)?;
        let length = head.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        if head[8..12] != sum(&[&head[..8], &begin.to_le_bytes()]).to_le_bytes() || length > left - HEAD_BYTES {
            return Ok(None);
        }
        let mut body = vec![0; length as usize];
        self.read_at(begin + HEAD_BYTES, &mut body)?;
        let end = begin + HEAD_BYTES + length.next_multiple_of(HEAD_BYTES);
        Ok((head[12..] == sum(&[&body]).to_le_bytes()).then(|| (body.into(), end)))
    }

    fn read_at(&mut self, begin: u64, bytes: &mut [u8]) -> Result<()> {
        let found = self.file.seek(SeekFrom::Start(begin)).and_then(|_| self.file.read_exact(bytes));
        found.map_err(|error| failure(&self.path, "read", &error))
    }

    /// Write the body of a frame. The frame counts once `sync` succeeds, and `undo` removes it.
    pub fn add(&mut self, parts: &[&[u8]]) -> Result<()> {
        let length = parts.iter().map(|part| part.len() as u64).sum::<u64>();
        let mut head = [0; HEAD_BYTES as usize];
        head[..8].copy_from_slice(&length.to_le_bytes());
        let place = sum(&[&length.to_le_bytes(), &self.end.to_le_bytes()]);
        head[8..12].copy_from_slice(&place.to_le_bytes());
        head[12..].copy_from_slice(&sum(parts).to_le_bytes());
        let pad = vec![0; (length.next_multiple_of(HEAD_BYTES) - length) as usize];
        let written = self.file.seek(SeekFrom::Start(self.end)).and_then(|_| {
            let empty = [0; HEAD_BYTES as usize];
            let mut slices: Vec<IoSlice> =
                [&empty[..]].into_iter().chain(parts.iter().copied()).chain([&pad[..]]).map(IoSlice::new).collect();
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
        self.written = self.end + HEAD_BYTES + length.next_multiple_of(HEAD_BYTES);
        self.head = Some(head);
        written.map_err(|error| {
            let _ = self.undo(); // A body without a head does not count.
            failure(&self.path, "write", &error)
        })
    }

    /// Let the last frame count, and make it durable. If this fails, the frame is removed.
    pub fn sync(&mut self) -> Result<()> {
        let Some(head) = self.head.take() else { return Ok(()) };
        let written = self.file.seek(SeekFrom::Start(self.end)).and_then(|_| self.file.write_all(&head));
        match written.and_then(|()| self.file.sync_data()) {
            Ok(()) => {
                self.end = self.written;
                Ok(())
            }
            Err(error) => {
                // Either of these makes the frame one that does not count.
                let _ = self
                    .file
                    .seek(SeekFrom::Start(self.end))
                    .and_then(|_| self.file.write_all(&[0; HEAD_BYTES as usize]));
                let _ = self.undo();
                Err(failure(&self.path, "sync", &error))
            }
        }
    }

    /// Remove the last frame, which does not count.
    pub fn undo(&mut self) -> Result<()> {
        self.head = None;
        if self.written > self.end {
            self.file.set_len(self.end).map_err(|error| failure(&self.path, "cut", &error))?;
            self.written = self.end;
        }
        Ok(())
    }

    /// Delete the file, unless another one has its name, and release the lock.
    pub fn remove(self) -> Result<()> {
        let gone = |error: &io::Error| error.kind() == ErrorKind::NotFound;
        match is_at(&self.file, &self.path)
            .and_then(|is_at| if is_at { std::fs::remove_file(&self.path) } else { Ok(()) })
        {
            Err(error) if !gone(&error) => Err(failure(&self.path, "delete", &error)),
            _ => Ok(()),
        }
    }
}

/// Return whether a path leads to this file.
fn is_at(file: &File, path: &Path) -> io::Result<bool> {
    let own = file.metadata()?;
    match std::fs::metadata(path) {
        Ok(found) => Ok((found.dev(), found.ino()) == (own.dev(), own.ino())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
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
        ErrorKind::IsADirectory | ErrorKind::InvalidInput | ErrorKind::InvalidFilename | ErrorKind::NotADirectory => {
            Error::new("invalid-argument", text).hint("give the path of a file")
        }
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => Error::new("no-space", text)
            .hint("free space, and open the journal again: it has all changes before this one"),
        _ => Error::new("storage-failed", text).hint("open the journal again: it has all changes before this one"),
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
        // A frame whose body alone was written does not count.
        let mut refused = whole.clone();
        refused.extend([&[0; 16][..], b"a body without.."].concat());
        std::fs::write(&path, &refused).unwrap();
        assert_eq!(frames(&path)?.1, expected);
        assert_eq!(std::fs::read(&path).unwrap(), whole);
        // Zeros in the middle are damage.
        for begin in (0..last).step_by(16) {
            let mut zeroed = whole.clone();
            zeroed[begin..begin + 16].fill(0);
            std::fs::write(&path, &zeroed).unwrap();
            assert!(frames(&path).is_err(), "{begin}");
            assert_eq!(std::fs::read(&path).unwrap(), zeroed);
        }
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
