//! Test helpers that are never shipped: a crashing disk, a MinIO server, a faulty proxy, seeded random numbers, sample datasets,
//! and hostile images.
#![allow(unused_crate_dependencies)] // Only the binaries use the remaining dependencies.

pub mod crash;
pub mod hostile;
pub mod minio;
pub mod proxy;
pub mod random;
pub mod samples;
