//! A store, and the cache before it.

use std::sync::Arc;

use penstock_storage::Store;

use crate::cache::Cached;

/// A store, and the cache through which its immutable objects are read, if there is one. Clones share everything.
#[derive(Debug, Clone)]
pub struct Tiered {
    pub store: Arc<dyn Store>,
    pub cached: Option<Cached>,
}

impl<S: Store + 'static> From<Arc<S>> for Tiered {
    fn from(store: Arc<S>) -> Tiered {
        Tiered { store, cached: None }
    }
}

impl From<Arc<dyn Store>> for Tiered {
    fn from(store: Arc<dyn Store>) -> Tiered {
        Tiered { store, cached: None }
    }
}
