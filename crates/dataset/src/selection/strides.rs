//! Runs of places with equal steps, one after the other.

/// The places first, first + step, … up to `count` of them. A step may be negative, or 0 for one place many times.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stride {
    pub first: u64,
    pub step: i64,
    pub count: u64,
}

impl Stride {
    /// The first `count` places.
    pub fn of(count: u64) -> Stride {
        Stride { first: 0, step: 1, count }
    }

    /// The longest stride with which a list of places begins, or None if there are none.
    fn at_begin(places: &[u64]) -> Option<Stride> {
        let (first, rest) = places.split_first()?;
        let step_of = |pair: &[u64]| pair[1].wrapping_sub(pair[0]) as i64;
        let step = places.get(..2).map_or(1, step_of);
        let after = rest.windows(2).take_while(|pair| step_of(pair) == step).count();
        Some(Stride { first: *first, step, count: (1 + rest.len().min(1) + after) as u64 })
    }

    pub fn at(&self, index: u64) -> u64 {
        self.first.wrapping_add_signed(self.step.wrapping_mul(index as i64))
    }

    /// The places of these indices.
    pub fn part(&self, inner: Stride) -> Stride {
        let step = if inner.count < 2 { 1 } else { self.step.wrapping_mul(inner.step) };
        Stride { first: self.at(inner.first), step, count: inner.count }
    }

    /// Return the index of a place, or None if it is not one of them. Of a place that is there many times, returns the first.
    pub fn index_of(&self, place: u64) -> Option<u64> {
        let far = place.wrapping_sub(self.first) as i64;
        let index = match self.step {
            0 => 0,
            step if far % step == 0 => far / step,
            _ => return None,
        };
        (index >= 0 && (index as u64) < self.count && self.at(index as u64) == place).then_some(index as u64)
    }

    /// The least and the largest place. The stride must not be empty.
    fn ends(&self) -> (u64, u64) {
        let last = self.at(self.count - 1);
        (self.first.min(last), self.first.max(last))
    }

    /// Return the largest place, with overflow as the largest number. None if there is none.
    pub fn largest(&self) -> Option<u64> {
        let last = i128::from(self.first) + i128::from(self.step) * (i128::from(self.count) - 1);
        (self.count > 0).then(|| u64::try_from(last).unwrap_or(u64::MAX).max(self.first))
    }

    fn is_distinct(&self) -> bool {
        self.step != 0 || self.count < 2
    }

    /// Return how many of the places are below `count`. The step must not be negative.
    fn indices_below(&self, count: u64) -> u64 {
        match (count.checked_sub(self.first), self.step) {
            (None | Some(0), _) => 0,
            (Some(_), 0) => self.count,
            (Some(left), step) => left.div_ceil(step as u64).min(self.count),
        }
    }
}

/// Several strides, one after the other.
#[derive(Debug, PartialEq, Eq, Default)]
pub struct Strides {
    all: Vec<(u64, i64)>,
    /// For each stride, how many places it and those before it have.
    ends: Vec<u64>,
    /// Those strides that are not empty, in ascending order, if no two of them overlap.
    ascending: Option<Vec<u32>>,
}

impl Strides {
    /// Join neighbours where one continues the other.
    pub fn joined(strides: impl IntoIterator<Item = Stride>) -> Vec<Stride> {
        let mut all = Vec::new();
        strides.into_iter().for_each(|next| add(&mut all, next));
        all
    }

    /// Describe places by at most `most` strides, or return None if they need more. Those are counted first, so that places in no order cost no memory.
    pub fn of_places(places: &[u64], most: usize) -> Option<Vec<Stride>> {
        let strides = || {
            let mut rest = places;
            std::iter::from_fn(move || {
                let first = Stride::at_begin(rest)?;
                rest = &rest[first.count as usize..];
                Some(first)
            })
        };
        strides().nth(most).is_none().then(|| strides().collect())
    }

    /// Keep these strides, none of which is empty.
    pub fn new(strides: &[Stride]) -> Strides {
        let mut sum = 0;
        let ends = strides.iter().map(|stride| {
            sum += stride.count;
            sum
        });
        let ends = ends.collect();
        let mut order: Vec<u32> = (0..strides.len() as u32).collect();
        let bounds = |index: &u32| strides[*index as usize].ends();
        if !order.is_sorted_by_key(bounds) {
            order.sort_unstable_by_key(bounds);
        }
        let apart =
            strides.iter().all(Stride::is_distinct) && order.is_sorted_by(|one, next| bounds(one).1 < bounds(next).0);
        Strides {
            ends,
            all: strides.iter().map(|stride| (stride.first, stride.step)).collect(),
            ascending: apart.then_some(order),
        }
    }

    pub fn count(&self) -> u64 {
        self.ends.last().copied().unwrap_or(0)
    }

    /// Return whether no place occurs twice. False if two strides overlap, even if they have no place in common.
    pub fn is_distinct(&self) -> bool {
        self.ascending.is_some()
    }

