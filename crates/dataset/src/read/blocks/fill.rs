//! Fetch blocks, verify each block as it arrives, and decode it.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use bytes::Bytes;
use penstock_error::Result;
use penstock_format::ids::data_name;
use penstock_storage::{Frozen, Piece};
use penstock_tensor::Dtype;

use super::ranges::plan_ranges;
use super::{Fetched, Wanted};
use crate::parallel;
use crate::store::blocks::{self, BlockKey};
use crate::store::context::Context;

/// Whether the block cache keeps fetched blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockCaching {
    Keep,
    Bypass,
}

impl BlockCaching {
    /// A read that would fill more than half of the block cache bypasses it.
    pub fn of(bytes: u64) -> BlockCaching {
        if bytes <= blocks::budget_bytes() / 2 { BlockCaching::Keep } else { BlockCaching::Bypass }
    }
}

/// Larger tiles are fetched in the parts that slices need.
const WHOLE_TILE_BYTES: u64 = 1 << 20;

/// Return the units to fetch together with the `missing` ones: the rest of each tile of which at least half is missing, or of which
/// an earlier read kept a part. Slices that share tiles would otherwise send a request for each part of a tile. Only for files that the
/// block cache can keep: whole tiles of a larger one would push out what is read again. A value of bytes is not a tile, and its parts are read alone.
fn rest_of_tiles(missing: &[Wanted], is_kept: impl Fn(BlockKey) -> bool) -> Vec<Wanted> {
    let tile = |wanted: &Wanted| (wanted.key.0, wanted.chunk, wanted.block);
    let mut all = Vec::new();
    for of_tile in missing.chunk_by(move |one, next| tile(one) == tile(next)) {
        let Wanted { file, chunk, block, .. } = &of_tile[0];
        let entry = &file.tail.chunks[*chunk];
        let is_tile = entry.dtype != Dtype::Bytes && entry.stored_bytes.get(*block) <= WHOLE_TILE_BYTES;
        let fits = is_tile && file.data_end <= blocks::budget_bytes() / 2;
        let units = if fits { entry.units_of(*block).1 } else { 0 };
        let is_kept = |unit: usize| is_kept(file.key(*chunk, *block, Some(unit)));
        let whole = of_tile[0].unit.is_some() && (2 * of_tile.len() >= units || (0..units).any(is_kept));
        let rest = (0..if whole { units } else { 0 }).filter(|unit| !is_kept(*unit));
        all.extend(rest.map(|unit| Wanted { beside: true, ..Wanted::new(file, *chunk, *block, Some(unit)) }));
    }
    all
}

/// Return the units or blocks to fetch for tiles: those that are not `found`, each once, and the rest of tiles that the block cache keeps.
pub fn missing_of_tiles(
    wanted: impl Iterator<Item = Wanted>,
    cache: BlockCaching,
    mut found: impl FnMut(BlockKey) -> bool,
    is_kept: impl Fn(BlockKey) -> bool,
) -> Vec<Wanted> {
    let mut seen = HashSet::new();
    let mut missing: Vec<Wanted> = wanted.filter(|wanted| seen.insert(wanted.key) && !found(wanted.key)).collect();
    if cache == BlockCaching::Keep {
        let rest: Vec<Wanted> =
            rest_of_tiles(&missing, is_kept).into_iter().filter(|unit| seen.insert(unit.key)).collect();
        missing.extend(rest);
    }
    missing
}

impl Fetched {
    /// Fetch, verify and decode blocks. An error takes the place of each damaged block, and the reader reports the error.
    pub fn fill(&mut self, context: &Context, mut wanted: Vec<Wanted>, cache: BlockCaching) -> Result<()> {
        wanted.sort_by_key(|wanted| (wanted.key.0, wanted.offset));
        let wanted = Arc::new(wanted);
        let failed = self.fill_once(context, &wanted, cache)?;
        // The network may have damaged some bytes, so blocks that fail verification are requested again, but only once.
        let again: Vec<Wanted> =
            wanted.iter().filter(|wanted| failed.contains(&wanted.key) && !wanted.beside).cloned().collect();
        again.iter().for_each(|block| context.reads().distrust(&data_name(block.key.0), block.offset, block.bytes));
        self.fill_once(context, &Arc::new(again), cache)?;
        Ok(())
    }

