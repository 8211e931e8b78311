//! The journal of a transaction: its calls, as frames of a local file.

use std::path::Path;

use penstock_error::{Error, Result};
use penstock_format::transit::journal::{JournaledColumn, ReadFrame, Verb, encode};
use penstock_storage::Journal;

/// The journal of an open transaction.
pub struct TransactionJournal {
    journal: Journal,
    /// How many calls of an earlier process were repeated.
    pub restored: u64,
}

/// A call that changes a transaction.
pub struct JournalCall<'a> {
    pub verb: Verb,
    pub row_ids: &'a [i64],
    /// Whether media are decoded to check them.
    pub decode: bool,
}

impl TransactionJournal {
    pub fn new(journal: Journal, restored: u64) -> TransactionJournal {
        TransactionJournal { journal, restored }
    }

    /// Write a call, and the reads before it. It counts once `sync` succeeds, and `undo` removes it.
    pub fn add(&mut self, call: &JournalCall<'_>, given: &[JournaledColumn<'_>], reads: &[ReadFrame]) -> Result<()> {
        let row_ids: Vec<u64> = call.row_ids.iter().map(|row_id| row_id.cast_unsigned()).collect();
        let encoded = encode(&call.verb, call.decode, &row_ids, given, reads);
        let (head, values) = encoded.ok_or_else(|| {
            unable(
                "take values in tiled columns, values of 8 MiB or more, or values from a source such as a memory map",
            )
        })?;
        self.journal.add(&[&head[..]].into_iter().chain(values).collect::<Vec<&[u8]>>())
    }

    pub fn sync(&mut self) -> Result<()> {
        self.journal.sync()
    }

    pub fn undo(&mut self) -> Result<()> {
        self.journal.undo()
    }

    /// Note that the record may be put from now on, and the reads since the last call.
    pub fn will_commit(&mut self, reads: &[ReadFrame]) -> Result<()> {
        self.add(&JournalCall { verb: Verb::Commit, row_ids: &[], decode: false }, &[], reads)?;
        self.sync()
    }

    pub fn path(&self) -> &Path {
        self.journal.path()
    }

    /// Delete the journal. If this fails, the next transaction with it finds that it is not needed.
    pub fn remove(self) -> Result<()> {
        self.journal.remove()
    }
}

/// Make the error for what a transaction with a journal cannot do.
pub fn unable(what: &str) -> Error {
    Error::new("invalid-argument", format!("cannot {what}: this transaction has a journal"))
        .hint("use a transaction without `journal=`")
}
