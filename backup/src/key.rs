//! The key of an encrypted target, and the file that it is in.
//!
//! Knows nothing about targets. The key is never printed, nor part of an error.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use crate::id::{Digest, random};

/// A secret of 256 bits.
#[derive(Clone)]
pub struct Key([u8; 32]);

/// A failure to read or write a key file.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file could not be read or written.
    #[error("cannot {attempt} the key file {}", path.display())]
    File {
        /// The call as a verb.
        attempt: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The content is no key.
    #[error("{} is not a key file: it must contain 64 hexadecimal digits in lower case", .0.display())]
    NotAKey(PathBuf),
}

impl Key {
    /// A new random key.
    pub fn random() -> Key {
        let mut bytes = [0; 32];
        random(&mut bytes);
        Key(bytes)
    }

    /// Reads a key file: 64 hexadecimal digits and the end of the line.
    pub fn read(path: &Path) -> Result<Key, KeyError> {
        let text = std::fs::read_to_string(path);
        let text = text.map_err(|source| KeyError::File { attempt: "read", path: path.to_owned(), source })?;
        let digits = Digest::parse(text.trim_end_matches(['\n', '\r']));
        digits.map(|digits| Key(*digits.as_bytes())).ok_or_else(|| KeyError::NotAKey(path.to_owned()))
    }

    /// Writes a new key file that only its owner may read; fails if it exists. Without this file nothing can be
    /// restored.
    pub fn write(&self, path: &Path) -> Result<(), KeyError> {
        let failed = |source| KeyError::File { attempt: "write", path: path.to_owned(), source };
        let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(failed)?;
        writeln!(file, "{}", Digest::from_bytes(self.0)).and_then(|()| file.sync_all()).map_err(failed)
    }

    pub(crate) fn secret(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(secret)")
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_key_file_is_read_back_and_never_printed() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("key");
        let key = Key::random();
        key.write(&path).unwrap();
        assert!(key.write(&path).is_err(), "a key file was overwritten");
        assert_eq!(Key::read(&path).unwrap().secret(), key.secret());
        let digits = Digest::from_bytes(*key.secret()).to_string();
        assert!(!format!("{key:?}").contains(&digits));
        std::fs::write(&path, &digits[1..]).unwrap();
        let error = Key::read(&path).unwrap_err();
        assert!(!format!("{error} {error:?}").contains(&digits[2..40]));
    }
}
