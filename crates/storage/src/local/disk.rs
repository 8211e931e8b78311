//! The operating system's file system.

use std::fs;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::time::UNIX_EPOCH;

use bytes::Bytes;
use memmap2::MmapMut;

use super::file_system::{File, FileSystem, HeldFolder};
use super::write_behind::DiskFile;
use crate::kernel;
use crate::listing::ListedObject;
use crate::ranges::RangeRequest;
use crate::read::Pattern;

/// The operating system's file system.
#[derive(Debug)]
pub struct Disk;

const PAGE_BYTES: usize = 4096;
/// The largest part whose residence is looked up: a block of 64 KiB that begins anywhere.
const RESIDENT_PAGES: usize = 17;

impl FileSystem for Disk {
    fn create(&self, path: &Path) -> io::Result<Box<dyn File>> {
        let file = fs::OpenOptions::new().write(true).create_new(true).open(path)?;
        Ok(Box::new(DiskFile::new(file)))
    }

    fn read(&self, path: &Path) -> io::Result<Bytes> {
        fs::read(path).map(Bytes::from)
    }

    fn is_real(&self) -> bool {
        true
    }

    fn read_range(&self, path: &Path, range: &RangeRequest) -> io::Result<Vec<Bytes>> {
        let file = fs::File::open(path)?;
        check_length(file.metadata()?.len(), range)?;
        if range.shared && range.pieces.len() > 1 {
            // Adjacent pieces share one read. Mapped memory is returned to the kernel on drop, whereas an allocator may keep it.
            let mut memory = MmapMut::map_anon(range.pieces.iter().map(|piece| piece.bytes).sum::<usize>().max(1))?;
            let (mut rest, mut at) = (&mut memory[..], range.begin);
            for run in range.pieces.chunk_by(|_, next| next.skip == 0) {
                let bytes = run.iter().map(|piece| piece.bytes).sum();
                let (target, later) = rest.split_at_mut(bytes);
                file.read_exact_at(target, at + run[0].skip)?;
                at += run[0].skip + bytes as u64;
                rest = later;
            }
            let mut whole = Bytes::from_owner(memory);
            return Ok(range.pieces.iter().map(|piece| whole.split_to(piece.bytes)).collect());
        }
        let read = |place: Range<u64>| {
            let mut buffer = vec![0; (place.end - place.start) as usize];
            file.read_exact_at(&mut buffer, place.start)?;
            Ok(Bytes::from(buffer))
        };
        range.places().map(read).collect()
    }

    fn map(&self, path: &Path, bytes: u64) -> io::Result<Bytes> {
        let file = fs::File::open(path)?;
        let found = file.metadata()?.len();
        if found != bytes {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("{found} bytes, expected {bytes}")));
        }
        if bytes == 0 {
            return Ok(Bytes::new());
        }
        // SAFETY: data files are immutable once named (spec section 2), and the length was checked above.
        let map = unsafe { memmap2::MmapOptions::new().len(bytes as usize).map(&file)? };
        Ok(Bytes::from_owner(map))
    }

    fn will_need(&self, part: &[u8]) {
        advise(part, libc::MADV_WILLNEED);
    }

    fn is_resident(&self, part: &[u8]) -> bool {
        let (begin, bytes) = pages(part);
        let mut resident = [0u8; RESIDENT_PAGES];
        let count = bytes.div_ceil(PAGE_BYTES);
        if count > RESIDENT_PAGES {
            return true;
        }
        // SAFETY: `part` keeps the pages of the range mapped, and `resident` has a byte for each of them.
        let answer = unsafe { libc::mincore(begin as *mut libc::c_void, bytes, resident.as_mut_ptr()) };
        answer != 0 || resident[..count].iter().all(|page| page & 1 == 1)
    }

    fn will_read(&self, whole: &[u8], pattern: Pattern) {
        // Without MADV_RANDOM, the kernel would read megabytes around each missing page.
        advise(whole, if pattern == Pattern::InOrder { libc::MADV_NORMAL } else { libc::MADV_RANDOM });
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        path.try_exists()
    }

    fn publish(&self, from: &Path, to: &Path) -> io::Result<bool> {
        match kernel::rename_new(from, to) {
            // Some file systems (NFS, some FUSE) can only replace the target, but have hard links.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP | libc::ENOSYS)) => {
                fs::hard_link(from, to).map(|()| true)
            }
            other => other.map(|()| false),
        }
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn overwrite(&self, path: &Path, body: &[u8]) -> io::Result<bool> {
        let file = fs::OpenOptions::new().write(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
        let found = file.metadata()?;
        if !found.is_file() || found.nlink() != 1 || found.len() != body.len() as u64 {
            return Ok(false);
        }
        file.write_all_at(body, 0).map(|()| true)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn create_folder(&self, path: &Path) -> io::Result<()> {
        fs::create_dir(path)
    }

    fn sync_folder(&self, path: &Path) -> io::Result<()> {
        fs::File::open(path)?.sync_all()
    }

    fn list(&self, path: &Path) -> io::Result<Vec<ListedObject>> {
        let mut found = Vec::new();
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            // A file that vanishes between the two calls was another writer's temporary file.
            let Ok(metadata) = entry.metadata() else { continue };
            if let (true, Ok(name)) = (metadata.is_file(), entry.file_name().into_string()) {
                found.push(ListedObject { name, bytes: metadata.len(), modified: metadata.modified().ok() });
            }
        }
        Ok(found)
    }

    fn entries(&self, path: &Path) -> io::Result<Vec<(String, bool)>> {
        let entry = |entry: io::Result<fs::DirEntry>| {
            let entry = entry?;
            // A name that is not UTF-8 is not ours. The lossy form contains U+FFFD, so it differs from all of our names.
            Ok((entry.file_name().to_string_lossy().into_owned(), entry.file_type()?.is_dir()))
        };
        fs::read_dir(path)?.map(entry).collect()
    }

    fn links(&self, path: &Path) -> io::Result<u64> {
        Ok(fs::symlink_metadata(path)?.nlink())
    }

    fn hold(&self, folder: &Path) -> io::Result<Option<HeldFolder>> {
        let Some((folder, path)) = kernel::hold_folder(folder)? else { return Ok(None) };
        Ok(self.place(&path).map(|place| HeldFolder { path, place, _folder: folder })) // Returns None if /proc is not mounted.
    }

    /// Combine the inode with the creation time, because inodes are reused.
    fn place(&self, folder: &Path) -> Option<u64> {
        let found = fs::metadata(folder).ok()?;
        let made = found.created().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok()).unwrap_or_default();
        Some((found.ino().rotate_left(32) ^ made.as_nanos() as u64).max(1))
    }
}

/// Check that a file has the length that the range expects.
pub fn check_length(found: u64, range: &RangeRequest) -> io::Result<()> {
    match range.object_bytes {
        Some(expected) if found != expected => {
            Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("{found} bytes, expected {expected}")))
        }
        _ => Ok(()),
    }
}

/// Advise the kernel how mapped bytes will be read. A refusal affects only speed.
fn advise(part: &[u8], advice: libc::c_int) {
    let (begin, bytes) = pages(part);
    // SAFETY: `part` keeps the pages of the range mapped. The advice does not change any data.
    unsafe { libc::madvise(begin as *mut libc::c_void, bytes, advice) };
}

/// Return the address at which the first page of a part begins, and the bytes from there to the end of the part.
fn pages(part: &[u8]) -> (usize, usize) {
    let begin = part.as_ptr() as usize & !(PAGE_BYTES - 1);
    (begin, part.as_ptr() as usize + part.len() - begin)
}
