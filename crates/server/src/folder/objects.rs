//! Operations on objects of a folder.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use bytes::Bytes;
use s3s::dto::*;
use s3s::{S3ErrorCode, S3Result, StdError, s3_error};

use super::record::{Record, Sums, failed, fill, fill_sums, given};
use super::{Folder, on_disk};
use crate::conditions::Conditions;

/// Bytes of a response that are read together.
const PIECE_BYTES: u64 = 1 << 20;

/// Refuse what a folder does not have, so that nobody believes that it does.
macro_rules! refuse {
    ($input:expr; $($field:ident $what:literal)*) => {
        $(if $input.$field.is_some() {
            return Err(s3_error!(NotImplemented, "a served folder has no {}", $what));
        })*
    };
}
pub(super) use refuse;

impl Folder {
    pub(super) async fn get_object(&self, input: GetObjectInput) -> S3Result<GetObjectOutput> {
        check_version(input.version_id.as_deref())?;
        refuse!(input; sse_customer_key "encryption");
        let (file, record) = on_disk(|| self.read_record(&input.bucket, &input.key))?;
        let conditions = Conditions {
            matches: input.if_match.as_ref(),
            none_match: input.if_none_match.as_ref(),
            modified_since: input.if_modified_since.as_ref(),
            unmodified_since: input.if_unmodified_since.as_ref(),
        };
        conditions.check_read(&record.etag(), Some(&record.modified()))?;
        let mut output = GetObjectOutput::default();
        let range = match (&input.range, input.part_number) {
            (Some(_), Some(_)) => return Err(s3_error!(InvalidRequest, "give either a range or a part number")),
            (Some(range), None) => Some(satisfied(range, record.bytes)?),
            (None, Some(number)) => part(&record, number, &mut output.parts_count)?,
            (None, None) => None,
        };
        fill!(output, &record);
        if input.checksum_mode.is_some() && range.is_none() {
            fill_sums!(output, record);
        }
        if let Some(range) = &range {
            output.content_range = Some(format!("bytes {}-{}/{}", range.start, range.end.saturating_sub(1), record.bytes));
        }
        let range = range.unwrap_or(0..record.bytes);
        output.content_length = Some((range.end - range.start) as i64);
        output.body = Some(body(file, range));
        Ok(output)
    }

    fn read_record(&self, bucket: &str, key: &str) -> S3Result<(File, Record)> {
        let (file, _) = self.find(bucket, key)?;
        let record = Record::read(&file).map_err(failed)?;
        Ok((file, record))
    }

    pub(super) async fn head_object(&self, input: HeadObjectInput) -> S3Result<HeadObjectOutput> {
        check_version(input.version_id.as_deref())?;
        refuse!(input; sse_customer_key "encryption");
        let (_, record) = on_disk(|| self.read_record(&input.bucket, &input.key))?;
        let conditions = Conditions {
            matches: input.if_match.as_ref(),
            none_match: input.if_none_match.as_ref(),
            modified_since: input.if_modified_since.as_ref(),
            unmodified_since: input.if_unmodified_since.as_ref(),
        };
        conditions.check_read(&record.etag(), Some(&record.modified()))?;
        let mut output = HeadObjectOutput::default();
        let range = match input.part_number {
            Some(number) => part(&record, number, &mut output.parts_count)?,
            None => input.range.as_ref().map(|range| satisfied(range, record.bytes)).transpose()?,
        };
        fill!(output, &record);
        if input.checksum_mode.is_some() {
            fill_sums!(output, record);
        }
        output.content_length = Some(range.map_or(record.bytes, |range| range.end - range.start) as i64);
        Ok(output)
    }

    pub(super) async fn get_object_attributes(&self, input: GetObjectAttributesInput) -> S3Result<GetObjectAttributesOutput> {
        check_version(input.version_id.as_deref())?;
        refuse!(input; sse_customer_key "encryption");
        let (_, record) = on_disk(|| self.read_record(&input.bucket, &input.key))?;
        let wants = |name: &str| input.object_attributes.iter().any(|attribute| attribute.as_str() == name);
        Ok(GetObjectAttributesOutput {
            e_tag: wants(ObjectAttributes::ETAG).then(|| record.etag()),
            checksum: (wants(ObjectAttributes::CHECKSUM) && !record.sums.is_empty()).then(|| record.sums.to_checksum()),
            object_size: wants(ObjectAttributes::OBJECT_SIZE).then_some(record.bytes as i64),
            object_parts: record.parts.as_ref().filter(|_| wants(ObjectAttributes::OBJECT_PARTS)).map(|parts| GetObjectAttributesParts {
                total_parts_count: i32::try_from(parts.len()).ok(),
                ..GetObjectAttributesParts::default()
            }),
            last_modified: Some(record.modified()),
            ..GetObjectAttributesOutput::default()
        })
    }

