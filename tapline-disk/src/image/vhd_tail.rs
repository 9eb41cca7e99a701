//! Removes what a killed writer has left behind the last block of a VHD, before the next writer begins or on request.
//!
//! Without this, the file of a guest that never flushes, and whose process is killed repeatedly, would grow without
//! bound. [`disk::vhd::Tidy`] decides what to do, and in which order.

use std::io;

use control::{ImageName, Kind};
use disk::vhd::{self, Tidy};
use uring::ImageFile;

use crate::process::failure::Failure;
use crate::process::log::say;

/// Truncates the file to its proper length. No other process must have it open, and it is about to be written. A block
/// device has a fixed length; an unreadable VHD is rejected elsewhere. Returns whether there was anything to remove.
pub fn clear(name: &ImageName, file: &mut ImageFile) -> Result<bool, Failure> {
    if file.device_len().is_some() {
        return Ok(false);
    }
    match vhd::tidy(file) {
        Ok(Some(tidy)) => match perform(file, &tidy) {
            Ok(()) => Ok(true),
            // The image can be opened whatever part of this was done; the next writer does the rest.
            Err(error) if Kind::of(&error) == Kind::NoSpace => {
                say(format_args!("there is no space to remove what the last writer left in {name}"));
                Ok(false)
            }
            Err(error) => Err(Failure::new(format!("remove what the last writer left in {name}"), error)),
        },
        Ok(None) | Err(_) => Ok(false),
    }
}

fn perform(file: &mut ImageFile, tidy: &Tidy) -> io::Result<()> {
    file.sync()?;
    for write in &tidy.first {
        file.write_at(write.at, &write.bytes)?;
    }
    file.sync()?;
    file.set_len(tidy.len)?;
    for write in &tidy.last {
        file.write_at(write.at, &write.bytes)?;
    }
    file.sync()
}
