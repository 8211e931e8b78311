//! The words of category columns. Maps a snapshot's codes to words and back, and a data file's codes to a snapshot's codes.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, PoisonError};

use hashbrown::HashTable;
use penstock_error::Result;
use penstock_format::Id;
use penstock_format::cursor::{Strings, malformed};
use penstock_format::manifest::{WordsSegment, encode_words, parse_words};

use super::Snapshot;
use crate::store::context::file_cache_bytes;

/// The words of a column in one snapshot. The words stay in the segments that were read, so nothing is copied.
#[derive(Default, Clone)]
pub struct Vocabulary {
    segments: Vec<Arc<Strings>>,
    /// For each code, the segment and the word's index in that segment.
    places: Vec<(u32, u32)>,
    codes: HashTable<u32>,
    hasher: RandomState,
}

impl Vocabulary {
    /// Add the words of a segment. A word that is already in the vocabulary is skipped.
    pub fn push(&mut self, words: Arc<Strings>) -> Result<()> {
        let too_many_words = |_| malformed("a vocabulary has more than 2^32 words");
        let segment = u32::try_from(self.segments.len()).map_err(too_many_words)?;
        u32::try_from(self.places.len() + words.len()).map_err(too_many_words)?;
        self.segments.push(words.clone());
        for (place, word) in words.iter().enumerate() {
            if self.code(word).is_some() {
                continue;
            }
            let code = self.places.len() as u32;
            self.places.push((segment, place as u32));
            let Vocabulary { segments, places, codes, hasher } = self;
            codes.insert_unique(hasher.hash_one(word), code, |code| {
                hasher.hash_one(word_of(segments, places[*code as usize]))
            });
        }
        Ok(())
    }

    pub fn len(&self) -> usize {
        self.places.len()
    }

    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    pub fn code(&self, word: &str) -> Option<u32> {
        self.codes
            .find(self.hasher.hash_one(word), |code| word_of(&self.segments, self.places[*code as usize]) == word)
            .copied()
    }

    pub fn word(&self, code: u32) -> Option<&str> {
        self.places.get(code as usize).map(|place| word_of(&self.segments, *place))
    }

    /// All words, by code.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &str> {
        self.places.iter().map(|place| word_of(&self.segments, *place))
    }
}

fn word_of(segments: &[Arc<Strings>], (segment, place): (u32, u32)) -> &str {
    segments[segment as usize].get(place as usize).unwrap_or_default()
}

/// Maps one data file's codes to a vocabulary's codes. Each word is looked up on its first use.
pub struct FileCodes(Vec<AtomicU32>);

/// Marks a word that has not been looked up yet.
const NEW: u32 = u32::MAX;

/// Marks a word that the vocabulary lacks.
const NONE: u32 = u32::MAX - 1;

impl FileCodes {
    pub fn new(words: usize) -> FileCodes {
        FileCodes((0..words).map(|_| AtomicU32::new(NEW)).collect())
    }

    pub fn bytes(&self) -> u64 {
        size_of_val(&self.0[..]) as u64
    }

    /// Translate code `own` of the data file's dictionary to the vocabulary's code. Returns None if the dictionary lacks the code
    /// or the vocabulary lacks its word.
    pub fn code(&self, own: i64, dictionary: &Strings, vocabulary: &Vocabulary) -> Option<u32> {
        let known = self.0.get(usize::try_from(own).ok()?)?;
        match known.load(Relaxed) {
            NEW => {
                let found = vocabulary.code(dictionary.get(own as usize)?);
                known.store(found.unwrap_or(NONE), Relaxed);
                found
            }
            NONE => None,
            code => Some(code),
        }
    }
}

/// The vocabularies and code tables that a snapshot has built so far.
#[derive(Default)]
pub struct CodeTables {
    pub(super) vocabularies: HashMap<u64, Arc<Vocabulary>>,
    /// For each data file and column, a table that maps local codes to codes in this snapshot's vocabulary.
    files: HashMap<(Id, u64), Arc<FileCodes>>,
    files_bytes: u64,
}

