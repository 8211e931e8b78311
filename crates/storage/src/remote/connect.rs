//! Builds an `object_store` client from a URI and options.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, S3ConditionalPut};
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::http::HttpBuilder;
use object_store::list::PaginatedListStore;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::{BackoffConfig, Certificate, ClientOptions, ObjectStore, RetryConfig};
use penstock_error::{Error, Result};

use super::service::{Connector, Traffic, chain};
use crate::options::Options;

/// A client that can read, and may also list and write.
#[derive(Clone)]
pub struct Client {
    pub store: Arc<dyn ObjectStore>,
    /// Paginated listings, or None if the store cannot list.
    pub pages: Option<Arc<dyn PaginatedListStore>>,
    /// Multipart uploads, or None if the store is read-only.
    pub parts: Option<Arc<dyn MultipartStore>>,
}

impl Client {
    fn writable<S: ObjectStore + PaginatedListStore + MultipartStore>(store: S) -> Client {
        let store = Arc::new(store);
        Client { store: store.clone(), pages: Some(store.clone()), parts: Some(store) }
    }
}

/// The location of a dataset in an object store.
#[derive(Debug, Clone)]
pub struct Place {
    pub uri: String,
    scheme: String,
    /// The bucket or container, or the whole URL for HTTP.
    host: String,
    pub prefix: Path,
}

impl Place {
    pub fn parse(uri: &str) -> Result<Place> {
        let trimmed = uri.trim_end_matches('/');
        let bad = |why: &str| Error::new("invalid-uri", format!("cannot open `{uri}`: {why}"));
        let (scheme, rest) = trimmed.split_once("://").ok_or_else(|| bad("no scheme"))?;
        let (host, path) = rest.split_once('/').unwrap_or((rest, ""));
        if host.is_empty() {
            return Err(bad("no bucket or host").hint("write it as s3://bucket/path"));
        }
        if path.split('/').any(|part| matches!(part, "." | "..")) || path.contains("//") {
            return Err(bad("the path contains `.`, `..` or empty parts"));
        }
        let http = matches!(scheme, "http" | "https");
        Ok(Place {
            uri: trimmed.into(),
            scheme: scheme.into(),
            host: if http { trimmed.into() } else { host.into() },
            prefix: if http { Path::default() } else { Path::parse(path).map_err(|error| bad(&error.to_string()))? },
        })
    }

    pub fn bucket(&self) -> String {
        format!("{}://{}", self.scheme, self.host)
    }

    pub fn connect(&self, options: &Options, traffic: Arc<Traffic>) -> Result<Client> {
        let invalid = |error: object_store::Error| {
            Error::new("invalid-argument", format!("cannot open `{}`: {}", self.uri, chain(&error)))
                .hint("check storage_options and the environment variables")
        };
        let client = client_options(options)?;
        let connector = Connector(traffic);
        match self.scheme.as_str() {
            "s3" => Ok(Client::writable(self.s3(options, client, connector)?.build().map_err(invalid)?)),
            "gs" => {
                let builder = GoogleCloudStorageBuilder::from_env()
                    .with_bucket_name(&self.host)
                    .with_client_options(client)
                    .with_retry(no_retry())
                    .with_http_connector(connector);
                Ok(Client::writable(builder.build().map_err(invalid)?))
            }
            "az" => {
                let builder = MicrosoftAzureBuilder::from_env()
                    .with_container_name(&self.host)
                    .with_client_options(client)
                    .with_retry(no_retry())
                    .with_http_connector(connector);
                Ok(Client::writable(builder.build().map_err(invalid)?))
            }
            _ => {
                let builder = HttpBuilder::new()
                    .with_url(&self.host)
                    .with_client_options(client)
                    .with_retry(no_retry())
                    .with_http_connector(connector);
                Ok(Client { store: Arc::new(builder.build().map_err(invalid)?), pages: None, parts: None })
            }
        }
    }

