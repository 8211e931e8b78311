//! Checks for a dataset, and for the location of a new dataset.

pub mod attach;
pub mod compact;
pub mod diff;
pub mod doctor;
pub mod fence;
pub mod unreferenced;
pub mod verify;
mod verify_attached;
pub mod verify_file;
pub mod warm;
