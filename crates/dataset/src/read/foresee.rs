//! What reads would request of a store, without reading. The order of steps is that of `fetch` and `tiles`, with a block cache that holds no
//! bytes.

use penstock_error::Result;
use penstock_format::datafile::{Layout, UNIT_BYTES};
use penstock_format::schema::ColumnSpec;
use penstock_storage::RangeRequest;
use penstock_tensor::slice::Slice;
use quick_cache::Weighter;
use quick_cache::sync::Cache as Blocks;

use super::blocks::fill::{BlockCaching, missing_of_tiles};
use super::blocks::ranges::plan_ranges;
use super::blocks::share::{span_bytes, with_neighbours};
use super::blocks::stream::streams;
use super::blocks::{Gaps, Wanted};
use super::fetch::Purpose;
use super::reader::Reader;
use super::tile_plan::{PlannedTiles, Tiles};
use crate::store::blocks::{BlockKey, budget_bytes, cache, free_bytes};

/// The requests of some reads in a row, which begin with an empty block cache.
pub struct Foresight {
    held: Blocks<BlockKey, u64, OfLength>,
    pub requests: u64,
    pub bytes: u64,
}

#[derive(Clone)]
struct OfLength;

impl Weighter<BlockKey, u64> for OfLength {
    fn weight(&self, _key: &BlockKey, bytes: &u64) -> u64 {
        bytes + 128
    }
}

impl Default for Foresight {
    fn default() -> Foresight {
        let bytes = free_bytes();
        Foresight { held: cache((bytes / UNIT_BYTES) as usize, bytes, OfLength), requests: 0, bytes: 0 }
    }
}

impl Foresight {
    fn has(&self, key: BlockKey) -> bool {
        self.held.get(&key).is_some()
    }

    fn note(&mut self, ranges: &[RangeRequest]) {
        self.requests += ranges.len() as u64;
        self.bytes += ranges.iter().map(|range| range.end() - range.begin).sum::<u64>();
    }

    /// Keep the blocks that the block cache would keep, with their decoded sizes.
    fn keep(&self, wanted: &[Wanted], keeps: impl Fn(&Wanted) -> bool) {
        for wanted in wanted.iter().filter(|wanted| keeps(wanted)) {
            let raw_bytes = &wanted.file.tail.chunks[wanted.chunk].raw_bytes;
            let decoded =
                raw_bytes.as_ref().filter(|_| wanted.unit.is_none()).map_or(wanted.bytes, |raw| raw.get(wanted.block));
            self.held.insert(wanted.key, decoded);
        }
    }
}

impl Reader {
    /// Note what `fetch` would request. Cost: reads unopened tails.
    pub fn foresee_blocks(
        &mut self,
        columns: &[&ColumnSpec],
        purpose: Purpose,
        foresight: &mut Foresight,
    ) -> Result<()> {
        self.open(columns)?;
        let context = self.snapshot.context.clone();
        let storage = context.reads();
        let mut wanted = self.blocks(columns);
        wanted.retain(|block| !self.fetched.blocks.contains_key(&block.key) && !foresight.has(block.key));
        let around = purpose == Purpose::Epoch && span_bytes(&wanted) <= budget_bytes() / 2;
        if around {
            wanted = with_neighbours(wanted, storage.features().request_cost.gap_bytes);
            wanted.retain(|block| !foresight.has(block.key));
        }
        let keeps_all = match purpose {
            Purpose::Scan { keep: false } => false,
            _ => BlockCaching::of(wanted.iter().map(|wanted| wanted.bytes).sum()) == BlockCaching::Keep,
        };
        wanted.sort_by_key(|wanted| (wanted.key.0, wanted.offset));
        foresight.note(&plan_ranges(&wanted, storage, Gaps::All).1);
        foresight
            .keep(&wanted, |wanted| keeps_all || around || (wanted.partial && matches!(purpose, Purpose::Scan { .. })));
        Ok(())
    }

    /// Note what reads of these columns would request after `fetch`: streamed samples and tiles. Cost: reads unopened tails.
    pub fn foresee_others(&mut self, columns: &[&ColumnSpec], foresight: &mut Foresight) -> Result<()> {
        self.open(columns)?;
        let step = (self.snapshot.context.reads().features().stream_bytes / UNIT_BYTES).max(1) * UNIT_BYTES;
        let mut tiles: Vec<(&ColumnSpec, Tiles)> = columns.iter().map(|column| (*column, Tiles::default())).collect();
        self.each_readable(columns, |column, source| {
            let (entry, left_out) = (source.entry(), self.left_out_of(column));
            let rows = source.rows.iter().filter(|(row, place)| {
                entry.is_valid(*row)
                    && !left_out.get(*place as usize).is_some_and(|flag| *flag)
                    && !source.file.in_memory()
            });
            if entry.layout == Layout::Tiled {
                let Some((_, tiles)) = tiles.iter_mut().find(|(of, _)| of.id == column.id) else { return };
                rows.for_each(|row| {
                    tiles.add(source, *row, None);
                });
            } else if streams(&source.file, entry) {
                let mut blocks: Vec<usize> = rows.map(|(row, _)| *row as usize).collect();
                blocks.sort_unstable();
                blocks.dedup();
                for bytes in blocks.into_iter().map(|block| entry.stored_bytes.get(block)) {
                    foresight.requests += bytes.div_ceil(step);
                    foresight.bytes += bytes;
                }
            }
        });
        tiles.into_iter().for_each(|(_, tiles)| self.foresee_tiles(tiles, foresight));
        Ok(())
    }

    /// Note what `slices` would request.
    pub fn foresee_slices(
        &self,
        column: &ColumnSpec,
        slices: &[Option<Slice>],
        foresight: &mut Foresight,
    ) -> Result<()> {
        let mut tiles = Tiles::default();
        self.each_divisible(column, |source, rows| {
            for (row, place) in rows.iter().filter(|(row, _)| source.entry().is_valid(*row) && !source.file.in_memory())
            {
                if let Some(slice) = &slices[*place as usize] {
                    tiles.add(source, (*row, *place), Some(slice));
                }
            }
            Ok(())
        })?;
        self.foresee_tiles(tiles, foresight);
        Ok(())
    }

    fn foresee_tiles(&self, tiles: Tiles, foresight: &mut Foresight) {
        let storage = self.snapshot.context.reads();
        let samples = tiles.into_samples();
        let planned = PlannedTiles::new(&samples);
        foresight.note(&planned.streamed(&samples, storage));
        for group in planned.groups(&samples) {
            let wanted = group.iter().flat_map(|read| read.wanted(&samples));
            let mut missing =
                missing_of_tiles(wanted, planned.cache, |key| foresight.has(key), |key| foresight.has(key));
            missing.sort_by_key(|wanted| (wanted.key.0, wanted.offset));
            foresight.note(&plan_ranges(&missing, storage, Gaps::All).1);
            foresight.keep(&missing, |_| planned.cache == BlockCaching::Keep);
        }
    }
}
