//! Map a position to its part, fragment and physical row. A deleted or absent sample keeps its physical row, but has no position.

use std::collections::HashSet;
use std::sync::Arc;

use penstock_error::{Error, Result};
use penstock_format::cursor::malformed;
use penstock_format::ids::Run;
use penstock_format::manifest::{Fragment, PageRef};
use penstock_format::overlay::Overlay;
use penstock_format::rows::RowIds;
use quick_cache::Weighter;
use quick_cache::sync::Cache;

use super::Snapshot;
use super::ranks::{Gaps, LiveRun};
use crate::store::blocks::cache;
use crate::store::context::file_cache_bytes;

/// A page or a fragment: a group of consecutive samples in manifest order.
#[derive(Debug, Clone)]
pub enum ManifestPart {
    Page(PageRef),
    Fragment(Arc<Fragment>),
}

impl ManifestPart {
    /// Return the number of samples, deleted ones included.
    pub fn samples(&self) -> u64 {
        match self {
            ManifestPart::Page(page) => page.samples,
            ManifestPart::Fragment(fragment) => fragment.samples,
        }
    }

    pub fn page(&self) -> Option<PageRef> {
        if let ManifestPart::Page(page) = self { Some(*page) } else { None }
    }
}

impl Snapshot {
    pub fn pages(&self) -> HashSet<PageRef> {
        self.parts.iter().filter_map(ManifestPart::page).collect()
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
    count: u64,
    /// The deleted and absent rows of each part.
    gaps: Cache<usize, Arc<Gaps>, PartWeight>,
    /// Parts that were searched instead.
    searched: Cache<usize, Arc<Searched>, PartWeight>,
}

#[derive(Clone)]
struct PartWeight;

impl Weighter<usize, Arc<Gaps>> for PartWeight {
    fn weight(&self, _part: &usize, gaps: &Arc<Gaps>) -> u64 {
        64 + gaps.held_bytes()
    }
}

impl Weighter<usize, Arc<Searched>> for PartWeight {
    fn weight(&self, _part: &usize, searched: &Arc<Searched>) -> u64 {
        64 + searched.held_bytes()
    }
}

/// Estimated number of parts whose deleted rows are kept.
const KEPT_PARTS: usize = 1024;
/// Tables of more deleted rows take too much time and memory for few samples of many parts, which are searched for instead.
const MANY_DELETED: u64 = 1 << 20;
/// A search for one sample takes as long as a table of so many deleted rows.
const SEARCHED: u64 = 32;

impl Live {
    /// Cost: nothing without deletions. Otherwise, reads their row ids, and the pages with gaps in their row ids.
    fn of(snapshot: &Snapshot) -> Result<Live> {
        let sets = snapshot.context.row_ids(snapshot.overlays.rows(Overlay::hides))?;
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
        let deleted = (!sets.is_empty()).then(|| Deleted {
            sets,
            count: snapshot.record().samples - expected,
            gaps: cache(KEPT_PARTS, file_cache_bytes() / 4, PartWeight),
            searched: cache(KEPT_PARTS, file_cache_bytes() / 16, PartWeight),
        });
        Ok(Live { starts, deleted })
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

    /// Return the deleted rows of a part of which `wanted` samples are looked up.
    fn gaps(&self, part: usize, fragments: &Fragments, wanted: u64) -> Result<Option<PartGaps>> {
        let Some(deleted) = self.deleted.as_ref() else { return Ok(None) };
        let live = self.starts[part + 1] - self.starts[part];
        let samples: u64 = fragments.as_slice().iter().map(|fragment| fragment.samples).sum();
        let dead = samples.saturating_sub(live);
        if deleted.count > MANY_DELETED && wanted.saturating_mul(SEARCHED) < dead && deleted.gaps.peek(&part).is_none()
        {
            let search = || Ok::<_, Error>(Arc::new(Searched::new(fragments.as_slice(), &deleted.sets)));
            let searched = deleted.searched.get_or_insert_with(&part, search)?;
            if searched.samples == live {
                return Ok(Some(PartGaps::Searched(searched)));
            }
        }
        let count_gaps = || {
            let gaps = gaps_of(fragments.as_slice(), &deleted.sets);
            let rows = gaps.rows();
            // The first counts are of ranges of row ids, which may be wrong if two samples have the same row id.
            if samples - rows != live {
                return Err(malformed(format!(
                    "{rows} of {samples} samples in manifest part {part} are deleted, which differs from the recorded count"
                )));
            }
            Ok(Arc::new(gaps))
        };
        deleted.gaps.get_or_insert_with(&part, count_gaps).map(|table| Some(PartGaps::Table(table)))
    }
}

/// Return how many samples of a part are deleted.
fn deleted_in(snapshot: &Snapshot, part: usize, sets: &[Arc<RowIds>]) -> Result<u64> {
    if sets.is_empty() {
        return Ok(0);
    }
    let count = |range: std::ops::Range<u64>| sets.iter().map(|set| set.count_in(range.clone())).sum::<u64>();
    Ok(match &snapshot.parts[part] {
        ManifestPart::Page(page) if page.is_dense() => count(page.least..page.least + page.span),
        _ => snapshot
            .fragments(part)?
            .as_slice()
            .iter()
            .flat_map(|fragment| &fragment.runs)
            .map(|run| count(run.first..run.end()))
            .sum(),
    })
}

/// Return the deleted rows of a part.
fn gaps_of(fragments: &[Fragment], sets: &[Arc<RowIds>]) -> Gaps {
    let mut runs = Vec::new();
    for (run, row) in runs_of(fragments) {
        for set in sets {
            runs.extend(
                set.runs_in(run.first..run.end())
                    .into_iter()
                    .map(|(deleted, _)| (row + (deleted.first - run.first), deleted.count)),
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

/// The deleted rows of a part.
enum PartGaps {
    Table(Arc<Gaps>),
    Searched(Arc<Searched>),
}

/// A part in which samples are searched for among the deleted row ids, because a table of its deleted rows would cost more.
struct Searched {
    sets: Vec<Arc<RowIds>>,
    /// Runs of at most `COUNTED` row ids, each with its first row and how many samples are before it.
    runs: Vec<(Run, u64, u64)>,
    samples: u64,
}

/// Row ids between two counts of samples.
const COUNTED: u64 = 1 << 16;

impl Searched {
    fn new(fragments: &[Fragment], sets: &[Arc<RowIds>]) -> Searched {
        let mut searched = Searched { sets: sets.to_vec(), runs: Vec::new(), samples: 0 };
        for (run, row) in runs_of(fragments) {
            for first in (0..run.count).step_by(COUNTED as usize) {
                let part = Run { first: run.first + first, count: COUNTED.min(run.count - first) };
                searched.runs.push((part, row + first, searched.samples));
                searched.samples += searched.live_in(part.first, part.count);
            }
        }
        searched
    }

    fn held_bytes(&self) -> u64 {
        size_of_val(&self.runs[..]) as u64
    }

    /// Return how many samples are among `count` row ids.
    fn live_in(&self, first: u64, count: u64) -> u64 {
        count - self.sets.iter().map(|set| set.count_in(first..first + count)).sum::<u64>().min(count)
    }

    fn physical_row(&self, live: u64) -> u64 {
        let (run, row, before) = self.runs[self.runs.partition_point(|(_, _, before)| *before <= live) - 1];
        // The sample is the last of the fewest row ids that have enough samples.
        let (mut least, mut most) = (live - before + 1, run.count);
        while least < most {
            let middle = least + (most - least) / 2;
            if self.live_in(run.first, middle) > live - before { most = middle } else { least = middle + 1 }
        }
        row + least - 1
    }

    fn live_row(&self, row: u64) -> Option<u64> {
        let (run, first, before) = self.runs[self.runs.partition_point(|(_, first, _)| *first <= row) - 1];
        let is_live = self.live_in(run.first + (row - first), 1) > 0;
        is_live.then(|| before + self.live_in(run.first, row - first))
    }
}

/// The fragments of one part, and which of their samples are deleted. Rows are counted from the beginning of the part.
pub struct LiveFragments {
    fragments: Fragments,
    gaps: Option<PartGaps>,
}

impl LiveFragments {
    pub fn as_slice(&self) -> &[Fragment] {
        self.fragments.as_slice()
    }

    /// Return the physical row of sample number `live` of the part. Deleted samples are not counted.
    #[inline]
    pub fn physical_row(&self, live: u64) -> u64 {
        match &self.gaps {
            None => live,
            Some(PartGaps::Table(gaps)) => gaps.physical_row(live),
            Some(PartGaps::Searched(searched)) => searched.physical_row(live),
        }
    }

    /// Return the run that contains a live sample. `hint` is 0 at first. Samples must ascend from call to call.
    #[inline]
    pub fn run(&self, hint: &mut usize, live: u64) -> LiveRun {
        match &self.gaps {
            None => LiveRun { deleted: 0, end: u64::MAX },
            Some(PartGaps::Table(gaps)) => gaps.run(hint, live),
            Some(PartGaps::Searched(searched)) => {
                LiveRun { deleted: searched.physical_row(live) - live, end: live + 1 }
            }
        }
    }

    /// Return the number of a physical row if deleted samples are not counted. Returns None for a deleted sample.
    pub fn live_row(&self, row: u64) -> Option<u64> {
        match &self.gaps {
            None => Some(row),
            Some(PartGaps::Table(gaps)) => gaps.live_row(row),
            Some(PartGaps::Searched(searched)) => searched.live_row(row),
        }
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
            ManifestPart::Page(page) => Fragments::Page(self.context.page(page)?),
            ManifestPart::Fragment(fragment) => Fragments::One(fragment.clone()),
        })
    }

    /// Return all fragments of a part, with their deleted samples, to look up `wanted` samples. Costs the same as `fragments` and `live`.
    pub fn live_fragments(&self, part: usize, wanted: usize) -> Result<LiveFragments> {
        let fragments = self.fragments(part)?;
        Ok(LiveFragments { gaps: self.live()?.gaps(part, &fragments, wanted as u64)?, fragments })
    }

    /// Return the row ids of all samples that are deleted or absent. Cost: reads the sets of row ids.
    pub fn hidden(&self) -> Result<RowIds> {
        self.overlay_rows(Overlay::hides)
    }

    /// Return the row ids of all samples that are deleted or absent, and of those that no fragment has any more. Cost: as for `hidden`.
    pub fn not_alive(&self) -> Result<RowIds> {
        self.overlay_rows(|overlay| overlay.hides() || overlay.is_gone())
    }

    /// Return the row ids of the overlays for which `is_wanted` returns true. Cost: reads their sets of row ids.
    pub fn overlay_rows(&self, is_wanted: impl Fn(&Overlay) -> bool) -> Result<RowIds> {
        self.context.all_row_ids(self.overlays.rows(is_wanted))
    }

    /// Visit every fragment.
    pub fn each_fragment(&self, visit: impl FnMut(&Fragment) -> Result<()>) -> Result<()> {
        self.each_fragment_outside(&HashSet::new(), visit)
    }

    /// Visit the fragments that are not in one of these pages.
    pub fn each_fragment_outside(
        &self,
        pages: &HashSet<PageRef>,
        mut visit: impl FnMut(&Fragment) -> Result<()>,
    ) -> Result<()> {
        for (index, part) in self.parts.iter().enumerate() {
            if part.page().is_none_or(|page| !pages.contains(&page)) {
                self.fragments(index)?.as_slice().iter().try_for_each(&mut visit)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_search_finds_what_a_table_does() {
        let run = |first, count| Run { first, count };
        let fragment = |runs: Vec<Run>| Fragment {
            samples: runs.iter().map(|run| run.count).sum(),
            is_stage: false,
            runs,
            files: Vec::new(),
        };
        let fragments = [
            fragment(vec![run(500, 40), run(3, 7)]),
            fragment(vec![run(1 << 40, 300_000)]),
            fragment(vec![run(20, 1)]),
        ];
        let every = |step: usize| (0..1000).chain(1 << 40..(1 << 40) + 300_000).step_by(step).collect::<RowIds>();
        for sets in [
            vec![every(3)],
            vec![every(2)],
            vec![RowIds::of_runs(vec![run(500, 20)]), RowIds::of_runs(vec![run(530, 10), run(4, 2)])],
        ] {
            let sets: Vec<Arc<RowIds>> = sets.into_iter().map(Arc::new).collect();
            let (table, searched) = (gaps_of(&fragments, &sets), Searched::new(&fragments, &sets));
            assert_eq!(searched.samples, 300_048 - table.rows());
            for live in 0..searched.samples {
                assert_eq!(searched.physical_row(live), table.physical_row(live));
            }
            for row in 0..300_048 {
                assert_eq!(searched.live_row(row), table.live_row(row));
            }
        }
    }
}
