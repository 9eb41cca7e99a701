//! A file for a measurement of a repository's storage: empty, and gone as soon as no process has it open.
//!
//! Where a file system has no files without a name, it has one for a moment, by which what a daemon leaves that is
//! killed in that moment is found and removed ([`Directory::remove_unfinished`]).

use std::fs::File;

use api::Problem;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use uuid::Uuid;

use super::directory::{Directory, UNFINISHED, open_failed};

/// The prefix of its name.
const PREFIX: &str = "calibration-";

impl Directory {
    /// Creates an empty file that disappears when it is closed.
    pub fn scratch(&self) -> Result<File, Problem> {
        let tried = || format!("create an unnamed file in {}", self.path().display());
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        match rustix::fs::openat(self.handle(), ".", flags, Mode::RUSR | Mode::WUSR) {
            Ok(file) => Ok(file.into()),
            // NFS and SMB, for example. The file that is not there any more is one of the client's until it is closed.
            Err(Errno::OPNOTSUPP | Errno::ISDIR) => self.named_scratch(),
            Err(errno) => Err(open_failed(&tried(), errno)),
        }
    }

    fn named_scratch(&self) -> Result<File, Problem> {
        let name = format!("{PREFIX}{}{UNFINISHED}", Uuid::new_v4());
        let file = self.create_image(&name)?;
        self.remove_image(&name)?;
        Ok(file)
    }
}

/// Whether a name is that of such a file.
pub(super) fn is_scratch(name: &str) -> bool {
    let uuid = name.strip_suffix(UNFINISHED).and_then(|name| name.strip_prefix(PREFIX));
    uuid.is_some_and(|uuid| Uuid::parse_str(uuid).is_ok_and(|parsed| parsed.to_string() == uuid))
}

#[cfg(test)]
mod test {
    use std::io::Write;

    use super::*;

    #[test]
    fn it_can_be_written_to_and_has_no_name() {
        let room = tempfile::tempdir().unwrap();
        let directory = Directory::open(&room.path().to_str().unwrap().parse().unwrap()).unwrap();
        for file in [directory.scratch(), directory.named_scratch()] {
            file.unwrap().write_all(b"x").unwrap();
            assert_eq!(std::fs::read_dir(room.path()).unwrap().count(), 0);
        }
    }
}
