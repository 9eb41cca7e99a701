//! `--nbd-tls`: reads the files of a directory that is laid out as for QEMU and nbdkit.
//!
//! It knows nothing about TLS. Invariant: without `--nbd-tls-verify-peer no`, settings exist only with an authority
//! that signs the certificates of clients.

use std::path::Path;

use arguments::{Serve, VerifyPeer};
use control::Kind;
use transport::nbd::{Credentials, Part, Tls};

use crate::files::pem::{needed, optional, reject_public};
use crate::process::failure::Failure;

const CERTIFICATE: &str = "server-cert.pem";
const KEY: &str = "server-key.pem";
const AUTHORITY: &str = "ca-cert.pem";
const REVOKED: &str = "ca-crl.pem";

/// Advice for files that are missing.
const ADVICE: &str = "the directory needs server-cert.pem, server-key.pem and ca-cert.pem; docs/nbd.md says how to \
                      make them";

/// Reads the settings of TLS, if the command line requests it.
pub fn read(serve: &Serve) -> Result<Option<Tls>, Failure> {
    serve.nbd_tls.as_deref().map(|directory| settings(directory, serve.nbd_tls_verify_peer)).transpose()
}

fn settings(directory: &Path, verify_peer: VerifyPeer) -> Result<Tls, Failure> {
    let certificate = needed(&directory.join(CERTIFICATE), ADVICE)?;
    let key = directory.join(KEY);
    reject_public(&key, ADVICE)?;
    let key = needed(&key, ADVICE)?;
    let (authority, revoked) = match verify_peer {
        VerifyPeer::Yes => (Some(authority(directory)?), optional(&directory.join(REVOKED), ADVICE)?),
        VerifyPeer::No => (None, None),
    };
    let credentials = Credentials {
        certificate: &certificate,
        key: &key,
        authority: authority.as_deref(),
        revoked: revoked.as_deref(),
    };
    Tls::new(&credentials).map_err(|error| {
        let (name, advice) = match error.part {
            Part::Certificate => (CERTIFICATE, "see it with: openssl x509 -text -noout -in FILE"),
            Part::Key => (KEY, "give the key of the first certificate in server-cert.pem, without a passphrase"),
            Part::Authority => (AUTHORITY, "give the certificates of the authorities that sign those of clients"),
            Part::Name => unreachable!("only clients have the name of their peer"),
            Part::Revoked => (REVOKED, "give the authorities' revocation lists, or remove the file"),
        };
        let path = directory.join(name);
        Failure::new(format!("use {}", path.display()), error).of_kind(Kind::Invalid).advise(advice)
    })
}

/// Reads the authority of clients. It is required: without it anyone could connect.
fn authority(directory: &Path) -> Result<Vec<u8>, Failure> {
    let path = directory.join(AUTHORITY);
    optional(&path, ADVICE)?.ok_or_else(|| {
        let why = "it does not exist, and without it no client's certificate can be verified";
        Failure::new(format!("read {}", path.display()), why).of_kind(Kind::Invalid).advise(
            "copy the certificate of the authority that signs those of clients there; or, if everyone who reaches the \
             address may use the disk, add --nbd-tls-verify-peer no",
        )
    })
}
