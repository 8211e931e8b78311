//! Who may do what: access keys from a file, each with its secret and its rights.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock};

use hyper::Uri;
use penstock_error::{Error, Result};
use s3s::access::{S3Access, S3AccessContext};
use s3s::auth::{S3Auth, SecretKey};
use s3s::path::S3Path;
use s3s::{S3Result, s3_error};

use crate::authentication::parameter;
use crate::limits::rate::{Rates, Slot};
use crate::operations::{Access, access_of};
use serde::Deserialize;

/// The longest time for which a signed URL may be valid, as in S3.
const MOST_EXPIRES_SECONDS: u64 = 7 * 24 * 3600;

/// What a key may do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rights {
    pub read_only: bool,
    /// Beginnings of `bucket/key` that may be used, or None for everything.
    pub prefixes: Option<Vec<String>>,
}

impl Rights {
    pub const ALL: Rights = Rights { read_only: false, prefixes: None };

    /// Return whether an object, or all objects with a prefix, may be used.
    pub fn allow(&self, bucket: &str, key: &str) -> bool {
        let path = format!("{bucket}/{key}");
        let begins = |prefix: &String| path.starts_with(prefix.as_str()) && is_literal(key);
        self.prefixes.as_ref().is_none_or(|prefixes| prefixes.iter().any(begins))
    }

    /// Return whether some object of a bucket may be used, so that the key may know of the bucket.
    pub fn know(&self, bucket: &str) -> bool {
        let path = format!("{bucket}/");
        let knows = |prefix: &String| prefix.starts_with(&path) || path.starts_with(prefix.as_str());
        self.prefixes.as_ref().is_none_or(|prefixes| prefixes.iter().any(knows))
    }

    /// Fail with 403 unless an object may be used.
    pub fn check(&self, bucket: &str, key: &str) -> S3Result<()> {
        if self.allow(bucket, key) {
            Ok(())
        } else {
            Err(s3_error!(AccessDenied, "this key has no permissions for `{bucket}/{key}`"))
        }
    }

    fn check_operation(&self, operation: &str, path: &S3Path, uri: &Uri) -> S3Result<()> {
        if self.read_only && matches!(access_of(operation), Access::Write | Access::WriteEach) {
            return Err(s3_error!(AccessDenied, "this key may only read"));
        }
        match path {
            S3Path::Root => Ok(()),
            S3Path::Object { bucket, key } => self.check(bucket, key),
            S3Path::Bucket { bucket } => match access_of(operation) {
                Access::Write => self.check(bucket, ""),
                Access::List => self.check(bucket, &parameter(uri, "prefix").unwrap_or_default()),
                Access::Read | Access::WriteEach if self.know(bucket) => Ok(()),
                Access::Read | Access::WriteEach => {
                    Err(s3_error!(AccessDenied, "this key has no permissions for `{bucket}`"))
                }
            },
        }
    }
}

