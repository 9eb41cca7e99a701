//! A new image on a block device or an export of an NBD server, which exists before and stays if the job fails.
//!
//! Order: the start and the end of the device, by which programs identify an image, are cleared and synced; then
//! everything that the new image reads before it writes is cleared; then the image is written as in a file
//! ([`super::write`]). At every moment the device contains no image or the complete new one, which is empty: a
//! conversion fills it afterwards, and if killed, leaves it partly filled. A VHD has its footer in the last sector,
//! where libvhd looks for it.

use std::fs::Metadata;
use std::io;
use std::os::unix::fs::FileTypeExt;

use control::{FormatName, ImageName};
use disk::size::{in_memory, on_disk};
use disk::{Creation, FileOffset, MetaWrite, Source};
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use uring::{Cache, ImageFile, OpenOptions};

use crate::files::Files;
use crate::image::progress::Progress;
use crate::image::redo_log;
use crate::image::remote;
use crate::process::failure::Failure;
use crate::process::log::say;

/// The bytes at each end that are checked to see whether a device is in use: file systems, partition tables and volume
/// managers have their signatures there.
const ENDS: u64 = 1 << 20;
/// The bytes cleared between two progress reports.
const STEP: u64 = 256 << 20;
const SECTOR: u64 = 512;

/// Opens and locks the block device `name`; returns `None` if it is not one.
pub fn open(files: &Files, name: &ImageName) -> Result<Option<ImageFile>, Failure> {
    if let Some(remote) = remote::open(files, name, true, remote::User::Job)? {
        return Ok(Some(remote));
    }
    let is_device = |metadata: Metadata| metadata.file_type().is_block_device();
    if files.are_handed() || !std::fs::metadata(name.path()).is_ok_and(is_device) {
        return Ok(None);
    }
    let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
    ImageFile::open(name.path(), options).map(Some).map_err(Failure::said)
}

/// Rejects a device on which the image must not be created; writes nothing.
pub fn check(name: &ImageName, device: &mut ImageFile, creation: &Creation, overwrite: bool) -> Result<(), Failure> {
    let len = Source::len(device);
    if creation.len > len {
        let what = kind(device);
        let advice = if device.remote().is_some() { "enlarge the export" } else { "enlarge the device" };
        let why = format!("the {what} has {len} bytes, but the image needs {} from the start", creation.len);
        return Err(Failure::new(format!("create {name}"), why).advise(advice));
    }
    if overwrite { Ok(()) } else { check_blank(name, device, len) }
}

/// Makes a new image on a device, whatever it contains.
pub fn fill(files: &Files, name: &ImageName, device: &mut ImageFile, creation: Creation) -> Result<(), Failure> {
    let len = Source::len(device);
    if name.format == FormatName::Raw && creation.len < len {
        say(format_args!("{name}: the disk uses all {len} bytes of its {}", kind(device)));
    }
    if device.remote().is_none() {
        let failed = |error| Failure::new(format!("end the redo log of {name}"), error);
        redo_log::invalidate(files, device).map_err(failed)?;
    }
    let filled = clear_and_write(files, name, device, creation, len);
    filled.inspect_err(|_| {
        if let Err(error) = clear_ends(device, len) {
            say(format_args!("{name} may hold an incomplete image: {error}"));
        }
    })
}

fn clear_and_write(
    files: &Files,
    name: &ImageName,
    device: &mut ImageFile,
    creation: Creation,
    len: u64,
) -> Result<(), Failure> {
    let cleared = if name.format == FormatName::Raw { len } else { creation.len };
    let creation = on_device(name.format, creation, len);
    let failed = |error| Failure::new(format!("write the new image {name}"), error);
    clear_ends(device, len).map_err(failed)?;
    let mut progress = Progress::new(files, "clearing", cleared);
    let mut at = 0;
    while at < cleared {
        let step = STEP.min(cleared - at);
        clear(device, at, step).map_err(failed)?;
        progress.advance(step);
        at += step;
    }
    progress.finish();
    super::write(device, &creation).and_then(|()| device.sync()).map_err(failed)
}

/// Clears a device after a failure, so that it is not mistaken for an image.
pub fn abandon(files: &Files, name: &ImageName) {
    let cleared = open(files, name).and_then(|device| {
        let Some(mut device) = device else { return Ok(()) };
        let len = Source::len(&device);
        clear_ends(&mut device, len).map_err(|error| Failure::new(format!("clear {name}"), error))
    });
    match cleared {
        Ok(()) => say(format_args!("{name} holds no image, because it was not completed")),
        Err(failure) => say(format_args!("{name} holds an incomplete image: {failure}")),
    }
}

/// Clears the sectors by which programs identify an image.
fn clear_ends(device: &mut ImageFile, len: u64) -> io::Result<()> {
    for at in [0, len.saturating_sub(SECTOR)].map(FileOffset) {
        device.write_at(at, &[0; 512])?;
    }
    device.sync()
}

/// Refuses a device that seems to be in use.
fn check_blank(name: &ImageName, device: &mut ImageFile, len: u64) -> Result<(), Failure> {
    let ends = ENDS.min(len);
    let mut bytes = vec![0; in_memory(ends)];
    for at in [0, len.saturating_sub(ends)].map(FileOffset) {
        let read = device.read_at(at, &mut bytes);
        read.map_err(|error| Failure::new(format!("examine {name}"), error))?;
        if let Some(found) = bytes.iter().position(|byte| *byte != 0) {
            let found = at + on_disk(found);
            let why = format!("the {} already contains data, at byte {found}", kind(device));
            return Err(Failure::new(format!("create {name}"), why)
                .advise("check what it is (blkid, lsblk --fs); --force overwrites it"));
        }
    }
    Ok(())
}

/// Returns what it is, for people.
fn kind(device: &ImageFile) -> &'static str {
    if device.remote().is_some() { "export" } else { "block device" }
}

/// Moves the footer of a VHD to the end of a device of this size.
fn on_device(format: FormatName, creation: Creation, len: u64) -> Creation {
    if format != FormatName::Vhd {
        return creation;
    }
    let footer = creation.len - SECTOR;
    let there = |write: MetaWrite| match write.at.0 == footer {
        true => MetaWrite { at: FileOffset(len.saturating_sub(SECTOR)), ..write },
        false => write,
    };
    Creation { len, writes: creation.writes.into_iter().map(there).collect() }
}

/// Makes a range of a device read as zeroes: by deallocation if the device can do that, else by writing.
fn clear(device: &mut ImageFile, at: u64, len: u64) -> io::Result<()> {
    if device.remote().is_some() {
        return if device.zero_remote(FileOffset(at), len)? { Ok(()) } else { write_zeroes(device, at, len) };
    }
    let freed = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for how in [freed, FallocateFlags::ZERO_RANGE] {
        match fallocate(&*device, how, at, len) {
            Ok(()) => return Ok(()),
            // The device does not support it, or the range contains a part of a block.
            Err(Errno::OPNOTSUPP | Errno::INVAL) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    write_zeroes(device, at, len)
}

fn write_zeroes(device: &mut ImageFile, at: u64, len: u64) -> io::Result<()> {
    let zeroes = vec![0; 1 << 20];
    let mut done = 0;
    while done < len {
        let piece = zeroes.get(..in_memory(len - done)).unwrap_or(&zeroes);
        device.write_at(FileOffset(at + done), piece)?;
        done += on_disk(piece.len());
    }
    Ok(())
}
