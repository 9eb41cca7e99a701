//! Records another parent in an image, or none, while its lock is held elsewhere.

use std::fs::File;
use std::time::SystemTime;

use disk::Link;
use uring::{Cache, ImageFile, OpenOptions};

use crate::failure::Failure;
use crate::image_name::ImageName;
use crate::layers::open_as_it_is;
use crate::ordered;

/// Makes `link` what the image `name` records of its parent, durably. Whoever calls has locked the image, has nothing in
/// flight on it, and will not write its metadata any more.
pub fn relink(name: &ImageName, link: Option<&Link>) -> Result<(), Failure> {
    let tried = || match link {
        Some(link) => format!("record the parent {} in {name}", link.relative),
        None => format!("record in {name} that it has no parent"),
    };
    let options = OpenOptions { write: true, cache: Cache::Writeback, lock: false };
    let mut file = ImageFile::open(name.path(), options).map_err(Failure::said)?;
    let mut image = open_as_it_is(name, &mut file, true)?;
    image.relink(link).map_err(|error| Failure::new(tried(), error))?;
    ordered::round(&mut file, &mut image).map_err(|error| Failure::new(tried(), error))
}

/// The time of an image's last change, to be put back: what a job leaves as it was need not look changed to the children
/// that have recorded it.
pub struct Time {
    name: ImageName,
    modified: SystemTime,
}

impl Time {
    /// That of `name`, now.
    pub fn of(name: &ImageName) -> Result<Time, Failure> {
        let modified = std::fs::metadata(name.path()).and_then(|metadata| metadata.modified());
        let modified = modified.map_err(|error| Failure::new(format!("find the time of {name}"), error))?;
        Ok(Time { name: name.clone(), modified })
    }

    /// A time that was noted, for `name`.
    pub fn at(name: &ImageName, modified: SystemTime) -> Time {
        Time { name: name.clone(), modified }
    }

    /// Puts it back.
    pub fn put_back(&self) -> Result<(), Failure> {
        self.put_on(&self.name)
    }

    /// Gives it to another file.
    pub fn put_on(&self, name: &ImageName) -> Result<(), Failure> {
        let set = File::open(name.path()).and_then(|file| file.set_modified(self.modified).and(file.sync_all()));
        set.map_err(|error| Failure::new(format!("put back the time of {name}"), error))
    }
}
