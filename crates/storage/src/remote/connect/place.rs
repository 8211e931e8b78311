//! The location of a dataset in an object store, and what the clients of all services have in common.

use std::time::Duration;

use object_store::path::Path;
use object_store::{BackoffConfig, RetryConfig};
use penstock_error::{Error, Result};

/// The location of a dataset in an object store.
#[derive(Debug, Clone)]
pub struct StorePlace {
    pub uri: String,
    pub scheme: String,
    /// The bucket or container, or the whole URL for HTTP.
    pub host: String,
    pub prefix: Path,
}

impl StorePlace {
    pub fn parse(uri: &str) -> Result<StorePlace> {
        let trimmed = uri.trim_end_matches('/');
        let invalid_uri = |why: &str| Error::new("invalid-uri", format!("cannot open `{uri}`: {why}"));
        let (scheme, rest) = trimmed.split_once("://").ok_or_else(|| invalid_uri("no scheme"))?;
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        if host.is_empty() {
            return Err(invalid_uri("no bucket or host").hint("write it as s3://bucket/path"));
        }
        if path.split('/').any(|part| matches!(part, "." | "..")) || path.contains("//") {
            return Err(invalid_uri("the path contains `.`, `..` or empty parts"));
        }
        let http = matches!(scheme, "http" | "https");
        if !http && !host.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-._@:".contains(&byte)) {
            return Err(invalid_uri(&format!("`{host}` is not a valid bucket name"))
                .hint("bucket names consist of letters, digits, dots and hyphens"));
        }
        Ok(StorePlace {
            uri: trimmed.into(),
            scheme: scheme.into(),
            host: if http { trimmed.into() } else { host.into() },
            prefix: if http {
                Path::default()
            } else {
                Path::parse(path).map_err(|error| invalid_uri(&error.to_string()))?
            },
        })
    }

    pub fn bucket(&self) -> String {
        format!("{}://{}", self.scheme, self.host)
    }

    /// Reject a value that cannot be part of a header or URL, such as one with a carriage return from a Windows text file.
    pub fn plain(&self, name: &str, value: String) -> Result<String> {
        match !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_graphic()) {
            true => Ok(value),
            false => Err(Error::new(
                "invalid-argument",
                format!(
                    "cannot open `{}`: {name} is empty or contains spaces, control characters or non-ASCII characters",
                    self.uri
                ),
            )
            .hint("check storage_options, the AWS_… variables and the profile")),
        }
    }
}

/// Make the error for an option that belongs to another service.
pub fn own_option(place: &StorePlace, name: &str, service: &str) -> Error {
    Error::new(
        "invalid-argument",
        format!("cannot open `{}`: storage option `{name}` is not one of {service}", place.uri),
    )
    .hint("see help(ps.open) for the options of each store")
}

/// Disable retries in object_store, because `retry` retries requests instead.
pub fn no_retry() -> RetryConfig {
    RetryConfig { backoff: BackoffConfig::default(), max_retries: 0, retry_timeout: Duration::ZERO }
}
