//! Limits of what clients may store and send: quotas of prefixes, and rates of keys.

pub mod measure;
pub mod quota;
pub mod rate;
mod usage;
