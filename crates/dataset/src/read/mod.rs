//! Read samples: a plan, the blocks fetched for it, and one file per form of values. Start with `reader`.

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
