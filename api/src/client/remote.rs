//! A daemon that is reached over TLS: its address, the CA of its certificate, and the token that it requires.
//!
//! Nothing, and the token least of all, is sent before the certificate has been verified for the name in the address.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hyper::Uri;
use hyper::header::HeaderValue;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{CertificateError, ClientConfig, Error, RootCertStore};

use super::exchange::Failure;
use crate::{Code, Problem, Secret};

/// Time limit for connecting, including the TLS handshake.
const TO_CONNECT: Duration = Duration::from_secs(15);

/// CA bundles of the distributions: Debian and Ubuntu; Fedora; openSUSE; Alpine.
const BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// A daemon that is reached over TLS.
pub struct Remote {
    host: String,
    port: u16,
    name: ServerName<'static>,
    authorization: HeaderValue,
    tls: Arc<ClientConfig>,
    /// The CA file, for messages.
    ca: PathBuf,
}

impl fmt::Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "https://{}", self.authority())
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Remote({self})")
    }
}

impl Remote {
    /// The daemon at `url`, `https://HOST[:PORT]`. Its certificate must be issued by a CA in the PEM file `ca`, or else
    /// by one that this host's distribution trusts.
    pub fn new(url: &str, ca: Option<&Path>, secret: &Secret) -> Result<Remote, Problem> {
        let (host, port) = address(url)?;
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(bare.to_owned()).map_err(|error| wrong_address(url, &error.to_string()))?;
        let ca = match ca {
            Some(ca) => ca.to_owned(),
            None => BUNDLES.iter().map(PathBuf::from).find(|path| path.exists()).ok_or_else(|| {
                Problem::new(Code::Failed, "this host has no trusted CA certificates")
                    .advise("install ca-certificates, or give the daemon's CA certificate with --ca FILE")
            })?,
        };
        let config =
            ClientConfig::builder_with_provider(Arc::new(default_provider())).with_safe_default_protocol_versions();
        let config = config.map_err(|error| Problem::failed("set up TLS", error))?;
        let mut tls = config.with_root_certificates(trusted(&ca)?).with_no_client_auth();
        tls.alpn_protocols = vec![b"http/1.1".to_vec()];
        let mut authorization = HeaderValue::try_from(format!("Bearer {}", secret.as_str()))
            .map_err(|error| Problem::failed("send the token", error))?;
        authorization.set_sensitive(true);
        Ok(Remote { host: bare.to_owned(), port, name, authorization, tls: Arc::new(tls), ca })
    }

    /// The value of the `Host` header.
    pub(super) fn authority(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }

    /// The value of the `Authorization` header, with the token.
    pub(super) fn authorization(&self) -> HeaderValue {
        self.authorization.clone()
    }

    /// Connects to the daemon.
    pub(super) async fn connect(&self) -> Result<TlsStream<TcpStream>, Failure> {
        let connected = async {
            let stream = TcpStream::connect((self.host.as_str(), self.port)).await?;
            stream.set_nodelay(true)?;
            TlsConnector::from(self.tls.clone()).connect(self.name.clone(), stream).await
        };
        match tokio::time::timeout(TO_CONNECT, connected).await {
            Ok(connected) => connected.map_err(|error| self.unreachable(&error)),
            Err(_) => Err(self.unreachable(&io::ErrorKind::TimedOut.into())),
        }
    }

    /// Nothing listens there, or this client has no access, or it is a different server.
    fn unreachable(&self, error: &io::Error) -> Failure {
        let refused = |why: &dyn fmt::Display, advice: String| {
            let what = format!("taplined at {self} is not trusted: {why}");
            Failure::Refused(Problem::new(Code::Failed, what).advise(advice))
        };
        let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) else {
            let start = "check that taplined runs there, that api.listen in its configuration has this port, and that \
                no firewall blocks it";
            let what = format!("cannot reach taplined at {self}: {error}");
            return Failure::Absent(Problem::new(Code::Unreachable, what).advise(start));
        };
        match tls {
            // A server with the right name but another issuer; for example, the CA file may be older than the
            // certificate.
            Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature) => refused(
                &format_args!("no CA in {} has issued its certificate", self.ca.display()),
                "give the certificate of the CA that did with --ca FILE or TAPLINE_CA".into(),
            ),
            Error::InvalidCertificate(
                why @ (CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. }),
            ) => refused(why, "connect by a name listed in the certificate's subjectAltName".into()),
            Error::InvalidCertificate(why) => {
                refused(&format_args!("its certificate: {why}"), "replace the certificate (see docs/api.md)".into())
            }
            Error::InvalidMessage(_) => {
                refused(&"it does not speak TLS", "check that this is the port set by api.listen".into())
            }
            other => refused(other, "check its log: journalctl -u taplined".into()),
        }
    }
}

/// Host and port of an address that contains nothing else.
fn address(url: &str) -> Result<(String, u16), Problem> {
    let uri: Uri = url.parse().map_err(|error| wrong_address(url, &format!("{error}")))?;
    match uri.scheme_str() {
        Some("https") => {}
        Some("http") => return Err(wrong_address(url, "tokens are only sent over TLS: use https")),
        _ => return Err(wrong_address(url, "it does not start with https://")),
    }
    let authority = uri.authority().map(|authority| authority.as_str()).unwrap_or_default();
    if authority.contains('@') || uri.path() != "/" || uri.query().is_some() {
        return Err(wrong_address(url, "it contains more than a host and a port"));
    }
    let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(|| wrong_address(url, "the host is missing"))?;
    Ok((host.to_owned(), uri.port_u16().unwrap_or(443)))
}

fn wrong_address(url: &str, why: &str) -> Problem {
    Problem::new(Code::Invalid, format!("'{url}' is not a valid taplined address: {why}"))
        .advise("use https://HOST:PORT with the port set by api.listen on that host")
}

/// The certificates in a PEM file.
fn trusted(ca: &Path) -> Result<RootCertStore, Problem> {
    let tried = format!("read certificates from {}", ca.display());
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(ca).map_err(|error| Problem::failed(&tried, error))? {
        let certificate = certificate.map_err(|error| Problem::failed(&tried, error))?;
        // A distribution's bundle may contain unusable certificates; the others still count.
        roots.add_parsable_certificates([certificate]);
    }
    match roots.is_empty() {
        true => Err(Problem::failed(tried, "it contains none").advise("give a PEM file with a certificate: --ca FILE")),
        false => Ok(roots),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn an_address_is_https_with_host_and_optional_port() {
        assert_eq!(address("https://alpha:7443"), Ok(("alpha".into(), 7443)));
        assert_eq!(address("https://alpha/"), Ok(("alpha".into(), 443)));
        assert_eq!(address("https://[::1]:7443"), Ok(("[::1]".into(), 7443)));
        for wrong in [
            "",
            "alpha",
            "alpha:7443",
            "http://alpha",
            "https://",
            "https://me@alpha",
            "https://alpha/v1",
            "unix:/run/a",
        ] {
            assert_eq!(address(wrong).unwrap_err().code, Code::Invalid, "{wrong}");
        }
        assert!(address("http://alpha").unwrap_err().detail.contains("only sent over TLS"));
    }
}
