//! Completes uploads: joins their parts to an object, whose checksum and ETag follow from theirs.

use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::path::Path;

use s3s::checksum::ChecksumHasher;
use s3s::crypto::{Checksum as _, Crc32, Crc32c, Crc64Nvme, Md5, Sha1, Sha256};
use s3s::dto::*;
use s3s::{S3ErrorCode, S3Result, s3_error};

use super::record::{Record, Sums, absent_or_failed, failed, fill_sums, sums};
use super::uploads::Description;
use super::write::Draft;
use super::{Folder, settled};
use crate::read::conditions::Conditions;
use crate::upload::hex;

/// All parts but the last are at least this long, as in S3.
const LEAST_PART_BYTES: u64 = 5 << 20;

impl Folder {
    pub(super) async fn complete_multipart_upload(
        &self,
        input: CompleteMultipartUploadInput,
    ) -> S3Result<CompleteMultipartUploadOutput> {
        let record = settled(|| self.complete(&input)).await?;
        let mut output = CompleteMultipartUploadOutput {
            location: Some(format!("/{}/{}", input.bucket, input.key)),
            bucket: Some(input.bucket),
            key: Some(input.key),
            e_tag: Some(record.etag()),
            ..CompleteMultipartUploadOutput::default()
        };
        fill_sums!(output, record);
        Ok(output)
    }

    fn complete(&self, input: &CompleteMultipartUploadInput) -> S3Result<Record> {
        let (folder, description) = match self.upload(&input.bucket, &input.key, &input.upload_id) {
            Ok(found) => found,
            // The response to an earlier request may have been lost.
            Err(error) if *error.code() == S3ErrorCode::NoSuchUpload => {
                let done = match self.find(&input.bucket, &input.key) {
                    Ok((file, _)) => Some(Record::read(&file).map_err(failed)?),
                    Err(other) if *other.code() == S3ErrorCode::NoSuchKey => None,
                    Err(other) => return Err(other),
                };
                return done.filter(|record| record.upload.as_deref() == Some(&input.upload_id)).ok_or(error);
            }
            Err(error) => return Err(error),
        };
        let asked = input.multipart_upload.as_ref().and_then(|upload| upload.parts.as_deref()).unwrap_or_default();
        let parts = self.parts_of(&folder, asked)?;
        let mut draft = self.draft()?;
        let mut md5 = Md5::new();
        for (file, record) in &parts {
            std::io::copy(&mut &*file, &mut draft.file).map_err(failed)?;
            md5.update(&bytes_of_hex(&record.etag));
        }
        let bytes: u64 = parts.iter().map(|(_, record)| record.bytes).sum();
        if input.mpu_object_size.is_some_and(|size| u64::try_from(size).ok() != Some(bytes)) {
            return Err(s3_error!(InvalidRequest, "the parts have {bytes} bytes"));
        }
        let sums = sums_of(&description, &parts, &mut draft)?;
        let given = sums!(input);
        // Clients may leave the number of parts out.
        let differs = |given: &Option<String>, found: &Option<String>| {
            given.as_ref().is_some_and(|given| {
                found.as_ref().is_some_and(|found| found != given && found.split('-').next() != Some(given))
            })
        };
        if differs(&given.crc32, &sums.crc32)
            || differs(&given.crc32c, &sums.crc32c)
            || differs(&given.crc64nvme, &sums.crc64nvme)
            || differs(&given.sha1, &sums.sha1)
            || differs(&given.sha256, &sums.sha256)
        {
            return Err(s3_error!(BadDigest, "the checksum does not match the parts"));
        }
        let record = Record {
            etag: format!("{}-{}", hex(md5.finalize().as_ref()), parts.len()),
            given: description.given,
            sums,
            upload: Some(input.upload_id.clone()),
            parts: Some(parts.iter().map(|(_, record)| record.bytes).collect()),
            parts_sums: parts.iter().map(|(_, record)| record.sums.first().cloned()).collect(),
            ..Record::default()
        };
        let conditions = Conditions {
            matches: input.if_match.as_ref(),
            none_match: input.if_none_match.as_ref(),
            ..Conditions::default()
        };
        let record = self.place(&input.bucket, &input.key, &draft, record, conditions)?;
        // What is left of the upload takes space, but nothing depends on it.
        let _ = std::fs::remove_dir_all(&folder);
        Ok(record)
    }

