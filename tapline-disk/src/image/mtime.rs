//! The modification time of an image, which its children record, and restoring it.

use std::fs::Metadata;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileTypeExt;
use std::time::SystemTime;

use control::ImageName;
use uring::ImageFile;

use crate::files::Files;
use crate::process::failure::Failure;
use crate::process::log::say;

/// The modification time of an image or of its data file, whichever is later. A job that does not change the contents
/// restores it, so that the image does not look modified to the children that have recorded it.
pub struct Time {
    files: Files,
    name: ImageName,
    modified: SystemTime,
}

/// Returns the modification time of an open image; `None` for block devices, which have none.
pub fn of_open(name: &ImageName, file: &ImageFile) -> Result<Option<SystemTime>, Failure> {
    latest(name, file.all_files().map(ImageFile::metadata))
}

/// Returns the latest modification time of these files. Device nodes are ignored: their time is that of the last boot.
fn latest(name: &ImageName, files: impl Iterator<Item = io::Result<Metadata>>) -> Result<Option<SystemTime>, Failure> {
    let files = files.filter(|found| !found.as_ref().is_ok_and(is_device));
    let mut times = files.map(|metadata| metadata?.modified());
    let latest = times.try_fold(None, |latest, time| Ok(latest.max(Some(time?))));
    latest.map_err(|error: io::Error| Failure::new(format!("read the modification time of {name}"), error))
}

fn is_device(metadata: &Metadata) -> bool {
    metadata.file_type().is_block_device()
}

impl Time {
    /// Reads the modification time of `name`.
    pub fn of(files: &Files, name: &ImageName) -> Result<Time, Failure> {
        let modified = latest(name, name.paths().map(|path| files.metadata(path)))?.unwrap_or(SystemTime::UNIX_EPOCH);
        Ok(Time { files: files.clone(), name: name.clone(), modified })
    }

    /// Returns the time itself.
    pub fn modified(&self) -> SystemTime {
        self.modified
    }

    /// Makes the value for `name` from a recorded time.
    pub fn at(files: &Files, name: &ImageName, modified: SystemTime) -> Time {
        Time { files: files.clone(), name: name.clone(), modified }
    }

    /// Restores the image's modification time.
    pub fn restore(&self) -> Result<(), Failure> {
        self.apply_to(&self.name)
    }

    /// Sets the modification time of another image.
    pub fn apply_to(&self, name: &ImageName) -> Result<(), Failure> {
        let mut paths = name.paths().filter(|path| !self.files.metadata(path).as_ref().is_ok_and(is_device));
        match paths.try_for_each(|path| self.files.set_modified(path, self.modified)) {
            // Only the owner may do that: the sender of the file can do it.
            Err(error) if self.files.are_handed() && error.kind() == ErrorKind::PermissionDenied => {
                say(format_args!(
                    "the modification time of {name} cannot be restored because the file belongs to another user: \
                     children that were not given may need --accept-changed-parent"
                ));
                Ok(())
            }
            set => set.map_err(|error| Failure::new(format!("restore the modification time of {name}"), error)),
        }
    }
}
