//! Sets of row ids (spec section 7): as a few runs in the parent, or as a Roaring bitmap in an object.

use std::ops::Range;

use bytes::Bytes;
use penstock_error::Result;
use roaring::RoaringTreemap;
use roaring::bitmap::Iter;

use crate::cursor::{Cursor, Magic, Writer, malformed, seal, unseal};
use crate::id::Id;
use crate::ids::{ObjectRef, PROVISIONAL, Run};

/// Maximum number of runs that a row set stores in its parent.
pub const INLINE_RUNS: usize = 16;

/// A set of row ids as its parent stores it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RowSet {
    Runs(Vec<Run>),
    Object(RowIdsRef),
}

/// A reference to an object with row ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RowIdsRef {
    pub object: ObjectRef,
    pub base: u64,
    pub ids: u64,
    /// The range that contains all row ids.
    pub least: u64,
    pub span: u64,
}

impl RowSet {
    pub fn parse(cursor: &mut Cursor) -> Result<RowSet> {
        if cursor.flag()? {
            let object = ObjectRef::parse(cursor)?;
            let (base, ids) = (cursor.varint()?, cursor.varint()?);
            let (least, span) = (cursor.u64()?, cursor.varint()?);
            if ids == 0 || ids > span || least.checked_add(span).is_none() {
                return Err(malformed(format!("a row set claims to have {ids} row ids in the {span} from {least}")));
            }
            return Ok(RowSet::Object(RowIdsRef { object, base, ids, least, span }));
        }
        let runs = cursor.list(9, Run::parse)?;
        let is_valid = |run: &Run| run.count > 0 && run.first.checked_add(run.count).is_some();
        let are_apart = |two: &[Run]| two[0].end() < two[1].first;
        match runs.len() <= INLINE_RUNS && runs.iter().all(is_valid) && runs.windows(2).all(are_apart) {
            true => Ok(RowSet::Runs(runs)),
            false => Err(malformed(format!("a row set has {} runs that are invalid or not in order", runs.len()))),
        }
    }

    pub fn write(&self, writer: &mut Writer) {
        match self {
            RowSet::Runs(runs) => {
                writer.u8(0);
                writer.list(runs, |writer, run| run.write(writer));
            }
            RowSet::Object(rows) => {
                writer.u8(1);
                rows.object.write(writer);
                writer.varint(rows.base);
                writer.varint(rows.ids);
                writer.u64(rows.least);
                writer.varint(rows.span);
            }
        }
    }

    /// Return the number of row ids.
    pub fn ids(&self) -> u64 {
        match self {
            RowSet::Runs(runs) => runs.iter().map(|run| run.count).fold(0, u64::saturating_add),
            RowSet::Object(rows) => rows.ids,
        }
    }

    /// Return the range that contains all row ids.
    pub fn range(&self) -> Range<u64> {
        match self {
            RowSet::Runs(runs) => runs.first().map_or(0, |run| run.first)..runs.last().map_or(0, Run::end),
            RowSet::Object(rows) => rows.least..rows.least + rows.span,
        }
    }

    /// Return the set with final row ids instead of provisional ones.
    pub fn resolved(&self, base: u64) -> RowSet {
        match self {
            RowSet::Runs(runs) => RowSet::Runs(runs.iter().map(|run| run.resolved(base)).collect()),
            RowSet::Object(rows) if rows.least & PROVISIONAL == 0 => RowSet::Object(*rows),
            RowSet::Object(rows) => {
                RowSet::Object(RowIdsRef { base, least: base.wrapping_add(rows.least & !PROVISIONAL), ..*rows })
            }
        }
    }
}

/// Errors name at most this many row ids.
const EXAMPLES: usize = 10;

/// A union of at most this many runs stays a list of runs.
const FEW_RUNS: usize = 64;

/// A bitmap has a part for each 2^16 numbers. A union whose runs meet many more parts than there are runs stays a list of runs.
const MANY_PARTS: u64 = 1 << 16;

/// A set of row ids in memory. Its runs ascend and do not meet.
#[derive(Debug, Clone)]
pub enum RowIds {
    Runs(Vec<Run>),
    Bitmap(RoaringTreemap),
}

