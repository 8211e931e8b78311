//! Files below a served folder that cannot be objects. Each is named once, so that nobody believes that a copy of the bucket has them.

use std::collections::HashSet;
use std::hash::{BuildHasher as _, RandomState};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use crate::metrics::Level;

/// Files that are named, and files that are counted. A folder may have millions of links.
const MOST_NAMED: usize = 100;
const MOST_COUNTED: usize = 1 << 20;

/// Why a file cannot be an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    Link,
    Kind,
    NotText,
    /// Its name is one that this server gives to something else.
    Reserved,
    Length,
}

impl Why {
    /// Return what is wrong, and the remedy.
    fn text(self) -> &'static str {
        match self {
            Why::Link => "is a link, and links are not followed; put a copy of the file there, or mount its folder",
            Why::Kind => "is neither a file nor a folder; put a copy of its content in a file, or remove it",
            Why::NotText => "has a name that is not UTF-8; rename it",
            Why::Reserved => "has a name that this server reserves (`%self`, or a name that ends in `%~`); rename it",
            Why::Length => "has a key of more than 1,024 bytes, the limit of S3; rename it, or the folders above it",
        }
    }
}

/// What was left out of lists since the start.
pub struct LeftOut {
    note: fn(&str),
    count: Level,
    seed: RandomState,
    known: Mutex<HashSet<u64>>,
}

impl LeftOut {
    pub fn new(note: fn(&str), count: Level) -> LeftOut {
        LeftOut { note, count, seed: RandomState::new(), known: Mutex::default() }
    }

    /// Note a file that a list leaves out.
    pub fn note(&self, path: &Path, why: Why) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() == MOST_COUNTED || !known.insert(self.seed.hash_one(path)) {
            return;
        }
        self.count.set(i64::try_from(known.len()).unwrap_or(i64::MAX));
        match known.len() {
            ..=MOST_NAMED => {
                (self.note)(&format!("`{}` is left out: it {}", path.display().to_string().escape_debug(), why.text()))
            }
            over if over == MOST_NAMED + 1 => {
                (self.note)("more files are left out; penstock_left_out_files counts them");
            }
            _ => {}
        }
    }
}
