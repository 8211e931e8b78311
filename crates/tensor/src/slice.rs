//! Slices of an n-dimensional array, grids of tiles over an array, and copies between two overlapping slices.

use std::ops::Range;

/// A part of an array: one range per dimension.
pub type Slice = Vec<Range<u64>>;

/// Default target size of a tile, equal to the size of a checksum unit in the format.
pub const TILE_BYTES: u64 = 64 << 10;
/// Samples that would need more tiles than this use larger tiles, which keeps the tile indexes small.
pub const SAMPLE_TILES: u64 = 1 << 17;
/// If the last dimension has at most this length, it is not cut, because most reads need all of it.
const WHOLE_LAST: u64 = 64;

/// Return the slice that covers a whole array.
pub fn whole(shape: &[u64]) -> Slice {
    shape.iter().map(|size| 0..*size).collect()
}

/// Return the number of elements in a slice, or None if it overflows a u64.
pub fn elements(slice: &[Range<u64>]) -> Option<u64> {
    slice.iter().try_fold(1u64, |product, range| product.checked_mul(range.end.saturating_sub(range.start)))
}

/// The tiles of one sample, numbered in row-major order. Tiles at the far edges are clipped; all others have the same size.
#[derive(Debug, Clone)]
pub struct Grid {
    shape: Vec<u64>,
    tile: Vec<u64>,
    counts: Vec<u64>,
}

impl Grid {
    /// Create a grid. `tile` must have one side per dimension of `shape`, and every side must be positive.
    pub fn new(shape: &[u64], tile: &[u64]) -> Grid {
        let counts = shape.iter().zip(tile).map(|(size, side)| size.div_ceil(*side)).collect();
        Grid { shape: shape.to_vec(), tile: tile.to_vec(), counts }
    }

    /// Return the number of tiles, or None if it overflows a u64.
    pub fn tiles(&self) -> Option<u64> {
        self.counts.iter().try_fold(1u64, |product, count| product.checked_mul(*count))
    }

    /// Return the slice of tile `index` in the sample.
    pub fn tile(&self, mut index: u64) -> Slice {
        let mut slice = vec![0..0; self.shape.len()];
        for axis in (0..self.shape.len()).rev() {
            let at = index % self.counts[axis] * self.tile[axis];
            index /= self.counts[axis];
            slice[axis] = at..(at + self.tile[axis]).min(self.shape[axis]);
        }
        slice
    }

    /// Return the tiles that overlap a non-empty slice, in ascending order.
    pub fn meeting(&self, slice: &[Range<u64>]) -> Vec<u64> {
        let mut found = vec![0];
        for ((range, side), count) in slice.iter().zip(&self.tile).zip(&self.counts) {
            let along = range.start / side..range.end.div_ceil(*side);
            found = found.iter().flat_map(|before| along.clone().map(move |at| before * count + at)).collect();
        }
        found
    }

    /// Cut the sample into slices of whole tiles, each of at most `bytes` bytes unless a single tile is larger. The tiles of consecutive
    /// slices are in row-major order.
    pub fn slabs(&self, element_bytes: u64, bytes: u64) -> Vec<Slice> {
        let thick = |axis: usize| self.tile[axis].min(self.shape[axis]);
        let after = |axis: usize| {
            self.shape[axis + 1..].iter().fold(element_bytes, |product, size| product.saturating_mul(*size))
        };
        // Choose the first axis along which one layer of tiles, covering all later axes, fits into `bytes`.
        let before = |axis: usize| (0..axis).fold(1u64, |product, axis| product.saturating_mul(thick(axis)));
        let layer = |axis: usize| before(axis).saturating_mul(thick(axis)).saturating_mul(after(axis));
        let last = self.shape.len().saturating_sub(1);
        let axis = (0..last).find(|axis| layer(*axis) <= bytes).unwrap_or(last);
        let layers = (bytes / layer(axis).max(1)).max(1);
        let step = |at: usize| if at == axis { self.tile[at] * layers } else { self.tile[at] };
        let mut slabs = vec![Slice::new()];
        for (at, size) in self.shape.iter().enumerate() {
            let step = if at > axis { *size } else { step(at) };
            let ranges = (0..size.div_ceil(step)).map(|index| index * step..((index + 1) * step).min(*size));
            slabs =
                slabs.iter().flat_map(|slab| ranges.clone().map(move |range| [&slab[..], &[range]].concat())).collect();
        }
        slabs
    }
}

