//! Makes the TLS settings of a server or a client from its certificate, its key and the authority of its peers.
//!
//! It knows nothing about files. Invariants: settings exist only for a certificate that is valid now and fits its key;
//! with an authority, no handshake is completed without a certificate signed by it, and a client always has one.
//! Sessions are not resumed, and no data is accepted before the end of a handshake.

use std::sync::Arc;

use rustls::client::{Resumption, WebPkiServerVerifier, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::{CertificateError, ClientConfig, RootCertStore, ServerConfig};

/// The TLS settings of a server.
#[derive(Clone, Debug)]
pub struct ServerTls {
    pub(super) config: Arc<ServerConfig>,
}

/// The TLS settings of a client for one server.
#[derive(Clone, Debug)]
pub struct ClientTls {
    pub(super) config: Arc<ClientConfig>,
    /// The name or address that the server's certificate must have.
    pub(super) name: ServerName<'static>,
}

/// The PEM texts from which the settings of a client are made.
pub struct ClientCredentials<'a> {
    /// The certificates of the authorities that sign those of servers.
    pub authority: &'a [u8],
    /// Lists of the certificates that the authorities have revoked, if there are any.
    pub revoked: Option<&'a [u8]>,
    /// The client's certificate, followed by intermediate certificates, and its key, if it has them.
    pub own: Option<(&'a [u8], &'a [u8])>,
}

/// The PEM texts from which TLS settings are made.
pub struct Credentials<'a> {
    /// The server's certificate, followed by intermediate certificates.
    pub certificate: &'a [u8],
    /// The key of the server's certificate.
    pub key: &'a [u8],
    /// The certificates of the authorities that sign those of clients; `None` accepts every client.
    pub authority: Option<&'a [u8]>,
    /// Lists of the certificates that the authorities have revoked, if there are any.
    pub revoked: Option<&'a [u8]>,
}

/// A part of [`Credentials`] or [`ClientCredentials`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// The own certificate.
    Certificate,
    /// Its key.
    Key,
    /// The authority of peers.
    Authority,
    /// The revocation lists.
    Revoked,
    /// The name of the server.
    Name,
}

/// Why credentials cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{why}")]
pub struct CredentialsError {
    /// The part that is at fault.
    pub part: Part,
    why: Why,
}

#[derive(Debug, thiserror::Error)]
enum Why {
    #[error("it contains no certificate")]
    NoCertificate,
    #[error("it contains no unencrypted private key")]
    NoKey,
    #[error("it contains no revocation list")]
    NoList,
    #[error("it is not a PEM file: {0}")]
    NotPem(pem::Error),
    #[error("it is not an X.509 certificate of version 3")]
    NotX509,
    #[error("the certificate has expired")]
    Expired,
    #[error("the certificate is not valid yet")]
    NotYetValid,
    #[error("the certificate is not for a server")]
    NotForServers,
    #[error("it is neither a DNS name nor an address")]
    NotAName,
    #[error("the key does not belong to the certificate")]
    OtherKey,
    #[error("{0}")]
    Unusable(String),
}

impl ServerTls {
    /// Checks the credentials, and makes settings of them.
    pub fn new(credentials: &Credentials<'_>) -> Result<ServerTls, CredentialsError> {
        let chain = certificates(Part::Certificate, credentials.certificate)?;
        check_validity(&chain)?;
        let key = private_key(credentials.key)?;
        let builder = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable(Part::Certificate, error))?;
        let builder = match credentials.authority {
            None => builder.with_no_client_auth(),
            Some(authority) => builder.with_client_cert_verifier(verifier(authority, credentials.revoked)?),
        };
        let mut config = builder.with_single_cert(chain, key).map_err(own_unusable)?;
        // NBD's connections are few and long. A client is to show its certificate for each.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(ServerTls { config: Arc::new(config) })
    }
}

