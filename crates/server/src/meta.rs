//! What the server knows of an object beside its bytes: the fields of a HEAD response.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant, SystemTime};

use s3s::dto::{ETag, GetObjectOutput, HeadObjectOutput, Timestamp};

mod note;

/// A state on a drive is written again when it is this old. So its age is about right after the server has started again.
const NOTE_SECONDS: u64 = 3600;
/// The time of a note that does not exist.
const NO_NOTE: u64 = u64::MAX;

/// The state of an object at one moment.
#[derive(Debug)]
pub struct Meta {
    /// The response to a HEAD request, with the length of the whole object.
    pub head: HeadObjectOutput,
    pub etag: ETag,
    pub bytes: u64,
    /// When the cold store was asked. None if that is not known.
    seen: Option<Instant>,
    /// Whether all writes of the object through the server since then are known. A note on a drive may be older than the last one.
    pub is_believed: bool,
    /// Whether a drive had it, instead of an answer of the cold store.
    pub was_on_drive: bool,
    /// When it was written beside its pages, in seconds since 1970.
    noted: AtomicU64,
    /// Whether it was proven that the object never changes.
    proven: AtomicBool,
    /// Whether `head` has the checksums of the object, if it has any.
    pub knows_sums: bool,
}

/// Copy fields of these names from one output into another.
macro_rules! copied {
    ($from:expr => $to:ident; $($name:ident)*) => { $to { $($name: $from.$name.clone(),)* ..$to::default() } };
}
pub(crate) use copied;

/// The fields that responses to GET and HEAD share, without those that depend on the range.
macro_rules! shared {
    ($from:expr => $to:ident) => {
        copied!($from => $to; accept_ranges cache_control checksum_crc32 checksum_crc32c checksum_crc64nvme checksum_sha1 checksum_sha256
            checksum_type content_disposition content_encoding content_language content_type e_tag expires last_modified metadata
            missing_meta parts_count restore server_side_encryption ssekms_key_id storage_class version_id
            website_redirect_location)
    };
}

impl Meta {
    /// Take the state from a HEAD response. Returns None without a strong ETag or a length, because such an object cannot be cached.
    pub fn of_head(head: HeadObjectOutput) -> Option<Meta> {
        let etag = head
            .e_tag
            .clone()
            .filter(|etag| matches!(etag, ETag::Strong(text) if !text.is_empty() && !text.contains('\n')))?;
        let bytes = u64::try_from(head.content_length?).ok()?;
        Some(Meta {
            head,
            etag,
            bytes,
            seen: Some(Instant::now()),
            is_believed: true,
            was_on_drive: false,
            noted: NO_NOTE.into(),
            proven: false.into(),
            knows_sums: true,
        })
    }

    /// Take the state from the response to a GET request of a range. Checksums in it are those of the whole object or absent.
    pub fn of_get(output: &GetObjectOutput) -> Option<Meta> {
        let bytes = match &output.content_range {
            Some(range) => range.rsplit_once('/')?.1.parse().ok()?,
            None => u64::try_from(output.content_length?).ok()?,
        };
        let head =
            HeadObjectOutput { content_length: i64::try_from(bytes).ok(), ..shared!(output => HeadObjectOutput) };
        // A response to a range may leave checksums out.
        Meta::of_head(head).map(|meta| Meta { knows_sums: false, ..meta })
    }

    /// Return how long ago the cold store was asked.
    pub fn age(&self) -> Option<Duration> {
        self.seen.map(|seen| seen.elapsed())
    }

    /// Return about how much memory it takes.
    pub fn held_bytes(&self) -> u64 {
        let texts = self.head.metadata.iter().flatten().map(|(name, value)| 64 + name.len() + value.len());
        (size_of::<Meta>() + 256 + texts.sum::<usize>()) as u64
    }

    /// Note that it was written beside its pages.
    pub fn was_noted(&self) {
        self.noted.store(since_1970().as_secs(), Relaxed);
    }

