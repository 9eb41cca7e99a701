//! `calibrate`: measures which transfer sizes suit some storage.
//!
//! The crate `device` chooses and evaluates the measurements; [`probe`] puts a load on the storage. Nothing is written
//! without `--write`, and then only to an unnamed file next to the named one, which disappears with the process.

mod probe;
mod table;

use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use control::size::readable;
use control::{FormatName, ImageName, Kind};
use device::fit;
use rustix::fs::{FallocateFlags, Mode, OFlags};
use rustix::io::Errno;
use uring::{Cache, FileOpenError, ImageFile, OpenOptions};

use crate::files::Files;
use crate::files::access;
use crate::files::policy;
use crate::image::engine_choice::{self, Data};
use crate::image::progress::Progress;
use crate::image::remote;
use crate::process::failure::{Exit, Failure};
use crate::process::output;
use crate::process::signals::Signal;
use arguments::{Access, CacheMode, Calibrate};

use probe::Probe;

/// Operations in flight for which the engine has room, as for a served disk.
const DEPTH: usize = 256;

/// The repetitions of each measurement, because some may be disturbed.
const ROUNDS: usize = 3;

/// The size of the file for writing: more than a drive's cache would take too long.
const WRITTEN: u64 = 256 << 20;
/// A shorter measurement would be that of a single request.
const EACH_MIN: Duration = Duration::from_millis(1);
/// The minimum size of a file for reading: room for several of the largest requests in flight.
const READ_MIN: u64 = 64 << 20;
/// Advice about storage in use.
const READ_ALL_THE_SAME: &str = "add --in-use to read it all the same; its other load is measured too";
/// The bytes written at once to prepare a file.
const CHUNK: usize = 1 << 20;

/// The options of a file for writing. It has no name that others know, so it needs no lock.
const TO_WRITE: OpenOptions = OpenOptions { write: true, cache: Cache::None, lock: false };

/// Runs the job. A signal ends it without a result.
pub fn run(files: &Files, calibrate: &Calibrate) -> Result<Exit, Failure> {
    let stop = Signal::to_stop().map_err(|error| Failure::new("handle SIGTERM", error))?;
    let name = &calibrate.image;
    remote::refuse([name])?;
    calibrate.policy.as_deref().map_or(Ok(()), policy::must_be_replaceable)?;
    let opened = open(files, calibrate)?;
    let storage = match &calibrate.storage {
        Some(storage) => storage.clone(),
        None => policy::storage(name, &opened)?,
    };
    let operation = if calibrate.write { "write" } else { "read" };
    let len = name.len_without_file().unwrap_or_else(|| disk::Source::len(&opened));
    let requested = access::engine(Access { cache: CacheMode::None, io_engine: calibrate.io_engine });
    let engine = engine_choice::open(name, requested, vec![opened], DEPTH, Data::Own)?;
    let mut probe = Probe::new(engine, name, len, stop);
    let mut progress: Option<Progress> = None;
    let fitted = fit(calibrate.write, ROUNDS, |load, policy, at| {
        probe.each =
            calibrate.seconds.map_or(Duration::from_millis(calibrate.each), |all| time_per_measurement(all, at.all));
        let progress = progress.get_or_insert_with(|| Progress::of_steps(files, "measuring", at.all));
        let measured = probe.measure(load, policy);
        progress.step(at.done + 1);
        measured
    });
    progress.into_iter().for_each(Progress::finish);
    let fitted = fitted?;
    let found = policy::of(&fitted, storage, operation);
    if let Some(path) = &calibrate.policy {
        policy::write(&found, path)?;
    }
    match calibrate.json {
        true => output::json(&found)?,
        false => output::print(&table::of(name, &found, calibrate.policy.as_deref()))?,
    }
    Ok(Exit::Done)
}

/// Returns the time of one of `measurements` that together take `seconds`.
fn time_per_measurement(seconds: u64, measurements: usize) -> Duration {
    let measurements = u32::try_from(measurements).unwrap_or(u32::MAX).max(1);
    (Duration::from_secs(seconds) / measurements).max(EACH_MIN)
}

