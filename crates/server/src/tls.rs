//! Certificates, which can be replaced while the server runs, and when they expire.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use penstock_error::{Error, Result};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use x509_cert::Certificate;
use x509_cert::der::Decode as _;

use crate::meta::since_1970;
use crate::metrics::{CertificateLabels, Metrics};

/// An operator is reminded of a certificate that expires this soon.
const SOON: Duration = Duration::from_secs(14 * 24 * 3600);

/// A certificate chain and its key, from two files.
pub struct Certificates {
    chain: PathBuf,
    key: PathBuf,
    current: RwLock<Current>,
}

/// What connections use now.
struct Current {
    config: Arc<ServerConfig>,
    /// When the first certificate of the chain expires, since 1970. None if that cannot be read.
    expires: Option<Duration>,
}

impl Certificates {
    pub fn open(chain: &Path, key: &Path) -> Result<Certificates> {
        Ok(Certificates { chain: chain.into(), key: key.into(), current: RwLock::new(read(chain, key)?) })
    }

    /// Read the files again, for connections that follow. If they are not valid, the certificate stays as it is.
    pub fn reload(&self) -> Result<()> {
        let new = read(&self.chain, &self.key)?;
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = new;
        Ok(())
    }

    pub fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(self.current.read().unwrap_or_else(PoisonError::into_inner).config.clone())
    }

    /// Count when the certificate expires, and note it if that is soon.
    pub fn watch(&self, metrics: &Metrics, note: impl Fn(&str)) {
        let Some(expires) = self.current.read().unwrap_or_else(PoisonError::into_inner).expires else {
            return note(&format!("the expiry date of the certificate `{}` cannot be read", self.chain.display()));
        };
        let labels = CertificateLabels { file: self.chain.display().to_string() };
        metrics.certificate_expires.get_or_create(&labels).set(i64::try_from(expires.as_secs()).unwrap_or(i64::MAX));
        if let Some(text) = reminder(expires, since_1970()) {
            note(&format!("the certificate `{}` {text}; replace the files and send SIGHUP", self.chain.display()));
        }
    }
}

/// Return what to say of a certificate that expires soon.
fn reminder(expires: Duration, now: Duration) -> Option<String> {
    match expires.checked_sub(now) {
        None => Some("has expired, and clients will refuse it".to_owned()),
        Some(left) if left < SOON => Some(format!("expires in {:.1} days", left.as_secs_f64() / 86_400.0)),
        Some(_) => None,
    }
}

/// Return when the first of some certificates expires, since 1970.
fn expires(chain: &[CertificateDer<'_>]) -> Option<Duration> {
    let each = chain
        .iter()
        .map(|der| Some(Certificate::from_der(der).ok()?.tbs_certificate().validity().not_after.to_unix_duration()));
    each.min().flatten()
}

fn read(chain: &Path, key: &Path) -> Result<Current> {
    let unusable_file = |path: &Path, why: String| {
        Error::new("invalid-argument", format!("cannot use certificate `{}`: {why}", path.display()))
            .hint("specify files in PEM format")
    };
    let text = penstock_storage::private::read_text(chain).map_err(|error| unusable_file(chain, error.to_string()))?;
    let certificates = CertificateDer::pem_slice_iter(&text).collect::<std::result::Result<Vec<_>, _>>();
    let certificates = certificates.map_err(|error| unusable_file(chain, error.to_string()))?;
    if certificates.is_empty() {
        return Err(unusable_file(chain, "no certificate found".into()));
    }
    let expires = expires(&certificates);
    let secret = penstock_storage::private::read_secret(key).map_err(|why| unusable_file(key, why))?;
    let private = PrivateKeyDer::from_pem_slice(&secret).map_err(|error| unusable_file(key, error.to_string()))?;
    let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(certificates, private));
    let config = config.map(Arc::new).map_err(|error| unusable_file(chain, error.to_string()))?;
    Ok(Current { config, expires })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_that_expire_within_two_weeks_are_noted() {
        let (day, now) = (Duration::from_secs(86_400), Duration::from_secs(1_800_000_000));
        assert_eq!(reminder(now + day * 15, now), None);
        assert_eq!(reminder(now + day * 14, now), None);
        assert_eq!(reminder(now + day * 13, now).as_deref(), Some("expires in 13.0 days"));
        assert_eq!(reminder(now, now).as_deref(), Some("expires in 0.0 days"));
        assert!(reminder(now - day, now).is_some_and(|text| text.starts_with("has expired")));
    }
}
