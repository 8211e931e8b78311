//! CopyObject, by the cold store itself.

use s3s::dto::{CopyObjectInput, CopyObjectOutput, CopySource, HeadObjectInput};
use s3s::{S3Request, S3Response, S3Result, s3_error};

use crate::cold::request as cold_request;
use crate::keys::rights;
use crate::meta::Object;
use crate::ops::tier::Tier;

/// Return the length of the source of a copy. Copies have the keys of an encrypted source.
macro_rules! copied_bytes {
    ($tier:expr, $input:expr) => {{
        let input = s3s::dto::HeadObjectInput {
            sse_customer_algorithm: $input.copy_source_sse_customer_algorithm.clone(),
            sse_customer_key: $input.copy_source_sse_customer_key.clone(),
            sse_customer_key_md5: $input.copy_source_sse_customer_key_md5.clone(),
            ..s3s::dto::HeadObjectInput::default()
        };
        $crate::ops::copy::source_bytes($tier, &$input.copy_source, input).await?
    }};
}
pub(crate) use copied_bytes;

pub async fn copy(tier: &Tier, request: S3Request<CopyObjectInput>) -> S3Result<S3Response<CopyObjectOutput>> {
    check_source(&request.input.copy_source, &request.extensions)?;
    let object = Object::new(&request.input.bucket, &request.input.key);
    let (bucket, key) = (object.bucket.clone(), object.key.clone());
    let bytes = if tier.quotas.cover(&bucket, &key) { copied_bytes!(tier, request.input) } else { 0 };
    tier.quotas.count(&bucket, &key, bytes, tier.write(&[object], tier.cold.copy_object(request))).await
}

/// Return the length of an object that will be copied.
pub async fn source_bytes(tier: &Tier, source: &CopySource, input: HeadObjectInput) -> S3Result<u64> {
    let CopySource::Bucket { bucket, key, version_id } = source else { return Ok(0) };
    let (bucket, key, version_id) = (bucket.to_string(), key.to_string(), version_id.as_ref().map(ToString::to_string));
    let found = tier.cold.head_object(cold_request(HeadObjectInput { bucket, key, version_id, ..input })).await?;
    Ok(found.output.content_length.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0))
}

/// Fail unless the request may read the source of a copy.
pub fn check_source(source: &CopySource, extensions: &hyper::http::Extensions) -> S3Result<()> {
    match source {
        CopySource::Bucket { bucket, key, .. } => rights(extensions).check(bucket, key),
        _ => Err(s3_error!(NotImplemented, "name the source of a copy as bucket/key")),
    }
}
