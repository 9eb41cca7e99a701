//! The place of a round's image: a directory of a file system, or a loop device.
//!
//! Knows nothing about the content of images. Invariant: only files that were attached here are detached.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, FlockOperation, Timespec, Timestamps, fcntl_lock, utimensat};
use testbed::tool;

/// Size of a loop device in bytes.
pub const DEVICE_LEN: u64 = 12 << 20;

/// How long a killed process may hold its files and locks.
const PATIENCE: Duration = Duration::from_secs(20);

/// How an image takes the place of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Renames the new file over the old one.
    Renamed,
    /// Writes the content into the existing file or device.
    InPlace,
    /// Removes the file and creates others until one has its inode number.
    SameInode,
    /// Attaches another file to the device.
    SameNumber,
}

/// The medium of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, clap::ValueEnum)]
pub enum Medium {
    /// A file on ext4.
    Ext4,
    /// A file on XFS.
    Xfs,
    /// A file on btrfs.
    Btrfs,
    /// A file on tmpfs.
    Tmpfs,
    /// A loop device.
    Loop,
    /// A file on FUSE, which reports no birth time; its inode numbers are those of ext4.
    Fuse,
}

impl Medium {
    /// Whether files can share blocks there.
    pub fn has_reflinks(self) -> bool {
        matches!(self, Medium::Xfs | Medium::Btrfs)
    }
}

/// A loop device with its backing file.
#[derive(Debug)]
pub struct Device {
    number: u32,
    attached: bool,
}

impl Device {
    /// The loop device with this number, which must be unused.
    pub fn of(number: u32) -> Device {
        Device { number, attached: false }
    }

    /// The path of the device.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/dev/loop{}", self.number))
    }

    /// Attaches a backing file.
    pub fn attach(&mut self, backing: &Path) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            match run(Command::new("losetup").arg(self.path()).arg(backing)) {
                Ok(()) => break,
                Err(why) if begun.elapsed() > PATIENCE => return Err(why),
                // The device is still open, or briefly in use by another run.
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
        self.attached = true;
        Ok(())
    }

    /// Detaches the backing file.
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

/// The place of a round.
#[derive(Debug)]
pub struct Site {
    /// The medium of the place.
    pub medium: Medium,
    /// The directory of the image, unless that is on a device, and of further files.
    pub files: PathBuf,
    /// The directory of files that do not depend on the medium: sockets, redo logs, copies.
    pub room: PathBuf,
    /// The device of the image, and another one to which it can move.
    pub devices: Option<(Device, Device)>,
    backings: u32,
    backing: PathBuf,
}

impl Site {
    /// Creates a place in new directories.
    pub fn make(medium: Medium, files: PathBuf, room: PathBuf, numbers: (u32, u32)) -> Result<Site, String> {
        for directory in [&files, &room] {
            fs::create_dir_all(directory).map_err(|error| format!("{}: {error}", directory.display()))?;
        }
        let devices = (medium == Medium::Loop).then(|| (Device::of(numbers.0), Device::of(numbers.1)));
        Ok(Site { medium, files, room, devices, backings: 0, backing: PathBuf::new() })
    }

    /// The path of the first image.
    pub fn first_path(&self) -> PathBuf {
        match &self.devices {
            Some((device, _)) => device.path(),
            None => self.files.join("leaf"),
        }
    }

    /// Puts the content of `from` in the place; `false` if this method does not apply here.
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

    /// Attaches a copy of another file to the device.
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

    /// Detaches the file and attaches it again, with `elsewhere` to another device. Returns the path of the device.
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

/// Whether a path is a device.
pub fn is_device(path: &Path) -> bool {
    path.parent() == Some(Path::new("/dev"))
}

/// Copies a file or the content of a device.
pub fn copy(from: &Path, to: &Path) -> Result<(), String> {
    fs::remove_file(to).or_else(ignore_missing).map_err(|error| format!("{}: {error}", to.display()))?;
    File::create_new(to).map_err(|error| format!("{}: {error}", to.display()))?;
    write_into(from, to)
}

/// Copies a file with its modification time, which children record.
pub fn copy_with_time(from: &Path, to: &Path) -> Result<(), String> {
    copy(from, to)?;
    let set = fs::metadata(from).and_then(|found| {
        let time = Timespec { tv_sec: found.mtime(), tv_nsec: found.mtime_nsec() };
        // Both are set, because bindfs does not support UTIME_OMIT.
        let times = Timestamps { last_access: time, last_modification: time };
        Ok(utimensat(CWD, to, &times, AtFlags::empty())?)
    });
    set.map_err(|error| format!("{}: {error}", to.display()))
}

/// Overwrites an existing file as `cp` does: it is truncated and keeps its inode.
fn write_into(from: &Path, to: &Path) -> Result<(), String> {
    let written = || -> std::io::Result<()> {
        let mut bytes = Vec::new();
        File::open(from)?.read_to_end(&mut bytes)?;
        let mut file = File::options().write(true).truncate(true).open(to)?;
        // Holes are preserved.
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
            // The next process may bypass the page cache.
            false => file.sync_all(),
        }
    };
    written().map_err(|error| format!("{} into {}: {error}", from.display(), to.display()))
}

/// Replaces a file by one with the same inode number, by creating files until one has it.
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
    // The file system does not reuse the number, so the file is simply replaced.
    copy(from, at).map(|()| true)
}

/// Waits until the kernel has completed the last I/O of a killed process and released its locks.
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
