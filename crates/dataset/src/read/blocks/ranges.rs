//! Join blocks into ranges: nearby blocks share one request, and a long block is split across several requests.

use std::sync::Arc;

use penstock_format::Id;
use penstock_format::ids::data_name;
use penstock_storage::{Piece, RangeRequest, Read, RequestCost};

use super::{Gaps, Wanted};

/// Blocks are joined into ranges of at most this length.
const JOINED_BYTES: u64 = 8 << 20;

/// With `Gaps::Few`, one gap byte is read for at least so many wanted bytes.
const FEW: u64 = 8;

/// Join nearby blocks into ranges, and cut blocks longer than a request into pieces. Returns the block indices of
/// each range's pieces, and the ranges.
pub fn plan_ranges(wanted: &[Wanted], storage: &dyn Read, gaps: Gaps) -> (Arc<Vec<Vec<usize>>>, Vec<RangeRequest>) {
    let (gap_bytes, range_bytes) =
        (widest_gap(wanted, storage.features().request_cost, gaps), storage.features().range_bytes);
    let mut segments: Vec<Vec<usize>> = Vec::new();
    let mut ranges: Vec<RangeRequest> = Vec::new();
    let mut open: Option<(Id, u64)> = None;
    for (index, block) in wanted.iter().enumerate() {
        let mut begin = 0;
        while begin < block.bytes {
            let bytes = (block.bytes - begin).min(range_bytes);
            let offset = block.offset + begin;
            match (ranges.last_mut(), segments.last_mut(), open) {
                (Some(range), Some(segments), Some((file, end)))
                    if file == block.key.0
                        && offset >= end
                        && offset - end <= gap_bytes
                        && offset + bytes - range.begin <= JOINED_BYTES =>
                {
                    range.pieces.push(Piece { skip: offset - end, bytes: bytes as usize });
                    segments.push(index);
                }
                _ => {
                    ranges.push(RangeRequest::plain(
                        &data_name(block.key.0),
                        offset,
                        bytes,
                        Some(block.file.file_bytes),
                    ));
                    segments.push(vec![index]);
                }
            }
            open = Some((block.key.0, offset + bytes));
            begin += bytes;
        }
    }
    (Arc::new(segments), ranges)
}

/// Return the widest gap between neighbouring blocks that is cheaper to read than to skip with another request. If these gaps
/// together exceed the allowed waste, only the narrowest gaps are read.
fn widest_gap(wanted: &[Wanted], cost: RequestCost, which: Gaps) -> u64 {
    let gap = |pair: &[Wanted]| {
        let gap = pair[1].offset.saturating_sub(pair[0].offset + pair[0].bytes);
        (pair[0].key.0 == pair[1].key.0 && gap <= cost.gap_bytes).then_some(gap)
    };
    let mut gaps: Vec<u64> = wanted.windows(2).filter_map(gap).collect();
    let bytes = wanted.iter().map(|wanted| wanted.bytes).sum::<u64>();
    let mut left = if which == Gaps::Few { bytes / FEW } else { bytes.saturating_mul(cost.waste) };
    if gaps.iter().sum::<u64>() <= left {
        return cost.gap_bytes;
    }
    gaps.sort_unstable();
    // The first gap that would exceed the allowance is not read, nor is any gap at least as wide.
    let too_wide = gaps.into_iter().find(|gap| left.checked_sub(*gap).map(|rest| left = rest).is_none());
    too_wide.map_or(cost.gap_bytes, |gap| gap - 1)
}
