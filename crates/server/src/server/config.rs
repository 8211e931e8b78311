//! What a server is started with, and whether that can be.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use penstock_cache::{DriveSpec, Spec};
use penstock_error::{Error, Result};
use penstock_storage::Options;

use crate::access_keys::Keys;
use crate::cold::remote::bucket_of;
use crate::hosts::Domains;
use crate::limits::quota::Limit;
use crate::metrics::Metrics;
use crate::read::immutable::MarkerOf;
use crate::read::states::Revalidate;
use crate::tls::Certificates;

/// The least memory that lets each kind of request proceed.
const LEAST_MEMORY_BYTES: u64 = 64 << 20;

/// What a server is started with.
#[derive(Debug, Clone)]
pub struct Config {
    /// `s3://`, `s3://bucket` or a folder.
    pub cold: String,
    pub options: Options,
    /// The drives of the cache, such as `/nvme:2TB`, or None to cache nothing.
    pub cache: Option<String>,
    /// A folder and a size for puts that are acknowledged before the cold store has them, such as `/nvme/pending:50GB`, or None to wait for it.
    pub write_back: Option<String>,
    pub listen: SocketAddr,
    /// The address of the status page and of the counts, or None.
    pub status: Option<SocketAddr>,
    /// A file with the token that the status page needs, or None.
    pub status_token: Option<PathBuf>,
    /// Whether the status page is served with the certificate.
    pub status_tls: bool,
    /// A file with access keys, or None to allow everything to everybody.
    pub keys: Option<PathBuf>,
    /// Whether signatures of version 2 are taken.
    pub takes_version_2: bool,
    /// Files with a chain of certificates and its private key, or None for plain HTTP.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// The file of the access log, or None.
    pub access_log: Option<PathBuf>,
    /// Domains whose subdomains are buckets.
    pub domains: Vec<String>,
    pub revalidate: Revalidate,
    /// How old a state may be that is served while the cold store fails.
    pub stale_if_error: Duration,
    /// Finds what proves that an object never changes.
    pub marker_of: MarkerOf,
    /// Beginnings of `bucket/key` of objects that never change.
    pub immutable: Vec<String>,
    /// The most bytes of buckets and prefixes, such as `bucket/folder/=100GB`.
    pub quotas: Vec<String>,
    pub memory_bytes: u64,
    pub connections: usize,
    /// Requests that are answered at once.
    pub requests: usize,
    /// How long a connection may do nothing.
    pub idle: Duration,
    /// How long connections are accepted after SIGTERM, while the status says that the server ends.
    pub lame_duck: Duration,
    /// How long requests may take to finish after that.
    pub drain: Duration,
}

pub fn failed(what: &str, error: impl std::fmt::Display) -> Error {
    Error::new("storage-failed", format!("cannot serve: {what}: {error}"))
}

pub fn check_limits(config: &Config) -> Result<()> {
    if config.keys.is_none() && !config.listen.ip().is_loopback() {
        return Err(Error::new("invalid-argument", format!("cannot serve at {}: everybody could write", config.listen))
            .hint("give --keys FILE, or listen at 127.0.0.1"));
    }
    if config.memory_bytes < LEAST_MEMORY_BYTES {
        return Err(Error::new("invalid-argument", format!("cannot serve with {} bytes of memory for bodies", config.memory_bytes))
            .hint("give --memory-bytes of 67108864 or more"));
    }
    Ok(())
}

/// Check a configuration and the files that it names, without serving or creating anything. Calls `note` with what an operator should know.
pub fn check(config: &Config, note: fn(&str)) -> Result<()> {
    check_limits(config)?;
    Domains::new(&config.domains)?;
    config.keys.as_deref().map(|path| Keys::open(path, only_bucket(config)?)).transpose()?;
    let certificates = config.tls.as_ref().map(|(chain, key)| Certificates::open(chain, key)).transpose()?;
    certificates.iter().for_each(|certificates| certificates.watch(&Metrics::new(), note));
    for drive in config.cache.as_deref().map(Spec::parse).transpose()?.iter().flat_map(|spec| &spec.drives) {
        drive.check_size()?;
    }
    config.access_log.as_deref().map(check_log).transpose()?;
    config.status_token.as_deref().map(token).transpose()?;
    config.write_back.as_deref().map(pending_folder).transpose()?;
    quotas(config)?;
    if config.cold.starts_with("s3://") {
        return bucket_of(&config.cold).map(drop);
    }
    match penstock_storage::local_path(&config.cold)? {
        Some(path) if path.is_dir() => Ok(()),
        Some(path) => Err(failed(&path.display().to_string(), "it is not a folder").hint("create it first")),
        None => Err(not_served(&config.cold)),
    }
}

/// Parse the quotas of a configuration.
pub fn quotas(config: &Config) -> Result<Vec<Limit>> {
    Limit::parse_all(&config.quotas, only_bucket(config)?)
}

/// Return the only bucket that is served, or None if there may be several.
pub fn only_bucket(config: &Config) -> Result<Option<&str>> {
    if config.cold.starts_with("s3://") { bucket_of(&config.cold) } else { Ok(None) }
}

/// Fail if a file cannot become an access log, because its folder does not exist.
fn check_log(path: &Path) -> Result<()> {
    match path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
        None => Ok(()),
        Some(folder) => {
            let text = format!("cannot write access log `{}`: the folder `{}` does not exist", path.display(), folder.display());
            Err(Error::new("invalid-argument", text).hint("create it first"))
        }
    }
}

/// Read the token of the status page.
pub fn token(path: &Path) -> Result<String> {
    let bad = |why: String| Error::new("invalid-argument", format!("cannot use the token of `{}`: {why}", path.display()));
    let text = penstock_storage::private::read_secret(path).map_err(bad)?;
    let text = String::from_utf8(text).map_err(|error| bad(error.to_string()))?.trim().to_owned();
    if text.len() < 8 { Err(bad("it has fewer than 8 characters".into())) } else { Ok(text) }
}

/// Return the folder and the size of `--write-back`.
pub fn pending_folder(text: &str) -> Result<(PathBuf, u64)> {
    match Spec::parse(text)?.drives.as_slice() {
        [DriveSpec { folder, budget_bytes: Some(bytes), is_in_memory: false }] => Ok((folder.clone(), *bytes)),
        _ => Err(Error::new("invalid-argument", format!("cannot write back through `{text}`"))
            .hint("name one folder on a drive and the most bytes that wait there, such as /nvme/pending:50GB")),
    }
}

pub fn not_served(uri: &str) -> Error {
    Error::new("unsupported-storage", format!("cannot serve `{uri}`"))
        .hint("serve s3://bucket, s3:// or a folder; most other stores have an S3 endpoint")
}