    /// Take over when the same version was written beside its pages, and whether it never changes.
    pub fn is_noted_as(&self, other: &Meta) {
        self.noted.store(other.noted.load(Relaxed), Relaxed);
        self.proven.store(other.is_proven(), Relaxed);
    }

    /// Note that the object never changes. Returns whether that was not known.
    pub fn prove(&self) -> bool {
        !self.proven.swap(true, Relaxed)
    }

    pub fn is_proven(&self) -> bool {
        self.proven.load(Relaxed)
    }

    /// Return whether it is beside its pages.
    pub fn is_noted(&self) -> bool {
        self.noted.load(Relaxed) != NO_NOTE
    }

    /// Return whether it is not beside its pages, or was written there long ago.
    pub fn needs_note(&self) -> bool {
        !self.is_noted() || since_1970().as_secs().saturating_sub(self.noted.load(Relaxed)) >= NOTE_SECONDS
    }

    /// Return the response to a GET request, without a body.
    pub fn to_get(&self) -> GetObjectOutput {
        shared!(self.head => GetObjectOutput)
    }
}

/// Return the time of this machine.
pub fn since_1970() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}

/// HTTP dates have whole seconds.
pub fn seconds(time: &Timestamp) -> i64 {
    time::OffsetDateTime::from(time.clone()).unix_timestamp()
}

/// The name of an object.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Object {
    pub bucket: String,
    pub key: String,
}

impl Object {
    pub fn new(bucket: &str, key: &str) -> Object {
        Object { bucket: bucket.into(), key: key.into() }
    }

    /// Return the beginning of the names of its versions. It has neither line breaks, which separate the parts of a cache's keys, nor `?`.
    pub fn name(&self) -> String {
        let key = self.key.replace('%', "%25").replace('\n', "%0A").replace('?', "%3F");
        format!("{}/{key}", self.bucket)
    }

    /// Return whether `bucket/key` begins with a text.
    pub fn begins_with(&self, prefix: &str) -> bool {
        match prefix.strip_prefix(self.bucket.as_str()).and_then(|rest| rest.strip_prefix('/')) {
            Some(rest) => self.key.starts_with(rest),
            None => false,
        }
    }
}

/// A version of an object. Its bytes never change, so they can be cached.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Version {
    pub object: Object,
    etag: String,
    /// Length and time of the object. ETags are MD5 digests, of which two objects may have the same.
    stamp: String,
}

impl Version {
    pub fn new(object: &Object, meta: &Meta) -> Version {
        let modified = meta.head.last_modified.as_ref().map_or(0, seconds);
        Version {
            object: object.clone(),
            etag: meta.etag.value().to_owned(),
            stamp: format!("{}-{modified}", meta.bytes),
        }
    }

    pub fn etag(&self) -> ETag {
        ETag::Strong(self.etag.clone())
    }

    /// Return the name under which the version is cached.
    pub fn name(&self) -> String {
        format!("{}?{}?{}", self.object.name(), self.stamp, self.etag)
    }

    /// Return the version of a name.
    pub fn parse(name: &str) -> Option<Version> {
        let (path, version) = name.split_once('?')?;
        let (stamp, etag) = version.split_once('?')?;
        let (bucket, key) = path.split_once('/')?;
        let key = key.replace("%3F", "?").replace("%0A", "\n").replace("%25", "%");
        Some(Version { object: Object::new(bucket, &key), etag: etag.to_owned(), stamp: stamp.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_versions_are_read_back() {
        for key in ["a", "a/b", "/", "a?b", "%3F", "%253F?", "line\nbreak", "ü"] {
            let version = Version { object: Object::new("bucket", key), etag: "0123?-4".into(), stamp: "7-8".into() };
            assert!(!version.name().contains('\n'));
            assert_eq!(Version::parse(&version.name()), Some(version));
        }
    }
}
