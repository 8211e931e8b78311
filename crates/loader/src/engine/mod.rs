//! Threads that make batches. A recipe defines the content of batches, jobs are unfinished batches, and slots enforce the
//! budget.

pub mod ahead;
pub mod foresee;
pub mod job;
pub mod kept;
pub mod parts;
pub mod recipe;
pub mod slots;
pub mod threads;
