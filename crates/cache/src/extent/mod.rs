//! An extent: a sparse file with the cached pages of up to 1 GiB of one object, at the same offsets as in the object.
//!
//! Behind the data are a checksum for each page (0: not cached), and the time of last use for each stretch. The end is described in `tail`.
//! A page counts only if its checksum matches, so damage of any kind reads as "not cached". This file knows nothing of budgets and locks.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

use penstock_storage::private;

use crate::place::mix;

pub mod pages;
mod tail;

pub use pages::{EXTENT_BYTES, PAGE_BYTES, STRETCH_BYTES, STRETCH_PAGES, bytes_of};
use pages::{runs_of, stored_bytes};
use tail::{ExtentLayout, FOOTER_BYTES, read_tail};
pub use tail::{Key, object_of, store_key};

/// Times of last use are written again only after this many seconds.
const STAMP_SECONDS: u32 = 16;

/// An open extent.
#[derive(Debug)]
pub struct Extent {
    file: File,
    layout: ExtentLayout,
    pub object_bytes: u64,
    pub key: Key,
    pub hash: u64,
    /// The time of last use of each stretch, as this process wrote it last.
    stamped: Vec<AtomicU32>,
    /// Before this time, the extent counts as not whole.
    whole_after_ms: AtomicU64,
}

impl Extent {
    /// Open an existing extent. Returns None if the file is missing, damaged, or of another object.
    pub fn open(path: &Path, key: &Key, object_bytes: Option<u64>) -> io::Result<Option<Extent>> {
        let found = Extent::open_any(path)?;
        Ok(found.filter(|extent| extent.key == *key && object_bytes.is_none_or(|bytes| bytes == extent.object_bytes)))
    }

    /// Open the extent at a path, whatever object it is of.
    pub fn open_any(path: &Path) -> io::Result<Option<Extent>> {
        Ok(Extent::open_noted(path)?.map(|(extent, _)| extent))
    }

