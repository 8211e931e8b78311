//! Convert the words of category columns in a transaction to codes. New words get codes in order of first use.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use penstock_error::{Error, Result};
use penstock_format::schema::ColumnSpec;
use penstock_tensor::{Column, Ragged};

use super::check::{codes_of, texts_of};
use crate::parallel;
use crate::snapshot::Snapshot;

/// Number of bytes read to look up a word: one cache line.
const LINE_BYTES: usize = 64;

/// The number of words that a thread looks up at a time.
const LOOKED_UP: usize = 4096;

/// The words of a category: those of the base snapshot, then new ones in order of first use. A word's index in the list is its code.
struct KnownWords {
    words: Arc<Vec<Arc<str>>>,
    codes: HashMap<Arc<str>, u32>,
    base: usize,
    /// The word list from the last append, and the codes of the words used so far. Slices of the same column share the list.
    given: Option<(Arc<Ragged>, Vec<Option<u32>>)>,
}

impl KnownWords {
    fn code_of(&mut self, word: &str) -> u32 {
        if let Some(code) = self.codes.get(word) {
            return *code;
        }
        let (word, code): (Arc<str>, u32) = (word.into(), self.words.len() as u32);
        Arc::make_mut(&mut self.words).push(word.clone()); // The list is shared only during a call, so this copies nothing.
        self.codes.insert(word, code);
        code
    }

    /// Forget all words except the first `count`.
    fn shorten(&mut self, count: usize) {
        for word in Arc::make_mut(&mut self.words).drain(count..) {
            self.codes.remove(&word);
        }
        self.given = None;
    }
}

/// The words of all category columns that a transaction has used.
#[derive(Default)]
pub struct Words {
    columns: HashMap<u64, KnownWords>,
}

/// The number of words in each column, saved so that a refused append can be undone.
pub struct WordsMark(Vec<(u64, usize)>);

impl Words {
    pub fn mark(&self) -> WordsMark {
        WordsMark(self.columns.iter().map(|(column, known)| (*column, known.words.len())).collect())
    }

    /// Forget the words added since a mark.
    pub fn return_to(&mut self, mark: &WordsMark) {
        for (column, known) in &mut self.columns {
            known.shorten(mark.0.iter().find(|(marked, _)| marked == column).map_or(known.base, |(_, count)| *count));
        }
    }

    /// Return the words of a column by code. Returns None if no append has used the column.
    pub fn of(&self, column: u64) -> Option<Arc<Vec<Arc<str>>>> {
        self.columns.get(&column).map(|known| known.words.clone())
    }

    /// Make a list of words for each column, all of which are known already.
    pub fn listing(columns: impl Iterator<Item = (u64, Vec<Arc<str>>)>) -> Words {
        let known = |words: Vec<Arc<str>>| KnownWords {
            base: words.len(),
            words: Arc::new(words),
            codes: HashMap::new(),
            given: None,
        };
        Words { columns: columns.map(|(column, words)| (column, known(words))).collect() }
    }

    /// Return the new words of each column that has new words.
    pub fn added(&self) -> impl Iterator<Item = (u64, &[Arc<str>])> {
        let with_new = self.columns.iter().filter(|(_, known)| known.words.len() > known.base);
        with_new.map(|(column, known)| (*column, &known.words[known.base..]))
    }

    /// Convert words, indexes into a word list, or codes of the base snapshot to codes in this transaction's vocabulary. The writer maps
    /// these codes to its dictionary.
    pub fn category(
        &mut self,
        base: &Snapshot,
        spec: &ColumnSpec,
        column: Column,
        words: Option<Arc<Ragged>>,
    ) -> Result<Column> {
        let known = self.known(base, spec.id)?;
        let (codes, validity): (Vec<u32>, _) = match column {
            Column::Ragged(_) if words.is_some() => return Err(Error::new("invalid-value", "words are given twice")),
            Column::Pulled(_) => return Err(Error::new("invalid-value", "found a tensor, expected words")),
            Column::Ragged(words) => {
                let texts = texts_of(&words)?;
                // Most words are known, and look-ups wait for memory, so all threads share the look-ups. New words then get codes
                // in order.
                let parts: Vec<&[&str]> = texts.chunks(LOOKED_UP).collect();
                let look =
                    |part: usize| parts[part].iter().map(|text| known.codes.get(*text).copied()).collect::<Vec<_>>();
                let found = parallel::map(parts.len(), texts.len() * LINE_BYTES, look)?.concat();
                let code = |(row, (text, found)): (usize, (&str, Option<u32>))| match found {
                    _ if words.is_null(row) => 0,
                    Some(code) => code,
                    None => known.code_of(text),
                };
                (texts.into_iter().zip(found).enumerate().map(code).collect(), words.validity)
            }
            Column::Fixed { data, validity, samples } => {
                let (places, valid) =
                    (codes_of(&data, samples)?, |row: usize| validity.as_ref().is_none_or(|validity| validity[row]));
                let out_of_range = |row: usize, place: i64, count: usize| {
                    let text = format!("contains code {place}, but the vocabulary has {count} words");
                    Error::new("invalid-value", text).hint("append the words themselves").at_row(row as u64)
                };
                let place_of = |place: i64, count: usize| usize::try_from(place).ok().filter(|place| *place < count);
                let codes = match words {
                    None => {
                        let code = |(row, place): (usize, i64)| match place_of(place, known.base) {
                            _ if !valid(row) => Ok(0),
                            Some(place) => Ok(place as u32),
                            None => Err(out_of_range(row, place, known.base)),
                        };
                        places.enumerate().map(code).collect::<Result<_>>()?
                    }
                    Some(words) => {
                        let texts = texts_of(&words)?;
                        // Each word in the list is looked up at most once, however often the word occurs.
                        let seen =
                            known.given.take().filter(|(given, _)| Arc::ptr_eq(given, &words)).map(|(_, seen)| seen);
                        let mut seen = seen.unwrap_or_else(|| vec![None; texts.len()]);
                        let code = |(row, place): (usize, i64)| match place_of(place, texts.len()) {
                            _ if !valid(row) => Ok(0),
                            Some(place) => Ok(*seen[place].get_or_insert_with(|| known.code_of(texts[place]))),
                            None => Err(out_of_range(row, place, texts.len())),
                        };
                        let codes = places.enumerate().map(code).collect::<Result<_>>()?;
                        known.given = Some((words.clone(), seen));
                        codes
                    }
                };
                (codes, validity)
            }
        };
        let samples = codes.len();
        Ok(Column::Fixed { data: codes.into_iter().flat_map(u32::to_le_bytes).collect(), validity, samples })
    }

    /// Add the words that the column lacks.
    pub fn learn<'a>(&mut self, base: &Snapshot, column: u64, words: impl Iterator<Item = &'a str>) -> Result<()> {
        let known = self.known(base, column)?;
        for word in words {
            known.code_of(word);
        }
        Ok(())
    }

    fn known(&mut self, base: &Snapshot, column: u64) -> Result<&mut KnownWords> {
        Ok(match self.columns.entry(column) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(free) => {
                let words: Vec<Arc<str>> = base.vocabulary(column)?.iter().map(Arc::from).collect();
                let codes = words.iter().cloned().zip(0..).collect();
                free.insert(KnownWords { base: words.len(), words: Arc::new(words), codes, given: None })
            }
        })
    }
}
