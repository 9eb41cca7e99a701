//! Files in shared memory in which tools look for statistics of tapdisk3's disks: `vbd3-<domid>-<devid>/statistics`,
//! and `td3-<pid>/vbd-<domid>-<devid>` for tools that look up the serving process in xenstore.
//!
//! It knows their paths and lengths, but not what their numbers mean. Invariant: a file is locked while a process
//! writes it, this one or one that it was passed to. A locked file is not removed, nor is one with the pid of a living
//! process in its name.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use xen::DomId;

use super::vdev::Vdev;
use crate::qemu::process::has_ended;

/// Where they are, on every host.
pub const PLACE: &str = "/dev/shm";

/// Bytes of `struct blkback_stats` (blktap, include/blktap3.h).
pub const VBD3_LEN: usize = 112;

/// Bytes of `struct stats` (blktap, drivers/tapdisk-metrics-stats.h), which begins with a version of four.
pub const TD3_LEN: usize = 96;
const TD3_VERSION: u32 = 1;

const VBD3_NAME: &str = "statistics";

/// The statistics of one disk, or the places where they would be.
#[derive(Clone, Debug)]
pub struct Statistics {
    place: PathBuf,
    domain: u16,
    device: u32,
}

/// The two files of a disk, open for writing and locked. Their directories stay when these are closed.
#[derive(Debug)]
pub struct Files {
    /// `vbd3-…/statistics`.
    pub vbd3: File,
    /// `td3-…/vbd-…`.
    pub td3: File,
}

impl Statistics {
    /// The files of a guest's disk, below `place`.
    pub fn of(place: &Path, guest: DomId, vdev: Vdev) -> Statistics {
        Statistics { place: place.to_owned(), domain: guest.0, device: vdev.number() }
    }

    /// Creates both files for the process with this pid, with all numbers zero. Files left by a killed process are
    /// replaced.
    pub fn make(&self, pid: u32) -> io::Result<Files> {
        // Leftovers are never read: xenstore names this process now.
        self.remove_td3_left().unwrap_or_default();
        // The signature is written last; a reader that sees it finds the other file.
        let mut begun = [0; TD3_LEN];
        begun[..4].copy_from_slice(&TD3_VERSION.to_ne_bytes());
        let td3 = create(&self.td3_directory(pid), &self.td3_name(), &begun)?;
        let vbd3 = create(&self.vbd3_directory(), VBD3_NAME, &[0; VBD3_LEN]).inspect_err(|_| {
            // Having none is reported; half of them would be misleading.
            remove_directory(&self.td3_directory(pid)).unwrap_or_default();
        })?;
        Ok(Files { vbd3, td3 })
    }

    /// Removes what [`Statistics::make`] has created for that process, which no longer writes.
    pub fn remove_made(&self, pid: u32) {
        // A leftover is replaced by the next disk of this name, and until then shows an idle disk to readers. Readers
        // that know both take the first as the sign of a disk.
        remove_directory(&self.vbd3_directory()).unwrap_or_default();
        remove_directory(&self.td3_directory(pid)).unwrap_or_default();
    }

    /// Removes what a killed process has left. What a process writes stays.
    pub fn remove_left(&self) -> io::Result<()> {
        remove_unlocked(&self.vbd3_directory(), VBD3_NAME)?;
        self.remove_td3_left()
    }

    /// Removes those whose name contains the pid of a nonexistent process. A tapdisk3 takes no lock, so the lock does
    /// not tell.
    fn remove_td3_left(&self) -> io::Result<()> {
        let entries = match fs::read_dir(&self.place) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            entries => entries?,
        };
        let name = self.td3_name();
        for entry in entries {
            let entry = entry?;
            let pid = entry.file_name().to_str().and_then(|name| name.strip_prefix("td3-")?.parse().ok());
            if entry.path().join(&name).exists() && pid.is_some_and(has_ended) {
                remove_unlocked(&entry.path(), &name)?;
            }
        }
        Ok(())
    }

    fn vbd3_directory(&self) -> PathBuf {
        self.place.join(format!("vbd3-{}-{}", self.domain, self.device))
    }

    fn td3_directory(&self, pid: u32) -> PathBuf {
        self.place.join(format!("td3-{pid}"))
    }

    fn td3_name(&self) -> String {
        format!("vbd-{}-{}", self.domain, self.device)
    }
}

