//! The mark in an image whose changed blocks are recorded, as the daemon reads and writes it for its disk processes,
//! which may not ([`control::tracking`], decision 0065).
//!
//! It knows files, and nothing about maps. Invariant: a mark is durable when [`set`] returns.

use std::fs::File;
use std::os::unix::fs::MetadataExt;

use api::{Code, Problem};
use control::tracking::{FileState, MARK, MARK_MAX, Mark, NewMap};
use repo::driver::{end_map, file_failed};
use rustix::fs::{AtFlags, StatxFlags, XattrFlags};
use rustix::io::Errno;
use uuid::Uuid;

/// The mark of an image; `None` if there is none.
pub fn read(image: &File) -> Result<Option<Mark>, Problem> {
    let mut text = [0; MARK_MAX];
    match rustix::fs::fgetxattr(image, MARK, &mut text[..]) {
        Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
        // Longer than any of ours.
        Err(Errno::RANGE) => Ok(Some(Mark::parse(&[]))),
        Err(errno) => Err(file_failed("read the mark of an image", &errno.into())),
        Ok(len) => Ok(Some(Mark::parse(text.get(..len).unwrap_or_default()))),
    }
}

/// The mark of an image; `None` also if it is that of another file, of which this one is a copy.
pub fn own(image: &File) -> Result<Option<Mark>, Problem> {
    Ok(read(image)?.filter(|found| id_of(image).is_ok_and(|id| id == found.file)))
}

/// Marks an image.
pub fn set(image: &File, mark: &Mark) -> Result<(), Problem> {
    let set = rustix::fs::fsetxattr(image, MARK, mark.to_string().as_bytes(), XattrFlags::empty());
    set.and_then(|()| rustix::fs::fsync(image)).map_err(|errno| {
        let problem = file_failed("mark an image as tracked", &errno.into());
        match errno {
            Errno::OPNOTSUPP => problem.advise(
                "changed blocks can be tracked in repositories on file systems with extended attributes (user.*) only",
            ),
            _ => problem,
        }
    })
}

/// Removes the mark of an image whose changes will not be recorded, durably.
pub fn end(image: &File) -> Result<(), Problem> {
    end_map(image).map_err(|errno| file_failed("remove the mark of an image", &errno.into()))
}

/// The id of a file among all that its file system has ever had: its inode, and when that was given to it.
pub fn id_of(image: &File) -> Result<String, Problem> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let stat = rustix::fs::statx(image, "", AtFlags::EMPTY_PATH, wanted);
    let stat = stat.map_err(|errno| file_failed("identify an image", &errno.into()))?;
    if !StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME) {
        let what = "cannot identify an image: its file system does not keep when a file was created";
        return Err(Problem::new(Code::Unsupported, what).advise("use a repository on ext4, XFS or btrfs"));
    }
    let born = stat.stx_btime;
    // A process that works without a daemon identifies files in another way, and finds none of its own here.
    Ok(format!("b{:016x}{:016x}{:08x}", stat.stx_ino, born.tv_sec, born.tv_nsec))
}

/// The state of an image's file, which every later write to it changes.
pub fn state(image: &File) -> Result<FileState, Problem> {
    let found = image.metadata().map_err(|error| file_failed("examine an image", &error))?;
    let nanoseconds = u32::try_from(found.ctime_nsec()).unwrap_or(0);
    Ok(FileState { seconds: found.ctime(), nanoseconds, len: found.size() })
}

/// Marks an image for a new map; returns its ids.
pub fn set_new(image: &File, map: Uuid) -> Result<NewMap, Problem> {
    let (map, session) = (digits(map), digits(Uuid::new_v4()));
    set(image, &Mark { map: map.clone(), file: id_of(image)?, sessions: vec![session.clone()] })?;
    Ok(NewMap { map, session })
}

/// The id of a map as disk processes write it.
pub fn digits(map: Uuid) -> String {
    map.simple().to_string()
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_copy_has_another_id_and_a_renamed_file_its_own() {
        let room = tempfile::tempdir().unwrap();
        let path = |name: &str| room.path().join(name);
        let file = File::create(path("a")).unwrap();
        let Ok(id) = id_of(&file) else { return };
        std::fs::copy(path("a"), path("b")).unwrap();
        assert_ne!(id_of(&File::open(path("b")).unwrap()).unwrap(), id);
        std::fs::rename(path("a"), path("c")).unwrap();
        assert_eq!(id_of(&File::open(path("c")).unwrap()).unwrap(), id);
    }

    #[test]
    fn a_new_mark_is_read_back_and_changes_the_state_of_the_file() {
        let file = tempfile::tempfile().unwrap();
        let map = Uuid::new_v4();
        let Ok(new) = set_new(&file, map) else { return };
        let found = read(&file).unwrap().unwrap();
        assert_eq!((found.map, found.sessions), (digits(map), vec![new.session]));
        assert_eq!(found.file, id_of(&file).unwrap());
    }
}
