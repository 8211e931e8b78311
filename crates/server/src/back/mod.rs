//! Write-back: a store before the cold store. Plain puts are acknowledged when they are durable in a folder, and sent to the cold store later.
//!
//! Reads of an object that is not sent yet come from the folder. Every other operation first waits until what it touches is in the cold store, so
//! that it sees the same as without this (docs/design/0021-server.md, point 10).

mod pending;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hyper::StatusCode;
use penstock_error::Result;
use s3s::dto::*;
use s3s::{S3, S3ErrorCode, S3Request, S3Response, S3Result, s3_error};

use crate::cold::request;
use crate::folder::Folder;
use crate::meta::{Object, copied};
use crate::metrics::Metrics;
use pending::Pending;

/// Objects that are sent at the same time.
const SENDERS: usize = 4;
/// Pauses after an object could not be sent: the first one, and the longest.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(30));
/// How long a bucket is known to exist.
const BUCKET_KNOWN: Duration = Duration::from_secs(60);

/// A cold store with a folder before it.
pub struct WriteBack {
    cold: Arc<dyn S3>,
    folder: Folder,
    pending: Pending,
    /// When each bucket was last seen in the cold store.
    buckets: Mutex<HashMap<String, Instant>>,
    metrics: Arc<Metrics>,
}

/// What an operation touches.
enum Touches {
    Nothing,
    Objects(Vec<Object>),
    /// All objects of a bucket whose keys begin with a prefix.
    Prefix(String, String),
}

macro_rules! object {
    ($input:ident) => {
        Touches::Objects(vec![Object::new(&$input.bucket, &$input.key)])
    };
}

/// Return what a write touches. What a condition protects may refer to any object that was acknowledged before.
macro_rules! conditional {
    ($input:ident) => {
        match &$input.if_match.as_ref().or($input.if_none_match.as_ref()) {
            Some(_) => Touches::Prefix($input.bucket.clone(), String::new()),
            None => object!($input),
        }
    };
}

impl WriteBack {
    /// Open a folder with what an earlier server has not sent, and begin to send it.
    pub async fn open(cold: Arc<dyn S3>, folder: &Path, most_bytes: u64, metrics: Arc<Metrics>) -> Result<Arc<WriteBack>> {
        let failed = |error: &dyn std::fmt::Display| {
            let text = format!("cannot read the objects in `{}` that are not sent yet: {error}", folder.display());
            penstock_error::Error::new("storage-failed", text)
        };
        std::fs::create_dir_all(folder).map_err(|error| failed(&error))?;
        let opened = Folder::open(folder)?;
        let held = held(&opened).await.map_err(|error| failed(&error))?;
        let pending = Pending::new(held, most_bytes);
        let back = Arc::new(WriteBack { cold, folder: opened, pending, buckets: Mutex::default(), metrics });
        back.count();
        for _ in 0..SENDERS {
            tokio::spawn(back.clone().send_each());
        }
        Ok(back)
    }

    /// Return how many objects are not in the cold store yet.
    pub fn pending_objects(&self) -> u64 {
        self.pending.counts().objects
    }

    /// Wait until all objects are in the cold store.
    pub async fn settle_all(&self) {
        self.pending.settle_all().await;
    }

    fn count(&self) {
        let counts = self.pending.counts();
        self.metrics.pending_objects.set(counts.objects as i64);
        self.metrics.pending_bytes.set(counts.bytes as i64);
    }

    /// Send objects to the cold store, one after the other, and remove them from the folder.
    async fn send_each(self: Arc<WriteBack>) {
        let mut pause = PAUSES.0;
        loop {
            let (object, version) = self.pending.next().await;
            let done = match self.send(&object).await {
                Err(error) => {
                    self.pending.failed(&object, &error);
                    false
                }
                Ok(()) => {
                    self.metrics.sent_back.inc();
                    !self.pending.sent(&object, version) || self.remove(&object).await
                }
            };
            self.count();
            if done {
                pause = PAUSES.0;
                continue;
            }
            self.metrics.send_failures.inc();
            let (back, wait) = (self.clone(), pause);
            tokio::spawn(async move {
                tokio::time::sleep(wait).await;
                back.pending.again(&object);
            });
            pause = (2 * pause).min(PAUSES.1);
        }
    }

    async fn send(&self, object: &Object) -> S3Result<()> {
        let input = GetObjectInput {
            bucket: object.bucket.clone(),
            key: object.key.clone(),
            checksum_mode: Some(ChecksumMode::from_static(ChecksumMode::ENABLED)),
            ..GetObjectInput::default()
        };
        let output = match S3::get_object(&self.folder, request(input)).await {
            // Somebody has removed the file.
            Err(error) if *error.code() == S3ErrorCode::NoSuchKey => return Ok(()),
            other => other?.output,
        };
        let same = copied!(output => PutObjectInput; cache_control checksum_crc32 checksum_crc32c checksum_crc64nvme checksum_sha1 checksum_sha256
            content_disposition content_encoding content_language content_length content_type expires metadata website_redirect_location);
        let input = PutObjectInput { bucket: object.bucket.clone(), key: object.key.clone(), body: output.body, ..same };
        self.cold.put_object(request(input)).await.map(drop)
    }

