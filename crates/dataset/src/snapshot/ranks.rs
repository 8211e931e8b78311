//! Fast look-ups in sorted lists: which rows of a part are deleted, and how many live rows precede each.

/// A sorted list of numbers with a table that narrows each search to a few of them.
#[derive(Debug, Default)]
pub struct Ranks {
    values: Vec<u64>,
    /// A bucket contains the values with equal upper bits.
    shift: u32,
    /// For each bucket, the number of values in earlier ones.
    buckets: Vec<u32>,
}

impl Ranks {
    /// Make the table of fewer than 2^32 ascending numbers, which may repeat. It has about as many buckets as there are numbers.
    pub fn new(values: Vec<u64>) -> Ranks {
        let most = values.last().copied().unwrap_or(0);
        let mut shift = 0;
        while most >> shift > values.len() as u64 {
            shift += 1;
        }
        let mut buckets = vec![0; (most >> shift) as usize + 2];
        values.iter().for_each(|value| buckets[(value >> shift) as usize + 1] += 1);
        for bucket in 1..buckets.len() {
            buckets[bucket] += buckets[bucket - 1];
        }
        Ranks { values, shift, buckets }
    }

    /// Return how many of the numbers are at most `limit`.
    #[inline]
    pub fn at_most(&self, limit: u64) -> usize {
        let bucket = (limit >> self.shift) as usize;
        let Some([begin, end]) = self.buckets.get(bucket..).and_then(|rest| rest.first_chunk()) else { return self.values.len() };
        let (begin, end) = (*begin as usize, *end as usize);
        begin + self.values[begin..end].partition_point(|value| *value <= limit)
    }

    pub fn get(&self, index: usize) -> u64 {
        self.values[index]
    }

    pub fn held_bytes(&self) -> u64 {
        (size_of_val(&self.values[..]) + size_of_val(&self.buckets[..])) as u64
    }
}

/// A sample this many runs after the last one is looked up afresh.
const NEAR_RUNS: usize = 4;

/// The deleted rows of a part, as runs.
#[derive(Debug)]
pub struct Gaps {
    /// For each run, the number of live rows before it.
    live_before: Ranks,
    /// For each run, the number of deleted rows up to its end.
    deleted: Vec<u64>,
}

impl Gaps {
    /// Make the table of runs of deleted rows (first row, count). Runs may touch, and those of a damaged dataset may overlap.
    pub fn new(mut runs: Vec<(u64, u64)>) -> Gaps {
        runs.sort_unstable();
        let (mut live_before, mut deleted) = (Vec::with_capacity(runs.len()), Vec::with_capacity(runs.len()));
        let (mut end, mut sum) = (0, 0);
        for (first, count) in runs {
            let begin = first.max(end);
            end = end.max(first + count);
            live_before.push(begin - sum);
            sum += end - begin;
            deleted.push(sum);
        }
        Gaps { live_before: Ranks::new(live_before), deleted }
    }

    /// Return how many rows are deleted.
    pub fn rows(&self) -> u64 {
        self.deleted.last().copied().unwrap_or(0)
    }

    /// Return the row of a live sample, counted without the deleted ones.
    #[inline]
    pub fn physical_row(&self, live: u64) -> u64 {
        let runs = self.live_before.at_most(live);
        live + runs.checked_sub(1).map_or(0, |run| self.deleted[run])
    }

    /// Return the row of a live sample as `physical_row` does. `run` is the result's run, and a hint if samples ascend.
    #[inline]
    pub fn next_physical_row(&self, run: &mut usize, live: u64) -> u64 {
        let mut runs = *run;
        for _ in 0..NEAR_RUNS {
            if runs == self.deleted.len() || self.live_before.get(runs) > live {
                *run = runs;
                return live + runs.checked_sub(1).map_or(0, |run| self.deleted[run]);
            }
            runs += 1;
        }
        *run = self.live_before.at_most(live);
        live + self.deleted[*run - 1]
    }

    /// Return the number of live rows before this one, or None if it is deleted.
    pub fn live_row(&self, row: u64) -> Option<u64> {
        let (mut low, mut high) = (0, self.deleted.len());
        while low < high {
            let middle = (low + high) / 2;
            // The first row after this run.
            let end = self.live_before.get(middle) + self.deleted[middle];
            if end <= row { low = middle + 1 } else { high = middle }
        }
        let before = low.checked_sub(1).map_or(0, |run| self.deleted[run]);
        let live = row - before;
        (low == self.deleted.len() || live < self.live_before.get(low)).then_some(live)
    }

    pub fn held_bytes(&self) -> u64 {
        self.live_before.held_bytes() + size_of_val(&self.deleted[..]) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_count_what_a_plain_count_does() {
        let far = u64::MAX - 3;
        for values in
            [vec![], vec![0], vec![5], vec![0, 0, 7, 7, 7, 900], (0..500).map(|index| index * index).collect(), vec![1, 2, far, far]]
        {
            let ranks = Ranks::new(values.clone());
            for limit in (0..1000).chain(values.iter().flat_map(|value| [value.saturating_sub(1), *value, value + 1])).chain([u64::MAX]) {
                assert_eq!(ranks.at_most(limit), values.iter().filter(|value| **value <= limit).count(), "{values:?} {limit}");
            }
        }
    }

    #[test]
    fn live_and_physical_rows_are_inverse() {
        for runs in [vec![(0, 1)], vec![(3, 2), (5, 1), (9, 4)], vec![(0, 20)], vec![(7, 1), (1, 2), (3, 1)], vec![(2, 5), (4, 1), (4, 9)]]
        {
            let gaps = Gaps::new(runs.clone());
            let live: Vec<u64> = (0..20).filter(|row| !runs.iter().any(|(first, count)| (*first..first + count).contains(row))).collect();
            assert_eq!(gaps.rows(), 20 - live.len() as u64);
            for (place, row) in live.iter().enumerate() {
                assert_eq!(gaps.physical_row(place as u64), *row);
            }
            for step in 1..9 {
                let mut run = 0;
                for (place, row) in live.iter().enumerate().step_by(step) {
                    assert_eq!(gaps.next_physical_row(&mut run, place as u64), *row, "{runs:?} {step}");
                }
            }
            for row in 0..20 {
                assert_eq!(gaps.live_row(row), live.iter().position(|found| *found == row).map(|place| place as u64), "{runs:?} {row}");
            }
        }
    }
}
