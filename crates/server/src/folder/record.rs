//! What is kept of an object beside its bytes, in an extended attribute of its file.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::time::{Duration, SystemTime};

use s3s::dto::{Checksum, ChecksumType, ETag, Metadata, Timestamp, TimestampFormat};
use s3s::{S3Error, S3ErrorCode, S3Result, s3_error};
use serde::{Deserialize, Serialize};

use super::compared::{Compared, SLACK, changed_ns, compare, modified_ns};
use crate::meta::since_1970;

/// The code of a drive that is full. Sending the request again would not help.
pub const NO_SPACE: &str = "InsufficientStorage";
/// The type of an object that was put without one, as in S3.
pub const NO_TYPE: &str = "binary/octet-stream";
const ATTRIBUTE: &str = "user.penstock.object";
/// File systems allow attributes of about 4 KiB.
const MOST_BYTES: usize = 3800;

/// How often something is tried that a change of the file makes void.
const TRIES: usize = 3;

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
        $output.content_type =
            record.given.content_type.clone().or_else(|| Some($crate::folder::record::NO_TYPE.into()));
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
    /// The time at which something about the file was changed last, shortly before this was written. Nobody else knew the file then.
    pub changed_ns: i64,
    /// The same time when the file had the bytes that this describes, as far as this server knows.
    #[serde(skip)]
    pub seen_ns: i64,
    pub given: Given,
    pub sums: Sums,
    /// The upload that made the object, and the lengths of its parts if they fit.
    pub upload: Option<String>,
    pub parts: Option<Vec<u64>>,
    /// The checksums of the parts if they fit, by the algorithm of the object.
    pub parts_sums: Option<Vec<String>>,
}

impl Record {
    /// Read the record of a file. A file without one, or that was changed by other means, gets an ETag from its length and times.
    ///
    /// A file that kept its length and time, but was changed in some way, is read and compared with its ETag (`compared`). It is not changed by that.
    pub fn read(file: &File) -> io::Result<Record> {
        for _ in 0..TRIES {
            let (found, own) = Record::find(file)?;
            let Some(own) = own else { return Ok(Record::foreign(&found)) };
            let own = Record { seen_ns: changed_ns(&found), ..own };
            if own.is_fresh(&found) {
                return Ok(own);
            }
            match compare(file, &found, &own.etag, own.parts.as_deref())? {
                Compared::Same => return Ok(own),
                Compared::Other => return Ok(Record::foreign(&found)),
                Compared::Unknown => return Ok(Record { given: own.given, ..Record::foreign(&found) }),
                Compared::Changed => {}
            }
        }
        Err(changed())
    }

    /// Fail if anything about a file was changed since this was read: another program may have changed its bytes in their place, and restored its time.
    pub fn check_unchanged(&self, file: &File) -> io::Result<()> {
        if self.is_unchanged(&file.metadata()?) { Ok(()) } else { Err(changed()) }
    }

    /// Return whether nothing about a file was changed since this was read. What is only replaced or removed stays as it was while it is open.
    fn is_unchanged(&self, found: &fs::Metadata) -> bool {
        self.is_seen(found) || found.nlink() == 0 && self.has_times(found)
    }

    fn is_seen(&self, found: &fs::Metadata) -> bool {
        self.has_times(found) && changed_ns(found) == self.seen_ns
    }

    fn has_times(&self, found: &fs::Metadata) -> bool {
        found.len() == self.bytes && modified_ns(found) == self.modified_ns
    }

