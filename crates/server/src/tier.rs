//! The operations of the server: reads go through the cache, and writes go to the cold store. Each operation has a function in `ops`.

use std::sync::Arc;

use s3s::dto::*;
use s3s::{S3, S3Request, S3Response, S3Result};

use crate::ops;
use crate::ops::tier::Tier;
use crate::read::conditions::{check_known, check_owner};

/// The number of a request, in its response and in the access log.
#[derive(Debug, Clone)]
pub struct RequestId(pub Arc<str>);

/// A tier, as `s3s` wants it.
pub struct Shared(pub Arc<Tier>);

/// Pass each operation to its function.
macro_rules! operations {
    ($($operation:ident($input:ident) -> $output:ident = $function:path;)*) => {
        #[async_trait::async_trait]
        impl S3 for Shared {
            $(async fn $operation(&self, request: S3Request<$input>) -> S3Result<S3Response<$output>> {
                let id = request.extensions.get::<RequestId>().cloned();
                check_known(stringify!($operation), &request.method, &request.headers, self.0.is_folder)?;
                if self.0.is_folder {
                    check_owner(&request.headers)?;
                }
                $function(&self.0, request).await.map_err(|mut error| {
                    // The cold store's own id would not be found in the log of this server.
                    id.into_iter().for_each(|id| error.set_request_id(&*id.0));
                    error
                })
            })*
        }
    };
}

operations! {
    get_object(GetObjectInput) -> GetObjectOutput = ops::get::get;
    head_object(HeadObjectInput) -> HeadObjectOutput = ops::head::head;
    get_object_attributes(GetObjectAttributesInput) -> GetObjectAttributesOutput = ops::head::attributes;
    put_object(PutObjectInput) -> PutObjectOutput = ops::put::put;
    copy_object(CopyObjectInput) -> CopyObjectOutput = ops::copy::copy;
    delete_object(DeleteObjectInput) -> DeleteObjectOutput = ops::delete::delete;
    delete_objects(DeleteObjectsInput) -> DeleteObjectsOutput = ops::delete::delete_many;
    list_objects(ListObjectsInput) -> ListObjectsOutput = ops::list::list;
    list_objects_v2(ListObjectsV2Input) -> ListObjectsV2Output = ops::list::list_v2;
    list_object_versions(ListObjectVersionsInput) -> ListObjectVersionsOutput = ops::list::list_versions;
    create_multipart_upload(CreateMultipartUploadInput) -> CreateMultipartUploadOutput = ops::multipart::create;
    upload_part(UploadPartInput) -> UploadPartOutput = ops::multipart::upload;
    upload_part_copy(UploadPartCopyInput) -> UploadPartCopyOutput = ops::multipart::copy;
    complete_multipart_upload(CompleteMultipartUploadInput) -> CompleteMultipartUploadOutput = ops::multipart::complete;
    abort_multipart_upload(AbortMultipartUploadInput) -> AbortMultipartUploadOutput = ops::multipart::abort;
    list_parts(ListPartsInput) -> ListPartsOutput = ops::multipart::list_parts;
    list_multipart_uploads(ListMultipartUploadsInput) -> ListMultipartUploadsOutput = ops::multipart::list;
    list_buckets(ListBucketsInput) -> ListBucketsOutput = ops::bucket::list;
    create_bucket(CreateBucketInput) -> CreateBucketOutput = ops::bucket::create;
    delete_bucket(DeleteBucketInput) -> DeleteBucketOutput = ops::bucket::delete;
    head_bucket(HeadBucketInput) -> HeadBucketOutput = ops::bucket::head;
    get_bucket_location(GetBucketLocationInput) -> GetBucketLocationOutput = ops::bucket::location;
    get_bucket_versioning(GetBucketVersioningInput) -> GetBucketVersioningOutput = ops::bucket::versioning;
}
