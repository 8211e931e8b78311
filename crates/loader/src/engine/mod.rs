//! Threads that make batches. A recipe defines the content of batches, jobs are unfinished batches, and slots enforce the
//! budget.

pub mod ahead;
mod choice;
pub mod foresee;
pub mod job;
pub mod kept;
mod layout;
pub mod parts;
pub mod recipe;
pub mod slots;
pub mod threads;
