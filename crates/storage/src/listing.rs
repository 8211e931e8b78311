//! Paginated folder listings, with names, sizes and times.

use std::time::SystemTime;

/// One object directly below a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedObject {
    /// The name relative to the folder.
    pub name: String,
    pub bytes: u64,
    /// The time of the last write, according to the store's clock, or None if the store does not record it.
    pub modified: Option<SystemTime>,
}

/// Part of a listing.
#[derive(Debug, Default)]
pub struct Listing {
    /// The entries, in no particular order.
    pub entries: Vec<ListedObject>,
    /// The `after` argument for the next page, or None on the last page.
    pub next: Option<String>,
}
