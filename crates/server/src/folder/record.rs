//! What is kept of an object beside its bytes, in an extended attribute of its file.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::time::{Duration, SystemTime};

use s3s::dto::{Checksum, ChecksumType, ETag, Metadata, Timestamp, TimestampFormat};
use s3s::{S3Error, S3Result, s3_error};
use serde::{Deserialize, Serialize};

const ATTRIBUTE: &str = "user.penstock.object";
/// File systems allow attributes of about 4 KiB.
const MOST_BYTES: usize = 3800;

/// Fields that a client gives with an object.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Given {
    pub content_type: Option<String>,
    pub cache_control: Option<String>,
    pub content_disposition: Option<String>,
    pub content_encoding: Option<String>,
    pub content_language: Option<String>,
    pub website_redirect_location: Option<String>,
    /// As an HTTP date.
    pub expires: Option<String>,
    pub metadata: Option<Metadata>,
}

/// Take the given fields from an input, or write them to an output.
macro_rules! given {
    ($from:expr) => {
        $crate::folder::record::Given {
            content_type: $from.content_type.clone().map(Into::into),
            cache_control: $from.cache_control.clone(),
            content_disposition: $from.content_disposition.clone(),
            content_encoding: $from.content_encoding.clone(),
            content_language: $from.content_language.clone(),
            website_redirect_location: $from.website_redirect_location.clone(),
            expires: $from.expires.as_ref().and_then($crate::folder::record::http_date),
            metadata: $from.metadata.clone(),
        }
    };
}
pub(crate) use given;

/// Write all that a HEAD or GET response says of an object into its output.
macro_rules! fill {
    ($output:ident, $record:expr) => {
        let record = $record;
        $output.content_type = record.given.content_type.clone();
        $output.cache_control = record.given.cache_control.clone();
        $output.content_disposition = record.given.content_disposition.clone();
        $output.content_encoding = record.given.content_encoding.clone();
        $output.content_language = record.given.content_language.clone();
        $output.website_redirect_location = record.given.website_redirect_location.clone();
        $output.expires = record.given.expires.as_deref().and_then($crate::folder::record::date_of);
        $output.metadata = record.given.metadata.clone();
        $output.e_tag = Some(record.etag());
        $output.last_modified = Some(record.modified());
        $output.accept_ranges = Some("bytes".into());
    };
}
pub(crate) use fill;

/// Write the checksums of an object into an output.
macro_rules! fill_sums {
    ($output:ident, $record:expr) => {
        let sums = $record.sums.to_checksum();
        $output.checksum_crc32 = sums.checksum_crc32;
        $output.checksum_crc32c = sums.checksum_crc32c;
        $output.checksum_crc64nvme = sums.checksum_crc64nvme;
        $output.checksum_sha1 = sums.checksum_sha1;
        $output.checksum_sha256 = sums.checksum_sha256;
        $output.checksum_type = sums.checksum_type;
    };
}
pub(crate) use fill_sums;

/// Take the checksums that a client gave from an input.
macro_rules! sums {
    ($input:expr) => {
        $crate::folder::record::Sums {
            crc32: $input.checksum_crc32.clone(),
            crc32c: $input.checksum_crc32c.clone(),
            crc64nvme: $input.checksum_crc64nvme.clone(),
            sha1: $input.checksum_sha1.clone(),
            sha256: $input.checksum_sha256.clone(),
            is_composite: false,
        }
    };
}
pub(crate) use sums;

/// Checksums, in base64.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sums {
    pub crc32: Option<String>,
    pub crc32c: Option<String>,
    pub crc64nvme: Option<String>,
    pub sha1: Option<String>,
    pub sha256: Option<String>,
    /// Whether they are those of the parts, put together.
    pub is_composite: bool,
}

impl Sums {
    pub fn of(sums: &Checksum) -> Sums {
        Sums {
            crc32: sums.checksum_crc32.clone(),
            crc32c: sums.checksum_crc32c.clone(),
            crc64nvme: sums.checksum_crc64nvme.clone(),
            sha1: sums.checksum_sha1.clone(),
            sha256: sums.checksum_sha256.clone(),
            is_composite: false,
        }
    }

    /// Return the checksum, if there is only one.
    pub fn first(&self) -> Option<&String> {
        [&self.crc32, &self.crc32c, &self.crc64nvme, &self.sha1, &self.sha256].into_iter().flatten().next()
    }

    pub fn is_empty(&self) -> bool {
        *self == Sums { is_composite: self.is_composite, ..Sums::default() }
    }

    pub fn to_checksum(&self) -> Checksum {
        let name = if self.is_composite { ChecksumType::COMPOSITE } else { ChecksumType::FULL_OBJECT };
        Checksum {
            checksum_crc32: self.crc32.clone(),
            checksum_crc32c: self.crc32c.clone(),
            checksum_crc64nvme: self.crc64nvme.clone(),
            checksum_sha1: self.sha1.clone(),
            checksum_sha256: self.sha256.clone(),
            checksum_type: (!self.is_empty()).then(|| ChecksumType::from_static(name)),
        }
    }
}

