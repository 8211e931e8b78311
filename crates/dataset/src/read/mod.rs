//! Read samples: make a plan, fetch its blocks, and read each kind of value (one file per kind). Start with `reader`.

pub mod blocks;
pub mod codes;
pub mod fetch;
mod fill;
pub mod fixed;
pub mod plan;
pub mod ragged;
mod ranges;
pub mod reader;
pub mod scan;
pub mod share;
mod stream;
pub mod tiles;
