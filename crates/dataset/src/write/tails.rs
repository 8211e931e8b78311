//! How many bytes of words the tail of a data file may hold.

use penstock_format::datafile::TAIL_BYTES;

use super::column::ColumnWriter;

/// Tails do not grow beyond this because of words that repeat.
const MOST_BYTES: usize = 16 << 20;

/// The limit of a transaction. Each file has its own dictionaries. If most words of a full tail were in earlier files too, a higher limit
/// means fewer files and fewer bytes.
pub struct TailLimit {
    pub bytes: usize,
    /// Whether a closed file has each word, by column and code.
    used: Vec<Vec<bool>>,
}

impl Default for TailLimit {
    fn default() -> TailLimit {
        TailLimit { bytes: TAIL_BYTES, used: Vec::new() }
    }
}

impl TailLimit {
    /// Learn from the columns of a fragment that is about to be closed.
    pub fn note(&mut self, columns: &[ColumnWriter]) {
        let (mut all, mut repeated) = (0, 0);
        self.used.resize(columns.len(), Vec::new());
        for (column, used) in columns.iter().zip(&mut self.used) {
            for (code, bytes) in column.words_by_code() {
                used.resize(used.len().max(code + 1), false);
                all += bytes;
                repeated += if std::mem::replace(&mut used[code], true) { bytes } else { 0 };
            }
        }
        if all >= self.bytes && repeated * 2 > all {
            self.bytes = (self.bytes * 2).min(MOST_BYTES);
        }
    }
}
