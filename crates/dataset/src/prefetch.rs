//! Ask the processor to fetch rows before they are copied. The order of the rows is random, so the hardware prefetcher cannot
//! predict it.

/// The number of rows to prefetch ahead of the current row.
pub const ROWS_AHEAD: usize = 4;

/// Smaller rows are not prefetched. Many small rows share a page, so locating each row would cost more than it saves.
pub const PREFETCH_FROM_BYTES: usize = 256;

/// Cache lines to prefetch per page, enough to start the hardware prefetcher. The hardware can keep far more requests in flight
/// than software can.
const LINES_A_PAGE: usize = 4;

const LINE_BYTES: usize = 64;

const MEMORY_PAGE_BYTES: usize = 4096;

/// Hint that `bytes` bytes at `offset` in the map will be needed soon.
#[inline]
pub fn prefetch(map: &[u8], offset: usize, bytes: usize) {
    let end = (offset + bytes.min(MEMORY_PAGE_BYTES)).min(map.len());
    let next_page = (map.as_ptr() as usize + offset + 1).next_multiple_of(MEMORY_PAGE_BYTES) - map.as_ptr() as usize;
    for start in [offset, next_page] {
        (start..end).step_by(LINE_BYTES).take(LINES_A_PAGE).for_each(|line| prefetch_item(map, line));
    }
}

/// Hint that one item of a list will be needed soon. An index beyond the list has no effect.
#[inline]
pub fn prefetch_item<T>(list: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(item) = list.get(index) {
        // SAFETY: the address is that of an item; a prefetch reads nothing and cannot fault.
        unsafe {
            std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(std::ptr::from_ref(item).cast());
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (list, index);
}
