//! Sample transforms: cells and their motions, operations, and the pipeline that applies them.

pub mod cell;
mod check;
mod colour;
pub mod crops;
mod dtypes;
mod erased;
mod grey;
pub mod motion;
pub mod operation;
pub mod output;
pub mod pipeline;
mod warp;
