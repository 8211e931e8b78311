//! The logs: commits of a branch (`records`, `newest`), and names of snapshots (`refs`).

pub mod newest;
pub mod records;
pub mod refs;
