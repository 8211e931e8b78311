//! HeadObject and GetObjectAttributes.

use hyper::header::IF_RANGE;
use s3s::dto::{
    GetObjectAttributesInput, GetObjectAttributesOutput, HeadObjectInput, HeadObjectOutput, ObjectAttributes,
};
use s3s::{S3ErrorCode, S3Request, S3Response, S3Result, s3_error};

use crate::cold::check_is_object;
use crate::meta::Object;
use crate::ops::tier::Tier;
use crate::read::conditions::conditions;
use crate::read::current::with_age;

/// Return the state of an object. A range is answered as in S3, with the length of the range, and with 206 (`middleware`).
pub async fn head(tier: &Tier, mut request: S3Request<HeadObjectInput>) -> S3Result<S3Response<HeadObjectOutput>> {
    let range = request.input.range.take().filter(|_| !request.headers.contains_key(IF_RANGE));
    let mut response = whole(tier, request).await?;
    if let Some(range) = range {
        let bytes = response.output.content_length.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or_default();
        let range = range.check(bytes).ok().filter(|range| !range.is_empty());
        let range = range.ok_or_else(|| s3_error!(InvalidRange, "the object has {bytes} bytes"))?;
        response.output.content_length = i64::try_from(range.end - range.start).ok();
        response.output.content_range = Some(format!("bytes {}-{}/{bytes}", range.start, range.end - 1));
    }
    Ok(response)
}

/// Ask the cold store itself.
async fn passed(tier: &Tier, request: S3Request<HeadObjectInput>) -> S3Result<S3Response<HeadObjectOutput>> {
    let response = tier.cold.head_object(request).await?;
    check_is_object(response.output.e_tag.as_ref(), response.output.content_type.as_ref())?;
    Ok(response)
}

async fn whole(tier: &Tier, request: S3Request<HeadObjectInput>) -> S3Result<S3Response<HeadObjectOutput>> {
    let input = &request.input;
    let asks_more = input.version_id.is_some() || input.part_number.is_some() || input.sse_customer_key.is_some();
    let Some(cached_objects) = tier.cached_objects.as_ref().filter(|_| !asks_more && input.checksum_mode.is_none())
    else {
        return passed(tier, request).await;
    };
    let (meta, age) = match cached_objects.state(&Object::new(&input.bucket, &input.key)).await {
        Err(error) if *error.code() == S3ErrorCode::NotImplemented => return passed(tier, request).await,
        other => other?,
    };
    let conditions = conditions!(input);
    conditions.check_read(&meta.etag, meta.head.last_modified.as_ref())?;
    Ok(with_age(S3Response::new(HeadObjectOutput { accept_ranges: Some("bytes".into()), ..meta.head.clone() }), age))
}

pub async fn attributes(
    tier: &Tier,
    mut request: S3Request<GetObjectAttributesInput>,
) -> S3Result<S3Response<GetObjectAttributesOutput>> {
    // One header may name several attributes.
    let given = std::mem::take(&mut request.input.object_attributes);
    let each = given
        .iter()
        .flat_map(|attribute| attribute.as_str().split(',').map(|name| ObjectAttributes::from(name.trim().to_owned())));
    request.input.object_attributes = each.collect();
    tier.cold.get_object_attributes(request).await
}
