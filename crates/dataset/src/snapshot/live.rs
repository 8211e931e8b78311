//! Map a position to its part, fragment and physical row. A deleted or absent sample keeps its physical row, but has no position.

use std::collections::HashSet;
use std::sync::Arc;

use penstock_error::Result;
use penstock_format::cursor::malformed;
use penstock_format::ids::Run;
use penstock_format::manifest::{Fragment, PageRef};
use penstock_format::rows::RowIds;
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use super::Snapshot;
use super::ranks::{Gaps, LiveRun};
use crate::store::blocks::cache;
use crate::store::context::file_cache_bytes;

/// A page or a fragment: a group of consecutive samples in manifest order.
#[derive(Debug, Clone)]
pub enum Part {
    Page(PageRef),
    Fragment(Arc<Fragment>),
}

impl Part {
    /// Return the number of samples, deleted ones included.
    pub fn samples(&self) -> u64 {
        match self {
            Part::Page(page) => page.samples,
            Part::Fragment(fragment) => fragment.samples,
        }
    }

    pub fn page(&self) -> Option<PageRef> {
        if let Part::Page(page) = self { Some(*page) } else { None }
    }
}

impl Snapshot {
    pub fn pages(&self) -> HashSet<PageRef> {
        self.parts.iter().filter_map(Part::page).collect()
    }
}

/// The positions of a snapshot's samples.
pub struct Live {
    /// The position of each part's first sample, followed by the total number of samples.
    starts: Vec<u64>,
    deleted: Option<Deleted>,
}

/// The deleted and absent samples of a snapshot.
struct Deleted {
    sets: Vec<Arc<RowIds>>,
    /// The deleted and absent rows of each part.
    gaps: Cache<usize, Arc<Gaps>, ByHeld>,
}

#[derive(Clone)]
struct ByHeld;

impl Weighter<usize, Arc<Gaps>> for ByHeld {
    fn weight(&self, _part: &usize, gaps: &Arc<Gaps>) -> u64 {
        64 + gaps.held_bytes()
    }
}

/// Estimated number of parts whose deleted rows are kept.
const KEPT_PARTS: usize = 1024;

impl Live {
    /// Cost: nothing without deletions. Otherwise, reads their row ids, and the pages with gaps in their row ids.
    fn of(snapshot: &Snapshot) -> Result<Live> {
        let sets = snapshot.context.row_ids(&snapshot.overlays.hidden().collect::<Vec<_>>())?;
        let mut starts = vec![0];
        for part in 0..snapshot.parts.len() {
            let live = snapshot.parts[part].samples().checked_sub(deleted_in(snapshot, part, &sets)?);
            // `Snapshot::with_root` has checked the sum of all samples.
            starts.push(starts[part] + live.ok_or_else(|| malformed("a deletion lists a sample twice"))?);
        }
        let (found, expected) = (starts[snapshot.parts.len()], snapshot.record().live);
        if found != expected {
            let text = format!("commit {} has {expected} samples, but its deletions leave {found}", snapshot.id());
            return Err(malformed(text));
        }
        let gaps = || cache(KEPT_PARTS, file_cache_bytes() / 4, ByHeld);
        Ok(Live { starts, deleted: (!sets.is_empty()).then(|| Deleted { sets, gaps: gaps() }) })
    }

    /// Return the part that contains a position, which must be in range.
    #[inline]
    pub fn part_of(&self, position: u64) -> usize {
        self.starts.partition_point(|start| *start <= position) - 1
    }

    /// Return the position of a part's first sample.
    pub fn start(&self, part: usize) -> u64 {
        self.starts[part]
    }

    fn gaps(&self, part: usize, fragments: &Fragments) -> Result<Option<Arc<Gaps>>> {
        let Some(deleted) = self.deleted.as_ref() else { return Ok(None) };
        let make = || {
            let gaps = gaps_of(fragments.as_slice(), &deleted.sets);
            let samples = fragments.as_slice().iter().map(|fragment| fragment.samples).sum::<u64>();
            // The first counts are of ranges of row ids, which may be wrong if two samples have the same row id.
            match samples - gaps.rows() == self.starts[part + 1] - self.starts[part] {
                true => Ok(Arc::new(gaps)),
                false => {
                    let rows = gaps.rows();
                    Err(malformed(format!("{rows} of {samples} samples of manifest part {part} are deleted, which is not as counted")))
                }
            }
        };
        deleted.gaps.get_or_insert_with(&part, make).map(Some)
    }
}

/// Return how many samples of a part are deleted.
fn deleted_in(snapshot: &Snapshot, part: usize, sets: &[Arc<RowIds>]) -> Result<u64> {
    if sets.is_empty() {
        return Ok(0);
    }
    let count = |range: std::ops::Range<u64>| sets.iter().map(|set| set.count_in(range.clone())).sum::<u64>();
    Ok(match &snapshot.parts[part] {
        Part::Page(page) if page.is_dense() => count(page.least..page.least + page.span),
        _ => snapshot.fragments(part)?.as_slice().iter().flat_map(|fragment| &fragment.runs).map(|run| count(run.first..run.end())).sum(),
    })
}

