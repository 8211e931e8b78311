//! How many bytes a cold store has below a prefix: its objects, and the parts of uploads that are not completed. Pages of a listing are added up and dropped.

use std::collections::HashSet;
use std::sync::Arc;

use s3s::dto::{ListMultipartUploadsInput, ListObjectsV2Input, ListPartsInput, Part};
use s3s::{S3, S3Error, S3ErrorCode, S3Result, s3_error};

use super::usage::{Found, MOST_UPLOADS, Upload};
use crate::cold::request;

/// Measure what is below a prefix of a bucket. Some stores do not list uploads by a prefix, so those that are `known` are asked for by name.
/// Uploads come first: one that is completed meanwhile is then found twice, and not missed.
pub async fn below(cold: &Arc<dyn S3>, (bucket, prefix): (&str, &str), known: &HashSet<Upload>) -> S3Result<Found> {
    let mut found = Found::default();
    for open in known {
        found.add(cold, bucket, open.clone()).await?;
    }
    find_uploads(cold, (bucket, prefix), known, &mut found).await?;
    let mut after: Option<String> = None;
    loop {
        let input = ListObjectsV2Input {
            bucket: bucket.to_owned(),
            prefix: Some(prefix.to_owned()),
            continuation_token: after.clone(),
            ..ListObjectsV2Input::default()
        };
        let page = match cold.list_objects_v2(request(input)).await {
            Ok(response) => response.output,
            Err(error) if *error.code() == S3ErrorCode::NoSuchBucket => return Ok(Found::default()),
            Err(error) => return Err(error),
        };
        let sizes = page.contents.iter().flatten().filter_map(|object| u64::try_from(object.size?).ok());
        found.bytes = sizes.fold(found.bytes, u64::saturating_add);
        match page.next_continuation_token.filter(|_| page.is_truncated.unwrap_or(false)) {
            None => return Ok(found),
            // A store that repeats a page would be asked for ever.
            next if next == after => {
                return Err(s3_error!(InternalError, "the cold store keeps returning the same page"));
            }
            next => after = next,
        }
    }
}

async fn find_uploads(
    cold: &Arc<dyn S3>,
    (bucket, prefix): (&str, &str),
    known: &HashSet<Upload>,
    found: &mut Found,
) -> S3Result<()> {
    let mut after = (None, None);
    loop {
        let input = ListMultipartUploadsInput {
            bucket: bucket.to_owned(),
            prefix: Some(prefix.to_owned()).filter(|prefix| !prefix.is_empty()),
            key_marker: after.0.clone(),
            upload_id_marker: after.1.clone(),
            ..ListMultipartUploadsInput::default()
        };
        let page = match cold.list_multipart_uploads(request(input)).await {
            Ok(response) => response.output,
            Err(error) if is_refused(&error) => return Ok(()),
            Err(error) => return Err(error),
        };
        for upload in page.uploads.into_iter().flatten() {
            let (Some(key), Some(id)) = (upload.key, upload.upload_id) else { continue };
            let open = (key, id);
            if open.0.starts_with(prefix) && !known.contains(&open) {
                found.add(cold, bucket, open).await?;
            }
        }
        let next = (page.next_key_marker, page.next_upload_id_marker);
        if !page.is_truncated.unwrap_or(false) || next.0.is_none() || next == after {
            return Ok(());
        }
        after = next;
    }
}

/// Return whether a store does not list uploads, or not for this account.
fn is_refused(error: &S3Error) -> bool {
    let code = error.code();
    matches!(
        code,
        S3ErrorCode::NotImplemented
            | S3ErrorCode::MethodNotAllowed
            | S3ErrorCode::AccessDenied
            | S3ErrorCode::NoSuchBucket
    )
}

impl Found {
    /// Count the parts of an upload, if it exists.
    async fn add(&mut self, cold: &Arc<dyn S3>, bucket: &str, open: Upload) -> S3Result<()> {
        if let Some(bytes) = upload(cold, bucket, &open).await? {
            self.bytes = self.bytes.saturating_add(bytes);
            if self.uploads.len() < MOST_UPLOADS {
                self.uploads.insert(open);
            }
        }
        Ok(())
    }
}

/// Return how many bytes the parts of an upload have, or None if it does not exist.
pub async fn upload(cold: &Arc<dyn S3>, bucket: &str, open: &Upload) -> S3Result<Option<u64>> {
    let mut bytes = 0_u64;
    let is_there = parts(cold, bucket, open, |part| {
        bytes = bytes.saturating_add(part.size.and_then(|size| size.try_into().ok()).unwrap_or(0))
    });
    Ok(is_there.await?.then_some(bytes))
}

/// Pass the parts of an upload to a function. Returns whether the upload exists.
pub async fn parts(cold: &Arc<dyn S3>, bucket: &str, (key, id): &Upload, mut see: impl FnMut(&Part)) -> S3Result<bool> {
    let mut after = None;
    loop {
        let input = ListPartsInput {
            bucket: bucket.to_owned(),
            key: key.clone(),
            upload_id: id.clone(),
            part_number_marker: after,
            ..ListPartsInput::default()
        };
        let page = match cold.list_parts(request(input)).await {
            Ok(response) => response.output,
            Err(error) if matches!(error.code(), S3ErrorCode::NoSuchUpload | S3ErrorCode::NoSuchBucket) => {
                return Ok(false);
            }
            Err(error) => return Err(error),
        };
        page.parts.iter().flatten().for_each(&mut see);
        let next = page.next_part_number_marker.filter(|_| page.is_truncated.unwrap_or(false));
        if next.is_none() || next == after {
            return Ok(true);
        }
        after = next;
    }
}
