//! An S3 server that serves a cold store through a cache of local drives, or a local folder.
//!
//! `server` accepts connections, and `s3s` turns requests into operations. `operations` is the table of them, each with a function in `ops`. Reads
//! go through `cached_objects`, which knows the current version of each object and reads it through the crate `cache`. Writes go to the `cold` store, or to
//! the folder of `back` first.
//! Nothing here depends on datasets (docs/design/0021-server.md).

mod access_keys;
mod authentication;
mod back;
mod batch;
mod body;
mod cold;
mod folder;
mod hosts;
mod limits;
pub mod load;
mod memory;
mod meta;
mod metrics;
mod middleware;
mod operations;
mod ops;
mod read;
mod server;
mod tls;
mod upload;
mod watch;

pub use server::{Addresses, Config, Unconnected, check, serve};
