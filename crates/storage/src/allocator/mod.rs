//! An allocator that returns large blocks of memory to the kernel as soon as they are freed.

pub mod anchor;

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;

use crate::buffer::HUGE_PAGE_BYTES;
use crate::kernel;

/// Largest page size among the supported kernels. The length of every mapping is a multiple of this size.
const PAGE_BYTES: usize = 64 << 10;
/// Smallest page size among the supported kernels, and the only alignment that `mremap` guarantees.
const SMALLEST_PAGE_BYTES: usize = 4096;

/// An allocator that maps blocks of at least [`HUGE_PAGE_BYTES`] onto huge pages and uses the system allocator for the rest.
///
/// Once a 32 MiB array has been freed, glibc keeps up to 64 MiB of freed memory per thread. Decoded images reach that size. With
/// glibc alone, a loader with a few threads used 1.5 times its budget.
pub struct Returning;

const fn is_large(layout: &Layout) -> bool {
    layout.size() >= HUGE_PAGE_BYTES && layout.align() <= HUGE_PAGE_BYTES
}

fn mapped_bytes(size: usize) -> usize {
    size.next_multiple_of(PAGE_BYTES)
}

/// Map `size` zeroed bytes, aligned to the huge page size. Returns null if the kernel is out of memory.
fn map(size: usize) -> *mut u8 {
    let (bytes, access) = (mapped_bytes(size), libc::PROT_READ | libc::PROT_WRITE);
    let room = bytes + HUGE_PAGE_BYTES; // This cannot overflow: a layout covers at most half the address space.
    // SAFETY: a new mapping at an address chosen by the kernel does not overlap existing memory.
    let start = unsafe { libc::mmap(null_mut(), room, access, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0) };
    if start == libc::MAP_FAILED {
        return null_mut();
    }
    let start = start.cast::<u8>();
    let before = start.align_offset(HUGE_PAGE_BYTES);
    // SAFETY: both unmapped parts are inside the mapping and outside the returned memory. The advice does not change any data.
    unsafe {
        let memory = start.add(before);
        unmap(start, before);
        unmap(memory.add(bytes), HUGE_PAGE_BYTES - before);
        kernel::advise_huge_pages(memory, bytes);
        memory
    }
}

/// # Safety
/// The range was mapped by `map`, and nothing refers to it any more.
unsafe fn unmap(start: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: the caller upholds the contract above.
        unsafe { libc::munmap(start.cast(), bytes) };
    }
}

impl Returning {
    /// Move memory to a new allocation.
    ///
    /// # Safety
    /// `memory` was allocated with the layout `old`, and the size of `new` is not 0.
    unsafe fn copy(&self, memory: *mut u8, old: Layout, new: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the contract above. The new memory does not overlap the old.
        unsafe {
            let other = self.alloc(new);
            if !other.is_null() {
                std::ptr::copy_nonoverlapping(memory, other, old.size().min(new.size()));
                self.dealloc(memory, old);
            }
            other
        }
    }
}

// SAFETY: `map` and `unmap` handle large layouts, and `System` handles all others. `realloc` copies the memory if the new size
// requires the other allocator. Nothing here panics or uses the global allocator.
unsafe impl GlobalAlloc for Returning {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the contract of this method.
        if is_large(&layout) { map(layout.size()) } else { unsafe { System.alloc(layout) } }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller upholds the contract of this method.
        if is_large(&layout) { map(layout.size()) } else { unsafe { System.alloc_zeroed(layout) } }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller promises that the memory was allocated with this layout.
        unsafe {
            if is_large(&layout) { unmap(memory, mapped_bytes(layout.size())) } else { System.dealloc(memory, layout) }
        }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises that `size`, rounded up to the alignment, does not overflow.
        let new = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        // SAFETY: the caller guarantees that `memory` has this layout. Any new memory has the layout `new` and does
        // not overlap the old memory.
        unsafe {
            match (is_large(&layout), is_large(&new)) {
                (false, false) => System.realloc(memory, layout, size),
                (true, true) if mapped_bytes(layout.size()) == mapped_bytes(size) => memory,
                (true, true) if layout.align() <= SMALLEST_PAGE_BYTES => {
                    kernel::resize_map(memory, mapped_bytes(layout.size()), mapped_bytes(size))
                        .unwrap_or_else(|| self.copy(memory, layout, new))
                }
                _ => self.copy(memory, layout, new),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Return whether the page at this address is mapped.
    fn is_mapped(memory: *mut u8) -> bool {
        let mut state = 0;
        // SAFETY: the call does not access that memory. For one page, it writes one byte of state.
        unsafe { libc::mincore(memory.cast(), 1, &raw mut state) == 0 }
    }

    #[test]
    fn memory_of_any_size_keeps_its_bytes_as_it_grows_and_shrinks() {
        let sizes =
            [1, 4096, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 1, 3 * HUGE_PAGE_BYTES + 5, 40 << 20];
        for align in [1, 64, 4096, HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES] {
            for (from, to) in sizes.iter().flat_map(|from| sizes.map(|to| (*from, to))) {
                let layout = Layout::from_size_align(from, align).unwrap();
                // SAFETY: each call passes the memory's current layout. Every byte is written or zeroed before it is read.
                unsafe {
                    let memory = Returning.alloc_zeroed(layout);
                    assert!(memory.addr().is_multiple_of(align) && *memory == 0 && *memory.add(from - 1) == 0);
                    for at in [0, from / 2, from - 1] {
                        *memory.add(at) = (at % 100) as u8 + 1;
                    }
                    let moved = Returning.realloc(memory, layout, to);
                    assert!(moved.addr().is_multiple_of(align));
                    assert!(
                        [0, from / 2, from - 1]
                            .iter()
                            .filter(|at| **at < to)
                            .all(|at| *moved.add(*at) == (*at % 100) as u8 + 1)
                    );
                    *moved.add(to - 1) = 1;
                    let layout = Layout::from_size_align(to, align).unwrap();
                    Returning.dealloc(moved, layout);
                }
            }
        }
    }

    #[test]
    fn large_memory_goes_back_to_the_kernel_at_once() {
        let layout = Layout::from_size_align(3 << 20, 8).unwrap();
        // Another thread may map the same address right after it is freed, but not in every attempt.
        // SAFETY: the memory is freed with its own layout and is not written after that.
        let returned = || unsafe {
            let memory = Returning.alloc(layout);
            memory.write_bytes(1, layout.size());
            let last = memory.add(layout.size() - 1).map_addr(|address| address & !4095);
            assert!(is_mapped(memory) && is_mapped(last));
            Returning.dealloc(memory, layout);
            !is_mapped(memory) && !is_mapped(last)
        };
        assert!((0..100).any(|_| returned()));
    }

    #[test]
    fn memory_that_nobody_has_is_null() {
        let layout = Layout::from_size_align(1 << 60, 8).unwrap();
        // SAFETY: the layout is not empty, and the null pointer is not dereferenced.
        assert!(unsafe { Returning.alloc(layout) }.is_null());
    }
}
