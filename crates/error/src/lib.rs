//! Penstock's single error type. An error has a stable `code`, a message, context, a hint, and a `Kind` that
//! determines the caller's next step.
//!
//! This crate knows nothing about the operations that fail. Other crates create the errors, and the Python module maps each
//! `Kind` to a class.

use std::fmt;

/// The kind of an error, which determines what the caller should do next. Retries depend only on the kind, never on the text. Each kind has a
/// Python class of the same name, with the suffix `Error`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    NotFound,
    OutOfRange,
    AlreadyExists,
    Conflict,
    Unavailable,
    InvalidInput,
    Corrupt,
    Unsupported,
    PermissionDenied,
    Closed,
    Internal,
}

/// All error codes with their kinds, exported to Python as `_core.CODES`. A test checks that each kind has a Python class.
pub const CODES: &[(&str, Kind)] = &[
    ("dataset-not-found", Kind::NotFound),
    ("object-not-found", Kind::NotFound),
    ("bucket-not-found", Kind::NotFound),
    ("snapshot-not-found", Kind::NotFound),
    ("branch-not-found", Kind::NotFound),
    ("column-not-found", Kind::NotFound),
    ("class-not-found", Kind::NotFound),
    ("row-id-not-found", Kind::NotFound),
    ("source-not-found", Kind::NotFound),
    ("position-out-of-range", Kind::OutOfRange),
    ("dataset-exists", Kind::AlreadyExists),
    ("already-imported", Kind::AlreadyExists),
    ("conflict", Kind::Conflict),
    ("name-exists", Kind::AlreadyExists),
    ("name-not-found", Kind::NotFound),
    ("dataset-replaced", Kind::Conflict),
    ("transaction-expired", Kind::Conflict),
    ("commit-state-unknown", Kind::Unavailable),
    ("storage-failed", Kind::Unavailable),
    ("storage-unreachable", Kind::Unavailable),
    ("no-space", Kind::Unavailable),
    ("journal-in-use", Kind::Unavailable),
    ("invalid-schema", Kind::InvalidInput),
    ("invalid-value", Kind::InvalidInput),
    ("invalid-argument", Kind::InvalidInput),
    ("key-not-unique", Kind::InvalidInput),
    ("invalid-uri", Kind::InvalidInput),
    ("column-lengths-differ", Kind::InvalidInput),
    ("folder-not-empty", Kind::InvalidInput),
    ("media-undecodable", Kind::Corrupt),
    ("media-too-large", Kind::InvalidInput),
    ("block-checksum", Kind::Corrupt),
    ("object-checksum", Kind::Corrupt),
    ("object-truncated", Kind::Corrupt),
    ("object-malformed", Kind::Corrupt),
    ("log-incomplete", Kind::Corrupt),
    ("copy-incomplete", Kind::Corrupt),
    ("unknown-feature", Kind::Unsupported),
    ("unsupported-format", Kind::Unsupported),
    ("unsupported-storage", Kind::Unsupported),
    ("unknown-codec", Kind::Unsupported),
    ("read-only", Kind::PermissionDenied),
    ("permission-denied", Kind::PermissionDenied),
    ("credentials-missing", Kind::PermissionDenied),
    ("credentials-refused", Kind::PermissionDenied),
    ("transaction-closed", Kind::Closed),
    ("loader-closed", Kind::Closed),
    ("interrupted", Kind::Closed),
    ("internal", Kind::Internal),
];

/// An error with a stable code. `Display` writes the message, then the hint on a separate line.
#[derive(Debug, Clone)]
pub struct Error(Box<Inner>);

#[derive(Debug, Clone)]
struct Inner {
    kind: Kind,
    code: &'static str,
    /// The full text, in the form `prefix: row n reason`.
    message: String,
    prefix: String,
    reason: String,
    hint: Option<String>,
    /// The row number that precedes the reason in the message.
    row: Option<u64>,
    rows: Vec<u64>,
    row_ids: Vec<i64>,
    column: Option<String>,
    object: Option<String>,
    commit: Option<String>,
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Build an error from a code in [`CODES`], which also determines its kind.
    pub fn new(code: &'static str, message: impl Into<String>) -> Error {
        let known = CODES.iter().find(|(known, _)| *known == code);
        debug_assert!(known.is_some(), "error code {code} is not listed in `CODES`");
        let kind = known.map_or(Kind::Internal, |(_, kind)| *kind);
        let message = message.into();
        Error(Box::new(Inner {
            kind,
            code,
            reason: message.clone(),
            message,
            prefix: String::new(),
            hint: None,
            row: None,
            rows: Vec::new(),
            row_ids: Vec::new(),
            column: None,
            object: None,
            commit: None,
        }))
    }

