//! Random numbers that depend only on where they are used, never on threads or ranks. Keys are hashes, and numbers are
//! generated from a counter.

/// Hash words into a key. The length is hashed first, so that word lists of different lengths get unrelated keys.
///
/// Source: the SplitMix64 finaliser (Steele, Lea, Flood 2014), chained.
pub fn key(words: &[u64]) -> u64 {
    words.iter().fold(mix(words.len() as u64 ^ 0x9e37_79b9_7f4a_7c15), |hash, word| {
        mix(hash.wrapping_add(0x9e37_79b9_7f4a_7c15) ^ mix(*word))
    })
}

fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

/// The purpose of a key. These values affect orders and pixels, so they never change.
#[derive(Clone, Copy)]
#[repr(u64)]
pub enum Purpose {
    Order = 1,
    Blocks = 2,
    Window = 3,
    Replacement = 4,
    Mix = 5,
    Transform = 6,
}

/// A sequence of random numbers, generated with Philox4x32-10 in groups of four words.
///
/// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
#[derive(Clone)]
pub struct Draws {
    key: [u32; 2],
    counter: [u32; 4],
    ready: [u32; 4],
    used: usize,
}

impl Draws {
    /// Start the sequence of random numbers for draw `draw` of an epoch.
    pub fn new(key: u64, epoch: u64, draw: u64) -> Draws {
        let counter = [0, epoch as u32, draw as u32, (draw >> 32) as u32];
        // The counter contains the low 32 bits of the epoch. The high bits change the key, so that numbers do not repeat.
        let key = key ^ (epoch >> 32);
        Draws { key: [key as u32, (key >> 32) as u32], counter, ready: [0; 4], used: 4 }
    }

    pub fn word(&mut self) -> u32 {
        if self.used == 4 {
            self.ready = philox(self.counter, self.key);
            self.counter[0] = self.counter[0].wrapping_add(1);
            self.used = 0;
        }
        self.used += 1;
        self.ready[self.used - 1]
    }

    fn long(&mut self) -> u64 {
        u64::from(self.word()) << 32 | u64::from(self.word())
    }

    /// Draw a number in [0, 1) with 53 random bits.
    pub fn unit(&mut self) -> f64 {
        (self.long() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Draw whether an event of this probability happens.
    pub fn by_chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    /// Draw an integer in 0..n, with a bias below 2^-64 · n. Source: Lemire 2019, without the rejection step.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.long()) * u128::from(n)) >> 64) as u64
    }
}

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    let product = |factor: u32, word: u32| {
        let product = u64::from(factor) * u64::from(word);
        ((product >> 32) as u32, product as u32)
    };
    for _ in 0..10 {
        let (high0, low0) = product(0xd251_1f53, counter[0]);
        let (high1, low1) = product(0xcd9e_8d57, counter[2]);
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_known_answers() {
        // These values come from Random123's `kat_vectors`.
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(philox(pi, [0xa409_3822, 0x299f_31d0]), [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn keys_depend_on_every_word_and_on_their_number() {
        let keys = [key(&[]), key(&[0]), key(&[0, 0]), key(&[1, 0]), key(&[0, 1]), key(&[1, 1])];
        for (index, one) in keys.iter().enumerate() {
            assert!(!keys[..index].contains(one));
        }
    }

    #[test]
    fn numbers_below_n_are_even() {
        let mut counts = [0u32; 7];
        for draw in 0..70_000 {
            counts[Draws::new(5, 0, draw).below(7) as usize] += 1;
        }
        let surprise: f64 = counts.iter().map(|count| (f64::from(*count) - 10_000.0).powi(2) / 10_000.0).sum();
        assert!(surprise < 22.5, "chi squared with 6 degrees of freedom is {surprise}"); // p = 0.001
    }
}
