//! `backup create`: from a disk to a target.

use std::collections::HashSet;
use std::time::Duration;

use arguments::backup::BackupCreate;
use backup::{Base, Digest, Id, Job, MachineMoment, Name, Record, Source, Statistics, Target};
use control::printable;
use control::size::readable;
use jiff::Timestamp;
use nbd::uri::Uri;
use serde_json::json;

use crate::changed;
use crate::child::Served;
use crate::failure::{Exit, Failure};
use crate::list::fields;
use crate::output::{now, print, print_json};
use crate::place::Place;
use crate::progress::Progress;
use crate::remote::{self, ExportSource, PATIENCE};
use crate::target::{self, Opened, find};

/// Names longer than this are not shown well.
const NAME_MAX: usize = 255;

/// Bytes of properties: they are in memory with the index.
const PROPERTIES_MAX: usize = 64 << 10;

/// The variable that has them.
const PROPERTIES: &str = "TAPLINE_PROPERTIES";

/// Runs the command.
pub fn run(create: &BackupCreate) -> Result<Exit, Failure> {
    check(create)?;
    // The target first: it is opened in a moment, and the disk perhaps not.
    let opened = target::open(&create.at)?;
    let base = create.since.as_deref().map(|word| base(&opened.target, word, create)).transpose()?;
    let time = create.time.as_deref().map_or_else(|| Ok(now()), moment)?;
    let (record, cost) = match Place::parse(&create.source)? {
        Place::Export(uri) => back_up(create, &opened, base, time, &uri, PATIENCE)?,
        Place::Image(image) => {
            let served = Served::start(&image, &create.parents.names, false)?;
            // A child that has ended does not come back.
            let made = back_up(create, &opened, base, time, &served.uri()?, Duration::ZERO)?;
            served.end()?;
            made
        }
    };
    show(create, &record, &cost)
}

/// The properties to keep with the backup.
fn properties(create: &BackupCreate) -> Result<Option<String>, Failure> {
    if !create.properties {
        return Ok(None);
    }
    match std::env::var(PROPERTIES) {
        Ok(text) if text.len() <= PROPERTIES_MAX && serde_json::from_str::<serde::de::IgnoredAny>(&text).is_ok() => {
            Ok(Some(text))
        }
        _ => Err(Failure::new(Exit::Usage, format!("{PROPERTIES} must be JSON of at most 64 KiB"))),
    }
}

fn check(create: &BackupCreate) -> Result<(), Failure> {
    let bad = |what: &str, advice: &str| Err(Failure::new(Exit::Usage, what).advise(advice));
    if create.name.is_empty() || create.name.len() > NAME_MAX {
        return bad("the name of a disk must have 1 to 255 bytes", "give a shorter --name");
    }
    if create.disk.as_ref().is_some_and(|disk| disk.is_empty() || disk.len() > NAME_MAX) {
        return bad("the text that identifies a disk must have 1 to 255 bytes", "give a shorter --disk");
    }
    let machine = [&create.machine, &create.moment];
    if machine.into_iter().flatten().any(|text| text.is_empty() || text.len() > NAME_MAX) {
        return bad("what identifies a machine or moment must have 1 to 255 bytes", "give a shorter text");
    }
    if create.since.is_some() && create.changed.is_none() && create.bitmap.is_none() {
        return bad(
            "--since needs the changes since that backup",
            "give --changed FILE or --bitmap NAME; without --since everything is read, and nothing sent twice",
        );
    }
    let is_export = matches!(Place::parse(&create.source)?, Place::Export(_));
    match (is_export, create.bitmap.is_some(), create.parents.names.is_empty()) {
        (false, true, _) => bad("--bitmap is for the export of an NBD server", "give the changes with --changed"),
        (true, _, false) => bad("--parent is for an image, given as FORMAT:PATH", "omit it: an export has no parents"),
        _ => Ok(()),
    }
}

