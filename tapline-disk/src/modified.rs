//! When an image was last changed, as its children record it, and that time put back.

use std::fs::Metadata;
use std::io::{self, ErrorKind};
use std::time::SystemTime;

use control::ImageName;

use crate::failure::Failure;
use crate::files::Files;
use crate::log::say;

/// The modification time of an image or of its data file, whichever is later, for restoring it: if a job does not
/// change the contents, the image need not look modified to the children that have recorded it.
pub struct Time {
    files: Files,
    name: ImageName,
    modified: SystemTime,
}

/// When an image was last changed of whose files this is known.
pub fn latest_change(
    name: &ImageName,
    files: impl Iterator<Item = io::Result<Metadata>>,
) -> Result<SystemTime, Failure> {
    let mut times = files.map(|metadata| metadata?.modified());
    let latest = times.try_fold(SystemTime::UNIX_EPOCH, |latest, time| Ok(latest.max(time?)));
    latest.map_err(|error: io::Error| Failure::new(format!("read the modification time of {name}"), error))
}

impl Time {
    /// That of `name`, now.
    pub fn of(files: &Files, name: &ImageName) -> Result<Time, Failure> {
        let modified = latest_change(name, name.paths().map(|path| files.metadata(path)))?;
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
        match name.paths().try_for_each(|path| self.files.set_modified(path, self.modified)) {
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
