//! The map of changed blocks of a disk whose process is being started: the one before is continued if it can be
//! trusted, otherwise a new one is begun, and the reason is recorded. A guest gets its disk in any case.
//!
//! The process has the files locked while they are examined here. The messages and their order, and why no crash has a
//! wrong map trusted, are in [`control::tracking`] and decision 0065. It looks into no map. Invariant: a mark that
//! names a map is durable before the process can write to it, and the catalogue has a new map before its file exists.

use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

use api::{ChangeMap, Code, Problem, map_file};
use control::tracking::{FromDisk, Mark, ToDisk};
use jiff::Timestamp;
use repo::driver::Directory;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg};
use uuid::Uuid;

use super::remove_unneeded_maps;
use crate::daemon::Daemon;
use crate::disk::mark;
use crate::task::blocking;

/// The maximum length of a message: it has at most an error text.
const MESSAGE_MAX: usize = 64 << 10;

/// What is needed to record the changes of a disk.
#[derive(Debug)]
pub struct Recording {
    /// The VDI.
    pub vdi: Uuid,
    /// Its present map, if it has one.
    pub map: Option<ChangeMap>,
    /// Its repository.
    pub directory: Arc<Directory>,
    /// Its image, which shares its lock with the process and must be closed when the process serves.
    pub image: File,
}

/// What came of a step.
enum Outcome {
    /// The process records changes.
    Records,
    /// The process has exited, and reports the reason itself.
    Exited,
    /// A map cannot be used, for this reason.
    Refused(String),
}

/// The other end of the standard input of a process that waits for messages.
struct Talk {
    socket: OwnedFd,
    recording: Recording,
}

/// Agrees with a process on the map in which it records changes.
pub async fn agree(daemon: &Daemon, socket: OwnedFd, recording: Recording) -> Result<(), Problem> {
    let (vdi, map) = (recording.vdi, recording.map);
    let talk = Arc::new(Talk { socket, recording });
    let at_work = talk.clone();
    let why = match blocking("continue a map of changed blocks", move || at_work.try_to_continue(map)).await? {
        Outcome::Records | Outcome::Exited => return Ok(()),
        Outcome::Refused(why) => why,
    };
    if map.is_some() {
        tracing::warn!(%vdi, "its map of changed blocks is not continued: {why}");
    }
    let new = Uuid::new_v4();
    let recorded = daemon.catalogue.write(move |tx| {
        tx.change_tracking(vdi, |tracking| {
            tracking.end(why);
            tracking.begin(new, Timestamp::now());
        })
    });
    recorded.await?;
    let at_work = talk.clone();
    match blocking("begin a map of changed blocks", move || at_work.begin(new, &at_work.recording.image)).await? {
        Outcome::Records => {}
        Outcome::Exited => return Ok(()),
        Outcome::Refused(why) => {
            tracing::error!(%vdi, "its changed blocks are not recorded: {why}");
            let at_work = talk.clone();
            // Whatever map the mark names, it does not get the changes from now on.
            blocking("end the map of an image", move || mark::end(&at_work.recording.image)).await?;
            daemon.catalogue.write(move |tx| tx.change_tracking(vdi, |tracking| tracking.end(why))).await?;
            blocking("serve without a map of changed blocks", move || talk.send(&ToDisk::Unrecorded, None)).await?;
        }
    }
    let daemon = daemon.clone();
    crate::background::spawn(async move { remove_unneeded_maps(&daemon, vdi).await });
    Ok(())
}

/// Agrees with the process that makes `leaf`, the new image of a disk that is not served, on the map `new` of the
/// interval that begins with it. Returns false if not all changes until now are known: then there is no map.
pub fn begin_next_interval(socket: OwnedFd, recording: Recording, leaf: &File, new: Uuid) -> Result<bool, Problem> {
    let talk = Talk { socket, recording };
    let outcome = match talk.recording.map.map(|map| talk.verify(map)).transpose()? {
        Some(Ok(_)) => return Ok(matches!(talk.begin(new, leaf)?, Outcome::Records)),
        Some(Err(outcome)) => outcome,
        None => talk.try_to_continue(None)?,
    };
    if let Outcome::Refused(why) = outcome {
        tracing::warn!(vdi = %talk.recording.vdi, "its map of changed blocks ends with a snapshot of it: {why}");
        talk.send(&ToDisk::Unrecorded, None)?;
    }
    Ok(false)
}

impl Talk {
    /// Has the process continue a map, if that is the map of the image and the process finds nothing wrong.
    fn try_to_continue(&self, map: Option<ChangeMap>) -> Result<Outcome, Problem> {
        let Some(map) = map else {
            return Ok(match self.receive()? {
                Some(FromDisk::Locked) => Outcome::Refused("there was no map".into()),
                None => Outcome::Exited,
                Some(other) => return Err(unexpected(&other)),
            });
        };
        let (found, before) = match self.verify(map)? {
            Ok(verified) => verified,
            Err(outcome) => return Ok(outcome),
        };
        let session = mark::digits(Uuid::new_v4());
        let both = Mark { sessions: vec![before, session.clone()], ..found };
        if let Err(problem) = mark::set(&self.recording.image, &both) {
            return Ok(Outcome::Refused(problem.detail));
        }
        self.send(&ToDisk::Session(session.clone()), None)?;
        self.records(map.uuid, &Mark { sessions: vec![session], ..both })
    }

