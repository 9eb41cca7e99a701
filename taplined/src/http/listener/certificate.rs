//! The certificate by which clients know the daemon, and its key: read from files, made into what TLS needs.
//!
//! TLS 1.2 and 1.3, and HTTP/1.1 only; clients show no certificates, they have tokens.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;

use api::{Code, Problem};
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use crate::config::Config;

/// What to do about files that cannot be read.
const ADVICE: &str = "api.certificate and api.key name PEM files; docs/api.md says how to make them";

/// Where the two are.
#[derive(Clone, Debug)]
pub struct Files {
    certificate: PathBuf,
    key: PathBuf,
}

/// Sees whether what the configuration names can be used.
pub fn check(config: &Config) -> Result<(), Problem> {
    match Files::of(config) {
        Some(files) => files.read().map(drop),
        None => Ok(()),
    }
}

impl Files {
    /// Those of a configuration, if it has any.
    pub fn of(config: &Config) -> Option<Files> {
        let (certificate, key) = (config.api.certificate.clone()?, config.api.key.clone()?);
        Some(Files { certificate, key })
    }

    /// Reads them.
    pub fn read(&self) -> Result<Arc<ServerConfig>, Problem> {
        let (chain, key) = (self.chain()?, self.key()?);
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .and_then(|config| config.with_no_client_auth().with_single_cert(chain, key));
        let mut config = config.map_err(|error| {
            Problem::failed(format_args!("use the certificate {}", self.certificate.display()), error)
                .advise("see that api.key is the key of the first certificate in api.certificate")
        })?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }

    /// The daemon's certificate, and those that lead from it to one that clients have.
    fn chain(&self) -> Result<Vec<CertificateDer<'static>>, Problem> {
        let tried = format!("read the certificate {}", self.certificate.display());
        let chain = CertificateDer::pem_file_iter(&self.certificate).and_then(Iterator::collect::<Result<Vec<_>, _>>);
        match chain {
            Ok(chain) if chain.is_empty() => Err(Problem::failed(tried, "there is none in it").advise(ADVICE)),
            Ok(chain) => Ok(chain),
            Err(error) => Err(Problem::failed(tried, error).advise(ADVICE)),
        }
    }

    fn key(&self) -> Result<PrivateKeyDer<'static>, Problem> {
        let tried = format!("read the key {}", self.key.display());
        let metadata = fs::metadata(&self.key).map_err(|error| Problem::failed(&tried, error).advise(ADVICE))?;
        if metadata.permissions().mode() & 0o007 != 0 {
            let what = format!("cannot {tried}: everybody on this host may");
            return Err(Problem::new(Code::Invalid, what).advise(format!("chmod o= {}", self.key.display())));
        }
        PrivateKeyDer::from_pem_file(&self.key)
            .map_err(|error| Problem::failed(tried, error).advise("name a PEM file with a key that has no passphrase"))
    }
}
