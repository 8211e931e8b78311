//! The loader: deterministic order, exact resume, and decoding and augmentation on native threads.
//!
//! `order` contains pure functions. `source` reads samples, `transform` changes one sample, and `engine` makes batches and
//! delivers them in order. The loader does not depend on Python or on fragments, because the dataset translates positions into
//! reads.

pub mod batch;
mod caught;
pub mod engine;
pub mod memory;
pub mod order;
pub mod source;
pub mod transform;