/// Sets with the same row ids are equal, whatever their forms.
impl PartialEq for RowIds {
    fn eq(&self, other: &RowIds) -> bool {
        match (self, other) {
            (RowIds::Bitmap(one), RowIds::Bitmap(other)) => one == other,
            _ => self.runs().eq(other.runs()),
        }
    }
}

impl Default for RowIds {
    fn default() -> RowIds {
        RowIds::Runs(Vec::new())
    }
}

impl RowIds {
    /// Join sets. The result takes no more memory than the sets, however many row ids their runs have.
    pub fn union<'a>(sets: impl Iterator<Item = &'a RowIds>) -> RowIds {
        let (mut bitmaps, mut runs) = (RoaringTreemap::new(), Vec::<Run>::new());
        for set in sets {
            match set {
                RowIds::Bitmap(bitmap) => bitmaps |= bitmap,
                RowIds::Runs(others) => runs.extend(others),
            }
        }
        let runs = joined(runs);
        let parts: u64 = runs.iter().map(|run| (run.end() >> 16) - (run.first >> 16) + 1).fold(0, u64::saturating_add);
        if bitmaps.is_empty() && runs.len() <= FEW_RUNS {
            return RowIds::Runs(runs);
        }
        if parts > 2 * runs.len() as u64 + MANY_PARTS {
            return RowIds::of_runs(runs.into_iter().chain(RowIds::Bitmap(bitmaps).runs()).collect());
        }
        RowIds::Bitmap(bitmap_of(&runs, bitmaps))
    }

    /// Join runs in any order.
    pub fn of_runs(runs: Vec<Run>) -> RowIds {
        RowIds::Runs(joined(runs))
    }

    /// Return the row ids of both sets.
    pub fn or(&self, other: &RowIds) -> RowIds {
        RowIds::union([self, other].into_iter())
    }

    /// Return the row ids that both sets have.
    pub fn and(&self, other: &RowIds) -> RowIds {
        self.minus(&self.minus(other))
    }

    /// Return the row ids that the other set lacks.
    pub fn minus(&self, other: &RowIds) -> RowIds {
        let (mut rest, mut taken) = (Vec::new(), other.runs().peekable());
        for run in self.runs() {
            let (mut first, end) = (run.first, run.end());
            while taken.next_if(|other| other.end() <= first).is_some() {}
            while let Some(other) = taken.peek().filter(|other| other.first < end) {
                if first < other.first {
                    rest.push(Run { first, count: other.first - first });
                }
                first = other.end().min(end);
                if other.end() > end {
                    break;
                }
                taken.next();
            }
            if first < end {
                rest.push(Run { first, count: end - first });
            }
        }
        RowIds::Runs(rest)
    }

    /// Return the first `limit` row ids from `from` on.
    pub fn first(&self, from: u64, limit: usize) -> Vec<u64> {
        self.runs_in(from..u64::MAX).into_iter().flat_map(|(run, _)| run.first..run.end()).take(limit).collect()
    }

    pub fn len(&self) -> u64 {
        match self {
            RowIds::Runs(runs) => runs.iter().map(|run| run.count).sum(),
            RowIds::Bitmap(bitmap) => bitmap.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Return the maximal runs within a range of row ids, each with the number of smaller row ids in the set. Cost: proportional to the
    /// number of runs, and of bitmap containers before them.
    pub fn runs_in(&self, range: Range<u64>) -> Vec<(Run, u64)> {
        match self {
            RowIds::Runs(runs) => clipped(runs, range),
            RowIds::Bitmap(bitmap) => bitmap_runs(bitmap, range),
        }
    }

    /// Return all maximal runs, in order.
    pub fn runs(&self) -> impl Iterator<Item = Run> + use<> {
        self.runs_in(0..u64::MAX).into_iter().map(|(run, _)| run)
    }

    /// Visit the row ids in a range in ascending order. Unlike `runs_in`, does not depend on what is before the range.
    pub fn each_in(&self, range: Range<u64>, mut visit: impl FnMut(u64)) {
        match self {
            RowIds::Runs(runs) => {
                clipped(runs, range).into_iter().for_each(|(run, _)| (run.first..run.end()).for_each(&mut visit))
            }
            // One by one: the end of each run is found by a search.
            RowIds::Bitmap(bitmap) => {
                each_part(bitmap, range, |begin, ids| ids.for_each(|id| visit(begin + u64::from(id))))
            }
        }
    }

    /// Return how many row ids are in a range.
    pub fn count_in(&self, range: Range<u64>) -> u64 {
        match self {
            RowIds::Runs(runs) => {
                let meeting = &runs[runs.partition_point(|run| run.end() <= range.start)..];
                let meeting = meeting.iter().take_while(|run| run.first < range.end);
                meeting.map(|run| run.end().min(range.end) - run.first.max(range.start)).sum()
            }
            RowIds::Bitmap(bitmap) => bitmap.range_cardinality(range),
        }
    }

    pub fn contains(&self, row_id: u64) -> bool {
        self.count_in(row_id..row_id + 1) > 0
    }

    /// Return how many row ids are in runs. One that is in two runs counts twice.
    pub fn count_in_runs(&self, runs: &[Run]) -> u64 {
        runs.iter().map(|run| self.count_in(run.first..run.end())).sum()
    }

    /// Return the row ids in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        self.runs().flat_map(|run| run.first..run.end())
    }

    /// Return the row ids that both sets contain, but at most the first `limit`.
    pub fn common(&self, other: &RowIds, limit: usize) -> Vec<u64> {
        let (mut others, mut common) = (other.runs().peekable(), Vec::new());
        for run in self.runs() {
            while let Some(other) = others.peek().filter(|other| other.first < run.end() && common.len() < limit) {
                common.extend((run.first.max(other.first)..run.end().min(other.end())).take(limit - common.len()));
                if other.end() > run.end() {
                    break;
                }
                others.next();
            }
        }
        common
    }

    /// Return whether the sets have a row id in common.
    pub fn meets(&self, other: &RowIds) -> bool {
        !self.common(other, 1).is_empty()
    }

    /// Return up to `limit` row ids from `from` on, and move `from` behind them. Returns None at the end.
    pub fn next_group(&self, from: &mut u64, limit: usize) -> Option<Vec<u64>> {
        let ids = self.first(*from, limit);
        *from = ids.last()? + 1;
        Some(ids)
    }

    /// Return some row ids for an error, which names only a few.
    pub fn examples(&self) -> Vec<i64> {
        self.iter().take(EXAMPLES).map(u64::cast_signed).collect()
    }

    /// Return the set as its parent stores it, and the body of the object `id` if the set needs one.
    pub fn encode(&self, id: Id) -> (RowSet, Option<Vec<u8>>) {
        let runs: Vec<Run> = self.runs().collect();
        if runs.len() <= INLINE_RUNS {
            return (RowSet::Runs(runs), None);
        }
        let bitmap = match self {
            RowIds::Bitmap(bitmap) => bitmap,
            RowIds::Runs(runs) => &bitmap_of(runs, RoaringTreemap::new()),
        };
        let body = seal(Magic::RowIds, |writer| {
            // Writing to a Vec does not fail.
            let _ = bitmap.serialize_into(&mut writer.0);
        });
        let least = bitmap.min().unwrap_or(0);
        let span = bitmap.max().map_or(0, |most| most - least + 1);
        let object = ObjectRef::of(id, &body);
        (RowSet::Object(RowIdsRef { object, base: 0, ids: bitmap.len(), least, span }), Some(body))
    }

    /// Parse the object that `reference` refers to, and replace provisional row ids by final ones.
    pub fn parse(body: &Bytes, reference: &RowIdsRef) -> Result<RowIds> {
        let bytes = unseal(Magic::RowIds, body, Cursor::rest)?;
        let mut rest = &bytes[..];
        let stored = RoaringTreemap::deserialize_from(&mut rest)
            .map_err(|error| malformed(format!("a row id bitmap is invalid: {error}")))?;
        let claimed = bytes.first_chunk().map_or(0, |count| u64::from_le_bytes(*count));
        if !rest.is_empty() || stored.bitmaps().filter(|(_, bitmap)| !bitmap.is_empty()).count() as u64 != claimed {
            return Err(malformed("a row id bitmap has an empty or repeated part, or is followed by other bytes"));
        }
        let provisional = stored.range_cardinality(PROVISIONAL..);
        let ids = match provisional {
            0 => stored,
            all if all == stored.len() => shifted(&stored, reference.base)?,
            _ => return Err(malformed("a row id bitmap mixes final and provisional row ids")),
        };
        let within = ids.min().is_some_and(|least| least >= reference.least)
            && ids.max().is_some_and(|most| most - reference.least < reference.span);
        match ids.len() == reference.ids && within {
            true => Ok(RowIds::Bitmap(ids)),
            false => Err(malformed(format!(
                "{} row ids differ from the {} that their parent lists",
                ids.len(),
                reference.ids
            ))),
        }
    }
}

