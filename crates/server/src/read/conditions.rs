//! Conditional requests. Source: RFC 9110, section 13.2.2.

use hyper::header::{self, HeaderMap, HeaderValue};
use s3s::dto::{ETag, ETagCondition, Timestamp, TimestampFormat};
use s3s::{S3Error, S3Result, s3_error};

use crate::meta::seconds;

/// Take the conditions of a read from its input.
macro_rules! conditions {
    ($input:expr) => {
        $crate::read::conditions::Conditions {
            matches: $input.if_match.as_ref(),
            none_match: $input.if_none_match.as_ref(),
            modified_since: $input.if_modified_since.as_ref(),
            unmodified_since: $input.if_unmodified_since.as_ref(),
        }
    };
}
pub(crate) use conditions;

/// The conditions of a request.
#[derive(Debug, Default, Clone, Copy)]
pub struct Conditions<'a> {
    pub matches: Option<&'a ETagCondition>,
    pub none_match: Option<&'a ETagCondition>,
    pub modified_since: Option<&'a Timestamp>,
    pub unmodified_since: Option<&'a Timestamp>,
}

fn is_same(condition: &ETagCondition, etag: &ETag, compare: fn(&ETag, &ETag) -> bool) -> bool {
    match condition {
        ETagCondition::Any => true,
        ETagCondition::ETag(given) => compare(given, etag),
    }
}

/// A response without a body, but with the headers of the version that the client has.
fn not_modified(etag: &ETag, modified: Option<&Timestamp>) -> S3Error {
    let mut headers = HeaderMap::new();
    if let Ok(value) = etag.to_http_header() {
        headers.insert(header::ETAG, value);
    }
    let mut date = Vec::new();
    if modified.is_some_and(|modified| modified.format(TimestampFormat::HttpDate, &mut date).is_ok())
        && let Ok(value) = HeaderValue::from_bytes(&date)
    {
        headers.insert(header::LAST_MODIFIED, value);
    }
    let mut error = s3_error!(NotModified, "Not Modified");
    error.set_headers(headers);
    error
}

impl Conditions<'_> {
    /// Fail with 412 or 304 unless a read of this version meets the conditions.
    pub fn check_read(&self, etag: &ETag, modified: Option<&Timestamp>) -> S3Result<()> {
        self.check_match(Some(etag))?;
        let is_newer = |since: &Timestamp| modified.is_some_and(|modified| seconds(modified) > seconds(since));
        if self.matches.is_none() && self.unmodified_since.is_some_and(is_newer) {
            return Err(s3_error!(PreconditionFailed, "the object was modified after If-Unmodified-Since"));
        }
        let is_unmodified = match (self.none_match, self.modified_since) {
            (Some(condition), _) => is_same(condition, etag, ETag::weak_cmp),
            (None, Some(since)) => modified.is_some() && !is_newer(since),
            (None, None) => false,
        };
        if is_unmodified {
            return Err(not_modified(etag, modified));
        }
        Ok(())
    }

    /// Fail with 404 or 412 unless a write over this version, if there is one, meets the conditions.
    pub fn check_write(&self, etag: Option<&ETag>) -> S3Result<()> {
        if etag.is_none() && self.matches.is_some() {
            return Err(s3_error!(NoSuchKey, "the object does not exist"));
        }
        self.check_match(etag)?;
        match (self.none_match, etag) {
            (Some(condition), Some(etag)) if is_same(condition, etag, ETag::weak_cmp) => {
                Err(s3_error!(PreconditionFailed, "the object exists"))
            }
            _ => Ok(()),
        }
    }

    fn check_match(&self, etag: Option<&ETag>) -> S3Result<()> {
        match self.matches {
            Some(condition) if !etag.is_some_and(|etag| is_same(condition, etag, ETag::strong_cmp)) => {
                Err(s3_error!(PreconditionFailed, "the object has another ETag than If-Match"))
            }
            _ => Ok(()),
        }
    }
}
