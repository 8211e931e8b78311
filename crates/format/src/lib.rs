//! Converts between bytes and the structs of `spec/format-v1.md`. Has no I/O, no async code, and no paths except the object names of
//! section 2.
//!
//! Each file implements one or two sections of the spec. Parsers bound every count by the bytes that remain, so hostile input cannot exhaust
//! memory or cause a panic; `fuzz/` tests most of them. `dataset` is the main caller.

pub mod cursor;
pub mod datafile;
pub mod id;
pub mod ids;
pub mod ints;
pub mod manifest;
pub mod names;
pub mod record;
pub mod schema;

pub use cursor::{Cursor, Writer, crc};
pub use id::Id;
pub use ids::SnapshotId;
pub use ints::IntArray;
