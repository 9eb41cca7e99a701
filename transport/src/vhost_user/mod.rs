//! A vhost-user-blk back-end: the disk of a virtual machine over a Unix socket and shared memory.
//!
//! [`Server`] takes in one front-end at a time (QEMU, Cloud Hypervisor, `blkio`) and is the [`disk::Transport`] of
//! the disk. It knows nothing about the disk behind it, and waits for nothing: neither for a slow front-end nor
//! for requests under way.
//!
//! Invariant: a front-end is taken in only when the requests of the one before are all completed, so that no late
//! write of the old falls into what the new one does.
//!
//! | file | knows |
//! |---|---|
//! | `listener` | the path and the socket |
//! | `connection` | framing, file descriptors |
//! | `message`, `refusal` | what may be said, and why not |
//! | `session` | what it does |
//! | `table` | guest memory |
//! | `queue`, `ring`, `chain` | split virtqueues |
//! | `inflight` | what was taken and not answered, for the next process |
//! | `moment` | where tests kill this one |
//! | `device`, `request`, `config_space` | virtio-blk |
//! | `handover` | what the process that takes the place of this one is told |
//! | `backend` | what is said to the front-end unasked |
//! | `event` | what to log |

mod backend;
mod chain;
mod config_space;
mod connection;
mod device;
mod event;
mod handover;
mod inflight;
mod listener;
mod message;
#[cfg(test)]
mod model;
mod moment;
mod queue;
mod refusal;
mod request;
mod ring;
mod session;
mod table;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use disk::{Disconnected, Geometry, Request, Status, Token, Transport};
use rustix::event::{EventfdFlags, eventfd};

use crate::log::with_causes;
use crate::{Handover, HandoverError, Interest, Watch, WatchKey};

pub use event::Event;
pub use listener::{BindError, Listener};
pub use ring::Broken;

use backend::Told;
use connection::{Connection, End};
use device::Device;
use event::Log;
use message::Message;
use request::ID_LEN;
use session::Session;

/// Queues of one disk: as many as one word has bits.
pub const MAX_QUEUES: u16 = 64;

const LISTENER: u64 = 0;
const CONNECTION: u64 = 1;
const WAKE: u64 = 2;
/// The kick of queue 0; the others follow.
const KICK: u64 = 16;

/// Messages and connections handled before others have their turn; a front-end sends about fifteen a queue.
const TURN: usize = 64;

/// What to serve, and where.
#[derive(Clone, Debug)]
pub struct Config {
    /// Path of the socket.
    pub path: PathBuf,
    /// Queues offered: 1 to [`MAX_QUEUES`].
    pub queues: u16,
    /// The disk's serial number: up to 20 bytes.
    pub serial: String,
    /// Size and limits of the disk.
    pub geometry: Geometry,
}

/// A vhost-user-blk server.
pub struct Server {
    config: Config,
    serial: [u8; ID_LEN],
    listener: Listener,
    client: Option<Client>,
    /// Signalled by ourselves, for what has to wait until there is a [`Watch`] again.
    wake: OwnedFd,
    /// Requests of front-ends that are gone, not yet completed.
    orphans: usize,
    epoch: u32,
    stopped: bool,
    /// Nothing more is taken, for a while.
    held: bool,
    /// Rings that the process before this one has handed over, to be started with the server.
    kicks: Vec<Message>,
    log: Log,
}

struct Client {
    connection: Connection,
    session: Session,
}

impl Server {
    /// Listens at the path of `config`.
    pub fn bind(config: Config) -> Result<Server, BindError> {
        let listener = Listener::bind(&config.path)?;
        Server::on(listener, config)
    }

