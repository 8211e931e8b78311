//! Listings of a folder, page by page: names, sizes and times.

use std::time::SystemTime;

/// One object directly below a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The name below the folder.
    pub name: String,
    pub bytes: u64,
    /// When the object was last written, by the store's clock. None if the store does not know.
    pub modified: Option<SystemTime>,
}

/// Part of a listing.
#[derive(Debug, Default)]
pub struct Page {
    /// In no particular order.
    pub entries: Vec<Entry>,
    /// What to pass as `after` to get the next page. None after the last one.
    pub next: Option<String>,
}
