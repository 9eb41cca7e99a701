//! A repository in a directory: created, attached and removed; its file system determines its features.
//!
//! Invariants: nothing is attached without the expected label, nor what another process has attached for writing; a
//! directory with contents never becomes a repository unless the user says that it contains images.

use std::path::{Path, PathBuf};
use std::{fs, io};

use api::{AbsolutePath, Code, ImageFormat, Problem, SrSource, Variant, Versions};
use uuid::Uuid;

use super::directory::file_failed;
use super::{Directory, LABEL, LOCK, Label, UNFINISHED, filesystem};

/// The file with a repository's own inventory.
pub const INVENTORY: &str = ".tapline-inventory.jsonl";
/// The name of an inventory that was found damaged and rewritten.
pub const DAMAGED: &str = ".tapline-inventory.jsonl.damaged";

/// Names that a file system or this program creates, and that do not count as contents.
const NOBODYS: [&str; 2] = ["lost+found", LOCK];

/// A repository that is attached.
#[derive(Debug)]
pub struct Attached {
    /// Its directory, locked.
    pub directory: Directory,
    /// The properties of its storage.
    pub variant: Variant,
}

/// Attaches the repository `uuid` that is at `path`.
pub fn attach(path: &AbsolutePath, source: &SrSource, uuid: Uuid) -> Result<Attached, Problem> {
    let mut directory = Directory::open(path)?;
    let read_only = filesystem::read_only(directory.handle())?;
    let format = match source {
        // A library of images is read and may be shared by anybody: it has neither label nor lock.
        SrSource::Iso { .. } => None,
        _ => {
            let format = check_label(&directory, uuid)?.format;
            directory.lock(read_only)?;
            format
        }
    };
    let variant = variant(&directory, path, source, format, read_only)?;
    Ok(Attached { directory, variant })
}

fn check_label(directory: &Directory, uuid: Uuid) -> Result<Label, Problem> {
    let path = directory.path().display();
    let (what, advice) = match Label::read(directory)? {
        Some(label) if label.uuid == uuid => return Ok(label),
        Some(other) => (
            format!("{path} holds another repository, '{}' ({})", other.name, other.uuid),
            "mount the right file system there, or introduce the other repository",
        ),
        None => (format!("there is no repository at {path}"), "mount the right file system there"),
    };
    Err(Problem::new(Code::State, what).advise(advice))
}

/// Refuses a directory in which there is anything.
pub fn check_empty(directory: &Directory) -> Result<(), Problem> {
    let entries = directory.entries()?;
    let path = directory.path().display();
    if entries.iter().any(|entry| entry.name == LABEL) {
        let what = format!("{path} is already a repository");
        return Err(Problem::new(Code::Exists, what)
            .field("source")
            .advise("introduce it, or choose another directory"));
    }
    match entries.iter().find(|entry| !NOBODYS.contains(&&*entry.name)) {
        None => Ok(()),
        Some(entry) => {
            let what = format!("{path} is not empty: it contains '{}'", entry.name.escape_debug());
            let advice = "choose an empty directory, or introduce this one with its contents";
            Err(Problem::new(Code::Exists, what).field("source").advise(advice))
        }
    }
}

/// Creates a directory and its missing parents, durably. Returns those that it created, the outermost first: none if
/// the directory existed.
pub fn create_directory(path: &AbsolutePath) -> Result<Vec<PathBuf>, Problem> {
    let path = Path::new(path.as_str());
    let tried = format!("create the directory {}", path.display());
    let failed = |error: io::Error| {
        let problem = file_failed(&tried, &error).field("source");
        match problem.advice {
            Some(_) => problem,
            None => problem.advise("give a directory that can be created, or one that exists and is empty"),
        }
    };
    let mut missing: Vec<&Path> = path.ancestors().take_while(|directory| !directory.exists()).collect();
    missing.reverse();
    let mut created = Vec::new();
    for directory in missing {
        match fs::create_dir(directory) {
            Ok(()) => created.push(directory.to_owned()),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && directory.is_dir() => continue,
            Err(error) => {
                remove_created(&created);
                return Err(failed(error));
            }
        }
        let parent = directory.parent().unwrap_or(Path::new("/"));
        if let Err(error) = fs::File::open(parent).and_then(|parent| parent.sync_all()) {
            remove_created(&created);
            return Err(failed(error));
        }
    }
    Ok(created)
}

