//! Small files that grow line by line or are rewritten as a whole: writes survive a power loss.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;

use api::{Code, Problem};
use rustix::fs::{FallocateFlags, Mode, OFlags};

use super::directory::{Directory, UNFINISHED, file_failed, open_failed};

/// Space reserved by such a file beyond its contents, so that it can grow when guests have filled the file system:
/// operations that free space must be recorded first.
const ROOM: u64 = 256 << 10;

/// Why nothing was appended, as far as is known.
#[derive(Debug)]
pub enum Appended {
    /// Nothing, or what the next one cuts off.
    Nothing(Problem),
    /// It is unknown what is durable of the file.
    Doubtful(Problem),
    /// Nothing was written: the file is gone, or another has replaced it.
    Another(Problem),
}

impl Directory {
    /// Appends to a file whose valid contents are `len` bytes and end with `end`: anything after that, from a failed or
    /// killed append, is cut off. A file with other contents is not touched: it has replaced ours.
    pub fn append_file(&self, name: &str, len: u64, end: &[u8], bytes: &[u8]) -> Result<(), Appended> {
        let tried = format!("append to {}", self.path().join(name).display());
        let nothing = |error: std::io::Error| Appended::Nothing(file_failed(&tried, &error));
        let file = self.open_image(name, true).map_err(|problem| match problem.code {
            Code::NotFound => Appended::Another(problem),
            _ => Appended::Nothing(problem),
        })?;
        let found = file.metadata().map_err(nothing)?.len();
        let mut there = vec![0; end.len()];
        let begin = u64::try_from(end.len()).ok().and_then(|end| len.checked_sub(end)).filter(|_| found >= len);
        let read = begin.is_some_and(|begin| file.read_exact_at(&mut there, begin).is_ok());
        if !read || there != end {
            let why = format_args!("it is not the file that was written: it has {found} bytes, but {len} were written");
            return Err(Appended::Another(Problem::failed(&tried, why)));
        }
        if found > len {
            file.set_len(len).map_err(nothing)?;
        }
        file.write_all_at(bytes, len).map_err(nothing)?;
        keep_room(&file, len.saturating_add(u64::try_from(bytes.len()).unwrap_or(u64::MAX)));
        // After a failed sync it is unknown what is on the disk: a retry would prove nothing.
        file.sync_data().map_err(|error| Appended::Doubtful(file_failed(&tried, &error)))
    }

    /// Writes a file in the place of the one that has the name, if one has: in full or not at all.
    pub fn replace_file(&self, name: &str, bytes: &[u8]) -> Result<(), Problem> {
        let tried = format!("write {}", self.path().join(name).display());
        let beside = format!("{name}{UNFINISHED}");
        self.remove_image(&beside)?;
        // For root only: names and sizes of disks are private.
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let made = rustix::fs::openat(self.handle(), &beside, flags, Mode::from_raw_mode(0o600));
        let mut file = File::from(made.map_err(|errno| open_failed(&tried, errno))?);
        let written = file.write_all(bytes).map_err(|error| file_failed(&tried, &error)).and_then(|()| {
            keep_room(&file, u64::try_from(bytes.len()).unwrap_or(u64::MAX));
            file.sync_all().map_err(|error| file_failed(&tried, &error))
        });
        match written {
            Ok(()) => self.rename_over(&beside, name),
            Err(problem) => self.remove_image(&beside).and(Err(problem)),
        }
    }

    /// Gives a file another name, also if that is taken.
    pub fn rename_over(&self, from: &str, to: &str) -> Result<(), Problem> {
        let tried = format!("rename {} to {to}", self.path().join(from).display());
        let here = self.handle();
        rustix::fs::renameat(here, from, here, to).map_err(|errno| open_failed(&tried, errno))?;
        self.sync(&tried)
    }
}

/// Lets the file system reserve space after the file's contents, if possible: not all file systems support it, and a
/// full one cannot.
fn keep_room(file: &File, len: u64) {
    let taken =
        rustix::fs::fstat(file).map_or(0, |stat| u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512));
    if taken < len.saturating_add(ROOM / 4) {
        // Without it, it grows as long as there is space.
        rustix::fs::fallocate(file, FallocateFlags::KEEP_SIZE, len, ROOM).ok();
    }
}

#[cfg(test)]
mod test {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn room() -> (tempfile::TempDir, Directory) {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().to_str().unwrap().parse().unwrap();
        (room, Directory::open(&path).unwrap())
    }

    #[test]
    fn an_append_cuts_off_a_partial_earlier_one() {
        let (room, directory) = room();
        directory.replace_file("a", b"one\n").unwrap();
        directory.append_file("a", 4, b"e\n", b"two\n").unwrap();
        fs::write(room.path().join("a"), "one\ntwo\nthr").unwrap();
        directory.append_file("a", 8, b"wo\n", b"4\n").unwrap();
        assert_eq!(fs::read_to_string(room.path().join("a")).unwrap(), "one\ntwo\n4\n");
        assert!(matches!(directory.append_file("a", 100, b"4\n", b"5\n"), Err(Appended::Another(_))));
        assert!(matches!(directory.append_file("a", 8, b"2wo\n", b"5\n"), Err(Appended::Another(_))));
        assert_eq!(fs::read_to_string(room.path().join("a")).unwrap(), "one\ntwo\n4\n");
        assert!(matches!(directory.append_file("b", 0, b"", b"5\n"), Err(Appended::Another(_))));
        fs::create_dir(room.path().join("c")).unwrap();
        assert!(matches!(directory.append_file("c", 0, b"", b"5\n"), Err(Appended::Nothing(_))));
        fs::remove_dir(room.path().join("c")).unwrap();
        directory.replace_file("a", b"new\n").unwrap();
        assert_eq!(fs::read_to_string(room.path().join("a")).unwrap(), "new\n");
        assert_eq!(fs::metadata(room.path().join("a")).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(room.path()).unwrap().count(), 1);
    }
}
