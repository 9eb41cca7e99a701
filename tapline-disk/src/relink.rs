//! Records another parent, or none, in an image whose lock is held elsewhere.

use control::ImageName;
use disk::Link;
use uring::{Cache, OpenOptions};

use crate::failure::Failure;
use crate::layers::{open_as_it_is, open_file};
use crate::libvhd::Behind;
use crate::ordered;

/// Makes `link` what the image `name` records of its parent, durably. Whoever calls has locked the image, has nothing
/// in flight on it, and will not write its metadata any more.
pub fn relink(name: &ImageName, link: Option<&Link>) -> Result<(), Failure> {
    let tried = || match link {
        Some(link) => format!("record the parent {} in {name}", link.relative),
        None => format!("record in {name} that it has no parent"),
    };
    let options = OpenOptions { write: true, cache: Cache::Writeback, lock: false };
    let mut file = open_file(name, options)?;
    let mut image = open_as_it_is(name, &mut file, true)?;
    let before = Behind::of([(name.clone(), &image)]);
    image.relink(link).map_err(|error| Failure::new(tried(), error))?;
    ordered::round(&mut file, &mut image).map_err(|error| Failure::new(tried(), error))?;
    Behind::of([(name.clone(), &image)]).tell_since(&before);
    Ok(())
}
