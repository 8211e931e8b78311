//! Writing samples: check them, collect them by column, cut and encode blocks, fill data files. Start at `fragment`.

pub mod check;
pub mod column;
pub mod encode;
pub mod file;
pub mod fragment;
pub mod media;
mod style;
mod tiles;
pub mod vocabulary;
