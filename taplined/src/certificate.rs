//! The daemon's TLS certificate and key, read from files, and read again on SIGHUP.
//!
//! TLS 1.2 and 1.3; clients use tokens instead of certificates. Those that offer protocols (ALPN) must offer HTTP/1.1:
//! clients of NBD offer none.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock};

use api::{Code, Problem};
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::config::Config;

/// Advice for files that cannot be read.
const ADVICE: &str = "api.certificate and api.key name PEM files; docs/api.md says how to make them";

/// The certificate in use.
#[derive(Debug)]
pub struct Certificate {
    files: Files,
    current: RwLock<Arc<ServerConfig>>,
}

impl Certificate {
    /// Reads the configured files, if any.
    pub fn of(config: &Config) -> Result<Option<Arc<Certificate>>, Problem> {
        let Some(files) = Files::of(config) else { return Ok(None) };
        let current = RwLock::new(files.read()?);
        Ok(Some(Arc::new(Certificate { files, current })))
    }

    /// The TLS settings for a new connection.
    pub fn current(&self) -> Arc<ServerConfig> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Reads the files again, for new connections. If that fails, the old certificate stays in use.
    pub async fn reload(&self) {
        let files = self.files.clone();
        match repo::blocking::start(move || files.read()).ended().await {
            Ok(Ok(read)) => {
                *self.current.write().unwrap_or_else(PoisonError::into_inner) = read;
                tracing::info!("certificate reloaded");
            }
            Ok(Err(problem)) => tracing::error!(advice = problem.advice, "{problem}; keeping the old one"),
            Err(error) => tracing::error!(%error, "the certificate was not reloaded; keeping the old one"),
        }
    }
}

/// The paths of the two files.
#[derive(Clone, Debug)]
struct Files {
    certificate: PathBuf,
    key: PathBuf,
}

/// Checks that the configured files can be used.
pub fn check(config: &Config) -> Result<(), Problem> {
    match Files::of(config) {
        Some(files) => files.read().map(drop),
        None => Ok(()),
    }
}

impl Files {
    /// The configured files, if any.
    fn of(config: &Config) -> Option<Files> {
        let (certificate, key) = (config.api.certificate.clone()?, config.api.key.clone()?);
        Some(Files { certificate, key })
    }

    /// Reads the files.
    fn read(&self) -> Result<Arc<ServerConfig>, Problem> {
        let (chain, key) = (self.chain()?, self.key()?);
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .and_then(|config| config.with_no_client_auth().with_single_cert(chain, key));
        let mut config = config.map_err(|error| {
            Problem::failed(format_args!("use the certificate {}", self.certificate.display()), error)
                .advise("check that api.key belongs to the first certificate in api.certificate")
        })?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }

    /// The daemon's certificate, followed by intermediate certificates.
    fn chain(&self) -> Result<Vec<CertificateDer<'static>>, Problem> {
        let tried = format!("read the certificate {}", self.certificate.display());
        let chain = CertificateDer::pem_file_iter(&self.certificate).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        match chain {
            Ok(chain) if chain.is_empty() => Err(Problem::failed(tried, "it contains none").advise(ADVICE)),
            Ok(chain) => Ok(chain),
            Err(error) => Err(Problem::failed(tried, error).advise(ADVICE)),
        }
    }

    fn key(&self) -> Result<PrivateKeyDer<'static>, Problem> {
        let tried = format!("read the key {}", self.key.display());
        let metadata = fs::metadata(&self.key).map_err(|error| Problem::failed(&tried, error).advise(ADVICE))?;
        if metadata.permissions().mode() & 0o007 != 0 {
            let what = format!("cannot {tried}: every user on this host can read it");
            return Err(Problem::new(Code::Invalid, what).advise(format!("chmod o= {}", self.key.display())));
        }
        PrivateKeyDer::from_pem_file(&self.key)
            .map_err(|error| Problem::failed(tried, error).advise("give a PEM file with a key without a passphrase"))
    }
}
