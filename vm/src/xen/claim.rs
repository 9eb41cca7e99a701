//! The claim on a guest's disk: at most one process serves it, identified by a file that it keeps locked.
//!
//! It knows nothing about xenstore, which a killed process cannot update. Invariant: the lock disappears with its
//! process, however that ends, so the pid in a locked file is that of a living process.

use std::fs::{self, File};
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use control::Error;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use xen::DomId;

use super::device::Device;
use super::vdev::Vdev;
use super::wait;

/// How long a disk's process has to exit by itself, as it does when its nodes are gone. A signal would interfere: the
/// kernel closes the files of a process before it has fully exited.
const BY_ITSELF: Duration = Duration::from_secs(1);
/// How long a disk process may take to complete and flush its requests after the request to stop.
const TO_END: Duration = Duration::from_secs(10);
/// How long the kernel may take to end a killed process: it waits for its I/O.
const TO_DIE: Duration = Duration::from_secs(10);

/// Number and interval of attempts to get a claim held by another process: a second in total, in which a process that
/// was just killed disappears on any healthy storage.
const ATTEMPTS: u32 = 50;
const PAUSE: Duration = Duration::from_millis(20);

/// Where processes on this host leave what others must find.
#[derive(Clone, Debug)]
pub struct Places {
    /// Locks and sockets, gone after a reboot.
    pub run: PathBuf,
    /// The directory of logs.
    pub log: PathBuf,
    /// The directory of statistics, where existing tools look for them.
    pub statistics: PathBuf,
}

impl Places {
    /// The directories of this host.
    pub fn of_host() -> Places {
        Places { run: "/run/tapline".into(), log: "/var/log/tapline".into(), statistics: "/dev/shm".into() }
    }

    /// Directories below another one, for tests.
    pub fn below(directory: &Path) -> Places {
        let [run, log, statistics] = ["run", "log", "shm"].map(|place| directory.join(place));
        Places { run, log, statistics }
    }

    /// The default control socket of a disk's process.
    pub fn control(&self, device: &Device) -> PathBuf {
        self.run.join(format!("xen-{}-{}.sock", device.guest, device.vdev))
    }

    /// The NBD socket for the program that presents the disk to its guest's firmware.
    pub fn nbd(&self, device: &Device) -> PathBuf {
        self.run.join(format!("xen-{}-{}-nbd.sock", device.guest, device.vdev))
    }

    /// The default log of a disk's process.
    pub fn log(&self, device: &Device) -> PathBuf {
        self.log.join(format!("xen-{}-{}.log", device.guest, device.vdev))
    }

    pub(super) fn lock(&self, device: &Device) -> PathBuf {
        self.run.join(format!("xen-{}-{}-{}.pid", device.kind, device.guest, device.vdev.number()))
    }
}

/// That this process is the one.
#[derive(Debug)]
pub struct Claim {
    #[allow(dead_code, reason = "held for its lock")]
    file: File,
    path: PathBuf,
}

impl Claim {
    /// Takes the claim, if no other process has it.
    pub fn take(places: &Places, device: &Device) -> Result<Claim, Error> {
        let path = places.lock(device);
        let failed = |error: io::Error| {
            Error::cannot(format!("claim {device} by {}", path.display()), error)
                .advise("disks of Xen guests must be served by root, which can write there")
        };
        fs::create_dir_all(&places.run).map_err(failed)?;
        let mut attempts = 0;
        loop {
            let mut file =
                File::options().create(true).read(true).write(true).truncate(false).open(&path).map_err(failed)?;
            match flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Err(Errno::WOULDBLOCK) if attempts < ATTEMPTS => {
                    attempts += 1;
                    std::thread::sleep(PAUSE);
                    continue;
                }
                Err(Errno::WOULDBLOCK) => return Err(served_already(device, said_in(&mut file))),
                locked => locked.map_err(|errno| failed(errno.into()))?,
            }
            if is_still_at(&file, &path) {
                file.set_len(0).map_err(failed)?;
                writeln!(file, "{}", std::process::id()).map_err(failed)?;
                return Ok(Claim { file, path });
            }
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        // Removed while it is locked; if it remains, it is found unlocked, which means the same.
        fs::remove_file(&self.path).unwrap_or_default();
    }
}

/// The process that serves a disk, if one does.
pub fn holder(places: &Places, device: &Device) -> Result<Option<Pid>, Error> {
    let path = places.lock(device);
    let mut file = match File::open(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened.map_err(|error| {
            Error::cannot(format!("find the process that serves {device} in {}", path.display()), error)
        })?,
    };
    match flock(&file, FlockOperation::NonBlockingLockShared) {
        Err(Errno::WOULDBLOCK) => Ok(said_in(&mut file)),
        _ => Ok(None),
    }
}

/// The backends for which a process serves a guest's disk, whatever xenstore says.
pub fn served(places: &Places, own: DomId, guest: DomId, vdev: Vdev) -> Result<Vec<Device>, Error> {
    let failed = |error| Error::cannot(format!("find processes that serve disks in {}", places.run.display()), error);
    let entries = match fs::read_dir(&places.run) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut served = Vec::new();
    for entry in entries {
        let name = entry.map_err(failed)?.file_name();
        let kind = name.to_str().and_then(|name| {
            name.strip_prefix("xen-")?.strip_suffix(".pid")?.strip_suffix(&format!("-{guest}-{}", vdev.number()))
        });
        let Some(kind) = kind else { continue };
        let device = Device { own, kind: kind.to_owned(), guest, vdev };
        if holder(places, &device)?.is_some() {
            served.push(device);
        }
    }
    Ok(served)
}

