//! Bytes ↔ structs of `spec/format-v1.md`. No I/O, no async, no paths but the names of section 2.
//!
//! One file per section of the spec. Parsers bound every count by the bytes that are left, so hostile input costs
//! neither memory nor a panic; `fuzz/` holds them to it. `dataset` is the only caller.

pub mod cursor;
pub mod datafile;
pub mod ids;
pub mod ints;
pub mod manifest;
pub mod names;
pub mod record;
pub mod schema;

pub use cursor::{Cursor, Writer, crc};
pub use ids::{Id, SnapshotId};
pub use ints::IntArray;