    /// Read a part of a file. Fails if the file has other bytes by then. A file with another mode or another link is compared with its ETag.
    pub fn read_part(&mut self, file: &File, begin: u64, bytes: usize) -> io::Result<Vec<u8>> {
        let mut piece = vec![0; bytes];
        for _ in 0..TRIES {
            match file.read_exact_at(&mut piece, begin) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => break,
                read => read?,
            }
            if self.is_unchanged(&file.metadata()?) {
                return Ok(piece);
            }
            let now = Record::read(file)?;
            if now.etag != self.etag {
                break;
            }
            // The part may be of another moment.
            self.seen_ns = now.seen_ns;
        }
        Err(changed())
    }

    /// Read the record of a file without reading its bytes.
    pub fn listed(file: &File) -> io::Result<Record> {
        let (found, own) = Record::find(file)?;
        Ok(own.unwrap_or_else(|| Record::foreign(&found)))
    }

    fn find(file: &File) -> io::Result<(fs::Metadata, Option<Record>)> {
        let found = file.metadata()?;
        let mut text = vec![0; MOST_BYTES];
        let record = match rustix::fs::fgetxattr(file, ATTRIBUTE, &mut text[..]) {
            Ok(length) => serde_json::from_slice::<Record>(&text[..length]).ok(),
            // It has none, or one of somebody else.
            Err(rustix::io::Errno::NODATA | rustix::io::Errno::RANGE) => None,
            // Without its record, the object would have another ETag and no metadata, and so would its copies.
            Err(error) => return Err(error.into()),
        };
        let own = record.filter(|record| record.is_sound() && record.has_times(&found));
        Ok((found, own))
    }

    /// Return whether a record is one that this server may have written.
    fn is_sound(&self) -> bool {
        let bytes = self.parts.iter().flatten().try_fold(0_u64, |all, bytes| all.checked_add(*bytes));
        let is_etag =
            self.etag.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') && !self.etag.is_empty();
        is_etag && (self.parts.is_none() || bytes == Some(self.bytes))
    }

    fn foreign(found: &fs::Metadata) -> Record {
        let (bytes, modified_ns) = (found.len(), modified_ns(found));
        let etag = format!("{:x}-{bytes:x}-{modified_ns:x}-{:x}", found.ino(), changed_ns(found));
        Record { etag, bytes, modified_ns, seen_ns: changed_ns(found), ..Record::default() }
    }

    /// Return whether nothing has changed a file since this was written.
    fn is_fresh(&self, found: &fs::Metadata) -> bool {
        changed_ns(found).abs_diff(self.changed_ns) <= SLACK.as_nanos() as u64
    }

    /// Write the record of a file whose bytes are complete, and that nobody else knows yet.
    pub fn write(mut self, file: &File) -> S3Result<Record> {
        let found = file.metadata().map_err(failed)?;
        (self.bytes, self.modified_ns, self.changed_ns) = (found.len(), modified_ns(&found), changed_ns(&found));
        self.put(file)?;
        Ok(self)
    }

    /// Write the record of a file again, just before the file comes to its place. If that takes longer than it may, the file is compared when somebody asks
    /// for it: what changes a file that others know is never taken for its own.
    pub fn renew(&mut self, file: &File) {
        // Most file systems have the clock of this machine.
        self.changed_ns = i64::try_from(since_1970().as_nanos()).unwrap_or(i64::MAX);
        for _ in 0..TRIES {
            let written = self.put(file);
            match file.metadata() {
                Ok(found) if written.is_ok() && !self.is_fresh(&found) => self.changed_ns = changed_ns(&found),
                _ => return,
            }
        }
    }

    fn put(&mut self, file: &File) -> S3Result<()> {
        let encode = |record: &Record| serde_json::to_vec(record).map_err(S3Error::internal_error);
        let mut text = encode(self)?;
        if text.len() > MOST_BYTES {
            self.parts_sums = None;
            text = encode(self)?;
        }
        if text.len() > MOST_BYTES {
            self.parts = None;
            text = encode(self)?;
        }
        let written = (text.len() <= MOST_BYTES)
            .then(|| rustix::fs::fsetxattr(file, ATTRIBUTE, &text, rustix::fs::XattrFlags::empty()));
        match written {
            Some(Ok(())) => Ok(()),
            None | Some(Err(rustix::io::Errno::TOOBIG)) => {
                Err(s3_error!(MetadataTooLarge, "the metadata has more than 3,800 bytes"))
            }
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

fn changed() -> io::Error {
    io::Error::new(io::ErrorKind::ResourceBusy, "the file changed while it was being read; try again")
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
/// Return `absent()` for a file that does not exist, and otherwise the error of a drive that failed: what cannot be read may exist.
pub fn absent_or_failed(error: io::Error, absent: impl FnOnce() -> S3Error) -> S3Error {
    if is_absent(&error) { absent() } else { failed(error) }
}

pub fn is_absent(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory)
}

pub fn failed(error: io::Error) -> S3Error {
    let answer = match error.kind() {
        io::ErrorKind::NotFound => s3_error!(NoSuchKey, "the object does not exist"),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => no_space(),
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            s3_error!(AccessDenied, "the folder cannot be written to: {error}")
        }
        // Trying again would not help.
        io::ErrorKind::IsADirectory => {
            s3_error!(InvalidRequest, "a folder has the name of the object's file; rename it, or remove it")
        }
        io::ErrorKind::ResourceBusy | io::ErrorKind::WouldBlock => s3_error!(ServiceUnavailable, "{error}"),
        _ => s3_error!(ServiceUnavailable, "the folder cannot be used: {error}"),
    };
    let mut answer = answer;
    answer.set_source(Box::new(error));
    answer
}

fn no_space() -> S3Error {
    let text = "the drive of the served folder is full; free space on it, or delete objects";
    let mut error = S3Error::with_message(S3ErrorCode::Custom(NO_SPACE.into()), text);
    error.set_status_code(hyper::StatusCode::INSUFFICIENT_STORAGE);
    error
}
