//! Branches: create and delete them, merge them, copy single commits, and return to earlier states. `three_way` finds out what a merge changes.

pub mod branch;
mod clashes;
mod combine;
pub mod merge;
pub mod policy;
pub mod reset;
mod schemas;
mod three_way;
