//! Locks on pages that are being fetched or removed, across threads and processes.
//!
//! Each page of a drive is a byte of one lock file, which stays empty. Locks belong to an open file description, so each operation opens the
//! file anew, and the kernel releases the locks of a process that dies. A thread that holds locks never waits for others, so no cycle
//! is possible.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::time::{Duration, Instant};

use penstock_storage::private;
use penstock_storage::process::interrupted;

/// Bits of an offset that number a page of an extent. The rest are bits of the extent's hash. Extents that share them only wait for each other.
const PAGE_BITS: u32 = 19;
const HASH_MASK: u64 = (1 << (62 - PAGE_BITS)) - 1;
/// All locks of an extent: those of its pages, and `FILE`.
pub const WHOLE: Range<u32> = 0..1 << PAGE_BITS;
/// The lock that a process holds while it creates or removes an extent's file.
pub const FILE: Range<u32> = (1 << PAGE_BITS) - 1..1 << PAGE_BITS;

/// The first and the longest pause between two looks at a lock that another process holds.
const PAUSES: (Duration, Duration) = (Duration::from_micros(200), Duration::from_millis(5));

/// Locks that one operation holds. They are released when this is dropped.
#[derive(Debug)]
pub struct Flight {
    /// The file with the locks, which may say something.
    pub file: File,
}

/// Offsets behind all extents. An operation that changes counts holds `INSIDE` shared. One that counts again holds `GATE`, so that no
/// other can begin, and then waits until it holds `INSIDE` alone.
const GATE: i64 = 1 << 62;
const INSIDE: i64 = GATE + 1;

impl Flight {
    pub fn new(path: &Path) -> io::Result<Flight> {
        Ok(Flight { file: private::open_own(path)? })
    }

    /// Begin an operation that changes what a drive holds. Returns None while another process counts again.
    pub fn enter(path: &Path) -> io::Result<Option<Flight>> {
        let flight = Flight::new(path)?;
        let entered = flight.set(libc::F_RDLCK, GATE, 1)? && flight.set(libc::F_RDLCK, INSIDE, 1)?;
        flight.set(libc::F_UNLCK, GATE, 1)?;
        Ok(entered.then_some(flight))
    }

    /// Join those who use a file together, and return whether nobody else does. Others that join wait until `stay`. Returns None if another one that
    /// joins takes longer than `patience`.
    pub fn join(path: &Path, patience: Duration) -> io::Result<Option<(Flight, bool)>> {
        let flight = Flight::new(path)?;
        if !wait(patience, || flight.set(libc::F_WRLCK, GATE, 1))? {
            return Ok(None);
        }
        let is_alone = flight.set(libc::F_WRLCK, INSIDE, 1)?;
        Ok((is_alone || flight.set(libc::F_RDLCK, INSIDE, 1)?).then_some((flight, is_alone)))
    }

    /// Let others join.
    pub fn stay(&self) {
        // A lock that is held is changed at once, so these cannot fail.
        let _ = self.set(libc::F_RDLCK, INSIDE, 1).and_then(|_| self.set(libc::F_UNLCK, GATE, 1));
    }

    /// Keep all other operations out, and wait until those that run have ended. Returns None if they take longer than `patience`.
    pub fn alone(path: &Path, patience: Duration) -> io::Result<Option<Flight>> {
        let flight = Flight::new(path)?;
        let alone = wait(patience, || flight.set(libc::F_WRLCK, GATE, 1))?
            && wait(patience, || flight.set(libc::F_WRLCK, INSIDE, 1))?;
        Ok(alone.then_some(flight))
    }

    /// Try to lock pages of an extent. Returns false if another operation holds one of them.
    pub fn try_lock(&self, hash: u64, pages: Range<u32>) -> io::Result<bool> {
        let begin = (hash & HASH_MASK) << PAGE_BITS | u64::from(pages.start);
        self.set(libc::F_WRLCK, begin as i64, pages.len() as i64)
    }

    fn set(&self, kind: i32, begin: i64, bytes: i64) -> io::Result<bool> {
        // SAFETY: all-zero bytes are a valid `flock`.
        let mut lock: libc::flock = unsafe { std::mem::zeroed() };
        (lock.l_type, lock.l_whence) = (kind as i16, libc::SEEK_SET as i16);
        (lock.l_start, lock.l_len) = (begin, bytes);
        // SAFETY: the file is open, and the kernel only reads `lock`.
        match unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } {
            0 => Ok(true),
            _ => match io::Error::last_os_error() {
                error if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
                error => Err(error),
            },
        }
    }

    /// Wait until pages can be locked, and lock them. Returns false after `patience`. Fails with `Interrupted` if the user wants this thread to
    /// stop. Only for operations that hold no other lock.
    pub fn lock(&self, hash: u64, pages: Range<u32>, patience: Duration) -> io::Result<bool> {
        wait(patience, || self.try_lock(hash, pages.clone()))
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        // A child that was forked in the meantime has the file open, too, so closing it here would not unlock it.
        let _ = self.set(libc::F_UNLCK, 0, 0);
    }
}

/// Try until it succeeds, for at most `patience`. Fails with `Interrupted` if the user wants this thread to stop.
fn wait(patience: Duration, mut attempt: impl FnMut() -> io::Result<bool>) -> io::Result<bool> {
    let (began, mut pause) = (Instant::now(), PAUSES.0);
    while !attempt()? {
        if began.elapsed() >= patience {
            return Ok(false);
        }
        if interrupted() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSES.1);
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_exclude_operations_of_the_same_process() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("fetching");
        let (one, two) = (Flight::new(&path)?, Flight::new(&path)?);
        assert!(one.try_lock(7, 3..5)?);
        assert!(!two.try_lock(7, 4..9)? && two.try_lock(7, 5..9)? && two.try_lock(8, 3..5)?);
        assert!(!two.try_lock(7, WHOLE)? && two.try_lock(7, FILE)?);
        assert!(!two.lock(7, 3..4, Duration::ZERO)?);
        drop(one);
        assert!(two.lock(7, 3..4, Duration::ZERO)?);
        assert_eq!(std::fs::metadata(&path)?.len(), 0);
        Ok(())
    }

    #[test]
    fn counting_again_keeps_others_out() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("fetching");
        let (one, two) = (Flight::enter(&path)?, Flight::enter(&path)?);
        assert!(one.is_some() && two.is_some());
        assert!(Flight::alone(&path, Duration::ZERO)?.is_none());
        drop((one, two));
        let alone = Flight::alone(&path, Duration::ZERO)?;
        assert!(alone.is_some() && Flight::enter(&path)?.is_none());
        drop(alone);
        assert!(Flight::enter(&path)?.is_some());
        Ok(())
    }

    #[test]
    fn a_forked_child_keeps_no_lock() -> io::Result<()> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("fetching");
        let one = Flight::new(&path)?;
        assert!(one.try_lock(7, 0..5)?);
        // SAFETY: the child only waits for its end.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: both calls are allowed in a forked child.
            unsafe {
                libc::pause();
                libc::_exit(0);
            }
        }
        drop(one);
        let free = Flight::new(&path)?.try_lock(7, 0..5)?;
        // SAFETY: the child is ours, and is still there.
        unsafe {
            libc::kill(child, libc::SIGKILL);
            libc::waitpid(child, std::ptr::null_mut(), 0);
        }
        assert!(free);
        Ok(())
    }
}
