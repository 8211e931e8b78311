//! Where samples come from: views and files, what a batch reads of them, and shuffle windows.

pub mod files;
pub mod reads;
pub mod view;
pub mod window;
