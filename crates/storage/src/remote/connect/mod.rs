//! Builds an `object_store` client from a URI and options.

mod aws;
mod azure;
mod google;
pub mod place;
pub mod service;

use std::sync::Arc;
use std::time::Duration;

use object_store::client::{HttpClient, HttpConnector as _};
use object_store::http::HttpBuilder;
use object_store::list::PaginatedListStore;
use object_store::multipart::MultipartStore;
use object_store::path::Path;
use object_store::signer::Signer;
use object_store::{Certificate, ClientOptions, ObjectStore};
use penstock_error::{Error, Result};

use self::place::{StorePlace, no_retry, own_option};
use self::service::{Connector, Traffic, chain};
use crate::options::Options;

/// A client that can read, and may also list and write.
#[derive(Clone)]
pub struct Client {
    pub store: Arc<dyn ObjectStore>,
    /// Paginated listings, or None if the store cannot list.
    pub pages: Option<Arc<dyn PaginatedListStore>>,
    /// Multipart uploads, or None if the store is read-only.
    pub parts: Option<Arc<dyn MultipartStore>>,
    /// Reads of many ranges in one request, or None if no server of this kind has them.
    pub batches: Option<Batches>,
}

/// What batches are sent with.
#[derive(Clone)]
pub struct Batches {
    pub signer: Arc<dyn Signer>,
    pub http: HttpClient,
    /// A key below the root of the store, which need not exist.
    pub path: Path,
}

impl std::fmt::Debug for Batches {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "Batches({})", self.path)
    }
}

impl Client {
    fn writable<S: ObjectStore + PaginatedListStore + MultipartStore>(store: S) -> Client {
        let store = Arc::new(store);
        Client { store: store.clone(), pages: Some(store.clone()), parts: Some(store), batches: None }
    }
}

/// Build the client for a place. Sends no request.
pub fn connect(place: &StorePlace, options: &Options, traffic: Arc<Traffic>) -> Result<Client> {
    let invalid = |error: object_store::Error| {
        Error::new("invalid-argument", format!("cannot open `{}`: {}", place.uri, chain(&error)))
            .hint("check storage_options and the environment variables")
    };
    let client = client_options(options)?;
    let connector = Connector(traffic);
    match place.scheme.as_str() {
        "s3" => {
            let http = connector.connect(&client).map_err(invalid)?;
            let store = aws::builder(place, options, client, connector)?.build().map_err(invalid)?;
            let batches = Batches { signer: Arc::new(store.clone()), http, path: place.prefix.clone().join("-") };
            Ok(Client { batches: Some(batches), ..Client::writable(store) })
        }
        "gs" => Ok(Client::writable(google::builder(place, options, client, connector)?.build().map_err(invalid)?)),
        "az" => Ok(Client::writable(azure::builder(place, options, client, connector)?.build().map_err(invalid)?)),
        _ => {
            options.others().try_for_each(|(name, _)| Err(own_option(place, name, "Azure and Google")))?;
            let builder = HttpBuilder::new()
                .with_url(&place.host)
                .with_client_options(client)
                .with_retry(no_retry())
                .with_http_connector(connector);
            Ok(Client { store: Arc::new(builder.build().map_err(invalid)?), pages: None, parts: None, batches: None })
        }
    }
}

/// Return what to do without credentials.
pub fn credentials_hint(place: &StorePlace) -> &'static str {
    match place.scheme.as_str() {
        "az" => azure::CREDENTIALS_HINT,
        "gs" => google::CREDENTIALS_HINT,
        _ => aws::CREDENTIALS_HINT,
    }
}

fn client_options(options: &Options) -> Result<ClientOptions> {
    let timeout = options.timeout()?;
    let mut client = ClientOptions::new()
        .with_allow_http(true)
        .with_connect_timeout((timeout / 2).min(Duration::from_millis(2500))) // A deadline error would not name the cause.
        .with_read_timeout(timeout.min(Duration::from_secs(15)))
        .with_timeout_disabled()
        .with_pool_idle_timeout(Duration::from_secs(30))
        .with_http1_only();
    if let Some(bundle) = options.get("ca_bundle") {
        let unreadable =
            |why: String| Error::new("invalid-argument", format!("cannot read the CA bundle `{bundle}`: {why}"));
        let pem = std::fs::read(&bundle).map_err(|error| unreadable(error.to_string()))?;
        let certificates = Certificate::from_pem_bundle(&pem).map_err(|error| unreadable(error.to_string()))?;
        if certificates.is_empty() {
            return Err(unreadable("no certificate found".into()).hint("the file must be in PEM format"));
        }
        for certificate in certificates {
            client = client.with_root_certificate(certificate);
        }
    }
    Ok(client)
}