    /// Open the extent at a path, whatever object it is of. Returns it and its note, which may be empty.
    pub fn open_noted(path: &Path) -> io::Result<Option<(Extent, Vec<u8>)>> {
        let file = match File::options().read(true).write(true).open(path) {
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::NotFound | io::ErrorKind::IsADirectory | io::ErrorKind::NotADirectory
                ) =>
            {
                return Ok(None);
            }
            other => other?,
        };
        Ok(read_tail(&file)?.map(|tail| (Extent::with(file, tail.layout, tail.object_bytes, tail.key), tail.note)))
    }

    fn with(file: File, layout: ExtentLayout, object_bytes: u64, key: Key) -> Extent {
        let (hash, stretches) = (key.hash(), layout.data_bytes.div_ceil(STRETCH_BYTES));
        let stamped = (0..stretches).map(|_| AtomicU32::new(0)).collect();
        Extent { file, layout, object_bytes, key, hash, stamped, whole_after_ms: AtomicU64::new(0) }
    }

    /// Create the file of an extent, without any pages. The caller holds the extent's lock, and has reserved `overhead_bytes`.
    pub fn create(path: &Path, key: &Key, object_bytes: u64) -> io::Result<Extent> {
        let layout = ExtentLayout::of(object_bytes, key.extent, key.identity.len() as u64, 0)
            .ok_or(io::ErrorKind::InvalidInput)?;
        let tail = tail::tail(key, object_bytes, b"");
        let mut options = private::options();
        let file =
            options.read(true).write(true).create(true).truncate(true).custom_flags(libc::O_NOFOLLOW).open(path)?;
        file.write_all_at(&tail, layout.identity)?;
        Ok(Extent::with(file, layout, object_bytes, key.clone()))
    }

    /// Return the number of bytes of the object that belong to this extent.
    pub fn data_bytes(&self) -> u64 {
        self.layout.data_bytes
    }

    pub fn pages(&self) -> u32 {
        self.layout.data_bytes.div_ceil(PAGE_BYTES) as u32
    }

    /// Return the bytes that a new file uses beside its pages, in whole blocks of the file system, with one for its folder.
    pub fn overhead_bytes(object_bytes: u64, key: &Key) -> u64 {
        let layout = ExtentLayout::of(object_bytes, key.extent, key.identity.len() as u64, 0);
        layout.map_or(0, |layout| layout.overhead_bytes(layout.file_bytes()))
    }

    /// Return the same for an extent as it is now: another process may have changed its note.
    pub fn overhead_now(&self) -> io::Result<u64> {
        Ok(self.layout.overhead_bytes(self.file.metadata()?.len()))
    }

    /// Return the note as it is now. Returns None if there is none, or the extent was removed. Cost: three calls.
    pub fn note(&self) -> io::Result<Option<Vec<u8>>> {
        Ok(read_tail(&self.file)?.filter(|tail| tail.key == self.key && !tail.note.is_empty()).map(|tail| tail.note))
    }

    /// Return how many bytes more the file would use with a note of this length. A note only grows, so that nothing has to be cut.
    pub fn growth_of_note(&self, bytes: usize) -> io::Result<u64> {
        let new = self.layout.identity + self.key.identity.len() as u64 + bytes as u64 + FOOTER_BYTES;
        Ok(self.layout.overhead_bytes(new).saturating_sub(self.overhead_now()?))
    }

    /// Write a note, padded with blanks to the length of the one before. The caller holds the extent's lock `FILE` and has reserved the growth. A reader
    /// that comes in between finds a damaged footer.
    pub fn set_note(&self, note: &[u8]) -> io::Result<()> {
        let before = read_tail(&self.file)?.filter(|tail| tail.key == self.key).ok_or(io::ErrorKind::NotFound)?;
        let mut note = note.to_vec();
        note.resize(note.len().max(before.note.len()), b' ');
        ExtentLayout::of(self.object_bytes, self.key.extent, self.key.identity.len() as u64, note.len() as u64)
            .ok_or(io::ErrorKind::InvalidInput)?;
        self.file.write_all_at(&tail::tail(&self.key, self.object_bytes, &note), self.layout.identity)
    }

    /// Return whether the file still has its name.
    pub fn is_linked(&self) -> bool {
        self.file.metadata().is_ok_and(|found| found.nlink() > 0)
    }

    /// Return the stored checksum of each page. 0 means that the page is not cached.
    pub fn table(&self, pages: Range<u32>) -> io::Result<Vec<u32>> {
        self.numbers(self.layout.table + 4 * u64::from(pages.start), pages.len())
    }

    fn numbers(&self, at: u64, count: usize) -> io::Result<Vec<u32>> {
        let mut bytes = vec![0; 4 * count];
        read_padded(&self.file, &mut bytes, at)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|number| u32::from_le_bytes(*number)).collect())
    }

    /// Return the stored checksums of all pages.
    pub fn whole_table(&self) -> io::Result<Vec<u32>> {
        self.table(0..self.pages())
    }

    /// Return whether all pages are stored. A negative answer is remembered for a second, because it costs a read of all checksums.
    pub fn is_whole(&self, now_ms: u64) -> io::Result<bool> {
        if now_ms < self.whole_after_ms.load(Relaxed) {
            return Ok(false);
        }
        let is_whole = !self.whole_table()?.contains(&0);
        if !is_whole {
            self.whole_after_ms.store(now_ms + 1000, Relaxed);
        }
        Ok(is_whole)
    }

    /// Return how many bytes of the object are in pages, of which the last one may be short.
    pub fn bytes_in(&self, pages: &Range<u32>) -> usize {
        let bytes = bytes_of(pages);
        (bytes.end.min(self.layout.data_bytes) - bytes.start) as usize
    }

    /// Read pages whose stored checksums are given into `out`, which ends where the data ends. Returns how many of the first pages match
    /// their checksums.
    pub fn read(&self, first: u32, crcs: &[u32], out: &mut [u8]) -> io::Result<usize> {
        read_padded(&self.file, out, u64::from(first) * PAGE_BYTES)?;
        let pages = out.chunks(PAGE_BYTES as usize).zip(first..).zip(crcs);
        Ok(pages.take_while(|((page, number), crc)| **crc != 0 && self.crc(*number, page) == **crc).count())
    }

    /// Read the first of these pages that are all stored into `out`. Returns how many of its first bytes match their checksums, or None if the first page
    /// is not stored.
    pub fn read_stored(&self, pages: Range<u32>, out: &mut [u8]) -> io::Result<Option<usize>> {
        let mut table = self.table(pages.clone())?;
        table.truncate(table.iter().take_while(|crc| **crc != 0).count());
        if table.is_empty() {
            return Ok(None);
        }
        let bytes = self.bytes_in(&(pages.start..pages.start + table.len() as u32));
        let sound_pages = self.read(pages.start, &table, &mut out[..bytes])?;
        Ok(Some((sound_pages * PAGE_BYTES as usize).min(bytes)))
    }

    /// Read pages into `out`, which ends where they or the data end, if the kernel has them and their checksums in memory. Returns whether
    /// all of them are stored, in memory, and match their checksums.
    pub fn read_now(&self, pages: Range<u32>, out: &mut [u8]) -> io::Result<bool> {
        let mut table = [0; 4 * STRETCH_PAGES as usize];
        let Some(table) = table.get_mut(..4 * pages.len()) else { return Ok(false) };
        let parts = [
            (&mut *table, self.layout.table + 4 * u64::from(pages.start)),
            (&mut *out, u64::from(pages.start) * PAGE_BYTES),
        ];
        for (part, at) in parts {
            if read_in_memory(&self.file, part, at)? < part.len() {
                return Ok(false);
            }
        }
        let crcs = table.as_chunks::<4>().0.iter().map(|crc| u32::from_le_bytes(*crc));
        Ok(out
            .chunks(PAGE_BYTES as usize)
            .zip(pages)
            .zip(crcs)
            .all(|((page, number), crc)| crc != 0 && self.crc(number, page) == crc))
    }

    /// Return the pages of a range that are stored but do not match their checksums. Cost: reads all of them.
    pub fn corrupt(&self, pages: Range<u32>) -> io::Result<Vec<u32>> {
        let mut found = Vec::new();
        let mut data = vec![0; STRETCH_BYTES as usize];
        for first in pages.clone().step_by(STRETCH_PAGES as usize) {
            let group = first..pages.end.min(first + STRETCH_PAGES);
            let table = self.table(group.clone())?;
            let data = &mut data[..self.bytes_in(&group)];
            read_padded(&self.file, data, u64::from(first) * PAGE_BYTES)?;
            for ((page, number), crc) in data.chunks(PAGE_BYTES as usize).zip(group).zip(table) {
                if crc != 0 && self.crc(number, page) != crc {
                    found.push(number);
                }
            }
        }
        Ok(found)
    }

    /// Store whole pages, first the data and then the checksums, and note that their stretches are used now. Otherwise, what was just fetched would be the
    /// first to be evicted. The caller holds the lock on these pages and has reserved their bytes.
    pub fn write(&self, first: u32, data: &[u8], now_seconds: u32) -> io::Result<()> {
        self.file.write_all_at(data, u64::from(first) * PAGE_BYTES)?;
        let crcs = data
            .chunks(PAGE_BYTES as usize)
            .zip(first..)
            .flat_map(|(page, number)| self.crc(number, page).to_le_bytes());
        let crcs: Vec<u8> = crcs.collect();
        self.file.write_all_at(&crcs, self.layout.table + 4 * u64::from(first))?;
        let end = first + (crcs.len() / 4) as u32;
        (first / STRETCH_PAGES..end.div_ceil(STRETCH_PAGES)).for_each(|stretch| self.stamp(stretch, now_seconds));
        Ok(())
    }

    /// Forget pages and free their space, first the checksums and then the data. The caller holds the lock on these pages.
    pub fn clear(&self, pages: Range<u32>) -> io::Result<()> {
        self.file.write_all_at(&vec![0; 4 * pages.len()], self.layout.table + 4 * u64::from(pages.start))?;
        let bytes = bytes_of(&pages);
        // The last page may share a block of the file system with the table.
        let end = bytes.end.min(self.layout.data_bytes / PAGE_BYTES * PAGE_BYTES);
        if bytes.start < end { punch(&self.file, bytes.start, end - bytes.start) } else { Ok(()) }
    }

    /// Free the space of pages that are not stored, if the file uses more than the stored ones need. The caller keeps all other operations out.
    pub fn free_rest(&self, table: &[u32]) -> io::Result<()> {
        if self.file.metadata()?.blocks() * 512 <= stored_bytes(table) + self.overhead_now()? {
            return Ok(());
        }
        runs_of(0, table).filter(|(_, crcs)| crcs[0] == 0).try_for_each(|(pages, _)| self.clear(pages))
    }

    /// Free all space. Other processes that have the file open read it as not cached.
    pub fn empty(&self) -> io::Result<()> {
        self.file.set_len(0)
    }

    /// Note that a stretch was used now. Costs a call only if the last note is old.
    pub fn stamp(&self, stretch: u32, now_seconds: u32) {
        let Some(stamped) = self.stamped.get(stretch as usize) else { return };
        if now_seconds.saturating_sub(stamped.load(Relaxed)) >= STAMP_SECONDS {
            stamped.store(now_seconds, Relaxed);
            // A lost stamp only makes the stretch look older.
            let _ = self.file.write_all_at(&now_seconds.to_le_bytes(), self.layout.stamps + 4 * u64::from(stretch));
        }
    }

    /// Return the time of last use of each stretch, in seconds since 1970.
    pub fn stamps(&self) -> io::Result<Vec<u32>> {
        self.numbers(self.layout.stamps, self.stamped.len())
    }

    /// Return the stored checksum of a page: its crc32c, changed by its place so that a page at a wrong place fails.
    fn crc(&self, page: u32, data: &[u8]) -> u32 {
        let place = mix(self.hash ^ u64::from(page)) as u32;
        // 0 means that the page is not cached.
        (crc_fast::crc32_iscsi(data) ^ place).max(1)
    }
}

