//! A cache of pages on local drives, in front of any store. Bytes are verified on every read, and a failing cache never fails a read.
//!
//! [`Cached`] is what callers read through. A `drive` is a folder with `extent`s, which are sparse files with the cached pages of an object.
//! `read_through` reads through the cache, `flight` lets only one operation of this machine fetch a page, `usage` counts bytes, and `evict` frees them.
//! `place` decides which drive holds an extent. Nothing here depends on formats (docs/design/0020-cache.md).

mod cache;
mod cached;
mod drive;
mod drives;
mod evict;
mod extent;
mod flight;
mod place;
mod plan;
mod prefetched;
mod read_through;
mod registry;
mod room;
mod spec;
mod tiered;
mod try_read;
pub mod upkeep;
mod usage;

use penstock_error::{Error, Kind, Result};
use penstock_storage::Options;

pub use cache::{Cached, Policy, held_bytes};
pub use cached::Noted;
pub use drive::Drive;
pub use drives::Drives;
pub use drives::trust::Trust;
pub use extent::{Key, store_key};
pub use plan::belady::NEVER;
pub use plan::page_runs::{Future, Member, Need, Object, Uses};
pub use plan::{Foreseen, Plan};
pub use spec::{DriveSpec, Spec, size_bytes};
pub use tiered::Tiered;
pub use usage::Counts;

/// The variable that names a cache for all stores that are reached over a network.
pub const VARIABLE: &str = "PENSTOCK_CACHE";

/// Open the store at a URI, behind the cache that the option `cache` or the environment names. The variable has no effect on local folders
/// and on memory, and the option `cache` with an empty text switches it off. If all drives fail, the store is opened without a cache, and
/// `note` gets the reason.
pub fn open(uri: &str, options: &Options, policy: Policy, note: impl FnOnce(Error)) -> Result<Tiered> {
    let store = penstock_storage::open(uri, options)?;
    let is_remote = penstock_storage::local_path(uri)?.is_none() && !uri.starts_with("memory://");
    let from_environment = || std::env::var(VARIABLE).ok().filter(|_| is_remote);
    let Some(text) =
        options.given("cache").map(str::to_owned).or_else(from_environment).filter(|text| !text.is_empty())
    else {
        return Ok(store.into());
    };
    let spec = Spec::parse(&text)?;
    match Drives::open(&spec) {
        Ok(drives) => {
            let cached = Cached::over(store.clone(), drives, spec.dataset_bytes, policy);
            Ok(Tiered { store, cached: Some(cached) })
        }
        Err(error) if error.kind() == Kind::InvalidInput => Err(error),
        Err(error) => {
            note(error);
            Ok(store.into())
        }
    }
}
