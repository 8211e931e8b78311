//! Converts between bytes and the structs of `spec/format-v1.md`. This crate has no I/O, no async code, and no paths other than
//! the object names in section 2 of that file.
//!
//! Each file implements one or two sections of the spec. Parsers check every count against the remaining bytes, so hostile input
//! cannot exhaust memory or cause a panic. `fuzz/` tests most of the parsers. The `dataset` crate is the main caller.

pub mod classes;
pub mod cursor;
pub mod datafile;
pub mod delta;
pub mod evolve;
pub mod files;
pub mod id;
pub mod ids;
pub mod ints;
pub mod kinds;
pub mod manifest;
pub mod names;
pub mod overlay;
pub mod record;
pub mod rows;
pub mod schema;
pub mod transit;

pub use cursor::{Cursor, Writer, crc};
pub use id::Id;
pub use ids::SnapshotId;
pub use ints::IntArray;
