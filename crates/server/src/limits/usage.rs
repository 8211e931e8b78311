//! How many bytes a quota counts, without any I/O: what the last listing found, and what was written since that listing began.

use std::collections::HashSet;

/// Open uploads that are known by name. More are measured when they are completed.
pub const MOST_UPLOADS: usize = 10_000;

/// An upload in parts: its key and its id.
pub type Upload = (String, String);

/// What a listing found.
#[derive(Debug, Default)]
pub struct Found {
    pub bytes: u64,
    /// Open uploads whose parts were counted. Others were too many, and are measured when they are completed.
    pub uploads: HashSet<Upload>,
}

/// What a quota counts. A byte may be counted twice until the next listing, but never not at all.
#[derive(Debug, Default)]
pub struct Usage {
    /// What the last whole listing found.
    listed: Option<u64>,
    /// What was written since that listing began.
    written: u64,
    /// What was written since the running listing began.
    during: Option<u64>,
    /// What is being written.
    running: u64,
    /// Open uploads whose parts are all counted, and those of them that were begun since the running listing began.
    uploads: HashSet<Upload>,
    begun: HashSet<Upload>,
}

impl Usage {
    /// Begin with bytes that will be there, until the first listing ends.
    pub fn beginning(bytes: u64) -> Usage {
        Usage { written: bytes, ..Usage::default() }
    }

    pub fn bytes(&self) -> u64 {
        self.listed.unwrap_or(0).saturating_add(self.written).saturating_add(self.running)
    }

    /// Count bytes that will be written, unless there would be more than `most`.
    pub fn reserve(&mut self, bytes: u64, most: u64) -> bool {
        // What adds nothing is never refused.
        let fits = bytes == 0 || self.bytes().saturating_add(bytes) <= most;
        if fits {
            self.running += bytes;
        }
        fits
    }

    /// Note the end of a write. Bytes that are not there for certain are given back.
    pub fn end(&mut self, bytes: u64, may_be_there: bool) {
        self.running -= bytes;
        if may_be_there {
            self.written = self.written.saturating_add(bytes);
            self.during = self.during.map(|during| during.saturating_add(bytes));
        }
    }

    pub fn is_listing(&self) -> bool {
        self.during.is_some()
    }

    pub fn is_listed(&self) -> bool {
        self.listed.is_some()
    }

    /// Begin a listing. Returns the uploads that it must measure.
    pub fn begin_listing(&mut self) -> HashSet<Upload> {
        self.during = Some(0);
        self.begun.clear();
        self.uploads.clone()
    }

    /// Note the end of a listing, and what it found unless it failed.
    pub fn end_listing(&mut self, found: Option<&Found>) {
        let during = self.during.take().unwrap_or(0);
        if let Some(found) = found {
            (self.listed, self.written) = (Some(found.bytes), during);
            self.uploads = &found.uploads | &self.begun;
        }
    }

    /// Note a new upload, whose parts will be counted.
    pub fn begin_upload(&mut self, upload: &Upload) {
        if self.uploads.len() < MOST_UPLOADS || self.uploads.contains(upload) {
            self.uploads.insert(upload.clone());
            if self.is_listing() {
                self.begun.insert(upload.clone());
            }
        }
    }

    pub fn end_upload(&mut self, upload: &Upload) {
        self.uploads.remove(upload);
        self.begun.remove(upload);
    }

    pub fn counts(&self, upload: &Upload) -> bool {
        self.uploads.contains(upload)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(bytes: u64) -> Option<Found> {
        Some(Found { bytes, ..Found::default() })
    }

    #[test]
    fn what_is_written_while_a_listing_runs_is_counted_after_it() {
        let mut usage = Usage::default();
        assert!(usage.reserve(10, 100));
        usage.begin_listing();
        // It ends while the listing runs, which may have passed its key.
        usage.end(10, true);
        assert!(usage.reserve(20, 100) && usage.reserve(5, 100));
        usage.end_listing(found(40).as_ref());
        assert_eq!(usage.bytes(), 40 + 10 + 25);
        usage.end(20, false);
        usage.end(5, true);
        assert_eq!(usage.bytes(), 55);
        usage.begin_listing();
        usage.end_listing(found(55).as_ref());
        assert_eq!(usage.bytes(), 55);
    }

    #[test]
    fn a_listing_that_fails_changes_nothing() {
        let mut usage = Usage::default();
        usage.begin_listing();
        usage.end_listing(found(70).as_ref());
        assert!(usage.reserve(20, 100));
        usage.begin_listing();
        usage.end(20, true);
        usage.end_listing(None);
        assert_eq!((usage.bytes(), usage.is_listing()), (90, false));
    }

    #[test]
    fn no_order_of_writes_and_listings_lets_a_quota_be_exceeded() {
        // Each step is a write that begins or ends, or a listing that begins or ends. The store has what ended; a listing sees any part of what
        // ended while it ran, at worst nothing.
        let mut state = 7_u64;
        let mut dice = |sides: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % sides
        };
        for _ in 0..2_000 {
            let (mut usage, mut stored, mut running, mut seen) = (Usage::default(), 0, Vec::new(), 0);
            for _ in 0..40 {
                match dice(4) {
                    0 => {
                        let bytes = dice(40);
                        if usage.reserve(bytes, 100) {
                            running.push(bytes);
                        }
                    }
                    1 if !running.is_empty() => {
                        let bytes = running.swap_remove(dice(running.len() as u64) as usize);
                        let is_there = dice(4) > 0;
                        stored += if is_there { bytes } else { 0 };
                        usage.end(bytes, is_there);
                    }
                    2 if !usage.is_listing() => {
                        usage.begin_listing();
                        seen = stored;
                    }
                    3 if usage.is_listing() => usage.end_listing(found(seen).filter(|_| dice(3) > 0).as_ref()),
                    _ => {}
                }
                assert!(stored <= 100 && usage.bytes() >= stored, "{stored} bytes are stored, {usage:?}");
            }
        }
    }

    #[test]
    fn uploads_are_known_until_they_end_or_a_listing_does_not_find_them() {
        let upload = |name: &str| (name.to_owned(), "id".to_owned());
        let mut usage = Usage::default();
        for name in ["gone", "open", "completed"] {
            usage.begin_upload(&upload(name));
        }
        let known = usage.begin_listing();
        usage.begin_upload(&upload("new"));
        usage.begin_upload(&upload("ended"));
        usage.end_upload(&upload("ended"));
        let uploads = known.into_iter().filter(|(key, _)| key != "gone").chain([upload("of another node")]).collect();
        usage.end_listing(Some(&Found { bytes: 1, uploads }));
        let counted = ["gone", "open", "new", "ended", "of another node"].map(|name| usage.counts(&upload(name)));
        assert_eq!(counted, [false, true, true, false, true]);
    }

    #[test]
    fn numbers_at_the_end_of_their_range_are_refused() {
        let mut usage = Usage::default();
        assert!(!usage.reserve(u64::MAX, 1 << 60) && usage.reserve(1 << 60, 1 << 60) && !usage.reserve(1, 1 << 60));
        usage.begin_listing();
        usage.end_listing(found(u64::MAX).as_ref());
        assert!(!usage.reserve(1, 1 << 60) && usage.reserve(0, 1));
    }
}