/// What is kept of an object.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Record {
    pub etag: String,
    /// Length and time of the file when this was written. A file that was changed by other means has others.
    pub bytes: u64,
    pub modified_ns: i64,
    pub given: Given,
    pub sums: Sums,
    /// The upload that made the object, and the lengths of its parts if they fit.
    pub upload: Option<String>,
    pub parts: Option<Vec<u64>>,
    /// The checksums of the parts if they fit, by the algorithm of the object.
    pub parts_sums: Option<Vec<String>>,
}

impl Record {
    /// Read the record of a file. A file without one, or that was changed by other means, gets an ETag from its length and time.
    pub fn read(file: &File) -> io::Result<Record> {
        let found = file.metadata()?;
        let (bytes, modified_ns) = (found.len(), found.mtime().saturating_mul(1_000_000_000).saturating_add(found.mtime_nsec()));
        let mut text = vec![0; MOST_BYTES];
        let record = match rustix::fs::fgetxattr(file, ATTRIBUTE, &mut text[..]) {
            Ok(length) => serde_json::from_slice::<Record>(&text[..length]).ok(),
            Err(_) => None,
        };
        let own = record.filter(|record| record.bytes == bytes && record.modified_ns == modified_ns);
        Ok(own.unwrap_or_else(|| Record {
            etag: format!("{:x}-{bytes:x}-{modified_ns:x}", found.ino()),
            bytes,
            modified_ns,
            ..Record::default()
        }))
    }

    /// Write the record of a file whose bytes are complete.
    pub fn write(mut self, file: &File) -> S3Result<Record> {
        let found = file.metadata().map_err(failed)?;
        (self.bytes, self.modified_ns) = (found.len(), found.mtime().saturating_mul(1_000_000_000).saturating_add(found.mtime_nsec()));
        let encode = |record: &Record| serde_json::to_vec(record).map_err(S3Error::internal_error);
        let mut text = encode(&self)?;
        if text.len() > MOST_BYTES {
            self.parts_sums = None;
            text = encode(&self)?;
        }
        if text.len() > MOST_BYTES {
            self.parts = None;
            text = encode(&self)?;
        }
        let written = (text.len() <= MOST_BYTES).then(|| rustix::fs::fsetxattr(file, ATTRIBUTE, &text, rustix::fs::XattrFlags::empty()));
        match written {
            Some(Ok(())) => Ok(self),
            None | Some(Err(rustix::io::Errno::TOOBIG)) => Err(s3_error!(MetadataTooLarge, "the metadata has more than 3,800 bytes")),
            Some(Err(error)) => Err(failed(error.into())),
        }
    }

    /// Return the checksums of a part, by its number from 1.
    pub fn part_sums(&self, number: usize) -> Sums {
        let sum = self.parts_sums.as_ref().and_then(|sums| sums.get(number.checked_sub(1)?)).cloned();
        let mut sums = Sums { is_composite: self.sums.is_composite, ..Sums::default() };
        let known = |whole: &Option<String>| sum.clone().filter(|_| whole.is_some());
        sums.crc32 = known(&self.sums.crc32);
        sums.crc32c = known(&self.sums.crc32c);
        sums.crc64nvme = known(&self.sums.crc64nvme);
        sums.sha1 = known(&self.sums.sha1);
        sums.sha256 = known(&self.sums.sha256);
        sums
    }

    /// Return the record with the checksums of a part, if one is named.
    pub fn of_part(&self, number: Option<i32>) -> Record {
        let number = number.filter(|_| self.parts.is_some()).and_then(|number| usize::try_from(number).ok());
        number.map_or_else(|| self.clone(), |number| Record { sums: self.part_sums(number), ..self.clone() })
    }

    pub fn etag(&self) -> ETag {
        ETag::Strong(self.etag.clone())
    }

    pub fn modified(&self) -> Timestamp {
        let after = Duration::from_nanos(u64::try_from(self.modified_ns).unwrap_or_default());
        Timestamp::from(SystemTime::UNIX_EPOCH + after)
    }
}

/// Return whether files below this folder can have records.
pub fn is_supported(file: &File) -> io::Result<()> {
    rustix::fs::fsetxattr(file, ATTRIBUTE, b"{}", rustix::fs::XattrFlags::empty()).map_err(Into::into)
}

pub fn http_date(time: &Timestamp) -> Option<String> {
    let mut text = Vec::new();
    time.format(TimestampFormat::HttpDate, &mut text).ok()?;
    String::from_utf8(text).ok()
}

pub fn date_of(text: &str) -> Option<Timestamp> {
    Timestamp::parse(TimestampFormat::HttpDate, text).ok()
}

/// Turn an error of the file system into a response.
pub fn failed(error: io::Error) -> S3Error {
    let answer = match error.kind() {
        io::ErrorKind::NotFound => s3_error!(NoSuchKey, "the object does not exist"),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => s3_error!(ServiceUnavailable, "the folder has no space left"),
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            s3_error!(AccessDenied, "the folder cannot be written: {error}")
        }
        _ => s3_error!(ServiceUnavailable, "the folder failed: {error}"),
    };
    let mut answer = answer;
    answer.set_source(Box::new(error));
    answer
}
