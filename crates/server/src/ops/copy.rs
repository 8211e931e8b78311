//! CopyObject, by the cold store itself.

use s3s::dto::{CopyObjectInput, CopyObjectOutput, CopySource, ETag, HeadObjectInput};
use s3s::{S3Error, S3ErrorCode, S3Request, S3Response, S3Result, s3_error};

use crate::cold::request as cold_request;
use crate::keys::rights;
use crate::meta::Object;
use crate::ops::tier::Tier;

/// Return the length of the source of a copy, and let the copy fail if the source is another one by then. Copies have the keys of an encrypted source.
macro_rules! copied_bytes {
    ($tier:expr, $input:expr) => {{
        let input = s3s::dto::HeadObjectInput {
            sse_customer_algorithm: $input.copy_source_sse_customer_algorithm.clone(),
            sse_customer_key: $input.copy_source_sse_customer_key.clone(),
            sse_customer_key_md5: $input.copy_source_sse_customer_key_md5.clone(),
            ..s3s::dto::HeadObjectInput::default()
        };
        let (bytes, etag) = $crate::ops::copy::source($tier, &$input.copy_source, input).await?;
        let is_ours = $input.copy_source_if_match.is_none() && etag.is_some();
        if is_ours {
            $input.copy_source_if_match = etag.map(s3s::dto::ETagCondition::ETag);
        }
        (bytes, is_ours)
    }};
}
pub(crate) use copied_bytes;

pub async fn copy(tier: &Tier, mut request: S3Request<CopyObjectInput>) -> S3Result<S3Response<CopyObjectOutput>> {
    check_source(&request.input.copy_source, &request.extensions)?;
    let object = Object::new(&request.input.bucket, &request.input.key);
    let (bucket, key) = (object.bucket.clone(), object.key.clone());
    let (bytes, is_ours) = if tier.quotas.cover(&bucket, &key) { copied_bytes!(tier, request.input) } else { (0, false) };
    let copied = tier.quotas.count(&bucket, &key, bytes, tier.write(&[object], tier.cold.copy_object(request))).await;
    copied.map_err(|error| changed(error, is_ours))
}

/// Return the error for a copy whose source changed after its length was asked for. The client has set no condition, so it may try again.
pub fn changed(error: S3Error, is_ours: bool) -> S3Error {
    match is_ours && *error.code() == S3ErrorCode::PreconditionFailed {
        true => s3_error!(ServiceUnavailable, "the source of the copy has just changed; try again"),
        false => error,
    }
}

/// Return the length and the ETag of an object that will be copied.
pub async fn source(tier: &Tier, source: &CopySource, input: HeadObjectInput) -> S3Result<(u64, Option<ETag>)> {
    let CopySource::Bucket { bucket, key, version_id } = source else { return Ok((0, None)) };
    let (bucket, key, version_id) = (bucket.to_string(), key.to_string(), version_id.as_ref().map(ToString::to_string));
    let found = tier.cold.head_object(cold_request(HeadObjectInput { bucket, key, version_id, ..input })).await?;
    let bytes = found.output.content_length.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0);
    Ok((bytes, found.output.e_tag.filter(|etag| matches!(etag, ETag::Strong(_)))))
}

/// Fail unless the request may read the source of a copy.
pub fn check_source(source: &CopySource, extensions: &hyper::http::Extensions) -> S3Result<()> {
    match source {
        CopySource::Bucket { bucket, key, .. } => rights(extensions).check(bucket, key),
        _ => Err(s3_error!(NotImplemented, "name the source of a copy as bucket/key")),
    }
}
