//! One part of a random split of a whole snapshot: neither a list nor a bitmap, but a count for each thousand row ids.

use std::sync::Arc;

use penstock_error::Result;
use penstock_format::ids::Run;
use penstock_format::overlay::Overlay;
use penstock_format::rows::RowIds;

use super::bits::{each_one, nth_in, ones};
use super::spread::{Bound, THOUSAND, Thousand, below};
use crate::parallel;
use crate::snapshot::Snapshot;
use crate::snapshot::live::runs_of;

/// Cells that are counted together.
const GROUP: u64 = 256;
/// Estimated work per cell, in bytes of memory that take as long to read.
const WORK_BYTES: usize = 1 << 12;

/// The row ids of a cell, as bits, counted from the thousand that it is in.
type Members = [u64; THOUSAND.div_ceil(64) as usize];

/// Ascending sums, in 4 bytes each.
#[derive(Debug, Default)]
struct Sums {
    /// The sum at every `2^SPAN`-th place. What is added at one place is at most a thousand, so that the rest fits 32 bits.
    bases: Vec<u64>,
    rest: Vec<u32>,
}

/// The logarithm of how many sums have a base in common.
const SPAN: u32 = 20;

impl Sums {
    fn of(counts: impl Iterator<Item = u16>) -> Sums {
        let (mut sums, mut sum, mut base) = (Sums::default(), 0u64, 0);
        for count in std::iter::once(0).chain(counts) {
            sum += u64::from(count);
            if sums.rest.len().is_multiple_of(1 << SPAN) {
                base = sum;
                sums.bases.push(base);
            }
            sums.rest.push((sum - base) as u32);
        }
        sums
    }

    /// Return the sum of the first `places` counts.
    fn before(&self, places: u64) -> u64 {
        self.bases[(places >> SPAN) as usize] + u64::from(self.rest[places as usize])
    }

    fn held_bytes(&self) -> u64 {
        (size_of_val(&self.bases[..]) + size_of_val(&self.rest[..])) as u64
    }
}

/// Consecutive row ids of samples that follow each other in a snapshot.
#[derive(Debug)]
struct IdRun {
    first: i64,
    count: u64,
    /// How many rows, deleted ones included, and how many cells are before the run.
    row: u64,
    cell: u64,
}

/// The row ids of a snapshot in the order of positions, divided into cells: those of one run in one aligned thousand.
pub struct Cells {
    runs: Vec<IdRun>,
    cells: u64,
    rows: u64,
    hidden: Vec<Arc<RowIds>>,
    /// How many samples are before each cell. Absent if no sample is deleted or absent, because then each row is one.
    live: Option<Sums>,
}

/// A cell: the row ids `begin..end` of a thousand, counted from the first one there.
struct Cell {
    number: i64,
    begin: u64,
    end: u64,
    /// How many rows are before the cell.
    row: u64,
}

impl Cell {
    fn ids(&self) -> std::ops::Range<i64> {
        let begins = self.number * THOUSAND as i64;
        begins + self.begin as i64..begins + self.end as i64
    }
}

/// The samples below a bound.
struct Below {
    bound: Bound,
    /// How many of them are before each cell. Absent if all or none are below.
    sums: Option<Sums>,
}

/// One part of a split.
pub struct Split {
    pub seed: u64,
    cells: Arc<Cells>,
    low: Arc<Below>,
    high: Arc<Below>,
}

impl std::fmt::Debug for Split {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("Split").field("seed", &self.seed).field("share", &self.share()).finish()
    }
}

/// Return the number of the last of `0..=most` at which ascending sums are at most `limit`. The first sum is 0.
fn last_at_most(most: u64, limit: u64, sum: impl Fn(u64) -> u64) -> u64 {
    below(most + 1, |place| sum(place) <= limit) - 1
}

fn number_of(id: i64) -> i64 {
    id.div_euclid(THOUSAND as i64)
}

