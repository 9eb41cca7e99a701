//! Storage that requires 4096-byte alignment for O_DIRECT: a loop device with such sectors, and optionally a file
//! system on it, mounted as `large` in the test's directory.

use std::fs;
use std::process::Command;

use rustix::mount::{UnmountFlags, unmount};

use super::Room;

pub struct Large {
    pub room: Room,
    /// The loop device.
    pub name: String,
}

impl Large {
    /// Creates a device of this size. `None`, with a message, without loop devices with such sectors.
    pub fn device(len: u64, sector: &str) -> Option<Large> {
        let room = Room::new();
        let back = room.file("back");
        fs::File::create(&back).unwrap().set_len(len).unwrap();
        match Command::new("losetup").args(["--find", "--show", "--sector-size", sector]).arg(back).output() {
            Ok(made) if made.status.success() => {
                let name = String::from_utf8(made.stdout).unwrap().trim().into();
                Some(Large { room, name })
            }
            other => {
                println!("not run: there is no loop device to be had: {other:?}");
                None
            }
        }
    }

    /// Creates a file system by this command.
    pub fn file_system(mkfs: &str) -> Option<Large> {
        let large = Large::device(512 << 20, "4096")?;
        let place = large.room.file("large");
        fs::create_dir(&place).unwrap();
        let (program, words) = mkfs.split_once(' ').unwrap_or((mkfs, ""));
        let made = large.room.run(&format!("/usr/sbin/{program}"), &format!("{words} {}", large.name));
        assert_eq!(made.code, Some(0), "{made:?}");
        let mounted = large.room.run("mount", &format!("{} {}", large.name, place.display()));
        assert_eq!(mounted.code, Some(0), "{mounted:?}");
        Some(large)
    }

    /// Copies the file of this name to a place that other programs can access.
    pub fn take(&self, name: &str) {
        fs::copy(self.room.file("large").join(name), self.room.file(name)).unwrap();
    }
}

impl Drop for Large {
    fn drop(&mut self) {
        unmount(self.room.file("large"), UnmountFlags::DETACH).ok();
        Command::new("losetup").args(["--detach", &self.name]).status().ok();
    }
}
