//! The agreement with the daemon about the map of changed blocks of a disk, before the disk is served, or while a
//! snapshot is taken of a disk that is not ([`control::tracking`] has the messages and their order).
//!
//! It reads and writes maps, and no marks: the daemon does that. Invariants: a map is continued only if it agrees with
//! the mark that the daemon has found while this process had the image locked; its new session is durable before this
//! process says so, and before the disk accepts a request.

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use control::Kind;
use control::tracking::{FromDisk, Mark, NewMap, ToDisk};
use disk::changes::{FileState, MapId};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};
use uring::{Cache, ImageFile, OpenOptions};

use crate::files::mark::{hex, parse_id};
use crate::files::{Files, passed};
use crate::image::chain::Layers;
use crate::image::tracking::{self, OpenMap, VOID_LOG};
use crate::process::failure::Failure;
use crate::process::log::say;

/// The daemon, at the other end of standard input.
#[derive(Debug)]
pub struct Daemon(OwnedFd);

/// The map that the daemon has chosen.
#[derive(Debug)]
pub enum Chosen {
    /// One that is continued; its session is durable.
    Continued(OpenMap),
    /// A new one, whose file is still empty.
    New(EmptyMap),
    /// None.
    Unrecorded,
}

/// The empty file of a map, and its ids.
#[derive(Debug)]
pub struct EmptyMap {
    file: ImageFile,
    id: MapId,
    continues: Option<MapId>,
    session: MapId,
}

impl EmptyMap {
    fn of(file: OwnedFd, path: &Path, new: &NewMap) -> Result<EmptyMap, Failure> {
        let (id, session) = ids(new)?;
        Ok(EmptyMap { file: tracking::open_passed(file, path)?, id, continues: None, session })
    }

    /// Returns the id that the map gets.
    pub fn id(&self) -> MapId {
        self.id
    }

    /// Makes the map, for a disk of `len` bytes that is not served and has this new image.
    pub fn begin_halted(self, files: &Files, image: &Path, len: u64) -> Result<MapId, Failure> {
        let options = OpenOptions { write: true, cache: Cache::Writeback, lock: true };
        let image = files.open(image, options)?;
        let open = self.begin(len)?;
        let failed =
            |error| Failure::new(format!("close the map of changed blocks {}", open.file.path().display()), error);
        tracking::close(&open.file, &image).map_err(failed)?;
        Ok(open.map.id())
    }

    /// Makes the map, for a disk of `len` bytes of which everything is durable.
    pub fn begin(self, len: u64) -> Result<OpenMap, Failure> {
        let mut open = tracking::create_in(self.file, (self.id, self.continues), len)?;
        tracking::begin_session(&mut open, self.session)?;
        Ok(open)
    }
}

/// Parses the ids of a new map.
pub fn ids(new: &NewMap) -> Result<(MapId, MapId), Failure> {
    match (parse_id(&new.map), parse_id(&new.session)) {
        (Some(map), Some(session)) => Ok((map, session)),
        _ => Err(Failure::of(Kind::Invalid, "the ids of a map must have 32 hexadecimal digits")),
    }
}

impl Daemon {
    /// Returns the daemon that has started this process.
    pub fn of_stdin() -> Result<Daemon, Failure> {
        io::stdin().as_fd().try_clone_to_owned().map(Daemon).map_err(|error| failed(&error))
    }

    /// Agrees on the map of a disk whose layers are open and locked.
    pub fn choose(&self, layers: &Layers) -> Result<Chosen, Failure> {
        self.send(&FromDisk::Locked)?;
        loop {
            match self.receive()? {
                (ToDisk::Continue { path, mark, state }, Some(file)) => {
                    match verified(file, &path, layers, &mark, state) {
                        Ok(open) => return self.go_on(open).map(Chosen::Continued),
                        Err(why) => {
                            say(format_args!("{} is not continued: {why}", path.display()));
                            self.send(&FromDisk::Refused(why))?;
                        }
                    }
                }
                (ToDisk::Begin { path, new }, Some(file)) => return EmptyMap::of(file, &path, &new).map(Chosen::New),
                (ToDisk::Unrecorded, None) => return Ok(Chosen::Unrecorded),
                (other, _) => return Err(unexpected(&other)),
            }
        }
    }