/// A process that serves a disk.
pub struct Holder {
    /// Its pid, as long as it exists.
    pub pid: Pid,
    process: OwnedFd,
}

impl Holder {
    /// The process that serves a disk, if one does.
    pub fn of(places: &Places, device: &Device) -> Result<Option<Holder>, Error> {
        let Some(pid) = holder(places, device)? else { return Ok(None) };
        let process = match pidfd_open(pid, PidfdFlags::empty()) {
            Err(Errno::SRCH) => return Ok(None),
            opened => opened.map_err(|errno| {
                let tried = format!("find process {}, which serves {device}", pid.as_raw_nonzero());
                Error::cannot(tried, io::Error::from(errno))
            })?,
        };
        // The pid may have been reused before the process was opened; the lock shows that.
        Ok((holder(places, device)? == Some(pid)).then_some(Holder { pid, process }))
    }

    /// Sends it a signal, and waits for its end; returns whether that came in time.
    pub fn end(&self, signal: Signal, patience: Duration) -> Result<bool, Error> {
        match pidfd_send_signal(&self.process, signal) {
            Err(Errno::SRCH) => Ok(true),
            Err(errno) => {
                Err(Error::cannot(format!("stop process {}", self.pid.as_raw_nonzero()), io::Error::from(errno)))
            }
            Ok(()) => wait::readable(&self.process, patience),
        }
    }
}

/// Ends the process that serves a disk, if one does: with a request at first, and then without asking. With it go all
/// that it had mapped of the guest, so that the guest's domain can go too.
pub fn end_holder(places: &Places, device: &Device, mut tell: impl FnMut(&str)) -> Result<(), Error> {
    let Some(holder) = Holder::of(places, device)? else { return Ok(()) };
    let pid = holder.pid.as_raw_nonzero();
    if wait::readable(&holder.process, BY_ITSELF)? {
        return Ok(());
    }
    for (signal, patience) in [(Signal::TERM, TO_END), (Signal::KILL, TO_DIE)] {
        if holder.end(signal, patience)? {
            return Ok(());
        }
        tell(&format!("process {pid} has not exited in {} s", patience.as_secs()));
    }
    Err(Error::cannot(format!("stop process {pid}, which serves {device}"), "it does not exit even when killed")
        .advise("its storage does not respond; until it does, the guest's pages stay mapped; see the kernel log"))
}

fn said_in(file: &mut File) -> Option<Pid> {
    let mut text = String::new();
    file.rewind().and_then(|()| file.read_to_string(&mut text)).ok()?;
    Pid::from_raw(text.trim().parse().ok().filter(|&number| number > 0)?)
}

/// Its last holder may have removed the file before we locked it.
fn is_still_at(file: &File, path: &Path) -> bool {
    match (file.metadata(), fs::metadata(path)) {
        (Ok(ours), Ok(there)) => (ours.dev(), ours.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

fn served_already(device: &Device, pid: Option<Pid>) -> Error {
    let who = pid.map_or_else(|| "another process".to_owned(), |pid| format!("process {}", pid.as_raw_nonzero()));
    Error::cannot(format!("serve {device}"), format!("{who} already does")).advise(format!(
        "detach it first: tapline xen detach {guest} {vdev}, or replace its process: tapline xen upgrade {guest} \
         {vdev}",
        guest = device.guest,
        vdev = device.vdev
    ))
}

#[cfg(test)]
mod test {
    use super::super::fake::{machine, stand_in};
    use super::*;

    fn places() -> (tempfile::TempDir, Places) {
        let directory = tempfile::tempdir().unwrap();
        let places = Places::below(directory.path());
        (directory, places)
    }

    #[test]
    fn a_disk_is_served_by_one_process_which_others_find() {
        let (_directory, places) = places();
        let (_host, _store, device) = machine();
        assert_eq!(holder(&places, &device).unwrap(), None);
        let claim = Claim::take(&places, &device).unwrap();
        let me = Pid::from_raw(i32::try_from(std::process::id()).unwrap());
        assert_eq!(holder(&places, &device).unwrap(), me);
        let failure = Claim::take(&places, &device).unwrap_err().with_advice();
        assert!(failure.contains("already does") && failure.contains("tapline xen detach 7 xvdb"), "{failure}");
        drop(claim);
        assert_eq!(holder(&places, &device).unwrap(), None);
        Claim::take(&places, &device).unwrap();
    }

    #[test]
    fn the_serving_process_is_known_without_xenstore() {
        let (_directory, places) = places();
        let (_host, _store, device) = machine();
        let found = || served(&places, device.own, device.guest, device.vdev).unwrap();
        assert_eq!(found(), []);
        let odd = Device { kind: "vbd3-b".into(), ..device.clone() };
        let _claim = Claim::take(&places, &odd).unwrap();
        let _other = Claim::take(&places, &Device { guest: DomId(17), ..device.clone() }).unwrap();
        fs::write(places.lock(&device), "1\n").unwrap();
        assert_eq!(found(), [odd], "what a killed process has left is no process");
    }

    #[test]
    fn the_claim_of_a_killed_process_is_free() {
        let (_directory, places) = places();
        let (_host, _store, device) = machine();
        fs::create_dir_all(&places.run).unwrap();
        fs::write(places.lock(&device), "1\n").unwrap();
        assert_eq!(holder(&places, &device).unwrap(), None);
        end_holder(&places, &device, |_| {}).unwrap();
        Claim::take(&places, &device).unwrap();
    }

    #[test]
    fn the_process_holding_the_claim_is_stopped() {
        let (_directory, places) = places();
        let (_host, _store, device) = machine();
        let mut child = stand_in(&places, &device).unwrap();
        end_holder(&places, &device, |_| {}).unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&child.wait().unwrap()), Some(15));
    }
}