impl Cells {
    fn of(snapshot: &Snapshot) -> Result<Cells> {
        let hidden = snapshot.context.row_ids(snapshot.overlays.rows(Overlay::hides))?;
        let (mut runs, mut rows, mut cells) = (Vec::<IdRun>::new(), 0, 0);
        for part in 0..snapshot.parts.len() {
            for (Run { first, count }, _) in
                runs_of(snapshot.fragments(part)?.as_slice()).filter(|(run, _)| run.count > 0)
            {
                let first = first.cast_signed();
                let last = match runs.last_mut().filter(|last| last.first + last.count as i64 == first) {
                    Some(last) => {
                        last.count += count;
                        last
                    }
                    None => {
                        runs.push(IdRun { first, count, row: rows, cell: cells });
                        let end = runs.len() - 1;
                        &mut runs[end]
                    }
                };
                rows += count;
                cells = last.cell + (number_of(last.first + last.count as i64 - 1) - number_of(last.first) + 1) as u64;
            }
        }
        Ok(Cells { runs, cells, rows, hidden, live: None })
    }

    fn cell(&self, cell: u64) -> Cell {
        let run = &self.runs[self.runs.partition_point(|run| run.cell <= cell) - 1];
        let number = number_of(run.first) + (cell - run.cell) as i64;
        let begins = number * THOUSAND as i64;
        let begin = (run.first - begins).max(0).cast_unsigned();
        let end = (run.first + run.count as i64 - begins).min(THOUSAND as i64).cast_unsigned();
        Cell { number, begin, end, row: run.row + (begins + begin as i64 - run.first) as u64 }
    }

    /// Return how many samples are before a cell.
    fn live_before(&self, cell: u64) -> u64 {
        match &self.live {
            Some(live) => live.before(cell),
            None if cell == self.cells => self.rows,
            None => self.cell(cell).row,
        }
    }

    /// Visit the row ids of a cell that are deleted or absent, counted from its thousand.
    fn each_hidden(&self, cell: &Cell, mut visit: impl FnMut(u64)) {
        let (begins, ids) = (cell.number * THOUSAND as i64, cell.ids());
        let range = ids.start.cast_unsigned()..ids.end.cast_unsigned();
        self.hidden
            .iter()
            .for_each(|set| set.each_in(range.clone(), |id| visit((id.cast_signed() - begins).cast_unsigned())));
    }

    /// Return the row ids of a cell that are samples.
    fn live_in(&self, cell: &Cell) -> Members {
        let mut live = up_to(cell.end);
        live.iter_mut().zip(up_to(cell.begin)).for_each(|(word, before)| *word &= !before);
        self.each_hidden(cell, |offset| live[(offset / 64) as usize] &= !(1 << (offset % 64)));
        live
    }

    /// Return the cell and the row id of a position, counted from the cell's thousand.
    fn find(&self, position: u64) -> (u64, u64) {
        match &self.live {
            Some(live) => {
                let cell = last_at_most(self.cells - 1, position, |cell| live.before(cell));
                (cell, nth(&self.live_in(&self.cell(cell)), position - live.before(cell)))
            }
            None => {
                let run = &self.runs[self.runs.partition_point(|run| run.row <= position) - 1];
                let id = run.first + (position - run.row) as i64;
                let number = number_of(id);
                (run.cell + (number - number_of(run.first)) as u64, (id - number * THOUSAND as i64) as u64)
            }
        }
    }

    /// Count samples, and those below each bound, in each of a group of cells.
    fn count(&self, cells: std::ops::Range<u64>, bounds: &[&Bound]) -> Vec<Vec<u16>> {
        let mut counts = vec![Vec::with_capacity((cells.end - cells.start) as usize); bounds.len() + 1];
        let (mut hidden, mut next, mut known) = (Vec::new(), 0, 0..0);
        for cell in cells.clone().map(|cell| self.cell(cell)) {
            let ids = cell.ids();
            if ids.end > known.end || ids.start < known.start {
                // Those of the following cells are likely to be looked up together.
                known = ids.start..ids.start + ((cells.end - cells.start) * THOUSAND) as i64;
                next = 0;
                hidden.clear();
                let unsigned = known.start.cast_unsigned()..known.end.cast_unsigned();
                let mut add = |id: u64| {
                    hidden
                        .push((id.cast_signed(), bounds.first().map_or(0, |bound| bound.first_digit(id.cast_signed()))))
                };
                self.hidden.iter().for_each(|set| set.each_in(unsigned.clone(), &mut add));
                hidden.sort_unstable();
            }
            // Cells of a run ascend. Another run may go back, and is looked up again.
            known.start = ids.end;
            next += hidden[next..].iter().take_while(|(id, _)| *id < ids.start).count();
            let own = &hidden[next..];
            let own = &own[..own.iter().take_while(|(id, _)| *id < ids.end).count()];
            next += own.len();
            counts[bounds.len()].push((cell.end - cell.begin) as u16 - own.len() as u16);
            for (counts, bound) in counts.iter_mut().zip(bounds) {
                let thousand = bound.thousand(cell.number);
                let gone = own.iter().filter(|(id, digit)| bound.is_below(*id, *digit)).count();
                counts.push((thousand.before(cell.end) - thousand.before(cell.begin)) as u16 - gone as u16);
            }
        }
        counts
    }
}

