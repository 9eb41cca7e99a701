//! The mark in an image whose changed blocks are recorded: an extended attribute of its file.
//!
//! It names the map, the file itself, and the session of the map. It is found from the image, under whatever name that
//! is opened: [`super::Files`] removes it when the image is opened for writing by a process that does not record. It
//! knows nothing about maps ([`crate::image::tracking`]). Invariant: [`set`] and [`end`] are durable when they
//! return.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

pub use control::tracking::Mark;
use control::tracking::{MARK, MARK_MAX};
use disk::changes::{FileState, MapId};
use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr, fsync};
use rustix::io::Errno;
use uring::ImageFile;

/// Reads the mark of an image; `None` if there is none. A mark of an unknown form names no map.
pub fn read(file: &impl AsFd) -> io::Result<Option<Mark>> {
    let mut text = [0; MARK_MAX];
    let len = match fgetxattr(file, MARK, &mut text[..]) {
        Err(Errno::NODATA | Errno::OPNOTSUPP) => return Ok(None),
        // Longer than any of ours.
        Err(Errno::RANGE) => 0,
        read => read?,
    };
    Ok(Some(Mark::parse(text.get(..len).unwrap_or_default())))
}

/// Marks the image.
pub fn set(mark: &Mark, file: &impl AsFd) -> io::Result<()> {
    fsetxattr(file, MARK, mark.to_string().as_bytes(), XattrFlags::empty())?;
    Ok(fsync(file)?)
}

/// Removes the mark of an image that is open for writing and whose changes will not be recorded. Returns the id of the
/// map that is void now; `None` if there was no mark.
pub fn end(file: &impl AsFd) -> io::Result<Option<String>> {
    let Some(mark) = read(file)? else { return Ok(None) };
    match fremovexattr(file, MARK) {
        Ok(()) | Err(Errno::NODATA) => fsync(file)?,
        Err(errno) => return Err(errno.into()),
    }
    Ok(Some(mark.map))
}

/// Returns the state of a file, which every later write to it changes, by any program.
pub fn state(image: &ImageFile) -> io::Result<FileState> {
    let found = image.metadata()?;
    let nanoseconds = u32::try_from(found.ctime_nsec()).unwrap_or(0);
    Ok(FileState { changed: (found.ctime(), nanoseconds), len: found.size() })
}

/// Returns the id of a file among all that its file system has ever had, in hexadecimal digits.
pub fn id_of(file: &ImageFile) -> io::Result<String> {
    let file = File::from(file.try_clone_fd().map_err(io::Error::other)?);
    uring::id_in_file_system(&file).map(|id| hex(&id))
}

/// Formats an id as hexadecimal digits.
pub fn hex(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parses the id of a map or a session.
pub fn parse_id(digits: &str) -> Option<MapId> {
    if digits.len() != 32 || !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    u128::from_str_radix(digits, 16).ok().map(u128::to_be_bytes)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn ids_are_parsed_as_they_are_formatted() {
        let id: MapId = std::array::from_fn(|at| u8::try_from(at).unwrap());
        assert_eq!(parse_id(&hex(&id)), Some(id));
        for wrong in ["", "0", "zz", &"0".repeat(33), &format!("+{}", "0".repeat(31))] {
            assert_eq!(parse_id(wrong), None, "{wrong}");
        }
    }
}
