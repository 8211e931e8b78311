//! A cold store and its cache, as all operations see them.

use std::sync::Arc;

use s3s::{S3, S3Result};

use crate::memory::Memory;
use crate::meta::Object;
use crate::read::blocks::Blocks;

/// A cold store and its cache.
pub struct Tier {
    pub cold: Arc<dyn S3>,
    /// None if nothing is cached.
    pub blocks: Option<Arc<Blocks>>,
    pub memory: Memory,
}

impl Tier {
    /// Run a write, and forget what was known of the objects before it and after it.
    pub async fn write<T>(&self, objects: &[Object], write: impl Future<Output = S3Result<T>>) -> S3Result<T> {
        // A request may be dropped while it writes.
        let _after = Finally(|| self.blocks.iter().for_each(|blocks| objects.iter().for_each(|object| drop(blocks.changed(object)))));
        if let Some(blocks) = &self.blocks {
            for object in objects {
                blocks.forget(object).await;
            }
        }
        write.await
    }
}

/// Runs a function when it is dropped.
struct Finally<F: Fn()>(F);

impl<F: Fn()> Drop for Finally<F> {
    fn drop(&mut self) {
        self.0();
    }
}
