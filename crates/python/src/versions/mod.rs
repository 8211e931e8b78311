//! Snapshots, and everything that makes or compares them.

pub mod branches;
pub mod derived;
pub mod history;
pub mod snapshot;
pub mod transaction;
