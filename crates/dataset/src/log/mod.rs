//! The logs of a branch's commits (`records`, `newest`) and of snapshot names (`refs`).

pub mod newest;
pub mod records;
pub mod refs;