impl Snapshot {
    /// Return the words of a category column, by code. If two writers added a word concurrently, the word's first code is used.
    /// The words are read only once.
    pub fn vocabulary(&self, column: u64) -> Result<Arc<Vocabulary>> {
        let lock = || self.tables.get().codes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = lock().vocabularies.get(&column) {
            return Ok(known.clone());
        }
        let (mut vocabulary, mut listed) = (Vocabulary::default(), 0);
        for segment in self.words.get(&column).into_iter().flatten() {
            if segment.first_code != listed {
                return Err(malformed(format!(
                    "the words of column {column} continue at code {}, expected {listed}",
                    segment.first_code,
                )));
            }
            let words = self.context.words(segment)?;
            listed += words.len() as u64;
            vocabulary.push(words)?;
        }
        let vocabulary = Arc::new(vocabulary);
        lock().vocabularies.insert(column, vocabulary.clone());
        Ok(vocabulary)
    }

    /// Return the words of a category column, followed by new ones. Cost: copies the tables of the vocabulary.
    pub fn vocabulary_with(&self, column: u64, new: &[Arc<str>]) -> Result<Arc<Vocabulary>> {
        let mut vocabulary = Vocabulary::clone(&*self.vocabulary(column)?);
        vocabulary.push(Arc::new(parse_words(&encode_words(column, new).into())?.1))?;
        Ok(Arc::new(vocabulary))
    }

    /// Return the vocabulary, and the table that translates a data file's codes to the vocabulary's codes. Cost: the first call reads the
    /// vocabulary. Each word is looked up on its first use.
    pub fn codes_of_file(&self, file: Id, column: u64, words: usize) -> Result<(Arc<Vocabulary>, Arc<FileCodes>)> {
        let vocabulary = self.vocabulary(column)?;
        let mut tables = self.tables.get().codes.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(codes) = tables.files.get(&(file, column)) {
            return Ok((vocabulary, codes.clone()));
        }
        let codes = Arc::new(FileCodes::new(words));
        tables.files_bytes += codes.bytes();
        if tables.files_bytes > file_cache_bytes() / 2 {
            (tables.files, tables.files_bytes) = (HashMap::new(), codes.bytes()); // Dropped codes are looked up again later.
        }
        tables.files.insert((file, column), codes.clone());
        Ok((vocabulary, codes))
    }

    pub fn words_segments(&self) -> impl Iterator<Item = &WordsSegment> {
        self.words.values().flatten()
    }

    /// Return whether all words of another snapshot have the same codes in this one. Columns that this snapshot lacks do not count.
    pub fn continues_words_of(&self, other: &Snapshot) -> bool {
        let mut shared = other.words.iter().filter(|(column, _)| self.schema.has_column(**column));
        shared.all(|(column, segments)| self.words.get(column).is_some_and(|own| own.starts_with(segments)))
    }

    /// Return the number of words that the manifest lists for a category column, including duplicates.
    pub fn word_count(&self, column: u64) -> u64 {
        self.words.get(&column).into_iter().flatten().map(|segment| segment.words).sum()
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use penstock_format::cursor::Cursor;

    use super::*;

    fn strings(words: &[&str]) -> Arc<Strings> {
        let body = words.iter().flat_map(|word| std::iter::once(word.len() as u8).chain(word.bytes()));
        Arc::new(Cursor::new(std::iter::once(words.len() as u8).chain(body).collect::<Bytes>()).strings().unwrap())
    }

    #[test]
    fn a_word_counts_where_it_is_first() {
        let mut vocabulary = Vocabulary::default();
        for words in [&["cat", "", "dog", "cat"][..], &["dog", "ant", "é"]] {
            vocabulary.push(strings(words)).unwrap();
        }
        let words = ["cat", "", "dog", "ant", "é"];
        assert!(vocabulary.iter().eq(words) && vocabulary.len() == words.len());
        let codes = words.iter().chain(&["bee"]).map(|word| vocabulary.code(word));
        assert!(codes.eq([Some(0), Some(1), Some(2), Some(3), Some(4), None]));
    }

    #[test]
    fn codes_of_a_file_are_those_of_its_words() {
        let mut vocabulary = Vocabulary::default();
        vocabulary.push(strings(&["cat", "dog"])).unwrap();
        let dictionary = strings(&["dog", "bee", "cat"]);
        let codes = FileCodes::new(dictionary.len());
        for _ in 0..2 {
            let found = [0, 1, 2, 3, -1].map(|own| codes.code(own, &dictionary, &vocabulary));
            assert_eq!(found, [Some(1), None, Some(0), None, None]);
        }
    }
}