/// Return the deleted rows of a part.
fn gaps_of(fragments: &[Fragment], sets: &[Arc<RowIds>]) -> Gaps {
    let mut runs = Vec::new();
    for (run, row) in runs_of(fragments) {
        for set in sets {
            runs.extend(
                set.runs_in(run.first..run.end()).into_iter().map(|(deleted, _)| (row + (deleted.first - run.first), deleted.count)),
            );
        }
    }
    Gaps::new(runs)
}

/// Return the runs of row ids of a part, each with the row of its first sample. Rows are counted from the beginning of the part.
pub fn runs_of(fragments: &[Fragment]) -> impl Iterator<Item = (Run, u64)> {
    fragments.iter().flat_map(|fragment| &fragment.runs).scan(0, |next, run| {
        let first = *next;
        *next += run.count;
        Some((*run, first))
    })
}

/// The fragments of one part.
pub enum Fragments {
    Page(Arc<Vec<Fragment>>),
    One(Arc<Fragment>),
}

impl Fragments {
    pub fn as_slice(&self) -> &[Fragment] {
        match self {
            Fragments::Page(fragments) => fragments,
            Fragments::One(fragment) => std::slice::from_ref(fragment),
        }
    }
}

/// The fragments of one part, and which of their samples are deleted. Rows are counted from the beginning of the part.
pub struct LiveFragments {
    fragments: Fragments,
    gaps: Option<Arc<Gaps>>,
}

impl LiveFragments {
    pub fn as_slice(&self) -> &[Fragment] {
        self.fragments.as_slice()
    }

    /// Return the physical row of sample number `live` of the part. Deleted samples are not counted.
    #[inline]
    pub fn physical_row(&self, live: u64) -> u64 {
        self.gaps.as_ref().map_or(live, |gaps| gaps.physical_row(live))
    }

    /// Return the run that contains a live sample. `hint` is 0 at first. Samples must ascend from call to call.
    #[inline]
    pub fn run(&self, hint: &mut usize, live: u64) -> LiveRun {
        self.gaps.as_ref().map_or(LiveRun { deleted: 0, end: u64::MAX }, |gaps| gaps.run(hint, live))
    }

    /// Return how many samples of a range of physical rows are alive.
    pub fn live_in(&self, rows: std::ops::Range<u64>) -> u64 {
        self.gaps.as_ref().map_or(rows.end - rows.start, |gaps| gaps.live_before(rows.end).0 - gaps.live_before(rows.start).0)
    }

    /// Return the number of a physical row if deleted samples are not counted. Returns None for a deleted sample.
    pub fn live_row(&self, row: u64) -> Option<u64> {
        self.gaps.as_ref().map_or(Some(row), |gaps| gaps.live_row(row))
    }
}

impl Snapshot {
    /// Return the positions of the samples. Cost of the first call: as for `Live::of`.
    pub fn live(&self) -> Result<&Live> {
        let known = &self.tables.get().live;
        match known.get() {
            Some(live) => Ok(live),
            None => {
                let live = Live::of(self)?;
                Ok(known.get_or_init(|| live))
            }
        }
    }

    /// Return all fragments of a part. Cost: reads a page, unless it is cached.
    pub fn fragments(&self, part: usize) -> Result<Fragments> {
        Ok(match &self.parts[part] {
            Part::Page(page) => Fragments::Page(self.context.page(page)?),
            Part::Fragment(fragment) => Fragments::One(fragment.clone()),
        })
    }

    /// Return all fragments of a part, with their deleted samples. Costs the same as `fragments` and `live`.
    pub fn live_fragments(&self, part: usize) -> Result<LiveFragments> {
        let fragments = self.fragments(part)?;
        Ok(LiveFragments { gaps: self.live()?.gaps(part, &fragments)?, fragments })
    }

    /// Return the row ids of all samples that are deleted or absent. Cost: reads the sets of row ids.
    pub fn hidden(&self) -> Result<RowIds> {
        self.context.all_row_ids(self.overlays.hidden())
    }

    /// Return the row ids of all samples that are deleted or absent, and of those that no fragment has any more. Cost: as for `hidden`.
    pub fn not_alive(&self) -> Result<RowIds> {
        self.context.all_row_ids(self.overlays.hidden().chain(self.overlays.gone()))
    }

    /// Visit every fragment.
    pub fn each_fragment(&self, mut visit: impl FnMut(&Fragment) -> Result<()>) -> Result<()> {
        (0..self.parts.len()).try_for_each(|part| self.fragments(part)?.as_slice().iter().try_for_each(&mut visit))
    }
}
