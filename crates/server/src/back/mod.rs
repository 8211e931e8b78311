//! Write-back: a store before the cold store. Plain puts are acknowledged when they are durable in a folder, and sent to the cold store later.
//!
//! Reads of an object that is not sent yet come from the folder. Every other operation first waits until what it touches is in the cold store, so
//! that it sees the same as without this (docs/design/0021-server.md, point 10).

mod pending;
mod send;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hyper::StatusCode;
use penstock_error::Result;
use s3s::dto::*;
use s3s::{S3, S3Error, S3ErrorCode, S3Request, S3Response, S3Result, s3_error};

use crate::cold::request as new_request;
use crate::folder::Folder;
use crate::folder::record::NO_SPACE;
use crate::meta::Object;
use crate::metrics::Metrics;
use crate::operations::each_operation;
use pending::{Need, Pending, Writing, held, md5_of};

/// Objects that are sent at the same time.
const SENDERS: usize = 4;
/// How long a bucket is known to exist.
const BUCKET_KNOWN: Duration = Duration::from_secs(60);
/// How long puts do not use a folder that failed.
const FOLDER_PAUSE: Duration = Duration::from_secs(30);
/// Limits of what any cold store takes.
const MOST_METADATA_BYTES: usize = 2048;
const MOST_PART_BYTES: usize = 255;
/// The file that has the identity of the cold store.
const OF: &str = "write-back-of";
/// An identity is shorter than this.
const MOST_OF_BYTES: usize = 64 << 10;

/// A cold store with a folder before it.
pub struct WriteBack {
    cold: Arc<dyn S3>,
    folder: Folder,
    pending: Pending,
    /// When each bucket was last seen in the cold store.
    buckets: Mutex<HashMap<String, Instant>>,
    /// When the folder failed last.
    failed: Mutex<Option<Instant>>,
    metrics: Arc<Metrics>,
    note: fn(&str),
}

/// An object that is not sent while it is deleted. If the delete does not end well, it is sent again.
struct Taken<'a> {
    back: &'a WriteBack,
    object: Option<Object>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if let Some(object) = &self.object {
            self.back.pending.failed(object, &s3_error!(ServiceUnavailable, "a delete did not finish"));
            self.back.pending.again(object);
        }
    }
}

impl WriteBack {
    /// Open a folder with what an earlier server has not sent, and begin to send it. `cold` is the cold store and its identity.
    pub async fn open(
        cold: (Arc<dyn S3>, &str),
        folder: &Path,
        most_bytes: u64,
        metrics: Arc<Metrics>,
        note: fn(&str),
    ) -> Result<Arc<WriteBack>> {
        let failed = |error: &dyn std::fmt::Display| {
            let text = format!("cannot read the unsent objects in `{}`: {error}", folder.display());
            penstock_error::Error::new("storage-failed", text)
        };
        penstock_storage::private::close_folder(folder).map_err(|error| failed(&error))?;
        let opened = Folder::open(folder, &metrics, note)?;
        let of = opened.own(OF);
        match penstock_storage::private::read_own(&of, MOST_OF_BYTES) {
            Ok(other) if other != cold.1.as_bytes() => {
                let other = String::from_utf8_lossy(&other);
                let text = format!("`{}` has objects for another cold store, {other}", folder.display());
                return Err(
                    penstock_error::Error::new("invalid-argument", text).hint("choose another folder for --write-back")
                );
            }
            Ok(_) => {}
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                std::fs::write(&of, cold.1).map_err(|error| failed(&error))?
            }
            Err(error) => return Err(failed(&format!("`{}`: {error}", of.display()))),
        }
        let held = held(&opened).await.map_err(|error| failed(&error))?;
        let pending = Pending::new(held, most_bytes);
        let (buckets, failed) = Default::default();
        let back = Arc::new(WriteBack { cold: cold.0, folder: opened, pending, buckets, failed, metrics, note });
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