    /// Has the process verify a map; returns the mark of the image and the session of the map.
    fn verify(&self, map: ChangeMap) -> Result<Result<(Mark, String), Outcome>, Problem> {
        match self.receive()? {
            Some(FromDisk::Locked) => {}
            None => return Ok(Err(Outcome::Exited)),
            Some(other) => return Err(unexpected(&other)),
        }
        let refused = |why: &str| Ok(Err(Outcome::Refused(why.into())));
        let image = &self.recording.image;
        // A guest gets its disk even if that fails.
        let found = match mark::read(image) {
            Ok(Some(found)) => found,
            Ok(None) => return refused("the image was opened for writing without recording, restored, or replaced"),
            Err(problem) => return refused(&problem.detail),
        };
        if found.map != mark::digits(map.uuid) {
            return refused("the changes of the image were recorded in another map last");
        }
        let id = match mark::id_of(image) {
            Ok(id) => id,
            Err(problem) => return refused(&problem.detail),
        };
        if found.file != id {
            return refused("the image is a copy of the one whose changes were recorded");
        }
        let file = match self.recording.directory.open_marked(&map.file(), true) {
            Ok(file) => file,
            Err(problem) if problem.code == Code::NotFound => return refused("the file of the map is missing"),
            Err(problem) => return refused(&problem.detail),
        };
        let (path, state) = (self.path(map.uuid), mark::state(image)?);
        self.send(&ToDisk::Continue { path, mark: found.clone(), state }, Some(file))?;
        match self.receive()? {
            None => Ok(Err(Outcome::Exited)),
            Some(FromDisk::Refused(why)) => Ok(Err(Outcome::Refused(why))),
            Some(FromDisk::Verified(session)) if found.sessions.contains(&session) => Ok(Ok((found, session))),
            Some(other) => Err(unexpected(&other)),
        }
    }

    /// Waits until the process records changes in a map; then the mark needs no other session.
    fn records(&self, map: Uuid, mark: &Mark) -> Result<Outcome, Problem> {
        match self.receive()? {
            None => Ok(Outcome::Exited),
            Some(FromDisk::Recording(id)) if id == mark::digits(map) => {
                // The session of the map is in the mark in any case.
                if let Err(problem) = mark::set(&self.recording.image, mark) {
                    tracing::warn!(vdi = %self.recording.vdi, "an old session stays in the mark of its image: {problem}");
                }
                Ok(Outcome::Records)
            }
            Some(other) => Err(unexpected(&other)),
        }
    }

    /// Has the process begin a map of an image.
    fn begin(&self, map: Uuid, image: &File) -> Result<Outcome, Problem> {
        let made = self.recording.directory.create_image(&map_file(map));
        let made = made.and_then(|file| Ok((mark::set_new(image, map)?, file)));
        let (new, file) = match made {
            Ok(made) => made,
            Err(problem) => return Ok(Outcome::Refused(problem.detail)),
        };
        self.send(&ToDisk::Begin { path: self.path(map), new }, Some(file))?;
        match self.receive()? {
            None => Ok(Outcome::Exited),
            Some(FromDisk::Recording(id)) if id == mark::digits(map) => Ok(Outcome::Records),
            Some(other) => Err(unexpected(&other)),
        }
    }

    fn path(&self, map: Uuid) -> PathBuf {
        self.recording.directory.path().join(map_file(map))
    }

    fn send(&self, message: &ToDisk, file: Option<File>) -> Result<(), Problem> {
        let bytes = serde_json::to_vec(message).map_err(|error| failed(&error))?;
        let descriptors: Vec<_> = file.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(failed(&"no space for one descriptor"));
        }
        match sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut ancillary, SendFlags::NOSIGNAL) {
            // It has exited, which the next message to be received shows.
            Ok(_) | Err(Errno::PIPE | Errno::CONNRESET) => Ok(()),
            Err(errno) => Err(failed(&errno)),
        }
    }

    /// The next message; `None` if the process has exited.
    fn receive(&self) -> Result<Option<FromDisk>, Problem> {
        let mut bytes = vec![0; MESSAGE_MAX];
        let len = loop {
            match recv(&self.socket, &mut bytes[..], RecvFlags::empty()) {
                Err(Errno::INTR) => {}
                Ok((0, _)) | Err(Errno::CONNRESET) => return Ok(None),
                Ok((len, _)) => break len,
                Err(errno) => return Err(failed(&errno)),
            }
        };
        serde_json::from_slice(bytes.get(..len).unwrap_or_default()).map(Some).map_err(|error| failed(&error))
    }
}

fn failed(why: &dyn std::fmt::Display) -> Problem {
    Problem::failed("agree with a disk process on a map of changed blocks", why)
}

fn unexpected(message: &FromDisk) -> Problem {
    Problem { code: Code::Internal, ..failed(&format_args!("an unexpected message came: {message:?}")) }
}
