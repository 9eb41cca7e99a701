//! Why a connection to a server must end.

use rustls::{AlertDescription, CertificateError, Error};

/// What is wrong with a connection. Nothing that arrives on it afterwards can be trusted; what was not answered is sent
/// again on the next one.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// The first bytes are not those of an NBD server.
    #[error("the server does not speak NBD")]
    NotNbd,
    /// The server knows only the protocol before "fixed newstyle".
    #[error("the server does not offer the fixed newstyle negotiation of NBD")]
    OldStyle,
    /// The server requires TLS.
    #[error("the server requires TLS; use an address with nbds: or nbds+unix:")]
    TlsRequired,
    /// The server refuses TLS.
    #[error(
        "the server refuses TLS: {0}; configure certificates at the server, or use nbd: or nbd+unix: if the network \
         between is trusted"
    )]
    TlsRefused(String),
    /// TLS has failed, or was ended.
    #[error("TLS: {0}")]
    Tls(String),
    /// The server refuses the export.
    #[error("the server refuses the export: {0}")]
    Refused(String),
    /// A message of the negotiation violates the protocol.
    #[error("the server violates the protocol in the negotiation: {0}")]
    Negotiation(&'static str),
    /// The export cannot be used.
    #[error("the export cannot be used: {0}")]
    Unusable(String),
    /// The export is another one than on the connection before.
    #[error("the export has changed: {0}; it is not used until it is as before")]
    Changed(String),
    /// A reply begins with neither of the two magic numbers.
    #[error("a reply of the server has the wrong magic number {0:#x}")]
    Magic(u32),
    /// A reply to no request in flight: never sent, or answered before.
    #[error("the server answers a request that is not in flight (cookie {0})")]
    UnknownCookie(u64),
    /// A reply violates the protocol.
    #[error("the server violates the protocol in a reply: {0}")]
    Reply(&'static str),
    /// A read was ended before all its bytes had arrived.
    #[error("the server ended a read of {len} bytes at {at} without all of its data")]
    Short {
        /// The offset of the read.
        at: u64,
        /// Its length.
        len: u64,
    },
    /// The server is shutting down.
    #[error("the server is shutting down")]
    ShuttingDown,
}

impl Broken {
    /// What TLS has found, and what to do.
    pub(super) fn tls(error: &Error) -> Broken {
        let advice = match error {
            Error::InvalidCertificate(why) => match why {
                CertificateError::UnknownIssuer | CertificateError::BadSignature => {
                    "the server's certificate is not signed by an authority in ca-cert.pem of this client"
                }
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. } => {
                    "the server's certificate is for another name; give that one as tls-hostname=NAME in the URI"
                }
                CertificateError::UnknownRevocationStatus => {
                    "ca-crl.pem of this client must have a list of each authority in the chain of the server's \
                     certificate"
                }
                CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                    "renew the server's certificate, or set the clock"
                }
                _ => "check the server's certificate",
            },
            Error::AlertReceived(
                AlertDescription::CertificateRequired
                | AlertDescription::HandshakeFailure
                | AlertDescription::AccessDenied
                | AlertDescription::BadCertificate
                | AlertDescription::UnknownCA,
            ) => {
                "the server may require a certificate of this client: client-cert.pem and client-key.pem, signed by \
                 an authority that the server trusts"
            }
            _ => return Broken::Tls(error.to_string()),
        };
        Broken::Tls(format!("{error}; {advice}"))
    }
}