    /// Open the parts that an upload is completed with.
    fn parts_of(&self, folder: &Path, asked: &[CompletedPart]) -> S3Result<Vec<(File, Record)>> {
        if asked.is_empty() {
            return Err(s3_error!(MalformedXML, "an upload needs at least one part"));
        }
        let numbers = asked.iter().map(|part| part.part_number.unwrap_or_default());
        if let Some((last, number)) = numbers.clone().zip(numbers.skip(1)).find(|(last, number)| number <= last) {
            return Err(s3_error!(InvalidPartOrder, "part {number} follows part {last}"));
        }
        let mut parts = Vec::new();
        for (at, part) in asked.iter().enumerate() {
            let number = part.part_number.unwrap_or_default();
            let missing = || s3_error!(InvalidPart, "part {number} does not exist");
            let file = File::open(folder.join(number.to_string())).map_err(|error| absent_or_failed(error, missing))?;
            let record = Record::read(&file).map_err(failed)?;
            if part.e_tag.as_ref().is_some_and(|etag| etag.value() != record.etag) {
                return Err(s3_error!(InvalidPart, "part {number} has the ETag \"{}\"", record.etag));
            }
            if record.bytes < LEAST_PART_BYTES && at + 1 < asked.len() {
                return Err(s3_error!(
                    EntityTooSmall,
                    "part {number} has {} bytes; every part except the last needs at least 5 MiB",
                    record.bytes
                ));
            }
            parts.push((file, record));
        }
        Ok(parts)
    }
}

fn bytes_of_hex(text: &str) -> Vec<u8> {
    text.as_bytes().chunks(2).filter_map(|pair| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok()).collect()
}

/// Compute the checksum that an upload was begun with: of the whole object, or of the checksums of its parts.
fn sums_of(description: &Description, parts: &[(File, Record)], draft: &mut Draft) -> S3Result<Sums> {
    let Some(algorithm) = description.algorithm.as_deref() else { return Ok(Sums::default()) };
    let mut hasher = ChecksumHasher::default();
    match algorithm {
        "CRC32" => hasher.crc32 = Some(Crc32::new()),
        "CRC32C" => hasher.crc32c = Some(Crc32c::new()),
        "CRC64NVME" => hasher.crc64nvme = Some(Crc64Nvme::new()),
        "SHA1" => hasher.sha1 = Some(Sha1::new()),
        "SHA256" => hasher.sha256 = Some(Sha256::new()),
        _ => return Err(s3_error!(InvalidRequest, "the checksum algorithm `{algorithm}` is not known")),
    }
    if description.is_full {
        draft.file.seek(std::io::SeekFrom::Start(0)).map_err(failed)?;
        let mut piece = vec![0; 1 << 20];
        loop {
            match draft.file.read(&mut piece).map_err(failed)? {
                0 => return Ok(Sums::of(&hasher.finalize())),
                read => hasher.update(&piece[..read]),
            }
        }
    }
    for (number, (_, record)) in parts.iter().enumerate() {
        let sums = &record.sums;
        let of_part = sums.first().and_then(|sum| base64_simd::STANDARD.decode_to_vec(sum).ok());
        let missing = || {
            s3_error!(InvalidRequest, "part {} of the list was uploaded without its {algorithm} checksum", number + 1)
        };
        hasher.update(&of_part.ok_or_else(missing)?);
    }
    let mut sums = Sums::of(&hasher.finalize());
    for sum in
        [&mut sums.crc32, &mut sums.crc32c, &mut sums.crc64nvme, &mut sums.sha1, &mut sums.sha256].into_iter().flatten()
    {
        *sum = format!("{sum}-{}", parts.len());
    }
    sums.is_composite = true;
    Ok(sums)
}
