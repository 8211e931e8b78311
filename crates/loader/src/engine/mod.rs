//! Threads that make batches: a recipe says what they hold, jobs are batches in the making, slots keep the budget.

pub mod job;
pub mod recipe;
pub mod slots;
pub mod threads;