/// Read bytes of a file. Behind its end are zeros: a removed extent is cut to nothing.
pub fn read_padded(file: &File, mut out: &mut [u8], mut at: u64) -> io::Result<()> {
    while !out.is_empty() {
        match file.read_at(out, at) {
            Ok(0) => break,
            Ok(read) => (out, at) = (&mut out[read..], at + read as u64),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    out.fill(0);
    Ok(())
}

/// Read bytes of a file that the kernel has in memory, and return how many there were. Bytes that would have to be read from the drive end
/// the read, so a slow drive cannot hold up the caller.
fn read_in_memory(file: &File, out: &mut [u8], at: u64) -> io::Result<usize> {
    #[cfg(target_os = "linux")]
    {
        let part = libc::iovec { iov_base: out.as_mut_ptr().cast(), iov_len: out.len() };
        // SAFETY: the file is open, and the vector describes `out`, which lives until the call returns.
        let read = unsafe { libc::preadv2(file.as_raw_fd(), &raw const part, 1, at as i64, libc::RWF_NOWAIT) };
        if let Ok(read) = usize::try_from(read) {
            return Ok(read);
        }
        match io::Error::last_os_error() {
            error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EINTR)) => Ok(0),
            // The file system does not know. It is a local one, so that it rarely waits.
            error if error.raw_os_error() == Some(libc::EOPNOTSUPP) => file.read_at(out, at),
            error => Err(error),
        }
    }
    #[cfg(not(target_os = "linux"))]
    file.read_at(out, at)
}

/// Free a range of a file.
pub fn punch(file: &File, begin: u64, bytes: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    {
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: the file is open, and the call takes no pointers.
        match unsafe { libc::fallocate(file.as_raw_fd(), mode, begin as i64, bytes as i64) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
    #[cfg(not(target_os = "linux"))]
    {
        let _ = (file, begin, bytes);
        Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP))
    }
}

#[cfg(test)]
mod tests;
