//! A small file system that is really full, or nearly so: `small` in the test's directory.

use std::ffi::CStr;
use std::fs;
use std::io::Write;
use std::path::PathBuf;

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::Room;
use super::control::Control;
use super::nbd::Nbd;
use super::served::Disk;

pub const MIB: usize = 1 << 20;
/// The amount that a guest writes: more than fits with the ballast ([`Small::with_ballast`]), less than fits without
/// it.
pub const PIECES: usize = 24;

pub struct Small {
    pub room: Room,
}

impl Small {
    /// `None`, with a message, without the right to mount. `size`: the option of tmpfs.
    pub fn new(size: &CStr) -> Option<Small> {
        let room = Room::new();
        let place = room.file("small");
        fs::create_dir(&place).unwrap();
        if mount("tmpfs", &place, "tmpfs", MountFlags::empty(), Some(size)).is_err() {
            println!("not run: only root mounts a file system to be filled");
            return None;
        }
        Some(Small { room })
    }

    /// One of 48 MiB, most of which is filled with a file that can be removed.
    pub fn with_ballast() -> Option<Small> {
        let small = Small::new(c"size=48m")?;
        fs::write(small.ballast(), vec![1; 40 * MIB]).unwrap();
        Some(small)
    }

    fn ballast(&self) -> PathBuf {
        self.room.file("small/ballast")
    }

    /// Fills the remaining space.
    pub fn fill(&self) {
        let mut ballast = fs::File::options().append(true).create(true).open(self.ballast()).unwrap();
        while ballast.write_all(&[1; 4096]).is_ok() {}
    }

    pub fn make_space(&self) {
        fs::remove_file(self.ballast()).unwrap();
    }

    /// Serves a disk with a control socket, `control.sock`.
    pub fn serve(&self, words: &str) -> (Disk, Control) {
        let disk = Disk::serve(&self.room, &format!("{words} --control control.sock"));
        (disk, self.control())
    }

    pub fn control(&self) -> Control {
        Control::connect(&self.room.file("control.sock"))
    }

    pub fn nbd(&self) -> Nbd {
        Nbd::connect(&self.room.file("nbd.sock")).unwrap()
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        unmount(self.room.file("small"), UnmountFlags::DETACH).ok();
    }
}

/// Returns the offset of a piece, with a hole before the next.
pub fn at(n: usize) -> u64 {
    u64::try_from(n * 2 * MIB).unwrap()
}

pub fn piece(n: usize) -> Vec<u8> {
    vec![u8::try_from(n + 1).unwrap(); MIB]
}
