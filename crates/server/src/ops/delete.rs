//! DeleteObject and DeleteObjects.

use s3s::dto::{
    DeleteObjectInput, DeleteObjectOutput, DeleteObjectsInput, DeleteObjectsOutput, Error, ObjectIdentifier,
};
use s3s::{S3Error, S3ErrorCode, S3Request, S3Response, S3Result, s3_error};

use crate::access_keys::rights;
use crate::cold::may_be_there;
use crate::meta::Object;
use crate::ops::tier::Tier;
use crate::read::conditions::not_checked;

/// The most objects of one request, as in S3.
const MOST_OBJECTS: usize = 1000;

pub async fn delete(tier: &Tier, request: S3Request<DeleteObjectInput>) -> S3Result<S3Response<DeleteObjectOutput>> {
    let object = Object::new(&request.input.bucket, &request.input.key);
    tier.write(&[object], tier.cold.delete_object(request)).await
}

/// Delete many objects. Those that the key has no rights on are listed as errors, and the others are deleted.
pub async fn delete_many(
    tier: &Tier,
    mut request: S3Request<DeleteObjectsInput>,
) -> S3Result<S3Response<DeleteObjectsOutput>> {
    let (rights, bucket) = (rights(&request.extensions), request.input.bucket.clone());
    if request.input.delete.objects.len() > MOST_OBJECTS {
        return Err(s3_error!(MalformedXML, "one request can delete at most {MOST_OBJECTS} objects"));
    }
    if request.input.delete.objects.iter().any(|object| object.key.contains('\0')) {
        return Err(s3_error!(MalformedXML, "names cannot contain the character U+0000"));
    }
    let has_condition = |object: &ObjectIdentifier| {
        object.e_tag.is_some() || object.size.is_some() || object.last_modified_time.is_some()
    };
    if !tier.is_folder && request.input.delete.objects.iter().any(has_condition) {
        return Err(not_checked("ETag, Size or LastModifiedTime of an object"));
    }
    let (allowed, refused): (Vec<_>, Vec<_>) = std::mem::take(&mut request.input.delete.objects)
        .into_iter()
        .partition(|object| rights.allow(&bucket, &object.key));
    let refused = refused.into_iter().map(|object| Error {
        code: Some("AccessDenied".into()),
        message: Some("this key has no permissions for the object".into()),
        key: Some(object.key),
        version_id: object.version_id,
    });
    let mut response = S3Response::new(DeleteObjectsOutput::default());
    if !allowed.is_empty() {
        let objects: Vec<Object> = allowed.iter().map(|object| Object::new(&bucket, &object.key)).collect();
        request.input.delete.objects = allowed;
        response = tier.write_each(&objects, tier.cold.delete_objects(request), is_uncertain).await?;
    }
    response.output.errors.get_or_insert_default().extend(refused);
    Ok(response)
}

/// Return whether the cold store may still delete one of many objects: all failed so, or this one did.
fn is_uncertain(deleted: &S3Result<S3Response<DeleteObjectsOutput>>, object: &Object) -> bool {
    let may_concern = |error: &Error| {
        // One without a key may be of each of them, and one without a code may mean anything.
        let code = error.code.as_deref().and_then(|code| S3ErrorCode::from_bytes(code.as_bytes()));
        error.key.as_ref().is_none_or(|key| *key == object.key)
            && code.is_none_or(|code| may_be_there(&S3Error::new(code)))
    };
    match deleted {
        Ok(response) => response.output.errors.iter().flatten().any(may_concern),
        Err(error) => may_be_there(error),
    }
}
