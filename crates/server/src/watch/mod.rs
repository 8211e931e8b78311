//! What the server shows of itself: counts, the status page, and the access log.

pub mod access_log;
pub mod admin;
pub mod sampler;
