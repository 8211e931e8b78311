//! Operations on objects of a folder.

use std::fs::File;
use std::ops::Range;

use bytes::Bytes;
use s3s::dto::*;
use s3s::{S3ErrorCode, S3Result, StdError, s3_error};

use super::compared::Unsettled;
use super::record::{Record, failed, fill, fill_sums, given, sums};
use super::{Folder, on_disk, settled};
use crate::meta::seconds;
use crate::read::conditions::{Conditions, conditions};

/// Bytes of a response that are read together.
const PIECE_BYTES: u64 = 1 << 20;
/// How often a body waits until its file was compared before its next piece is read.
const COMPARED: usize = 8;

const ATTRIBUTES: [&str; 5] = [
    ObjectAttributes::ETAG,
    ObjectAttributes::CHECKSUM,
    ObjectAttributes::OBJECT_SIZE,
    ObjectAttributes::OBJECT_PARTS,
    ObjectAttributes::STORAGE_CLASS,
];

/// Take the conditions on the source of a copy from its input.
macro_rules! copy_conditions {
    ($input:expr) => {
        Conditions {
            matches: $input.copy_source_if_match.as_ref(),
            none_match: $input.copy_source_if_none_match.as_ref(),
            modified_since: $input.copy_source_if_modified_since.as_ref(),
            unmodified_since: $input.copy_source_if_unmodified_since.as_ref(),
        }
    };
}

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
        let (file, record) = settled(|| self.read_record(&input.bucket, &input.key)).await?;
        let conditions = conditions!(input);
        conditions.check_read(&record.etag(), Some(&record.modified()))?;
        let mut output = GetObjectOutput::default();
        let range = match (&input.range, input.part_number) {
            (Some(_), Some(_)) => return Err(s3_error!(InvalidRequest, "give either a range or a part number")),
            (Some(range), None) => Some(satisfied(range, record.bytes)?),
            (None, Some(number)) => part(&record, number, &mut output.parts_count)?,
            (None, None) => None,
        };
        fill!(output, &record);
        if input.checksum_mode.is_some() && input.range.is_none() {
            fill_sums!(output, record.of_part(input.part_number));
        }
        if let Some(range) = &range {
            output.content_range =
                Some(format!("bytes {}-{}/{}", range.start, range.end.saturating_sub(1), record.bytes));
        }
        let range = range.unwrap_or(0..record.bytes);
        output.content_length = Some((range.end - range.start) as i64);
        output.body = Some(body(file, record, range));
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
        let (_, record) = settled(|| self.read_record(&input.bucket, &input.key)).await?;
        let conditions = conditions!(input);
        conditions.check_read(&record.etag(), Some(&record.modified()))?;
        let mut output = HeadObjectOutput::default();
        let range = match input.part_number {
            Some(number) => part(&record, number, &mut output.parts_count)?,
            None => input.range.as_ref().map(|range| satisfied(range, record.bytes)).transpose()?,
        };
        fill!(output, &record);
        if input.checksum_mode.is_some() {
            fill_sums!(output, record.of_part(input.part_number));
        }
        output.content_length = Some(range.map_or(record.bytes, |range| range.end - range.start) as i64);
        Ok(output)
    }

    pub(super) async fn get_object_attributes(
        &self,
        input: GetObjectAttributesInput,
    ) -> S3Result<GetObjectAttributesOutput> {
        check_version(input.version_id.as_deref())?;
        refuse!(input; sse_customer_key "encryption");
        let (_, record) = settled(|| self.read_record(&input.bucket, &input.key)).await?;
        let wants = |name: &str| input.object_attributes.iter().any(|attribute| attribute.as_str() == name);
        if let Some(unknown) =
            input.object_attributes.iter().map(ObjectAttributes::as_str).find(|name| !ATTRIBUTES.contains(name))
        {
            return Err(s3_error!(InvalidArgument, "the attribute `{unknown}` is not known"));
        }
        Ok(GetObjectAttributesOutput {
            e_tag: wants(ObjectAttributes::ETAG).then(|| record.etag()),
            checksum: (wants(ObjectAttributes::CHECKSUM) && !record.sums.is_empty()).then(|| record.sums.to_checksum()),
            object_size: wants(ObjectAttributes::OBJECT_SIZE).then_some(record.bytes as i64),
            storage_class: wants(ObjectAttributes::STORAGE_CLASS)
                .then(|| StorageClass::from_static(StorageClass::STANDARD)),
            object_parts: wants(ObjectAttributes::OBJECT_PARTS)
                .then(|| parts_of(&record, input.part_number_marker.as_ref(), input.max_parts))
                .flatten(),
            last_modified: Some(record.modified()),
            ..GetObjectAttributesOutput::default()
        })
    }

    pub(super) async fn put_object(&self, input: PutObjectInput) -> S3Result<PutObjectOutput> {
        refuse!(input; tagging "tags" sse_customer_key "encryption" server_side_encryption "encryption" object_lock_mode "locks"
            object_lock_legal_hold_status "locks");
        self.bucket(&input.bucket)?;
        let given = given!(input);
        let mut draft = self.draft()?;
        let etag = draft.receive(input.body).await?;
        let sums = sums!(input);
        let record = Record { etag, given, sums, ..Record::default() };
        let conditions = Conditions {
            matches: input.if_match.as_ref(),
            none_match: input.if_none_match.as_ref(),
            ..Conditions::default()
        };
        let record = settled(|| self.place(&input.bucket, &input.key, &draft, record.clone(), conditions)).await?;
        let mut output = PutObjectOutput { e_tag: Some(record.etag()), ..PutObjectOutput::default() };
        fill_sums!(output, record);
        Ok(output)
    }

    pub(super) async fn delete_object(&self, input: DeleteObjectInput) -> S3Result<DeleteObjectOutput> {
        check_version(input.version_id.as_deref())?;
        settled(|| {
            let _turn = self.write_lock(&input.bucket, &input.key);
            let has_conditions = input.if_match.is_some()
                || input.if_match_size.is_some()
                || input.if_match_last_modified_time.is_some();
            if has_conditions {
                let record = match self.read_record(&input.bucket, &input.key) {
                    // Nothing is left to delete.
                    Err(error) if *error.code() == S3ErrorCode::NoSuchKey => return Ok(false),
                    other => other?.1,
                };
                Conditions { matches: input.if_match.as_ref(), ..Conditions::default() }
                    .check_write(Some(&record.etag()))?;
                let is_other_size =
                    input.if_match_size.is_some_and(|bytes| u64::try_from(bytes).ok() != Some(record.bytes));
                let is_other_time = input
                    .if_match_last_modified_time
                    .as_ref()
                    .is_some_and(|time| seconds(time) != seconds(&record.modified()));
                if is_other_size || is_other_time {
                    return Err(s3_error!(PreconditionFailed, "the object's size or time differs"));
                }
            }
            self.remove(&input.bucket, &input.key)
        })
        .await?;
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
                if_match_size: object.size,
                if_match_last_modified_time: object.last_modified_time,
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
        let (mut file, record) = settled(|| self.read_record(&bucket, &key)).await?;
        copy_conditions!(input).check_copy(&record.etag(), Some(&record.modified()))?;
        let replaces = match input.metadata_directive.as_ref().map(MetadataDirective::as_str) {
            None | Some(MetadataDirective::COPY) => false,
            Some(MetadataDirective::REPLACE) => true,
            Some(other) => {
                return Err(s3_error!(
                    InvalidArgument,
                    "x-amz-metadata-directive is `{other}`, expected COPY or REPLACE"
                ));
            }
        };
        if (&bucket, &key) == (&input.bucket, &input.key) && !replaces {
            return Err(s3_error!(InvalidRequest, "an object can be copied to itself only with new metadata"));
        }
        let given = if replaces { given!(input) } else { record.given.clone() };
        let mut draft = self.draft()?;
        let copy = Record {
            etag: record.etag.clone(),
            given,
            sums: record.sums.clone(),
            parts: record.parts.clone(),
            ..Record::default()
        };
        let copy = on_disk(|| {
            std::io::copy(&mut file, &mut draft.file).map_err(failed)?;
            record.check_unchanged(&file).map_err(failed)?;
            self.place(&input.bucket, &input.key, &draft, copy, Conditions::default())
        })?;
        let mut result = CopyObjectResult {
            e_tag: Some(copy.etag()),
            last_modified: Some(copy.modified()),
            ..CopyObjectResult::default()
        };
        fill_sums!(result, copy);
        Ok(CopyObjectOutput { copy_object_result: Some(result), ..CopyObjectOutput::default() })
    }

    /// Open the source of a copy, if it meets the conditions.
    pub(super) fn copy_source(&self, input: &UploadPartCopyInput) -> S3Result<(File, Record)> {
        let (bucket, key) = source(&input.copy_source)?;
        let (file, record) = self.read_record(&bucket, &key)?;
        copy_conditions!(input).check_copy(&record.etag(), Some(&record.modified()))?;
        Ok((file, record))
    }
}

