//! PutObject: the body is compared with its checksums, and durable in the cold store before the response.

use std::time::Duration;

use bytes::Bytes;
use s3s::dto::{PutObjectInput, PutObjectOutput, StreamingBlob};
use s3s::{S3ErrorCode, S3Request, S3Response, S3Result};

use crate::cold::request as cold_request;
use crate::meta::{Object, copied};
use crate::ops::tier::Tier;
use crate::upload::{Body, encoding, length, received};

/// Waits before a put is sent again, after the cold store failed.
const WAITS_MS: [u64; 3] = [100, 400, 1600];

pub async fn put(tier: &Tier, request: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
    let bytes = length(request.input.content_length, &request.headers).unwrap_or(0);
    let (bucket, key) = (request.input.bucket.clone(), request.input.key.clone());
    tier.quotas.count(&bucket, &key, bytes, put_counted(tier, request)).await
}

async fn put_counted(tier: &Tier, request: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
    let S3Request { mut input, headers, trailing_headers, .. } = request;
    let body = received!(input, &headers, trailing_headers, &tier.memory);
    input.content_encoding = input.content_encoding.as_deref().and_then(encoding);
    let object = Object::new(&input.bucket, &input.key);
    let write = async {
        let bytes = match body {
            Body::Stream(stream, broken) => {
                input.body = Some(stream);
                return tier.cold.put_object(cold_request(input)).await.map_err(|error| broken.or(error));
            }
            Body::Whole(bytes) => bytes,
        };
        // A put with a condition may have succeeded although its response was lost. Only the client can find out.
        let is_repeatable = input.if_none_match.is_none() && input.if_match.is_none();
        for wait in WAITS_MS {
            match tier.cold.put_object(cold_request(again(&input, &bytes))).await {
                Err(error)
                    if is_repeatable
                        && matches!(error.code(), S3ErrorCode::ServiceUnavailable | S3ErrorCode::SlowDown) =>
                {
                    tokio::time::sleep(Duration::from_millis(wait)).await;
                }
                other => return other,
            }
        }
        tier.cold.put_object(cold_request(again(&input, &bytes))).await
    };
    tier.write(&[object], write).await
}

/// Return the same put again.
fn again(input: &PutObjectInput, bytes: &Bytes) -> PutObjectInput {
    let body = Some(StreamingBlob::from(s3s::Body::from(bytes.clone())));
    let same = copied!(input => PutObjectInput; acl bucket bucket_key_enabled cache_control checksum_algorithm checksum_crc32 checksum_crc32c
        checksum_crc64nvme checksum_sha1 checksum_sha256 content_disposition content_encoding content_language content_length content_md5
        content_type expected_bucket_owner expires grant_full_control grant_read grant_read_acp grant_write_acp if_match if_none_match key
        metadata object_lock_legal_hold_status object_lock_mode object_lock_retain_until_date request_payer sse_customer_algorithm
        sse_customer_key sse_customer_key_md5 ssekms_encryption_context ssekms_key_id server_side_encryption storage_class tagging
        website_redirect_location write_offset_bytes);
    PutObjectInput { body, ..same }
}
