//! Sample sources: views and files, the reads for a batch, and shuffle windows.

pub mod files;
pub mod reads;
pub mod view;
pub mod window;
