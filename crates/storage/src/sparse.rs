//! Memory for parts of known sizes that come and go. Each part has addresses of its own, so memory is never fragmented: pages of a part that
//! is freed go back to the system.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{AcqRel, Release};

use bytes::Bytes;
use memmap2::{MmapOptions, MmapRaw};

/// Parts begin at multiples of this.
const PAGE_BYTES: u64 = 4096;

/// Addresses for all parts. Only those that are filled take memory.
#[derive(Debug)]
pub struct Sparse {
    map: MmapRaw,
    /// Where each part begins, and where the last one ends.
    begins: Vec<u64>,
    is_taken: Vec<AtomicBool>,
}

impl Sparse {
    /// Reserve addresses for parts of these sizes in bytes. Fails if the system has too few.
    pub fn new(sizes: impl Iterator<Item = u64>) -> io::Result<Arc<Sparse>> {
        let mut begins = vec![0];
        begins.extend(sizes.scan(0, |end, bytes| {
            *end += Sparse::room_bytes(bytes);
            Some(*end)
        }));
        let bytes = usize::try_from(begins[begins.len() - 1]).map_err(|_| io::ErrorKind::OutOfMemory)?;
        let map = MmapRaw::from(MmapOptions::new().len(bytes.max(1)).no_reserve_swap().map_anon()?);
        // A large page would take memory for parts that are not filled. Kernels without large pages refuse the advice.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::NoHugePage);
        let is_taken = begins.iter().skip(1).map(|_| AtomicBool::new(false)).collect();
        Ok(Arc::new(Sparse { map, begins, is_taken }))
    }

    /// Return the memory that a part of this size takes.
    pub fn room_bytes(bytes: u64) -> u64 {
        bytes.next_multiple_of(PAGE_BYTES)
    }

    /// Copy a part into its place. Its memory is freed with the last reference to it. A part of another size, or one of which somebody still
    /// has an older copy, has memory of its own.
    pub fn put(self: &Arc<Sparse>, number: usize, content: &[u8]) -> Bytes {
        let (begin, room) = (self.begins[number] as usize, self.begins[number + 1] - self.begins[number]);
        if Sparse::room_bytes(content.len() as u64) != room
            || content.is_empty()
            || self.is_taken[number].swap(true, AcqRel)
        {
            return Bytes::copy_from_slice(content);
        }
        // SAFETY: the part lies in the map and is as long as the content. The mark says that nobody else reads or writes this part.
        unsafe { std::ptr::copy_nonoverlapping(content.as_ptr(), self.map.as_mut_ptr().add(begin), content.len()) };
        Bytes::from_owner(SparsePart { sparse: self.clone(), number, bytes: content.len() })
    }
}

/// A part that is filled.
struct SparsePart {
    sparse: Arc<Sparse>,
    number: usize,
    bytes: usize,
}

impl AsRef<[u8]> for SparsePart {
    fn as_ref(&self) -> &[u8] {
        let begin = self.sparse.begins[self.number] as usize;
        // SAFETY: these bytes of the map were written when the part was filled, and are not written again before it is dropped.
        unsafe { std::slice::from_raw_parts(self.sparse.map.as_ptr().add(begin), self.bytes) }
    }
}

impl Drop for SparsePart {
    fn drop(&mut self) {
        // SAFETY: nobody has a reference to this part of the map any more.
        #[cfg(unix)]
        unsafe {
            let (begin, end) = (self.sparse.begins[self.number], self.sparse.begins[self.number + 1]);
            // If the system refuses, the memory stays, and is used again for this part.
            let _ = self.sparse.map.unchecked_advise_range(
                memmap2::UncheckedAdvice::DontNeed,
                begin as usize,
                (end - begin) as usize,
            );
        }
        self.sparse.is_taken[self.number].store(false, Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_come_and_go_without_moving() {
        let sparse = Sparse::new([5000, 0, 1, 4096].into_iter()).unwrap();
        let one = sparse.put(0, &[7; 5000]);
        let (three, last) = (sparse.put(2, &[9]), sparse.put(3, &[3; 4096]));
        assert_eq!(last.as_ptr() as usize - one.as_ptr() as usize, 3 * 4096);
        assert_eq!((sparse.put(1, &[]), &three[..]), (Bytes::new(), &[9][..]));
        // An older copy is still read.
        let (place, other) = (one.as_ptr(), sparse.put(0, &[8; 5000]));
        assert_ne!(other.as_ptr(), place);
        assert!(one.iter().all(|byte| *byte == 7) && other.iter().all(|byte| *byte == 8));
        drop(one);
        let again = sparse.put(0, &[6; 5000]);
        assert_eq!(again.as_ptr(), place);
        assert!(again.iter().all(|byte| *byte == 6) && last.iter().all(|byte| *byte == 3));
        assert_eq!(sparse.put(2, &[1; 5000]).len(), 5000, "a part of another size");
    }
}
