//! Threads that make batches: a recipe defines their content, jobs are unfinished batches, and slots enforce the budget.

pub mod job;
pub mod recipe;
pub mod slots;
pub mod threads;
