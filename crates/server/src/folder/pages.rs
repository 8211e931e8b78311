//! The two listings of S3, from pages of `listing`.

use std::fs::File;
use std::io;
use std::path::Path;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use s3s::dto::*;
use s3s::{S3Result, s3_error};

use super::buckets::owner;
use super::listing::{Found, Listed, Query, list};
use super::names::SELF;
use super::record::{Record, failed};
use super::{Folder, on_disk, open_below};

const MOST_KEYS: i32 = 1000;
/// What stays as it is in keys that are encoded for a listing.
const KEPT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'/').remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Texts of a listing, encoded if the client asked for it.
pub struct Texts(bool);

impl Texts {
    pub fn new(encoding: Option<&EncodingType>) -> S3Result<Texts> {
        match encoding.map(EncodingType::as_str) {
            None => Ok(Texts(false)),
            Some(EncodingType::URL) => Ok(Texts(true)),
            Some(other) => Err(s3_error!(InvalidArgument, "the encoding type `{other}` is not known")),
        }
    }

    pub fn of(&self, text: &str) -> String {
        if self.0 { utf8_percent_encode(text, KEPT).to_string() } else { text.to_owned() }
    }
}

pub fn most(asked: Option<i32>) -> S3Result<usize> {
    let most = asked.unwrap_or(MOST_KEYS).min(MOST_KEYS);
    usize::try_from(most).map_err(|_| s3_error!(InvalidArgument, "max-keys is {most}, expected 0 or more"))
}

impl Folder {
    /// Open the file of a listed object. It may be the object of a folder by now.
    fn open_listed(&self, path: &Path) -> io::Result<File> {
        let below = path.strip_prefix(&self.root).map_err(io::Error::other)?;
        let file = open_below(&self.handle, below)?;
        if file.metadata()?.is_dir() { open_below(&self.handle, &below.join(SELF)) } else { Ok(file) }
    }

    /// Return a page: its objects, its common prefixes, and where the next one begins.
    fn page(
        &self,
        bucket: &str,
        query: &Query,
        texts: &Texts,
        with_owner: bool,
    ) -> S3Result<(Vec<Object>, Vec<CommonPrefix>, Option<String>)> {
        let folder = self.bucket(bucket)?;
        let Listed { found, is_truncated } = on_disk(|| list(&folder, query, &self.left_out)).map_err(failed)?;
        let next = found.last().filter(|_| is_truncated).map(|last| last.text().to_owned());
        let (mut objects, mut prefixes) = (Vec::new(), Vec::new());
        for entry in found {
            let (key, path) = match entry {
                Found::Prefix(prefix) => {
                    prefixes.push(CommonPrefix { prefix: Some(texts.of(&prefix)) });
                    continue;
                }
                Found::Object(key, path) => (key, path),
            };
            let record = match on_disk(|| self.open_listed(&path).and_then(|file| Record::listed(&file))) {
                // It was deleted in the meantime.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                other => other.map_err(failed)?,
            };
            objects.push(Object {
                key: Some(texts.of(&key)),
                e_tag: Some(record.etag()),
                last_modified: Some(record.modified()),
                size: Some(record.bytes as i64),
                owner: with_owner.then(owner),
                storage_class: Some(ObjectStorageClass::from_static(ObjectStorageClass::STANDARD)),
                ..Object::default()
            });
        }
        Ok((objects, prefixes, next))
    }

    pub(super) async fn list_objects(&self, input: ListObjectsInput) -> S3Result<ListObjectsOutput> {
        let texts = Texts::new(input.encoding_type.as_ref())?;
        let query = Query {
            prefix: input.prefix.clone().unwrap_or_default(),
            delimiter: input.delimiter.clone().unwrap_or_default(),
            after: input.marker.clone().unwrap_or_default(),
            most: most(input.max_keys)?,
        };
        let (objects, prefixes, next) = self.page(&input.bucket, &query, &texts, true)?;
        Ok(ListObjectsOutput {
            name: Some(input.bucket),
            // Clients do not decode this one.
            prefix: Some(query.prefix.clone()),
            marker: Some(texts.of(&query.after)),
            max_keys: input.max_keys.or(Some(MOST_KEYS)),
            is_truncated: Some(next.is_some()),
            contents: Some(objects),
            common_prefixes: Some(prefixes),
            // Without a delimiter, clients take the last key.
            next_marker: next.filter(|_| !query.delimiter.is_empty()).map(|next| texts.of(&next)),
            delimiter: input.delimiter.filter(|delimiter| !delimiter.is_empty()).map(|delimiter| texts.of(&delimiter)),
            encoding_type: input.encoding_type,
            request_charged: None,
        })
    }