/// Removes the directories that [`create_directory`] returned, as far as they are empty.
pub fn remove_created(created: &[PathBuf]) {
    for directory in created.iter().rev() {
        if let Err(error) = fs::remove_dir(directory) {
            tracing::warn!("left the directory {}, which was created a moment ago: {error}", directory.display());
            return;
        }
    }
}

/// Makes a directory a repository. Repeating it with the same label is harmless. The directory must be empty unless its
/// contents are to be `kept`.
pub fn make(path: &AbsolutePath, label: &Label, kept: bool) -> Result<(), Problem> {
    let mut directory = Directory::open(path)?;
    if filesystem::read_only(directory.handle())? {
        let what = format!("{path} is read-only");
        return Err(Problem::new(Code::ReadOnly, what).field("source").advise("mount it read-write"));
    }
    if Label::read(&directory)?.is_some_and(|there| there.uuid == label.uuid) {
        return Ok(());
    }
    if !kept {
        check_empty(&directory)?;
    }
    directory.lock(false)?;
    // Another repository may have been made here before the lock was acquired.
    if !kept {
        check_empty(&directory)?;
    }
    label.write(&directory)
}

/// Removes the label and the inventory of the repository `uuid`, and leftovers of a killed `make`. Images stay, and so
/// does the label of another repository.
pub fn unmake(path: &AbsolutePath, uuid: Uuid) -> Result<(), Problem> {
    let directory = Directory::open(path)?;
    if Label::read(&directory)?.is_some_and(|there| there.uuid != uuid) {
        return Ok(());
    }
    let own = [INVENTORY, DAMAGED].iter().flat_map(|name| [format!("{name}{UNFINISHED}"), (*name).into()]);
    // As long as the label exists, this is a repository that can be destroyed.
    for name in own.chain([format!("{LABEL}{UNFINISHED}"), LABEL.into(), LOCK.into()]) {
        directory.remove_image(&name)?;
    }
    Ok(())
}

fn variant(
    directory: &Directory,
    path: &AbsolutePath,
    source: &SrSource,
    format: Option<ImageFormat>,
    read_only: bool,
) -> Result<Variant, Problem> {
    let filesystem = filesystem::kind(directory.handle())?;
    let shares =
        !read_only && matches!(&*filesystem, "xfs" | "btrfs") && filesystem::shares_blocks(directory.handle())?;
    let iso = matches!(source, SrSource::Iso { .. });
    let versions = match (read_only || iso, shares) {
        (true, _) => Versions::None,
        (false, true) => Versions::Reflink,
        (false, false) => Versions::Chain,
    };
    let usual = if iso || versions == Versions::Reflink { ImageFormat::Raw } else { ImageFormat::Qcow2 };
    Ok(Variant {
        versions,
        format: format.unwrap_or(usual),
        formats: match iso {
            true => vec![ImageFormat::Raw],
            false => vec![ImageFormat::Raw, ImageFormat::Vhd, ImageFormat::Qcow2],
        },
        read_only: read_only || iso,
        path: path.clone(),
        // What the host's kernel says of devices is not a directory's.
        device: None,
        notes: notes(&filesystem, source, shares, read_only),
        filesystem,
    })
}

/// Notes about a file system, including what a flush guarantees on it.
fn notes(filesystem: &str, source: &SrSource, shares: bool, read_only: bool) -> Vec<String> {
    let mut notes = Vec::new();
    if read_only {
        notes.push("It is mounted read-only: nothing can be created, written or removed in it.");
    }
    notes.push(match filesystem {
        "nfs" | "nfs4" => {
            "A flush is an NFS COMMIT and is durable only if the server exports with 'sync', which cannot be checked \
             from here."
        }
        "cifs" | "smb3" => {
            "A flush is sent to the server and is only as durable as the server makes it (Samba: 'strict sync = yes', \
             the default)."
        }
        "tmpfs" | "ramfs" => "It is in the host's memory: a power loss destroys everything, flushed or not.",
        filesystem if filesystem.starts_with("fuse") => {
            "How durable a flush is depends on the program that serves this file system."
        }
        _ => "A flush reaches the drive's durable storage, provided that the drive honours flushes.",
    });
    if matches!(source, SrSource::Nfs { .. } | SrSource::Smb { .. }) {
        notes.push("It is a hard mount: if the server goes away, I/O waits until it is back and does not fail.");
    }
    if matches!(filesystem, "xfs" | "btrfs") && !read_only && !shares {
        notes.push("Its files cannot share blocks (on XFS: created without reflink), so snapshots are kept as chains.");
    }
    notes.into_iter().map(String::from).collect()
}

#[cfg(test)]
mod test;