impl ClientTls {
    /// Checks the credentials, and makes settings of them for the server with this name or address.
    pub fn new(credentials: &ClientCredentials<'_>, name: &str) -> Result<ClientTls, CredentialsError> {
        let name = ServerName::try_from(name.to_owned())
            .map_err(|_| CredentialsError { part: Part::Name, why: Why::NotAName })?;
        let provider = Arc::new(default_provider());
        let roots = Arc::new(roots(credentials.authority)?);
        let verifier = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider));
        let verifier = match credentials.revoked {
            None => verifier,
            Some(revoked) => verifier.with_crls(revocation_lists(revoked)?),
        };
        let verifier = verifier.build().map_err(|error| unusable(Part::Revoked, error))?;
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| unusable(Part::Authority, error))?
            .with_webpki_verifier(verifier);
        let mut config = match credentials.own {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let chain = certificates(Part::Certificate, certificate)?;
                match check_validity(&chain) {
                    // It is for a client.
                    Err(CredentialsError { why: Why::NotForServers, .. }) => {}
                    checked => checked?,
                }
                builder.with_client_auth_cert(chain, private_key(key)?).map_err(own_unusable)?
            }
        };
        config.resumption = Resumption::disabled();
        Ok(ClientTls { config: Arc::new(config), name })
    }
}

fn private_key(pem: &[u8]) -> Result<PrivateKeyDer<'static>, CredentialsError> {
    PrivateKeyDer::from_pem_slice(pem).map_err(|error| CredentialsError {
        part: Part::Key,
        why: match error {
            pem::Error::NoItemsFound => Why::NoKey,
            error => Why::NotPem(error),
        },
    })
}

fn own_unusable(error: rustls::Error) -> CredentialsError {
    match error {
        rustls::Error::InconsistentKeys(_) => CredentialsError { part: Part::Key, why: Why::OtherKey },
        rustls::Error::InvalidCertificate(_) => unusable(Part::Certificate, error),
        error => unusable(Part::Key, error),
    }
}

/// Fails if clients would refuse the certificate whatever authority they trust. It is not verified further: its
/// authority is the clients' business, and may be another one than theirs.
fn check_validity(chain: &[CertificateDer<'_>]) -> Result<(), CredentialsError> {
    let failed = |why| CredentialsError { part: Part::Certificate, why };
    let [certificate, rest @ ..] = chain else { return Err(failed(Why::NoCertificate)) };
    let parsed = ParsedCertificate::try_from(certificate).map_err(|_| failed(Why::NotX509))?;
    // Without any root, a good certificate fails as one by an unknown issuer: its own properties are examined first.
    let algorithms = default_provider().signature_verification_algorithms;
    let roots = RootCertStore::empty();
    let verified = verify_server_cert_signed_by_trust_anchor(&parsed, &roots, rest, UnixTime::now(), algorithms.all);
    match verified {
        Err(rustls::Error::InvalidCertificate(why)) => match why {
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => Err(failed(Why::Expired)),
            CertificateError::NotValidYet | CertificateError::NotValidYetContext { .. } => {
                Err(failed(Why::NotYetValid))
            }
            CertificateError::InvalidPurpose | CertificateError::InvalidPurposeContext { .. } => {
                Err(failed(Why::NotForServers))
            }
            _ => Ok(()),
        },
        _ => Ok(()),
    }
}

/// What verifies the certificates of clients.
fn verifier(authority: &[u8], revoked: Option<&[u8]>) -> Result<Arc<dyn ClientCertVerifier>, CredentialsError> {
    let builder =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots(authority)?), Arc::new(default_provider()));
    let builder = match revoked {
        None => builder,
        Some(revoked) => builder.with_crls(revocation_lists(revoked)?),
    };
    builder.build().map_err(|error| unusable(Part::Revoked, error))
}

fn roots(authority: &[u8]) -> Result<RootCertStore, CredentialsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(Part::Authority, authority)? {
        roots.add(certificate).map_err(|error| unusable(Part::Authority, error))?;
    }
    Ok(roots)
}

fn certificates(part: Part, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, CredentialsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    match found {
        Ok(found) if found.is_empty() => Err(CredentialsError { part, why: Why::NoCertificate }),
        found => found.map_err(|error| CredentialsError { part, why: Why::NotPem(error) }),
    }
}

fn revocation_lists(pem: &[u8]) -> Result<Vec<CertificateRevocationListDer<'static>>, CredentialsError> {
    let part = Part::Revoked;
    let found: Result<Vec<_>, _> = CertificateRevocationListDer::pem_slice_iter(pem).collect();
    match found {
        Ok(found) if found.is_empty() => Err(CredentialsError { part, why: Why::NoList }),
        found => found.map_err(|error| CredentialsError { part, why: Why::NotPem(error) }),
    }
}

fn unusable(part: Part, error: impl std::fmt::Display) -> CredentialsError {
    CredentialsError { part, why: Why::Unusable(error.to_string()) }
}