/// Choose the tile size for samples of a given shape. A tile has at most `TILE_BYTES` bytes, or more if a sample would have over
/// `SAMPLE_TILES` tiles. Each side is a power of two or the whole dimension, and the sides are as equal as possible.
pub fn default_tile(shape: &[u64], element_bytes: u64) -> Vec<u64> {
    let mut target = TILE_BYTES.max(element_bytes);
    loop {
        let mut tile = vec![1; shape.len()];
        let bytes = |tile: &[u64]| tile.iter().fold(element_bytes, |product, side| product.saturating_mul(*side));
        if let (Some(side), Some(size)) = (tile.last_mut(), shape.last())
            && (1..=WHOLE_LAST).contains(size)
            && size.saturating_mul(element_bytes) <= target
        {
            *side = *size;
        }
        // Double the shortest side that can still grow; in a tie, double the first.
        let grown = |tile: &[u64], axis: usize| {
            let mut grown = tile.to_vec();
            grown[axis] = (tile[axis] * 2).min(shape[axis]);
            grown
        };
        let can_grow = |tile: &[u64], axis: usize| tile[axis] < shape[axis] && bytes(&grown(tile, axis)) <= target;
        while let Some(axis) = (0..shape.len()).filter(|axis| can_grow(&tile, *axis)).min_by_key(|axis| tile[*axis]) {
            tile = grown(&tile, axis);
        }
        if Grid::new(shape, &tile).tiles().is_none_or(|tiles| tiles <= SAMPLE_TILES) || target > u64::MAX / 4 {
            return tile;
        }
        target *= 2;
    }
}

/// Runs of bytes at equal distances, each of which is contiguous in two buffers.
#[derive(Debug, Clone, Copy)]
pub struct Runs {
    /// The offset of the first run in both buffers, and the bytes of each run.
    from: usize,
    to: usize,
    bytes: usize,
    count: usize,
    /// The distances between runs in both buffers.
    from_step: usize,
    to_step: usize,
}

impl Runs {
    /// Copy the runs from one buffer to the other.
    pub fn copy(&self, from: &[u8], to: &mut [u8]) {
        // The compiler copies runs of known length without calls. Tiles often have such runs.
        match self.bytes {
            16 => self.copy_arrays::<16>(from, to),
            32 => self.copy_arrays::<32>(from, to),
            64 => self.copy_arrays::<64>(from, to),
            128 => self.copy_arrays::<128>(from, to),
            bytes => self.each(|begin, end| to[end..end + bytes].copy_from_slice(&from[begin..begin + bytes])),
        }
    }

    fn copy_arrays<const BYTES: usize>(&self, from: &[u8], to: &mut [u8]) {
        self.each(|begin, end| to[end..end + BYTES].copy_from_slice(&from[begin..begin + BYTES]));
    }

    /// Visit the offsets of each run.
    fn each(&self, mut visit: impl FnMut(usize, usize)) {
        (0..self.count).for_each(|at| visit(self.from + at * self.from_step, self.to + at * self.to_step));
    }
}

/// Visit the overlap of two slices of an array as runs that are contiguous in both row-major buffers:
/// (offset in `from`, offset in `to`, bytes).
pub fn runs(from: &[Range<u64>], to: &[Range<u64>], element_bytes: usize, mut each: impl FnMut(usize, usize, usize)) {
    all_runs(from, to, element_bytes, |runs| runs.each(|begin, end| each(begin, end, runs.bytes)));
}

