//! Uploads in parts. Each upload is a folder with its description and a file for each part.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use s3s::crypto::{Checksum as _, Md5};
use s3s::dto::*;
use s3s::{S3Error, S3Result, s3_error};
use serde::{Deserialize, Serialize};

use super::buckets::owner;
use super::objects::refuse;
use super::pages::{Texts, most};
use super::record::{Given, Record, absent_or_failed, failed, given, is_absent, sums};
use super::write::Draft;
use super::{Folder, OWN, on_disk, settled, sync_folder, unique};
use crate::meta::since_1970;
use crate::upload::hex;

const DESCRIPTION: &str = "upload.json";
const MOST_PARTS: i32 = 10_000;

/// What an upload will make.
#[derive(Debug, Serialize, Deserialize)]
pub struct Description {
    key: String,
    pub given: Given,
    /// The checksum that each part has, and whether the object gets one of its whole content.
    pub algorithm: Option<String>,
    pub is_full: bool,
    begun_ms: u64,
}

impl Description {
    fn begun(&self) -> Timestamp {
        Timestamp::from(SystemTime::UNIX_EPOCH + std::time::Duration::from_millis(self.begun_ms))
    }
}

impl Folder {
    fn uploads(&self, bucket: &str) -> PathBuf {
        self.root.join(OWN).join("uploads").join(bucket)
    }

