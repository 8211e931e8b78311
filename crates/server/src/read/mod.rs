//! Reads of objects through the cache.

pub mod arena;
pub mod buffers;
pub mod cached_objects;
pub mod conditions;
pub mod current;
pub mod flights;
pub mod immutable;
pub mod memory_cache;
#[cfg(target_os = "linux")]
pub mod pages;
pub mod ranges;
pub mod reader;
pub mod states;
pub mod zero_copy;
