//! A vhost-user-blk back-end: serves the disk of a virtual machine over a Unix socket and shared memory.
//!
//! [`Server`] accepts one front-end at a time (QEMU, Cloud Hypervisor, `blkio`) and is the [`disk::Transport`] of the
//! disk. It knows nothing about the disk behind it, and never blocks: neither for a slow front-end nor for requests in
//! flight.
//!
//! Invariant: a front-end is accepted only when all requests of the previous one have completed, so that no late write
//! of the old one reaches data of the new one.
//!
//! | file | contents |
//! |---|---|
//! | `listener` | the path and the socket |
//! | `connection` | framing, file descriptors |
//! | `message`, `refusal` | requests, and why they are refused |
//! | `session` | the effect of each message |
//! | `table` | guest memory |
//! | `queue`, `ring`, `chain` | split virtqueues |
//! | `inflight` | the record of unanswered requests, for the next process |
//! | `kill_point` | the points at which tests kill the process |
//! | `device`, `request`, `token`, `config_space` | virtio-blk |
//! | `signal` | eventfds and pipes |
//! | `dirty_log` | the pages of guest memory written to during a migration |
//! | `handover` | the state for a successor process |
//! | `backend` | unsolicited messages to the front-end |
//! | `event` | events to be logged |

mod backend;
mod chain;
mod config_space;
mod connection;
mod device;
mod dirty_log;
mod event;
mod handover;
mod inflight;
mod kill_point;
mod listener;
mod message;
#[cfg(test)]
mod model;
mod queue;
mod refusal;
mod request;
mod ring;
mod session;
mod signal;
mod table;
#[cfg(test)]
mod test;
mod token;

use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use disk::{Disconnected, Geometry, Request, Status, Token, Transport};
use rustix::event::{EventfdFlags, eventfd};

use crate::log::with_causes;
use crate::{HandOver, Handover, HandoverError, Interest, MemoryChange, TakeBack, Watch, WatchKey};

pub use event::Event;
pub use listener::{BindError, Listener};
pub use ring::Broken;

use backend::Notified;
use connection::{Connection, DisconnectReason};
use device::Device;
use event::Log;
use message::Message;
use request::ID_LEN;
use session::Session;

/// The maximum number of queues of one disk: the bits of one word.
pub const MAX_QUEUES: u16 = 64;

const LISTENER: u64 = 0;
const CONNECTION: u64 = 1;
const WAKE: u64 = 2;
/// The kick of queue 0; the others follow.
const KICK: u64 = 16;

/// Messages and connections handled before other work; a front-end sends about fifteen messages per queue.
const BATCH_MAX: usize = 64;

/// The configuration of a server.
#[derive(Clone, Debug)]
pub struct Config {
    /// Path of the socket.
    pub path: PathBuf,
    /// The number of queues offered: 1 to [`MAX_QUEUES`].
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
    /// Signalled by the server itself, for work that needs a [`Watch`].
    wake: OwnedFd,
    /// The number of requests of earlier front-ends that have not completed.
    orphans: usize,
    epoch: u32,
    stopped: bool,
    /// No requests are taken until [`HandOver::hold`] is called again.
    held: bool,
    /// SET_VRING_KICK messages of rings taken over from the previous process, executed when the server starts.
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