    /// The same at a socket that listens already.
    pub fn on(listener: Listener, config: Config) -> Result<Server, BindError> {
        if !(1..=MAX_QUEUES).contains(&config.queues) {
            return Err(BindError::Queues { asked: config.queues });
        }
        let mut serial = [0; ID_LEN];
        match serial.get_mut(..config.serial.len()) {
            Some(place) => place.copy_from_slice(config.serial.as_bytes()),
            None => return Err(BindError::SerialTooLong(config.serial)),
        }
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| BindError::Failed {
            what: "make an eventfd for",
            path: config.path.clone(),
            source: errno.into(),
        })?;
        let log = Log::default();
        let (client, kicks) = (None, Vec::new());
        let (orphans, epoch, stopped, held) = (0, 0, false, false);
        Ok(Server { config, serial, listener, client, wake, orphans, epoch, stopped, held, kicks, log })
    }

    /// Goes on in the place of another process, with its socket and its front-end ([`crate::Server::hand_over`]).
    pub fn taken_over(handover: Handover, config: Config) -> Result<Server, HandoverError> {
        let Handover { listener, bound, peers } = handover;
        let refused = |error: BindError| HandoverError::Refused(with_causes(&error));
        let listener = Listener::of_bound(listener, &config.path, bound).map_err(refused)?;
        let mut server = Server::on(listener, config).map_err(refused)?;
        let session = server.new_session();
        if let Some((client, kicks)) = handover::take(peers, session, &mut server.log)? {
            (server.client, server.kicks) = (Some(client), kicks);
        }
        Ok(server)
    }

    /// Another process has taken over, and the path is its.
    #[cfg(test)]
    fn leave_path(mut self) {
        self.listener.leave_path();
    }

    fn new_session(&mut self) -> Session {
        self.epoch = self.epoch.wrapping_add(1);
        Session::new(Device::new(self.config.queues, self.serial, self.epoch), &self.config.geometry)
    }

    /// What has happened since the last call, for the log.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.log.take()
    }

    /// Whether a front-end is connected.
    pub fn is_connected(&self) -> bool {
        self.client.is_some()
    }

    /// Whether the present front-end records what is in flight; `None` while no ring runs.
    pub fn is_recorded(&self) -> Option<bool> {
        self.client.as_ref()?.session.device.is_recorded()
    }

    /// Takes in a front-end that waits, and turns others away.
    fn admit(&mut self, watch: &mut dyn Watch) {
        for _ in 0..TURN {
            // One that comes before the requests of the last are completed waits for that in the backlog.
            if self.orphans > 0 || self.stopped || self.held {
                return;
            }
            match self.listener.accept() {
                Ok(None) => return,
                Ok(Some(_)) if self.client.is_some() => self.log.record(Event::TurnedAway),
                Ok(Some(stream)) => {
                    if let Err(error) = Connection::new(stream).and_then(|connection| self.connect(connection, watch)) {
                        self.log.record(Event::AcceptFailed { why: with_causes(&error) });
                    }
                }
                Err(error) => {
                    self.log.record(Event::AcceptFailed { why: with_causes(&error) });
                    return;
                }
            }
        }
        self.wake();
    }

    fn connect(&mut self, connection: Connection, watch: &mut dyn Watch) -> io::Result<()> {
        watch.watch(connection.fd(), Interest::Read, WatchKey(CONNECTION))?;
        let session = self.new_session();
        self.client = Some(Client { connection, session });
        self.log.record(Event::Connected);
        Ok(())
    }

    /// Starts the rings that were handed over.
    fn resume(&mut self, watch: &mut dyn Watch) -> io::Result<()> {
        let Some(client) = &mut self.client else { return Ok(()) };
        watch.watch(client.connection.fd(), Interest::Read, WatchKey(CONNECTION))?;
        for kick in std::mem::take(&mut self.kicks) {
            let started = client.session.obey(kick, watch, &mut self.log);
            started.map_err(|refusal| io::Error::other(with_causes(&refusal)))?;
        }
        Ok(())
    }

    /// Handles what the front-end has said, up to a message that has to wait.
    fn listen(&mut self, watch: &mut dyn Watch) {
        let Some(client) = &mut self.client else { return };
        let end = client.listen(watch, &mut self.log);
        match end {
            Ok(true) => {}
            Ok(false) => self.wake(),
            Err(end) => self.disconnect(&end, watch),
        }
    }

    fn disconnect(&mut self, end: &End, watch: &mut dyn Watch) {
        let Some(mut client) = self.client.take() else { return };
        watch.forget(WatchKey(CONNECTION));
        let in_flight = client.session.end(watch);
        self.orphans = self.orphans.saturating_add(in_flight);
        self.log.record(Event::Disconnected { why: with_causes(end), in_flight });
    }

    /// A request of a front-end that is gone is over.
    fn bury_orphan(&mut self) {
        self.orphans = self.orphans.saturating_sub(1);
        if self.orphans == 0 {
            self.wake();
        }
    }

    fn wake(&self) {
        // It does not block, and one that is full is signalled already.
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).ok();
    }
}

impl Client {
    /// `true` when there is nothing more for now; `false` when there may be.
    fn listen(&mut self, watch: &mut dyn Watch, log: &mut Log) -> Result<bool, End> {
        if let Some(answer) = self.session.settle(watch, log) {
            self.connection.send(&answer.bytes, answer.fd.as_ref().map(AsFd::as_fd))?;
        }
        for _ in 0..TURN {
            if self.session.is_waiting() {
                return Ok(true);
            }
            let Some(frame) = self.connection.receive()? else { return Ok(true) };
            if let Some(answer) = self.session.handle(frame, watch, log)? {
                self.connection.send(&answer.bytes, answer.fd.as_ref().map(AsFd::as_fd))?;
            }
        }
        Ok(false)
    }
}