    /// Return how many bytes of objects below a prefix are not in the cold store yet.
    pub fn pending_bytes_of(&self, bucket: &str, prefix: &str) -> u64 {
        self.pending.bytes_of(bucket, prefix)
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

    /// Delete objects in the cold store, and what the folder has of them. `kept` returns the keys that a delete did not delete.
    async fn delete<T>(
        &self,
        mut objects: Vec<Object>,
        delete: impl Future<Output = S3Result<T>>,
        kept: fn(&T) -> Vec<&str>,
    ) -> S3Result<T> {
        // Two deletes must not wait for each other.
        objects.sort_unstable_by(|one, other| one.key.cmp(&other.key));
        objects.dedup();
        let mut taken = Vec::new();
        for object in objects {
            if self.pending.take(&object).await {
                taken.push(Taken { back: self, object: Some(object) });
            }
        }
        let deleted = delete.await;
        let kept = match &deleted {
            Ok(deleted) => kept(deleted),
            // Nothing can be sent there.
            Err(error) if *error.code() == S3ErrorCode::NoSuchBucket => Vec::new(),
            Err(_) => return deleted,
        };
        let is_kept =
            |taken: &Taken<'_>| taken.object.as_ref().is_some_and(|object| kept.contains(&object.key.as_str()));
        for mut taken in taken.into_iter().filter(|taken| !is_kept(taken)) {
            if let Some(object) = taken.object.clone() {
                self.remove(&object).await?;
                taken.object = None;
            }
        }
        self.count();
        deleted
    }

    /// Wait until these objects are in the cold store.
    async fn settle(&self, objects: impl IntoIterator<Item = Object>, need: Need) -> S3Result<()> {
        for object in objects {
            self.pending.settle(&object, need).await?;
        }
        Ok(())
    }

    /// Wait until all objects of a bucket whose keys begin with a prefix are in the cold store.
    async fn settle_prefix(&self, bucket: &str, prefix: &str) -> S3Result<()> {
        self.settle(self.pending.of(bucket, prefix), Need::Sent).await
    }

    /// Wait until an object that will be written is in the cold store. A condition of the write may protect any other object of the bucket.
    async fn settle_write(&self, object: Object, has_condition: bool) -> S3Result<()> {
        let bucket = object.bucket.clone();
        self.settle([object], Need::Gone).await?;
        if has_condition { self.settle_prefix(&bucket, "").await } else { Ok(()) }
    }

    /// Return whether a bucket exists, or did when the cold store could be asked last. Makes its folder.
    async fn has_bucket(&self, bucket: &str) -> S3Result<()> {
        let is_known = |seen: &Instant| seen.elapsed() < BUCKET_KNOWN;
        if self.buckets.lock().unwrap_or_else(PoisonError::into_inner).get(bucket).is_some_and(is_known) {
            return Ok(());
        }
        let input = HeadBucketInput { bucket: bucket.to_owned(), ..HeadBucketInput::default() };
        let made = S3::head_bucket(&self.folder, new_request(input.clone())).await.is_ok();
        match self.cold.head_bucket(new_request(input)).await {
            Err(error) if made && *error.code() == S3ErrorCode::ServiceUnavailable => return Ok(()),
            // A response to HEAD has no body that names the code.
            Err(error) if error.status_code() == Some(StatusCode::NOT_FOUND) => {
                return Err(s3_error!(NoSuchBucket, "the bucket `{bucket}` does not exist"));
            }
            other => drop(other?),
        }
        if !made {
            let input = CreateBucketInput { bucket: bucket.to_owned(), ..CreateBucketInput::default() };
            match S3::create_bucket(&self.folder, new_request(input)).await {
                Err(error) if *error.code() == S3ErrorCode::BucketAlreadyOwnedByYou => {}
                other => drop(other?),
            }
        }
        self.buckets.lock().unwrap_or_else(PoisonError::into_inner).insert(bucket.to_owned(), Instant::now());
        Ok(())
    }

    fn folder_works(&self) -> bool {
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).is_none_or(|at| at.elapsed() > FOLDER_PAUSE)
    }

    /// A put that failed may have been written, and would be sent after a restart. So it is sent now, before later ones.
    async fn may_be_written(&self, writing: Writing<'_>, (object, bytes): (&Object, u64), error: &S3Error) {
        if matches!(error.code(), S3ErrorCode::ServiceUnavailable | S3ErrorCode::AccessDenied) || is_full(error) {
            *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        }
        let input =
            HeadObjectInput { bucket: object.bucket.clone(), key: object.key.clone(), ..HeadObjectInput::default() };
        match S3::head_object(&self.folder, new_request(input)).await {
            Ok(found) => {
                writing.done(found.output.content_length.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(0))
            }
            Err(error) if matches!(error.code(), S3ErrorCode::NoSuchKey | S3ErrorCode::NoSuchBucket) => {}
            // It may be there, although the folder cannot say so now. A start would find it, and send it over later versions.
            Err(_) => writing.done(bytes),
        }
    }

