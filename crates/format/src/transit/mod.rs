//! What passes from one process to another, and is not part of a dataset: stages, and journals of transactions.

pub mod journal;
pub mod stage;