/// Collect row ids in any order. Repeated ids count once.
impl FromIterator<u64> for RowIds {
    fn from_iter<I: IntoIterator<Item = u64>>(ids: I) -> RowIds {
        let mut bitmap: RoaringTreemap = ids.into_iter().collect();
        bitmap.optimize();
        RowIds::Bitmap(bitmap)
    }
}

/// Replace provisional row ids by final ones, relative to `base`.
fn shifted(stored: &RoaringTreemap, base: u64) -> Result<RoaringTreemap> {
    let mut ids = RoaringTreemap::new();
    for (run, _) in bitmap_runs(stored, PROVISIONAL..u64::MAX) {
        let run = run.resolved(base);
        if run.first.checked_add(run.count).is_none_or(|end| end > PROVISIONAL) {
            return Err(malformed(format!("a provisional row id does not fit above {base}")));
        }
        ids.insert_range(run.first..run.end());
    }
    Ok(ids)
}

/// Return runs in order. Those that meet become one.
fn joined(mut runs: Vec<Run>) -> Vec<Run> {
    runs.retain(|run| run.count > 0);
    runs.sort_unstable_by_key(|run| run.first);
    runs.dedup_by(|next, last| {
        let meets = next.first <= last.end();
        if meets {
            last.count = last.count.max(next.end() - last.first);
        }
        meets
    });
    runs
}