    /// Remove an object that was sent from the folder. Returns whether it is gone.
    async fn remove(&self, object: &Object) -> bool {
        let input = DeleteObjectInput { bucket: object.bucket.clone(), key: object.key.clone(), ..DeleteObjectInput::default() };
        let is_gone = S3::delete_object(&self.folder, request(input)).await.is_ok();
        self.pending.removed(object, is_gone);
        is_gone
    }

    /// Wait until what an operation touches is in the cold store.
    async fn settle(&self, touches: Touches) -> S3Result<()> {
        let objects = match touches {
            Touches::Nothing => return Ok(()),
            Touches::Objects(objects) => objects,
            Touches::Prefix(bucket, prefix) => self.pending.of(&bucket, &prefix),
        };
        for object in &objects {
            self.pending.settle(object).await?;
        }
        Ok(())
    }

    /// Return whether a bucket exists, or did when the cold store could be asked last. Makes its folder.
    async fn has_bucket(&self, bucket: &str) -> S3Result<()> {
        let is_known = |seen: &Instant| seen.elapsed() < BUCKET_KNOWN;
        if self.buckets.lock().unwrap_or_else(PoisonError::into_inner).get(bucket).is_some_and(is_known) {
            return Ok(());
        }
        let input = HeadBucketInput { bucket: bucket.to_owned(), ..HeadBucketInput::default() };
        let made = S3::head_bucket(&self.folder, request(input.clone())).await.is_ok();
        match self.cold.head_bucket(request(input)).await {
            Err(error) if made && *error.code() == S3ErrorCode::ServiceUnavailable => return Ok(()),
            // A response to HEAD has no body that names the code.
            Err(error) if error.status_code() == Some(StatusCode::NOT_FOUND) => {
                return Err(s3_error!(NoSuchBucket, "the bucket `{bucket}` does not exist"));
            }
            other => drop(other?),
        }
        if !made {
            let input = CreateBucketInput { bucket: bucket.to_owned(), ..CreateBucketInput::default() };
            match S3::create_bucket(&self.folder, request(input)).await {
                Err(error) if *error.code() == S3ErrorCode::BucketAlreadyOwnedByYou => {}
                other => drop(other?),
            }
        }
        self.buckets.lock().unwrap_or_else(PoisonError::into_inner).insert(bucket.to_owned(), Instant::now());
        Ok(())
    }

    async fn put(&self, input: PutObjectInput) -> S3Result<PutObjectOutput> {
        let object = Object::new(&input.bucket, &input.key);
        let bytes = input.content_length.and_then(|bytes| u64::try_from(bytes).ok());
        if let Some(bytes) = bytes.filter(|_| is_plain(&input)) {
            self.has_bucket(&object.bucket).await?;
            if let Some(writing) = self.pending.begin(object.clone(), bytes).await {
                let output = S3::put_object(&self.folder, request(input)).await?.output;
                writing.done();
                self.count();
                return Ok(output);
            }
        }
        self.settle(conditional!(input)).await?;
        self.cold.put_object(request(input)).await.map(|response| response.output)
    }
}

/// Return whether a put has no conditions, and nothing that a folder could not keep.
fn is_plain(input: &PutObjectInput) -> bool {
    macro_rules! absent {
        ($($field:ident)*) => { $(input.$field.is_none())&&* };
    }
    absent!(acl bucket_key_enabled expected_bucket_owner grant_full_control grant_read grant_read_acp grant_write_acp if_match if_none_match
        object_lock_legal_hold_status object_lock_mode object_lock_retain_until_date request_payer sse_customer_algorithm sse_customer_key
        sse_customer_key_md5 ssekms_encryption_context ssekms_key_id server_side_encryption storage_class tagging write_offset_bytes)
}

/// List what a folder has.
async fn held(folder: &Folder) -> S3Result<Vec<(Object, u64)>> {
    let buckets = S3::list_buckets(folder, request(ListBucketsInput::default())).await?.output.buckets.unwrap_or_default();
    let mut held = Vec::new();
    for bucket in buckets.into_iter().filter_map(|bucket| bucket.name) {
        let mut after = None;
        loop {
            let input = ListObjectsV2Input { bucket: bucket.clone(), continuation_token: after, ..ListObjectsV2Input::default() };
            let page = S3::list_objects_v2(folder, request(input)).await?.output;
            let objects = page.contents.unwrap_or_default().into_iter();
            held.extend(objects.filter_map(|found| Some((Object::new(&bucket, &found.key?), u64::try_from(found.size?).ok()?))));
            after = page.next_continuation_token;
            if after.is_none() {
                break;
            }
        }
    }
    Ok(held)
}