    async fn put(&self, input: PutObjectInput) -> S3Result<PutObjectOutput> {
        let object = Object::new(&input.bucket, &input.key);
        let bytes = input.content_length.and_then(|bytes| u64::try_from(bytes).ok());
        if let Some(bytes) = bytes.filter(|_| is_plain(&input) && self.folder_works()) {
            self.has_bucket(&object.bucket).await?;
            if let Some(writing) = self.pending.begin(object.clone(), bytes).await {
                let written = S3::put_object(&self.folder, new_request(input)).await;
                match &written {
                    Ok(_) => writing.done(bytes),
                    Err(error) => {
                        if *error.code() == S3ErrorCode::NoSuchBucket {
                            // Somebody removed its folder. The next put makes it again.
                            self.buckets.lock().unwrap_or_else(PoisonError::into_inner).remove(&object.bucket);
                        }
                        self.may_be_written(writing, (&object, bytes), error).await;
                    }
                }
                self.count();
                return written.map(|response| response.output).map_err(of_the_folder);
            }
        }
        self.settle_write(object, input.if_match.is_some() || input.if_none_match.is_some()).await?;
        self.cold.put_object(new_request(input)).await.map(|response| response.output)
    }

    async fn put_object(&self, request: S3Request<PutObjectInput>) -> S3Result<S3Response<PutObjectOutput>> {
        self.put(request.input).await.map(S3Response::new)
    }

    async fn copy_object(&self, request: S3Request<CopyObjectInput>) -> S3Result<S3Response<CopyObjectOutput>> {
        let target = Object::new(&request.input.bucket, &request.input.key);
        self.settle(source_of(&request.input.copy_source).into_iter().chain([target]), Need::Gone).await?;
        self.cold.copy_object(request).await
    }

    async fn upload_part_copy(
        &self,
        request: S3Request<UploadPartCopyInput>,
    ) -> S3Result<S3Response<UploadPartCopyOutput>> {
        self.settle(source_of(&request.input.copy_source), Need::Gone).await?;
        self.cold.upload_part_copy(request).await
    }

    async fn complete_multipart_upload(
        &self,
        request: S3Request<CompleteMultipartUploadInput>,
    ) -> S3Result<S3Response<CompleteMultipartUploadOutput>> {
        let input = &request.input;
        self.settle_write(
            Object::new(&input.bucket, &input.key),
            input.if_match.is_some() || input.if_none_match.is_some(),
        )
        .await?;
        self.cold.complete_multipart_upload(request).await
    }

    async fn delete_bucket(&self, request: S3Request<DeleteBucketInput>) -> S3Result<S3Response<DeleteBucketOutput>> {
        let bucket = &request.input.bucket;
        self.settle_prefix(bucket, "").await?;
        // From now on, it is not known to exist.
        self.buckets.lock().unwrap_or_else(PoisonError::into_inner).remove(bucket);
        self.cold.delete_bucket(request).await
    }

    async fn delete_object(&self, request: S3Request<DeleteObjectInput>) -> S3Result<S3Response<DeleteObjectOutput>> {
        let input = &request.input;
        let object = Object::new(&input.bucket, &input.key);
        let has_conditions =
            input.if_match.is_some() || input.if_match_size.is_some() || input.if_match_last_modified_time.is_some();
        if has_conditions || input.version_id.is_some() {
            self.settle([object], Need::Gone).await?;
            return self.cold.delete_object(request).await;
        }
        self.delete(vec![object], self.cold.delete_object(request), |_| Vec::new()).await
    }

    async fn delete_objects(
        &self,
        request: S3Request<DeleteObjectsInput>,
    ) -> S3Result<S3Response<DeleteObjectsOutput>> {
        let all = request.input.delete.objects.iter();
        let objects: Vec<Object> = all.map(|object| Object::new(&request.input.bucket, &object.key)).collect();
        for object in &objects {
            // One that the cold store refuses is still in the folder, and is deleted there.
            let _ = self.pending.settle(object, Need::Gone).await;
        }
        let objects = objects.into_iter().filter(|object| self.pending.holds(object)).collect();
        self.delete(objects, self.cold.delete_objects(request), |response| {
            response.output.errors.iter().flatten().filter_map(|error| error.key.as_deref()).collect()
        })
        .await
    }
}

/// Return whether the drive of the folder is full.
fn is_full(error: &S3Error) -> bool {
    error.code().as_str() == NO_SPACE
}

