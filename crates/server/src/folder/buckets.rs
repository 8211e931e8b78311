//! Buckets of a folder: the folders in it.

use std::io;

use s3s::dto::*;
use s3s::{S3Result, s3_error};

use super::record::failed;
use super::{Folder, OWN, on_disk, sync_folder};
use crate::cold::OWNER;

impl Folder {
    pub(super) async fn list_buckets(&self, input: ListBucketsInput) -> S3Result<ListBucketsOutput> {
        let mut buckets = Vec::new();
        for entry in on_disk(|| std::fs::read_dir(&self.root)).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let found = entry.metadata().map_err(failed)?;
            if name != OWN && found.is_dir() && s3s::path::check_bucket_name(&name) {
                let created = found.created().or_else(|_| found.modified()).ok().map(Timestamp::from);
                buckets.push(Bucket { name: Some(name), creation_date: created, bucket_region: None });
            }
        }
        buckets.sort_unstable_by(|one, other| one.name.cmp(&other.name));
        let is_asked = |bucket: &Bucket| {
            let name = bucket.name.as_deref().unwrap_or_default();
            name.starts_with(input.prefix.as_deref().unwrap_or_default())
                && input.continuation_token.as_deref().is_none_or(|after| name > after)
        };
        buckets.retain(is_asked);
        let most = input.max_buckets.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
        let next = buckets.get(most).and_then(|_| buckets.get(most.checked_sub(1)?)?.name.clone());
        buckets.truncate(most);
        Ok(ListBucketsOutput {
            buckets: Some(buckets),
            owner: Some(owner()),
            continuation_token: next,
            prefix: input.prefix,
        })
    }

    pub(super) async fn create_bucket(&self, input: CreateBucketInput) -> S3Result<CreateBucketOutput> {
        if input.object_lock_enabled_for_bucket == Some(true) {
            return Err(s3_error!(NotImplemented, "a served folder does not support object lock"));
        }
        on_disk(|| match std::fs::create_dir(self.root.join(&input.bucket)) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(s3_error!(BucketAlreadyOwnedByYou, "the bucket `{}` already exists", input.bucket))
            }
            other => other.and_then(|()| sync_folder(&self.root)).map_err(failed),
        })?;
        Ok(CreateBucketOutput { location: Some(format!("/{}", input.bucket)) })
    }

    pub(super) async fn delete_bucket(&self, input: DeleteBucketInput) -> S3Result<DeleteBucketOutput> {
        let folder = self.bucket(&input.bucket)?;
        on_disk(|| match std::fs::remove_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::DirectoryNotEmpty => {
                Err(s3_error!(BucketNotEmpty, "the bucket `{}` has objects", input.bucket))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(s3_error!(NoSuchBucket)),
            other => {
                let _ = std::fs::remove_dir_all(self.root.join(OWN).join("uploads").join(&input.bucket));
                other.and_then(|()| sync_folder(&self.root)).map_err(failed)
            }
        })?;
        Ok(DeleteBucketOutput::default())
    }

    pub(super) async fn head_bucket(&self, input: HeadBucketInput) -> S3Result<HeadBucketOutput> {
        self.bucket(&input.bucket)?;
        Ok(HeadBucketOutput { bucket_region: Some("us-east-1".into()), ..HeadBucketOutput::default() })
    }

    pub(super) async fn get_bucket_location(&self, input: GetBucketLocationInput) -> S3Result<GetBucketLocationOutput> {
        self.bucket(&input.bucket)?;
        Ok(GetBucketLocationOutput::default())
    }
}

impl Folder {
    /// A folder never has versions.
    pub(super) async fn get_bucket_versioning(
        &self,
        input: GetBucketVersioningInput,
    ) -> S3Result<GetBucketVersioningOutput> {
        self.bucket(&input.bucket)?;
        Ok(GetBucketVersioningOutput::default())
    }
}

/// The owner of everything in a folder.
pub(super) fn owner() -> Owner {
    Owner { id: Some(OWNER.into()), display_name: Some(OWNER.into()) }
}