/// Return a bitmap with the row ids of runs and of another bitmap.
fn bitmap_of(runs: &[Run], mut bitmap: RoaringTreemap) -> RoaringTreemap {
    for run in runs {
        bitmap.insert_range(run.first..run.end());
    }
    bitmap.optimize();
    bitmap
}

fn clipped(runs: &[Run], range: Range<u64>) -> Vec<(Run, u64)> {
    let (mut found, mut before) = (Vec::new(), 0);
    for run in runs {
        let (first, end) = (run.first.max(range.start), run.end().min(range.end));
        if first < end {
            found.push((Run { first, count: end - first }, before + (first - run.first)));
        }
        before += run.count;
    }
    found
}

fn bitmap_runs(bitmap: &RoaringTreemap, range: Range<u64>) -> Vec<(Run, u64)> {
    let mut found: Vec<(Run, u64)> = Vec::new();
    let mut rank = range.start.checked_sub(1).map_or(0, |before| bitmap.rank(before));
    each_part(bitmap, range, |begin, mut runs| {
        while let Some(run) = runs.next_range() {
            let run = Run { first: begin + u64::from(*run.start()), count: u64::from(*run.end() - *run.start()) + 1 };
            // Runs of neighbouring parts may meet.
            match found.last_mut().filter(|(last, _)| last.end() == run.first) {
                Some((last, _)) => last.count += run.count,
                None => found.push((run, rank)),
            }
            rank += run.count;
        }
    });
    found
}

