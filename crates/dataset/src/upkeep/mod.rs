//! Checks of a dataset, and of a place where one is to be created.

pub mod doctor;
pub mod verify;
