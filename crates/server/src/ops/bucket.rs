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
