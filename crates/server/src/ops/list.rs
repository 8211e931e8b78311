//! ListObjects, ListObjectsV2 and ListObjectVersions. Listings are not cached, so they show what the cold store has now.

use s3s::dto::{
    ListObjectVersionsInput, ListObjectVersionsOutput, ListObjectsInput, ListObjectsOutput, ListObjectsV2Input, ListObjectsV2Output,
};
use s3s::{S3Request, S3Response, S3Result};

use crate::ops::tier::Tier;

pub async fn list(tier: &Tier, request: S3Request<ListObjectsInput>) -> S3Result<S3Response<ListObjectsOutput>> {
    tier.cold.list_objects(request).await
}

pub async fn list_v2(tier: &Tier, request: S3Request<ListObjectsV2Input>) -> S3Result<S3Response<ListObjectsV2Output>> {
    tier.cold.list_objects_v2(request).await
}

pub async fn list_versions(tier: &Tier, request: S3Request<ListObjectVersionsInput>) -> S3Result<S3Response<ListObjectVersionsOutput>> {
    tier.cold.list_object_versions(request).await
}