    pub(super) async fn list_objects_v2(&self, input: ListObjectsV2Input) -> S3Result<ListObjectsV2Output> {
        let texts = Texts::new(input.encoding_type.as_ref())?;
        let continued = input.continuation_token.as_deref().map(from_token).transpose()?;
        let query = Query {
            prefix: input.prefix.clone().unwrap_or_default(),
            delimiter: input.delimiter.clone().unwrap_or_default(),
            after: continued.or_else(|| input.start_after.clone()).unwrap_or_default(),
            most: most(input.max_keys)?,
        };
        let (objects, prefixes, next) =
            self.page(&input.bucket, &query, &texts, input.fetch_owner.unwrap_or_default())?;
        Ok(ListObjectsV2Output {
            name: Some(input.bucket),
            prefix: Some(texts.of(&query.prefix)),
            max_keys: input.max_keys.or(Some(MOST_KEYS)),
            key_count: i32::try_from(objects.len() + prefixes.len()).ok(),
            continuation_token: input.continuation_token,
            is_truncated: Some(next.is_some()),
            next_continuation_token: next.map(|next| token(&next)),
            contents: Some(objects),
            common_prefixes: Some(prefixes),
            delimiter: input.delimiter.filter(|delimiter| !delimiter.is_empty()).map(|delimiter| texts.of(&delimiter)),
            encoding_type: input.encoding_type,
            start_after: input.start_after.map(|after| texts.of(&after)),
            request_charged: None,
        })
    }
}

impl Folder {
    /// List the only version of each object.
    pub(super) async fn list_object_versions(
        &self,
        input: ListObjectVersionsInput,
    ) -> S3Result<ListObjectVersionsOutput> {
        let texts = Texts::new(input.encoding_type.as_ref())?;
        let query = Query {
            prefix: input.prefix.clone().unwrap_or_default(),
            delimiter: input.delimiter.clone().unwrap_or_default(),
            after: input.key_marker.clone().unwrap_or_default(),
            most: most(input.max_keys)?,
        };
        let (objects, prefixes, next) = self.page(&input.bucket, &query, &texts, true)?;
        let version = |object: Object| ObjectVersion {
            key: object.key,
            e_tag: object.e_tag,
            last_modified: object.last_modified,
            size: object.size,
            owner: object.owner,
            is_latest: Some(true),
            version_id: Some("null".into()),
            storage_class: Some(ObjectVersionStorageClass::from_static(ObjectVersionStorageClass::STANDARD)),
            ..ObjectVersion::default()
        };
        Ok(ListObjectVersionsOutput {
            name: Some(input.bucket),
            versions: Some(objects.into_iter().map(version).collect()),
            common_prefixes: Some(prefixes),
            prefix: Some(texts.of(&query.prefix)),
            key_marker: Some(texts.of(&query.after)),
            max_keys: input.max_keys.or(Some(MOST_KEYS)),
            is_truncated: Some(next.is_some()),
            next_version_id_marker: next.as_ref().map(|_| "null".into()),
            next_key_marker: next.map(|next| texts.of(&next)),
            delimiter: input.delimiter.filter(|delimiter| !delimiter.is_empty()).map(|delimiter| texts.of(&delimiter)),
            encoding_type: input.encoding_type,
            ..ListObjectVersionsOutput::default()
        })
    }
}

fn token(key: &str) -> String {
    base64_simd::URL_SAFE_NO_PAD.encode_to_string(key)
}

fn from_token(token: &str) -> S3Result<String> {
    let key = base64_simd::URL_SAFE_NO_PAD.decode_to_vec(token).ok().and_then(|key| String::from_utf8(key).ok());
    key.ok_or_else(|| s3_error!(InvalidArgument, "the continuation token was not issued by this server"))
}
