//! Pages of memory that the kernel sends as they are, without a copy.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::pipe::{IoSliceRaw, PipeFlags, SpliceFlags, fcntl_setpipe_size, pipe_with, splice, vmsplice};

use super::arena::SLOT_BYTES;

thread_local! {
    static PIPE: RefCell<Option<Pipe>> = const { RefCell::new(None) };
}

/// A way for pages from memory to a socket. It is empty between two calls.
struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    nowhere: File,
}

impl Pipe {
    fn open() -> io::Result<Pipe> {
        let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
        // With less room it sends less at once. Content may begin and end within a page.
        let _ = fcntl_setpipe_size(&write, 2 * SLOT_BYTES as usize);
        Ok(Pipe { read, write, nowhere: File::options().write(true).open("/dev/null")? })
    }

    /// Send the first of these pages. Returns how many bytes the socket took, and whether the pipe is empty again.
    fn send(&self, socket: impl AsFd, content: &[u8]) -> rustix::io::Result<(rustix::io::Result<usize>, bool)> {
        // SAFETY: the pages keep their content until the last of those who send them is done: an arena gives them back instead of writing to them.
        let held = unsafe { vmsplice(&self.write, &[IoSliceRaw::from_slice(content)], SpliceFlags::NONBLOCK)? };
        let sent = splice(&self.read, None, socket, None, held, SpliceFlags::NONBLOCK);
        let mut left = held - sent.unwrap_or(0);
        while left > 0 {
            match splice(&self.read, None, &self.nowhere, None, left, SpliceFlags::NONBLOCK) {
                Ok(count) if count > 0 => left -= count,
                _ => break,
            }
        }
        Ok((sent, left == 0))
    }
}

/// Send pages of an arena. Returns how many bytes the socket took, or None if they must be copied, because the process has too many open files, for
/// example.
pub fn send(socket: impl AsFd, content: &[u8]) -> Option<io::Result<usize>> {
    PIPE.with_borrow_mut(|kept| {
        let pipe = kept.take().or_else(|| Pipe::open().ok())?;
        let (sent, is_empty) = pipe.send(socket, content).ok()?;
        *kept = is_empty.then_some(pipe);
        Some(sent.map_err(io::Error::from))
    })
}
