//! The processes of a daemon, according to /proc: which VBD each serves, which work on images, and their open files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// A disk process.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Disk {
    /// The process ID.
    pub pid: u32,
    /// The VBD that it serves; `None` if it works on an image.
    pub vbd: Option<String>,
}

/// The directories of a daemon and its disks.
#[derive(Clone, Debug)]
pub struct Places {
    /// The directory of everything else.
    pub room: PathBuf,
    /// The directory of the repository.
    pub sr: PathBuf,
}

impl Places {
    /// Creates the directories of a daemon, with an empty one for its repository.
    pub fn make(room: &Path) -> Result<Places, String> {
        let sr = room.join("sr");
        fs::create_dir(&sr).map_err(|error| format!("{}: {error}", sr.display()))?;
        Ok(Places { room: room.to_owned(), sr })
    }

    /// The directory of the VBDs' sockets.
    pub fn vbds(&self) -> PathBuf {
        self.room.join("run/vbd")
    }

    /// The directory of the VMs' monitors.
    pub fn vms(&self) -> PathBuf {
        self.room.join("run/vm")
    }

    /// All running disk processes of this daemon.
    pub fn disks(&self) -> Vec<Disk> {
        pids().into_iter().filter_map(|pid| self.disk(pid)).collect()
    }

    /// The disk process with this pid, if it belongs to this daemon.
    fn disk(&self, pid: u32) -> Option<Disk> {
        let words = words_of(pid)?;
        let program = Path::new(words.first()?).file_name()?;
        let sr = self.sr.to_str()?;
        if program != "tapline-disk" || !words.iter().any(|word| word.contains(sr)) {
            return None;
        }
        let places = self.vbds();
        let socket = words.iter().find_map(|word| Path::new(word).strip_prefix(&places).ok());
        let vbd = socket.and_then(|path| Some(path.iter().next()?.to_str()?.to_owned()));
        Some(Disk { pid, vbd })
    }

    /// The running machines of this daemon.
    pub fn machines(&self) -> BTreeSet<u32> {
        pids().into_iter().filter(|pid| self.is_machine(*pid)).collect()
    }

    /// The process of a VM, if it runs.
    pub fn machine(&self, vm: &str) -> Option<u32> {
        pids().into_iter().find(|pid| has_monitor(*pid, &self.vms().join(vm)))
    }

    fn is_machine(&self, pid: u32) -> bool {
        has_monitor(pid, &self.vms())
    }

    /// Kills a disk process or machine of this daemon with SIGKILL, if it has not ended.
    pub fn kill(&self, pid: u32) -> Result<(), String> {
        self.signal(pid, Signal::KILL)
    }

    /// Sends a signal to a disk process or machine of this daemon, if it has not ended.
    pub fn signal(&self, pid: u32, signal: Signal) -> Result<(), String> {
        let Some(number) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return Ok(()) };
        let sent = pidfd_open(number, PidfdFlags::empty()).and_then(|pidfd| {
            // Checked after opening the pidfd, when the pid cannot be reused.
            let ours = self.disk(pid).is_some() || self.is_machine(pid);
            if ours { pidfd_send_signal(pidfd, signal) } else { Ok(()) }
        });
        match sent {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(errno) => Err(format!("signal {pid}: {errno}")),
        }
    }

    /// Files of the repository that several disk processes have open for writing, with their pids.
    pub fn written_by_several(&self, disks: &[Disk]) -> BTreeMap<(u64, u64), Vec<u32>> {
        let mut writers: BTreeMap<(u64, u64), Vec<u32>> = BTreeMap::new();
        for disk in disks {
            // Several descriptors of one file in one process are allowed.
            for file in self.written_by(disk.pid) {
                writers.entry(file).or_default().push(disk.pid);
            }
        }
        writers.retain(|_, pids| pids.len() > 1);
        writers
    }

    /// Files of the repository that a process has open for writing, as device and inode numbers.
    pub fn written_by(&self, pid: u32) -> BTreeSet<(u64, u64)> {
        let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        let file = |entry: fs::DirEntry| {
            let target = fs::read_link(entry.path()).ok()?;
            if !target.starts_with(&self.sr) {
                return None;
            }
            let number = entry.file_name();
            let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", number.to_str()?)).ok()?;
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:"))?;
            // O_ACCMODE; 0 is O_RDONLY (open(2)).
            if u32::from_str_radix(flags.trim(), 8).ok()? & 3 == 0 {
                return None;
            }
            let found = fs::metadata(entry.path()).ok()?;
            Some((found.dev(), found.ino()))
        };
        descriptors.filter_map(file).collect()
    }
}

/// The pids of all processes.
fn pids() -> Vec<u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Whether a process is a machine whose monitor is below a directory.
fn has_monitor(pid: u32, below: &Path) -> bool {
    let monitor = format!("path={}/", below.display());
    words_of(pid).is_some_and(|words| words.iter().any(|word| word.contains(&monitor)))
}

/// The command line of a process; `None` if it has ended.
fn words_of(pid: u32) -> Option<Vec<String>> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).ok().filter(|bytes| !bytes.is_empty())?;
    Some(String::from_utf8_lossy(&bytes).split('\0').map(str::to_owned).collect())
}

/// Number of open descriptors of a process.
pub fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().count()
}
