//! A daemon that is reached over TLS: its address, who vouches for its certificate, and the token that it wants.
//!
//! Nothing is sent before the certificate was found good for the name in the address, the token least of all.

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

/// How long a connection may take, its handshake with it.
const TO_CONNECT: Duration = Duration::from_secs(15);

/// Where distributions keep the certificates of those who vouch: Debian and Ubuntu; Fedora; openSUSE; Alpine.
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
    /// Who vouches, for messages.
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
    /// The daemon at `url`, `https://HOST[:PORT]`. Its certificate must be vouched for by one in the PEM file `ca`, or by one
    /// that this host's distribution trusts.
    pub fn new(url: &str, ca: Option<&Path>, secret: &Secret) -> Result<Remote, Problem> {
        let (host, port) = address(url)?;
        let bare = host.trim_start_matches('[').trim_end_matches(']');
        let name = ServerName::try_from(bare.to_owned()).map_err(|error| wrong_address(url, &error.to_string()))?;
        let ca = match ca {
            Some(ca) => ca.to_owned(),
            None => BUNDLES.iter().map(PathBuf::from).find(|path| path.exists()).ok_or_else(|| {
                Problem::new(Code::Failed, "this host has no certificates of authorities that it trusts")
                    .advise("install ca-certificates, or name the file that vouches for the daemon (--ca FILE)")
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

    /// As the header `Host` has it.
    pub(super) fn authority(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }

    /// The header that has the token.
    pub(super) fn authorization(&self) -> HeaderValue {
        self.authorization.clone()
    }

    /// Connects.
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

    /// Nobody listens, or not for us, or somebody else.
    fn unreachable(&self, error: &io::Error) -> Failure {
        let refused = |why: &dyn fmt::Display, advice: String| {
            let what = format!("taplined at {self} is not trusted: {why}");
            Failure::Refused(Problem::new(Code::Failed, what).advise(advice))
        };
        let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) else {
            let start = "see that taplined runs there, that api.listen in its configuration names this port, and that no \
                         firewall is in between";
            let what = format!("cannot reach taplined at {self}: {error}");
            return Failure::Absent(Problem::new(Code::Failed, what).advise(start));
        };
        match tls {
            // The latter: somebody of that name, but not the one who signed; the file is older than the certificate, for example.
            Error::InvalidCertificate(CertificateError::UnknownIssuer | CertificateError::BadSignature) => refused(
                &format_args!("nobody in {} vouches for its certificate", self.ca.display()),
                "name the file with the certificate that does (--ca FILE or TAPLINE_CA)".into(),
            ),
            Error::InvalidCertificate(
                why @ (CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. }),
            ) => refused(why, "connect by a name that its certificate has as subjectAltName".into()),
            Error::InvalidCertificate(why) => {
                refused(&format_args!("its certificate: {why}"), "give it another one (docs/api.md says how)".into())
            }
            Error::InvalidMessage(_) => {
                refused(&"it does not speak TLS", "see that this is the port that api.listen names".into())
            }
            other => refused(other, "see its log: journalctl -u taplined".into()),
        }
    }
}

/// Host and port of an address that has nothing else.
fn address(url: &str) -> Result<(String, u16), Problem> {
    let uri: Uri = url.parse().map_err(|error| wrong_address(url, &format!("{error}")))?;
    match uri.scheme_str() {
        Some("https") => {}
        Some("http") => return Err(wrong_address(url, "a token is only sent over TLS: write https")),
        _ => return Err(wrong_address(url, "it does not begin with https://")),
    }
    let authority = uri.authority().map(|authority| authority.as_str()).unwrap_or_default();
    if authority.contains('@') || uri.path() != "/" || uri.query().is_some() {
        return Err(wrong_address(url, "there is more in it than a host and a port"));
    }
    let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(|| wrong_address(url, "it has no host"))?;
    Ok((host.to_owned(), uri.port_u16().unwrap_or(443)))
}

fn wrong_address(url: &str, why: &str) -> Problem {
    Problem::new(Code::Invalid, format!("«{url}» is no address of a taplined: {why}"))
        .advise("write https://HOST:PORT, with the port that api.listen names there")
}

/// The certificates of a PEM file.
fn trusted(ca: &Path) -> Result<RootCertStore, Problem> {
    let tried = format!("read certificates from {}", ca.display());
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(ca).map_err(|error| Problem::failed(&tried, error))? {
        let certificate = certificate.map_err(|error| Problem::failed(&tried, error))?;
        // A distribution's bundle may hold some that cannot be used; the others vouch all the same.
        roots.add_parsable_certificates([certificate]);
    }
    match roots.is_empty() {
        true => {
            Err(Problem::failed(tried, "there is none in it").advise("name a PEM file with a certificate (--ca FILE)"))
        }
        false => Ok(roots),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn an_address_is_https_with_a_host_and_perhaps_a_port() {
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
        assert!(address("http://alpha").unwrap_err().message.contains("only sent over TLS"));
    }
}
