//! Write samples: check them, collect them by column, cut and encode blocks, and write data files. Start with `fragments`.

pub mod check;
pub mod column;
pub mod encode;
pub mod file;
pub mod fragment;
pub mod fragments;
pub mod fresh;
pub mod media;
pub mod pending;
mod style;
pub mod tails;
mod tiles;
pub mod vocabulary;
