//! The authorities that are trusted to sign the certificates of servers: those of the system, or those in the file that
//! `SSL_CERT_FILE` names, as for OpenSSL.
//!
//! Not Mozilla's list in a crate: that of the system has the administrator's own authorities and is updated with it.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use ureq::tls::{Certificate, PemItem, parse_pem};

/// Where systems have them in one file: Debian and its derivatives, Fedora and its derivatives, SUSE, Alpine.
const BUNDLES: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Much more than the certificates of all authorities.
const LEN_MAX: u64 = 16 << 20;

/// Reads the certificates; an error says what to do.
pub(crate) fn read() -> Result<Vec<Certificate<'static>>, String> {
    match std::env::var_os("SSL_CERT_FILE") {
        Some(path) => in_file(Path::new(&path)).map_err(|why| format!("{why}; check SSL_CERT_FILE")),
        None => {
            let found = BUNDLES.iter().find(|path| Path::new(path).is_file()).ok_or(
                "the system has no certificates of authorities; install ca-certificates, or set SSL_CERT_FILE",
            )?;
            in_file(Path::new(found))
        }
    }
}

fn in_file(path: &Path) -> Result<Vec<Certificate<'static>>, String> {
    let failed = |why: &dyn std::fmt::Display| format!("cannot read certificates from {}: {why}", path.display());
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(LEN_MAX).read_to_end(&mut bytes));
    read.map_err(|error| failed(&error))?;
    let items = parse_pem(&bytes).filter_map(Result::ok);
    let found: Vec<_> =
        items.filter_map(|item| if let PemItem::Certificate(found) = item { Some(found) } else { None }).collect();
    if found.is_empty() { Err(failed(&"it contains no certificate")) } else { Ok(found) }
}
