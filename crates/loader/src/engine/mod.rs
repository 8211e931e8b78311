//! Threads that make batches. A recipe defines their content, jobs are unfinished batches, and slots enforce the budget.

pub mod job;
pub mod recipe;
pub mod slots;
pub mod threads;
