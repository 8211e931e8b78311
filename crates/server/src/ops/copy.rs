//! CopyObject, by the cold store itself.

use s3s::dto::{CopyObjectInput, CopyObjectOutput, CopySource};
use s3s::{S3Request, S3Response, S3Result, s3_error};

use crate::keys::rights;
use crate::meta::Object;
use crate::ops::tier::Tier;

pub async fn copy(tier: &Tier, request: S3Request<CopyObjectInput>) -> S3Result<S3Response<CopyObjectOutput>> {
    check_source(&request.input.copy_source, &request.extensions)?;
    let object = Object::new(&request.input.bucket, &request.input.key);
    tier.write(&[object], tier.cold.copy_object(request)).await
}

/// Fail unless the request may read the source of a copy.
pub fn check_source(source: &CopySource, extensions: &hyper::http::Extensions) -> S3Result<()> {
    match source {
        CopySource::Bucket { bucket, key, .. } => rights(extensions).check(bucket, key),
        _ => Err(s3_error!(NotImplemented, "name the source of a copy as bucket/key")),
    }
}
