//! Which of many places are chosen, with one bit for each place.

/// Words with one count of the bits before them. One count in 256 bytes adds 3 % to the bits.
const BLOCK_WORDS: usize = 32;

/// A bit for each place, and how many bits are set before each block of words.
#[derive(Debug, PartialEq, Eq)]
pub struct Bits {
    places: u64,
    words: Vec<u64>,
    /// The number of set bits before each block, and at the end the number of all.
    before: Vec<u64>,
}

impl Bits {
    /// Make the bits of `places` places. `words` has a word for each 64 places; what is behind the last place is cleared.
    pub fn new(places: u64, mut words: Vec<u64>) -> Bits {
        words.resize(places.div_ceil(64) as usize, 0);
        if let Some(last) = words.last_mut().filter(|_| !places.is_multiple_of(64)) {
            *last &= (1 << (places % 64)) - 1;
        }
        let mut sum = 0;
        let mut before = vec![0];
        for block in words.chunks(BLOCK_WORDS) {
            sum += ones(block);
            before.push(sum);
        }
        Bits { places, words, before }
    }

    /// Return the same bits with more or fewer places.
    pub fn resized(self, places: u64) -> Bits {
        Bits::new(places, self.words)
    }

    pub fn places(&self) -> u64 {
        self.places
    }

    pub fn words(&self) -> &[u64] {
        &self.words
    }

    pub fn held_bytes(&self) -> u64 {
        (size_of_val(&self.words[..]) + size_of_val(&self.before[..])) as u64
    }

    /// Return the place behind the last set bit. What is described by it does not depend on how many places follow.
    pub fn end(&self) -> u64 {
        self.count().checked_sub(1).map_or(0, |last| self.nth(last) + 1)
    }

    /// Return how many bits are set.
    pub fn count(&self) -> u64 {
        self.before[self.before.len() - 1]
    }

    /// Return the place of set bit number `index`, which must exist.
    pub fn nth(&self, index: u64) -> u64 {
        let block = self.before.partition_point(|before| *before <= index) - 1;
        let (mut left, mut word) = (index - self.before[block], block * BLOCK_WORDS);
        loop {
            let found = u64::from(self.words[word].count_ones());
            if left < found {
                return word as u64 * 64 + nth_in(self.words[word], left);
            }
            left -= found;
            word += 1;
        }
    }

    /// Return how many set bits are before a place, and whether its own bit is set.
    pub fn rank(&self, place: u64) -> (u64, bool) {
        let word = (place / 64) as usize;
        let Some(own) = self.words.get(word) else { return (self.count(), false) };
        let begin = word / BLOCK_WORDS * BLOCK_WORDS;
        let within = u64::from((own & ((1 << (place % 64)) - 1)).count_ones());
        (self.before[begin / BLOCK_WORDS] + ones(&self.words[begin..word]) + within, own >> (place % 64) & 1 == 1)
    }

    /// Return the places of the set bits from number `index` on, in ascending order.
    pub fn from(&self, index: u64) -> impl Iterator<Item = u64> {
        let first = if index < self.count() { self.nth(index) } else { self.places };
        let word = (first / 64) as usize;
        let rest = self.words.get(word).map_or(0, |own| own & (u64::MAX << (first % 64)));
        let words = std::iter::once(rest).chain(self.words.iter().skip(word + 1).copied());
        words.enumerate().flat_map(move |(index, own)| each_one(own).map(move |bit| (word + index) as u64 * 64 + bit))
    }

    /// Return how many runs of neighbours are set.
    pub fn runs(&self) -> u64 {
        let mut carried = 0;
        self.words.iter().fold(0, |sum, word| {
            let begins = word & !(word << 1 | carried);
            carried = word >> 63;
            sum + u64::from(begins.count_ones())
        })
    }
}

/// The set bits of a word, in ascending order.
pub fn each_one(mut word: u64) -> impl Iterator<Item = u64> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| u64::from(word.trailing_zeros()))?;
        word &= word - 1;
        Some(bit)
    })
}

/// Count the set bits of words.
pub fn ones(words: &[u64]) -> u64 {
    words.iter().map(|word| u64::from(word.count_ones())).sum()
}

/// Return the place of set bit number `index` of a word, which must have it.
pub fn nth_in(mut word: u64, index: u64) -> u64 {
    (0..index).for_each(|_| word &= word - 1);
    u64::from(word.trailing_zeros())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_count_and_find_what_a_list_does() {
        for (places, each) in [(0, 1), (1, 1), (64, 3), (65, 1), (5000, 7), (5000, 1), (4096, 4095), (10_000, 2500)] {
            let set: Vec<u64> = (0..places).filter(|place| place % each == each / 2).collect();
            let mut words = vec![0; (places as usize).div_ceil(64)];
            set.iter().for_each(|place| words[(place / 64) as usize] |= 1 << (place % 64));
            let bits = Bits::new(places, words);
            assert_eq!((bits.count(), bits.end()), (set.len() as u64, set.last().map_or(0, |last| last + 1)));
            let begins =
                set.iter().enumerate().filter(|(index, place)| *index == 0 || set[index - 1] + 1 < **place).count();
            assert_eq!(bits.runs(), begins as u64);
            for (index, place) in set.iter().enumerate() {
                assert_eq!(bits.nth(index as u64), *place);
                assert_eq!(bits.from(index as u64).take(3).collect::<Vec<_>>(), set[index..(index + 3).min(set.len())]);
            }
            for place in 0..places + 70 {
                let before = set.partition_point(|one| *one < place) as u64;
                assert_eq!(bits.rank(place), (before, set.contains(&place)), "{places} {each} {place}");
            }
        }
    }
}