/// The directory is recreated: some readers reopen a file only then.
fn create(directory: &Path, name: &str, begun: &[u8]) -> io::Result<File> {
    remove_directory(directory)?;
    fs::create_dir(directory)?;
    let create = || {
        let mut file = File::options().read(true).write(true).create_new(true).open(directory.join(name))?;
        flock(&file, FlockOperation::NonBlockingLockExclusive)?;
        // Written, so that its memory is allocated: without that, a store through the mapping could kill the process.
        file.write_all(begun)?;
        Ok(file)
    };
    create().inspect_err(|_| remove_directory(directory).unwrap_or_default())
}

/// Removes a directory whose file is not locked.
fn remove_unlocked(directory: &Path, name: &str) -> io::Result<()> {
    let opened = File::open(directory.join(name));
    match opened.and_then(|file| Ok(flock(file, FlockOperation::NonBlockingLockShared)?)) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => remove_directory(directory),
    }
}

fn remove_directory(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod test {
    use std::process::{Child, Command};

    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

    use super::*;

    fn of(place: &tempfile::TempDir, vdev: &str) -> Statistics {
        Statistics::of(place.path(), DomId(7), vdev.parse().unwrap())
    }

    fn own() -> u32 {
        std::process::id()
    }

    /// A process that has ended. Until it is waited for its number is its own.
    fn ended() -> Child {
        let child = Command::new("true").spawn().unwrap();
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(Pid::from_child(&child)), options).unwrap();
        child
    }

    /// The file that the process with this pid has, or has left, for the disk.
    fn td3_of(place: &Path, pid: u32) -> PathBuf {
        let directory = place.join(format!("td3-{pid}"));
        fs::create_dir(&directory).unwrap();
        fs::write(directory.join("vbd-7-51728"), [0xff; 4096]).unwrap();
        directory
    }

    #[test]
    fn leftovers_of_a_killed_process_are_replaced() {
        let (place, mut child) = (tempfile::tempdir().unwrap(), ended());
        fs::create_dir(place.path().join("vbd3-7-51728")).unwrap();
        fs::write(place.path().join("vbd3-7-51728/statistics"), [0xff; 200]).unwrap();
        // With our own pid, and with another one.
        let own_one = td3_of(place.path(), own());
        let left = td3_of(place.path(), child.id());
        let _files = of(&place, "xvdb").make(own()).unwrap();
        assert_eq!(fs::read(place.path().join("vbd3-7-51728/statistics")).unwrap(), [0; VBD3_LEN]);
        let begun = fs::read(own_one.join("vbd-7-51728")).unwrap();
        assert_eq!((begun.len(), &begun[..4], &begun[4..]), (TD3_LEN, &1u32.to_ne_bytes()[..], &[0; TD3_LEN - 4][..]));
        assert!(!left.exists());
        child.wait().unwrap();
    }

    #[test]
    fn leftovers_are_removed_and_files_of_others_stay() {
        let (place, mut child) = (tempfile::tempdir().unwrap(), ended());
        let left = td3_of(place.path(), child.id());
        // It is not locked, like those of tapdisk3.
        let lives = td3_of(place.path(), own());
        of(&place, "xvdc").remove_left().unwrap();
        assert!(left.exists());
        of(&place, "xvdb").remove_left().unwrap();
        assert_eq!([left.exists(), lives.exists()], [false, true]);
        child.wait().unwrap();
        // Nor when the pid no longer exists.
        fs::create_dir(&left).unwrap();
        fs::write(left.join("vbd-7-51728"), []).unwrap();
        of(&place, "xvdb").remove_left().unwrap();
        assert_eq!([left.exists(), lives.exists()], [false, true]);
    }

    #[test]
    fn the_lock_is_passed_on_with_the_files() {
        let place = tempfile::tempdir().unwrap();
        let statistics = of(&place, "xvdb");
        let Files { vbd3, td3 } = statistics.make(own()).unwrap();
        // Like a descriptor that was sent: another one of the same open file description.
        let handed = (vbd3.try_clone().unwrap(), td3.try_clone().unwrap());
        drop((vbd3, td3));
        statistics.remove_left().unwrap();
        assert!(place.path().join("vbd3-7-51728/statistics").exists());
        drop(handed);
        statistics.remove_left().unwrap();
        assert!(!place.path().join("vbd3-7-51728").exists());
        statistics.remove_made(own());
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_partial_failure_leaves_no_file() {
        let place = tempfile::tempdir().unwrap();
        fs::write(place.path().join("vbd3-7-51728"), "in the way").unwrap();
        assert!(of(&place, "xvdb").make(own()).is_err());
        assert!(!place.path().join(format!("td3-{}", own())).exists());
    }
}
