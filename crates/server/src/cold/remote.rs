//! An account of S3, or of a store that speaks its protocol, by the SDK of AWS.

use std::any::Any;
use std::time::Duration;

use aws_config::retry::RetryConfig;
use aws_config::timeout::TimeoutConfig;
use aws_sdk_s3::config::SharedHttpClient;
use aws_smithy_http_client::Builder;
use aws_smithy_http_client::tls::rustls_provider::CryptoMode;
use aws_smithy_http_client::tls::{Provider, TlsContext, TrustStore};
use hyper::StatusCode;
use penstock_error::{Error, Result};
use penstock_storage::Options;
use s3s::dto::*;
use s3s::{S3, S3Error, S3ErrorCode, S3Request, S3Response, S3Result, s3_error};
use s3s_aws::Proxy;
use tokio_rustls::rustls::RootCertStore;
use tokio_rustls::rustls::pki_types::CertificateDer;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;

use super::request;
use super::taking::Taking;
use crate::metrics::{Counted, Level};
use crate::operations::each_operation;

/// Tries of a request that fails for a reason that may pass.
const TRIES: u32 = 4;
/// How long it may take to connect.
const CONNECTS: Duration = Duration::from_secs(10);
/// Connections that stay open while they have nothing to do.
const IDLE_CONNECTIONS: usize = 256;

/// A cold store of this account: all of its buckets, or one.
pub struct Remote {
    account: Proxy,
    /// The same account, for bodies that may take long to arrive.
    uploads: Proxy,
    /// How long the account may neither take bytes nor answer.
    timeout: Duration,
    /// The only bucket that is served.
    bucket: Option<String>,
    /// Requests that have no response yet.
    running: Level,
}

impl Remote {
    /// Open `s3://bucket`, or `s3://` for all buckets. Returns the store, and a text that identifies it.
    pub async fn open(uri: &str, options: &Options, running: Level) -> Result<(Remote, String)> {
        let bucket = bucket_of(uri)?;
        let (client, place) = client(options).await?;
        let timeout = options.timeout()?;
        let no_limit = TimeoutConfig::builder().connect_timeout(CONNECTS).disable_read_timeout().build();
        let uploads = aws_sdk_s3::Client::from_conf(client.config().to_builder().timeout_config(no_limit).build());
        let remote = Remote {
            account: client.into(),
            uploads: uploads.into(),
            timeout,
            bucket: bucket.map(str::to_owned),
            running,
        };
        Ok((remote, format!("serve {place}")))
    }

    /// Send a first request, which loads certificates and credentials, so that no client waits for them. Fails if the account cannot be reached.
    pub async fn try_out(&self) -> S3Result<()> {
        match &self.bucket {
            Some(bucket) => {
                let input = HeadBucketInput { bucket: bucket.clone(), ..HeadBucketInput::default() };
                passed(self.account.head_bucket(request(input)).await).map(drop)
            }
            None => passed(self.account.list_buckets(request(ListBucketsInput::default())).await).map(drop),
        }
    }

    fn check(&self, bucket: &str) -> S3Result<()> {
        match &self.bucket {
            Some(only) if only != bucket => Err(s3_error!(NoSuchBucket, "this server serves only the bucket `{only}`")),
            _ => Ok(()),
        }
    }

    /// Fail if the source of a copy is in a bucket that is not served.
    fn check_source(&self, source: Option<&hyper::header::HeaderValue>) -> S3Result<()> {
        let Some(source) = source.filter(|_| self.bucket.is_some()) else { return Ok(()) };
        let source = source.to_str().ok().and_then(|source| CopySource::parse(source).ok());
        match source {
            Some(CopySource::Bucket { bucket, .. }) => self.check(&bucket),
            _ => Err(s3_error!(InvalidArgument, "the copy source cannot be parsed as bucket/key")),
        }
    }
}

/// Return the only bucket that a URI of a cold store names, or None if it names all.
pub fn bucket_of(uri: &str) -> Result<Option<&str>> {
    let bucket = uri.strip_prefix("s3://").unwrap_or_default().trim_end_matches('/');
    match bucket.split_once('/') {
        None => Ok(Some(bucket).filter(|bucket| !bucket.is_empty())),
        Some((bucket, _)) => {
            Err(Error::new("invalid-uri", format!("cannot serve `{uri}`: it names a folder in a bucket"))
                .hint(format!("serve the whole bucket, s3://{bucket}, and give keys rights on a prefix")))
        }
    }
}

