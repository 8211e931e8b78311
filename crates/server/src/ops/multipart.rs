//! Uploads in parts, which the cold store puts together.

use std::collections::HashMap;

use s3s::dto::*;
use s3s::{S3Request, S3Response, S3Result, s3_error};

use super::copy::{changed, check_source, copied_bytes};
use crate::cold::request as cold_request;
use crate::limits::measure;
use crate::meta::Object;
use crate::ops::tier::Tier;
use crate::upload::{Body, Broken, encoding, length, received};

pub async fn create(
    tier: &Tier,
    mut request: S3Request<CreateMultipartUploadInput>,
) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
    request.input.content_encoding = request.input.content_encoding.as_deref().and_then(encoding);
    let (bucket, key) = (request.input.bucket.clone(), request.input.key.clone());
    let created = tier.cold.create_multipart_upload(request).await?;
    if let Some(id) = &created.output.upload_id {
        tier.quotas.begin((&bucket, &key, id));
    }
    Ok(created)
}

pub async fn upload(tier: &Tier, request: S3Request<UploadPartInput>) -> S3Result<S3Response<UploadPartOutput>> {
    let bytes = length(request.input.content_length, &request.headers).unwrap_or(0);
    let (bucket, key) = (request.input.bucket.clone(), request.input.key.clone());
    tier.quotas.count(&bucket, &key, bytes, upload_counted(tier, request)).await
}

async fn upload_counted(tier: &Tier, request: S3Request<UploadPartInput>) -> S3Result<S3Response<UploadPartOutput>> {
    let S3Request { mut input, headers, trailing_headers, .. } = request;
    let body = received!(input, &headers, trailing_headers, &tier.memory);
    let (stream, broken) = match body {
        Body::Whole(bytes) => (StreamingBlob::from(s3s::Body::from(bytes)), Broken::default()),
        Body::Stream(stream, broken) => (stream, broken),
    };
    input.body = Some(stream);
    tier.cold.upload_part(cold_request(input)).await.map_err(|error| broken.or(error))
}

pub async fn copy(
    tier: &Tier,
    mut request: S3Request<UploadPartCopyInput>,
) -> S3Result<S3Response<UploadPartCopyOutput>> {
    check_source(&request.input.copy_source, &request.extensions)?;
    let input = &request.input;
    let (bucket, key) = (input.bucket.clone(), input.key.clone());
    let (bytes, is_ours) = match input.copy_source_range.as_deref().and_then(range_bytes) {
        _ if !tier.quotas.cover(&bucket, &key) => (0, false),
        Some(bytes) => (bytes, false),
        None => copied_bytes!(tier, request.input),
    };
    let copied = tier.quotas.count(&bucket, &key, bytes, tier.cold.upload_part_copy(request)).await;
    copied.map_err(|error| changed(error, is_ours))
}

/// Return the length of a copied range such as `bytes=0-9`.
fn range_bytes(text: &str) -> Option<u64> {
    let (first, last) = text.strip_prefix("bytes=")?.split_once('-')?;
    last.parse::<u64>().ok()?.checked_sub(first.parse().ok()?)?.checked_add(1)
}

pub async fn complete(
    tier: &Tier,
    request: S3Request<CompleteMultipartUploadInput>,
) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
    check_size(tier, &request.input).await?;
    let (bucket, key, id) = (request.input.bucket.clone(), request.input.key.clone(), request.input.upload_id.clone());
    let objects = [Object::new(&bucket, &key)];
    let write = tier.write(&objects, tier.cold.complete_multipart_upload(request));
    tier.quotas.complete((&bucket, &key, &id), write).await
}

/// Fail if the parts that an upload is completed with do not have the bytes that the client expects. Some cold stores do not compare them. A part that is
/// replaced meanwhile has another ETag than the request says, which they do compare.
async fn check_size(tier: &Tier, input: &CompleteMultipartUploadInput) -> S3Result<()> {
    // A folder compares them itself.
    let Some(expected) = input.mpu_object_size.filter(|_| !tier.is_folder) else { return Ok(()) };
    let asked = input.multipart_upload.iter().flat_map(|upload| upload.parts.iter().flatten());
    let asked: HashMap<_, _> = asked.map(|part| (part.part_number, &part.e_tag)).collect();
    let (mut bytes, mut found) = (0_i64, 0);
    let upload = (input.key.clone(), input.upload_id.clone());
    let is_there = measure::parts(&tier.cold, &input.bucket, &upload, |part| {
        if asked.get(&part.part_number).is_some_and(|etag| etag.is_none() || **etag == part.e_tag) {
            (bytes, found) = (bytes.saturating_add(part.size.unwrap_or(0)), found + 1);
        }
    });
    // The cold store says what is missing.
    if is_there.await? && found == asked.len() && bytes != expected {
        return Err(s3_error!(InvalidRequest, "the parts have {bytes} bytes, but x-amz-mp-object-size is {expected}"));
    }
    Ok(())
}

pub async fn abort(
    tier: &Tier,
    request: S3Request<AbortMultipartUploadInput>,
) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
    let (bucket, key, id) = (request.input.bucket.clone(), request.input.key.clone(), request.input.upload_id.clone());
    let aborted = tier.cold.abort_multipart_upload(request).await?;
    tier.quotas.forget((&bucket, &key, &id));
    Ok(aborted)
}
