//! A cold store and its cache, as all operations see them.

use std::sync::Arc;

use s3s::{S3, S3Result};

use crate::cold::may_be_there;
use crate::limits::quota::Quotas;
use crate::memory::Memory;
use crate::meta::Object;
use crate::read::blocks::Blocks;

/// A cold store and its cache.
pub struct Tier {
    pub cold: Arc<dyn S3>,
    /// None if nothing is cached.
    pub blocks: Option<Arc<Blocks>>,
    pub memory: Memory,
    pub quotas: Arc<Quotas>,
}

impl Tier {
    /// Run a write, and forget what was known of the objects before it and after it.
    pub async fn write<T>(&self, objects: &[Object], write: impl Future<Output = S3Result<T>>) -> S3Result<T> {
        let mut writing = match &self.blocks {
            Some(blocks) => Some(blocks.begin_write(objects).await),
            None => None,
        };
        let written = write.await;
        if let (Err(error), Some(writing)) = (&written, &mut writing) {
            writing.is_uncertain = may_be_there(error);
        }
        written
    }
}
