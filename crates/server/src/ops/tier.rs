//! A cold store and its cache, as all operations see them.

use std::sync::Arc;
use std::time::SystemTime;

use penstock_cache::Trust;
use s3s::{S3, S3Result};

use crate::cold::may_be_there;
use crate::limits::quota::Quotas;
use crate::memory::Memory;
use crate::meta::Object;
use crate::read::cached_objects::CachedObjects;
use crate::read::states::UNCERTAIN;

/// A cold store and its cache.
pub struct Tier {
    pub cold: Arc<dyn S3>,
    /// Whether the cold store is a served folder.
    pub is_folder: bool,
    /// None if nothing is cached.
    pub cached_objects: Option<Arc<CachedObjects>>,
    /// What later servers of the store believe.
    pub trust: Arc<Trust>,
    pub memory: Memory,
    pub quotas: Arc<Quotas>,
}

impl Tier {
    /// Run a write, and forget what was known of the objects before it and after it.
    pub async fn write<T>(&self, objects: &[Object], write: impl Future<Output = S3Result<T>>) -> S3Result<T> {
        self.write_each(objects, write, |written, _| written.as_ref().err().is_some_and(may_be_there)).await
    }

    /// Do the same for a write that may end in another way for each of its objects. `is_uncertain` says whether the cold store may still carry it out for
    /// one of them.
    pub async fn write_each<T>(
        &self,
        objects: &[Object],
        write: impl Future<Output = S3Result<T>>,
        is_uncertain: impl Fn(&S3Result<T>, &Object) -> bool,
    ) -> S3Result<T> {
        let mut writing = Writing::begin(self, objects).await;
        // If the request is cut from here on, nobody learns how it ends.
        writing.set(|_| true);
        let written = write.await;
        writing.set(|object| is_uncertain(&written, object));
        writing.note_on_drives().await;
        written
    }
}

/// Objects that are being written, and whether the cold store may carry that out later. A request may be dropped while it writes.
struct Writing {
    cached_objects: Option<Arc<CachedObjects>>,
    trust: Arc<Trust>,
    objects: Vec<(Object, bool)>,
}

impl Writing {
    /// Note that objects will be written, and remove their cached pages.
    async fn begin(tier: &Tier, objects: &[Object]) -> Writing {
        let known = tier
            .cached_objects
            .as_ref()
            .map(|cached_objects| objects.iter().map(|object| cached_objects.begin_write(object)).collect::<Vec<_>>());
        let each = objects.iter().map(|object| (object.clone(), false)).collect();
        let writing = Writing { cached_objects: tier.cached_objects.clone(), trust: tier.trust.clone(), objects: each };
        for (object, known) in objects.iter().zip(known.into_iter().flatten()) {
            if let Some(cached_objects) = &tier.cached_objects {
                cached_objects.forget_pages(object, known).await;
            }
        }
        writing
    }

    fn set(&mut self, is_uncertain: impl Fn(&Object) -> bool) {
        self.objects.iter_mut().for_each(|(object, uncertain)| *uncertain = is_uncertain(object));
    }

    fn is_uncertain(&self) -> bool {
        self.objects.iter().any(|(_, is_uncertain)| *is_uncertain)
    }

    /// Let a server find out that starts later, without the mark in shared memory, before the client has a response.
    async fn note_on_drives(&self) {
        if self.is_uncertain() {
            let trust = self.trust.clone();
            // A drive that hangs must not hold up the runtime.
            let _ = tokio::task::spawn_blocking(move || trust.note_on_drives(SystemTime::now() + UNCERTAIN)).await;
        }
    }
}

impl Drop for Writing {
    fn drop(&mut self) {
        if self.is_uncertain() {
            // A server that starts later would not know of it.
            self.trust.note_uncertain(SystemTime::now() + UNCERTAIN);
        }
        for (object, is_uncertain) in &self.objects {
            self.cached_objects.iter().for_each(|cached_objects| cached_objects.end_write(object, *is_uncertain));
        }
    }
}
