//! The host that last used a repository, as recorded in its lock file.
//!
//! A host keeps state about a repository's images elsewhere: redo logs of killed processes, and plugged VBDs. All of
//! that is void when another host has used the repository since. It knows nothing about that state. Invariant: only the
//! holder of the lock writes the record, and it stays when the lock is released.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use api::Problem;
use rustix::fs::{Mode, OFlags};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::directory::{Directory, LOCK};
use super::label::LABEL;
use crate::hash::hash;

/// Bytes of the longest one that is read.
const LEN_MAX: usize = 4096;

/// Identifies the machine's installation (machine-id(5)).
const MACHINE_ID: &str = "/etc/machine-id";

/// A host: a catalogue, and the machine on which it is used.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LastHost {
    /// The identity that the catalogue has given it.
    pub host: Uuid,
    /// The machine ([`machine`]): a catalogue that was copied to another one belongs to another host.
    pub machine: String,
    /// Where on that machine the catalogue is, which may change.
    pub state_directory: PathBuf,
}

impl LastHost {
    /// Whether both are the same host.
    pub fn is_same(&self, other: &LastHost) -> bool {
        (self.host, &self.machine) == (other.host, &other.machine)
    }
}

/// The record in a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Last {
    /// There is no record: it was never attached.
    Nobody,
    /// This host had it.
    Host(LastHost),
    /// The record cannot be read.
    Unknown,
}

/// An identifier of this machine; empty if there is none. It is a hash, because the machine's real identity should stay
/// private.
pub fn machine() -> String {
    machine_of(&fs::read_to_string(MACHINE_ID).unwrap_or_default())
}

fn machine_of(id: &str) -> String {
    if id.trim().is_empty() {
        return String::new();
    }
    hash(&format!("tapline {}", id.trim()))
}

/// The host that last used the repository at a path, if there is one that says so. The repository is not locked: who
/// uses it now may be about to change that.
pub fn last_host_at(path: &Path) -> Option<LastHost> {
    if !fs::symlink_metadata(path.join(LABEL)).is_ok_and(|label| label.is_file()) {
        return None;
    }
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(rustix::fs::open(path.join(LOCK), flags, Mode::empty()).ok()?);
    let found = file.metadata().ok()?;
    // Anybody may write such a record to a file system of theirs.
    let trusted = [0, rustix::process::geteuid().as_raw()].contains(&found.uid());
    let mut bytes = Vec::new();
    let limit = u64::try_from(LEN_MAX).unwrap_or(u64::MAX);
    (found.is_file() && trusted).then(|| file.take(limit).read_to_end(&mut bytes))?.ok()?;
    serde_json::from_slice(&bytes).ok()
}

impl Directory {
    /// The host that last used this repository. Without a lock file, none.
    pub fn last_host(&self) -> Result<Last, Problem> {
        let Some(file) = self.lock_file() else { return Ok(Last::Nobody) };
        let mut bytes = vec![0; LEN_MAX];
        let len = file.read_at(&mut bytes, 0).map_err(|error| self.failed("read", &error))?;
        bytes.truncate(len);
        Ok(match bytes.is_empty() {
            true => Last::Nobody,
            false => serde_json::from_slice(&bytes).map_or(Last::Unknown, Last::Host),
        })
    }

    /// From now on this host had it last. Durable when this returns.
    pub fn set_last_host(&self, host: &LastHost) -> Result<(), Problem> {
        let Some(file) = self.lock_file() else { return Ok(()) };
        let mut text = serde_json::to_vec(host).map_err(|error| Problem::failed("encode the host's record", error))?;
        text.push(b'\n');
        let len = u64::try_from(text.len()).unwrap_or(u64::MAX);
        let write = |file: &File| {
            file.write_all_at(&text, 0)?;
            file.set_len(len)?;
            file.sync_all()
        };
        write(file).map_err(|error| self.failed("write", &error))
    }

    fn failed(&self, what: &str, error: &std::io::Error) -> Problem {
        Problem::failed(format_args!("{what} {}", self.path().join(LOCK).display()), error)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn the_last_host_is_read_back_and_invalid_records_are_unknown() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().to_str().unwrap().parse().unwrap();
        let open = || {
            let mut directory = Directory::open(&path).unwrap();
            directory.lock(false).unwrap();
            directory
        };
        assert_eq!(open().last_host().unwrap(), Last::Nobody);
        let machine = machine_of("4d3b0a\n");
        let long = LastHost { host: Uuid::new_v4(), machine, state_directory: "/var/a".into() };
        let moved = LastHost { state_directory: "/var/b".into(), ..long.clone() };
        assert!(long.is_same(&moved) && long != moved);
        let short = LastHost { host: Uuid::new_v4(), machine: String::new(), state_directory: "/".into() };
        for host in [long, moved, short] {
            open().set_last_host(&host).unwrap();
            assert_eq!(open().last_host().unwrap(), Last::Host(host.clone()));
            std::fs::remove_file(room.path().join(LABEL)).ok();
            assert_eq!(last_host_at(room.path()), None, "there is no repository");
            std::fs::write(room.path().join(LABEL), "{}").unwrap();
            assert_eq!(last_host_at(room.path()), Some(host));
        }
        std::os::unix::fs::symlink(room.path().join(LOCK), room.path().join("link")).unwrap();
        std::fs::rename(room.path().join("link"), room.path().join(LOCK)).unwrap();
        assert_eq!(last_host_at(room.path()), None);
        std::fs::remove_file(room.path().join(LOCK)).unwrap();
        for text in ["{", "{}", "\0\0", "{\"host\":1,\"machine\":\"\"}"] {
            std::fs::write(room.path().join(LOCK), text).unwrap();
            assert_eq!(open().last_host().unwrap(), Last::Unknown, "{text}");
        }
    }

    #[test]
    fn machines_are_distinguished_anonymously() {
        assert_eq!(machine_of(" \n"), "");
        assert_eq!(machine_of("abc\n"), machine_of("abc"));
        assert_ne!(machine_of("abc"), machine_of("abd"));
        assert!(!machine_of("abc").contains("abc"));
    }
}