    /// Return the folder of an upload, and its description.
    pub(super) fn upload(&self, bucket: &str, key: &str, id: &str) -> S3Result<(PathBuf, Description)> {
        self.bucket(bucket)?;
        let unknown = || s3_error!(NoSuchUpload, "the upload `{id}` does not exist");
        // Ids are names of folders.
        if id.len() != 32 || !id.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(unknown());
        }
        let folder = self.uploads(bucket).join(id);
        let text = std::fs::read(folder.join(DESCRIPTION)).map_err(|error| absent_or_failed(error, unknown))?;
        let description: Description = serde_json::from_slice(&text).map_err(S3Error::internal_error)?;
        if description.key == key { Ok((folder, description)) } else { Err(unknown()) }
    }

    pub(super) async fn create_multipart_upload(
        &self,
        input: CreateMultipartUploadInput,
    ) -> S3Result<CreateMultipartUploadOutput> {
        refuse!(input; tagging "tags" sse_customer_key "encryption" server_side_encryption "encryption" object_lock_mode "locks");
        self.bucket(&input.bucket)?;
        let given = given!(input);
        let algorithm = input.checksum_algorithm.as_ref().map(|algorithm| algorithm.as_str().to_owned());
        let asked = input.checksum_type.as_ref().map(ChecksumType::as_str);
        let is_full =
            asked.map_or(algorithm.as_deref() == Some("CRC64NVME"), |asked| asked == ChecksumType::FULL_OBJECT);
        let begun_ms = since_1970().as_millis() as u64;
        let description = Description { key: input.key.clone(), given, algorithm, is_full, begun_ms };
        // Lists have the uploads of a key in the order of their ids.
        let id = format!("{begun_ms:016x}{}", &unique()[16..]);
        on_disk(|| {
            let folder = self.uploads(&input.bucket).join(&id);
            std::fs::create_dir_all(&folder).map_err(failed)?;
            let text = serde_json::to_vec(&description).map_err(S3Error::internal_error)?;
            let path = folder.join(DESCRIPTION);
            let written = File::create(&path).and_then(|mut file| file.write_all(&text).and_then(|()| file.sync_all()));
            written
                .and_then(|()| sync_folder(&folder))
                .and_then(|()| sync_folder(&self.uploads(&input.bucket)))
                .map_err(failed)
        })?;
        Ok(CreateMultipartUploadOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(id),
            checksum_algorithm: input.checksum_algorithm,
            checksum_type: input.checksum_type,
            ..CreateMultipartUploadOutput::default()
        })
    }

    pub(super) async fn upload_part(&self, input: UploadPartInput) -> S3Result<UploadPartOutput> {
        refuse!(input; sse_customer_key "encryption");
        check_number(input.part_number)?;
        let (folder, _) = self.upload(&input.bucket, &input.key, &input.upload_id)?;
        let mut draft = self.draft()?;
        let etag = draft.receive(input.body).await?;
        let sums = sums!(input);
        let record =
            on_disk(|| place_part(&folder, input.part_number, &draft, Record { etag, sums, ..Record::default() }))?;
        let sums = record.sums.to_checksum();
        Ok(UploadPartOutput {
            e_tag: Some(record.etag()),
            checksum_crc32: sums.checksum_crc32,
            checksum_crc32c: sums.checksum_crc32c,
            checksum_crc64nvme: sums.checksum_crc64nvme,
            checksum_sha1: sums.checksum_sha1,
            checksum_sha256: sums.checksum_sha256,
            ..UploadPartOutput::default()
        })
    }

    pub(super) async fn upload_part_copy(&self, input: UploadPartCopyInput) -> S3Result<UploadPartCopyOutput> {
        check_number(input.part_number)?;
        let (folder, _) = self.upload(&input.bucket, &input.key, &input.upload_id)?;
        let record = settled(|| {
            let (mut file, source) = self.copy_source(&input)?;
            let range = match &input.copy_source_range {
                None => 0..source.bytes,
                Some(text) => copied_range(text, source.bytes)?,
            };
            let mut draft = self.draft()?;
            file.seek(std::io::SeekFrom::Start(range.start)).map_err(failed)?;
            let (mut md5, mut rest) = (Md5::new(), (&file).take(range.end - range.start));
            let mut piece = vec![0; 1 << 20];
            loop {
                match rest.read(&mut piece).map_err(failed)? {
                    0 => break,
                    read => {
                        md5.update(&piece[..read]);
                        draft.file.write_all(&piece[..read]).map_err(failed)?;
                    }
                }
            }
            source.check_unchanged(&file).map_err(failed)?;
            let record = Record { etag: hex(md5.finalize().as_ref()), ..Record::default() };
            place_part(&folder, input.part_number, &draft, record)
        })
        .await?;
        let result = CopyPartResult {
            e_tag: Some(record.etag()),
            last_modified: Some(record.modified()),
            ..CopyPartResult::default()
        };
        Ok(UploadPartCopyOutput { copy_part_result: Some(result), ..UploadPartCopyOutput::default() })
    }

    pub(super) async fn abort_multipart_upload(
        &self,
        input: AbortMultipartUploadInput,
    ) -> S3Result<AbortMultipartUploadOutput> {
        let (folder, _) = self.upload(&input.bucket, &input.key, &input.upload_id)?;
        on_disk(|| std::fs::remove_dir_all(folder)).map_err(failed)?;
        Ok(AbortMultipartUploadOutput::default())
    }

    pub(super) async fn list_parts(&self, input: ListPartsInput) -> S3Result<ListPartsOutput> {
        let (folder, description) = self.upload(&input.bucket, &input.key, &input.upload_id)?;
        let (after, most) = (input.part_number_marker.unwrap_or_default(), most(input.max_parts)?);
        let names =
            on_disk(|| std::fs::read_dir(&folder)?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>());
        let numbers = names.map_err(failed)?.into_iter().filter_map(|name| name.to_str()?.parse().ok());
        let mut numbers: Vec<i32> = numbers.filter(|number| *number > after).collect();
        numbers.sort_unstable();
        let is_truncated = numbers.len() > most;
        numbers.truncate(most);
        let mut parts = Vec::new();
        for number in &numbers {
            let file = match File::open(folder.join(number.to_string())) {
                Err(error) if is_absent(&error) => continue,
                other => other.map_err(failed)?,
            };
            let record = settled(|| Record::read(&file).map_err(failed)).await?;
            let sums = record.sums.to_checksum();
            parts.push(s3s::dto::Part {
                part_number: Some(*number),
                e_tag: Some(record.etag()),
                last_modified: Some(record.modified()),
                size: Some(record.bytes as i64),
                checksum_crc32: sums.checksum_crc32,
                checksum_crc32c: sums.checksum_crc32c,
                checksum_crc64nvme: sums.checksum_crc64nvme,
                checksum_sha1: sums.checksum_sha1,
                checksum_sha256: sums.checksum_sha256,
            });
        }
        Ok(ListPartsOutput {
            bucket: Some(input.bucket),
            key: Some(input.key),
            upload_id: Some(input.upload_id),
            is_truncated: Some(is_truncated),
            max_parts: input.max_parts.or(Some(1000)),
            part_number_marker: input.part_number_marker,
            next_part_number_marker: numbers.last().copied().filter(|_| is_truncated),
            parts: Some(parts),
            owner: Some(owner()),
            checksum_algorithm: description.algorithm.map(Into::into),
            storage_class: Some(StorageClass::from_static(StorageClass::STANDARD)),
            ..ListPartsOutput::default()
        })
    }

    pub(super) async fn list_multipart_uploads(
        &self,
        input: ListMultipartUploadsInput,
    ) -> S3Result<ListMultipartUploadsOutput> {
        self.bucket(&input.bucket)?;
        let (texts, most) = (Texts::new(input.encoding_type.as_ref())?, most(input.max_uploads)?);
        let (prefix, delimiter) =
            (input.prefix.clone().unwrap_or_default(), input.delimiter.clone().unwrap_or_default());
        let after = (input.key_marker.clone().unwrap_or_default(), input.upload_id_marker.clone());
        // The first of the page, and the one behind it. Prefixes have no id.
        let mut found = BTreeMap::new();
        let folders = match std::fs::read_dir(self.uploads(&input.bucket)) {
            Err(error) if is_absent(&error) => None,
            other => Some(other.map_err(failed)?),
        };
        for entry in folders.into_iter().flatten() {
            let entry = entry.map_err(failed)?;
            let text = match std::fs::read(entry.path().join(DESCRIPTION)) {
                // It has just ended, or it was never begun.
                Err(error) if is_absent(&error) => continue,
                other => other.map_err(failed)?,
            };
            let Ok(description) = serde_json::from_slice::<Description>(&text) else { continue };
            let id = entry.file_name().to_string_lossy().into_owned();
            let is_behind = match &after.1 {
                None => description.key > after.0,
                Some(marker) => (&description.key, &id) > (&after.0, marker),
            };
            let Some(rest) = description.key.strip_prefix(&prefix).filter(|_| is_behind) else { continue };
            match rest.find(&delimiter).filter(|_| !delimiter.is_empty()) {
                // Clients continue behind a prefix with the prefix itself.
                Some(at) if after.0 == description.key[..prefix.len() + at + delimiter.len()] => {}
                Some(at) => {
                    let prefix = description.key[..prefix.len() + at + delimiter.len()].to_owned();
                    found.insert((prefix, String::new()), None);
                }
                None => {
                    found.insert((description.key.clone(), id), Some(description.begun()));
                }
            }
            if found.len() > most + 1 {
                found.pop_last();
            }
        }
        let is_truncated = found.len() > most;
        found = found.into_iter().take(most).collect();
        let next = found.last_key_value().filter(|_| is_truncated).map(|((key, id), _)| (texts.of(key), id.clone()));
        let (next_key, next_id) = next.unzip();
        let (mut uploads, mut prefixes) = (Vec::new(), Vec::new());
        for ((key, id), begun) in found {
            match begun {
                None => prefixes.push(CommonPrefix { prefix: Some(texts.of(&key)) }),
                Some(begun) => uploads.push(MultipartUpload {
                    key: Some(texts.of(&key)),
                    upload_id: Some(id),
                    initiated: Some(begun),
                    owner: Some(owner()),
                    storage_class: Some(StorageClass::from_static(StorageClass::STANDARD)),
                    ..MultipartUpload::default()
                }),
            }
        }
        Ok(ListMultipartUploadsOutput {
            bucket: Some(input.bucket),
            is_truncated: Some(is_truncated),
            uploads: Some(uploads),
            common_prefixes: Some(prefixes),
            prefix: input.prefix.map(|prefix| texts.of(&prefix)),
            delimiter: input.delimiter.map(|delimiter| texts.of(&delimiter)),
            encoding_type: input.encoding_type,
            key_marker: input.key_marker.map(|marker| texts.of(&marker)),
            upload_id_marker: input.upload_id_marker,
            next_key_marker: next_key,
            next_upload_id_marker: next_id,
            max_uploads: input.max_uploads.or(Some(1000)),
            request_charged: None,
        })
    }
}

