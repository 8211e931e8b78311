//! Conditional requests. Source: RFC 9110, section 13.2.2.

use hyper::Method;
use hyper::header::{
    self, HeaderMap, HeaderName, HeaderValue, IF_MATCH, IF_MODIFIED_SINCE, IF_NONE_MATCH, IF_UNMODIFIED_SINCE,
};
use s3s::dto::{ETag, ETagCondition, Timestamp, TimestampFormat};
use s3s::{S3Error, S3ErrorCode, S3Result, s3_error};

use crate::cold::OWNER;
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

/// Conditions that are dates, and all.
const DATES: [HeaderName; 2] = [IF_MODIFIED_SINCE, IF_UNMODIFIED_SINCE];
pub const ALL: [HeaderName; 4] = [IF_MATCH, IF_NONE_MATCH, IF_MODIFIED_SINCE, IF_UNMODIFIED_SINCE];

/// Write conditions as `s3s` reads them: lists of several lines in one, and dates in one form. What is not a date is removed. A client must expect that.
/// Source: RFC 9110, sections 5.3, 5.6.7, 13.1.3 and 13.1.4.
pub fn mend_conditions(headers: &mut HeaderMap) {
    for name in ALL.iter().filter(|name| headers.contains_key(*name)).cloned().collect::<Vec<_>>() {
        match mended(headers, &name) {
            Some(value) => drop(headers.insert(name, value)),
            None => drop(headers.remove(name)),
        }
    }
}

/// Return whether a condition is one that `s3s` does not read.
pub fn has_odd_conditions(headers: &HeaderMap) -> bool {
    ALL.iter().any(|name| headers.get(name).is_some_and(|given| mended(headers, name).as_ref() != Some(given)))
}

/// Return a condition in the form that `s3s` reads, or None if it is to be ignored.
fn mended(headers: &HeaderMap, name: &HeaderName) -> Option<HeaderValue> {
    let mut lines = headers.get_all(name).iter();
    let first = lines.next()?;
    if DATES.contains(name) {
        let time = first
            .to_str()
            .ok()
            .filter(|_| lines.next().is_none())
            .and_then(|text| httpdate::parse_http_date(text).ok())?;
        return HeaderValue::try_from(httpdate::fmt_http_date(time)).ok();
    }
    let rest = lines.flat_map(|line| [b", ", line.as_bytes()].concat());
    HeaderValue::from_bytes(&first.as_bytes().iter().copied().chain(rest).collect::<Vec<_>>()).ok()
}

/// All headers that are conditions of a write, beside those of reads. The conditions of DeleteObjects are in its body: `ETag`, `Size` and
/// `LastModifiedTime` of each object. The place at which an append begins is the length of the object, and so a condition, too.
const OF_WRITES: [&str; 9] = [
    "x-amz-copy-source-if-match", "x-amz-copy-source-if-modified-since", "x-amz-copy-source-if-none-match",
    "x-amz-copy-source-if-unmodified-since", "x-amz-if-match-initiated-time", "x-amz-if-match-last-modified-time",
    "x-amz-if-match-size", "x-amz-mp-object-size", "x-amz-write-offset-bytes",
];

/// Return the conditions that a write checks. Many stores ignore those of deletes, so that only a served folder checks them.
fn checked(operation: &str, is_folder: bool) -> &'static [&'static str] {
    match operation {
        "put_object" => &["if-match", "if-none-match"],
        "complete_multipart_upload" => &["if-match", "if-none-match", "x-amz-mp-object-size"],
        "copy_object" | "upload_part_copy" => &OF_WRITES[..4],
        "delete_object" if is_folder => &["if-match", "x-amz-if-match-last-modified-time", "x-amz-if-match-size"],
        _ => &[],
    }
}

/// Refuse a write with a condition that its operation does not check. Otherwise, a copy with `If-None-Match: *` would replace an object.
pub fn check_known(operation: &str, method: &Method, headers: &HeaderMap, is_folder: bool) -> S3Result<()> {
    if matches!(*method, Method::GET | Method::HEAD) {
        return Ok(());
    }
    let checked = checked(operation, is_folder);
    let all = ALL.iter().map(HeaderName::as_str).chain(OF_WRITES);
    all.into_iter()
        .find(|name| headers.contains_key(*name) && !checked.contains(name))
        .map_or(Ok(()), |name| Err(not_checked(name)))
}

