//! CopyObject, by the cold store itself.

use hyper::StatusCode;
use s3s::dto::{CopyObjectInput, CopyObjectOutput, CopySource, HeadBucketInput, HeadObjectInput, HeadObjectOutput};
use s3s::{S3Error, S3ErrorCode, S3Request, S3Response, S3Result, s3_error};

use crate::access_keys::rights;
use crate::cold::request as cold_request;
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
        let found = $crate::ops::copy::source($tier, &$input.copy_source, input).await?;
        let etag = found.e_tag.filter(|etag| matches!(etag, s3s::dto::ETag::Strong(_)));
        if let Some(etag) = &etag {
            let conditions = $crate::read::conditions::Conditions {
                matches: $input.copy_source_if_match.as_ref(),
                none_match: $input.copy_source_if_none_match.as_ref(),
                modified_since: $input.copy_source_if_modified_since.as_ref(),
                unmodified_since: $input.copy_source_if_unmodified_since.as_ref(),
            };
            conditions.check_copy(etag, found.last_modified.as_ref())?;
            // This version meets them. Beside the condition that it is this one, they would mean something else.
            ($input.copy_source_if_none_match, $input.copy_source_if_modified_since) = (None, None);
            $input.copy_source_if_unmodified_since = None;
            $input.copy_source_if_match = Some(s3s::dto::ETagCondition::ETag(etag.clone()));
        }
        (found.content_length.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0), etag.is_some())
    }};
}
pub(crate) use copied_bytes;

pub async fn copy(tier: &Tier, mut request: S3Request<CopyObjectInput>) -> S3Result<S3Response<CopyObjectOutput>> {
    check_source(&request.input.copy_source, &request.extensions)?;
    let object = Object::new(&request.input.bucket, &request.input.key);
    let (bucket, key) = (object.bucket.clone(), object.key.clone());
    let (bytes, is_ours) =
        if tier.quotas.cover(&bucket, &key) { copied_bytes!(tier, request.input) } else { (0, false) };
    let copied = tier.quotas.count(&bucket, &key, bytes, tier.write(&[object], tier.cold.copy_object(request))).await;
    copied.map_err(|error| changed(error, is_ours))
}

/// Return the error for a copy whose source changed after its length was asked for. Its conditions were met before, so the client may try again.
pub fn changed(error: S3Error, is_ours: bool) -> S3Error {
    match is_ours && *error.code() == S3ErrorCode::PreconditionFailed {
        true => s3_error!(ServiceUnavailable, "the source changed during the copy; try again"),
        false => error,
    }
}

/// Return what a HEAD of an object says that will be copied.
pub async fn source(tier: &Tier, source: &CopySource, input: HeadObjectInput) -> S3Result<HeadObjectOutput> {
    let CopySource::Bucket { bucket, key, version_id } = source else { return Ok(HeadObjectOutput::default()) };
    let (bucket, key, version_id) = (bucket.to_string(), key.to_string(), version_id.as_ref().map(ToString::to_string));
    let is_gone = |error: &S3Error| !tier.is_folder && error.status_code() == Some(StatusCode::NOT_FOUND);
    let asked = HeadObjectInput { bucket: bucket.clone(), key: key.clone(), version_id: version_id.clone(), ..input };
    match tier.cold.head_object(cold_request(asked)).await {
        // Responses to HEAD have no body that says what is missing.
        Err(error) if is_gone(&error) => {
            let asked = HeadBucketInput { bucket: bucket.clone(), ..HeadBucketInput::default() };
            Err(match tier.cold.head_bucket(cold_request(asked)).await {
                Err(error) if is_gone(&error) => s3_error!(NoSuchBucket, "the bucket `{bucket}` does not exist"),
                _ if version_id.is_some() => s3_error!(NoSuchVersion, "this version of `{key}` does not exist"),
                _ => s3_error!(NoSuchKey, "the object `{key}` does not exist"),
            })
        }
        found => found.map(|response| response.output),
    }
}

/// Fail unless the request may read the source of a copy.
pub fn check_source(source: &CopySource, extensions: &hyper::http::Extensions) -> S3Result<()> {
    match source {
        CopySource::Bucket { bucket, key, .. } => rights(extensions).check(bucket, key),
        _ => Err(s3_error!(NotImplemented, "name the source of a copy as bucket/key")),
    }
}
