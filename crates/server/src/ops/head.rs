//! HeadObject and GetObjectAttributes.

use s3s::dto::{GetObjectAttributesInput, GetObjectAttributesOutput, HeadObjectInput, HeadObjectOutput, ObjectAttributes};
use s3s::{S3ErrorCode, S3Request, S3Response, S3Result};

use crate::meta::Object;
use crate::ops::tier::Tier;
use crate::read::conditions::conditions;

pub async fn head(tier: &Tier, mut request: S3Request<HeadObjectInput>) -> S3Result<S3Response<HeadObjectOutput>> {
    // HTTP has no ranges of HEAD: the length is always that of the object.
    request.input.range = None;
    let input = &request.input;
    let asks_more = input.version_id.is_some() || input.part_number.is_some() || input.sse_customer_key.is_some();
    let Some(blocks) = tier.blocks.as_ref().filter(|_| !asks_more && input.checksum_mode.is_none()) else {
        return tier.cold.head_object(request).await;
    };
    let meta = match blocks.state(&Object::new(&input.bucket, &input.key)).await {
        Err(error) if *error.code() == S3ErrorCode::NotImplemented => return tier.cold.head_object(request).await,
        other => other?,
    };
    let conditions = conditions!(input);
    conditions.check_read(&meta.etag, meta.head.last_modified.as_ref())?;
    Ok(S3Response::new(HeadObjectOutput { accept_ranges: Some("bytes".into()), ..meta.head.clone() }))
}

pub async fn attributes(tier: &Tier, mut request: S3Request<GetObjectAttributesInput>) -> S3Result<S3Response<GetObjectAttributesOutput>> {
    // One header may name several attributes.
    let given = std::mem::take(&mut request.input.object_attributes);
    let each = given.iter().flat_map(|attribute| attribute.as_str().split(',').map(|name| ObjectAttributes::from(name.trim().to_owned())));
    request.input.object_attributes = each.collect();
    tier.cold.get_object_attributes(request).await
}
