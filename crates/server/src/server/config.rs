//! What a server is started with, and whether that can be.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use penstock_cache::{DriveSpec, Spec};
use penstock_error::{Error, Result};
use penstock_storage::{Io, Options};
use serde::{Deserialize, Deserializer};

use crate::access_keys::Keys;
use crate::cold::remote::bucket_of;
use crate::hosts::Domains;
use crate::limits::quota::Limit;
use crate::metrics::Metrics;
use crate::read::states::Revalidate;
use crate::tls::Certificates;

/// The least memory that lets each kind of request proceed.
const LEAST_MEMORY_BYTES: u64 = 64 << 20;

/// Where a server listens.
#[derive(Debug, Clone, Copy)]
pub struct Addresses {
    pub listen: SocketAddr,
    pub status: Option<SocketAddr>,
}

/// What a server is started with: the options of `penstock serve`, by their names.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// `s3://`, `s3://bucket` or a folder.
    pub cold: String,
    pub storage_options: BTreeMap<String, String>,
    /// The drives of the cache, such as `/nvme:2TB`, or None to cache nothing.
    pub cache: Option<String>,
    /// A folder and a size for puts that are acknowledged before the cold store has them, such as `/nvme/pending:50GB`, or None to wait for it.
    pub write_back: Option<String>,
    /// An address and a port.
    pub listen: String,
    /// The address of the status page and of the counts, or None.
    pub status: Option<String>,
    /// A file with the token that the status page needs, or None.
    pub status_token: Option<PathBuf>,
    /// Whether the status page is served with the certificate.
    pub status_tls: bool,
    /// A file with access keys, or None to allow everything to everybody.
    pub keys: Option<PathBuf>,
    /// Whether signatures of version 2 are taken.
    pub signature_v2: bool,
    /// Files with a chain of certificates and its private key, or None for plain HTTP.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// The file of the access log, or None.
    pub access_log: Option<PathBuf>,
    /// Domains whose subdomains are buckets.
    pub domain: Vec<String>,
    /// `always`, `never`, or a time such as `60s`.
    pub revalidate: String,
    /// How old a state may be that is served while the cold store fails.
    #[serde(deserialize_with = "seconds")]
    pub stale_if_error: Duration,
    /// Beginnings of `bucket/key` of objects that never change.
    pub immutable: Vec<String>,
    /// The most bytes of buckets and prefixes, such as `bucket/folder/=100GB`.
    pub quota: Vec<String>,
    pub memory_bytes: u64,
    pub connections: usize,
    /// Requests that are answered at once.
    pub requests: usize,
    /// How long a connection may do nothing.
    #[serde(deserialize_with = "seconds")]
    pub idle_seconds: Duration,
    /// How long connections are accepted after SIGTERM, while the status says that the server ends.
    #[serde(deserialize_with = "seconds")]
    pub lame_duck: Duration,
    /// How long requests may take to finish after that.
    #[serde(deserialize_with = "seconds")]
    pub drain_seconds: Duration,
}

fn seconds<'de, D: Deserializer<'de>>(value: D) -> std::result::Result<Duration, D::Error> {
    f64::deserialize(value).map(|seconds| Duration::from_secs_f64(seconds.clamp(0.0, 1e9)))
}

impl Config {
    pub fn options(&self) -> Result<Options> {
        Options::new(self.storage_options.clone(), Io::Auto)
    }

    pub fn addresses(&self) -> Result<Addresses> {
        Ok(Addresses { listen: address(&self.listen)?, status: self.status.as_deref().map(address).transpose()? })
    }

    pub fn revalidate(&self) -> Result<Revalidate> {
        let text = &*self.revalidate;
        match text {
            "always" => return Ok(Revalidate::Always),
            "never" => return Ok(Revalidate::Never),
            _ => {}
        }
        let seconds = text
            .strip_suffix('s')
            .and_then(|seconds| seconds.parse().ok())
            .filter(|seconds| (0.0..=1e9).contains(seconds));
        match seconds {
            Some(seconds) => Ok(Revalidate::After(Duration::from_secs_f64(seconds))),
            None => {
                let text = format!("--revalidate cannot be `{text}`");
                Err(Error::new("invalid-argument", text).hint("write always, never, or a time such as 60s"))
            }
        }
    }
}

fn address(text: &str) -> Result<SocketAddr> {
    text.parse().map_err(|_| {
        Error::new("invalid-argument", format!("cannot listen at `{text}`")).hint("write it as 127.0.0.1:9100")
    })
}

pub fn failed(what: &str, error: impl std::fmt::Display) -> Error {
    Error::new("storage-failed", format!("cannot serve: {what}: {error}"))
}

pub fn check_values(config: &Config) -> Result<()> {
    config.options()?;
    let addresses = config.addresses()?;
    config.revalidate()?;
    if config.keys.is_none() && !addresses.listen.ip().is_loopback() {
        return Err(Error::new(
            "invalid-argument",
            format!("cannot serve at {}: anyone could write", addresses.listen),
        )
        .hint("give --keys FILE, or listen at 127.0.0.1"));
    }
    if config.memory_bytes < LEAST_MEMORY_BYTES {
        return Err(Error::new(
            "invalid-argument",
            format!("cannot serve with {} bytes of memory for bodies", config.memory_bytes),
        )
        .hint("give --memory-bytes 67108864 or more"));
    }
    Ok(())
}

/// Check a configuration and the files that it names, without serving or creating anything. Calls `note` with what an operator should know.
pub fn check(config: &Config, note: fn(&str)) -> Result<()> {
    check_values(config)?;
    Domains::new(&config.domain)?;
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
    Limit::parse_all(&config.quota, only_bucket(config)?)
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
            let text = format!(
                "cannot write access log `{}`: the folder `{}` does not exist",
                path.display(),
                folder.display()
            );
            Err(Error::new("invalid-argument", text).hint("create it first"))
        }
    }
}

/// Read the token of the status page.
pub fn token(path: &Path) -> Result<String> {
    let bad =
        |why: String| Error::new("invalid-argument", format!("cannot use the token in `{}`: {why}", path.display()));
    let text = penstock_storage::private::read_secret(path).map_err(bad)?;
    let text = String::from_utf8(text).map_err(|error| bad(error.to_string()))?.trim().to_owned();
    if text.len() < 8 { Err(bad("it has fewer than 8 characters".into())) } else { Ok(text) }
}

/// Return the folder and the size of `--write-back`.
pub fn pending_folder(text: &str) -> Result<(PathBuf, u64)> {
    match Spec::parse(text)?.drives.as_slice() {
        [DriveSpec { folder, budget_bytes: Some(bytes), is_in_memory: false }] => Ok((folder.clone(), *bytes)),
        _ => Err(Error::new("invalid-argument", format!("cannot write back through `{text}`"))
            .hint("name one folder on a drive and its maximum size, such as /nvme/pending:50GB")),
    }
}

pub fn not_served(uri: &str) -> Error {
    Error::new("unsupported-storage", format!("cannot serve `{uri}`"))
        .hint("serve s3://bucket, s3:// or a folder; most other stores have an S3 endpoint")
}