    /// Like [`Server::bind`], with a socket that is already listening.
    pub fn on(listener: Listener, config: Config) -> Result<Server, BindError> {
        if !(1..=MAX_QUEUES).contains(&config.queues) {
            return Err(BindError::Queues { requested: config.queues });
        }
        let mut serial = [0; ID_LEN];
        match serial.get_mut(..config.serial.len()) {
            Some(place) => place.copy_from_slice(config.serial.as_bytes()),
            None => return Err(BindError::SerialTooLong(config.serial)),
        }
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| BindError::Failed {
            what: "create an eventfd for",
            path: config.path.clone(),
            source: errno.into(),
        })?;
        let log = Log::default();
        let (client, kicks) = (None, Vec::new());
        let (orphans, epoch, stopped, held) = (0, 0, false, false);
        Ok(Server { config, serial, listener, client, wake, orphans, epoch, stopped, held, kicks, log })
    }

    /// Takes over the socket and the front-end of another process ([`HandOver::hand_over`]).
    pub fn taken_over(handover: Handover, config: Config) -> Result<Server, HandoverError> {
        let Handover { listener, bound, peers } = handover;
        let refused = |error: BindError| HandoverError::Refused(with_causes(&error));
        let listener = Listener::of_bound(listener, &config.path, bound).map_err(refused)?;
        let mut server = Server::on(listener, config).map_err(refused)?;
        let session = server.new_session();
        if let Some((client, kicks)) = handover::restore(peers, session, &mut server.log)? {
            (server.client, server.kicks) = (Some(client), kicks);
        }
        Ok(server)
    }

    /// Leaves the path to the process that has taken over.
    #[cfg(test)]
    fn leave_path(mut self) {
        self.listener.leave_path();
    }

    fn new_session(&mut self) -> Session {
        self.epoch = self.epoch.wrapping_add(1);
        Session::new(Device::new(self.config.queues, self.serial, self.epoch), &self.config.geometry)
    }

    /// The events since the last call, for the log.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.log.take()
    }

    /// Returns true if a front-end is connected.
    pub fn is_connected(&self) -> bool {
        self.client.is_some()
    }

    /// Accepts a waiting front-end, and refuses others.
    fn admit(&mut self, watch: &mut dyn Watch) {
        for _ in 0..BATCH_MAX {
            // A front-end that connects before the requests of the last one have completed waits in the backlog.
            if self.orphans > 0 || self.stopped || self.held {
                return;
            }
            if let Some(client) = &self.client {
                if !self.listener.may_have_pending() {
                    return;
                }
                // The current front-end may have hung up after its messages were handled, and the new one connected
                // only then: checked while that one is known to wait, so that it is not refused.
                if client.connection.has_hung_up() {
                    self.disconnect(&DisconnectReason::Closed, watch);
                    continue;
                }
            }
            match self.listener.accept() {
                Ok(None) => return,
                Ok(Some(_)) if self.client.is_some() => self.log.record(Event::SecondRefused),
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

    /// Starts the rings taken over from the previous process.
    fn resume(&mut self, watch: &mut dyn Watch) -> io::Result<()> {
        let Some(client) = &mut self.client else { return Ok(()) };
        watch.watch(client.connection.fd(), Interest::Read, WatchKey(CONNECTION))?;
        for kick in std::mem::take(&mut self.kicks) {
            let started = client.session.execute(kick, watch, &mut self.log);
            started.map_err(|refusal| io::Error::other(with_causes(&refusal)))?;
        }
        Ok(())
    }

    /// Handles messages of the front-end, up to one that has to wait.
    fn handle_messages(&mut self, watch: &mut dyn Watch) {
        let Some(client) = &mut self.client else { return };
        let end = client.handle_messages(watch, &mut self.log);
        let end = if client.session.device.is_unlogged() { Err(DisconnectReason::Unlogged) } else { end };
        match end {
            Ok(true) => {}
            Ok(false) => self.wake(),
            Err(end) => self.disconnect(&end, watch),
        }
    }

    fn disconnect(&mut self, end: &DisconnectReason, watch: &mut dyn Watch) {
        let Some(mut client) = self.client.take() else { return };
        watch.forget(WatchKey(CONNECTION));
        let in_flight = client.session.end(watch);
        self.orphans += in_flight;
        self.log.record(Event::Disconnected { why: with_causes(end), in_flight });
    }

    /// Records the completion of a request of an earlier front-end.
    fn reap_orphan(&mut self) {
        self.orphans -= 1;
        if self.orphans == 0 {
            self.wake();
        }
    }

    fn wake(&self) {
        // Does not block, and fails only if the eventfd is saturated and thus signalled already.
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).ok();
    }
}

impl Client {
    /// Returns false if there may be more messages.
    fn handle_messages(&mut self, watch: &mut dyn Watch, log: &mut Log) -> Result<bool, DisconnectReason> {
        if let Some(reply) = self.session.settle(watch, log) {
            self.connection.send(&reply.bytes, reply.fd.as_ref().map(AsFd::as_fd))?;
        }
        for _ in 0..BATCH_MAX {
            if self.session.is_waiting() {
                return Ok(true);
            }
            let Some(frame) = self.connection.receive()? else { return Ok(true) };
            if let Some(reply) = self.session.handle(frame, watch, log)? {
                self.connection.send(&reply.bytes, reply.fd.as_ref().map(AsFd::as_fd))?;
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
        if self.held { device.pop_ready() } else { device.pop(geometry, &mut self.log) }
    }

    fn complete(&mut self, request: Request, status: Status) {
        let is_current = match &mut self.client {
            Some(client) => client.session.device.complete(request, status, &mut self.log),
            None => {
                request.retire();
                false
            }
        };
        if !is_current {
            self.reap_orphan();
        }
    }

    fn publish(&mut self) -> Result<(), Disconnected> {
        if let Some(client) = &mut self.client {
            client.session.device.publish(&mut self.log);
            if client.session.can_settle() || client.session.device.is_unlogged() {
                self.wake();
            }
        }
        // Not an error for the disk if the front-end has disconnected: another one may connect.
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
            // The current front-end first: it may have disconnected, and the new one replace it.
            LISTENER | CONNECTION | WAKE => {
                self.handle_messages(watch);
                self.admit(watch);
            }
            // Kicks: the caller pops requests next anyway.
            _ => {}
        }
    }

    /// None: the data of requests is in the guest's memory.
    #[inline]
    fn memory_change(&mut self) -> Option<MemoryChange> {
        None
    }

    fn may_sleep(&mut self) -> bool {
        match &mut self.client {
            Some(client) if self.held => client.session.device.has_popped_all(),
            Some(client) if !self.stopped => {
                let may_sleep = client.session.device.prepare_to_sleep(&mut self.log);
                if client.session.device.is_unlogged() {
                    self.wake();
                }
                may_sleep
            }
            _ => true,
        }
    }

    fn resized(&mut self, geometry: &Geometry, watch: &mut dyn Watch) {
        self.config.geometry = *geometry;
        let notified = self.client.as_mut().map(|client| client.session.resized(geometry));
        match notified {
            Some(Ok(Notified::Yes)) => self.log.record(Event::SizeAnnounced { len: geometry.len }),
            Some(Ok(Notified::Unsupported)) => self.log.record(Event::SizeNotAnnounced { len: geometry.len }),
            Some(Err(end)) => self.disconnect(&end, watch),
            None => {}
        }
    }

    fn place_of(&self, token: Token) -> Option<String> {
        Some(token::place_of(token))
    }

    fn peers(&self) -> usize {
        usize::from(self.client.is_some())
    }

    #[inline]
    fn log_events(&mut self, log: &mut dyn FnMut(&dyn Display)) {
        self.take_events().iter().for_each(|event| log(event));
    }

    fn stop(&mut self, watch: &mut dyn Watch) {
        self.stopped = true;
        watch.forget(WatchKey(LISTENER));
        watch.forget(WatchKey(WAKE));
        watch.forget(WatchKey(CONNECTION));
        for queue in 0..u64::from(self.config.queues) {
            watch.forget(WatchKey(KICK + queue));
        }
        self.listener.remove_path();
    }

    fn takes_back(&mut self) -> Option<&mut dyn TakeBack> {
        Some(self)
    }

    fn hands_over(&mut self) -> Option<&mut dyn HandOver> {
        Some(self)
    }
}

impl TakeBack for Server {
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
        self.reap_orphan();
    }

    fn records_in_flight(&self) -> Option<bool> {
        self.client.as_ref()?.session.device.records_in_flight()
    }
}

impl HandOver for Server {
    fn hold(&mut self, held: bool) {
        self.held = held;
        if !held {
            // A front-end that has connected or sent something meanwhile is waiting.
            self.wake();
        }
    }

    fn hand_over(&self) -> Result<Handover, HandoverError> {
        if self.orphans > 0 {
            return Err(HandoverError::NotNow("requests of an earlier front-end are in flight"));
        }
        let listener = self.listener.fd().try_clone_to_owned();
        let listener = listener.map_err(|error| HandoverError::Failed("duplicate a listening socket", error))?;
        let peers = self.client.as_ref().map(handover::save).transpose()?.unwrap_or_default();
        Ok(Handover { listener, bound: self.listener.bound(), peers })
    }

    fn end_left_behind(&mut self) {}
}
