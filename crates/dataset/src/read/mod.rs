//! Read samples: make a plan, fetch its blocks, and read each kind of value (one file per kind). Start with `reader`.

pub mod blocks;
pub mod choose;
pub mod codes;
pub mod fetch;
pub mod fixed;
pub mod foresee;
pub mod part;
pub mod plan;
pub mod ragged;
pub mod reader;
pub mod scan;
pub mod slices;
mod tile_plan;
pub mod tiles;
