//! An S3 server that serves a cold store through a cache of local drives, or a local folder.
//!
//! `server` accepts connections, and `s3s` turns requests into operations. `tier` is the list of operations, each with a function in `ops`. Reads
//! go through `blocks`, which knows the current version of each object and reads it through the crate `cache`. Writes go to the `cold` store.
//! Nothing here depends on datasets (docs/design/0021-server.md).

mod access_log;
mod admin;
mod batch;
mod blocks;
mod body;
mod buffers;
mod cold;
mod conditions;
mod folder;
mod front;
mod keys;
mod memory;
mod meta;
mod metrics;
mod ops;
mod sampler;
mod server;
mod tier;
mod tls;
mod upload;

pub use blocks::Revalidate;
pub use server::{Addresses, Config, serve};
