//! Operations on buckets.

use s3s::dto::*;
use s3s::{S3Request, S3Response, S3Result};

use crate::access_keys::rights;
use crate::ops::tier::Tier;

/// List the buckets that the key may know of.
pub async fn list(tier: &Tier, request: S3Request<ListBucketsInput>) -> S3Result<S3Response<ListBucketsOutput>> {
    let rights = rights(&request.extensions);
    let mut response = tier.cold.list_buckets(request).await?;
    response.output.buckets.iter_mut().for_each(|buckets| {
        buckets.retain(|bucket| bucket.name.as_ref().is_some_and(|name| rights.know(name)));
    });
    Ok(response)
}

pub async fn create(tier: &Tier, request: S3Request<CreateBucketInput>) -> S3Result<S3Response<CreateBucketOutput>> {
    tier.cold.create_bucket(request).await
}

pub async fn delete(tier: &Tier, request: S3Request<DeleteBucketInput>) -> S3Result<S3Response<DeleteBucketOutput>> {
    tier.cold.delete_bucket(request).await
}

pub async fn head(tier: &Tier, request: S3Request<HeadBucketInput>) -> S3Result<S3Response<HeadBucketOutput>> {
    tier.cold.head_bucket(request).await
}

pub async fn location(tier: &Tier, request: S3Request<GetBucketLocationInput>) -> S3Result<S3Response<GetBucketLocationOutput>> {
    tier.cold.get_bucket_location(request).await
}

pub async fn versioning(tier: &Tier, request: S3Request<GetBucketVersioningInput>) -> S3Result<S3Response<GetBucketVersioningOutput>> {
    tier.cold.get_bucket_versioning(request).await
}
