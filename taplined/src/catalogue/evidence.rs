//! Whether a host without a catalogue used to have one: the state directory may not be mounted, or the file may have
//! been removed.
//!
//! It looks for traces that only a daemon with a catalogue leaves, on this host and in its repositories. A host
//! without any is new.

use std::fs;
use std::path::Path;

use api::Problem;
use repo::catalogue::backup;

use super::repositories;
use crate::config::Config;
use crate::disk::{paths, serving};

/// Evidence that a catalogue existed, if there is any.
pub fn of_one_before(config: &Config) -> Result<Option<String>, Problem> {
    let running: usize = serving::all(config)?.values().map(Vec::len).sum();
    if running > 0 {
        return Ok(Some(format!("disk processes are running ({running})")));
    }
    let backups = backup::list(&config.backups())?;
    if let Some(newest) = backups.first() {
        return Ok(Some(format!("there are backups, the newest is {}", newest.file)));
    }
    for suffix in ["-wal", ".seal"] {
        let left = format!("{}{suffix}", config.catalogue().display());
        // SQLite would create a catalogue from a write-ahead log next to it.
        if fs::metadata(&left).is_ok_and(|found| found.len() > 0) && fs::metadata(config.catalogue()).is_err() {
            return Ok(Some(format!("{left} exists without it")));
        }
    }
    let places = [
        (paths::all(config), "disks were plugged"),
        (config.vm_directories(), "VMs ran"),
        (paths::logs(config), "disks have logs"),
    ];
    for (directory, what) in places {
        if let Some(found) = first_in(&directory)? {
            return Ok(Some(format!("{what}: {found}")));
        }
    }
    let repository = repositories::one_of_ours(config)?;
    Ok(repository.map(|path| format!("it had a repository attached: {}", path.display())))
}

fn first_in(directory: &Path) -> Result<Option<String>, Problem> {
    let tried = |error| Problem::failed(format_args!("list {}", directory.display()), error);
    let mut entries = fs::read_dir(directory).map_err(tried)?;
    let first = entries.next().transpose().map_err(tried)?;
    Ok(first.map(|entry| entry.path().display().to_string()))
}
