//! The mark in an image whose changed blocks are recorded: an extended attribute of its file.
//!
//! It names the map, the file itself, and the session of the map. It is found from the image, under whatever name that
//! is opened: [`super::Files`] removes it when the image is opened for writing by a process that does not record. It
//! knows nothing about maps ([`crate::image::tracking`]). Invariant: [`Mark::set`] and [`end`] are durable when they
//! return.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;

use disk::changes::FileState;
use rustix::fs::{XattrFlags, fgetxattr, fremovexattr, fsetxattr, fsync};
use rustix::io::Errno;
use uring::ImageFile;

/// The name of the attribute.
const MARK: &str = "user.tapline.changes";
/// The maximum length of a mark: two sessions, a map, and a file's id.
const MARK_MAX: usize = 1024;

/// The mark in an image. All ids are hexadecimal digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mark {
    /// The map.
    pub map: String,
    /// The file that was marked ([`id_of`]).
    pub file: String,
    /// The sessions of the map, one of which it has.
    pub sessions: Vec<String>,
}

impl Mark {
    /// Reads the mark of an image; `None` if there is none. A mark of an unknown form names no map.
    pub fn read(file: &impl AsFd) -> io::Result<Option<Mark>> {
        let mut text = [0; MARK_MAX];
        let len = match fgetxattr(file, MARK, &mut text[..]) {
            Err(Errno::NODATA | Errno::OPNOTSUPP) => return Ok(None),
            // Longer than any of ours.
            Err(Errno::RANGE) => 0,
            read => read?,
        };
        let text = String::from_utf8_lossy(text.get(..len).unwrap_or_default()).into_owned();
        let words: Vec<&str> = text.split(' ').collect();
        Ok(Some(match words.as_slice() {
            ["1", map, file, sessions] => {
                let sessions = sessions.split(',').map(str::to_owned).collect();
                Mark { map: (*map).into(), file: (*file).into(), sessions }
            }
            _ => Mark { map: String::new(), file: String::new(), sessions: Vec::new() },
        }))
    }

    /// Makes it the mark of the image.
    pub fn set(&self, file: &impl AsFd) -> io::Result<()> {
        let text = format!("1 {} {} {}", self.map, self.file, self.sessions.join(","));
        fsetxattr(file, MARK, text.as_bytes(), XattrFlags::empty())?;
        Ok(fsync(file)?)
    }
}

/// Removes the mark of an image that is open for writing and whose changes will not be recorded. Returns the id of the
/// map that is void now; `None` if there was no mark.
pub fn end(file: &impl AsFd) -> io::Result<Option<String>> {
    let Some(mark) = Mark::read(file)? else { return Ok(None) };
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
