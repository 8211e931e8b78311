//! Memory that devices may write into, and that large arrays lie in.

use std::alloc::{Layout, alloc, dealloc};
use std::io;

/// What devices and file systems want offsets, lengths and addresses to be multiples of.
pub const ALIGN: u64 = 4096;
pub const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Memory on page boundaries, on huge pages where it is large. What is in it is undefined.
#[derive(Debug)]
pub struct Buffer {
    memory: *mut u8,
    layout: Layout,
}

// SAFETY: the memory is owned; whoever shares it takes care of who writes.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub fn new(bytes: usize) -> io::Result<Buffer> {
        let align = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { ALIGN as usize };
        let layout = Layout::from_size_align(bytes.max(1), align).map_err(io::Error::other)?;
        // SAFETY: the layout is not empty.
        let memory = unsafe { alloc(layout) };
        if memory.is_null() {
            return Err(io::Error::from(io::ErrorKind::OutOfMemory));
        }
        if bytes >= HUGE_PAGE_BYTES {
            // SAFETY: the range was just allocated; the advice changes no content.
            unsafe { libc::madvise(memory.cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        Ok(Buffer { memory, layout })
    }

    /// Where it begins.
    pub fn memory(&self) -> *mut u8 {
        self.memory
    }

    pub fn bytes(&self) -> usize {
        self.layout.size()
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, and nothing refers to it any more.
        unsafe { dealloc(self.memory, self.layout) }
    }
}
