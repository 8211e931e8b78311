//! One function for each operation.

pub mod bucket;
pub mod copy;
pub mod delete;
pub mod get;
pub mod head;
pub mod list;
pub mod multipart;
pub mod put;
pub mod tier;