    fn s3(&self, options: &Options, client: ClientOptions, connector: Connector) -> Result<AmazonS3Builder> {
        let missing = |why: &str, hint: &str| Error::new("credentials-missing", format!("cannot open `{}`: {why}", self.uri)).hint(hint);
        // Both keys and the token come from a single source. Sources are tried in this order: the options, a profile named in the
        // options, the environment, and the profile named in the environment (or `default`).
        let from_options = options.given("access_key_id").is_some() || options.given("secret_access_key").is_some();
        let from_profile = !from_options && options.given("profile").is_some();
        let from_environment = !from_options && !from_profile && options.get("access_key_id").is_some();
        let profile = match Profile::load(options) {
            Err(error) if from_profile || !(from_options || from_environment || options.flag("anonymous")?) => return Err(error),
            loaded => loaded.unwrap_or_default(),
        };
        let keys = ["access_key_id", "secret_access_key", "session_token"].map(|name| match (from_options, from_environment) {
            (true, _) => options.given(name).map(str::to_owned),
            (_, true) => options.get(name),
            _ => profile.get(&format!("aws_{name}")),
        });
        let builder = if options.flag("anonymous")? {
            AmazonS3Builder::new().with_skip_signature(true)
        } else {
            match keys {
                [Some(key), Some(secret), token] => {
                    let builder = AmazonS3Builder::new().with_access_key_id(self.plain("access_key_id", key)?);
                    let builder = builder.with_secret_access_key(self.plain("secret_access_key", secret)?);
                    match token {
                        Some(token) => builder.with_token(self.plain("session_token", token)?),
                        None => builder,
                    }
                }
                [None, None, _] if from_profile => {
                    let hint = "a profile must have aws_access_key_id and aws_secret_access_key; for SSO or roles, export the keys";
                    return Err(missing(&format!("profile `{}` has no keys", profile.name), hint));
                }
                [None, None, _] if metadata_is_off() && !has_role() => {
                    return Err(missing("no credentials were found", super::patience::CREDENTIALS_HINT));
                }
                [None, None, _] => AmazonS3Builder::from_env(), // object_store handles machine, container and web identity roles.
                _ => return Err(missing("only one of the access key and the secret is set", super::patience::CREDENTIALS_HINT)),
            }
        };
        let or_profile = |name: &str| options.get(name).or_else(|| profile.get(name));
        let region = or_profile("region").map_or_else(|| Ok("us-east-1".to_owned()), |region| self.plain("region", region))?;
        let virtual_hosted = options.flag("virtual_hosted")?;
        let builder = match or_profile("endpoint_url") {
            // An explicit endpoint gets path-style URLs by default, because few endpoints have a DNS entry per bucket.
            Some(endpoint) => {
                let endpoint = self.plain("endpoint_url", endpoint)?;
                let bad = |why: &str| {
                    Error::new("invalid-argument", format!("cannot open `{}`: endpoint_url is `{endpoint}`: {why}", self.uri))
                        .hint("write it as https://host or http://host:port")
                };
                let (scheme, host) = endpoint.split_once("://").ok_or_else(|| bad("no scheme"))?;
                let host = host.trim_end_matches('/');
                if !matches!(scheme, "http" | "https") {
                    return Err(bad("neither http nor https"));
                }
                let address = if virtual_hosted { format!("{scheme}://{}.{host}", self.host) } else { format!("{scheme}://{host}") };
                url::Url::parse(&address).map_err(|error| bad(&format!("`{address}` is not a valid URL: {error}")))?;
                let scheme = scheme.to_owned();
                let endpoint = address;
                builder.with_endpoint(endpoint).with_allow_http(scheme == "http").with_virtual_hosted_style_request(virtual_hosted)
            }
            None => builder.with_virtual_hosted_style_request(true),
        };
        Ok(builder
            .with_bucket_name(&self.host)
            .with_region(region)
            .with_client_options(client)
            .with_retry(no_retry())
            .with_conditional_put(S3ConditionalPut::ETagMatch)
            .with_disable_bulk_delete(true)
            .with_http_connector(connector))
    }