/// The moment of a machine that the backup is a part of.
fn machine_moment(create: &BackupCreate) -> Option<MachineMoment> {
    let (machine, moment) = create.machine.as_deref().zip(create.moment.as_deref())?;
    Some(MachineMoment { machine: Id::of_name(machine), id: Id::of_name(moment), disks: create.disks? })
}

/// A time of the command line, in seconds since 1970.
pub fn moment(text: &str) -> Result<u64, Failure> {
    let bad = || {
        Failure::new(Exit::Usage, format!("'{}' is not a time", printable(text)))
            .advise("give one as 2026-11-30T12:00:00Z")
    };
    let time: Timestamp = text.parse().map_err(|_| bad())?;
    u64::try_from(time.as_second()).map_err(|_| bad())
}

/// The base of an incremental backup. Its changes follow when the disk is open.
fn base(target: &Target, word: &str, create: &BackupCreate) -> Result<Record, Failure> {
    let record = find(&target.backups()?, word)?;
    let Some(content) = &create.since_content else { return Ok(record) };
    match Digest::parse(content) {
        Some(content) if content == record.content => Ok(record),
        Some(_) => {
            let what =
                format!("backup {} is not the one since which changes were recorded: it has other content", record.id);
            Err(Failure::new(Exit::Usage, what).advise("back up without --since"))
        }
        None => Err(Failure::new(Exit::Usage, format!("'{content}' is not a digest of 64 hexadecimal digits"))),
    }
}

fn back_up(
    create: &BackupCreate,
    opened: &Opened,
    base: Option<Record>,
    time: u64,
    uri: &Uri,
    patience: Duration,
) -> Result<(Record, Statistics), Failure> {
    let properties = properties(create)?;
    let source = ExportSource::new(remote::open(uri, false, patience)?);
    let base = base.map(|record| based(create, &record, source.len(), uri)).transpose()?;
    let avoided = if create.repair { damaged(create, opened)? } else { HashSet::new() };
    let job = Job {
        disk: Id::of_name(create.disk.as_ref().unwrap_or(&create.name)),
        label: &create.name,
        time,
        moment: machine_moment(create),
        properties: properties.as_deref(),
        source: &source,
        base,
        threads: target::threads(create.threads),
        avoided,
    };
    let progress = Progress::new("backing up", source.len(), create.at.json);
    let record = progress.during(|control| opened.target.back_up(&job, control))?;
    let cost = opened.target.statistics(record.id)?;
    Ok((record, cost))
}

/// The packs that have damage: what is in them does not count as being on the target.
fn damaged(create: &BackupCreate, opened: &Opened) -> Result<HashSet<Name>, Failure> {
    let progress = Progress::new("verifying", opened.packed()?, create.at.json);
    let verified = progress.during(|control| opened.target.verify(target::threads(create.threads), control))?;
    Ok(verified.damaged.into_iter().map(|(name, _)| name).collect())
}

fn based(create: &BackupCreate, record: &Record, len: u64, uri: &Uri) -> Result<Base, Failure> {
    let changed = match (&create.changed, &create.bitmap) {
        (Some(path), _) => changed::read(path, len)?,
        (None, Some(bitmap)) => remote::dirty(uri, bitmap)?,
        (None, None) => std::iter::once(0..len).collect(),
    };
    Ok(Base { backup: record.id, content: record.content, changed })
}

fn show(create: &BackupCreate, record: &Record, cost: &Statistics) -> Result<Exit, Failure> {
    if create.at.json {
        let mut shown = fields(record);
        if let Some(shown) = shown.as_object_mut() {
            shown.insert("statistics".to_owned(), json!(cost));
        }
        print_json(&shown)?;
        return Ok(Exit::Done);
    }
    print(&format!(
        "id       {}\ncontent  {}\n{} read, {} holes, {} unchanged, {} deduplicated, {} sent\n",
        record.id,
        record.content,
        readable(cost.read),
        readable(cost.holes),
        readable(cost.unchanged),
        readable(cost.deduplicated),
        readable(cost.sent),
    ))?;
    Ok(Exit::Done)
}