/// The first `count` row ids of a thousand, as bits.
fn up_to(count: u64) -> Members {
    std::array::from_fn(|word| match count.saturating_sub(64 * word as u64) {
        rest @ 0..64 => (1 << rest) - 1,
        _ => u64::MAX,
    })
}

/// Return the place of set bit number `index`.
fn nth(bits: &Members, mut index: u64) -> u64 {
    for (word, own) in bits.iter().enumerate() {
        let count = u64::from(own.count_ones());
        if index < count {
            return 64 * word as u64 + nth_in(*own, index);
        }
        index -= count;
    }
    THOUSAND
}

/// Return how many bits before a place are set.
fn rank(bits: &Members, place: u64) -> u64 {
    let (word, bit) = ((place / 64) as usize, place % 64);
    ones(&bits[..word]) + u64::from((bits[word] & ((1 << bit) - 1)).count_ones())
}

impl Below {
    fn before(&self, cells: &Cells, cell: u64) -> u64 {
        match &self.sums {
            Some(sums) => sums.before(cell),
            None if self.bound.all_alike() == Some(true) => cells.live_before(cell),
            None => 0,
        }
    }
}

impl Split {
    /// Split all samples of a snapshot at ascending bounds. Returns one part more than there are bounds.
    ///
    /// Cost: reads the manifest, and the row ids of deletions. Holds 4 bytes per thousand samples and bound, and as many for deletions.
    /// Time: hashes each thousand 40 times per bound, and each deletion about 10 times.
    pub fn all(snapshot: &Snapshot, seed: u64, bounds: &[f64]) -> Result<Vec<Split>> {
        let mut cells = Cells::of(snapshot)?;
        let ends = std::iter::once(0.0).chain(bounds.iter().copied()).chain([f64::INFINITY]);
        let bounds: Vec<Bound> = ends.map(|value| Bound::new(seed, value)).collect();
        let counted: Vec<&Bound> = bounds.iter().filter(|bound| bound.all_alike().is_none()).collect();
        let groups = cells.cells.div_ceil(GROUP) as usize;
        let count =
            |group: usize| cells.count(group as u64 * GROUP..(GROUP * (group as u64 + 1)).min(cells.cells), &counted);
        let counts = parallel::map(groups, groups * GROUP as usize * WORK_BYTES, count)?;
        let sums = |which: usize| Sums::of(counts.iter().flat_map(|group| group[which].iter().copied()));
        let live = (!cells.hidden.is_empty()).then(|| sums(counted.len()));
        let mut sums = (0..counted.len()).map(sums).collect::<Vec<_>>().into_iter();
        cells.live = live;
        let below = bounds.into_iter().map(|bound| {
            let sums = if bound.all_alike().is_none() { sums.next() } else { None };
            Arc::new(Below { bound, sums })
        });
        let (below, cells): (Vec<Arc<Below>>, _) = (below.collect(), Arc::new(cells));
        let part =
            |ends: &[Arc<Below>]| Split { seed, cells: cells.clone(), low: ends[0].clone(), high: ends[1].clone() };
        Ok(below.windows(2).map(part).collect())
    }

    /// Return one part of a split, given its bounds.
    pub fn part(snapshot: &Snapshot, seed: u64, (low, high): (f64, f64)) -> Result<Split> {
        Ok(Split::all(snapshot, seed, &[low, high])?.swap_remove(1))
    }

    /// Return the bounds of the part. The upper one of the last part is infinite.
    pub fn share(&self) -> (f64, f64) {
        (self.low.bound.value, self.high.bound.value)
    }

    /// Return how many samples of the part are before a cell.
    fn before(&self, cell: u64) -> u64 {
        self.high.before(&self.cells, cell) - self.low.before(&self.cells, cell)
    }

