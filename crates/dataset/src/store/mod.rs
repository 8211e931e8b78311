//! The open store of a dataset, and what was read from it: objects, data files, decoded blocks.

pub mod blocks;
pub mod codecs;
pub mod context;
pub mod datafile;
pub mod files;
pub mod object;
