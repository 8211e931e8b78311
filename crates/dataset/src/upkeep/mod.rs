//! Checks of a dataset and of a place for one.

pub mod doctor;
pub mod verify;
