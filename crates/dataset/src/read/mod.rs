//! Reading samples: a plan, the blocks fetched for it, then one file per form of the values. Start at `reader`.

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
mod share;
mod stream;
pub mod tiles;