/// Visit the bitmaps that have row ids in a range: what to add to their ids, and those in the range.
fn each_part(bitmap: &RoaringTreemap, range: Range<u64>, mut visit: impl FnMut(u64, Iter)) {
    if range.is_empty() {
        return;
    }
    let (low, high) = (range.start, range.end - 1);
    for (upper, part) in bitmap.bitmaps().filter(|(upper, _)| (low >> 32..=high >> 32).contains(&u64::from(*upper))) {
        let begin = u64::from(upper) << 32;
        let least = if begin < low { low as u32 } else { 0 };
        let most = if begin >> 32 == high >> 32 { high as u32 } else { u32::MAX };
        visit(begin, part.range(least..=most));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runs(of: &[(u64, u64)]) -> Vec<Run> {
        of.iter().map(|(first, count)| Run { first: *first, count: *count }).collect()
    }

    /// Sets of many shapes: few runs, many, a long run, ids on both sides of 2^16 and 2^32, and several lineages.
    fn samples() -> Vec<Vec<u64>> {
        let scattered =
            |first: u64, step: u64, count: u64| (0..count).map(move |index| first + index * step).collect::<Vec<u64>>();
        vec![
            vec![7],
            (3..50).collect(),
            scattered(1, 3, 5),
            scattered(0, 2, 100_000),
            scattered((1 << 32) - 20, 2, 20),
            [scattered(5, 7, 40), (1 << 40..(1 << 40) + 70_000).collect(), scattered(3 << 40, 9, 40)].concat(),
        ]
    }

    /// Return a set in both of its forms.
    fn forms(ids: &[u64]) -> [RowIds; 2] {
        let bitmap = ids.iter().copied().collect::<RowIds>();
        [RowIds::Runs(bitmap.runs().collect()), bitmap]
    }

    #[test]
    fn sets_come_back_and_runs_agree_with_their_ids() -> Result<()> {
        for ids in samples() {
            let set = ids.iter().rev().copied().collect::<RowIds>();
            let (mut stored, body) = set.encode(Id([7; 16]));
            let back = match (&mut stored, body) {
                (RowSet::Runs(runs), None) => RowIds::Runs(runs.clone()),
                (RowSet::Object(reference), Some(body)) => RowIds::parse(&body.into(), reference)?,
                _ => panic!("an object belongs to an object reference"),
            };
            assert!(
                back.iter().eq(ids.iter().copied()) && back.len() == ids.len() as u64 && stored.ids() == back.len()
            );
            assert_eq!(stored.range(), ids[0]..ids[ids.len() - 1] + 1);
            let written = Writer::written(|writer| stored.write(writer));
            assert_eq!(RowSet::parse(&mut Cursor::new(written.into()))?, stored);
            for range in [
                0..u64::MAX,
                0..0,
                8..30,
                ids[ids.len() / 2]..u64::MAX,
                0..ids[ids.len() / 2],
                (1 << 32) - 7..(1 << 32) + 5,
            ] {
                for set in [&set, &back] {
                    let found = set.runs_in(range.clone());
                    let inside: Vec<u64> = found.iter().flat_map(|(run, _)| run.first..run.end()).collect();
                    assert!(inside.iter().eq(ids.iter().filter(|id| range.contains(*id))), "{range:?}");
                    let mut visited = Vec::new();
                    set.each_in(range.clone(), |id| visited.push(id));
                    assert_eq!(visited, inside);
                    assert_eq!(set.count_in(range.clone()), inside.len() as u64);
                    assert!(found.windows(2).all(|two| two[0].0.end() < two[1].0.first));
                    assert!(found.iter().all(|(run, rank)| ids[*rank as usize] == run.first));
                }
            }
        }
        Ok(())
    }

    #[test]
    fn common_ids_are_found_in_every_form() {
        for (one, other) in [(0, 1), (1, 1), (2, 3), (3, 4), (5, 0), (1, 5)] {
            let (ids, others) = (&samples()[one], &samples()[other]);
            let expected: Vec<u64> = ids.iter().filter(|id| others.contains(id)).take(20).copied().collect();
            for (one, other) in forms(ids).iter().flat_map(|one| forms(others).map(|other| (one.clone(), other))) {
                assert_eq!(one.common(&other, 20), expected);
            }
        }
    }

    #[test]
    fn sets_are_subtracted_and_joined_in_every_form() {
        let small: Vec<Vec<u64>> =
            vec![vec![], vec![0, 1, 2, 5], (1..9).collect(), vec![2, 4, 6, 8], (0..20).collect(), vec![19]];
        for (one, other) in small.iter().flat_map(|one| small.iter().map(move |other| (one, other))) {
            let rest: Vec<u64> = one.iter().copied().filter(|id| !other.contains(id)).collect();
            let mut all: Vec<u64> = rest.iter().chain(other).copied().collect();
            all.sort_unstable();
            for (ours, theirs) in forms(one).iter().flat_map(|ours| forms(other).map(|theirs| (ours.clone(), theirs))) {
                assert!(ours.minus(&theirs).iter().eq(rest.iter().copied()), "{one:?} - {other:?}");
                assert!(ours.or(&theirs).iter().eq(all.iter().copied()));
                assert!(ours.and(&theirs).iter().eq(one.iter().copied().filter(|id| other.contains(id))));
                assert_eq!(
                    ours.minus(&theirs).first(3, 2),
                    rest.iter().copied().filter(|id| *id >= 3).take(2).collect::<Vec<u64>>()
                );
            }
        }
    }

    #[test]
    fn provisional_ids_are_resolved_alike_in_both_forms() -> Result<()> {
        let base = (2 << 40) + 17;
        for ids in samples().into_iter().filter(|ids| ids[ids.len() - 1] < 1 << 40) {
            let (set, body) = ids.iter().map(|id| PROVISIONAL | id).collect::<RowIds>().encode(Id::default());
            let resolved = set.resolved(base);
            let found = match (&resolved, body) {
                (RowSet::Object(reference), Some(body)) => RowIds::parse(&body.into(), reference)?,
                (RowSet::Runs(runs), _) => RowIds::Runs(runs.clone()),
                _ => panic!("an object has a body"),
            };
            assert!(found.iter().eq(ids.iter().map(|id| base + id)));
            assert_eq!(resolved.range(), base + ids[0]..base + ids[ids.len() - 1] + 1);
            assert_eq!(resolved.resolved(base + 5), resolved, "final row ids stay");
        }
        Ok(())
    }

    #[test]
    fn a_set_that_breaks_a_rule_is_refused() {
        for bad in [&[(5, 0)][..], &[(5, 3), (7, 2)], &[(5, 3), (8, 2)], &[(9, 1), (2, 1)], &[(u64::MAX, 2)]] {
            let written = Writer::written(|writer| RowSet::Runs(runs(bad)).write(writer));
            assert!(RowSet::parse(&mut Cursor::new(written.into())).is_err(), "{bad:?}");
        }
        let ids: Vec<u64> = (0..100).map(|index| 2 * index).collect();
        let (RowSet::Object(reference), Some(body)) = ids.into_iter().collect::<RowIds>().encode(Id::default()) else {
            panic!("100 runs need an object")
        };
        for wrong in [
            RowIdsRef { ids: 99, ..reference },
            RowIdsRef { least: 1, ..reference },
            RowIdsRef { span: reference.span - 1, ..reference },
        ] {
            assert!(RowIds::parse(&body.clone().into(), &wrong).is_err());
        }
        let inside = |change: &dyn Fn(&mut Vec<u8>)| {
            let mut bitmap = body[8..body.len() - 4].to_vec();
            change(&mut bitmap);
            RowIds::parse(&seal(Magic::RowIds, |writer| writer.0.extend_from_slice(&bitmap)).into(), &reference)
        };
        assert!(inside(&|_| {}).is_ok());
        assert!(inside(&|bitmap| bitmap.push(0)).is_err(), "bytes after the bitmap");
        assert!(inside(&|bitmap| bitmap[0] = 2).is_err(), "fewer parts than claimed");
        let twice = |bitmap: &mut Vec<u8>| {
            let part = bitmap[8..].to_vec();
            bitmap.extend_from_slice(&part);
            bitmap[0] = 2;
        };
        assert!(inside(&twice).is_err(), "a part twice");
        for at in 0..body.len() {
            let mut damaged = body.clone();
            damaged[at] ^= 1;
            assert!(RowIds::parse(&damaged.into(), &reference).is_err());
        }
    }
}
