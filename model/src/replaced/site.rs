//! Where an image of a round is: a directory of a file system, or a loop device of the run's own.
//!
//! Knows nothing of what is in an image. Invariant: a device is detached only by who has attached it.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, FlockOperation, Timespec, Timestamps, fcntl_lock, utimensat};
use testbed::tool;

/// Bytes of a loop device.
pub const DEVICE_LEN: u64 = 12 << 20;

/// How long a killed process may hold what it had.
const PATIENCE: Duration = Duration::from_secs(20);

/// How an image takes the place of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Renamed over it.
    Renamed,
    /// Its bytes are written into the file or the device.
    InPlace,
    /// The file is removed and another is created, until it has the same inode number.
    SameInode,
    /// Another image gets the number of the device.
    SameNumber,
}

/// Kinds of places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, clap::ValueEnum)]
pub enum Medium {
    /// A file on ext4.
    Ext4,
    /// A file on XFS.
    Xfs,
    /// A file on btrfs.
    Btrfs,
    /// A file in memory.
    Tmpfs,
    /// A loop device.
    Loop,
    /// A file on FUSE, which tells no time of birth; its inode is one of ext4.
    Fuse,
}

impl Medium {
    /// Whether files share blocks there.
    pub fn has_reflinks(self) -> bool {
        matches!(self, Medium::Xfs | Medium::Btrfs)
    }
}

/// A loop device.
#[derive(Debug)]
pub struct Device {
    number: u32,
    attached: bool,
}

impl Device {
    /// The device of a number, which is free.
    pub fn of(number: u32) -> Device {
        Device { number, attached: false }
    }

    /// Its node.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/loop{}", self.number))
    }

    /// Attaches a file.
    pub fn attach(&mut self, backing: &Path) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            match run(Command::new("losetup").arg(self.path()).arg(backing)) {
                Ok(()) => break,
                Err(why) if begun.elapsed() > PATIENCE => return Err(why),
                // It is still open somewhere, or in the hands of another run for a moment.
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
        self.attached = true;
        Ok(())
    }

    /// Detaches what is attached.
    pub fn detach(&mut self) -> Result<(), String> {
        if std::mem::take(&mut self.attached) {
            run(Command::new("losetup").arg("-d").arg(self.path()))?;
        }
        Ok(())
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Err(why) = self.detach() {
            eprintln!("{why}");
        }
    }
}

/// The place of one round.
#[derive(Debug)]
pub struct Site {
    /// Its kind.
    pub medium: Medium,
    /// The files beside the image, and the image unless it is on a device.
    pub files: PathBuf,
    /// What belongs to the round and not to the place: sockets, redo logs, copies.
    pub room: PathBuf,
    /// The device that the image is on, and another one to move to.
    pub devices: Option<(Device, Device)>,
    backings: u32,
    backing: PathBuf,
}

