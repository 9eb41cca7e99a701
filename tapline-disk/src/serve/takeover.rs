//! `serve --take-over`: replaces a process that serves the disk and hands it over through standard input.
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
use super::handover::{Channel, ChannelError, Said};
use super::shaping::Shaping;
use crate::files::{Files, Handed, HandedFile};
use crate::process::failure::Failure;
use crate::serve::stats::Counters;

/// What was taken over, and is not begun yet.
#[derive(Debug)]
pub struct Takeover {
    channel: Channel,
    /// The layers, the leaf first. Their files are at hand in [`files`].
    pub layers: Vec<ImageName>,
    /// I/O statistics of the disk.
    counters: Counters,
    /// What the disk is limited to.
    pub limits: limits::Handed,
    /// How its transfers are split and merged.
    pub shaping: Shaping,
    /// The control socket, if there is one.
    control: Option<Listening>,
    /// The server's socket and peers.
    server: Handover,
}

/// A socket that listens.
#[derive(Debug)]
pub struct Listening {
    /// The socket.
    pub socket: OwnedFd,
    /// Device and inode of its path, if that is to be removed at the end.
    pub bound: Option<(u64, u64)>,
}

/// What has been received so far.
#[derive(Debug, Default)]
struct Coming {
    layers: Vec<ImageName>,
    files: Handed,
    counters: Option<Counters>,
    limits: Option<limits::Handed>,
    shaping: Option<Shaping>,
    control: Option<Listening>,
    listener: Option<Listening>,
    peers: Vec<Parcel>,
}

impl Takeover {
    /// Says hello, and waits for everything.
    pub fn receive(from: &Files) -> Result<Takeover, Failure> {
        let socket = io::stdin().as_fd().try_clone_to_owned();
        let socket = socket.map_err(|error| Failure::new("take over a disk", error))?;
        let channel = Channel::over(socket).map_err(|why| {
            failed(why)
                .of_kind(Kind::Invalid)
                .advise("it is started by the process that it replaces: tapline disk SOCKET upgrade")
        })?;
        let program = env!("CARGO_PKG_VERSION").to_owned();
        channel.say(&Said::Hello { program, pid: std::process::id() }, &[], None).map_err(failed)?;
        let mut coming = Coming::default();
        loop {
            let (said, descriptors) = channel.hear(None).map_err(failed)?;
            match said {
                Said::All => break,
                Said::Stay => return Err(stays()),
                said => coming.take(said, descriptors).map_err(failed)?,
            }
        }
        let Coming { layers, files, counters, limits, shaping, control, listener, peers } = coming;
        let (Some(counters), Some(limits), Some(shaping)) = (counters, limits, shaping) else { return Err(missing()) };
        let (Some(Listening { socket, bound }), false) = (listener, layers.is_empty()) else { return Err(missing()) };
        from.have_at_hand(files);
        let server = Handover { listener: socket, bound, peers };
        Ok(Takeover { channel, layers, counters, limits, shaping, control, server })
    }
}

/// The rest of it: the moment at which the other process lets go.
#[derive(Debug)]
pub struct Rest(Channel);

impl Rest {
    /// Says that everything is taken, and waits until the other process has let go.
    pub fn begin(self) -> Result<(), Failure> {
        self.0.say(&Said::Taken, &[], None).map_err(failed)?;
        match self.0.hear(None).map_err(failed)? {
            (Said::Go, _) => Ok(()),
            (Said::Stay, _) => Err(stays()),
            (said, _) => Err(failed(ChannelError::Strange(format!("{said:?}")))),
        }
    }
}

impl Takeover {
    /// Its parts: the statistics, the control socket, the server, and the channel for the remaining messages.
    pub fn parts(self) -> (Counters, Option<Listening>, Handover, Rest) {
        let Takeover { channel, counters, control, server, .. } = self;
        (counters, control, server, Rest(channel))
    }
}

impl Coming {
    fn take(&mut self, said: Said, descriptors: Vec<OwnedFd>) -> Result<(), ChannelError> {
        let mut one = descriptors.into_iter();
        match (said, one.next()) {
            (Said::Layer { name, write }, Some(descriptor)) => {
                let name =
                    ImageName::to_measure(&name).map_err(|_| ChannelError::Strange(format!("the layer {name}")))?;
                for (path, descriptor) in name.paths().zip(std::iter::once(descriptor).chain(one)) {
                    let file = HandedFile::checked(path.to_owned(), write, descriptor);
                    file.and_then(|file| self.files.add(file)).map_err(ChannelError::Strange)?;
                }
                self.layers.push(name);
            }
            (Said::Log { name }, Some(descriptor)) => {
                // Only its last part is ever looked at.
                let path: PathBuf = Path::new("/").join(name);
                let file = HandedFile::checked(path, true, descriptor);
                file.and_then(|file| self.files.add(file)).map_err(ChannelError::Strange)?;
            }
            (Said::Listener { control, bound }, Some(socket)) => {
                let place = if control { &mut self.control } else { &mut self.listener };
                *place = Some(Listening { socket, bound });
            }
            (Said::Counters(counters), None) => self.counters = Some(*counters),
            (Said::Limits(limits), None) => self.limits = Some(*limits),
            (Said::Shape(shaping), None) => self.shaping = Some(*shaping),
            (Said::Peer { bytes }, first) => {
                self.peers.push(Parcel { bytes, descriptors: first.into_iter().chain(one).collect() });
            }
            (said, _) => return Err(ChannelError::Strange(format!("{said:?}"))),
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
