//! The marker file next to an image that a command rewrites without changing its contents (`image rebase`, `image
//! flatten`).
//!
//! It knows nothing about what the command does. Invariant: an image's children, which record its modification time and
//! refuse a modified parent, accept it at every moment, whichever process is killed.
//!
//! 1. The image is locked, and the marker made durable: the file's modification time, and the command that is about to
//!    change it. *If killed here or later:* queries for the image's modification time return the marker's.
//! 2. The command does its work.
//! 3. The modification time is restored, durably.
//! 4. The marker is removed.
//!
//! Every process that opens an image for writing does 3 and 4 first ([`settle`]), including the same command, because
//! what it writes may change the contents. Other programs know nothing about the marker, and must leave the image alone
//! while it exists.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use control::ImageName;
use serde::{Deserialize, Serialize};

use crate::files::Files;
use crate::image::mtime::Time;
use crate::process::failure::Failure;

/// The contents of the marker file.
#[derive(Debug, Serialize, Deserialize)]
struct Marker {
    /// The command that finishes the rewrite.
    command: String,
    /// The id of the image's file ([`uring::id_in_file_system`]) in hexadecimal digits. The marker does not apply to
    /// another file of the same name, even with the same inode number.
    file: String,
    /// The file's modification time since 1970.
    seconds: u64,
    nanoseconds: u32,
}

/// An image with a marker file.
#[derive(Debug)]
pub struct UnfinishedRewrite {
    files: Files,
    name: ImageName,
    /// The marker's path; `None` for a block device.
    path: Option<PathBuf>,
    marker: Marker,
}

impl UnfinishedRewrite {
    /// Makes the marker for `command`, which is about to change the image `name`. The caller has locked the image.
    pub fn begin(files: &Files, name: &ImageName, command: &str) -> Result<UnfinishedRewrite, Failure> {
        settle(files, name)?;
        let path = marker_path(name)?;
        let tried = || format!("create the marker file of {name}");
        let since = Time::of(files, name)?.modified().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (seconds, nanoseconds) = (since.as_secs(), since.subsec_nanos());
        let marker = Marker { command: command.to_owned(), file: file_id(name)?, seconds, nanoseconds };
        if let Some(path) = &path {
            write(path, &marker).map_err(|error| {
                let advice = format!("{} must be writable, in the image's directory", path.display());
                Failure::new(tried(), error).advise(advice)
            })?;
            uring::sync_directory(path).map_err(Failure::said)?;
        }
        Ok(UnfinishedRewrite { files: files.clone(), name: name.clone(), path, marker })
    }

    /// Returns the marker of the image `name`, if there is one. A process that passes files checks for markers itself.
    pub fn find(files: &Files, name: &ImageName) -> Result<Option<UnfinishedRewrite>, Failure> {
        if files.are_handed() || name.is_at_server() {
            return Ok(None);
        }
        let Some(path) = marker_path(name)? else { return Ok(None) };
        let failed = |why: Box<dyn std::error::Error + Send + Sync>| {
            Failure::new(format!("read {}, the marker of an unfinished change to {name}", path.display()), why)
        };
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error.into())),
        };
        let marker: Marker = serde_json::from_slice(&bytes).map_err(|error| {
            failed(error.into()).advise("remove it; children of the image may then need --accept-changed-parent")
        })?;
        let ours = marker.file == file_id(name)?;
        Ok(ours.then(|| UnfinishedRewrite { files: files.clone(), name: name.clone(), path: Some(path), marker }))
    }

    /// Returns the modification time before the rewrite.
    pub fn modified(&self) -> SystemTime {
        UNIX_EPOCH + Duration::new(self.marker.seconds, self.marker.nanoseconds)
    }

    /// Returns the command that finishes the rewrite.
    pub fn command(&self) -> &str {
        &self.marker.command
    }

    /// Restores the modification time and removes the marker. The caller holds the lock of the image.
    pub fn end(self) -> Result<(), Failure> {
        Time::at(&self.files, &self.name, self.modified()).restore()?;
        let Some(path) = self.path else { return Ok(()) };
        std::fs::remove_file(&path)
            .map_err(|error| Failure::new(format!("remove the marker file {}", path.display()), error))?;
        uring::sync_directory(&path).map_err(Failure::said)
    }
}