/// Build a client. Credentials, region and endpoint come from the options or from where AWS's tools look for them. Also returns where its account is.
pub async fn client(options: &Options) -> Result<(aws_sdk_s3::Client, String)> {
    let mut loader = aws_config::from_env();
    if let (Some(key), Some(secret)) = (options.given("access_key_id"), options.given("secret_access_key")) {
        let token = options.given("session_token").map(str::to_owned);
        loader = loader.credentials_provider(aws_sdk_s3::config::Credentials::new(key, secret, token, None, "options"));
    }
    if let Some(profile) = options.given("profile") {
        loader = loader.profile_name(profile);
    }
    if options.flag("anonymous")? {
        loader = loader.no_credentials();
    }
    // The variable SSL_CERT_FILE is read by the connections themselves.
    let bundle = options.given("ca_bundle").map(str::to_owned).or_else(|| std::env::var("AWS_CA_BUNDLE").ok());
    loader = loader.http_client(connections(bundle.filter(|path| !path.is_empty()).as_deref())?);
    let shared = loader.load().await;
    let mut config = aws_sdk_s3::config::Builder::from(&shared)
        .retry_config(RetryConfig::standard().with_max_attempts(TRIES))
        .timeout_config(TimeoutConfig::builder().connect_timeout(CONNECTS).read_timeout(options.timeout()?).build());
    let region = options
        .get("region")
        .or_else(|| shared.region().map(ToString::to_string))
        .unwrap_or_else(|| "us-east-1".into());
    config = config.region(aws_sdk_s3::config::Region::new(region.clone()));
    let endpoint = options.get("endpoint_url").or_else(|| shared.endpoint_url().map(str::to_owned));
    if let Some(endpoint) = &endpoint {
        // Few servers have a DNS entry for each bucket.
        config = config.endpoint_url(endpoint).force_path_style(!options.flag("virtual_hosted")?);
        // Servers other than AWS's rarely know new checksums.
        config = config.request_checksum_calculation(aws_sdk_s3::config::RequestChecksumCalculation::WhenRequired);
    }
    let place = endpoint.unwrap_or_else(|| format!("aws {region}"));
    Ok((aws_sdk_s3::Client::from_conf(config.build()), place))
}

/// Return the text of an error and of its causes, each once.
pub fn causes(first: Option<&(dyn std::error::Error + 'static)>) -> String {
    let mut texts: Vec<String> =
        std::iter::successors(first, |cause| cause.source()).map(ToString::to_string).collect();
    texts.dedup();
    texts.join(": ")
}

/// Return connections that trust the certificates of the system and of a file, if one is given.
fn connections(bundle: Option<&str>) -> Result<SharedHttpClient> {
    let mut trust = TrustStore::default();
    if let Some(path) = bundle {
        trust = trust.with_pem_certificate(certificates(path)?);
    }
    let context = TlsContext::builder().with_trust_store(trust).build();
    let context = context.map_err(|error| Error::new("internal", format!("cannot create a TLS context: {error}")))?;
    let builder = Builder::new().pool_max_idle_per_host(IDLE_CONNECTIONS);
    Ok(builder.tls_provider(Provider::Rustls(CryptoMode::AwsLc)).tls_context(context).build_https())
}

/// Read a file of certificates, and check each.
fn certificates(path: &str) -> Result<Vec<u8>> {
    let unreadable = |why: String| Error::new("invalid-argument", format!("cannot read the CA bundle `{path}`: {why}"));
    let pem = penstock_storage::private::read_text(path.as_ref()).map_err(|error| unreadable(error.to_string()))?;
    let mut store = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let added = certificate
            .map_err(|error| error.to_string())
            .and_then(|one| store.add(one).map_err(|error| error.to_string()));
        added.map_err(unreadable)?;
    }
    if store.is_empty() {
        return Err(unreadable("no certificate found".into()).hint("the file must be in PEM format"));
    }
    Ok(pem)
}

