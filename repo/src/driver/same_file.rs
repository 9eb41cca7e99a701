//! Whether two names are one file: hard links, bind mounts, and directories that are mounted twice.
//!
//! It knows nothing about images. Invariant: both files are open while they are compared, so no number that one of them
//! had can have been given to the other; paths decide nothing.

use std::fs::File;

use api::Problem;
use rustix::fs::{AtFlags, StatxFlags};

use super::directory::{Directory, FileNumbers};

/// Comparisons of a file that is being written: its times differ between two readings.
const LOOKS: usize = 10;

/// Whether a file system may have one number for two files, or other numbers after each mount.
pub(super) fn renumbers(kind: &str) -> bool {
    kind.starts_with("fuse") || ["cifs", "smb3", "overlay", "9p"].contains(&kind)
}

/// Attributes that two names of one file have in common at one moment.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    numbers: FileNumbers,
    /// Where the numbers are not proof enough.
    more: Option<Attributes>,
}

#[derive(Debug, PartialEq, Eq)]
struct Attributes {
    size: u64,
    /// Seconds and nanoseconds.
    born: (i64, u32),
    changed: (i64, u32),
}

impl Seen {
    fn of(file: &File, closely: bool) -> Result<Seen, Problem> {
        let failed = |error: std::io::Error| Problem::failed("examine an image", error);
        let numbers = FileNumbers::of(file).map_err(failed)?;
        let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
        let more = closely.then(|| rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, wanted)).transpose();
        let more = more.map_err(|errno| failed(errno.into()))?;
        let time = |at: rustix::fs::StatxTimestamp| (at.tv_sec, at.tv_nsec);
        let more = more.map(|stat| Attributes {
            size: stat.stx_size,
            born: time(stat.stx_btime),
            changed: time(stat.stx_ctime),
        });
        Ok(Seen { numbers, more })
    }
}

impl Directory {
    /// Whether a name here and one in another directory are the same file.
    pub fn is_same_file(&self, name: &str, other: &Directory, other_name: &str) -> Result<bool, Problem> {
        let (one, other_file) = (self.open_image(name, false)?, other.open_image(other_name, false)?);
        let closely = renumbers(&super::filesystem::kind(self.handle())?);
        for _ in 0..LOOKS {
            let first = Seen::of(&one, closely)?;
            if first == Seen::of(&other_file, closely)? {
                return Ok(true);
            }
            if first == Seen::of(&one, closely)? {
                return Ok(false);
            }
        }
        // It is being written all the time: held for one file until proven otherwise.
        Ok(FileNumbers::of(&one).ok() == FileNumbers::of(&other_file).ok())
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_hard_link_is_the_same_file_and_a_copy_is_not() {
        let room = tempfile::tempdir().unwrap();
        let directory = Directory::open(&room.path().to_str().unwrap().parse().unwrap()).unwrap();
        let at = |name: &str| room.path().join(name);
        std::fs::write(at("a"), "x").unwrap();
        std::fs::hard_link(at("a"), at("link")).unwrap();
        std::fs::copy(at("a"), at("copy")).unwrap();
        assert!(directory.is_same_file("a", &directory, "link").unwrap());
        assert!(!directory.is_same_file("a", &directory, "copy").unwrap());
        let closely = |name: &str| Seen::of(&File::open(at(name)).unwrap(), true).unwrap();
        assert!(closely("a") == closely("link") && closely("a") != closely("copy"));
    }
}
