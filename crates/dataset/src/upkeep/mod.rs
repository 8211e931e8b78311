//! Checks for a dataset, and for the location of a new dataset.

pub mod diff;
pub mod doctor;
pub mod unreferenced;
pub mod verify;
pub mod warm;
