//! A file of the disk that is written in order: from its second piece on by a thread, while the caller makes the next piece. Half of the
//! samples of a large append from Arrow were in the write calls.

use std::fs;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::JoinHandle;

use crate::disk::File;
use crate::process;

/// Write-back begins after this many bytes, so that the final fsync finds little left to do.
const WRITE_BACK_BYTES: u64 = 8 << 20;

/// Larger pieces are written by the caller: several of them would be too much memory.
const BEHIND_BYTES: usize = 4 << 20;

/// Pieces that wait while another one is written.
const PIECES: usize = 1;

/// Files of this process that have a thread; those of other columns are written by the caller. Pieces are not counted in the budget.
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
            // SAFETY: the descriptor is open; the call only starts write-back and its failure changes nothing.
            unsafe {
                libc::sync_file_range(
                    self.file.as_raw_fd(),
                    self.pushed as i64,
                    (self.written - self.pushed) as i64,
                    libc::SYNC_FILE_RANGE_WRITE,
                )
            };
            self.pushed = self.written;
        }
        Ok(())
    }
}

type Behind = (SyncSender<Vec<u8>>, JoinHandle<io::Result<Pieces>>);

pub struct DiskFile {
    pieces: Pieces,
    behind: Option<Behind>,
    /// After a failed write the file lacks a piece, whatever is written later.
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
            // Without a thread the caller writes.
            match std::thread::Builder::new().name("penstock-write".into()).spawn(work) {
                Ok(thread) => self.behind = Some((sender, thread)),
                Err(_) => drop(WITH_THREAD.fetch_sub(1, Relaxed)),
            }
        }
        self.behind.as_ref()
    }

    /// Refuse to go on after a failed write, and in a forked child: the thread is not there.
    fn check(&mut self) -> io::Result<()> {
        if self.generation != process::generation() {
            std::mem::forget(self.behind.take()); // Its locks may be held by the thread.
            return Err(io::Error::other("the file was begun before a fork"));
        }
        if self.failed { Err(io::Error::other("an earlier write failed")) } else { Ok(()) }
    }

    /// Wait until all pieces are written.
    fn join(&mut self) -> io::Result<()> {
        let Some((sender, thread)) = self.behind.take() else { return Ok(()) };
        drop(sender);
        WITH_THREAD.fetch_sub(1, Relaxed);
        self.pieces = thread.join().map_err(|_| io::Error::other("the thread that writes ended"))??;
        Ok(())
    }

    fn write_piece(&mut self, bytes: Vec<u8>) -> io::Result<()> {
        if self.pieces.written > 0
            && bytes.len() <= BEHIND_BYTES
            && let Some((sender, _)) = self.begin()
        {
            return match sender.send(bytes) {
                Ok(()) => Ok(()),
                Err(_) => self.join().and(Err(io::Error::other("the thread that writes ended"))),
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
        let _ = self.join(); // What was not synced is not promised to anybody.
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// The file is a pipe, where a write waits for the reader. Each piece must come after the one before, whoever writes it.
    #[test]
    fn pieces_of_all_sizes_keep_their_order() {
        let (mut reader, writer) = std::io::pipe().unwrap();
        let sizes = [10, 1 << 20, BEHIND_BYTES + 1, 5, BEHIND_BYTES, 2 * BEHIND_BYTES, 1 << 20, 1 << 20, 3];
        let read = std::thread::spawn(move || {
            let mut found = Vec::new();
            std::thread::sleep(std::time::Duration::from_millis(20)); // The thread waits in its first write by then.
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