/// A folder that cannot be written has nothing to do with the rights of a client. When the put is sent again, it goes to the cold store.
fn of_the_folder(error: S3Error) -> S3Error {
    match error.code() {
        S3ErrorCode::Custom(_) if is_full(&error) => {
            s3_error!(ServiceUnavailable, "the --write-back folder is full")
        }
        S3ErrorCode::NoSuchBucket => s3_error!(ServiceUnavailable, "the folder of the bucket was removed; try again"),
        S3ErrorCode::AccessDenied => {
            s3_error!(ServiceUnavailable, "{}", error.message().unwrap_or("the folder cannot be written to"))
        }
        _ => error,
    }
}

/// Return whether a put has no conditions, and nothing that a folder could not keep, or that a cold store may refuse.
fn is_plain(input: &PutObjectInput) -> bool {
    let metadata_bytes: usize = input.metadata.iter().flatten().map(|(name, value)| name.len() + value.len()).sum();
    let is_odd = |part: &str| {
        matches!(part, "" | "." | "..")
            || part.len() > MOST_PART_BYTES
            || part.contains(char::is_control)
            || part.contains("__XLDIR__")
    };
    let is_odd_key = input.key.strip_suffix('/').unwrap_or(&input.key).split('/').any(is_odd);
    if metadata_bytes > MOST_METADATA_BYTES || is_odd_key {
        return false;
    }
    macro_rules! absent {
        ($($field:ident)*) => { $(input.$field.is_none())&&* };
    }
    absent!(acl bucket_key_enabled expected_bucket_owner grant_full_control grant_read grant_read_acp grant_write_acp if_match if_none_match
        object_lock_legal_hold_status object_lock_mode object_lock_retain_until_date request_payer sse_customer_algorithm sse_customer_key
        sse_customer_key_md5 ssekms_encryption_context ssekms_key_id server_side_encryption storage_class tagging write_offset_bytes)
}

fn source_of(source: &CopySource) -> Option<Object> {
    match source {
        CopySource::Bucket { bucket, key, .. } => Some(Object::new(bucket, key)),
        _ => None,
    }
}

macro_rules! operations {
    (
        account { $($account:ident($account_input:ident) -> $account_output:ident $account_row:tt;)* }
        reads { $($read:ident($read_input:ident) -> $read_output:ident $read_row:tt;)* }
        listings { $($listing:ident($listing_input:ident) -> $listing_output:ident $listing_row:tt;)* }
        writes { $($write:ident($write_input:ident) -> $write_output:ident $write_row:tt;)* }
        others { $($other:ident($other_input:ident) -> $other_output:ident $other_row:tt;)* }
    ) => {
        #[async_trait::async_trait]
        impl S3 for WriteBack {
            // These look into the folder first.
            $(async fn $read(&self, request: S3Request<$read_input>) -> S3Result<S3Response<$read_output>> {
                let object = Object::new(&request.input.bucket, &request.input.key);
                if request.input.version_id.is_some() || request.input.sse_customer_key.is_some() {
                    self.settle([object], Need::Gone).await?;
                } else if self.pending.holds(&object) {
                    match S3::$read(&self.folder, new_request(request.input.clone())).await {
                        // It was sent in the meantime.
                        Err(error) if *error.code() == S3ErrorCode::NoSuchKey => {}
                        Err(error) => return Err(error),
                        Ok(response) => {
                            response.output.e_tag.as_ref().map_or(Ok([0; 16]), |etag| md5_of(Some(etag)))?;
                            return Ok(response);
                        }
                    }
                }
                self.cold.$read(request).await
            })*

            $(async fn $listing(&self, request: S3Request<$listing_input>) -> S3Result<S3Response<$listing_output>> {
                self.settle_prefix(&request.input.bucket, request.input.prefix.as_deref().unwrap_or_default()).await?;
                self.cold.$listing(request).await
            })*

            $(async fn $write(&self, request: S3Request<$write_input>) -> S3Result<S3Response<$write_output>> {
                WriteBack::$write(self, request).await
            })*

            $(async fn $account(&self, request: S3Request<$account_input>) -> S3Result<S3Response<$account_output>> {
                self.cold.$account(request).await
            })*

            $(async fn $other(&self, request: S3Request<$other_input>) -> S3Result<S3Response<$other_output>> {
                self.cold.$other(request).await
            })*
        }
    };
}

each_operation!(operations);
