//! Files passed with a request to a disk that cannot open any itself (`--handed`).
//!
//! It knows which verbs take files, and nothing about what they do with them. Invariant: exactly as many descriptors
//! are accepted as the line lists, each for the listed use; in all other cases all of them are closed.

use std::os::fd::OwnedFd;

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
    if !given.is_empty() && !takes_files(verb) {
        return Err(invalid("files came with a verb that does not take any".to_owned()));
    }
    match verb {
        Verb::Merge(merge) if merge.delete && files.are_handed() => {
            let what = "this disk was started with --handed and cannot remove files";
            Err(Failure::of(Kind::Unsupported, what).advise("omit 'delete', and remove the files listed in 'unused'"))
        }
        _ => Ok(()),
    }
}

/// Checks that a verb for a disk in a daemon's catalogue comes from the daemon: it passes files, or declares that it
/// records the change.
pub fn check_managed(verb: &Verb, given: &Handed) -> Result<(), Failure> {
    let instead = match verb {
        Verb::Resize(resize) if !resize.recorded => "tapline vdi resize",
        Verb::Limit(limit) if limit.limits.is_some() && !limit.recorded => "tapline vbd limit",
        Verb::Share(share) if (share.weight.is_some() || share.alone) && !share.recorded => "tapline vbd share",
        Verb::Snapshot(_) if given.is_empty() => "tapline vdi snapshot",
        Verb::Clone(_) if given.is_empty() => "tapline vdi clone",
        Verb::Revert(_) if given.is_empty() => "tapline vdi revert",
        Verb::Merge(_) if given.is_empty() => {
            let refusal = by_daemon_only(verb);
            return Err(
                refusal.advise("destroy snapshots with 'tapline vdi destroy': the daemon then merges by itself")
            );
        }
        _ => return Ok(()),
    };
    Err(by_daemon_only(verb).advise(format!("use '{instead}'")))
}

fn by_daemon_only(verb: &Verb) -> Failure {
    let what = format!("this disk belongs to a daemon, whose catalogue must know of a {}", verb.word());
    Failure::of(Kind::Unsupported, what)
}

/// Returns the number of descriptors of a verb besides its files.
pub fn others(verb: &Verb) -> usize {
    match verb {
        Verb::Upgrade(upgrade) => usize::from(upgrade.successor),
        _ => 0,
    }
}

/// Returns whether a verb opens files.
pub fn takes_files(verb: &Verb) -> bool {
    matches!(verb, Verb::Snapshot(_) | Verb::Revert(_) | Verb::Clone(_) | Verb::Merge(_) | Verb::Share(_))
}

fn invalid(what: String) -> Failure {
    Failure::of(Kind::Invalid, what)
}
