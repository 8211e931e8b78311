//! Builds the client for `az://container/path`, from the options and variables that Azure users have.

use object_store::ClientOptions;
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use penstock_error::{Error, Result};

use super::place::{StorePlace, no_retry, own_option};
use super::service::Connector;
use crate::options::Options;

pub const CREDENTIALS_HINT: &str = "set AZURE_STORAGE_CONNECTION_STRING, or AZURE_STORAGE_ACCOUNT with AZURE_STORAGE_KEY or AZURE_STORAGE_SAS_TOKEN, or pass storage_options={\"account_name\": …, \"account_key\": …}; for public data, add \"anonymous\": True";

/// Variables of Azure's command line, which object_store does not read.
const VARIABLES: [(&str, AzureConfigKey); 2] =
    [("AZURE_STORAGE_ACCOUNT", AzureConfigKey::AccountName), ("AZURE_STORAGE_KEY", AzureConfigKey::AccessKey)];

/// The options count most, then a connection string, then single variables.
pub fn builder(
    place: &StorePlace,
    options: &Options,
    client: ClientOptions,
    connector: Connector,
) -> Result<MicrosoftAzureBuilder> {
    let mut builder = MicrosoftAzureBuilder::from_env().with_client_options(client).with_container_name(&place.host);
    for (variable, key) in VARIABLES {
        if let Some(value) = std::env::var(variable).ok().filter(|value| !value.is_empty()) {
            builder = builder.with_config(key, value);
        }
    }
    if let Some(text) = options.get("connection_string") {
        builder = with_connection_string(place, builder, &text)?;
    }
    if let Some(endpoint) = options.given("endpoint_url") {
        builder = builder.with_endpoint(endpoint.trim_end_matches('/').to_owned());
    }
    for (name, value) in options.others() {
        builder = builder.with_config(name.parse().map_err(|_| own_option(place, name, "Azure"))?, value);
    }
    let anonymous = options.flag("anonymous")?;
    let is_set =
        |key: AzureConfigKey| builder.get_config_value(&key).is_some_and(|value| !value.is_empty() && value != "false");
    let missing = |why: &str| {
        Err(Error::new("credentials-missing", format!("cannot open `{}`: {why}", place.uri)).hint(CREDENTIALS_HINT))
    };
    let emulator = is_set(AzureConfigKey::UseEmulator);
    if !emulator && !is_set(AzureConfigKey::AccountName) {
        return missing("no storage account is named");
    }
    let keys = [
        AzureConfigKey::AccessKey,
        AzureConfigKey::SasKey,
        AzureConfigKey::Token,
        AzureConfigKey::ClientSecret,
        AzureConfigKey::FederatedTokenFile,
        AzureConfigKey::UseAzureCli,
        AzureConfigKey::SkipSignature,
        AzureConfigKey::CredentialType,
        // A managed identity: the machine asks this address for a token.
        AzureConfigKey::MsiEndpoint,
        AzureConfigKey::ClientId,
        AzureConfigKey::ObjectId,
        AzureConfigKey::MsiResourceId,
    ];
    if !emulator && !anonymous && !keys.into_iter().any(is_set) {
        return missing(
            "no credentials were found; for the identity of an Azure machine, set AZURE_CREDENTIAL_TYPE=managed_identity",
        );
    }
    if anonymous {
        builder = builder.with_skip_signature(true);
    }
    Ok(builder.with_retry(no_retry()).with_http_connector(connector))
}

/// Apply a connection string, as the Azure portal shows it: `AccountName=…;AccountKey=…;EndpointSuffix=…`.
fn with_connection_string(
    place: &StorePlace,
    mut builder: MicrosoftAzureBuilder,
    text: &str,
) -> Result<MicrosoftAzureBuilder> {
    let invalid = |why: String| {
        Error::new("invalid-argument", format!("cannot open `{}`: the Azure connection string {why}", place.uri))
            .hint("copy it from the portal: it has the form AccountName=…;AccountKey=…;EndpointSuffix=core.windows.net")
    };
    let (mut account, mut suffix, mut protocol, mut endpoint) = (None, "core.windows.net", "https", None);
    for part in text.trim().split(';').map(str::trim).filter(|part| !part.is_empty()) {
        // Values may contain `=`, names do not. The text may contain a key, so messages show only names.
        let (name, value) = part.split_once('=').ok_or_else(|| invalid("contains a part without `=`".into()))?;
        match name.to_ascii_lowercase().as_str() {
            "accountname" => account = Some(value),
            "accountkey" => builder = builder.with_config(AzureConfigKey::AccessKey, value),
            "sharedaccesssignature" => builder = builder.with_config(AzureConfigKey::SasKey, value),
            "endpointsuffix" => suffix = value,
            "defaultendpointsprotocol" => protocol = value,
            "blobendpoint" => endpoint = Some(value.trim_end_matches('/').to_owned()),
            "usedevelopmentstorage" => builder = builder.with_config(AzureConfigKey::UseEmulator, value),
            "queueendpoint" | "tableendpoint" | "fileendpoint" | "developmentstorageproxyuri" => {}
            _ => return Err(invalid(format!("contains an unknown key `{name}`"))),
        }
    }
    if !matches!(protocol, "http" | "https") {
        return Err(invalid("has a protocol that is neither http nor https".into()));
    }
    if let Some(account) = account {
        builder = builder.with_config(AzureConfigKey::AccountName, account);
        endpoint = endpoint.or_else(|| Some(format!("{protocol}://{account}.blob.{suffix}")));
    }
    Ok(match endpoint {
        Some(endpoint) => builder.with_endpoint(endpoint),
        None => builder,
    })
}
