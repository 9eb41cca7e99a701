//! The daemon of a life and its directories: file systems of their own, which can be filled, and repositories on ext4
//! and on XFS with reflinks.
//!
//! Everything is below one directory and is removed with it.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate, statvfs};
use tempfile::TempDir;
use testbed::daemon::Daemon;
use testbed::daemon::api::Api;
use testbed::daemon::processes::Places;

use super::mounts::Mounts;

/// The storage of a repository that is created and destroyed again: its name, file system and format of VDIs.
const FURTHER: (&str, &str, &str) = ("further", "ext4", "qcow2");

/// A file system that can be filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// The file system of the catalogue.
    State,
    /// The file system of sockets and redo logs.
    Run,
    /// The file system of logs.
    Log,
    /// The file system of a repository, by its index.
    Sr(usize),
}

/// A directory for a repository.
#[derive(Clone, Debug)]
pub struct Storage {
    /// Its name in the model.
    pub name: &'static str,
    /// The path of the directory.
    pub path: PathBuf,
    /// The format of new VDIs.
    pub format: &'static str,
}

/// A daemon with its directories.
#[derive(Debug)]
pub struct Bed {
    /// The daemon; stopped before its file systems are unmounted.
    pub daemon: Option<Daemon>,
    /// The client of its API.
    pub api: Api,
    /// Finds which processes belong to which object.
    pub places: Places,
    /// The storages of repositories.
    pub storages: Vec<Storage>,
    mounts: Mounts,
    /// The files that fill file systems.
    filled: Vec<PathBuf>,
    room: Option<TempDir>,
}

impl Bed {
    /// Creates everything below `dir` and starts the daemon, with the programs in `programs`.
    pub fn make(dir: &Path, programs: &Path) -> Result<Bed, String> {
        let room = tempfile::Builder::new().prefix("tl-model-").tempdir_in(dir);
        let room = room.map_err(|error| format!("a directory in {}: {error}", dir.display()))?;
        let path = room.path().to_owned();
        let places = Places { room: path.clone(), sr: path.clone() };
        let api = Api { socket: path.join("run/taplined.sock") };
        let mut bed = Bed {
            daemon: None,
            api,
            places,
            storages: Vec::new(),
            mounts: Mounts::below(&path),
            filled: Vec::new(),
            room: Some(room),
        };
        for name in ["state", "run", "log"] {
            bed.mounts.mount(name, &["-t", "tmpfs", "-o", "size=48m", "tapline"], None)?;
        }
        bed.mounts.mount("ext4", &["-o", "loop"], Some(("mkfs.ext4", &["-q"], 512)))?;
        bed.mounts.mount("xfs", &["-o", "loop"], Some(("mkfs.xfs", &["-q", "-m", "reflink=1"], 640)))?;
        for (name, on, format) in
            [("chains", "ext4", "qcow2"), ("vhds", "ext4", "vhd"), ("copies", "xfs", "raw"), FURTHER]
        {
            let at = path.join(on).join(name);
            fs::create_dir(&at).map_err(|error| format!("{}: {error}", at.display()))?;
            bed.storages.push(Storage { name, path: at, format });
        }
        let settings = "[storage]\nlost-interval = 1\nfull-interval = 1\nmeasure-interval = 5\n";
        bed.daemon = Some(Daemon::start(programs.to_owned(), bed.places.clone(), settings)?);
        Ok(bed)
    }

    /// The daemon; an error if it does not run.
    pub fn daemon(&self) -> Result<&Daemon, String> {
        self.daemon.as_ref().ok_or_else(|| "there is no daemon".to_owned())
    }

    fn file_system(&self, which: Full) -> Result<PathBuf, String> {
        Ok(match which {
            Full::State => self.places.room.join("state"),
            Full::Run => self.places.room.join("run"),
            Full::Log => self.places.room.join("log"),
            Full::Sr(sr) => {
                let storage = self.storages.get(sr).ok_or("there is no such repository")?;
                storage.path.parent().ok_or("a repository without a file system")?.to_owned()
            }
        })
    }

    /// Fills a file system.
    pub fn fill(&mut self, which: Full) -> Result<(), String> {
        let path = self.file_system(which)?.join("filled");
        let failed = |error: std::io::Error| format!("{}: {error}", path.display());
        let file = File::create(&path).map_err(failed)?;
        self.filled.push(path.clone());
        let mut at = 0;
        let mut piece =
            statvfs(&path).map(|found| found.f_bavail * found.f_frsize).map_err(|errno| failed(errno.into()))?;
        // In ever smaller pieces, down to a block.
        while piece >= 4096 {
            match fallocate(&file, FallocateFlags::empty(), at, piece) {
                Ok(()) => at += piece,
                Err(rustix::io::Errno::NOSPC) => piece /= 2,
                Err(errno) => return Err(failed(errno.into())),
            }
        }
        Ok(())
    }

    /// Whether any file system is filled.
    pub fn is_full(&self) -> bool {
        !self.filled.is_empty()
    }

    /// Removes the files that fill file systems.
    pub fn relieve(&mut self) -> Result<(), String> {
        for path in self.filled.drain(..) {
            fs::remove_file(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        }
        Ok(())
    }

    /// Keeps all files; returns where they are.
    pub fn keep(&mut self) -> Option<PathBuf> {
        self.mounts.keep();
        self.room.take().map(TempDir::keep)
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        // Kills the daemon and its disks.
        drop(self.daemon.take());
    }
}
