//! Checks for a dataset, and for the location of a new one.

pub mod doctor;
pub mod verify;