fn check_number(number: i32) -> S3Result<()> {
    match number {
        1..=MOST_PARTS => Ok(()),
        _ => Err(s3_error!(InvalidArgument, "the part number is {number}, expected 1 to {MOST_PARTS}")),
    }
}

/// Make a file a part of an upload. It takes the place of an earlier part of this number.
fn place_part(folder: &Path, number: i32, draft: &Draft, record: Record) -> S3Result<Record> {
    let mut record = record.write(&draft.file)?;
    draft.file.sync_all().map_err(failed)?;
    let placed = draft.rename(&mut record, &folder.join(number.to_string())).and_then(|()| sync_folder(folder));
    placed.map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => s3_error!(NoSuchUpload, "the upload was completed or aborted"),
        _ => failed(error),
    })?;
    Ok(record)
}

/// Return the range that is copied, such as `bytes=0-9`. Unlike a range that is read, it must lie inside the source.
fn copied_range(text: &str, bytes: u64) -> S3Result<std::ops::Range<u64>> {
    let invalid_range = || s3_error!(InvalidArgument, "the copied range is `{text}`, expected bytes=first-last");
    let (first, last) =
        text.strip_prefix("bytes=").and_then(|range| range.split_once('-')).ok_or_else(invalid_range)?;
    let (first, last): (u64, u64) =
        (first.parse().map_err(|_| invalid_range())?, last.parse().map_err(|_| invalid_range())?);
    if first <= last && last < bytes {
        return Ok(first..last + 1);
    }
    let mut error = s3_error!(InvalidRange, "the copied range is `{text}`, but the source has {bytes} bytes");
    error.set_status_code(hyper::StatusCode::BAD_REQUEST); // As S3 does, unlike for ranges that are read.
    Err(error)
}
