//! Write samples: check them, collect them by column, cut and encode blocks, and write data files. Start with `fragment`.

pub mod check;
pub mod column;
pub mod encode;
pub mod file;
pub mod fragment;
pub mod media;
mod style;
pub mod tails;
mod tiles;
pub mod vocabulary;
