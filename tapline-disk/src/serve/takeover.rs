//! `serve --take-over`: replaces a process that serves the disk and passes it through standard input.
//!
//! Everything comes from the other process: the layers, their files with their locks, the sockets, the clients. It
//! knows nothing about clients. Invariant: until the other process has confirmed that it has released everything,
//! nothing is written to any file or guest, so that it can continue as if nothing had happened.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use control::{ImageName, Kind};
use transport::{Handover, Parcel};

use super::admission::limits;
use super::bitmaps::{self, Bitmap};
use super::handover::{Channel, ChannelError, Message};
use super::shaping::Shaping;
use crate::files::{Files, Handed, HandedFile};
use crate::process::failure::Failure;
use crate::serve::stats::Counters;

/// A disk that was received from the process that serves it, before this process starts.
#[derive(Debug)]
pub struct Takeover {
    channel: Channel,
    /// The layers, leaf first. Their files are available in [`files`].
    pub layers: Vec<ImageName>,
    /// The map of changed blocks, if there is one.
    pub map: Option<PathBuf>,
    /// The dirty bitmaps of its clients.
    bitmaps: Vec<Bitmap>,
    /// I/O statistics of the disk.
    counters: Counters,
    /// The limits of the disk.
    pub limits: limits::Handed,
    /// How its transfers are split and merged.
    pub shaping: Shaping,
    /// The control socket, if there is one.
    control: Option<Listening>,
    /// The server's socket and peers.
    server: Handover,
}

/// A listening socket.
#[derive(Debug)]
pub struct Listening {
    /// The socket.
    pub socket: OwnedFd,
    /// Device and inode of its path, if that must be removed at the end.
    pub bound: Option<(u64, u64)>,
}

/// The messages received so far.
#[derive(Debug, Default)]
struct Received {
    layers: Vec<ImageName>,
    map: Option<PathBuf>,
    bitmaps: Vec<Bitmap>,
    files: Handed,
    counters: Option<Counters>,
    limits: Option<limits::Handed>,
    shaping: Option<Shaping>,
    control: Option<Listening>,
    listener: Option<Listening>,
    peers: Vec<Parcel>,
}

impl Takeover {
    /// Sends hello, and receives everything.
    pub fn receive(from: &Files) -> Result<Takeover, Failure> {
        let socket = io::stdin().as_fd().try_clone_to_owned();
        let socket = socket.map_err(|error| Failure::new("take over a disk", error))?;
        let channel = Channel::over(socket).map_err(|why| {
            failed(why)
                .of_kind(Kind::Invalid)
                .advise("it is started by the process that it replaces: tapline disk SOCKET upgrade")
        })?;
        let program = env!("CARGO_PKG_VERSION").to_owned();
        channel.send(&Message::Hello { program, pid: std::process::id() }, &[], None).map_err(failed)?;
        let mut received = Received::default();
        loop {
            let (message, descriptors) = channel.receive(None).map_err(failed)?;
            match message {
                Message::All => break,
                Message::Stay => return Err(stays()),
                message => received.take(message, descriptors).map_err(failed)?,
            }
        }
        let Received { layers, map, bitmaps, files, counters, limits, shaping, control, listener, peers } = received;
        let (Some(counters), Some(limits), Some(shaping)) = (counters, limits, shaping) else { return Err(missing()) };
        let (Some(Listening { socket, bound }), false) = (listener, layers.is_empty()) else { return Err(missing()) };
        from.make_available(files);
        let server = Handover { listener: socket, bound, peers };
        Ok(Takeover { channel, layers, map, bitmaps, counters, limits, shaping, control, server })
    }
}

/// The last step of a takeover: the release by the other process.
#[derive(Debug)]
pub struct PendingRelease(Channel);

impl PendingRelease {
    /// Confirms that everything was received, and waits until the other process has released it.
    pub fn begin(self) -> Result<(), Failure> {
        self.0.send(&Message::Taken, &[], None).map_err(failed)?;
        match self.0.receive(None).map_err(failed)? {
            (Message::Go, _) => Ok(()),
            (Message::Stay, _) => Err(stays()),
            (message, _) => Err(failed(ChannelError::Strange(format!("{message:?}")))),
        }
    }
}

impl Takeover {
    /// Takes the dirty bitmaps out of it.
    pub fn take_bitmaps(&mut self) -> Vec<Bitmap> {
        std::mem::take(&mut self.bitmaps)
    }

    /// Splits it into the statistics, the control socket, the server, and the pending release.
    pub fn parts(self) -> (Counters, Option<Listening>, Handover, PendingRelease) {
        let Takeover { channel, counters, control, server, .. } = self;
        (counters, control, server, PendingRelease(channel))
    }
}

impl Received {
    fn take(&mut self, message: Message, descriptors: Vec<OwnedFd>) -> Result<(), ChannelError> {
        let mut one = descriptors.into_iter();
        match (message, one.next()) {
            (Message::Layer { name, write }, Some(descriptor)) => {
                let name =
                    ImageName::to_measure(&name).map_err(|_| ChannelError::Strange(format!("the layer {name}")))?;
                for (path, descriptor) in name.paths().zip(std::iter::once(descriptor).chain(one)) {
                    let file = HandedFile::checked(path.to_owned(), write, descriptor);
                    file.and_then(|file| self.files.add(file)).map_err(ChannelError::Strange)?;
                }
                self.layers.push(name);
            }
            (Message::Changes { path }, Some(descriptor)) => {
                let file = HandedFile::checked(path.clone(), true, descriptor);
                file.and_then(|file| self.files.add(file)).map_err(ChannelError::Strange)?;
                self.map = Some(path);
            }
            (Message::Bitmap { name, rest, .. }, file) => {
                let over =
                    file.map(|file| bitmaps::received(&name, file)).transpose().map_err(ChannelError::Strange)?;
                self.bitmaps.push(Bitmap { name, over, rest });
            }
            (Message::Log { name }, Some(descriptor)) => {
                // Only its last component is ever used.
                let path: PathBuf = Path::new("/").join(name);
                let file = HandedFile::checked(path, true, descriptor);
                file.and_then(|file| self.files.add(file)).map_err(ChannelError::Strange)?;
            }
            (Message::Listener { control, bound }, Some(socket)) => {
                let place = if control { &mut self.control } else { &mut self.listener };
                *place = Some(Listening { socket, bound });
            }
            (Message::Counters(counters), None) => self.counters = Some(*counters),
            (Message::Limits(limits), None) => self.limits = Some(*limits),
            (Message::Shape(shaping), None) => self.shaping = Some(*shaping),
            (Message::Peer { bytes }, first) => {
                self.peers.push(Parcel { bytes, descriptors: first.into_iter().chain(one).collect() });
            }
            (message, _) => return Err(ChannelError::Strange(format!("{message:?}"))),
        }
        Ok(())
    }
}

fn failed(why: ChannelError) -> Failure {
    Failure::new("take over the disk from the process that serves it", why)
}

fn missing() -> Failure {
    failed(ChannelError::Strange("something is missing".into()))
}

fn stays() -> Failure {
    Failure::of(Kind::Failed, "the process that serves the disk continues: see its log for the reason")
}