/// Visit the overlap of two slices of an array as `runs` does, with all runs along one axis together.
pub fn all_runs(from: &[Range<u64>], to: &[Range<u64>], element_bytes: usize, mut each: impl FnMut(&Runs)) {
    let shared: Slice = from.iter().zip(to).map(|(from, to)| from.start.max(to.start)..from.end.min(to.end)).collect();
    if shared.iter().any(|range| range.start >= range.end) {
        return;
    }
    let length = |range: &Range<u64>| (range.end - range.start) as usize;
    // The byte offset in each slice at which the overlap begins, and the byte steps along the current axis.
    let mut first = Runs { from: 0, to: 0, bytes: element_bytes, count: 1, from_step: 0, to_step: 0 };
    let (mut from_step, mut to_step) = (element_bytes, element_bytes);
    let (mut axes, mut together, mut is_first) = (Vec::with_capacity(shared.len()), true, true);
    for axis in (0..shared.len()).rev() {
        first.from += (shared[axis].start - from[axis].start) as usize * from_step;
        first.to += (shared[axis].start - to[axis].start) as usize * to_step;
        match (together, is_first) {
            (true, _) => first.bytes *= length(&shared[axis]),
            (false, true) => {
                (first.count, first.from_step, first.to_step, is_first) =
                    (length(&shared[axis]), from_step, to_step, false)
            }
            (false, false) => axes.push((length(&shared[axis]), from_step, to_step, 0)),
        }
        together &= shared[axis] == from[axis] && shared[axis] == to[axis];
        from_step *= length(&from[axis]);
        to_step *= length(&to[axis]);
    }
    // `axes` begins with the innermost axis. The last field of each entry counts the steps taken along that axis.
    loop {
        each(&first);
        let mut axis = 0;
        loop {
            let Some((count, from_step, to_step, at)) = axes.get_mut(axis) else { return };
            *at += 1;
            first.from += *from_step;
            first.to += *to_step;
            if *at < *count {
                break;
            }
            first.from -= *from_step * *count;
            first.to -= *to_step * *count;
            *at = 0;
            axis += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Return the bytes of a small array in which the value of each element is its index.
    fn numbered(shape: &[u64]) -> Vec<u8> {
        (0..shape.iter().product::<u64>()).flat_map(|index| (index as u16).to_le_bytes()).collect()
    }

    fn cut(array: &[u8], shape: &[u64], slice: &[Range<u64>]) -> Vec<u8> {
        let mut out = vec![0xAA; elements(slice).unwrap_or(0) as usize * 2];
        runs(&whole(shape), slice, 2, |from, to, bytes| {
            out[to..to + bytes].copy_from_slice(&array[from..from + bytes])
        });
        out
    }

    #[test]
    fn a_slice_put_together_from_tiles_equals_that_of_the_array() {
        for (shape, tile) in [
            (vec![7, 9, 5], vec![3, 4, 5]),
            (vec![40], vec![7]),
            (vec![6, 6], vec![1, 6]),
            (vec![2, 3, 4, 5], vec![2, 2, 3, 2]),
            (vec![5, 9, 70], vec![2, 4, 32]),
        ] {
            let (array, grid) = (numbered(&shape), Grid::new(&shape, &tile));
            let tiles: Vec<Vec<u8>> =
                (0..grid.tiles().unwrap_or(0)).map(|index| cut(&array, &shape, &grid.tile(index))).collect();
            assert_eq!(tiles.iter().map(Vec::len).sum::<usize>(), array.len());
            for low in 0..4 {
                let slice: Slice = shape.iter().map(|size| low.min(size - 1)..size - low.min(size - 1) / 2).collect();
                let mut out = vec![0; elements(&slice).unwrap_or(0) as usize * 2];
                let mut copied = out.clone();
                let mut filled = 0;
                for index in grid.meeting(&slice) {
                    runs(&grid.tile(index), &slice, 2, |from, to, bytes| {
                        out[to..to + bytes].copy_from_slice(&tiles[index as usize][from..from + bytes]);
                        filled += bytes;
                    });
                    all_runs(&grid.tile(index), &slice, 2, |runs| runs.copy(&tiles[index as usize], &mut copied));
                }
                assert_eq!((&out, filled), (&cut(&array, &shape, &slice), out.len()), "{shape:?} {tile:?} {slice:?}");
                assert_eq!(out, copied, "{shape:?} {tile:?} {slice:?}");
            }
        }
    }

    #[test]
    fn slabs_hold_the_tiles_in_order() {
        for (shape, tile, bytes) in [
            (vec![7, 9, 5], vec![3, 4, 5], 200),
            (vec![7, 9, 5], vec![3, 4, 2], 50),
            (vec![40], vec![7], 30),
            (vec![7, 9], vec![3, 4], 1 << 20),
        ] {
            let grid = Grid::new(&shape, &tile);
            let slabs = grid.slabs(2, bytes);
            let tiles: Vec<u64> = slabs.iter().flat_map(|slab| grid.meeting(slab)).collect();
            assert_eq!(tiles, (0..grid.tiles().unwrap_or(0)).collect::<Vec<_>>(), "{shape:?} {tile:?}");
            let tile_bytes = tile.iter().product::<u64>() * 2;
            assert!(
                slabs.iter().all(|slab| elements(slab).is_some_and(|elements| elements * 2 <= bytes.max(tile_bytes)))
            );
        }
    }

    #[test]
    fn tiles_are_about_one_checksum_unit_and_suit_slices() {
        assert_eq!(default_tile(&[2048, 2048, 64], 2), [32, 16, 64]);
        assert_eq!(default_tile(&[300, 1080, 1920, 3], 1), [32, 32, 16, 3]);
        assert_eq!(default_tile(&[2, 3, 5000, 40], 4), [2, 3, 64, 40]);
        assert_eq!(default_tile(&[35_000_000], 4), [16384]);
        let (shape, tile) = ([100_000, 1 << 20], default_tile(&[100_000, 1 << 20], 4));
        assert!(Grid::new(&shape, &tile).tiles().is_some_and(|tiles| tiles <= SAMPLE_TILES), "{tile:?}");
        assert_eq!(default_tile(&[5, 0, 3], 1 << 20), [1, 1, 1]);
    }

    #[test]
    fn absurd_sizes_are_refused() {
        assert_eq!(Grid::new(&[1 << 40, 1 << 40], &[1, 1]).tiles(), None);
        assert_eq!(elements(&[0..1 << 40, 0..1 << 40]), None);
        assert_eq!(elements(&[3..2]), Some(0));
    }
}