/// Does what a killed command has not done for the modification time of an image, which the caller has locked and is
/// about to write.
pub fn settle(files: &Files, name: &ImageName) -> Result<(), Failure> {
    UnfinishedRewrite::find(files, name)?.map_or(Ok(()), UnfinishedRewrite::end)
}

/// Writes a marker completely or not at all.
fn write(path: &Path, marker: &Marker) -> std::io::Result<()> {
    let mut new = path.as_os_str().to_owned();
    new.push("-new");
    let mut file = File::create(&new)?;
    file.write_all(&serde_json::to_vec(marker)?)?;
    file.sync_all()?;
    std::fs::rename(&new, path)
}

/// Returns the path of an image's marker; `None` for a block device.
fn marker_path(name: &ImageName) -> Result<Option<PathBuf>, Failure> {
    let find = |path: &Path| Ok((path.canonicalize()?, path.metadata()?));
    let (path, metadata) = find(name.path()).map_err(|error| unresolved(name, error))?;
    let mut path = path.into_os_string();
    path.push(".unfinished");
    Ok(metadata.is_file().then(|| path.into()))
}

/// Returns the id of an image's file for a [`Marker`].
fn file_id(name: &ImageName) -> Result<String, Failure> {
    let id = File::open(name.path()).and_then(|file| uring::id_in_file_system(&file));
    let id = id.map_err(|error| unresolved(name, error))?;
    Ok(id.iter().map(|byte| format!("{byte:02x}")).collect())
}

fn unresolved(name: &ImageName, error: std::io::Error) -> Failure {
    Failure::new(format!("resolve the path of {name}"), error)
}

#[cfg(test)]
mod test {
    use super::*;

    const LONG_AGO: Duration = Duration::new(1_600_000_000, 123_456_789);

    fn image(room: &Path) -> ImageName {
        std::fs::write(room.join("disk"), [0; 512]).unwrap();
        let name: ImageName = format!("raw:{}", room.join("disk").display()).parse().unwrap();
        Time::at(&Files::of_system(), &name, UNIX_EPOCH + LONG_AGO).restore().unwrap();
        name
    }

    fn time(name: &ImageName) -> SystemTime {
        name.path().metadata().unwrap().modified().unwrap()
    }

    #[test]
    fn the_modification_time_survives_a_killed_writer() {
        let room = tempfile::tempdir().unwrap();
        let name = image(room.path());
        let begun = UnfinishedRewrite::begin(&Files::of_system(), &name, "the command").unwrap();
        drop(begun);
        std::fs::write(name.path(), [1; 512]).unwrap();
        assert_ne!(time(&name), UNIX_EPOCH + LONG_AGO);
        let found = UnfinishedRewrite::find(&Files::of_system(), &name).unwrap().unwrap();
        assert_eq!((found.modified(), found.command()), (UNIX_EPOCH + LONG_AGO, "the command"));
        UnfinishedRewrite::begin(&Files::of_system(), &name, "the command").unwrap().end().unwrap();
        assert_eq!(time(&name), UNIX_EPOCH + LONG_AGO);
        assert_eq!(room.path().read_dir().unwrap().count(), 1, "the marker is gone");
    }

    #[test]
    fn a_marker_does_not_apply_to_another_file_of_the_same_name() {
        let room = tempfile::tempdir().unwrap();
        let name = image(room.path());
        UnfinishedRewrite::begin(&Files::of_system(), &name, "the command").unwrap();
        // On tmpfs and ext4, the new file often has the same inode number.
        std::fs::remove_file(name.path()).unwrap();
        std::fs::write(name.path(), [2; 512]).unwrap();
        let now = time(&name);
        assert!(UnfinishedRewrite::find(&Files::of_system(), &name).unwrap().is_none());
        settle(&Files::of_system(), &name).unwrap();
        assert_eq!(time(&name), now);
    }
}
