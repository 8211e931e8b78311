//! The loader: one order, exact resume, decode and augmentation on native threads.
//!
//! `order` is pure. `source` reads, `transform` changes one sample, `engine` runs the batches: begin, fetch, decode, transform, deliver in
//! order. The loader knows nothing about Python or fragments: the dataset turns positions into reads.

pub mod batch;
mod caught;
pub mod engine;
pub mod memory;
pub mod order;
pub mod source;
pub mod transform;
