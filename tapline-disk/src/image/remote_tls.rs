//! The TLS settings of a client, from the files of a directory that is laid out as for QEMU and libnbd.
//!
//! It knows nothing about TLS. Invariant: settings exist only with an authority that signs the certificates of servers.

use std::path::{Path, PathBuf};

use control::Kind;
use nbd::tls::{ClientCredentials, ClientTls, Part};
use nbd::uri::TlsParameters;

use crate::files::pem::{needed, optional, reject_public};
use crate::process::failure::Failure;

const CERTIFICATE: &str = "client-cert.pem";
const KEY: &str = "client-key.pem";
const AUTHORITY: &str = "ca-cert.pem";
const REVOKED: &str = "ca-crl.pem";

const ADVICE: &str = "the directory needs ca-cert.pem, and client-cert.pem with client-key.pem if the server requires \
                      a certificate of clients; add tls-certificates=DIRECTORY to the URI; see docs/nbd-client.md";

/// Where libnbd looks: for root, and for other users below their home.
const OF_ROOT: &str = "/etc/pki/libnbd";
const OF_USERS: [&str; 2] = [".pki/libnbd", ".config/pki/libnbd"];

/// Reads the settings.
pub fn settings(parameters: &TlsParameters) -> Result<ClientTls, Failure> {
    let directory = parameters.certificates.clone().map_or_else(default_directory, Ok)?;
    let authority = needed(&directory.join(AUTHORITY), ADVICE)?;
    let revoked = optional(&directory.join(REVOKED), ADVICE)?;
    let own = own(&directory)?;
    let credentials = ClientCredentials {
        authority: &authority,
        revoked: revoked.as_deref(),
        own: own.as_ref().map(|own| (own.certificate.as_slice(), own.key.as_slice())),
    };
    ClientTls::new(&credentials, &parameters.hostname).map_err(|error| {
        let (name, advice) = match error.part {
            Part::Certificate => (CERTIFICATE, "see it with: openssl x509 -text -noout -in FILE"),
            Part::Key => (KEY, "give the key of the first certificate in client-cert.pem, without a passphrase"),
            Part::Authority => (AUTHORITY, "give the certificates of the authorities that sign those of servers"),
            Part::Revoked => (REVOKED, "give the authorities' revocation lists, or remove the file"),
            Part::Name => {
                return Failure::new(format!("verify a server with the name '{}'", parameters.hostname), error)
                    .of_kind(Kind::Invalid)
                    .advise("give the name in the server's certificate as tls-hostname=NAME in the URI");
            }
        };
        let path = directory.join(name);
        Failure::new(format!("use {}", path.display()), error).of_kind(Kind::Invalid).advise(advice)
    })
}

/// The client's certificate and its key.
struct Own {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

/// Reads the client's certificate and its key, if there are any. One without the other is a mistake.
fn own(directory: &Path) -> Result<Option<Own>, Failure> {
    let key = directory.join(KEY);
    let Some(certificate) = optional(&directory.join(CERTIFICATE), ADVICE)? else {
        return match key.exists() {
            true => needed(&directory.join(CERTIFICATE), ADVICE).map(|_| None),
            false => Ok(None),
        };
    };
    reject_public(&key, ADVICE)?;
    Ok(Some(Own { certificate, key: needed(&key, ADVICE)? }))
}

/// The first of libnbd's directories that exists.
fn default_directory() -> Result<PathBuf, Failure> {
    let home = std::env::var_os("HOME").map(PathBuf::from).filter(|_| !rustix::process::geteuid().is_root());
    let candidates: Vec<PathBuf> = match home {
        Some(home) => OF_USERS.iter().map(|below| home.join(below)).collect(),
        None => vec![PathBuf::from(OF_ROOT)],
    };
    candidates.iter().find(|directory| directory.is_dir()).cloned().ok_or_else(|| {
        let looked: Vec<String> = candidates.iter().map(|directory| directory.display().to_string()).collect();
        let why = format!("there is no {}", looked.join(" and no "));
        Failure::new("find the certificates for TLS", why).of_kind(Kind::Invalid).advise(ADVICE)
    })
}
