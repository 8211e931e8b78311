//! The fast tier: caches on local drives, and the server before a store.

pub mod cache;
pub mod serve;
