//! The seal: a hash of a cleanly closed catalogue, in a file next to it.
//!
//! The next process to open the catalogue uses it to detect changed bytes, which SQLite cannot, because its pages have
//! no checksums. A seal is valid as long as the file has the recorded modification time: a file that was written in the
//! ordinary way since, or replaced by an older copy, was changed on purpose.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use api::Problem;
use ring::digest;
use serde::{Deserialize, Serialize};

use super::sound::damaged;
use crate::replace::replace_file;

/// The recorded properties of a closed file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Seal {
    /// When it was changed last, in nanoseconds.
    changed: u128,
    sha256: String,
}

fn path_of(catalogue: &Path) -> PathBuf {
    beside(catalogue, ".seal")
}

/// A file next to the catalogue.
pub fn beside(catalogue: &Path, suffix: &str) -> PathBuf {
    let mut path = catalogue.as_os_str().to_owned();
    path.push(suffix);
    path.into()
}

fn changed(file: &File) -> io::Result<u128> {
    let modified: SystemTime = file.metadata()?.modified()?;
    Ok(modified.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos()))
}

fn of(catalogue: &Path) -> io::Result<Seal> {
    let mut file = File::open(catalogue)?;
    let changed = changed(&file)?;
    let mut sum = digest::Context::new(&digest::SHA256);
    let mut piece = vec![0; 1 << 20];
    loop {
        let len = file.read(&mut piece)?;
        let Some(read) = piece.get(..len).filter(|read| !read.is_empty()) else { break };
        sum.update(read);
    }
    let sha256 = sum.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(Seal { changed, sha256 })
}

/// Refuses a catalogue that has changed since it was sealed. No process may have it open here: SQLite's locks are lost
/// when any descriptor of the file is closed (fcntl_locking(2)).
pub fn check(catalogue: &Path) -> Result<(), Problem> {
    let path = path_of(catalogue);
    let Ok(text) = fs::read(&path) else { return Ok(()) };
    // One that is damaged itself says nothing.
    let Ok(seal) = serde_json::from_slice::<Seal>(&text) else { return Ok(()) };
    let failed = |error| Problem::failed(format_args!("read the catalogue {}", catalogue.display()), error);
    let is_as_sealed = || match File::open(catalogue).and_then(|file| changed(&file)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        found => found.map(|found| found == seal.changed).map_err(failed),
    };
    // Checked again after hashing: another program may have started to write the file.
    if !is_as_sealed()? || of(catalogue).map_err(failed)?.sha256 == seal.sha256 || !is_as_sealed()? {
        return Ok(());
    }
    Err(damaged(format_args!(
        "its contents do not match the hash in {}, although its metadata shows no write since",
        path.display()
    )))
}

/// Seals a catalogue that is no longer written.
pub fn write(catalogue: &Path) -> io::Result<()> {
    let text = serde_json::to_vec(&of(catalogue)?)?;
    replace_file(&path_of(catalogue), &text, 0o600)
}
