//! Stores of named, immutable objects. A create-only put has three possible results. Only hints can be overwritten.
//!
//! This crate does not depend on the format. [`Local`] is a folder on disk, [`Memory`] exists in one process, and [`Remote`] is an
//! object store. The `conformance` suite checks that they all give the same guarantees.

mod allocator;
mod buffer;
mod certain;
pub mod conformance;
mod counters;
mod kernel;
mod listing;
mod local;
mod memory;
mod options;
pub mod process;
mod ranges;
mod read;
mod remote;
mod sparse;
mod store;

use std::sync::Arc;

use penstock_error::{Error, Result};

pub use allocator::Returning;
pub use allocator::anchor::hold as hold_heap;
pub use buffer::{Frozen, Recycled, Slot};
pub use certain::{CERTAIN_TRIES, create_certainly};
pub use counters::{Counters, Counts, add};
pub use listing::{ListedObject, Listing};
pub use local::{Disk, File, FileSystem, Journal, Local, check_length, local_path, private};
pub use memory::Memory;
pub use options::{Io, Options};
pub use ranges::{Piece, RangeRequest, RequestCost, Then};
pub use read::{Access, Features, Pattern, Read};
pub use remote::Remote;
pub use sparse::Sparse;
pub use store::{Created, ObjectWriter, Store, Turn};

/// Open the store at a URI: a path, `file:`, `memory://`, `s3://`, `gs://`, `az://`, `http://` or `https://`.
pub fn open(uri: &str, options: &Options) -> Result<Arc<dyn Store>> {
    if let Some(path) = local_path(uri)? {
        return Ok(Arc::new(Local::open(&path, Arc::new(Disk), options.io)?));
    }
    match uri.split_once("://") {
        Some(("memory", name)) => Ok(Arc::new(Memory::named(name))),
        Some(("s3" | "gs" | "az" | "http" | "https", _)) => Ok(Arc::new(Remote::open(uri, options)?)),
        other => {
            let scheme = other.map_or(uri, |(scheme, _)| scheme);
            Err(Error::new(
                "unsupported-storage",
                format!("cannot open `{uri}`: this release does not support `{scheme}://`"),
            )
            .hint("use a local path, file://, memory://, s3://, gs://, az://, http:// or https://"))
        }
    }
}
