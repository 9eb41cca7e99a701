//! Files of certificates and keys.
//!
//! It knows nothing about their contents. They are read by name, before a process is confined.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use control::Kind;

use crate::process::failure::Failure;

/// Reads a file that must exist.
pub fn needed(path: &Path, advice: &str) -> Result<Vec<u8>, Failure> {
    fs::read(path).map_err(|error| not_read(path, error, advice))
}

/// Reads a file that need not exist.
pub fn optional(path: &Path, advice: &str) -> Result<Option<Vec<u8>>, Failure> {
    match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        found => found.map(Some).map_err(|error| not_read(path, error, advice)),
    }
}

fn not_read(path: &Path, error: io::Error, advice: &str) -> Failure {
    Failure::failed(format!("read {}", path.display()), &error).advise(advice)
}

/// Fails if every user of this host can read the key.
pub fn reject_public(key: &Path, advice: &str) -> Result<(), Failure> {
    let metadata = fs::metadata(key).map_err(|error| not_read(key, error, advice))?;
    if metadata.permissions().mode() & 0o007 == 0 {
        return Ok(());
    }
    let what = format!("cannot use {}: every user of this host can read it", key.display());
    Err(Failure::of(Kind::Invalid, what).advise(format!("chmod o= {}", key.display())))
}
