//! Checks of a dataset, and of a location for a new one.

pub mod doctor;
pub mod verify;
