//! Builds the client for `gs://bucket/path`, from the options and variables that Google Cloud users have.

use object_store::ClientOptions;
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use penstock_error::Result;

use super::place::{StorePlace, no_retry, own_option};
use super::service::Connector;
use crate::options::Options;

pub const CREDENTIALS_HINT: &str = "set GOOGLE_APPLICATION_CREDENTIALS to a key file, or log in with `gcloud auth application-default login`, or pass storage_options={\"service_account_path\": …}; for public data, pass {\"anonymous\": True}";

pub fn builder(
    place: &StorePlace,
    options: &Options,
    client: ClientOptions,
    connector: Connector,
) -> Result<GoogleCloudStorageBuilder> {
    let mut builder = GoogleCloudStorageBuilder::from_env().with_client_options(client).with_bucket_name(&place.host);
    // The variable by which Google's own libraries find an emulator, which asks for no credentials.
    if let Some(host) = std::env::var("STORAGE_EMULATOR_HOST").ok().filter(|host| !host.is_empty()) {
        let address = if host.contains("://") { host } else { format!("http://{host}") };
        let address = address.trim_end_matches('/').to_owned();
        builder = builder.with_config(GoogleConfigKey::BaseUrl, address).with_skip_signature(true);
    }
    if let Some(endpoint) = options.given("endpoint_url") {
        builder = builder.with_config(GoogleConfigKey::BaseUrl, endpoint.trim_end_matches('/'));
    }
    for (name, value) in options.others() {
        builder = builder.with_config(name.parse().map_err(|_| own_option(place, name, "Google"))?, value);
    }
    if options.flag("anonymous")? {
        builder = builder.with_skip_signature(true);
    }
    Ok(builder.with_retry(no_retry()).with_http_connector(connector))
}
