//! The hosts that have used this run directory: a catalogue that is lost and recreated gives the machine a new host
//! identity.
//!
//! Redo logs are in the run directory. If a repository was last used by one of these hosts, its redo logs are valid
//! here, and the only copy of data that guests have written but not flushed. A host with another run directory has
//! its logs elsewhere, and is not in the list. The file has a line for each host; damaged lines are ignored.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use repo::driver::LastHost;

/// The name of the file in the run directory.
const HOSTS: &str = "hosts";

/// Adds this host, which is about to use the directory, and returns the others.
pub fn note(run_directory: &Path, host: &LastHost) -> Vec<LastHost> {
    let path = run_directory.join(HOSTS);
    let mut known = read(&path).unwrap_or_else(|error| {
        tracing::warn!("cannot read {}: {error}", path.display());
        Vec::new()
    });
    if !known.contains(host) {
        // The entry matters only if the catalogue is lost, so a failure must not prevent the start.
        if let Err(error) = append(&path, host) {
            tracing::warn!("cannot record this host in {}: {error}", path.display());
        }
    }
    known.retain(|other| other != host);
    known
}

/// The hosts that have used this run directory, as far as it can be read.
pub fn known(run_directory: &Path) -> Vec<LastHost> {
    read(&run_directory.join(HOSTS)).unwrap_or_default()
}

fn read(path: &Path) -> io::Result<Vec<LastHost>> {
    let text = match std::fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
        read => read?,
    };
    let lines = text.split(|byte| *byte == b'\n');
    Ok(lines.filter_map(|line| serde_json::from_slice(line).ok()).collect())
}

fn append(path: &Path, host: &LastHost) -> io::Result<()> {
    // The previous line may be incomplete.
    let line = format!("\n{}\n", serde_json::to_string(host)?);
    File::options().append(true).create(true).mode(0o600).open(path)?.write_all(line.as_bytes())
}

#[cfg(test)]
mod test {
    use uuid::Uuid;

    use super::*;

    #[test]
    fn each_host_gets_its_predecessors() {
        let room = tempfile::tempdir().unwrap();
        let host = |number| LastHost {
            host: Uuid::from_u128(number),
            machine: "machine".into(),
            state_directory: "/var/lib/tapline".into(),
        };
        let note = |number| note(room.path(), &host(number));
        assert_eq!(note(1), []);
        assert_eq!(note(1), []);
        assert_eq!(note(2), [host(1)]);
        let path = room.path().join(HOSTS);
        let mut text = std::fs::read_to_string(&path).unwrap();
        text.truncate(text.len() - 9);
        std::fs::write(&path, text).unwrap();
        assert_eq!(note(3), [host(1)], "the damaged line is none");
        assert_eq!(note(1), [host(3)]);
    }
}
