//! Writes a file sequentially. From the second piece on, a background thread writes while the caller prepares the next piece.
//! Without this thread, a large append from Arrow spent half of its time in write calls, according to a profile.

use std::fs;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use super::file_system::File;
use crate::kernel;
use crate::process;

/// Write-back begins after this many bytes, so that the final fsync has little left to do.
const WRITE_BACK_BYTES: u64 = 8 << 20;

/// The caller itself writes pieces larger than this, because queueing them would take too much memory.
const BEHIND_BYTES: usize = 4 << 20;

/// Number of pieces queued while another piece is being written.
const PIECES: usize = 1;

/// Maximum number of files in this process that have a writer thread. The caller writes all other files. Queued pieces do not
/// count towards the memory budget.
const FILES: usize = 2;

static WITH_THREAD: AtomicUsize = AtomicUsize::new(0);

#[derive(Clone)]
struct Pieces {
    file: Arc<fs::File>,
    written: u64,
    pushed: u64,
}

impl Pieces {
    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        (&*self.file).write_all(bytes)?;
        self.written += bytes.len() as u64;
        if self.written - self.pushed >= WRITE_BACK_BYTES {
            kernel::start_write_back(&self.file, self.pushed, self.written - self.pushed);
            self.pushed = self.written;
        }
        Ok(())
    }
}

type Behind = (SyncSender<Vec<u8>>, JoinHandle<io::Result<Pieces>>);

pub struct DiskFile {
    pieces: Pieces,
    behind: Option<Behind>,
    /// Set after a failed write: the file lacks a piece, so later writes are refused.
    failed: bool,
    generation: u64,
}

impl DiskFile {
    pub fn new(file: fs::File) -> DiskFile {
        let pieces = Pieces { file: Arc::new(file), written: 0, pushed: 0 };
        DiskFile { pieces, behind: None, failed: false, generation: process::generation() }
    }

    fn begin(&mut self) -> Option<&Behind> {
        if self.behind.is_none() {
            if WITH_THREAD.fetch_add(1, Relaxed) >= FILES {
                WITH_THREAD.fetch_sub(1, Relaxed);
                return None;
            }
            let (sender, receiver) = sync_channel::<Vec<u8>>(PIECES);
            let mut pieces = self.pieces.clone();
            let work = move || receiver.into_iter().try_for_each(|piece| pieces.write(&piece)).map(|()| pieces);
            // If the thread cannot be started, the caller writes the piece.
            match std::thread::Builder::new().name("penstock-write".into()).spawn(work) {
                Ok(thread) => self.behind = Some((sender, thread)),
                Err(_) => drop(WITH_THREAD.fetch_sub(1, Relaxed)),
            }
        }
        self.behind.as_ref()
    }

    /// Fail if an earlier write failed or if this process is a forked child, which has no writer thread.
    fn check(&mut self) -> io::Result<()> {
        if self.generation != process::generation() {
            std::mem::forget(self.behind.take()); // Leaked, because the parent's thread may have held the channel's locks.
            return Err(io::Error::other("the file was created before a fork"));
        }
        if self.failed { Err(io::Error::other("an earlier write failed")) } else { Ok(()) }
    }

    /// Wait until all pieces are written.
    fn join(&mut self) -> io::Result<()> {
        let Some((sender, thread)) = self.behind.take() else { return Ok(()) };
        drop(sender);
        WITH_THREAD.fetch_sub(1, Relaxed);
        self.pieces = thread.join().map_err(|_| io::Error::other("the writer thread has stopped"))??;
        Ok(())
    }

    fn write_piece(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        if self.pieces.written > 0
            && bytes.len() <= BEHIND_BYTES
            && let Some((sender, _)) = self.begin()
        {
            return match sender.send(bytes) {
                Ok(()) => Ok(()),
                Err(_) => self.join().and(Err(io::Error::other("the writer thread has stopped"))),
            };
        }
        self.join()?;
        self.pieces.write(&bytes)
    }
}

impl File for DiskFile {
    fn write(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        self.check()?;
        self.write_piece(bytes).inspect_err(|_| self.failed = true)
    }

    fn sync(&mut self) -> io::Result<()> {
        self.check()?;
        self.join().inspect_err(|_| self.failed = true)?;
        self.pieces.file.sync_all()
    }
}

impl Drop for DiskFile {
    fn drop(&mut self) {
        let _ = self.check();
        let _ = self.join(); // Unsynced bytes may be lost, so errors are ignored.
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// The file is a pipe, so a write waits for the reader. Pieces must arrive in order, whether the thread or the caller writes them.
    #[test]
    fn pieces_of_all_sizes_keep_their_order() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let sizes = [10, 1 << 20, BEHIND_BYTES + 1, 5, BEHIND_BYTES, 2 * BEHIND_BYTES, 1 << 20, 1 << 20, 3];
        let read = std::thread::spawn(move || {
            let mut found = Vec::new();
            std::thread::sleep(std::time::Duration::from_millis(20)); // Lets the writer thread block in its first write.
            reader.read_to_end(&mut found).map(|_| found)
        });
        let mut file = DiskFile::new(fs::File::from(std::os::fd::OwnedFd::from(writer)));
        let mut expected = Vec::new();
        for (number, size) in sizes.into_iter().enumerate() {
            let piece = vec![number as u8; size];
            expected.extend_from_slice(&piece);
            file.write(piece).unwrap();
        }
        drop(file);
        assert!(read.join().unwrap().unwrap() == expected);
    }
}