    /// Reject a value that cannot be part of a header or URL, such as one with a carriage return from a Windows text file.
    fn plain(&self, name: &str, value: String) -> Result<String> {
        match !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_graphic()) {
            true => Ok(value),
            false => Err(Error::new(
                "invalid-argument",
                format!("cannot open `{}`: {name} is empty or contains spaces, control characters or non-ASCII characters", self.uri),
            )
            .hint("check storage_options, the AWS_… variables and the profile")),
        }
    }
}

fn metadata_is_off() -> bool {
    std::env::var("AWS_EC2_METADATA_DISABLED").is_ok_and(|value| value.eq_ignore_ascii_case("true"))
}

/// Return whether the environment names a container role or a web identity role.
fn has_role() -> bool {
    ["AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"]
        .iter()
        .any(|variable| std::env::var_os(variable).is_some())
}

/// Disable retries in object_store, because `patience` retries requests instead.
fn no_retry() -> RetryConfig {
    RetryConfig { backoff: BackoffConfig::default(), max_retries: 0, retry_timeout: Duration::ZERO }
}

fn client_options(options: &Options) -> Result<ClientOptions> {
    let timeout = options.timeout()?;
    let mut client = ClientOptions::new()
        .with_allow_http(true)
        .with_connect_timeout((timeout / 2).min(Duration::from_secs(5))) // A deadline error would not name the cause.
        .with_read_timeout(timeout.min(Duration::from_secs(15)))
        .with_timeout_disabled()
        .with_pool_idle_timeout(Duration::from_secs(30))
        .with_http1_only();
    if let Some(bundle) = options.get("ca_bundle") {
        let bad = |why: String| Error::new("invalid-argument", format!("cannot read the CA bundle `{bundle}`: {why}"));
        let pem = std::fs::read(&bundle).map_err(|error| bad(error.to_string()))?;
        let certificates = Certificate::from_pem_bundle(&pem).map_err(|error| bad(error.to_string()))?;
        if certificates.is_empty() {
            return Err(bad("no certificate found".into()).hint("the file must be in PEM format"));
        }
        for certificate in certificates {
            client = client.with_root_certificate(certificate);
        }
    }
    Ok(client)
}

/// A profile from `~/.aws/credentials` and `~/.aws/config`.
#[derive(Default)]
struct Profile {
    name: String,
    sections: Vec<ini::Properties>,
}

impl Profile {
    fn load(options: &Options) -> Result<Profile> {
        let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
        let file = |variable: &str, name: &str| std::env::var_os(variable).map_or_else(|| home.join(".aws").join(name), PathBuf::from);
        let asked = options.get("profile");
        let name = asked.clone().unwrap_or_else(|| "default".into());
        let mut sections = Vec::new();
        let files = [
            (file("AWS_SHARED_CREDENTIALS_FILE", "credentials"), name.clone()),
            (file("AWS_CONFIG_FILE", "config"), if name == "default" { name.clone() } else { format!("profile {name}") }),
        ];
        for (path, section) in files {
            let Ok(text) = std::fs::read_to_string(&path) else { continue };
            // Quotes and backslashes in secrets are literal characters.
            let parsed =
                ini::Ini::load_from_str_opt(&text, ini::ParseOption { enabled_quote: false, enabled_escape: false, ..Default::default() });
            let parsed = parsed.map_err(|error| Error::new("invalid-argument", format!("cannot read `{}`: {error}", path.display())))?;
            sections.extend(parsed.section(Some(section)).cloned());
        }
        if sections.is_empty()
            && let Some(asked) = asked
        {
            return Err(Error::new("credentials-missing", format!("there is no profile `{asked}` in ~/.aws/credentials or ~/.aws/config"))
                .hint("check AWS_PROFILE, AWS_SHARED_CREDENTIALS_FILE and AWS_CONFIG_FILE"));
        }
        Ok(Profile { name, sections })
    }

    fn get(&self, key: &str) -> Option<String> {
        self.sections.iter().find_map(|section| section.get(key)).map(str::to_owned)
    }
}
