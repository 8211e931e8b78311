//! Whether a transaction can still be used, and whether its files may be deleted.

use std::time::{Duration, Instant};

use penstock_error::{Error, Result};
use penstock_storage::process;

/// Nobody presses Ctrl-C to end a transaction that takes less time.
const SOON: Duration = Duration::from_millis(5);

pub struct TransactionState {
    phase: Phase,
    /// Identifies the process that began the transaction. A forked child must not use the transaction or delete its files.
    generation: u64,
    began: Instant,
}

enum Phase {
    Open,
    /// A write failed, so the transaction can no longer be committed.
    Failed,
    /// The commit succeeded or may have succeeded, so the files must not be deleted.
    Closed,
}

impl TransactionState {
    pub fn begin() -> TransactionState {
        TransactionState { phase: Phase::Open, generation: process::generation(), began: Instant::now() }
    }

    pub fn check_open(&self) -> Result<()> {
        if self.is_inherited() {
            let text = "cannot use this transaction: this process was forked after the transaction began";
            return Err(Error::new("transaction-closed", text).hint("begin a new transaction in this process"));
        }
        match self.phase {
            Phase::Open => Ok(()),
            Phase::Failed => {
                Err(Error::new("transaction-closed", "cannot use this transaction: an earlier write failed")
                    .hint("begin another transaction; nothing was committed"))
            }
            Phase::Closed => Err(Error::new(
                "transaction-closed",
                "cannot use this transaction: it has already been committed or aborted",
            )),
        }
    }

    /// Fail if the user interrupted the process. A look at the signals needs the GIL, so a quick transaction does without.
    pub fn check_interrupted(&self) -> Result<()> {
        match self.began.elapsed() > SOON && process::interrupted() {
            true => Err(Error::new("interrupted", "interrupted before the commit")),
            false => Ok(()),
        }
    }

    pub fn fail(&mut self) {
        self.phase = Phase::Failed;
    }

    pub fn close(&mut self) {
        self.phase = Phase::Closed;
    }

    pub fn is_closed(&self) -> bool {
        matches!(self.phase, Phase::Closed)
    }

    /// Return whether a parent process began the transaction, which was then forked.
    pub fn is_inherited(&self) -> bool {
        self.generation != process::generation()
    }
}