    /// Agrees on the map of the interval that begins with a snapshot of a disk that is not served, whose layers are
    /// open and locked; `None` if not all changes until now are known.
    pub fn next_interval(&self, layers: &Layers) -> Result<Option<EmptyMap>, Failure> {
        self.send(&FromDisk::Locked)?;
        let open = match self.receive()? {
            (ToDisk::Continue { path, mark, state }, Some(file)) => match verified(file, &path, layers, &mark, state) {
                Ok(open) if open.map.closed().is_some() => Ok(open),
                // Whether a redo log fits is not examined here.
                Ok(_) => {
                    Err("the process that recorded in it last was killed, and the disk was not plugged since".into())
                }
                Err(why) => Err(why),
            },
            (ToDisk::Unrecorded, None) => return Ok(None),
            (other, _) => return Err(unexpected(&other)),
        };
        self.send(&match &open {
            Ok(open) => FromDisk::Verified(hex(&open.map.session())),
            Err(why) => FromDisk::Refused(why.clone()),
        })?;
        match (self.receive()?, open) {
            ((ToDisk::Begin { path, new }, Some(file)), Ok(before)) => {
                let continues = Some(before.map.id());
                Ok(Some(EmptyMap { continues, ..EmptyMap::of(file, &path, &new)? }))
            }
            ((ToDisk::Unrecorded, None), _) => Ok(None),
            ((other, _), _) => Err(unexpected(&other)),
        }
    }

    fn go_on(&self, mut open: OpenMap) -> Result<OpenMap, Failure> {
        self.send(&FromDisk::Verified(hex(&open.map.session())))?;
        let session = match self.receive()? {
            (ToDisk::Session(session), None) => {
                parse_id(&session).ok_or_else(|| unexpected(&ToDisk::Session(session)))?
            }
            (other, _) => return Err(unexpected(&other)),
        };
        tracking::continue_in(&mut open, session)?;
        Ok(open)
    }

    /// Says that changes are recorded in this map.
    pub fn records(&self, map: MapId) -> Result<(), Failure> {
        self.send(&FromDisk::Recording(hex(&map)))
    }

    fn send(&self, message: &FromDisk) -> Result<(), Failure> {
        let bytes = serde_json::to_vec(message).map_err(|error| failed(&error))?;
        loop {
            match sendmsg(&self.0, &[IoSlice::new(&bytes)], &mut SendAncillaryBuffer::default(), SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                sent => return sent.map(drop).map_err(|errno| failed(&io::Error::from(errno))),
            }
        }
    }

    fn receive(&self) -> Result<(ToDisk, Option<OwnedFd>), Failure> {
        let mut buffer = vec![0; passed::MESSAGE_MAX];
        let (len, descriptors) = passed::next(&self.0, &mut buffer).map_err(|why| failed(&why))?;
        let message = serde_json::from_slice(buffer.get(..len).unwrap_or_default()).map_err(|error| failed(&error))?;
        Ok((message, descriptors.into_iter().next()))
    }
}

/// Opens a map, and returns why it cannot be continued if so.
fn verified(
    file: OwnedFd,
    path: &Path,
    layers: &Layers,
    mark: &Mark,
    state: control::tracking::FileState,
) -> Result<OpenMap, String> {
    let text = |failure: Failure| failure.what().to_owned();
    let mut file = tracking::open_passed(file, path).map_err(text)?;
    let map = tracking::read(path, &mut file).map_err(text)?;
    if map.is_sealed() {
        return Err("its interval has ended with a snapshot, and nothing can be added".into());
    }
    let is_void = layers.logs.iter().any(|(depth, log)| *depth == 0 && log.was_void());
    if is_void && map.closed().is_none() {
        return Err(VOID_LOG.into());
    }
    let len = layers.geometry().map_or(u64::MAX, |geometry| geometry.len);
    let state = FileState { changed: (state.seconds, state.nanoseconds), len: state.len };
    match tracking::mismatch(&map, len, (mark, true), Some(state)) {
        Some(why) => Err(why),
        None => Ok(OpenMap { file, map }),
    }
}

fn failed(why: &dyn std::fmt::Display) -> Failure {
    Failure::new("agree with the daemon on a map of changed blocks", why.to_string())
}

fn unexpected(message: &ToDisk) -> Failure {
    failed(&format_args!("an unexpected message came: {message:?}"))
}

impl Chosen {
    /// Returns the path of the map.
    pub fn path(&self) -> Option<PathBuf> {
        match self {
            Chosen::Continued(open) => Some(open.file.path().to_owned()),
            Chosen::New(new) => Some(new.file.path().to_owned()),
            Chosen::Unrecorded => None,
        }
    }
}
