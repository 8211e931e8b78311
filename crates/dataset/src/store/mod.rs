//! A dataset's open store, and the objects, data files and decoded blocks that were read from the store.

pub mod blocks;
pub mod codecs;
pub mod context;
pub mod datafile;
pub mod files;
pub mod journal;
pub mod object;