/// Return whether no cold store can take a key for another one. Some follow `..` in lists of keys to delete.
fn is_literal(key: &str) -> bool {
    key.split('/').all(|part| !matches!(part, "." | ".."))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyFile {
    keys: Vec<KeyEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KeyEntry {
    access_key: String,
    secret_key: String,
    #[serde(default)]
    read_only: bool,
    prefixes: Option<Vec<String>>,
    requests_per_second: Option<serde_json::Value>,
    bytes_per_second: Option<serde_json::Value>,
}

/// What is known of a key.
#[derive(Clone)]
struct Known {
    secret: SecretKey,
    rights: Arc<Rights>,
    rates: Option<Arc<Rates>>,
}

type ByKey = HashMap<String, Known>;

/// The keys of a file. Clones share them.
#[derive(Clone)]
pub struct Keys {
    path: PathBuf,
    only: Option<String>,
    known: Arc<RwLock<Arc<ByKey>>>,
    /// Whether any key has a rate.
    have_rates: Arc<AtomicBool>,
}

impl Keys {
    /// Read a file of keys.
    /// `only` is the bucket that is served, if it is only one.
    pub fn open(path: &Path, only: Option<&str>) -> Result<Keys> {
        let known = read(path, only, &ByKey::new())?;
        let have_rates = Arc::new(AtomicBool::new(has_rates(&known)));
        Ok(Keys {
            path: path.into(),
            only: only.map(str::to_owned),
            known: Arc::new(RwLock::new(Arc::new(known))),
            have_rates,
        })
    }

    /// Read the file again. If it is not valid, the keys stay as they are.
    pub fn reload(&self) -> Result<()> {
        let before = self.known.read().unwrap_or_else(PoisonError::into_inner).clone();
        let known = Arc::new(read(&self.path, self.only.as_deref(), &before)?);
        self.have_rates.store(has_rates(&known), Relaxed);
        *self.known.write().unwrap_or_else(PoisonError::into_inner) = known;
        Ok(())
    }

    /// Return the rights of the key that has signed a request. Fails without one, if it is not known, or if it sends too many requests.
    pub fn admit(&self, key: Option<&str>, extensions: &hyper::http::Extensions) -> S3Result<Arc<Rights>> {
        let key = key.ok_or_else(|| s3_error!(AccessDenied, "requests must be signed"))?;
        let known = self.get(key).ok_or_else(|| s3_error!(InvalidAccessKeyId, "the access key is unknown"))?;
        if let (Some(rates), Some(slot)) = (&known.rates, extensions.get::<Slot>()) {
            slot.admit(rates)?;
        }
        Ok(known.rights)
    }

    /// Return the secret of a key, if it is known.
    pub fn secret_of(&self, key: &str) -> Option<SecretKey> {
        self.get(key).map(|known| known.secret)
    }

    /// Return whether any key has a rate.
    pub fn have_rates(&self) -> bool {
        self.have_rates.load(Relaxed)
    }

    fn get(&self, key: &str) -> Option<Known> {
        self.known.read().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }
}

fn has_rates(known: &ByKey) -> bool {
    known.values().any(|known| known.rates.is_some())
}

/// Read a file of keys. Rates that are the same as before are kept, with what was used of them.
fn read(path: &Path, only: Option<&str>, before: &ByKey) -> Result<ByKey> {
    let invalid = |why: String| {
        Error::new("invalid-argument", format!("cannot use the keys in `{}`: {why}", path.display()))
            .hint("write {\"keys\": [{\"access_key\": \"...\", \"secret_key\": \"...\", \"read_only\": false, \"prefixes\": [\"bucket/folder/\"], \"requests_per_second\": 100, \"bytes_per_second\": 50000000}]}")
    };
    let text = penstock_storage::private::read_secret(path).map_err(invalid)?;
    let file: KeyFile = serde_json::from_slice(&text).map_err(|error| invalid(error.to_string()))?;
    let mut known = ByKey::new();
    for entry in file.keys {
        if entry.access_key.is_empty() || entry.secret_key.len() < 8 {
            return Err(invalid(format!(
                "key `{}` needs a name and a secret of at least 8 characters",
                entry.access_key
            )));
        }
        for prefix in entry.prefixes.iter().flatten() {
            let bucket = only
                .map(|only| format!("{only}/"))
                .filter(|bucket| !prefix.starts_with(bucket) && !bucket.starts_with(prefix));
            if let Some(bucket) = bucket {
                let key = &entry.access_key;
                return Err(invalid(format!(
                    "prefix `{prefix}` of key `{key}` allows nothing, because only `{bucket}` is served; begin the prefix with it"
                )));
            }
        }
        let number = |name: &str, value: Option<serde_json::Value>| match value {
            None => Ok(None),
            Some(value) => value.as_u64().filter(|number| *number > 0).map(Some).ok_or_else(|| {
                invalid(format!(
                    "`{name}` of key `{}` is {value}, expected a whole number of 1 or more",
                    entry.access_key
                ))
            }),
        };
        let requests = number("requests_per_second", entry.requests_per_second)?;
        let rates = Rates::new(requests, number("bytes_per_second", entry.bytes_per_second)?).map(Arc::new);
        let kept = before.get(&entry.access_key).and_then(|known| known.rates.clone());
        let rates = rates.map(|rates| kept.filter(|kept| kept.is_same(&rates)).unwrap_or(rates));
        let rights = Arc::new(Rights { read_only: entry.read_only, prefixes: entry.prefixes });
        if known
            .insert(entry.access_key.clone(), Known { secret: SecretKey::from(entry.secret_key), rights, rates })
            .is_some()
        {
            return Err(invalid(format!("key `{}` appears twice", entry.access_key)));
        }
    }
    if known.is_empty() {
        return Err(invalid("it has no keys".into()));
    }
    Ok(known)
}

#[async_trait::async_trait]
impl S3Auth for Keys {
    async fn get_secret_key(&self, access_key: &str) -> S3Result<SecretKey> {
        self.get(access_key)
            .map(|known| known.secret)
            .ok_or_else(|| s3_error!(InvalidAccessKeyId, "the access key is unknown"))
    }
}

#[async_trait::async_trait]
impl S3Access for Keys {
    async fn check(&self, context: &mut S3AccessContext<'_>) -> S3Result<()> {
        let key = context.credentials().map(|credentials| credentials.access_key.clone());
        let rights = self.admit(key.as_deref(), context.extensions_mut())?;
        let number = |name| parameter(context.uri(), name).and_then(|text| text.parse::<u64>().ok());
        if number("X-Amz-Expires").is_some_and(|seconds| seconds > MOST_EXPIRES_SECONDS) {
            return Err(s3_error!(AccessDenied, "a signed URL may be valid for at most seven days"));
        }
        // URLs with signatures of version 2 name the moment at which they end.
        let now = crate::meta::since_1970().as_secs();
        if number("Expires").is_some_and(|ends| ends > now + MOST_EXPIRES_SECONDS) {
            return Err(s3_error!(AccessDenied, "a signed URL may be valid for at most seven days"));
        }
        rights.check_operation(context.s3_op().name(), context.s3_path(), context.uri())?;
        context.extensions_mut().insert(rights);
        Ok(())
    }
}

/// Return the rights of a request. Without keys, everything is allowed.
pub fn rights(extensions: &hyper::http::Extensions) -> Arc<Rights> {
    extensions.get::<Arc<Rights>>().cloned().unwrap_or_else(|| Arc::new(Rights::ALL))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(prefixes: &[&str]) -> Rights {
        Rights { read_only: false, prefixes: Some(prefixes.iter().map(|&prefix| prefix.to_owned()).collect()) }
    }

    fn uri(text: &str) -> Uri {
        text.parse().unwrap()
    }

    #[test]
    fn prefixes_limit_objects_listings_and_buckets() {
        let rights = of(&["pets/cats/"]);
        assert!(rights.allow("pets", "cats/1") && !rights.allow("pets", "dogs/1") && !rights.allow("pets", "cats"));
        assert!(
            !rights.allow("pets", "cats/../dogs/1")
                && !rights.allow("pets", "cats/./1")
                && rights.allow("pets", "cats/..1")
        );
        assert!(rights.know("pets") && !rights.know("pet"));
        let bucket = || S3Path::bucket("pets");
        assert!(rights.check_operation("ListObjectsV2", &bucket(), &uri("/pets?list-type=2&prefix=cats%2F")).is_ok());
        assert!(rights.check_operation("ListObjectsV2", &bucket(), &uri("/pets?prefix=cats%2F&prefix=dogs")).is_err());
        assert!(
            rights.check_operation("ListObjectsV2", &bucket(), &uri("/pets?prefix=cats%2F&prefi%78=dogs")).is_err()
        );
        assert!(rights.check_operation("ListObjectsV2", &bucket(), &uri("/pets")).is_err());
        assert!(rights.check_operation("DeleteBucket", &bucket(), &uri("/pets")).is_err());
        assert!(rights.check_operation("HeadBucket", &bucket(), &uri("/pets")).is_ok());
        assert!(of(&["pets/"]).check_operation("CreateBucket", &bucket(), &uri("/pets")).is_ok());
    }

    #[test]
    fn read_only_keys_cannot_write() {
        let rights = Rights { read_only: true, prefixes: None };
        assert!(rights.check_operation("GetObject", &S3Path::object("pets", "a"), &uri("/pets")).is_ok());
        for operation in ["PutObject", "DeleteObject", "CopyObject", "UploadPart", "PutBucketPolicy"] {
            assert!(rights.check_operation(operation, &S3Path::object("pets", "a"), &uri("/pets")).is_err());
        }
    }

    #[test]
    fn a_reload_gives_no_fresh_burst_to_rates_that_stay() -> std::result::Result<(), Box<dyn std::error::Error>> {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir()?;
        let path = folder.path().join("keys.json");
        let write = |rate: u64, secret: &str| {
            let text = format!(
                r#"{{"keys": [{{"access_key": "a", "secret_key": "{secret}", "requests_per_second": {rate}}}]}}"#
            );
            std::fs::write(&path, text)
                .and_then(|()| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)))
        };
        write(1, "a-long-secret")?;
        let keys = Keys::open(&path, None)?;
        let mut extensions = hyper::http::Extensions::new();
        extensions.insert(Slot::new(&Arc::new(crate::metrics::Metrics::new())));
        let admitted = |keys: &Keys| (0..5).filter(|_| keys.admit(Some("a"), &extensions).is_ok()).count();
        assert!(keys.have_rates() && admitted(&keys) == 1);
        // Another secret leaves the rate as it is used.
        write(1, "another-secret")?;
        keys.reload()?;
        assert_eq!(admitted(&keys), 0);
        write(3, "another-secret")?;
        keys.reload()?;
        assert_eq!(admitted(&keys), 3);
        Ok(())
    }
}
