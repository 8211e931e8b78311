//! Uploads in parts, which the cold store puts together.

use s3s::dto::*;
use s3s::{S3Request, S3Response, S3Result};

use super::copy::check_source;
use crate::cold::request as cold_request;
use crate::meta::Object;
use crate::ops::tier::Tier;
use crate::upload::{Body, Broken, encoding, received};

pub async fn create(tier: &Tier, mut request: S3Request<CreateMultipartUploadInput>) -> S3Result<S3Response<CreateMultipartUploadOutput>> {
    request.input.content_encoding = request.input.content_encoding.as_deref().and_then(encoding);
    tier.cold.create_multipart_upload(request).await
}

pub async fn upload(tier: &Tier, request: S3Request<UploadPartInput>) -> S3Result<S3Response<UploadPartOutput>> {
    let S3Request { mut input, headers, trailing_headers, .. } = request;
    let body = received!(input, &headers, trailing_headers, &tier.memory);
    let (stream, broken) = match body {
        Body::Whole(bytes) => (StreamingBlob::from(s3s::Body::from(bytes)), Broken::default()),
        Body::Stream(stream, broken) => (stream, broken),
    };
    input.body = Some(stream);
    tier.cold.upload_part(cold_request(input)).await.map_err(|error| broken.or(error))
}

pub async fn copy(tier: &Tier, request: S3Request<UploadPartCopyInput>) -> S3Result<S3Response<UploadPartCopyOutput>> {
    check_source(&request.input.copy_source, &request.extensions)?;
    tier.cold.upload_part_copy(request).await
}

pub async fn complete(
    tier: &Tier,
    request: S3Request<CompleteMultipartUploadInput>,
) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
    let object = Object::new(&request.input.bucket, &request.input.key);
    tier.write(&[object], tier.cold.complete_multipart_upload(request)).await
}

pub async fn abort(tier: &Tier, request: S3Request<AbortMultipartUploadInput>) -> S3Result<S3Response<AbortMultipartUploadOutput>> {
    tier.cold.abort_multipart_upload(request).await
}

pub async fn list_parts(tier: &Tier, request: S3Request<ListPartsInput>) -> S3Result<S3Response<ListPartsOutput>> {
    tier.cold.list_parts(request).await
}

pub async fn list(tier: &Tier, request: S3Request<ListMultipartUploadsInput>) -> S3Result<S3Response<ListMultipartUploadsOutput>> {
    tier.cold.list_multipart_uploads(request).await
}
