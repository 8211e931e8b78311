//! Fast look-ups in sorted lists: which rows of a part are deleted, and how many live rows precede each.

use crate::prefetch::prefetch_item;

/// A list sorted by number, with a table that narrows each search to a few entries. A number and its value share a cache line.
#[derive(Debug)]
pub struct Ranks<T> {
    entries: Vec<(u64, T)>,
    /// A bucket contains the numbers with equal upper bits.
    shift: u32,
    /// For each bucket, how many entries precede it.
    buckets: Vec<u32>,
}

impl<T> Ranks<T> {
    /// Make the table of fewer than 2^32 entries. Their numbers ascend and may repeat. The table has about as many buckets as entries.
    pub fn new(entries: Vec<(u64, T)>) -> Ranks<T> {
        let most = entries.last().map_or(0, |(number, _)| *number);
        let mut shift = 0;
        while most >> shift > entries.len() as u64 {
            shift += 1;
        }
        let mut buckets = vec![0; (most >> shift) as usize + 2];
        entries.iter().for_each(|(number, _)| buckets[(number >> shift) as usize + 1] += 1);
        for bucket in 1..buckets.len() {
            buckets[bucket] += buckets[bucket - 1];
        }
        Ranks { entries, shift, buckets }
    }

    /// Return how many of the numbers are at most `limit`.
    #[inline]
    pub fn at_most(&self, limit: u64) -> usize {
        let bucket = (limit >> self.shift) as usize;
        let Some([begin, end]) = self.buckets.get(bucket..).and_then(|rest| rest.first_chunk()) else {
            return self.entries.len();
        };
        let (begin, end) = (*begin as usize, *end as usize);
        begin + self.entries[begin..end].iter().take_while(|(number, _)| *number <= limit).count()
    }

    /// Prepare to look up these numbers soon: the first one next, the second one later.
    #[inline]
    pub fn expect(&self, next: Option<u64>, later: Option<u64>) {
        if let Some(bucket) = later {
            prefetch_item(&self.buckets, (bucket >> self.shift) as usize);
        }
        if let Some(begin) = next.and_then(|next| self.buckets.get((next >> self.shift) as usize)) {
            prefetch_item(&self.entries, *begin as usize);
        }
    }

    pub fn entries(&self) -> &[(u64, T)] {
        &self.entries
    }

    pub fn held_bytes(&self) -> u64 {
        (size_of_val(&self.entries[..]) + size_of_val(&self.buckets[..])) as u64
    }
}

/// A sample this many runs after the last one is looked up afresh.
const NEAR_RUNS: usize = 4;

/// Live samples of a part with no deleted row between them.
pub struct LiveRun {
    /// How many rows before the run are deleted.
    pub deleted: u64,
    /// The number of live samples up to the end of the run.
    pub end: u64,
}

/// The deleted rows of a part, as runs. An entry has the number of live rows before a run, and of deleted rows up to its end.
#[derive(Debug)]
pub struct Gaps(Ranks<u64>);

impl Gaps {
    /// Make the table of runs of deleted rows (first row, count). Runs may touch, and those of a damaged dataset may overlap.
    pub fn new(mut runs: Vec<(u64, u64)>) -> Gaps {
        runs.sort_unstable();
        let (mut entries, mut end, mut deleted) = (Vec::with_capacity(runs.len()), 0, 0);
        for (first, count) in runs {
            let begin = first.max(end);
            end = end.max(first + count);
            let live_before = begin - deleted;
            deleted += end - begin;
            entries.push((live_before, deleted));
        }
        Gaps(Ranks::new(entries))
    }

    /// Return how many rows are deleted.
    pub fn rows(&self) -> u64 {
        self.before(self.0.entries().len())
    }

    /// Return how many rows the first runs delete.
    fn before(&self, runs: usize) -> u64 {
        runs.checked_sub(1).map_or(0, |run| self.0.entries()[run].1)
    }

    /// Return the row of a live sample, counted without the deleted ones.
    #[inline]
    pub fn physical_row(&self, live: u64) -> u64 {
        live + self.before(self.0.at_most(live))
    }

    /// Return the run that contains a live sample. `hint` is the number of deleted runs before the previous sample.
    #[inline]
    pub fn run(&self, hint: &mut usize, live: u64) -> LiveRun {
        let near = self.0.entries()[*hint..]
            .iter()
            .take(NEAR_RUNS)
            .take_while(|(live_before, _)| *live_before <= live)
            .count();
        *hint = if near < NEAR_RUNS { *hint + near } else { self.0.at_most(live) };
        let end = self.0.entries().get(*hint).map_or(u64::MAX, |(live_before, _)| *live_before);
        LiveRun { deleted: self.before(*hint), end }
    }

    /// Return the number of live rows before this one, or None if it is deleted.
    pub fn live_row(&self, row: u64) -> Option<u64> {
        let entries = self.0.entries();
        let runs = entries.partition_point(|(live_before, deleted)| live_before + deleted <= row);
        let live = row - self.before(runs);
        entries.get(runs).is_none_or(|(live_before, _)| live < *live_before).then_some(live)
    }

    pub fn held_bytes(&self) -> u64 {
        self.0.held_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_count_what_a_plain_count_does() {
        let far = u64::MAX - 3;
        for values in [
            vec![],
            vec![0],
            vec![5],
            vec![0, 0, 7, 7, 7, 900],
            (0..500).map(|index| index * index).collect(),
            vec![1, 2, far, far],
        ] {
            let ranks = Ranks::new(values.iter().map(|value| (*value, ())).collect());
            for limit in (0..1000)
                .chain(values.iter().flat_map(|value| [value.saturating_sub(1), *value, value + 1]))
                .chain([u64::MAX])
            {
                assert_eq!(
                    ranks.at_most(limit),
                    values.iter().filter(|value| **value <= limit).count(),
                    "{values:?} {limit}"
                );
            }
        }
    }

    #[test]
    fn live_and_physical_rows_are_inverse() {
        for runs in [
            vec![(0, 1)],
            vec![(3, 2), (5, 1), (9, 4)],
            vec![(0, 20)],
            vec![(7, 1), (1, 2), (3, 1)],
            vec![(2, 5), (4, 1), (4, 9)],
        ] {
            let gaps = Gaps::new(runs.clone());
            let live: Vec<u64> = (0..20)
                .filter(|row| !runs.iter().any(|(first, count)| (*first..first + count).contains(row)))
                .collect();
            assert_eq!(gaps.rows(), 20 - live.len() as u64);
            for (place, row) in live.iter().enumerate() {
                assert_eq!(gaps.physical_row(place as u64), *row);
            }
            for step in 1..9 {
                let mut hint = 0;
                for (place, row) in live.iter().enumerate().step_by(step) {
                    let LiveRun { deleted, end } = gaps.run(&mut hint, place as u64);
                    assert_eq!(place as u64 + deleted, *row, "{runs:?} {step}");
                    let same = live
                        .iter()
                        .enumerate()
                        .skip(place)
                        .take_while(|(later, row)| *later as u64 + deleted == **row)
                        .count();
                    assert!(end == u64::MAX || end == (place + same) as u64, "{runs:?} {step}");
                }
            }
            for row in 0..20 {
                assert_eq!(
                    gaps.live_row(row),
                    live.iter().position(|found| *found == row).map(|place| place as u64),
                    "{runs:?} {row}"
                );
            }
        }
    }
}
