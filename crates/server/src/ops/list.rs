//! ListObjects, ListObjectsV2 and ListObjectVersions. Listings are not cached, so they show what the cold store has now.

use s3s::dto::{
    ListObjectVersionsInput, ListObjectVersionsOutput, ListObjectsInput, ListObjectsOutput, ListObjectsV2Input,
    ListObjectsV2Output,
};
use s3s::{S3Request, S3Response, S3Result};

use crate::memory::Taken;
use crate::ops::tier::Tier;

/// A list of a served folder counts so much memory: half for names on its way, and half for a page of the longest keys. Lists wait for one another.
const LIST_BYTES: u64 = 8 << 20;

async fn taken(tier: &Tier) -> S3Result<Option<Taken>> {
    if tier.is_folder { tier.memory.take(LIST_BYTES).await.map(Some) } else { Ok(None) }
}

pub async fn list(tier: &Tier, request: S3Request<ListObjectsInput>) -> S3Result<S3Response<ListObjectsOutput>> {
    let _taken = taken(tier).await?;
    tier.cold.list_objects(request).await
}

pub async fn list_v2(tier: &Tier, request: S3Request<ListObjectsV2Input>) -> S3Result<S3Response<ListObjectsV2Output>> {
    let _taken = taken(tier).await?;
    tier.cold.list_objects_v2(request).await
}

pub async fn list_versions(
    tier: &Tier,
    request: S3Request<ListObjectVersionsInput>,
) -> S3Result<S3Response<ListObjectVersionsOutput>> {
    let _taken = taken(tier).await?;
    tier.cold.list_object_versions(request).await
}
