//! Map a position to its part, fragment and physical row. Deletions will be supported here. A deleted sample will keep its
//! physical row but lose its position, so deletions will change `physical_row`, `live_runs` and the counts below. Until then,
//! parsers refuse a manifest with deleted samples.

use std::sync::Arc;

use penstock_error::Result;
use penstock_format::cursor::malformed;
use penstock_format::ids::Run;
use penstock_format::manifest::{Fragment, PageRef};

use crate::snapshot::Snapshot;

/// A page or a fragment: a group of consecutive samples in manifest order.
#[derive(Debug, Clone)]
pub enum Part {
    Page(PageRef),
    Fragment(Arc<Fragment>),
}

impl Part {
    /// Return the number of samples that have a position.
    fn live(&self) -> u64 {
        match self {
            Part::Page(page) => page.live,
            Part::Fragment(fragment) => fragment.live,
        }
    }
}

/// The parts of a snapshot in manifest order, with prefix sums of their sample counts.
pub struct Live {
    pub parts: Vec<Part>,
    /// The position of each part's first sample, followed by the total number of samples.
    starts: Vec<u64>,
}

impl Live {
    pub fn new(parts: Vec<Part>) -> Result<Live> {
        let mut starts = vec![0u64];
        for part in &parts {
            let next = starts[starts.len() - 1].checked_add(part.live());
            starts.push(next.ok_or_else(|| malformed("more than 2^64 samples"))?);
        }
        Ok(Live { parts, starts })
    }

    /// Return the number of samples that have a position.
    pub fn samples(&self) -> u64 {
        self.starts[self.starts.len() - 1]
    }

    /// Return the part that contains a position, which must be in range.
    #[inline]
    pub fn part_of(&self, position: u64) -> usize {
        self.starts.partition_point(|start| *start <= position) - 1
    }

    /// Return the snapshot's only part if it is a fragment, otherwise None.
    pub fn only_fragment(&self) -> Option<PartFragments> {
        match &self.parts[..] {
            [Part::Fragment(fragment)] => Some(PartFragments::One(fragment.clone())),
            _ => None,
        }
    }
}

/// Return the number of samples in a fragment that have a position.
#[inline]
pub fn live_samples(fragment: &Fragment) -> u64 {
    fragment.live
}

/// Return the physical row of sample number `live` of a fragment. Deleted samples are not counted.
#[inline]
pub fn physical_row(_fragment: &Fragment, live: u64) -> u64 {
    live
}

/// Return a fragment's row id runs, each with the index of its first sample. Deleted samples are not counted.
pub fn live_runs(fragment: &Fragment) -> impl Iterator<Item = (Run, u64)> {
    fragment.runs.iter().scan(0, |next, run| {
        let first = *next;
        *next += run.count;
        Some((*run, first))
    })
}

/// The fragments of one part.
pub enum PartFragments {
    Page(Arc<Vec<Fragment>>),
    One(Arc<Fragment>),
}

impl PartFragments {
    pub fn as_slice(&self) -> &[Fragment] {
        match self {
            PartFragments::Page(fragments) => fragments,
            PartFragments::One(fragment) => std::slice::from_ref(fragment),
        }
    }
}

impl Snapshot {
    /// Return all fragments of a part, and the position of the part's first sample. Cost: reads a page, unless it is cached.
    pub fn fragments(&self, part: usize) -> Result<(u64, PartFragments)> {
        let fragments = match &self.live.parts[part] {
            Part::Page(page) => PartFragments::Page(self.context.page(page)?),
            Part::Fragment(fragment) => PartFragments::One(fragment.clone()),
        };
        Ok((self.live.starts[part], fragments))
    }

    /// Visit every fragment, together with the position of its first sample.
    pub fn each_fragment(&self, mut visit: impl FnMut(u64, &Fragment) -> Result<()>) -> Result<()> {
        for part in 0..self.live.parts.len() {
            let (mut start, fragments) = self.fragments(part)?;
            for fragment in fragments.as_slice() {
                visit(start, fragment)?;
                start += live_samples(fragment);
            }
        }
        Ok(())
    }
}