impl Transport for Server {
    fn pop(&mut self, geometry: &Geometry) -> Option<Request> {
        if self.stopped {
            return None;
        }
        let device = &mut self.client.as_mut()?.session.device;
        if self.held { device.pop_begun() } else { device.pop(geometry, &mut self.log) }
    }

    fn complete(&mut self, request: Request, status: Status) {
        let token = request.retire();
        if let Some(client) = &mut self.client {
            if client.session.device.complete(token, status, &mut self.log) {
                return;
            }
        }
        self.bury_orphan();
    }

    fn publish(&mut self) -> Result<(), Disconnected> {
        if let Some(client) = &mut self.client {
            client.session.device.publish(&mut self.log);
            if client.session.may_settle() {
                self.wake();
            }
        }
        // A front-end that is gone is no news for the disk: the next one may come.
        Ok(())
    }
}

impl crate::Server for Server {
    fn start(&mut self, watch: &mut dyn Watch) -> io::Result<()> {
        self.listener.begin();
        watch.watch(self.wake.as_fd(), Interest::Read, WatchKey(WAKE))?;
        watch.watch(self.listener.fd(), Interest::Read, WatchKey(LISTENER))?;
        self.resume(watch)
    }

    fn ready(&mut self, key: WatchKey, watch: &mut dyn Watch) {
        if self.stopped {
            return;
        }
        match key.0 {
            // The present front-end first: it may be gone, and the new one is its successor.
            LISTENER | CONNECTION | WAKE => {
                self.listen(watch);
                self.admit(watch);
            }
            // A kick says that there is something to pop, which is what happens next anyway.
            _ => {}
        }
    }

    fn may_sleep(&mut self) -> bool {
        match &mut self.client {
            Some(client) if self.held => client.session.device.has_begun_all(),
            Some(client) if !self.stopped => client.session.device.may_sleep(&mut self.log),
            _ => true,
        }
    }

    fn resized(&mut self, geometry: &Geometry, watch: &mut dyn Watch) {
        self.config.geometry = *geometry;
        let told = self.client.as_mut().map(|client| client.session.resized(geometry));
        match told {
            Some(Ok(Told::Yes)) => self.log.record(Event::SizeTold { len: geometry.len }),
            Some(Ok(Told::CannotBe)) => self.log.record(Event::SizeUntold { len: geometry.len }),
            Some(Err(end)) => self.disconnect(&end, watch),
            None => {}
        }
    }

    fn takes_back(&self) -> bool {
        true
    }

    fn recalls(&self, token: Token) -> bool {
        self.stopped || self.client.as_ref().is_none_or(|client| client.session.device.recalls(token))
    }

    fn give_back(&mut self, request: Request) {
        let token = request.retire();
        if let Some(client) = &mut self.client {
            if client.session.device.give_back(token, &mut self.log) {
                return;
            }
        }
        self.bury_orphan();
    }

    fn hold(&mut self, held: bool) {
        self.held = held;
        if !held {
            // Whoever has come meanwhile, or said something, is waiting.
            self.wake();
        }
    }

    fn can_hand_over(&self) -> bool {
        true
    }

    fn hand_over(&self) -> Result<Handover, HandoverError> {
        if self.orphans > 0 {
            return Err(HandoverError::NotNow("requests of a front-end that has gone are under way"));
        }
        let listener = self.listener.fd().try_clone_to_owned();
        let listener = listener.map_err(|error| HandoverError::Failed("duplicate a listening socket", error))?;
        let peers = self.client.as_ref().map(handover::told).transpose()?.unwrap_or_default();
        Ok(Handover { listener, bound: self.listener.bound(), peers })
    }

    fn records_in_flight(&self) -> Option<bool> {
        self.is_recorded()
    }

    fn place_of(&self, token: Token) -> Option<String> {
        Some(device::place_of(token))
    }

    fn peers(&self) -> usize {
        usize::from(self.client.is_some())
    }

    fn stop(&mut self, watch: &mut dyn Watch) {
        self.stopped = true;
        watch.forget(WatchKey(LISTENER));
        watch.forget(WatchKey(WAKE));
        watch.forget(WatchKey(CONNECTION));
        for queue in 0..u64::from(self.config.queues) {
            watch.forget(WatchKey(KICK.saturating_add(queue)));
        }
        self.listener.remove_path();
    }
}