/// Return a page of the parts of an object, or None if it was uploaded whole.
fn parts_of(record: &Record, marker: Option<&i32>, most: Option<i32>) -> Option<GetObjectAttributesParts> {
    let parts = record.parts.as_ref()?;
    let (after, most) =
        (usize::try_from(*marker.unwrap_or(&0)).ok()?, usize::try_from(most.unwrap_or(1000)).ok()?.min(1000));
    let page: Vec<ObjectPart> = (after + 1..)
        .zip(parts.iter().skip(after))
        .take(most)
        .map(|(number, bytes)| {
            let sums = record.part_sums(number).to_checksum();
            ObjectPart {
                part_number: i32::try_from(number).ok(),
                size: i64::try_from(*bytes).ok(),
                checksum_crc32: sums.checksum_crc32,
                checksum_crc32c: sums.checksum_crc32c,
                checksum_crc64nvme: sums.checksum_crc64nvme,
                checksum_sha1: sums.checksum_sha1,
                checksum_sha256: sums.checksum_sha256,
            }
        })
        .collect();
    let last = after + page.len();
    Some(GetObjectAttributesParts {
        total_parts_count: i32::try_from(parts.len()).ok(),
        is_truncated: Some(last < parts.len()),
        max_parts: i32::try_from(most).ok(),
        part_number_marker: i32::try_from(after).ok(),
        next_part_number_marker: i32::try_from(last).ok(),
        // Without checksums, S3 does not list the parts of an object.
        parts: (!record.sums.is_empty()).then_some(page),
    })
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
        Some(version) => {
            Err(s3_error!(NoSuchVersion, "the version `{version}` does not exist; a served folder keeps one"))
        }
    }
}

