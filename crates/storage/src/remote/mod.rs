//! Object storage: S3, Google Cloud Storage, Azure, and plain HTTP(S) for reading. See docs/design/0004-stores.md.

mod batch;
mod concurrency;
mod connect;
mod cost;
mod live;
mod prove;
mod ranges;
mod receive;
mod retry;
mod store;
mod upload;

pub use store::Remote;
