//! Creates the daemon's own directories and restricts access to them.
//!
//! It knows nothing about their contents. Invariant: however the daemon was started, the catalogue, which contains
//! names, paths and hashes of tokens, is readable only by its own user.

use std::fs::{self, DirBuilder, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use api::Problem;

use crate::config::Config;
use crate::disk::paths;

/// Modes: owner only; readable by a group; searchable by all; readable by all.
const CLOSED: u32 = 0o700;
const FOR_A_GROUP: u32 = 0o750;
const TO_PASS: u32 = 0o711;
const OPEN: u32 = 0o755;

/// Suffixes of SQLite's files for a catalogue.
const FILES: [&str; 3] = ["", "-wal", "-shm"];

/// Creates missing directories. An existing one keeps its mode, except for the state directory.
pub fn make(config: &Config) -> Result<(), Problem> {
    let all: [(&Path, u32); 6] = [
        (&config.state_directory, CLOSED),
        (&config.run_directory, OPEN),
        (&config.log_directory, FOR_A_GROUP),
        (&paths::all(config), TO_PASS),
        (&paths::logs(config), FOR_A_GROUP),
        (&config.vm_directories(), TO_PASS),
    ];
    for (directory, mode) in all {
        make_one(directory, mode)
            .map_err(|error| Problem::failed(format_args!("create the directory {}", directory.display()), error))?;
    }
    close(&config.state_directory, CLOSED);
    Ok(())
}

/// Makes the catalogue's files private, wherever they are.
pub fn close_catalogue(config: &Config) {
    for suffix in FILES {
        let mut path = config.catalogue().into_os_string();
        path.push(suffix);
        close(&PathBuf::from(path), 0o600);
    }
}

/// Creates a directory; missing parents get the default mode.
fn make_one(directory: &Path, mode: u32) -> io::Result<()> {
    if let Some(above) = directory.parent() {
        fs::create_dir_all(above)?;
    }
    match DirBuilder::new().mode(mode).create(directory) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists && directory.is_dir() => Ok(()),
        Err(error) => Err(error),
        // Regardless of the daemon's umask.
        Ok(()) => fs::set_permissions(directory, Permissions::from_mode(mode)),
    }
}

/// Removes permissions of other users. Only logged if the daemon does not own the path.
fn close(path: &Path, most: u32) {
    let Ok(now) = fs::metadata(path).map(|metadata| metadata.permissions().mode() & 0o7777) else { return };
    if now & !most == 0 {
        return;
    }
    match fs::set_permissions(path, Permissions::from_mode(now & most)) {
        // Files that SQLite creates later get the catalogue's mode.
        Ok(()) => tracing::debug!(path = %path.display(), "removed access for other users (mode was {now:o})"),
        Err(error) => tracing::warn!(path = %path.display(), "other users have access (mode {now:o}): {error}"),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn new_and_existing_directories_are_made_private() {
        let room = tempfile::tempdir().unwrap();
        let at = |name: &str| room.path().join("a").join(name);
        let config = Config {
            state_directory: at("state"),
            run_directory: at("run"),
            log_directory: at("log"),
            ..Config::default()
        };
        make(&config).unwrap();
        assert_eq!(
            ["state", "run", "log", "run/vbd", "run/vm"].map(|name| mode(&at(name))),
            [0o700, 0o755, 0o750, 0o711, 0o711]
        );
        for (name, open) in [("state", 0o755), ("log", 0o755)] {
            fs::set_permissions(at(name), Permissions::from_mode(open)).unwrap();
        }
        for suffix in FILES {
            fs::write(at(&format!("state/catalogue.db{suffix}")), "").unwrap();
        }
        make(&config).unwrap();
        close_catalogue(&config);
        assert_eq!((mode(&at("state")), mode(&at("log"))), (0o700, 0o755));
        assert!(FILES.iter().all(|suffix| mode(&at(&format!("state/catalogue.db{suffix}"))) == 0o600));
    }
}
