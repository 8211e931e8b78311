//! GetObject: the version that is current, and its bytes from the cache.

use hyper::header::IF_RANGE;
use s3s::dto::{GetObjectInput, GetObjectOutput};
use s3s::{S3ErrorCode, S3Request, S3Response, S3Result, s3_error};

use crate::cold::check_is_object;
use crate::meta::Object;
use crate::ops::tier::Tier;
use crate::read::cached_objects::is_gone;
use crate::read::conditions::conditions;
use crate::read::current::with_age;
use crate::read::reader::body;

/// How often an object that changes while it is read is looked up again, before a byte was sent.
const LOOK_UPS: usize = 3;

/// Read from the cold store itself.
async fn passed(tier: &Tier, request: S3Request<GetObjectInput>) -> S3Result<S3Response<GetObjectOutput>> {
    let response = tier.cold.get_object(request).await?;
    check_is_object(response.output.e_tag.as_ref(), response.output.content_type.as_ref())?;
    Ok(response)
}

pub async fn get(tier: &Tier, mut request: S3Request<GetObjectInput>) -> S3Result<S3Response<GetObjectOutput>> {
    if request.headers.contains_key(IF_RANGE) {
        // A client that continues a download gets the whole object, as HTTP allows.
        request.input.range = None;
    }
    let input = &request.input;
    let is_plain = input.version_id.is_none() && input.part_number.is_none() && input.sse_customer_key.is_none();
    let Some(cached_objects) = tier.cached_objects.as_ref().filter(|_| is_plain) else {
        return passed(tier, request).await;
    };
    let object = Object::new(&input.bucket, &input.key);
    let conditions = conditions!(input);
    let mut look_ups = 0;
    let (meta, age, range, sent) = loop {
        look_ups += 1;
        let resolved = match cached_objects.resolve(&object, input.range).await {
            // Objects without a strong ETag pass by the cache.
            Err(error) if *error.code() == S3ErrorCode::NotImplemented => return passed(tier, request).await,
            other => other?,
        };
        let (meta, age) = (resolved.meta.clone(), resolved.age);
        conditions.check_read(&meta.etag, meta.head.last_modified.as_ref())?;
        let range = match &input.range {
            None => 0..meta.bytes,
            Some(range) => {
                range.check(meta.bytes).map_err(|_| s3_error!(InvalidRange, "the object has {} bytes", meta.bytes))?
            }
        };
        if range.is_empty() && input.range.is_some() {
            return Err(s3_error!(InvalidRange, "the object is empty"));
        }
        match body(cached_objects, &object, resolved, range.clone()).await {
            Ok(sent) => break (meta, age, range, sent),
            // It was forgotten, so it is asked for again.
            Err(error) if is_gone(&error) && look_ups < LOOK_UPS => {}
            Err(error) if is_gone(&error) => {
                return Err(s3_error!(ServiceUnavailable, "the object changed while it was being read; try again"));
            }
            Err(error) => return Err(error),
        }
    };
    let wants_sums = input.checksum_mode.is_some() && input.range.is_none();
    let meta = if wants_sums { cached_objects.with_sums(&object, meta).await? } else { meta };
    let mut output = meta.to_get();
    output.content_length = i64::try_from(range.end - range.start).ok();
    if input.range.is_some() {
        output.content_range = Some(format!("bytes {}-{}/{}", range.start, range.end - 1, meta.bytes));
    }
    if !wants_sums {
        // They are those of the whole object.
        (output.checksum_crc32, output.checksum_crc32c, output.checksum_crc64nvme) = (None, None, None);
        (output.checksum_sha1, output.checksum_sha256, output.checksum_type) = (None, None, None);
    }
    output.accept_ranges = Some("bytes".into());
    output.body = Some(sent);
    Ok(with_age(S3Response::new(output), age))
}
