//! Threads that make batches. A recipe defines the content of batches, `started` reads their samples, `gather` makes jobs of them, which are
//! unfinished batches, and slots enforce the budget.

pub mod ahead;
mod choice;
pub mod foresee;
mod gather;
pub mod job;
pub mod kept;
mod layout;
pub mod parts;
pub mod recipe;
pub mod slots;
mod started;
pub mod threads;