/// Opens the file to measure.
fn open(files: &Files, calibrate: &Calibrate) -> Result<ImageFile, Failure> {
    let name = &calibrate.image;
    let refuse = |why: &str, advice: &str| {
        Err(Failure::new(format!("measure the storage of {name}"), why).of_kind(Kind::Invalid).advise(advice))
    };
    match name.format {
        FormatName::Model => {
            let Some(len) = name.len_without_file() else { unreachable!("a model is its length") };
            return ImageFile::of_nothing(name.path(), len, true).map_err(Failure::said);
        }
        FormatName::Raw => {}
        FormatName::Null => return refuse("there is none", "name a file on it as raw:FILE, or a model"),
        _ => return refuse("a format would be measured with it", "name a file or device on it as raw:FILE"),
    }
    if calibrate.write {
        return match files.are_handed() {
            // An empty file that only the daemon and this process have open.
            true => fill(files.open(name.path(), TO_WRITE).map_err(Failure::said)?, name),
            false => fill(open_to_write(name)?, name),
        };
    }
    let options = OpenOptions { write: false, cache: Cache::None, lock: !calibrate.in_use };
    let file = files.open(name.path(), options).map_err(|error| {
        let in_use = matches!(error, FileOpenError::InUse { .. });
        let failure = Failure::said(error);
        if in_use { failure.advise(READ_ALL_THE_SAME) } else { failure }
    })?;
    if file.device_len().is_some() && !calibrate.in_use && is_claimed(name) {
        return refuse("the device is in use: mounted, or part of another one", READ_ALL_THE_SAME);
    }
    let len = disk::Source::len(&file);
    if len < READ_MIN {
        let why = format!("it has {}, and so little may come from some cache", readable(len));
        return refuse(&why, "name a file or device of 64 MiB or more, best of several GiB");
    }
    let metadata = file.metadata().map_err(|error| Failure::new(format!("examine {name}"), error))?;
    let data = metadata.blocks().saturating_mul(512);
    if file.device_len().is_none() && data < len / 10 * 9 {
        let why =
            format!("only {} of its {} are data, and holes are not read from storage", readable(data), readable(len));
        return refuse(&why, "name a file that is full of data, or measure writes: --write");
    }
    Ok(file)
}

/// Returns whether the kernel has claimed a block device: open(2), O_EXCL.
fn is_claimed(name: &ImageName) -> bool {
    let flags = OFlags::RDONLY | OFlags::EXCL | OFlags::CLOEXEC;
    rustix::fs::open(name.path(), flags, Mode::empty()).err() == Some(Errno::BUSY)
}

/// Opens an unnamed file next to the named one, which must not exist or must be empty: existing data is never
/// overwritten.
fn open_to_write(name: &ImageName) -> Result<ImageFile, Failure> {
    let path = name.path();
    let tried = || format!("measure writes next to {name}");
    match path.metadata() {
        Ok(found) if !found.is_file() || found.len() > 0 => {
            return Err(Failure::new(tried(), "it holds data, and nothing that exists is written to")
                .of_kind(Kind::Invalid)
                .advise("name a file that does not exist, in a directory on that storage; none is left there"));
        }
        Ok(_) => {}
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(Failure::new(tried(), error)),
    }
    let directory = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(".".as_ref());
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let unnamed = rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR)
        .map_err(|errno| Failure::new(tried(), std::io::Error::from(errno)))?;
    // It has no name, so messages name the directory.
    ImageFile::from_fd(unnamed, directory, TO_WRITE).map_err(Failure::said)
}

/// Fills an empty file with data.
fn fill(mut file: ImageFile, name: &ImageName) -> Result<ImageFile, Failure> {
    let failed = |error: std::io::Error| Failure::new(format!("measure writes next to {name}"), error);
    if disk::Source::len(&file) > 0 {
        return Err(failed(std::io::Error::other("it is not empty")).of_kind(Kind::Invalid));
    }
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, WRITTEN).map_err(|errno| {
        failed(errno.into()).advise(format!("it takes {} there while it measures", readable(WRITTEN)))
    })?;
    // A file system does more for the first write to a block than for later ones.
    let chunk = vec![probe::BYTE; CHUNK];
    for at in (0..WRITTEN).step_by(CHUNK) {
        file.write_at(disk::FileOffset(at), &chunk).map_err(failed)?;
    }
    file.sync().map_err(failed)?;
    Ok(file)
}
