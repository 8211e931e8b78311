//! The open store of a dataset, and the objects, data files and decoded blocks that were read from it.

pub mod blocks;
pub mod codecs;
pub mod context;
pub mod datafile;
pub mod files;
pub mod object;