    /// Fetch, verify and decode the tiles' units or blocks that are not in the cache.
    pub fn of_tiles(context: &Context, wanted: impl Iterator<Item = Wanted>, cache: BlockCaching) -> Result<Fetched> {
        let mut fetched = Fetched::default();
        let missing = missing_of_tiles(wanted, cache, |key| fetched.found(key), |key| blocks::get(key).is_some());
        fetched.fill(context, missing, cache)?;
        Ok(fetched)
    }

    /// Fetch, verify and decode blocks. Returns the keys of blocks that fail verification or decoding.
    fn fill_once(
        &mut self,
        context: &Context,
        wanted: &Arc<Vec<Wanted>>,
        cache: BlockCaching,
    ) -> Result<HashSet<BlockKey>> {
        if wanted.is_empty() {
            return Ok(HashSet::new());
        }
        let (segments, mut ranges) = plan_ranges(wanted, context.reads(), self.gaps);
        if cache == BlockCaching::Bypass {
            // Blocks that are not cached may share a larger buffer, if gaps make up at most a fifth of the buffer.
            for range in &mut ranges {
                let gaps: u64 = range.pieces.iter().map(|piece| piece.skip).sum();
                range.shared = 5 * gaps <= range.end() - range.begin;
            }
        }
        for (range, segments) in ranges.iter_mut().zip(segments.iter()) {
            let slot = |(piece, block): (&Piece, &usize)| {
                self.slots.get_mut(&wanted[*block].key).map(|slot| slot.split_to(piece.bytes))
            };
            range.slots = range.pieces.iter().zip(segments).map(slot).collect();
        }
        self.slots.clear();
        // The address of each verified buffer. A hedged request may get two responses, and either buffer may be returned.
        let verified: Arc<Vec<AtomicUsize>> = Arc::new(wanted.iter().map(|_| AtomicUsize::new(0)).collect());
        let verify = {
            let (wanted, verified, segments) = (wanted.clone(), verified.clone(), segments.clone());
            move |range: usize, piece: usize, bytes: &Bytes| {
                let index: usize = segments[range][piece];
                let block = &wanted[index];
                let good = bytes.len() as u64 == block.bytes
                    && block.file.verify_stored(block.chunk, block.block, block.unit, bytes).is_ok();
                verified[index].store(if good { bytes.as_ptr() as usize } else { 0 }, Relaxed);
            }
        };
        let mut parts: Vec<Vec<Bytes>> = wanted.iter().map(|_| Vec::with_capacity(1)).collect();
        for (answer, segments) in context.reads().fetch_then(ranges, Arc::new(verify)).into_iter().zip(segments.iter())
        {
            for (piece, block) in answer?.into_iter().zip(segments) {
                parts[*block].push(piece);
            }
        }
        let memory = &self.memory;
        let decoding_bytes = |block: &Wanted| {
            if block.file.tail.chunks[block.chunk].raw_bytes.is_some() { block.bytes as usize } else { 0 }
        };
        let decoded = parallel::map(wanted.len(), wanted.iter().map(decoding_bytes).sum(), |index| {
            let stored = match &parts[index][..] {
                [] => Bytes::new(),
                [whole] => whole.clone(),
                several => match memory
                    .as_ref()
                    .and_then(|memory| Frozen::joined(memory, several.iter().map(|piece| &piece[..])))
                {
                    Some(joined) => Bytes::from_owner(joined),
                    None => several.concat().into(),
                },
            };
            let Wanted { file, chunk, block, unit, .. } = &wanted[index];
            if verified[index].load(Relaxed) != stored.as_ptr() as usize || stored.is_empty() {
                file.verify_stored(*chunk, *block, *unit, &stored)?;
            }
            file.decoded(*chunk, *block, stored)
        })?;
        let mut failed = HashSet::new();
        for (wanted, block) in wanted.iter().zip(decoded) {
            match &block {
                Ok(bytes) if cache == BlockCaching::Keep && !wanted.awaited => blocks::keep(wanted.key, bytes.clone()),
                Ok(_) => {}
                Err(_) => {
                    failed.insert(wanted.key);
                }
            }
            self.blocks.insert(wanted.key, block);
        }
        Ok(failed)
    }
}
