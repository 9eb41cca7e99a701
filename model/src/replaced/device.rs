//! Devices whose number or name is reused: loop devices, and FUSE mounts of single files.
//!
//! Invariant: only files that were attached here are detached.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use testbed::tool;

use super::site::run;

/// How long a device may be busy after its user was killed.
const PATIENCE: Duration = Duration::from_secs(20);

/// The name of a mounted file, without its number.
const MOUNTED: &str = "mounted";

/// A loop device, or a file on which another one is mounted.
#[derive(Debug)]
pub struct Device {
    path: PathBuf,
    attached: Attached,
}

#[derive(Debug)]
enum Attached {
    Nothing,
    Loop,
    /// The file is mounted by this process.
    Fuse(Child),
}

impl Device {
    /// The loop device with this number, which must be unused.
    pub fn of_loop(number: u32) -> Device {
        Device { path: PathBuf::from(format!("/dev/loop{number}")), attached: Attached::Nothing }
    }

    /// A file in a directory, on which files are mounted.
    pub fn of_fuse(directory: &Path, number: u32) -> Result<Device, String> {
        let path = directory.join(format!("{MOUNTED}.{number}"));
        File::create(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        Ok(Device { path, attached: Attached::Nothing })
    }

    /// The path of the device or file.
    pub fn path(&self) -> PathBuf {
        self.path.clone()
    }

    /// Attaches a backing file.
    pub fn attach(&mut self, backing: &Path) -> Result<(), String> {
        let begun = Instant::now();
        let waits = |why: String| match begun.elapsed() > PATIENCE {
            true => Err(why),
            false => {
                std::thread::sleep(Duration::from_millis(5));
                Ok(())
            }
        };
        if is_mount(&self.path) {
            let before = device_of(&self.path)?;
            let node = format!("driver=file,node-name=image,filename={}", backing.display());
            let export = "type=fuse,id=export,node-name=image,writable=on,growable=on,mountpoint=";
            let mut command = tool::bound_to_us("qemu-storage-daemon");
            command.args(["--blockdev", &node, "--export", &format!("{export}{}", self.path.display())]);
            let child = command.spawn().map_err(|error| format!("qemu-storage-daemon: {error}"))?;
            self.attached = Attached::Fuse(child);
            while device_of(&self.path)? == before {
                waits(format!("nothing is mounted at {}", self.path.display()))?;
            }
            return Ok(());
        }
        // The device may still be open, or briefly in use by another run.
        while let Err(why) = run(Command::new("losetup").arg(&self.path).arg(backing)) {
            waits(why)?;
        }
        self.attached = Attached::Loop;
        Ok(())
    }

    /// Detaches the backing file.
    pub fn detach(&mut self) -> Result<(), String> {
        match std::mem::replace(&mut self.attached, Attached::Nothing) {
            Attached::Nothing => Ok(()),
            Attached::Loop => run(Command::new("losetup").arg("-d").arg(&self.path)),
            Attached::Fuse(mut child) => {
                let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or("no process")?;
                kill_process(pid, Signal::TERM).map_err(|error| error.to_string())?;
                child.wait().map(drop).map_err(|error| error.to_string())
            }
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Err(why) = self.detach() {
            eprintln!("{why}");
        }
    }
}

/// The number of the device that a file is on.
pub fn device_of(path: &Path) -> Result<u64, String> {
    fs::metadata(path).map(|found| found.dev()).map_err(|error| format!("{}: {error}", path.display()))
}

/// Whether a path is a device or a mount, which cannot be renamed.
pub fn is_device(path: &Path) -> bool {
    path.parent() == Some(Path::new("/dev")) || is_mount(path)
}

fn is_mount(path: &Path) -> bool {
    path.file_stem().is_some_and(|stem| stem == MOUNTED)
}

/// Whether files can be mounted with FUSE here.
pub fn has_fuse() -> bool {
    Path::new("/dev/fuse").exists() && tool::locate("qemu-storage-daemon").is_some()
}