/// Return the error for a condition that would not be checked.
pub fn not_checked(name: &str) -> S3Error {
    s3_error!(NotImplemented, "this operation does not support the condition `{name}`; omit it")
}

/// Fail if a request names another owner of the bucket of a served folder, or of the source of a copy.
pub fn check_owner(headers: &HeaderMap) -> S3Result<()> {
    let names = ["x-amz-expected-bucket-owner", "x-amz-source-expected-bucket-owner"];
    match names.iter().find(|name| headers.get(**name).is_some_and(|given| given != OWNER)) {
        Some(name) => {
            Err(s3_error!(AccessDenied, "`{name}` names another account: the owner of a served folder is `{OWNER}`"))
        }
        None => Ok(()),
    }
}

fn is_same(condition: &ETagCondition, etag: &ETag, compare: fn(&ETag, &ETag) -> bool) -> bool {
    match condition {
        ETagCondition::Any => true,
        ETagCondition::ETag(given) => compare(given, etag) || listed(given).iter().any(|one| compare(one, etag)),
    }
}

/// Return the ETags of a list. `s3s` takes it for one ETag, from the first quotation mark to the last.
fn listed(given: &ETag) -> Vec<ETag> {
    let text = given.value();
    if !text.contains('"') {
        return Vec::new();
    }
    let whole = format!("{}\"{text}\"", if matches!(given, ETag::Weak(_)) { "W/" } else { "" });
    let (mut rest, mut found) = (whole.as_str(), Vec::new());
    while let Some((before, (text, after))) =
        rest.split_once('"').and_then(|(before, rest)| Some((before, rest.split_once('"')?)))
    {
        let is_weak = before.trim_start_matches([',', ' ', '\t']) == "W/";
        found.push(if is_weak { ETag::Weak(text.to_owned()) } else { ETag::Strong(text.to_owned()) });
        rest = after;
    }
    found
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
    /// Check the conditions on the source of a copy. One that is not met is answered with 412, where a read would be answered with 304.
    pub fn check_copy(&self, etag: &ETag, modified: Option<&Timestamp>) -> S3Result<()> {
        match self.check_read(etag, modified) {
            Err(error) if *error.code() == S3ErrorCode::NotModified => {
                Err(s3_error!(PreconditionFailed, "the source of the copy does not meet the conditions"))
            }
            other => other,
        }
    }

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

    /// Return whether a write has any.
    pub fn of_write(&self) -> bool {
        self.matches.is_some() || self.none_match.is_some()
    }

    /// Fail with 404 or 412 unless a write over this version, if there is one, meets the conditions.
    pub fn check_write(&self, etag: Option<&ETag>) -> S3Result<()> {
        if etag.is_none() && self.matches.is_some() {
            return Err(s3_error!(NoSuchKey, "the object does not exist"));
        }
        self.check_match(etag)?;
        match (self.none_match, etag) {
            (Some(condition), Some(etag)) if is_same(condition, etag, ETag::weak_cmp) => {
                Err(s3_error!(PreconditionFailed, "the object already exists"))
            }
            _ => Ok(()),
        }
    }

    fn check_match(&self, etag: Option<&ETag>) -> S3Result<()> {
        match self.matches {
            Some(condition) if !etag.is_some_and(|etag| is_same(condition, etag, ETag::strong_cmp)) => {
                Err(s3_error!(PreconditionFailed, "the ETag of the object does not match If-Match"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_etag_of_a_list_counts() {
        let strong = |text: &str| ETag::Strong(text.to_owned());
        for (header, expected) in [
            ("\"a\", \"b\"", vec![strong("a"), strong("b")]),
            ("W/\"a\",\"b\",W/\"c\"", vec![ETag::Weak("a".into()), strong("b"), ETag::Weak("c".into())]),
            ("\"a, b\"", vec![]),
            ("\"\" , \"a\"", vec![strong(""), strong("a")]),
        ] {
            let Ok(given) = ETag::parse_http_header(header.as_bytes()) else { panic!("{header}") };
            assert_eq!(listed(&given), expected, "{header}");
        }
    }
}
