//! The loader: one order, exact resume, decode and augmentation on native threads.
//!
//! Pure: `random`, `permutation` → `order` → `program` (draw → sample), `plan` (step → draws). Then `engine` runs the batches: begin,
//! fetch, decode, transform, deliver in order. It knows neither Python nor fragments: the dataset turns positions into reads.

pub mod batch;
pub mod engine;
pub mod files;
pub mod item;
pub mod job;
pub mod memory;
pub mod order;
pub mod permutation;
pub mod pipeline;
pub mod plan;
pub mod program;
pub mod quota;
pub mod random;
pub mod source;
pub mod transform;
pub mod window;