impl Site {
    /// A place in new directories.
    pub fn make(medium: Medium, files: PathBuf, room: PathBuf, numbers: (u32, u32)) -> Result<Site, String> {
        for directory in [&files, &room] {
            fs::create_dir_all(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        }
        let devices = (medium == Medium::Loop).then(|| (Device::of(numbers.0), Device::of(numbers.1)));
        Ok(Site { medium, files, room, devices, backings: 0, backing: PathBuf::new() })
    }

    /// Where the image is that is put here first.
    pub fn first_path(&self) -> PathBuf {
        match &self.devices {
            Some((device, _)) => device.path(),
            None => self.files.join("leaf"),
        }
    }

    /// Puts the bytes of `from` at the place; `false` where this method is of no use here.
    pub fn put(&mut self, method: Method, from: &Path, at: &Path) -> Result<bool, String> {
        match (method, self.devices.is_some()) {
            (Method::InPlace, _) => write_into(from, at)?,
            (Method::Renamed, false) => {
                let new = at.with_extension("new");
                copy(from, &new)?;
                fs::rename(&new, at).map_err(|error| format!("{}: {error}", at.display()))?;
            }
            (Method::SameInode, false) => return same_inode(from, at),
            (Method::SameNumber, true) => self.attach_copy(from)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Gives the device's number to a copy of another file.
    pub fn attach_copy(&mut self, from: &Path) -> Result<(), String> {
        self.backings += 1;
        let backing = self.room.join(format!("backing.{}", self.backings));
        copy(from, &backing)?;
        let (device, _) = self.devices.as_mut().ok_or("there is no device")?;
        device.detach()?;
        device.attach(&backing)?;
        self.backing = backing;
        Ok(())
    }

    /// Detaches the file, and attaches it again; `elsewhere`: as another device. Returns where it is then.
    pub fn attach_again(&mut self, elsewhere: bool) -> Result<PathBuf, String> {
        let (device, other) = self.devices.as_mut().ok_or("there is no device")?;
        device.detach()?;
        if elsewhere {
            std::mem::swap(device, other);
        }
        device.attach(&self.backing)?;
        Ok(device.path())
    }
}

/// Whether a path is that of a device.
pub fn is_device(path: &Path) -> bool {
    path.parent() == Some(Path::new("/dev"))
}

/// Copies a file, or what is on a device.
pub fn copy(from: &Path, to: &Path) -> Result<(), String> {
    fs::remove_file(to).or_else(ignore_missing).map_err(|error| format!("{}: {error}", to.display()))?;
    File::create_new(to).map_err(|error| format!("{}: {error}", to.display()))?;
    write_into(from, to)
}

/// Copies a file with its time of modification, which children record.
pub fn copy_with_time(from: &Path, to: &Path) -> Result<(), String> {
    copy(from, to)?;
    let set = fs::metadata(from).and_then(|found| {
        let time = Timespec { tv_sec: found.mtime(), tv_nsec: found.mtime_nsec() };
        // Both: bindfs knows no time that stays as it is.
        let times = Timestamps { last_access: time, last_modification: time };
        Ok(utimensat(CWD, to, &times, AtFlags::empty())?)
    });
    set.map_err(|error| format!("{}: {error}", to.display()))
}

/// As `cp` does to a file that exists: it is emptied, and keeps its inode.
fn write_into(from: &Path, to: &Path) -> Result<(), String> {
    let written = || -> std::io::Result<()> {
        let mut bytes = Vec::new();
        File::open(from)?.read_to_end(&mut bytes)?;
        let mut file = File::options().write(true).truncate(true).open(to)?;
        // Holes stay holes.
        let mut at = 0_u64;
        for piece in bytes.chunks(64 << 10) {
            let len = u64::try_from(piece.len()).unwrap_or(0);
            if is_device(to) || piece.iter().any(|&byte| byte != 0) {
                std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(at))?;
                file.write_all(piece)?;
            }
            at += len;
        }
        match file.metadata()?.is_file() {
            true => file.set_len(at),
            // The next process may read the device itself.
            false => file.sync_all(),
        }
    };
    written().map_err(|error| format!("{} into {}: {error}", from.display(), to.display()))
}

/// Removes a file and creates it until the new one has its inode number.
fn same_inode(from: &Path, at: &Path) -> Result<bool, String> {
    let failed = |error: std::io::Error| format!("{}: {error}", at.display());
    let wanted = fs::metadata(at).map_err(failed)?.ino();
    fs::remove_file(at).map_err(failed)?;
    for attempt in 0..32 {
        let mut path = at.as_os_str().to_owned();
        path.push(format!(".{attempt}"));
        let path = PathBuf::from(path);
        let file = File::create(&path).map_err(failed)?;
        if file.metadata().map_err(failed)?.ino() == wanted {
            fs::rename(&path, at).map_err(failed)?;
            return write_into(from, at).map(|()| true);
        }
    }
    // The file system does not give it back: another new file, then.
    copy(from, at).map(|()| true)
}

/// Waits until the kernel has ended the last I/O of a killed process, and with it the locks of that.
pub fn wait_for_locks(paths: &[&Path]) -> Result<(), String> {
    let begun = Instant::now();
    for path in paths {
        let file = File::options().write(true).open(path).map_err(|error| format!("{}: {error}", path.display()))?;
        while fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
            if begun.elapsed() > PATIENCE {
                return Err(format!("{} stays locked", path.display()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    Ok(())
}

fn ignore_missing(error: std::io::Error) -> std::io::Result<()> {
    if error.kind() == std::io::ErrorKind::NotFound { Ok(()) } else { Err(error) }
}

/// Runs a program that must succeed.
pub fn run(command: &mut Command) -> Result<(), String> {
    tool::text(command).map(drop).map_err(|error| error.to_string())
}