    /// Record the row ids of the affected samples.
    pub fn row_ids(mut self, row_ids: Vec<i64>) -> Error {
        self.0.row_ids = row_ids;
        self
    }

    pub fn row_id_list(&self) -> &[i64] {
        &self.0.row_ids
    }

    fn compose(mut self) -> Error {
        let row = self.0.row.map_or(String::new(), |row| format!("row {row} "));
        let colon = if self.0.prefix.is_empty() { "" } else { ": " };
        self.0.message = format!("{}{colon}{row}{}", self.0.prefix, self.0.reason);
        self
    }

    /// Record the affected row in the caller's request. The row and the reason form a clause, such as `row 5 is not UTF-8`.
    pub fn at_row(mut self, row: u64) -> Error {
        self.0.row = Some(row);
        self.0.rows = vec![row];
        self.compose()
    }

    /// Add `first` to all row numbers, because the request was part of a larger request.
    pub fn shift_rows(mut self, first: u64) -> Error {
        self.0.row = self.0.row.map(|row| row + first);
        self.0.rows.iter_mut().for_each(|row| *row += first);
        self.compose()
    }

    /// Add a hint on how to resolve the error.
    pub fn hint(mut self, hint: impl Into<String>) -> Error {
        self.0.hint = Some(hint.into());
        self
    }

    /// Record the affected rows in the caller's request, as positions in the batch.
    pub fn rows(mut self, rows: Vec<u64>) -> Error {
        self.0.rows = rows;
        self
    }

    /// Record the affected column, unless one is already recorded.
    pub fn column(mut self, column: impl Into<String>) -> Error {
        self.0.column.get_or_insert_with(|| column.into());
        self
    }

    /// Record the affected stored object, unless one is already recorded.
    pub fn object(mut self, object: impl Into<String>) -> Error {
        self.0.object.get_or_insert_with(|| object.into());
        self
    }

    /// Record the other commit of a conflict, by its snapshot id.
    pub fn commit(mut self, snapshot: impl fmt::Display) -> Error {
        self.0.commit = Some(snapshot.to_string());
        self
    }

    /// Prepend the operation that failed: `cannot …: <old message>`.
    pub fn context(mut self, what: impl fmt::Display) -> Error {
        let colon = if self.0.prefix.is_empty() { "" } else { ": " };
        self.0.prefix = format!("{what}{colon}{}", self.0.prefix);
        self.compose()
    }

    pub fn kind(&self) -> Kind {
        self.0.kind
    }

    pub fn code(&self) -> &'static str {
        self.0.code
    }

    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The part of the message before the row and the reason.
    pub fn prefix(&self) -> &str {
        &self.0.prefix
    }

    /// The message without the prefix and the row.
    pub fn reason(&self) -> &str {
        &self.0.reason
    }

    pub fn row(&self) -> Option<u64> {
        self.0.row
    }

    pub fn hint_text(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    pub fn row_list(&self) -> &[u64] {
        &self.0.rows
    }

    pub fn column_name(&self) -> Option<&str> {
        self.0.column.as_deref()
    }

    pub fn object_name(&self) -> Option<&str> {
        self.0.object.as_deref()
    }

    pub fn commit_id(&self) -> Option<&str> {
        self.0.commit.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}", self.0.message)?;
        match &self.0.hint {
            Some(hint) => write!(out, "\nhint: {hint}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

/// Add context to the error in a `Result`.
pub trait Context<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T>;
}

impl<T> Context<T> for Result<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T> {
        self.map_err(|error| error.context(what()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_code_decides_the_kind_and_the_hint_is_on_its_own_line() {
        let error = Error::new("block-checksum", "crc32c 0x1, expected 0x2")
            .context("cannot decode block 3")
            .hint("run penstock verify");
        assert_eq!(error.kind(), Kind::Corrupt);
        assert_eq!(error.to_string(), "cannot decode block 3: crc32c 0x1, expected 0x2\nhint: run penstock verify");
    }

    #[test]
    fn rows_are_counted_from_the_beginning_of_the_request() {
        let error = Error::new("invalid-value", "holds `row 3`")
            .at_row(3)
            .context("column `row 3`")
            .column("row 3")
            .context("cannot append");
        assert_eq!(error.to_string(), "cannot append: column `row 3`: row 3 holds `row 3`");
        let error = error.shift_rows(65_536);
        assert_eq!(error.to_string(), "cannot append: column `row 3`: row 65539 holds `row 3`");
        assert_eq!(
            (error.row_list(), error.reason(), error.column_name()),
            (&[65_539][..], "holds `row 3`", Some("row 3"))
        );
    }

    #[test]
    fn codes_are_unique() {
        let mut codes: Vec<_> = CODES.iter().map(|(code, _)| code).collect();
        codes.sort();
        codes.dedup();
        assert_eq!(codes.len(), CODES.len());
    }
}
