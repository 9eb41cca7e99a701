//! Certificates and keys in a directory that is laid out as for QEMU, nbdkit and libnbd.
//!
//! It knows nothing about handshakes. They are read by name, so before a process is confined. Invariants: a server's
//! settings have an authority, unless every client is to be accepted, and a client's always have one; a key that every
//! user of the host can read is not used.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::credentials::{ClientCredentials, ClientTls, Credentials, CredentialsError, Part, ServerTls};
use crate::uri::TlsParameters;

const AUTHORITY: &str = "ca-cert.pem";
const REVOKED: &str = "ca-crl.pem";

/// Where libnbd looks: for root, and for other users below their home.
const OF_ROOT: &str = "/etc/pki/libnbd";
const OF_USERS: [&str; 2] = [".pki/libnbd", ".config/pki/libnbd"];

/// Why the files of a directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot {tried}: {why}")]
pub struct DirectoryError {
    tried: String,
    why: String,
    /// What to do about it.
    pub advice: String,
}

/// The files of one side.
struct Directory<'a> {
    path: &'a Path,
    certificate: &'static str,
    key: &'static str,
    /// The advice for files that are missing.
    advice: &'static str,
}

impl Directory<'_> {
    fn failed(&self, tried: &str, name: &str, why: impl ToString, advice: impl Into<String>) -> DirectoryError {
        let tried = format!("{tried} {}", self.path.join(name).display());
        DirectoryError { tried, why: why.to_string(), advice: advice.into() }
    }

    fn needed(&self, name: &str) -> Result<Vec<u8>, DirectoryError> {
        fs::read(self.path.join(name)).map_err(|error| self.not_read(name, &error))
    }

    fn optional(&self, name: &str) -> Result<Option<Vec<u8>>, DirectoryError> {
        match fs::read(self.path.join(name)) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            found => found.map(Some).map_err(|error| self.not_read(name, &error)),
        }
    }

    fn not_read(&self, name: &str, error: &io::Error) -> DirectoryError {
        self.failed("read", name, error, self.advice)
    }

    /// The key, unless every user of this host can read it.
    fn key(&self) -> Result<Vec<u8>, DirectoryError> {
        let path = self.path.join(self.key);
        let metadata = fs::metadata(&path).map_err(|error| self.not_read(self.key, &error))?;
        if metadata.permissions().mode() & 0o007 != 0 {
            let why = "every user of this host can read it";
            return Err(self.failed("use", self.key, why, format!("chmod o= {}", path.display())));
        }
        self.needed(self.key)
    }

    /// The failure of credentials whose authority signs the certificates of `peers`.
    fn unusable(&self, error: &CredentialsError, peers: &str) -> DirectoryError {
        let (name, advice) = match error.part {
            Part::Certificate => (self.certificate, "see it with: openssl x509 -text -noout -in FILE".to_owned()),
            Part::Key => {
                let fitting = format!("give the key of the first certificate in {}", self.certificate);
                (self.key, format!("{fitting}, without a passphrase"))
            }
            Part::Authority => {
                (AUTHORITY, format!("give the certificates of the authorities that sign those of {peers}"))
            }
            Part::Revoked => (REVOKED, "give the authorities' revocation lists, or remove the file".to_owned()),
            Part::Name => ("", "give the name in the server's certificate as tls-hostname=NAME in the URI".to_owned()),
        };
        self.failed("use", name, error, advice)
    }
}

/// Reads the settings of a server. `verify_peer`: clients need a certificate.
pub fn of_server(path: &Path, verify_peer: bool) -> Result<ServerTls, DirectoryError> {
    let directory = Directory {
        path,
        certificate: "server-cert.pem",
        key: "server-key.pem",
        advice: "the directory needs server-cert.pem, server-key.pem and ca-cert.pem; docs/nbd.md says how to make \
                 them",
    };
    let certificate = directory.needed(directory.certificate)?;
    let key = directory.key()?;
    let (authority, revoked) = match verify_peer {
        true => (Some(authority_of_clients(&directory)?), directory.optional(REVOKED)?),
        false => (None, None),
    };
    let credentials = Credentials {
        certificate: &certificate,
        key: &key,
        authority: authority.as_deref(),
        revoked: revoked.as_deref(),
    };
    ServerTls::new(&credentials).map_err(|error| directory.unusable(&error, "clients"))
}

/// Reads the authority of clients. It is required: without it anyone could connect.
fn authority_of_clients(directory: &Directory<'_>) -> Result<Vec<u8>, DirectoryError> {
    directory.optional(AUTHORITY)?.ok_or_else(|| {
        directory.failed(
            "read",
            AUTHORITY,
            "it does not exist, and without it no client's certificate can be verified",
            "copy the certificate of the authority that signs those of clients there; or, if everyone who reaches the \
             address may use the disk, add --nbd-tls-verify-peer no",
        )
    })
}

/// Reads the settings of a client for the server of a URI.
pub fn of_client(parameters: &TlsParameters) -> Result<ClientTls, DirectoryError> {
    let advice = "the directory needs ca-cert.pem, and client-cert.pem with client-key.pem if the server requires a \
                  certificate of clients; add tls-certificates=DIRECTORY to the URI; see docs/nbd-client.md";
    let path = match &parameters.certificates {
        Some(path) => path.clone(),
        None => default_directory(advice)?,
    };
    let directory = Directory { path: &path, certificate: "client-cert.pem", key: "client-key.pem", advice };
    let authority = directory.needed(AUTHORITY)?;
    let revoked = directory.optional(REVOKED)?;
    let own = own(&directory)?;
    let credentials = ClientCredentials {
        authority: &authority,
        revoked: revoked.as_deref(),
        own: own.as_ref().map(|own| (own.certificate.as_slice(), own.key.as_slice())),
    };
    ClientTls::new(&credentials, &parameters.hostname).map_err(|error| match error.part {
        Part::Name => DirectoryError {
            tried: format!("verify a server with the name '{}'", parameters.hostname),
            ..directory.unusable(&error, "servers")
        },
        _ => directory.unusable(&error, "servers"),
    })
}

/// The client's certificate and its key.
struct Own {
    certificate: Vec<u8>,
    key: Vec<u8>,
}

/// Reads the client's certificate and its key, if there are any. One without the other is a mistake.
fn own(directory: &Directory<'_>) -> Result<Option<Own>, DirectoryError> {
    match directory.optional(directory.certificate)? {
        Some(certificate) => Ok(Some(Own { certificate, key: directory.key()? })),
        None if directory.path.join(directory.key).exists() => directory.needed(directory.certificate).map(|_| None),
        None => Ok(None),
    }
}

/// The first of libnbd's directories that exists.
fn default_directory(advice: &str) -> Result<PathBuf, DirectoryError> {
    let home = std::env::var_os("HOME").map(PathBuf::from).filter(|_| !rustix::process::geteuid().is_root());
    let candidates: Vec<PathBuf> = match home {
        Some(home) => OF_USERS.iter().map(|below| home.join(below)).collect(),
        None => vec![PathBuf::from(OF_ROOT)],
    };
    candidates.iter().find(|directory| directory.is_dir()).cloned().ok_or_else(|| {
        let looked: Vec<String> = candidates.iter().map(|directory| directory.display().to_string()).collect();
        DirectoryError {
            tried: "find the certificates for TLS".to_owned(),
            why: format!("there is no {}", looked.join(" and no ")),
            advice: advice.to_owned(),
        }
    })
}
