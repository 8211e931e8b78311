//! The table of all operations: what each takes and returns, what it needs of an access key, and the function that carries it out. Operations that are not
//! in it are refused by `s3s`.

/// What an operation does with the objects that the rights of a key are about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    Read,
    /// Reads the names that begin with a prefix.
    List,
    Write,
    /// Writes objects that the body names. The operation itself checks the rights on each of them.
    WriteEach,
}

/// Pass the table to a macro. Operations without a function go to the cold store as they are. The groups are those of write-back (`back`): reads, which may
/// be answered before the cold store has the object; listings, which wait for a prefix; writes, each of which waits in its own way; and others, which never wait.
macro_rules! each_operation {
    ($then:ident) => {
        $then! {
            account {
                list_buckets(ListBucketsInput) -> ListBucketsOutput [Read, ops::bucket::list];
            }
            reads {
                get_object(GetObjectInput) -> GetObjectOutput [Read, ops::get::get];
                head_object(HeadObjectInput) -> HeadObjectOutput [Read, ops::head::head];
                get_object_attributes(GetObjectAttributesInput) -> GetObjectAttributesOutput [Read, ops::head::attributes];
            }
            listings {
                list_objects(ListObjectsInput) -> ListObjectsOutput [List, ops::list::list];
                list_objects_v2(ListObjectsV2Input) -> ListObjectsV2Output [List, ops::list::list_v2];
                list_object_versions(ListObjectVersionsInput) -> ListObjectVersionsOutput [List, ops::list::list_versions];
            }
            writes {
                put_object(PutObjectInput) -> PutObjectOutput [Write, ops::put::put];
                copy_object(CopyObjectInput) -> CopyObjectOutput [Write, ops::copy::copy];
                delete_object(DeleteObjectInput) -> DeleteObjectOutput [Write, ops::delete::delete];
                delete_objects(DeleteObjectsInput) -> DeleteObjectsOutput [WriteEach, ops::delete::delete_many];
                upload_part_copy(UploadPartCopyInput) -> UploadPartCopyOutput [Write, ops::multipart::copy];
                complete_multipart_upload(CompleteMultipartUploadInput) -> CompleteMultipartUploadOutput [Write, ops::multipart::complete];
                delete_bucket(DeleteBucketInput) -> DeleteBucketOutput [Write];
            }
            others {
                create_multipart_upload(CreateMultipartUploadInput) -> CreateMultipartUploadOutput [Write, ops::multipart::create];
                upload_part(UploadPartInput) -> UploadPartOutput [Write, ops::multipart::upload];
                abort_multipart_upload(AbortMultipartUploadInput) -> AbortMultipartUploadOutput [Write, ops::multipart::abort];
                list_parts(ListPartsInput) -> ListPartsOutput [Read];
                list_multipart_uploads(ListMultipartUploadsInput) -> ListMultipartUploadsOutput [List];
                create_bucket(CreateBucketInput) -> CreateBucketOutput [Write];
                head_bucket(HeadBucketInput) -> HeadBucketOutput [Read];
                get_bucket_location(GetBucketLocationInput) -> GetBucketLocationOutput [Read];
                get_bucket_versioning(GetBucketVersioningInput) -> GetBucketVersioningOutput [Read];
            }
        }
    };
}
pub(crate) use each_operation;

macro_rules! accesses {
    ($($group:ident { $($operation:ident($input:ident) -> $output:ident [$access:ident $(, $function:path)?];)* })*) => {
        /// Each operation, by the name of its input.
        const ACCESSES: &[(&str, Access)] = &[$($((stringify!($input), Access::$access),)*)*];
    };
}

each_operation!(accesses);

/// Return what an operation such as `GetObject` does. One that is not known counts as a write.
pub fn access_of(operation: &str) -> Access {
    ACCESSES
        .iter()
        .find(|(input, _)| input.strip_suffix("Input") == Some(operation))
        .map_or(Access::Write, |(_, access)| *access)
}