/// An account that cannot be reached is not an error of this server.
fn passed<T>(result: S3Result<S3Response<T>>) -> S3Result<S3Response<T>> {
    result.map_err(|mut error| {
        if error.status_code().is_some_and(|status| status.is_success()) {
            // Copies and completed uploads may fail in the body of a response that has begun.
            error.set_status_code(error.code().status_code().unwrap_or(StatusCode::INTERNAL_SERVER_ERROR));
        }
        // Clients of S3 know 503.
        if error.code().as_str() == "TooManyRequests" || error.status_code() == Some(StatusCode::TOO_MANY_REQUESTS) {
            return s3_error!(SlowDown, "the cold store is receiving too many requests; try again later");
        }
        if *error.code() == S3ErrorCode::InternalError && error.message().is_none() {
            let why = causes(error.source().map(|cause| cause as _));
            if why.contains("failed to construct request") {
                return s3_error!(
                    InvalidRequest,
                    "this request cannot be sent to the cold store, for example because its key consists of spaces"
                );
            }
            match error.status_code().map(|status| status.as_u16()) {
                // Responses to HEAD have no body that could say more.
                Some(404) => error = S3Error::new(S3ErrorCode::NoSuchKey),
                Some(304) => error = S3Error::new(S3ErrorCode::NotModified),
                Some(412) => error = S3Error::new(S3ErrorCode::PreconditionFailed),
                Some(416) => error = S3Error::new(S3ErrorCode::InvalidRange),
                Some(403) => error = s3_error!(AccessDenied, "the cold store refused access"),
                Some(400) => error = s3_error!(InvalidRequest, "the cold store refused the request"),
                _ => error = s3_error!(ServiceUnavailable, "the cold store failed: {why}"),
            }
        }
        error
    })
}

/// Refuse keys that some stores, such as MinIO, take for another: `/k` and `k`, and `k__XLDIR__` and `k/`. Rights, a cache, a quota and the order of puts
/// would see two objects.
fn check_keys(input: &dyn Any) -> S3Result<()> {
    let source = |source: &CopySource| match source {
        CopySource::Bucket { key, .. } => key.to_string(),
        _ => String::new(),
    };
    let mut keys = Vec::new();
    macro_rules! of {
        ($($input:ident),*) => {
            $(if let Some(input) = input.downcast_ref::<$input>() {
                keys.push(input.key.clone());
            })*
        };
    }
    of!(
        GetObjectInput, HeadObjectInput, GetObjectAttributesInput, PutObjectInput, DeleteObjectInput, CopyObjectInput,
        UploadPartCopyInput
    );
    of!(
        CreateMultipartUploadInput, UploadPartInput, CompleteMultipartUploadInput, AbortMultipartUploadInput,
        ListPartsInput
    );
    keys.extend(input.downcast_ref::<CopyObjectInput>().map(|input| source(&input.copy_source)));
    keys.extend(input.downcast_ref::<UploadPartCopyInput>().map(|input| source(&input.copy_source)));
    keys.extend(
        input
            .downcast_ref::<DeleteObjectsInput>()
            .iter()
            .flat_map(|input| &input.delete.objects)
            .map(|object| object.key.clone()),
    );
    match keys.iter().find(|key| key.starts_with('/') || key.contains("__XLDIR__")) {
        None => Ok(()),
        Some(key) => Err(s3_error!(
            InvalidArgument,
            "some stores confuse the key `{key}` with another one; access it without this server"
        )),
    }
}

/// Let the body of an upload be watched. Other requests have none.
fn watched(input: &mut dyn Any) -> Option<Taking> {
    let body = match input.downcast_mut::<PutObjectInput>() {
        Some(put) => &mut put.body,
        None => &mut input.downcast_mut::<UploadPartInput>()?.body,
    };
    let taking = Taking::new();
    *body = body.take().map(|body| taking.body(body));
    Some(taking)
}

/// Pass operations on to the account.
macro_rules! pass {
    (account $account:tt $($group:ident { $($operation:ident($input:ident) -> $output:ident $row:tt;)* })*) => {
        #[async_trait::async_trait]
        impl S3 for Remote {
            $($(async fn $operation(&self, mut request: S3Request<$input>) -> S3Result<S3Response<$output>> {
                self.check(&request.input.bucket)?;
                self.check_source(request.headers.get("x-amz-copy-source"))?;
                check_keys(&request.input)?;
                let _running = Counted::begin(&self.running);
                match watched(&mut request.input) {
                    None => passed(self.account.$operation(request).await),
                    Some(taking) => passed(taking.within(self.timeout, self.uploads.$operation(request)).await),
                }
            })*)*

            async fn list_buckets(&self, request: S3Request<ListBucketsInput>) -> S3Result<S3Response<ListBucketsOutput>> {
                let _running = Counted::begin(&self.running);
                let mut response = passed(self.account.list_buckets(request).await)?;
                if let (Some(only), Some(buckets)) = (&self.bucket, &mut response.output.buckets) {
                    buckets.retain(|bucket| bucket.name.as_ref() == Some(only));
                }
                Ok(response)
            }
        }
    };
}

each_operation!(pass);