fn satisfied(range: &s3s::dto::Range, bytes: u64) -> S3Result<Range<u64>> {
    let within = range.check(bytes).ok().filter(|within| !within.is_empty());
    within.ok_or_else(|| s3_error!(InvalidRange, "the object has {bytes} bytes"))
}

/// Return the range of a part of an object.
fn part(record: &Record, number: i32, count: &mut Option<i32>) -> S3Result<Option<Range<u64>>> {
    let no_such_part = || s3_error!(InvalidPart, "the object has no part {number}");
    let at = usize::try_from(number).ok().and_then(|number| number.checked_sub(1)).ok_or_else(no_such_part)?;
    let Some(parts) = &record.parts else {
        if record.upload.is_some() {
            return Err(s3_error!(NotImplemented, "part lengths are not recorded for uploads with this many parts"));
        }
        return if at == 0 { Ok(None) } else { Err(no_such_part()) };
    };
    let bytes = parts.get(at).ok_or_else(no_such_part)?;
    let begin: u64 = parts[..at].iter().sum();
    *count = i32::try_from(parts.len()).ok();
    Ok(Some(begin..begin + bytes))
}

/// Return a part of a file as a body. If the file is changed, the body breaks off, and a cache keeps nothing of it.
fn body(file: File, record: Record, range: Range<u64>) -> StreamingBlob {
    let bytes = (range.end - range.start) as usize;
    let parts = futures::stream::unfold((Some((file, record)), range), |(opened, range)| async move {
        let opened = opened.filter(|_| !range.is_empty())?;
        let end = range.end.min(range.start + PIECE_BYTES);
        Some(match piece(opened, range.start, (end - range.start) as usize).await {
            Ok((piece, opened)) => (Ok(piece), (Some(opened), end..range.end)),
            Err(error) => (Err(error), (None, range)),
        })
    });
    crate::body::with_length(parts, bytes)
}

