//! Files passed with a request to a disk that cannot open any itself (`--handed`).
//!
//! It knows which verbs take files, and nothing about what they do with them. Invariant: exactly as many descriptors
//! are accepted as the line lists, each for the listed use; in all other cases all of them are closed.

use std::os::fd::OwnedFd;

use control::ask::Immediate::{Limit, Share};
use control::ask::LongRunning::{self, Clone, Merge, Resize, Revert, Snapshot, Track, Untrack, Upgrade};
use control::{FileAsked, Kind, Verb};

use crate::files::{Files, Handed, HandedFile};
use crate::process::failure::Failure;

/// Checks the files listed in a line and their descriptors.
pub fn files(asked: Vec<FileAsked>, came: Vec<OwnedFd>) -> Result<Handed, Failure> {
    let mut found = Handed::default();
    for (FileAsked { path, write }, descriptor) in asked.into_iter().zip(came) {
        HandedFile::checked(path, write, descriptor).and_then(|file| found.add(file)).map_err(invalid)?;
    }
    Ok(found)
}

/// Checks that a verb may come with files, and needs nothing that only the sender can do.
pub fn check(files: &Files, verb: &Verb, given: &Handed) -> Result<(), Failure> {
    if !given.is_empty() && !files.are_handed() {
        let refusal = invalid("files came with the line, but this disk opens its files itself".to_owned());
        return Err(refusal.advise("omit \"files\", or start the disk with --handed"));
    }
    let takes_files = match verb {
        Verb::Immediate(verb) => matches!(verb, Share(_)),
        Verb::LongRunning(verb) => opens_files(verb),
    };
    if !given.is_empty() && !takes_files {
        return Err(invalid("files came with a verb that does not take any".to_owned()));
    }
    match verb {
        Verb::LongRunning(Merge(merge)) if merge.delete && files.are_handed() => {
            let what = "this disk was started with --handed and cannot remove files";
            Err(Failure::of(Kind::Unsupported, what).advise("omit 'delete', and remove the files listed in 'unused'"))
        }
        _ => Ok(()),
    }
}

/// Checks that a verb for a disk in a daemon's catalogue comes from the daemon: it passes files, or declares that it
/// records the change.
pub fn check_managed(verb: &Verb, given: &Handed) -> Result<(), Failure> {
    let none = given.is_empty();
    let advice = match verb {
        Verb::LongRunning(Resize(resize)) if !resize.recorded => "use 'tapline vdi resize'",
        Verb::Immediate(Limit(limit)) if limit.limits.is_some() && !limit.recorded => "use 'tapline vbd limit'",
        Verb::Immediate(Share(share)) if (share.weight.is_some() || share.alone) && !share.recorded => {
            "use 'tapline vbd share'"
        }
        Verb::LongRunning(Snapshot(_)) if none => "use 'tapline vdi snapshot'",
        Verb::LongRunning(Clone(_)) if none => "use 'tapline vdi clone'",
        Verb::LongRunning(Revert(_)) if none => "use 'tapline vdi revert'",
        Verb::LongRunning(Snapshot(snapshot)) if snapshot.map.is_some() != snapshot.new.is_some() => {
            "use 'tapline vdi snapshot'"
        }
        Verb::LongRunning(Track(track)) if none || track.new.is_none() => "use 'tapline vdi cbt enable'",
        Verb::LongRunning(Untrack(untrack)) if !untrack.recorded => "use 'tapline vdi cbt disable'",
        Verb::LongRunning(Merge(_)) if none => {
            "destroy snapshots with 'tapline vdi destroy': the daemon then merges by itself"
        }
        _ => return Ok(()),
    };
    let what = format!("this disk belongs to a daemon, whose catalogue must know of a {}", verb.word());
    Err(Failure::of(Kind::Unsupported, what).advise(advice))
}

/// Returns the number of descriptors of a verb besides its files.
pub fn others(verb: &Verb) -> usize {
    match verb {
        Verb::LongRunning(Upgrade(upgrade)) => usize::from(upgrade.successor),
        _ => 0,
    }
}

/// Returns whether a verb opens files.
pub fn opens_files(verb: &LongRunning) -> bool {
    matches!(verb, Snapshot(_) | Revert(_) | Clone(_) | Merge(_) | Track(_))
}

fn invalid(what: String) -> Failure {
    Failure::of(Kind::Invalid, what)
}
