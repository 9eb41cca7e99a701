//! Files that are replaced as a whole, and renames, by path: after a power loss there is the old file or the new one.
//!
//! 1. The new contents are written to a file next to it, and synced. *After a crash:* the old file is there, and what
//!    was written next to it is removed by the next replacement.
//! 2. That file is renamed. 3. The directory is synced. *Between these:* the old file is there, or the new one.
//!
//! In the directory of an attached repository, where names are looked up below an open directory, `Directory` does the
//! same.

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Writes a file with this mode in the place of the one at `path`, if there is one.
pub fn replace_file(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push(".unfinished");
    let new = Path::new(&new);
    match fs::remove_file(new) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = File::options().write(true).create_new(true).mode(mode).open(new)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    rename(new, path)
}

/// Renames a file, whose contents are durable, within its directory or to another one of the same file system.
pub fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)?;
    sync_parent(to)?;
    match from.parent() == to.parent() {
        true => Ok(()),
        false => sync_parent(from),
    }
}

/// Makes the names in the directory of a file durable.
pub fn sync_parent(path: &Path) -> io::Result<()> {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent)?.sync_all()
}

#[cfg(test)]
mod test {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_file_is_replaced_and_what_a_crash_left_is_overwritten() {
        let room = tempfile::tempdir().unwrap();
        let path = room.path().join("file");
        fs::write(room.path().join("file.unfinished"), "half").unwrap();
        for text in ["one", "two"] {
            replace_file(&path, text.as_bytes(), 0o600).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), text);
        }
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        rename(&path, &room.path().join("other")).unwrap();
        assert_eq!(fs::read_dir(room.path()).unwrap().count(), 1);
    }
}
