//! Builds the client for `s3://bucket/path`, from the options, variables and profiles that AWS users have.

use std::path::PathBuf;

use object_store::ClientOptions;
use object_store::aws::{AmazonS3Builder, S3ConditionalPut};
use penstock_error::{Error, Result};

use super::place::{StorePlace, no_retry, own_option};
use super::service::Connector;
use crate::options::Options;

pub const CREDENTIALS_HINT: &str = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or pass storage_options; for public data, pass storage_options={\"anonymous\": True}";

pub fn builder(
    place: &StorePlace,
    options: &Options,
    client: ClientOptions,
    connector: Connector,
) -> Result<AmazonS3Builder> {
    let missing = |why: &str, hint: &str| {
        Error::new("credentials-missing", format!("cannot open `{}`: {why}", place.uri)).hint(hint)
    };
    options.others().try_for_each(|(name, _)| Err(own_option(place, name, "S3")))?;
    // Both keys and the token come from a single source. Sources are tried in this order: the options, a profile named in the
    // options, the environment, and the profile named in the environment (or `default`).
    let from_options = options.given("access_key_id").is_some() || options.given("secret_access_key").is_some();
    let from_profile = !from_options && options.given("profile").is_some();
    let from_environment = !from_options && !from_profile && options.get("access_key_id").is_some();
    let profile = match Profile::load(options) {
        Err(error) if from_profile || !(from_options || from_environment || options.flag("anonymous")?) => {
            return Err(error);
        }
        loaded => loaded.unwrap_or_default(),
    };
    let keys =
        ["access_key_id", "secret_access_key", "session_token"].map(|name| match (from_options, from_environment) {
            (true, _) => options.given(name).map(str::to_owned),
            (_, true) => options.get(name),
            _ => profile.get(&format!("aws_{name}")),
        });
    let builder = if options.flag("anonymous")? {
        AmazonS3Builder::new().with_skip_signature(true)
    } else {
        match keys {
            [Some(key), Some(secret), token] => {
                let builder = AmazonS3Builder::new().with_access_key_id(place.plain("access_key_id", key)?);
                let builder = builder.with_secret_access_key(place.plain("secret_access_key", secret)?);
                match token {
                    Some(token) => builder.with_token(place.plain("session_token", token)?),
                    None => builder,
                }
            }
            [None, None, _] if profile.elsewhere().is_some() => {
                let (name, key) = (&profile.name, profile.elsewhere().unwrap_or_default());
                let why = format!("profile `{name}` gets its keys through `{key}`, which Penstock does not support");
                return Err(missing(
                    &why,
                    &format!("run `eval \"$(aws configure export-credentials --profile {name} --format env)\"` first"),
                ));
            }
            [None, None, _] if from_profile => {
                let hint = "a profile must have aws_access_key_id and aws_secret_access_key; for SSO or roles, export the keys";
                return Err(missing(&format!("profile `{}` has no keys", profile.name), hint));
            }
            [None, None, _] if metadata_is_off() && !has_role() => {
                return Err(missing("no credentials were found", CREDENTIALS_HINT));
            }
            [None, None, _] => AmazonS3Builder::from_env(), // object_store handles machine, container and web identity roles.
            _ => return Err(missing("only one of the access key and the secret is set", CREDENTIALS_HINT)),
        }
    };
    let or_profile = |name: &str| options.get(name).or_else(|| profile.get(name));
    let region =
        or_profile("region").map_or_else(|| Ok("us-east-1".to_owned()), |region| place.plain("region", region))?;
    let virtual_hosted = options.flag("virtual_hosted")?;
    // The address of S3 alone counts more than that of all services, as in AWS's own tools.
    let endpoint =
        options.given("endpoint_url").map(str::to_owned).or_else(|| std::env::var("AWS_ENDPOINT_URL_S3").ok());
    let endpoint = endpoint.filter(|endpoint| !endpoint.is_empty()).or_else(|| profile.endpoint_of_s3.clone());
    let builder = match endpoint.or_else(|| or_profile("endpoint_url")) {
        // An explicit endpoint gets path-style URLs by default, because few endpoints have a DNS entry per bucket.
        Some(endpoint) => with_endpoint(place, builder, endpoint, virtual_hosted)?,
        None => builder.with_virtual_hosted_style_request(true),
    };
    Ok(builder
        .with_bucket_name(&place.host)
        .with_region(region)
        .with_client_options(client)
        .with_retry(no_retry())
        .with_conditional_put(S3ConditionalPut::ETagMatch)
        .with_disable_bulk_delete(true)
        .with_http_connector(connector))
}

/// Use the server at an address: S3 itself, or one like it.
fn with_endpoint(
    place: &StorePlace,
    builder: AmazonS3Builder,
    endpoint: String,
    virtual_hosted: bool,
) -> Result<AmazonS3Builder> {
    let endpoint = place.plain("endpoint_url", endpoint)?;
    let invalid = |why: &str| {
        Error::new("invalid-argument", format!("cannot open `{}`: endpoint_url is `{endpoint}`: {why}", place.uri))
            .hint("write it as https://host or http://host:port")
    };
    let (scheme, host) = endpoint.split_once("://").ok_or_else(|| invalid("no scheme"))?;
    let host = host.trim_end_matches('/');
    if !matches!(scheme, "http" | "https") {
        return Err(invalid("neither http nor https"));
    }
    let address =
        if virtual_hosted { format!("{scheme}://{}.{host}", place.host) } else { format!("{scheme}://{host}") };
    url::Url::parse(&address).map_err(|error| invalid(&format!("`{address}` is not a valid URL: {error}")))?;
    Ok(builder
        .with_allow_http(scheme == "http")
        .with_endpoint(address)
        .with_virtual_hosted_style_request(virtual_hosted))
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

/// A profile from `~/.aws/credentials` and `~/.aws/config`.
#[derive(Default)]
struct Profile {
    name: String,
    sections: Vec<ini::Properties>,
    /// The address of S3 in the `services` section that the profile names.
    endpoint_of_s3: Option<String>,
}

impl Profile {
    fn load(options: &Options) -> Result<Profile> {
        let home = std::env::var_os("HOME").map(PathBuf::from).unwrap_or_default();
        let file = |variable: &str, name: &str| {
            std::env::var_os(variable).map_or_else(|| home.join(".aws").join(name), PathBuf::from)
        };
        let asked = options.get("profile");
        let name = asked.clone().unwrap_or_else(|| "default".into());
        let (mut sections, mut config) = (Vec::new(), String::new());
        let files = [
            (file("AWS_SHARED_CREDENTIALS_FILE", "credentials"), name.clone()),
            (
                file("AWS_CONFIG_FILE", "config"),
                if name == "default" { name.clone() } else { format!("profile {name}") },
            ),
        ];
        for (path, section) in files {
            let Ok(text) = std::fs::read_to_string(&path) else { continue };
            // Quotes and backslashes in secrets are literal characters.
            let parsed = ini::Ini::load_from_str_opt(
                &text,
                ini::ParseOption { enabled_quote: false, enabled_escape: false, ..Default::default() },
            );
            let parsed = parsed.map_err(|error| {
                Error::new("invalid-argument", format!("cannot read `{}`: {error}", path.display()))
            })?;
            sections.extend(parsed.section(Some(section)).cloned());
            config = text; // The last file is the one with `services` sections.
        }
        if sections.is_empty()
            && let Some(asked) = asked
        {
            return Err(Error::new(
                "credentials-missing",
                format!("there is no profile `{asked}` in ~/.aws/credentials or ~/.aws/config"),
            )
            .hint("check AWS_PROFILE, AWS_SHARED_CREDENTIALS_FILE and AWS_CONFIG_FILE"));
        }
        let mut profile = Profile { name, sections, endpoint_of_s3: None };
        profile.endpoint_of_s3 = profile.get("services").and_then(|services| endpoint_of_s3(&config, &services));
        Ok(profile)
    }

    /// Return the setting by which a profile without keys gets them from elsewhere.
    fn elsewhere(&self) -> Option<&'static str> {
        ["credential_process", "sso_session", "sso_start_url", "role_arn"]
            .into_iter()
            .find(|key| self.get(key).is_some())
    }

    fn get(&self, key: &str) -> Option<String> {
        self.sections.iter().find_map(|section| section.get(key)).map(str::to_owned)
    }
}

/// Return the `endpoint_url` of `s3` in the section `[services <name>]`, in which the settings of each service are indented.
fn endpoint_of_s3(config: &str, name: &str) -> Option<String> {
    let (mut inside, mut of_s3) = (false, false);
    for line in config.lines() {
        let (trimmed, nested) = (line.trim(), line.starts_with([' ', '\t']));
        if trimmed.starts_with('[') {
            let section = trimmed.trim_start_matches('[').split(']').next().unwrap_or_default();
            inside = section.split_whitespace().eq(["services", name]);
        } else if let (true, Some((key, value))) = (inside, trimmed.split_once('=')) {
            match (nested, key.trim()) {
                (false, key) => of_s3 = key == "s3",
                (true, "endpoint_url") if of_s3 => return Some(value.trim().to_owned()),
                _ => {}
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_of_s3_is_that_of_its_own_service() {
        let config = "[profile a]\nservices = dev\n[services other]\ns3 =\n  endpoint_url = http://no\n[services dev]\ndynamodb =\n  endpoint_url = http://db\ns3 = \n  endpoint_url = http://s3:9000\n";
        assert_eq!(endpoint_of_s3(config, "dev").as_deref(), Some("http://s3:9000"));
        assert_eq!(endpoint_of_s3(config, "none"), None);
        assert_eq!(endpoint_of_s3("[services dev]\ndynamodb =\n  endpoint_url = http://db\n", "dev"), None);
    }
}