    pub(super) async fn put_object(&self, input: PutObjectInput) -> S3Result<PutObjectOutput> {
        refuse!(input; tagging "tags" sse_customer_key "encryption" server_side_encryption "encryption" object_lock_mode "locks"
            object_lock_legal_hold_status "locks" write_offset_bytes "appends");
        self.bucket(&input.bucket)?;
        let given = given!(input);
        let mut draft = self.draft()?;
        let etag = draft.receive(input.body).await?;
        let sums = Sums {
            crc32: input.checksum_crc32,
            crc32c: input.checksum_crc32c,
            crc64nvme: input.checksum_crc64nvme,
            sha1: input.checksum_sha1,
            sha256: input.checksum_sha256,
            is_composite: false,
        };
        let record = Record { etag, given, sums, ..Record::default() };
        let conditions = Conditions { matches: input.if_match.as_ref(), none_match: input.if_none_match.as_ref(), ..Conditions::default() };
        let record = on_disk(|| self.place(&input.bucket, &input.key, &draft, record, conditions))?;
        let mut output = PutObjectOutput { e_tag: Some(record.etag()), ..PutObjectOutput::default() };
        fill_sums!(output, record);
        Ok(output)
    }

    pub(super) async fn delete_object(&self, input: DeleteObjectInput) -> S3Result<DeleteObjectOutput> {
        check_version(input.version_id.as_deref())?;
        on_disk(|| {
            let _turn = self.write_lock(&input.bucket, &input.key);
            if input.if_match.is_some() {
                let (_, record) = self.read_record(&input.bucket, &input.key)?;
                Conditions { matches: input.if_match.as_ref(), ..Conditions::default() }.check_write(Some(&record.etag()))?;
            }
            self.remove(&input.bucket, &input.key)
        })?;
        Ok(DeleteObjectOutput::default())
    }

    pub(super) async fn delete_objects(&self, input: DeleteObjectsInput) -> S3Result<DeleteObjectsOutput> {
        self.bucket(&input.bucket)?;
        let (mut deleted, mut errors) = (Vec::new(), Vec::new());
        for object in input.delete.objects {
            let one = DeleteObjectInput {
                bucket: input.bucket.clone(),
                key: object.key.clone(),
                version_id: object.version_id.clone(),
                if_match: object.e_tag.map(ETagCondition::ETag),
                ..DeleteObjectInput::default()
            };
            match self.delete_object(one).await {
                Ok(_) => deleted.push(DeletedObject { key: Some(object.key), ..DeletedObject::default() }),
                Err(error) => errors.push(Error {
                    code: Some(error.code().as_str().to_owned()),
                    message: error.message().map(str::to_owned),
                    key: Some(object.key),
                    version_id: object.version_id,
                }),
            }
        }
        let deleted = (!input.delete.quiet.unwrap_or_default()).then_some(deleted);
        Ok(DeleteObjectsOutput { deleted, errors: Some(errors), ..DeleteObjectsOutput::default() })
    }

    pub(super) async fn copy_object(&self, input: CopyObjectInput) -> S3Result<CopyObjectOutput> {
        refuse!(input; tagging "tags" sse_customer_key "encryption" server_side_encryption "encryption" object_lock_mode "locks");
        let (bucket, key) = source(&input.copy_source)?;
        self.bucket(&input.bucket)?;
        let (mut file, record) = on_disk(|| self.read_record(&bucket, &key))?;
        let conditions = Conditions {
            matches: input.copy_source_if_match.as_ref(),
            none_match: input.copy_source_if_none_match.as_ref(),
            modified_since: input.copy_source_if_modified_since.as_ref(),
            unmodified_since: input.copy_source_if_unmodified_since.as_ref(),
        };
        check_copy(conditions, &record)?;
        let replaces = input.metadata_directive.as_ref().is_some_and(|directive| directive.as_str() == MetadataDirective::REPLACE);
        if (&bucket, &key) == (&input.bucket, &input.key) && !replaces {
            return Err(s3_error!(InvalidRequest, "an object is copied to itself only with new metadata"));
        }
        let given = if replaces { given!(input) } else { record.given.clone() };
        let mut draft = self.draft()?;
        let copy = Record { etag: record.etag, given, sums: record.sums, parts: record.parts, ..Record::default() };
        let copy = on_disk(|| {
            std::io::copy(&mut file, &mut draft.file).map_err(failed)?;
            self.place(&input.bucket, &input.key, &draft, copy, Conditions::default())
        })?;
        let mut result = CopyObjectResult { e_tag: Some(copy.etag()), last_modified: Some(copy.modified()), ..CopyObjectResult::default() };
        fill_sums!(result, copy);
        Ok(CopyObjectOutput { copy_object_result: Some(result), ..CopyObjectOutput::default() })
    }

