//! When an image was last changed, as its children record it, and that time put back.

use std::fs::Metadata;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileTypeExt;
use std::time::SystemTime;

use control::ImageName;
use uring::ImageFile;

use crate::files::Files;
use crate::process::failure::Failure;
use crate::process::log::say;

/// The modification time of an image or of its data file, whichever is later, for restoring it: if a job does not
/// change the contents, the image need not look modified to the children that have recorded it.
pub struct Time {
    files: Files,
    name: ImageName,
    modified: SystemTime,
}

/// When an open image was last changed. `None` where no time says so: on block devices.
pub fn of_open(name: &ImageName, file: &ImageFile) -> Result<Option<SystemTime>, Failure> {
    latest(name, file.all_files().map(ImageFile::metadata))
}

/// The latest time at which one of these files was changed. A device node's says nothing of what the device holds: it
/// is that of the last boot.
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
    /// That of `name`, now.
    pub fn of(files: &Files, name: &ImageName) -> Result<Time, Failure> {
        let modified = latest(name, name.paths().map(|path| files.metadata(path)))?.unwrap_or(SystemTime::UNIX_EPOCH);
        Ok(Time { files: files.clone(), name: name.clone(), modified })
    }

    /// When that was.
    pub fn modified(&self) -> SystemTime {
        self.modified
    }

    /// A time that was noted, for `name`.
    pub fn at(files: &Files, name: &ImageName, modified: SystemTime) -> Time {
        Time { files: files.clone(), name: name.clone(), modified }
    }

    /// Puts it back.
    pub fn put_back(&self) -> Result<(), Failure> {
        self.put_on(&self.name)
    }

    /// Gives it to another file.
    pub fn put_on(&self, name: &ImageName) -> Result<(), Failure> {
        let mut paths = name.paths().filter(|path| !self.files.metadata(path).as_ref().is_ok_and(is_device));
        match paths.try_for_each(|path| self.files.set_modified(path, self.modified)) {
            // Only its owner may, who has handed it, and can.
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
