//! `image resize`: enlarges a disk. The new space reads as zeroes, whatever was in the file beyond the old end.
//!
//! The order is [`plan::resize`], as on a disk that is served. Only the image itself changes: its parents keep their
//! sizes, and beyond their end a child reads as zeroes. They are opened to check that none is longer than its child,
//! because growing the child would expose that data.

use std::error::Error;
use std::io;

use control::size::readable;
use disk::{Format, Image, Source};
use plan::Step;
use serde::Serialize;
use uring::{Cache, ImageFile, OpenOptions};

use crate::files::Files;
use crate::image::chain::{Chain, Layers};
use crate::image::libvhd::MovedMetadata;
use crate::image::plan_layers;
use crate::image::redo_log;
use crate::image::write_synced;
use crate::jobs::planned;
use crate::process::failure::{Exit, Failure};
use crate::process::output;
use arguments::Resize;

/// The result. Names and meanings are part of the interface.
#[derive(Serialize)]
struct Resized {
    image: String,
    before: u64,
    after: u64,
}

/// Runs `image resize`.
pub fn run(files: &Files, resize: &Resize) -> Result<Exit, Failure> {
    let name = &resize.image;
    let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
    let chain = Chain::of(files, name, &resize.parents);
    let Layers { names, files: mut opened, mut images, .. } = Layers::open_chain(&chain, options)?;
    let before = images.first().map_or(0, |image| image.geometry().len);
    let Some(wanted) = resize.size.or(resize.size_option) else { unreachable!("one of the two is required") };
    let Some(after) = wanted.from(before) else {
        let why = format!("it has {}, and no disk can be that much larger", readable(before));
        return Err(Failure::new(format!("resize {name}"), why));
    };
    let tried = || format!("resize {name} from {} to {}", readable(before), readable(after));
    if after < before {
        return Err(Failure::new(tried(), "a disk cannot be shrunk, because that would destroy data")
            .advise("create a smaller image and copy the data you need into it"));
    }
    if after > before {
        let named: Vec<_> = names.into_iter().zip(&images).collect();
        let plan = plan_layers::resize(&named, after)?;
        let (Some(file), Some(image)) = (opened.first_mut(), images.first_mut()) else {
            unreachable!("a chain has an image")
        };
        if file.device_len().is_some() {
            return Err(Failure::new(tried(), "it is on a block device, which Tapline cannot resize"));
        }
        let behind = MovedMetadata::of([(name.clone(), &*image)]);
        let taken = planned::carry_out(plan, |step| apply(step, file, image).map_err(|why| Failure::new(tried(), why)));
        if file.sync_has_failed() {
            redo_log::record_failed_sync(files, name, file);
        }
        taken?;
        MovedMetadata::of([(name.clone(), &*image)]).log_new_since(&behind);
    }
    report(resize, Resized { image: name.to_string(), before, after })
}

/// Applies a step that grows a layer without requests in flight.
pub fn apply(step: Step, file: &mut ImageFile, image: &mut Image) -> Result<(), Box<dyn Error + Send + Sync>> {
    match step {
        Step::Lengthen { len, .. } => lengthen(file, len)?,
        Step::Grow { len } | Step::GrowLayer { len, .. } if image.geometry().len < len => image.grow(len)?,
        Step::MakeDurable => write_synced::flush(file, image)?,
        // There is no guest, and no requests are held.
        _ => {}
    }
    Ok(())
}

/// Lengthens the file that contains an image's data, durably.
fn lengthen(file: &mut ImageFile, len: u64) -> io::Result<()> {
    let flat = file.data_file().unwrap_or(file);
    if Source::len(flat) >= len {
        return Ok(());
    }
    match file.data_file_mut() {
        Some(data) => data.set_len(len)?,
        None => file.set_len(len)?,
    }
    file.sync()
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
