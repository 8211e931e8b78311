//! Store options, named as in `storage_options=`.

use std::collections::BTreeMap;
use std::time::Duration;

use object_store::azure::AzureConfigKey;
use object_store::gcp::GoogleConfigKey;
use penstock_error::{Error, Result};

/// The name of each option, whether it is secret, and its standard environment variables. The first variable that is set is used.
const KNOWN: &[(&str, bool, &[&str])] = &[
    ("endpoint_url", false, &["AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"]),
    ("region", false, &["AWS_REGION", "AWS_DEFAULT_REGION"]),
    ("profile", false, &["AWS_PROFILE"]),
    ("access_key_id", true, &["AWS_ACCESS_KEY_ID"]),
    ("secret_access_key", true, &["AWS_SECRET_ACCESS_KEY"]),
    ("session_token", true, &["AWS_SESSION_TOKEN"]),
    ("anonymous", false, &[]),
    ("virtual_hosted", false, &[]),
    ("ca_bundle", false, &["AWS_CA_BUNDLE", "SSL_CERT_FILE"]),
    ("timeout_seconds", false, &[]),
    ("hedge", false, &[]),
    ("cache", false, &[]),
    ("connection_string", true, &["AZURE_STORAGE_CONNECTION_STRING"]),
];

/// Parts of the names of secrets, among the options of object_store for Azure and Google.
const SECRETS: [&str; 4] = ["key", "secret", "token", "sas"];

/// Return whether an option of object_store for Azure or Google has this name.
fn is_of_others(name: &str) -> bool {
    name.parse::<AzureConfigKey>().is_ok() || name.parse::<GoogleConfigKey>().is_ok()
}

/// How local data files are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Io {
    /// Map files on a local disk, and read ranges elsewhere.
    #[default]
    Auto,
    Mapped,
    /// Ranged reads through the page cache.
    Buffered,
    /// Ranged reads with io_uring that bypass the page cache, if the file system supports O_DIRECT.
    Direct,
}

impl Io {
    /// In the order of the variants.
    const ALL: [(&str, Io); 4] =
        [("auto", Io::Auto), ("mapped", Io::Mapped), ("buffered", Io::Buffered), ("direct", Io::Direct)];

    pub fn name(self) -> &'static str {
        Io::ALL[self as usize].0
    }

    pub fn parse(name: &str) -> Result<Io> {
        let known = Io::ALL.iter().find(|(known, _)| *known == name).map(|(_, io)| *io);
        known.ok_or_else(|| {
            Error::new(
                "invalid-argument",
                format!("`io` is `{name}`, expected `auto`, `mapped`, `buffered` or `direct`"),
            )
        })
    }
}

/// Options of one store.
#[derive(Debug, Clone, Default)]
pub struct Options {
    given: BTreeMap<String, String>,
    pub io: Io,
}

impl Options {
    /// Build options. Fails on unknown names and invalid values.
    pub fn new(given: impl IntoIterator<Item = (String, String)>, io: Io) -> Result<Options> {
        let given: BTreeMap<String, String> = given.into_iter().collect();
        let names: Vec<&str> = KNOWN.iter().map(|(name, ..)| *name).collect();
        if let Some(name) = given.keys().find(|name| !names.contains(&name.as_str()) && !is_of_others(name)) {
            return Err(Error::new("invalid-argument", format!("cannot use storage option `{name}`: there is no such option")).hint(
                format!(
                    "options: {}; for Azure and Google, also those of object_store, such as account_name and service_account_path",
                    names.join(", ")
                ),
            ));
        }
        let options = Options { given, io };
        options.flag("anonymous")?;
        options.flag("virtual_hosted")?;
        options.flag("hedge")?;
        options.timeout()?;
        Ok(options)
    }

    /// Return the caller's value, or else the value from the environment.
    pub fn get(&self, name: &str) -> Option<String> {
        let variables = KNOWN.iter().find(|(known, ..)| *known == name).map_or(&[][..], |(_, _, variables)| variables);
        let from_environment =
            || variables.iter().find_map(|variable| std::env::var(variable).ok().filter(|value| !value.is_empty()));
        self.given.get(name).cloned().or_else(from_environment)
    }

    /// Return the caller's value, ignoring the environment.
    pub fn given(&self, name: &str) -> Option<&str> {
        self.given.get(name).map(String::as_str)
    }

    /// Return the caller's options that only Azure or Google have, by object_store's names.
    pub fn others(&self) -> impl Iterator<Item = (&str, &str)> {
        let is_known = |name: &str| KNOWN.iter().any(|(known, ..)| *known == name);
        self.given.iter().map(|(name, value)| (name.as_str(), value.as_str())).filter(move |(name, _)| !is_known(name))
    }

    pub fn flag(&self, name: &str) -> Result<bool> {
        match self.given.get(name).map(|value| value.to_lowercase()) {
            None => Ok(false),
            Some(value) if value == "true" || value == "1" => Ok(true),
            Some(value) if value == "false" || value == "0" => Ok(false),
            Some(value) => Err(Error::new(
                "invalid-argument",
                format!("storage option `{name}` is `{value}`, expected true or false"),
            )),
        }
    }

    /// Return the deadline of one operation.
    pub fn timeout(&self) -> Result<Duration> {
        let Some(value) = self.given.get("timeout_seconds") else { return Ok(Duration::from_secs(60)) };
        let seconds = value.parse::<f64>().ok().filter(|seconds| *seconds > 0.0 && *seconds <= 86_400.0);
        seconds.map(Duration::from_secs_f64).ok_or_else(|| {
            Error::new(
                "invalid-argument",
                format!("storage option `timeout_seconds` is `{value}`, expected a number above 0 and at most 86400"),
            )
        })
    }

    /// Return the caller's options without secrets, for pickling.
    pub fn without_secrets(&self) -> BTreeMap<String, String> {
        let is_secret = |name: &str| match KNOWN.iter().find(|(known, ..)| *known == name) {
            Some((_, secret, _)) => *secret,
            None => {
                SECRETS.iter().any(|part| name.contains(part))
                    && !["_file", "_url", "_path"].iter().any(|end| name.ends_with(end))
            }
        };
        self.given
            .iter()
            .filter(|(name, _)| !is_secret(name))
            .map(|(name, value)| (name.clone(), value.clone()))
            .collect()
    }
}