    fn get(&self, number: usize) -> Stride {
        let begin = self.begin(number);
        Stride { first: self.all[number].0, step: self.all[number].1, count: self.ends[number] - begin }
    }

    /// Return the index at which a stride begins.
    fn begin(&self, number: usize) -> u64 {
        number.checked_sub(1).map_or(0, |last| self.ends[last])
    }

    pub fn iter(&self) -> impl Iterator<Item = Stride> {
        (0..self.all.len()).map(|number| self.get(number))
    }

    pub fn at(&self, index: u64) -> u64 {
        let number = self.ends.partition_point(|end| *end <= index);
        self.get(number).at(index - self.begin(number))
    }

    /// Return the index of a place, or None if it is not one of them. Cost: a binary search, or a look at each stride if some overlap.
    pub fn index_of(&self, place: u64) -> Option<u64> {
        let index_in = |number: usize| Some(self.begin(number) + self.get(number).index_of(place)?);
        match &self.ascending {
            None => (0..self.all.len()).find_map(index_in),
            Some(order) => {
                let after = order.partition_point(|number| self.get(*number as usize).ends().0 <= place);
                index_in(order[after.checked_sub(1)?] as usize)
            }
        }
    }

    /// The places of these indices, as strides.
    pub fn part(&self, inner: Stride) -> Vec<Stride> {
        if inner.count == 0 {
            return Vec::new();
        }
        if inner.step < 0 && inner.count > 1 {
            // The same indices in ascending order, with the result turned around.
            let rising = Stride { first: inner.at(inner.count - 1), step: -inner.step, count: inner.count };
            return self
                .part(rising)
                .iter()
                .rev()
                .map(|stride| stride.part(Stride { first: stride.count - 1, step: -1, count: stride.count }))
                .collect();
        }
        let (mut left, mut parts) = (inner, Vec::new());
        let mut number = self.ends.partition_point(|end| *end <= inner.first);
        while left.count > 0 {
            let (begin, own) = (self.begin(number), self.get(number));
            let within = Stride { first: left.first - begin, ..left };
            let count = within.indices_below(own.count);
            if count > 0 {
                parts.push(own.part(Stride { count, ..within }));
                left = Stride { first: left.at(count), count: left.count - count, ..left };
            }
            // A large step passes over strides.
            number += 1 + self.ends[number + 1..].partition_point(|end| *end <= left.first);
        }
        parts
    }

    pub fn len(&self) -> usize {
        self.all.len()
    }

    pub fn held_bytes(&self) -> u64 {
        let order = self.ascending.as_ref().map_or(0, |order| size_of_val(&order[..]));
        (size_of_val(&self.all[..]) + size_of_val(&self.ends[..]) + order) as u64
    }
}

/// Add a stride, or lengthen the last one if it continues that.
fn add(all: &mut Vec<Stride>, next: Stride) {
    if let Some(last) = all.last_mut() {
        let step = next.first.wrapping_sub(last.at(last.count - 1)) as i64;
        if next.count > 0 && (last.count == 1 || step == last.step) && (next.count == 1 || next.step == step) {
            *last = Stride { first: last.first, step, count: last.count + next.count };
            return;
        }
    }
    if next.count > 0 {
        all.push(next);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_compose_as_lists_do() {
        let stride = |first, step, count| Stride { first, step, count };
        let many = [
            vec![stride(0, 1, 10)],
            vec![stride(9, -1, 10), stride(20, 3, 5)],
            vec![stride(5, 0, 3), stride(0, 1, 2), stride(100, -7, 9), stride(3, 1, 1)],
            vec![stride(0, 2, 10), stride(40, 1, 1), stride(50, 5, 2)],
        ];
        for strides in many {
            let all = Strides::new(&strides);
            let listed: Vec<u64> = strides.iter().flat_map(|one| (0..one.count).map(|index| one.at(index))).collect();
            assert_eq!((0..all.count()).map(|index| all.at(index)).collect::<Vec<_>>(), listed);
            let joined = Strides::joined(listed.iter().map(|place| stride(*place, 1, 1)));
            assert_eq!(Strides::of_places(&listed, joined.len() - 1), None);
            assert_eq!(Strides::of_places(&listed, joined.len()), Some(joined));
            for place in 0..130 {
                assert_eq!(all.index_of(place), listed.iter().position(|one| *one == place).map(|index| index as u64));
            }
            for first in 0..all.count() {
                for step in -6..7i64 {
                    let fits =
                        |count: &u64| (0..all.count() as i64).contains(&(first as i64 + step * (*count as i64 - 1)));
                    for count in (1..12).take_while(fits) {
                        let inner = stride(first, step, count);
                        let expected: Vec<u64> = (0..count).map(|index| listed[inner.at(index) as usize]).collect();
                        let found = Strides::new(&Strides::joined(all.part(inner)));
                        assert_eq!(
                            (0..found.count()).map(|index| found.at(index)).collect::<Vec<_>>(),
                            expected,
                            "{strides:?} {inner:?}"
                        );
                    }
                }
            }
        }
    }
}
