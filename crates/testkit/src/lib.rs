//! What tests stand on: a crashing disk, random numbers by seed, sample datasets, hostile images. Never shipped.

pub mod crash;
pub mod hostile;
pub mod minio;
pub mod proxy;
pub mod random;
pub mod samples;
