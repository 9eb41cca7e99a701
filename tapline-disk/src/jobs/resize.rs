//! `image resize`: enlarges a disk. The new space reads as zeroes, whatever was in the file beyond the old end.
//!
//! Only the image itself changes: its parents keep their sizes, and beyond their end a child reads as zeroes.

use control::ImageName;
use control::size::{Size, readable};
use disk::{Format, Image};
use serde::Serialize;
use uring::{Cache, ImageFile, OpenOptions};

use crate::failure::{Exit, Failure};
use crate::files::Files;
use crate::layers::open_image;
use crate::libvhd::Behind;
use crate::ordered;
use crate::output;
use crate::settled;
use arguments::Resize;

/// The result. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Resized {
    image: String,
    before: u64,
    after: u64,
}

/// Runs the job.
pub fn run(files: &Files, resize: &Resize) -> Result<Exit, Failure> {
    let name = &resize.image;
    let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
    let mut file = settled::to_write(files, name, options)?;
    let mut image = open_image(files, name, &mut file, true)?;
    let (before, Size(after)) = (image.geometry().len, resize.size);
    let tried = || format!("resize {name} from {before} to {after} bytes");
    if after < before {
        return Err(Failure::new(tried(), "a disk cannot be shrunk, because that would destroy data")
            .advise("create a smaller image and copy the data you need into it"));
    }
    if after > before {
        if file.device_len().is_some() {
            return Err(Failure::new(tried(), "it is on a block device, which Tapline cannot resize"));
        }
        grow(name, &mut file, &mut image, after).map_err(|why| Failure::new(tried(), why))?;
    }
    report(resize, Resized { image: name.to_string(), before, after })
}

/// Makes an image larger that has nothing in flight, durably.
pub fn grow(
    name: &ImageName,
    file: &mut ImageFile,
    image: &mut Image,
    len: u64,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let before = Behind::of([(name.clone(), &*image)]);
    if let Some(data) = file.data_file_mut().filter(|data| disk::Source::len(*data) < len) {
        data.set_len(len)?;
    }
    image.grow(len)?;
    if let Image::Raw(_) = image {
        file.set_len(len)?;
        return Ok(file.sync()?);
    }
    ordered::round(file, image)?;
    Behind::of([(name.clone(), &*image)]).tell_since(&before);
    Ok(())
}

fn report(resize: &Resize, resized: Resized) -> Result<Exit, Failure> {
    if resize.json {
        output::json(&resized)?;
    } else if resized.before == resized.after {
        output::print(&format!("{} already has {}\n", resized.image, readable(resized.after)))?;
    } else {
        let (before, after) = (readable(resized.before), readable(resized.after));
        output::print(&format!("{} now has {after}, before {before}\n", resized.image))?;
    }
    Ok(Exit::Done)
}
