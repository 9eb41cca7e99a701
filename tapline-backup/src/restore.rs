//! `backup restore`: from a target to a new image or an NBD export.

use std::time::Duration;

use arguments::backup::BackupRestore;
use backup::{Reader, Sink};
use control::size::readable;
use control::{FormatName, ImageName};
use serde_json::json;

use crate::child::{self, Served};
use crate::failure::{Exit, Failure};
use crate::list::fields;
use crate::new_image::{RawImage, Temporary};
use crate::output::{print, print_json};
use crate::place::Place;
use crate::progress::Progress;
use crate::remote::{self, ExportSink, PATIENCE};
use crate::target::{self, find};

/// Bytes of pages of the index that are kept in memory.
pub const CACHE: usize = 64 << 20;

/// Runs the command.
pub fn run(restore: &BackupRestore) -> Result<Exit, Failure> {
    let place = Place::parse(&restore.destination)?;
    let target = target::open(&restore.at)?.target;
    let record = find(&target.backups()?, &restore.id)?;
    let reader = Reader::open(&target, record.id, CACHE)?;
    match place {
        Place::Export(uri) => {
            let remote = remote::open(&uri, true, PATIENCE)?;
            if remote.size() < record.len {
                let (has, needs) = (readable(remote.size()), readable(record.len));
                return Err(Failure::new(Exit::Usage, format!("{uri} is too small: it has {has}, the disk {needs}"))
                    .advise("restore to an export of at least this size"));
            }
            if !restore.force {
                if let Some(at) = remote::first_data(&remote)? {
                    return Err(Failure::new(Exit::Conflict, format!("{uri} is not blank: there is data at {at}"))
                        .advise("restore to another export, or overwrite this one with --force"));
                }
            }
            to_export(restore, &reader, ExportSink::new(remote, !restore.force))?;
        }
        Place::Image(image) => {
            if restore.force {
                return Err(Failure::new(Exit::Usage, "--force is for NBD exports: an image is always a new one")
                    .advise("choose a name that does not exist"));
            }
            to_image(restore, &reader, &image)?;
        }
    }
    match restore.at.json {
        true => print_json(&json!({ "restored": fields(&record), "to": restore.destination }))?,
        false => print(&format!("restored {} of {}\n", readable(record.len), record.id))?,
    }
    Ok(Exit::Done)
}

fn to_export(restore: &BackupRestore, reader: &Reader, mut sink: ExportSink) -> Result<(), Failure> {
    stream(restore, reader, &mut sink)?;
    sink.finish()
}

fn stream(restore: &BackupRestore, reader: &Reader, sink: &mut dyn Sink) -> Result<(), Failure> {
    let progress = Progress::new("restoring", reader.record().len, restore.at.json);
    let threads = target::threads(restore.threads);
    Ok(progress.during(|control| reader.restore(sink, threads, control))?)
}

fn to_image(restore: &BackupRestore, reader: &Reader, image: &ImageName) -> Result<(), Failure> {
    if image.format.is_read_only() || image.data_file.is_some() {
        return Err(Failure::new(Exit::Usage, format!("cannot restore to {image}"))
            .advise("restore to a raw, vhd or qcow2 image without a data file"));
    }
    let temporary = Temporary::new(&image.path)?;
    let len = reader.record().len;
    if image.format == FormatName::Raw {
        let mut raw = RawImage::create(temporary.path(), len)?;
        stream(restore, reader, &mut raw)?;
        raw.finish()?;
    } else {
        let new = ImageName { path: temporary.path().to_owned(), ..image.clone() };
        child::create(&new, len)?;
        let served = Served::start(&new, &[], true)?;
        let remote = remote::open(&served.uri()?, true, Duration::ZERO)?;
        if remote.size() < len {
            return Err(Failure::new(Exit::Failed, format!("the new image has {} bytes, not {len}", remote.size())));
        }
        to_export(restore, reader, ExportSink::new(remote, true))?;
        served.end()?;
    }
    temporary.finish()
}