    /// Open the source of a copy, if it meets the conditions.
    pub(super) fn copy_source(&self, input: &UploadPartCopyInput) -> S3Result<(File, Record)> {
        let (bucket, key) = source(&input.copy_source)?;
        let (file, record) = self.read_record(&bucket, &key)?;
        let conditions = Conditions {
            matches: input.copy_source_if_match.as_ref(),
            none_match: input.copy_source_if_none_match.as_ref(),
            modified_since: input.copy_source_if_modified_since.as_ref(),
            unmodified_since: input.copy_source_if_unmodified_since.as_ref(),
        };
        check_copy(conditions, &record)?;
        Ok((file, record))
    }
}

/// A copy whose conditions are not met fails with 412, where a read would answer 304.
fn check_copy(conditions: Conditions<'_>, record: &Record) -> S3Result<()> {
    match conditions.check_read(&record.etag(), Some(&record.modified())) {
        Err(error) if *error.code() == S3ErrorCode::NotModified => {
            Err(s3_error!(PreconditionFailed, "the source of the copy does not meet the conditions"))
        }
        other => other,
    }
}

fn source(source: &CopySource) -> S3Result<(String, String)> {
    match source {
        CopySource::Bucket { bucket, key, version_id: None } => Ok((bucket.to_string(), key.to_string())),
        CopySource::Bucket { .. } => Err(s3_error!(NotImplemented, "a served folder has no versions")),
        _ => Err(s3_error!(NotImplemented, "name the source of a copy as bucket/key")),
    }
}

/// A folder has one version of each object, whose id is `null` as in a bucket of S3 without versions.
fn check_version(version: Option<&str>) -> S3Result<()> {
    match version {
        None | Some("null") => Ok(()),
        Some(version) => Err(s3_error!(NoSuchVersion, "the version `{version}` does not exist; a served folder keeps one")),
    }
}

fn satisfied(range: &s3s::dto::Range, bytes: u64) -> S3Result<Range<u64>> {
    range.check(bytes).map_err(|_| s3_error!(InvalidRange, "the object has {bytes} bytes"))
}

/// Return the range of a part of an object.
fn part(record: &Record, number: i32, count: &mut Option<i32>) -> S3Result<Option<Range<u64>>> {
    let bad = || s3_error!(InvalidPart, "the object has no part {number}");
    let at = usize::try_from(number).ok().and_then(|number| number.checked_sub(1)).ok_or_else(bad)?;
    let Some(parts) = &record.parts else {
        if record.upload.is_some() {
            return Err(s3_error!(NotImplemented, "the lengths of so many parts are not kept"));
        }
        return if at == 0 { Ok(None) } else { Err(bad()) };
    };
    let bytes = parts.get(at).ok_or_else(bad)?;
    let begin: u64 = parts[..at].iter().sum();
    *count = i32::try_from(parts.len()).ok();
    Ok(Some(begin..begin + bytes))
}

/// Return a part of a file as a body.
fn body(file: File, range: Range<u64>) -> StreamingBlob {
    let bytes = (range.end - range.start) as usize;
    let parts = futures::stream::unfold((Arc::new(file), range), |(file, range)| async move {
        if range.is_empty() {
            return None;
        }
        let (own, begin, end) = (file.clone(), range.start, range.end.min(range.start + PIECE_BYTES));
        let read = tokio::task::spawn_blocking(move || {
            let mut piece = vec![0; (end - begin) as usize];
            own.read_exact_at(&mut piece, begin).map(|()| Bytes::from(piece))
        });
        let piece = read.await.map_err(StdError::from).and_then(|read| read.map_err(StdError::from));
        let rest = if piece.is_ok() { end..range.end } else { 0..0 };
        Some((piece, (file, rest)))
    });
    crate::body::with_length(parts, bytes)
}
