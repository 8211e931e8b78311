//! Certificates, which can be replaced while the server runs.

use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use penstock_error::{Error, Result};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::aws_lc_rs;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// A certificate chain and its key, from two files.
pub struct Certificates {
    chain: PathBuf,
    key: PathBuf,
    current: RwLock<Arc<ServerConfig>>,
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
        TlsAcceptor::from(self.current.read().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

fn read(chain: &Path, key: &Path) -> Result<Arc<ServerConfig>> {
    let bad = |path: &Path, why: String| {
        Error::new("invalid-argument", format!("cannot use certificate `{}`: {why}", path.display())).hint("give files in PEM format")
    };
    let certificates = CertificateDer::pem_file_iter(chain).and_then(Iterator::collect::<std::result::Result<Vec<_>, _>>);
    let certificates = certificates.map_err(|error| bad(chain, error.to_string()))?;
    if certificates.is_empty() {
        return Err(bad(chain, "no certificate found".into()));
    }
    let secret = penstock_storage::private::read_secret(key).map_err(|why| bad(key, why))?;
    let private = PrivateKeyDer::from_pem_slice(&secret).map_err(|error| bad(key, error.to_string()))?;
    let config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(certificates, private));
    config.map(Arc::new).map_err(|error| bad(chain, error.to_string()))
}
