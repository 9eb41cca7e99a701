//! Checks and repairs the structure of one image file, in any format.
//!
//! It knows nothing about parents, and never changes data of the disk.

use std::fmt::Display;

use control::{FormatName, ImageName, Kind};
use disk::qcow2::Qcow2;
use disk::{FileOffset, ImageErrorKind, MetaWrite, Problem, RedoLog, Severity, Source, Tail, qcow2, vhd};
use uring::ImageFile;

use crate::files::tail;
use crate::image::write_synced;
use crate::process::failure::Failure;
use crate::process::failure::explain;
use crate::process::log::say;

/// The result of checking an image.
#[derive(Default)]
pub struct Examined {
    /// The problems; empty if there are none.
    pub problems: Vec<Problem>,
    /// The number of problems that are not in the list.
    pub unlisted: u64,
    /// The repair.
    pub repair: Repair,
}

/// The writes of a repair, with a sync after each batch.
#[derive(Default)]
pub struct Repair {
    /// The writes; empty if nothing needs repair or can be repaired.
    pub batches: Vec<Vec<MetaWrite>>,
    /// The length to which the file must be extended first.
    pub len: Option<u64>,
    /// Sentences that describe the repair.
    pub what: Vec<String>,
}

impl Examined {
    /// Returns the severity of the worst problem.
    pub fn worst(&self) -> Option<Severity> {
        self.problems.iter().map(|problem| problem.severity).max()
    }
}

/// Logs that refcounts of an image that is written to are wrong, if any are.
pub fn tell_of_refcounts(name: impl Display, image: &Qcow2) {
    let wrong = image.wrong_refcount_blocks();
    if wrong > 0 {
        say(format_args!(
            "{name}: {wrong} of its refcount blocks are lost or wrong; nothing is placed where they count, so the file \
             grows: `tapline image check --repair` recounts, while the image is not in use"
        ));
    }
}

/// Checks the metadata of a file. With `repair` it also determines the repair, where that takes extra work.
pub fn examine(name: &ImageName, file: &mut ImageFile, repair: bool) -> Result<Examined, Failure> {
    let tail = tail(file);
    examine_source(name, file, tail, repair)
}

/// Like [`examine`], for the file as it will be when its redo log has been replayed.
pub fn examine_through(name: &ImageName, file: &mut ImageFile, log: Option<&RedoLog>) -> Result<Examined, Failure> {
    let tail = tail(file);
    match log {
        Some(log) => examine_source(name, &mut log.patched(file), tail, false),
        None => examine_source(name, file, tail, false),
    }
}

fn examine_source(name: &ImageName, file: &mut dyn Source, tail: Tail, repair: bool) -> Result<Examined, Failure> {
    let checked = match name.format {
        FormatName::Vhd => examine_vhd(file, tail),
        FormatName::Qcow2 => examine_qcow2(file, repair),
        // A disk without a file has been rejected before.
        FormatName::Vmdk | FormatName::Vhdx | FormatName::Null | FormatName::Model => {
            let why = format!("{} images are only read, and not checked", name.format);
            let advice = format!("use `qemu-img check -f {} {}`", name.format, name.path().display());
            return Err(Failure::new(format!("check {name}"), why).advise(advice).of_kind(Kind::Unsupported));
        }
        FormatName::Raw => disk::raw::Raw::of_file(file.len(), true).map(|_| Examined::default()),
    };
    match checked {
        Ok(examined) => Ok(examined),
        // Damage that prevents reading the rest is a finding like any other.
        Err(error) if error.kind == ImageErrorKind::Corrupt => {
            let at = error.at.unwrap_or_default();
            let problem = Problem { severity: Severity::Damage, at, what: error.what };
            Ok(Examined { problems: vec![problem], ..Examined::default() })
        }
        Err(error) => Err(explain(name, error)),
    }
}

fn examine_vhd(file: &mut dyn Source, tail: Tail) -> Result<Examined, disk::ImageError> {
    let report = vhd::check(file, tail)?;
    let whole = report.worst() != Some(Severity::Damage) && !report.repairs.is_empty();
    let repair = match whole {
        true => Repair { what: restored(&report.repairs), batches: report.repairs, len: None },
        false => Repair::default(),
    };
    Ok(Examined { problems: report.problems, unlisted: 0, repair })
}

/// Describes the writes of a VHD's repair, without repetitions.
fn restored(batches: &[Vec<MetaWrite>]) -> Vec<String> {
    let mut what = Vec::new();
    for MetaWrite { bytes, .. } in batches.iter().flatten() {
        let sentence = match bytes.get(..8) {
            Some(b"conectix") => "a footer is restored from its copy",
            Some(b"cxsparse") => "header fields that libvhd rejects are rewritten",
            _ => "redundant metadata is restored",
        };
        if !what.iter().any(|other| other == sentence) {
            what.push(sentence.to_owned());
        }
    }
    what
}

fn examine_qcow2(file: &mut dyn Source, repair: bool) -> Result<Examined, disk::ImageError> {
    let report = qcow2::check(file)?;
    let mut problems = report.problems;
    let states = [
        (report.dirty, Severity::Unclosed, "the image was not closed; the next writer rebuilds its refcounts"),
        (report.marked_corrupt, Severity::Repairable, "a program found the image damaged and marked it as such"),
    ];
    problems.extend(states.into_iter().filter(|(is, _, _)| *is).map(|(_, severity, what)| Problem {
        severity,
        at: INCOMPATIBLE_FEATURES_AT,
        what: what.to_owned(),
    }));
    let repair = if repair { repair_of(qcow2::repair(file)?) } else { Repair::default() };
    Ok(Examined { problems, unlisted: report.unlisted, repair })
}

/// The offset of the bits "dirty" and "corrupt" in a qcow2 header.
const INCOMPATIBLE_FEATURES_AT: FileOffset = FileOffset(72);

fn repair_of(repair: qcow2::Repair) -> Repair {
    Repair { batches: repair.batches, len: repair.new_len, what: repair.what }
}

/// Repairs an image. If it is killed, the image can be checked and repaired again.
pub fn repair(name: &ImageName, file: &mut ImageFile, repair: &Repair) -> Result<(), Failure> {
    let done = match repair.len {
        Some(len) if len > Source::len(file) => file.set_len(len),
        _ => Ok(()),
    };
    done.and_then(|()| write_synced::write(file, &repair.batches)).map_err(|error| {
        Failure::new(format!("repair {name}"), error).advise("no intact data has been lost; run the repair again")
    })
}

/// Repairs a qcow2 image that was not closed, as all programs do before writing to one; returns what was done.
pub fn close(name: &ImageName, file: &mut ImageFile) -> Result<Vec<String>, Failure> {
    let done = qcow2::repair(file).map(repair_of).map_err(|error| explain(name, error))?;
    repair(name, file, &done)?;
    Ok(done.what)
}