    pub fn count(&self) -> u64 {
        self.before(self.cells.cells)
    }

    fn thousands(&self, cell: &Cell) -> (Thousand<'_>, Thousand<'_>) {
        (self.low.bound.thousand(cell.number), self.high.bound.thousand(cell.number))
    }

    /// Return the samples of a cell that are in the part.
    fn members(&self, cell: &Cell, live: &Members) -> Members {
        let (low, high) = self.thousands(cell);
        let mut members = [0; _];
        for hundred in cell.begin / 100..cell.end.div_ceil(100) {
            let (above, below) = (low.tens(hundred), high.tens(hundred));
            for ten in 0..10 {
                let units = u64::from(high.units(hundred, below, ten) & !low.units(hundred, above, ten));
                let offset = 100 * hundred + 10 * ten;
                let (word, bit) = ((offset / 64) as usize, offset % 64);
                members[word] |= units << bit;
                if bit > 54 {
                    members[word + 1] |= units >> (64 - bit);
                }
            }
        }
        members.iter_mut().zip(live).for_each(|(word, live)| *word &= live);
        members
    }

    /// Return the row id of sample number `index` of a part of the thousand that has no deleted samples, counted from the thousand.
    fn descend(&self, cell: &Cell, index: u64) -> u64 {
        let (low, high) = self.thousands(cell);
        let mut left = index + high.before(cell.begin) - low.before(cell.begin);
        let mut passed = |count: u64| {
            let is_passed = count <= left;
            left -= if is_passed { count } else { 0 };
            is_passed
        };
        let hundred =
            (0..10).find(|hundred| !passed(high.of_hundred(*hundred) - low.of_hundred(*hundred))).unwrap_or(9);
        let (above, below) = (low.tens(hundred), high.tens(hundred));
        let ten = (0..10).find(|ten| !passed(high.of_ten(below, *ten) - low.of_ten(above, *ten))).unwrap_or(9);
        let units = high.units(hundred, below, ten) & !low.units(hundred, above, ten);
        100 * hundred + 10 * ten + nth_in(u64::from(units), left)
    }

    /// Return the position in the snapshot of sample number `index` of the part, which must exist.
    ///
    /// Time: a binary search, and 100 hashes. With deletions, 2,000 hashes.
    pub fn at(&self, index: u64) -> u64 {
        let number = last_at_most(self.cells.cells - 1, index, |cell| self.before(cell));
        let (cell, left) = (self.cells.cell(number), index - self.before(number));
        let Some(live) = &self.cells.live else { return cell.row + self.descend(&cell, left) - cell.begin };
        let samples = self.cells.live_in(&cell);
        live.before(number) + rank(&samples, nth(&self.members(&cell, &samples), left))
    }

    /// Return the positions in the snapshot of samples of the part, from number `index` on.
    pub fn from(&self, index: u64) -> impl Iterator<Item = u64> {
        let most = self.cells.cells;
        let first = if index < self.count() { last_at_most(most - 1, index, |cell| self.before(cell)) } else { most };
        let skipped = index - self.before(first).min(index);
        let of_cell = |number: u64| {
            let cell = self.cells.cell(number);
            let samples = self.cells.live_in(&cell);
            let (members, before) = (self.members(&cell, &samples), self.cells.live_before(number));
            let offsets =
                (0..members.len()).flat_map(move |word| each_one(members[word]).map(move |bit| 64 * word as u64 + bit));
            offsets.map(move |offset| before + rank(&samples, offset))
        };
        (first..most).flat_map(of_cell).skip(skipped as usize)
    }

    /// Return the number in the part of the sample at a position of the snapshot, or None if it is in another part.
    pub fn index_of(&self, position: u64) -> Option<u64> {
        let (number, offset) = self.cells.find(position);
        let cell = self.cells.cell(number);
        let members = self.members(&cell, &self.cells.live_in(&cell));
        let is_member = members[(offset / 64) as usize] >> (offset % 64) & 1 == 1;
        is_member.then(|| self.before(number) + rank(&members, offset))
    }

    pub fn held_bytes(&self) -> u64 {
        let sums = [self.low.sums.as_ref(), self.high.sums.as_ref(), self.cells.live.as_ref()];
        size_of_val(&self.cells.runs[..]) as u64 + sums.into_iter().flatten().map(Sums::held_bytes).sum::<u64>()
    }
}