/// Read a piece of a file. If something about the file was changed, the piece comes once the file was compared, unless that does not end.
async fn piece(mut opened: (File, Record), begin: u64, bytes: usize) -> Result<(Bytes, (File, Record)), StdError> {
    let mut tries = 0;
    loop {
        let read = tokio::task::spawn_blocking(move || {
            let (file, mut record) = opened;
            (record.read_part(&file, begin, bytes), (file, record))
        });
        let (read, back) = read.await?;
        opened = back;
        tries += 1;
        match read {
            Ok(piece) => return Ok((Bytes::from(piece), opened)),
            Err(error) => match Unsettled::of(&error) {
                Some(unsettled) if tries < COMPARED => unsettled.compare(()).await?,
                _ => return Err(error.into()),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{FileTimes, Permissions};
    use std::io::ErrorKind::{NotFound, Other, ResourceBusy, TimedOut, WouldBlock};
    use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
    use std::time::Duration;

    use futures::FutureExt as _;

    use super::super::compared::{Compared, SLACK, alone, compare_now};
    use super::*;
    use crate::cold::is_failure;

    type Result<T> = std::result::Result<T, StdError>;

    #[test]
    fn a_file_that_is_written_or_compared_is_no_failure_of_its_folder() {
        let is_one = |kind: std::io::ErrorKind| is_failure(&failed(kind.into()));
        assert_eq!(
            [WouldBlock, ResourceBusy, NotFound, Other, TimedOut].map(is_one),
            [false, false, false, true, true]
        );
    }

    /// A file of 20 MiB of zeros, with its record, and then with another mode.
    fn large(named: &tempfile::NamedTempFile) -> Result<(File, Record)> {
        let file = named.reopen()?;
        file.set_len(20 << 20)?;
        Record { etag: "8f4e33f3dc3e414ff94e5fb6905cba8c".into(), ..Record::default() }.write(&file)?;
        let record = Record::read(&file)?;
        std::thread::sleep(2 * SLACK); // A change right after a write is taken for its end.
        file.set_permissions(Permissions::from_mode(0o640))?;
        Ok((file, record))
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_body_goes_on_after_its_file_was_compared() -> Result<()> {
        let named = tempfile::NamedTempFile::new()?;
        let (file, record) = large(&named)?;
        assert!(Record::read(&file).is_err_and(|error| Unsettled::of(&error).is_some()));
        let (bytes, (file, record)) = piece((file, record), 7, 9).await?;
        assert_eq!(bytes, [0; 9][..]);
        // Other bytes end the body, also at the same time.
        let before = file.metadata()?.modified()?;
        std::thread::sleep(Duration::from_millis(1)); // The clock of the file system moves.
        file.write_all_at(b"x", 7)?;
        file.set_times(FileTimes::new().set_modified(before))?;
        assert!(piece((file, record), 7, 9).await.is_err());
        Ok(())
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_large_file_is_compared_once_for_all_requests() -> Result<()> {
        let named = tempfile::NamedTempFile::new()?;
        let (file, record) = large(&named)?;
        let reads = (0..40).map(|_| settled(|| Record::read(&file).map_err(failed)));
        for found in futures::future::join_all(reads).await {
            assert_eq!(found?.etag, record.etag);
        }
        assert_eq!(Record::read(&file)?.etag, record.etag);
        // A rewrite that restores the time is found, and remembered, too.
        let before = file.metadata()?.modified()?;
        file.write_all_at(b"x", 7)?;
        file.set_times(FileTimes::new().set_modified(before))?;
        assert!(Record::read(&file).is_err());
        let found = settled(|| Record::read(&file).map_err(failed)).await?;
        assert!(found.etag != record.etag && found.etag == Record::read(&file)?.etag);
        Ok(())
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn requests_that_are_not_polled_keep_no_turn_from_others() -> Result<()> {
        let named = (0..7).map(|_| tempfile::NamedTempFile::new()).collect::<std::io::Result<Vec<_>>>()?;
        let files = named.iter().map(|named| Ok(large(named)?.0)).collect::<Result<Vec<_>>>()?;
        let unsettled =
            |file| Record::read(file).err().and_then(|error| Unsettled::of(&error)).ok_or("it was compared");
        let mut idle =
            files[1..].iter().map(|file| Ok(Box::pin(unsettled(file)?.compare(())))).collect::<Result<Vec<_>>>()?;
        idle.iter_mut().for_each(|compared| drop(compared.now_or_never()));
        settled(|| Record::read(&files[0]).map_err(failed)).await?;
        Ok(())
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn requests_for_one_file_take_one_turn() -> Result<()> {
        let (one, other) = (tempfile::NamedTempFile::new()?, tempfile::NamedTempFile::new()?);
        let (file, other) = (large(&one)?.0, large(&other)?.0);
        // Nobody can compare it to its end.
        let held = alone(&file)?.lock_owned().await;
        let reads: Vec<_> = (0..5)
            .map(|_| {
                file.try_clone()
                    .map(|file| tokio::spawn(async move { settled(|| Record::read(&file).map_err(failed)).await }))
            })
            .collect::<std::io::Result<_>>()?;
        tokio::time::sleep(Duration::from_millis(50)).await; // They wait by then, or come later: both are right.
        settled(|| Record::read(&other).map_err(failed)).await?;
        drop(held);
        for read in reads {
            read.await??;
        }
        Ok(())
    }

    /// Another program cuts a file while it is compared: nobody knows what it will be.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_file_that_is_cut_while_it_is_compared_is_no_failure_of_its_folder() -> Result<()> {
        let named = tempfile::NamedTempFile::new()?;
        let (file, record) = large(&named)?;
        let found = file.metadata()?;
        file.set_len(1 << 20)?;
        assert_eq!(compare_now(&file, &found, &record.etag, None)?, Compared::Changed);
        let mut record = record;
        assert!(record.read_part(&file, 2 << 20, 9).map_err(failed).is_err_and(|error| !is_failure(&error)));
        Ok(())
    }
}
