//! A branch's commit log (`records`, `newest`) and the names log (`refs`).

pub mod history;
pub mod newest;
pub mod records;
pub mod refs;
