//! Reads of objects through the cache.

pub mod blocks;
pub mod buffers;
pub mod conditions;
pub mod reader;
