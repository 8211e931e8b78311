//! Counters for store operations, read by tests and `ds.stats()`.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! counters {
    ($($name:ident),*) => {
        /// Live counters of one store.
        #[derive(Debug, Default)]
        pub struct Counters { $(pub $name: AtomicU64),* }

        /// The values of [`Counters`] at one point in time.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub struct Counts { $(pub $name: u64),* }

        impl Counters {
            pub fn counts(&self) -> Counts {
                Counts { $($name: self.$name.load(Relaxed)),* }
            }
        }

        impl Counts {
            /// Return the name and value of each counter.
            pub fn entries(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name)),*]
            }
        }
    };
}

counters!(
    // Operations that the dataset requested from the store.
    reads, read_bytes, ranges, range_bytes, direct_bytes, maps, mapped_bytes, lookups, lists, puts, put_bytes, creates,
    syncs, deletes, // Network traffic caused by these operations.
    requests, received_bytes, retries, hedges,
    // Reads through a cache: those that it answered, and those that also needed bytes of the store.
    cache_hits, cache_hit_bytes, cache_misses, cache_cold_bytes, cache_corrupt_pages
);

/// Add to a counter.
pub fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Relaxed);
}