fn source_of(source: &CopySource) -> Option<Object> {
    match source {
        CopySource::Bucket { bucket, key, .. } => Some(Object::new(bucket, key)),
        _ => None,
    }
}

/// Implement reads, which look into the folder first, and operations that wait for what they touch.
macro_rules! operations {
    (
        reads { $($read:ident($read_input:ident) -> $read_output:ident;)* }
        others { $($operation:ident($input:ident) -> $output:ident = $touches:expr;)* }
    ) => {
        #[async_trait::async_trait]
        impl S3 for WriteBack {
            $(async fn $read(&self, given: S3Request<$read_input>) -> S3Result<S3Response<$read_output>> {
                if self.pending.holds(&Object::new(&given.input.bucket, &given.input.key)) {
                    match S3::$read(&self.folder, request(given.input.clone())).await {
                        // It was sent in the meantime.
                        Err(error) if *error.code() == S3ErrorCode::NoSuchKey => {}
                        other => return other,
                    }
                }
                self.cold.$read(given).await
            })*

            $(async fn $operation(&self, given: S3Request<$input>) -> S3Result<S3Response<$output>> {
                let touches: fn(&$input) -> Touches = $touches;
                self.settle(touches(&given.input)).await?;
                self.cold.$operation(given).await
            })*

            async fn delete_bucket(&self, given: S3Request<DeleteBucketInput>) -> S3Result<S3Response<DeleteBucketOutput>> {
                let bucket = given.input.bucket.clone();
                self.settle(Touches::Prefix(bucket.clone(), String::new())).await?;
                // From now on, it is not known to exist.
                self.buckets.lock().unwrap_or_else(PoisonError::into_inner).remove(&bucket);
                self.cold.delete_bucket(given).await
            }

            async fn put_object(&self, given: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
                self.put(given.input).await.map(S3Response::new)
            }
        }
    };
}

macro_rules! prefix {
    ($input:ident) => {
        Touches::Prefix($input.bucket.clone(), $input.prefix.clone().unwrap_or_default())
    };
}

operations! {
    reads {
        get_object(GetObjectInput) -> GetObjectOutput;
        head_object(HeadObjectInput) -> HeadObjectOutput;
        get_object_attributes(GetObjectAttributesInput) -> GetObjectAttributesOutput;
    }
    others {
        delete_object(DeleteObjectInput) -> DeleteObjectOutput = |input| object!(input);
        delete_objects(DeleteObjectsInput) -> DeleteObjectsOutput = |input| {
            Touches::Objects(input.delete.objects.iter().map(|object| Object::new(&input.bucket, &object.key)).collect())
        };
        copy_object(CopyObjectInput) -> CopyObjectOutput = |input| {
            let target = Object::new(&input.bucket, &input.key);
            Touches::Objects(source_of(&input.copy_source).into_iter().chain([target]).collect())
        };
        upload_part_copy(UploadPartCopyInput) -> UploadPartCopyOutput = |input| {
            Touches::Objects(source_of(&input.copy_source).into_iter().collect())
        };
        complete_multipart_upload(CompleteMultipartUploadInput) -> CompleteMultipartUploadOutput = |input| conditional!(input);
        list_objects(ListObjectsInput) -> ListObjectsOutput = |input| prefix!(input);
        list_objects_v2(ListObjectsV2Input) -> ListObjectsV2Output = |input| prefix!(input);
        list_object_versions(ListObjectVersionsInput) -> ListObjectVersionsOutput = |input| prefix!(input);
        create_multipart_upload(CreateMultipartUploadInput) -> CreateMultipartUploadOutput = |_| Touches::Nothing;
        upload_part(UploadPartInput) -> UploadPartOutput = |_| Touches::Nothing;
        abort_multipart_upload(AbortMultipartUploadInput) -> AbortMultipartUploadOutput = |_| Touches::Nothing;
        list_parts(ListPartsInput) -> ListPartsOutput = |_| Touches::Nothing;
        list_multipart_uploads(ListMultipartUploadsInput) -> ListMultipartUploadsOutput = |_| Touches::Nothing;
        list_buckets(ListBucketsInput) -> ListBucketsOutput = |_| Touches::Nothing;
        create_bucket(CreateBucketInput) -> CreateBucketOutput = |_| Touches::Nothing;
        head_bucket(HeadBucketInput) -> HeadBucketOutput = |_| Touches::Nothing;
        get_bucket_location(GetBucketLocationInput) -> GetBucketLocationOutput = |_| Touches::Nothing;
        get_bucket_versioning(GetBucketVersioningInput) -> GetBucketVersioningOutput = |_| Touches::Nothing;
    }
}
