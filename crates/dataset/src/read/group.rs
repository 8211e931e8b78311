//! How many samples are read together by passes over many samples, such as comparisons and compaction.

use crate::config::Config;

/// At most this many samples are read at once.
pub const ROWS: usize = 1 << 16;

/// How many samples are read at once, according to the size of those before.
#[derive(Debug, Clone, Copy)]
pub struct Group {
    pub samples: usize,
}

impl Default for Group {
    fn default() -> Group {
        Group { samples: 4 }
    }
}

impl Group {
    /// Note the size of the samples that were read. The next group takes up to an eighth of the memory budget, and is up to 16 times larger.
    pub fn note(&mut self, samples: usize, bytes: usize) {
        let fitting = (Config::memory_bytes() as usize / 8) * samples.max(1) / bytes.max(1);
        self.samples = fitting.clamp(1, ROWS).min(16 * self.samples);
    }
}
