//! Placement: which of several places holds a key. A pure function, so that every process and every machine agrees without talking.
//!
//! Weighted rendezvous hashing: each place gets a score from the key and its name, and the highest score wins. When a place joins or leaves,
//! only the keys that it gains or loses move. Source: Schindelhauer and Schomaker, "Weighted distributed hash tables" (2005).

/// A place with the share of keys that it gets, relative to the weights of the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct WeightedPlace {
    /// The hash of the place's name.
    pub name: u64,
    pub weight: f64,
}

/// Return the index of the place that holds a key, or None if all weights are 0. Cost: one logarithm per place.
pub fn place(key: u64, places: &[WeightedPlace]) -> Option<usize> {
    let weighted = places.iter().enumerate().filter(|(_, place)| place.weight > 0.0);
    let best = weighted.max_by(|(_, one), (_, other)| one.score(key).total_cmp(&other.score(key)));
    best.map(|(index, _)| index)
}

impl WeightedPlace {
    fn score(&self, key: u64) -> f64 {
        // In (0, 1), with 53 random bits.
        let random = ((mix(key ^ mix(self.name)) >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        -self.weight / random.ln()
    }
}

/// Mix the bits of a number (the finaliser of SplitMix64).
pub fn mix(number: u64) -> u64 {
    let number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let number = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let number = (number ^ (number >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    number ^ (number >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn places(weights: &[f64]) -> Vec<WeightedPlace> {
        weights
            .iter()
            .enumerate()
            .map(|(index, weight)| WeightedPlace { name: 100 + index as u64, weight: *weight })
            .collect()
    }

    #[test]
    fn keys_are_shared_by_weight() {
        let places = places(&[1.0, 2.0, 0.0, 5.0]);
        let mut counts = [0; 4];
        (0..80_000).for_each(|key| counts[place(key, &places).unwrap_or(2)] += 1);
        // Three standard deviations are at most 430 of 80,000.
        for (count, expected) in counts.into_iter().zip([10_000i64, 20_000, 0, 50_000]) {
            assert!((count - expected).abs() <= 430, "{counts:?}");
        }
    }

    #[test]
    fn only_the_keys_of_a_lost_place_move() {
        let (all, fewer) = (places(&[1.0, 1.0, 1.0]), places(&[1.0, 0.0, 1.0]));
        for key in 0..10_000 {
            let (before, after) = (place(key, &all), place(key, &fewer));
            assert!(before == Some(1) || before == after);
        }
        assert_eq!(place(1, &places(&[0.0])), None);
        assert_eq!(place(1, &[]), None);
    }
}
