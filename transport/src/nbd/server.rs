//! All clients of one disk: admission, scheduling, disconnection.
//!
//! It knows nothing about the protocol's bytes. Invariants: at most [`CONNECTIONS_MAX`] connections exist, counting
//! those that have ended and still have requests in the disk; a socket is unwatched before it is closed. Work that
//! needs the watch is done in [`Server::ready`]; elsewhere the server signals its own eventfd to get there.

use std::collections::VecDeque;
use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use ::nbd::tls::ServerTls as Tls;
use disk::size::in_memory;
use disk::{Disconnected, Geometry, Request, Status, Token, Transport};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::Mode;

use super::connection::{Connection, Serving};
use super::context::{AllDirty, Bitmaps};
use super::error::{BindError, DisconnectReason, Event};
use super::export::Export;
use super::handover;
use super::handshake::OPTION_DATA_MAX;
use super::listener::{Address, Listener};
use super::memory_quota::MemoryQuota;
use super::session::Session;
use super::slot::{free_slot, index_of, key, token_prefix};
use crate::log::{Log, with_causes};
use crate::{HandOver, Handover, HandoverError, Interest, KeepMemory, MemoryChange, ShowBitmaps, Watch, WatchKey};

/// The maximum number of connections. Clients with multi-conn open 4 to 16.
const CONNECTIONS_MAX: usize = 64;
/// The maximum number of clients that have not finished negotiating; the oldest is dropped for a new one.
const NEGOTIATING_MAX: usize = 16;
/// Clients accepted before requests of others are processed.
const ACCEPTS_AT_ONCE: usize = 16;
/// Bytes received or sent per call: about the capacity of a Unix socket, plus the longest option.
const STAGING: usize = (256 << 10) + OPTION_DATA_MAX + 64;

const LISTENER: WatchKey = WatchKey(u64::MAX);
const WAKE: WatchKey = WatchKey(u64::MAX - 1);

/// The configuration of a server.
#[derive(Clone, Debug)]
pub struct Config {
    /// The address to listen at.
    pub address: Address,
    /// The disk as seen by clients.
    pub export: Export,
    /// If given, all clients must use it.
    pub tls: Option<Tls>,
}

/// An NBD server for one disk.
pub struct Server {
    export: Export,
    tls: Option<Tls>,
    listener: Listener,
    wake: OwnedFd,
    woken: bool,
    connections: Vec<Option<Connection>>,
    /// The number of the latest client.
    clients: u32,
    /// The index of the next connection to process.
    next_client: usize,
    requests: VecDeque<Request>,
    staging: Vec<u8>,
    log: Log<Event>,
    stopping: bool,
    /// No requests are taken until [`HandOver::hold`] is called again.
    held: bool,
}

impl Server {
    /// Starts listening. The socket of a dead server is replaced; one with a listener is an error.
    pub fn bind(config: Config) -> Result<Server, BindError> {
        Server::bind_with(config, None)
    }

    /// Like [`Server::bind`], with a Unix socket accessible only to this process's user.
    pub fn bind_private(config: Config) -> Result<Server, BindError> {
        Server::bind_with(config, Some(Mode::RUSR | Mode::WUSR))
    }

    fn bind_with(config: Config, mode: Option<Mode>) -> Result<Server, BindError> {
        config.export.check_texts()?;
        let listener = Listener::bind(&config.address, mode)?;
        Server::on(listener, config.export, config.tls)
    }

    /// Uses a listening Unix socket that is bound to `path`. The path is not removed.
    pub fn on_socket(socket: OwnedFd, path: &Path, export: Export, tls: Option<Tls>) -> Result<Server, BindError> {
        export.check_texts()?;
        Server::on(Listener::from_socket(socket, path)?, export, tls)
    }

    fn on(listener: Listener, export: Export, tls: Option<Tls>) -> Result<Server, BindError> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| BindError::Failed {
            doing: "create an eventfd for",
            on: listener.address().to_string(),
            cause: errno.into(),
        })?;
        Ok(Server {
            listener,
            export,
            tls,
            wake,
            woken: false,
            connections: Vec::new(),
            clients: 0,
            next_client: 0,
            requests: VecDeque::new(),
            staging: vec![0; STAGING],
            log: Log::default(),
            stopping: false,
            held: false,
        })
    }

    /// Takes over the socket, bound to `path`, and the clients of another process ([`HandOver::hand_over`]).
    pub fn taken_over(
        handover: Handover,
        path: &Path,
        export: Export,
        tls: Option<Tls>,
    ) -> Result<Server, HandoverError> {
        let Handover { listener, bound, peers } = handover;
        let refused = |error: BindError| HandoverError::Refused(with_causes(&error));
        export.check_texts().map_err(refused)?;
        let listener = Listener::from_bound(listener, path, bound).map_err(refused)?;
        let mut server = Server::on(listener, export, tls).map_err(refused)?;
        for (index, parcel) in peers.into_iter().enumerate().take(CONNECTIONS_MAX) {
            let prefix = |client| token_prefix(index, client);
            let connection = handover::restore(parcel, &server.export, server.tls.is_some(), prefix)?;
            server.clients = server.clients.max(connection.client);
            server.connections.push(Some(connection));
        }
        Ok(server)
    }

    /// The address of the listening socket, with the port chosen by the system.
    pub fn address(&self) -> &Address {
        self.listener.address()
    }

    /// The events since the last call, for the log. How many of them to log is up to the caller.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.log.take()
    }

    /// Causes [`Server::ready`] to be called, which has the watch.
    fn wake(&mut self) {
        if !self.woken {
            self.woken = true;
            // Fails only when the counter is saturated, so it is signalled already.
            rustix::io::write(&self.wake, &1u64.to_ne_bytes()).ok();
        }
    }

    /// The bytes held by requests and replies of all connections.
    fn held(&self) -> usize {
        self.connections.iter().flatten().map(|connection| connection.session.held()).fold(0, usize::saturating_add)
    }

    fn connection(&mut self, index: usize) -> Option<&mut Connection> {
        self.connections.get_mut(index)?.as_mut()
    }

    /// Processes input of the client at `index`, if that may make progress.
    fn process_input(&mut self, index: usize, geometry: &Geometry) {
        let held = self.held();
        let Some(Some(connection)) = self.connections.get_mut(index) else { return };
        let quota = quota_of(connection, held);
        if connection.wants_input(quota) {
            let serving = Serving { export: &self.export, tls: self.tls.as_ref() };
            let taken = connection.process_input(&mut self.staging, &serving, geometry, quota, &mut self.requests);
            if let Some((version, is_verified)) = connection.take_tls_report() {
                self.log.record(Event::Encrypted { client: connection.client, version, is_verified });
            }
            if let Err(why) = taken {
                self.disconnect(index, why);
            }
        }
    }

    fn send(&mut self, index: usize) {
        let Some(Some(connection)) = self.connections.get_mut(index) else { return };
        if connection.has_ended() {
            return;
        }
        match connection.send(&mut self.staging) {
            Err(why) => self.disconnect(index, why),
            Ok(()) if connection.needs_write_watch() => self.wake(),
            Ok(()) => {}
        }
    }

    fn send_all(&mut self) {
        for index in 0..self.connections.len() {
            self.send(index);
        }
    }

    fn disconnect(&mut self, index: usize, why: DisconnectReason) {
        if let Some(connection) = self.connection(index).filter(|connection| !connection.has_ended()) {
            connection.end();
            let client = connection.client;
            self.log.record(Event::Ended { client, why });
            self.wake();
        }
    }

    /// Does the work that needs the watch.
    fn process_deferred(&mut self, watch: &mut dyn Watch) {
        self.woken = false;
        for index in 0..self.connections.len() {
            let Some(connection) = self.connection(index) else { continue };
            let key = key(index, connection.client);
            if connection.needs_close() {
                watch.forget(key);
                connection.close();
                self.reap_client(index);
            } else if let Some(socket) = connection.watch_for_write() {
                if let Err(error) = watch.watch(socket, Interest::ReadWrite, key) {
                    self.disconnect(index, DisconnectReason::Watch(error));
                }
            }
        }
    }

    /// Frees the slot of a connection without socket and requests.
    fn reap_client(&mut self, index: usize) {
        if let Some(slot) = self.connections.get_mut(index) {
            if slot.as_ref().is_some_and(Connection::is_gone) {
                *slot = None;
            }
        }
    }

    fn accept_all(&mut self, watch: &mut dyn Watch) {
        for _ in 0..ACCEPTS_AT_ONCE {
            match self.listener.accept() {
                Ok(Some(socket)) => self.admit(socket, watch),
                Ok(None) => return,
                // Out of descriptors or memory: retried when the next client connects or one disconnects.
                Err(error) => return self.log.record(Event::AcceptFailed(error)),
            }
        }
        self.wake();
    }

    fn admit(&mut self, socket: OwnedFd, watch: &mut dyn Watch) {
        self.displace_oldest(watch);
        let Some(index) = free_slot(&mut self.connections, CONNECTIONS_MAX) else {
            return self.log.record(Event::LimitReached { limit: CONNECTIONS_MAX });
        };
        self.clients = self.clients.wrapping_add(1);
        let client = self.clients;
        if let Err(error) = watch.watch(socket.as_fd(), Interest::Read, key(index, client)) {
            return self.log.record(Event::AcceptFailed(error));
        }
        let prefix = token_prefix(index, client);
        let session = if self.tls.is_some() { Session::requiring_tls(prefix) } else { Session::new(prefix) };
        if let Some(slot) = self.connections.get_mut(index) {
            *slot = Some(Connection::new(client, session, socket));
        }
        self.log.record(Event::Connected { client });
        self.send(index);
    }

    /// There is no timer for idle negotiation: the oldest negotiating client is dropped for a new one.
    fn displace_oldest(&mut self, watch: &mut dyn Watch) {
        let negotiating = self.connections.iter().enumerate().filter_map(|(index, connection)| {
            let connection = connection.as_ref()?;
            let idle = connection.session.is_negotiating() && !connection.has_ended();
            idle.then_some((connection.client, index))
        });
        let (count, oldest) = negotiating.fold((0usize, None), |(count, oldest), candidate| {
            let older = oldest.is_none_or(|oldest| candidate < oldest);
            (count + 1, if older { Some(candidate) } else { oldest })
        });
        let full = self.connections.iter().flatten().count() >= CONNECTIONS_MAX;
        if let Some((_, index)) = oldest.filter(|_| full || count >= NEGOTIATING_MAX) {
            self.disconnect(index, DisconnectReason::Displaced);
            self.process_deferred(watch);
        }
    }
}

impl Transport for Server {
    fn pop(&mut self, geometry: &Geometry) -> Option<Request> {
        // Each client is processed at most once: one that sends garbage continuously cannot cause an endless loop here.
        let count = self.connections.len();
        for step in 0..count {
            if !self.requests.is_empty() || self.stopping || self.held {
                break;
            }
            let index = self.next_client.wrapping_add(step) % count;
            self.process_input(index, geometry);
            if !self.requests.is_empty() {
                self.next_client = index.wrapping_add(1);
            }
        }
        let request = self.requests.pop_front();
        if request.is_none() {
            self.next_client = self.next_client.wrapping_add(1);
            // Replies that do not involve the disk: those of the negotiation, and errors.
            self.send_all();
        }
        request
    }

    fn complete(&mut self, request: Request, status: Status) {
        self.complete_with(request, status, &AllDirty);
    }

    fn publish(&mut self) -> Result<(), Disconnected> {
        self.send_all();
        Ok(())
    }
}

/// A server that describes dirty bitmaps, which only its owner knows.
impl ShowBitmaps for Server {
    fn complete_with(&mut self, request: Request, status: Status, bitmaps: &dyn Bitmaps) {
        let index = index_of(&request);
        let Some(Some(connection)) = self.connections.get_mut(index) else {
            debug_assert!(false, "a completion for an unknown client: {:?}", request.token());
            request.retire();
            return;
        };
        if connection.has_ended() {
            connection.session.complete(request, status, bitmaps, None);
            connection.session.hang_up();
            return self.reap_client(index);
        }
        let follow = (!self.stopping).then_some((&self.export.geometry, &mut self.requests));
        connection.session.complete(request, status, bitmaps, follow);
    }
}

impl crate::Server for Server {
    fn start(&mut self, watch: &mut dyn Watch) -> io::Result<()> {
        self.listener.take_ownership();
        watch.watch(self.listener.fd(), Interest::Read, LISTENER)?;
        watch.watch(self.wake.as_fd(), Interest::Read, WAKE)?;
        // Clients taken over from the previous process.
        for (index, connection) in self.connections.iter().enumerate() {
            if let Some((connection, socket)) = connection.as_ref().and_then(|found| Some((found, found.socket()?))) {
                watch.watch(socket, Interest::Read, key(index, connection.client))?;
            }
        }
        self.send_all();
        Ok(())
    }

    fn ready(&mut self, key: WatchKey, watch: &mut dyn Watch) {
        match key {
            LISTENER | WAKE => {
                self.process_deferred(watch);
                if !self.stopping && !self.held {
                    self.accept_all(watch);
                }
            }
            WatchKey(key) => {
                let index = in_memory(key >> 32);
                let client = key & u64::from(u32::MAX);
                let named = |connection: &&mut Connection| u64::from(connection.client) == client;
                if let Some(connection) = self.connection(index).filter(named) {
                    connection.wake();
                    self.send(index);
                }
            }
        }
    }

    /// The memory of requests is not registered.
    #[inline]
    fn memory_change(&mut self) -> Option<MemoryChange> {
        None
    }

    fn may_sleep(&mut self) -> bool {
        let held = self.held();
        let wants_input = |connection: &Connection| connection.wants_input(quota_of(connection, held));
        self.requests.is_empty() && (self.stopping || self.held || !self.connections.iter().flatten().any(wants_input))
    }

    /// NBD has no message for a new size: clients keep the size that they received when they connected.
    fn resized(&mut self, geometry: &Geometry, _watch: &mut dyn Watch) {
        self.export.geometry = *geometry;
    }

    /// None: a request has only a cookie, which is of no use in a log.
    fn place_of(&self, _token: Token) -> Option<String> {
        None
    }

    fn peers(&self) -> usize {
        self.connections.iter().flatten().filter(|connection| !connection.has_ended()).count()
    }

    #[inline]
    fn log_events(&mut self, log: &mut dyn FnMut(&dyn Display)) {
        self.take_events().iter().for_each(|event| log(event));
    }

    fn stop(&mut self, watch: &mut dyn Watch) {
        self.stopping = true;
        watch.forget(LISTENER);
        self.listener.remove_path();
        for request in std::mem::take(&mut self.requests) {
            if let Some(connection) = self.connection(index_of(&request)) {
                connection.session.reject(request);
            } else {
                request.retire();
            }
        }
        self.send_all();
    }

    fn hands_over(&mut self) -> Option<&mut dyn HandOver> {
        Some(self)
    }

    fn keeps_memory(&mut self) -> Option<&mut dyn KeepMemory> {
        Some(self)
    }

    fn shows_bitmaps(&mut self) -> Option<&mut dyn ShowBitmaps> {
        Some(self)
    }
}

impl HandOver for Server {
    fn hold(&mut self, held: bool) {
        self.held = held;
        if !held {
            // Clients that have connected meanwhile are waiting.
            self.wake();
        }
    }

    fn hand_over(&self) -> Result<Handover, HandoverError> {
        if !self.requests.is_empty() {
            return Err(HandoverError::NotNow("requests are in flight"));
        }
        let listener = self.listener.fd().try_clone_to_owned();
        let listener = listener.map_err(|error| HandoverError::Failed("duplicate a listening socket", error))?;
        let clients = self.connections.iter().flatten();
        let clients = clients.filter(|connection| !connection.has_ended() && !connection.uses_tls());
        let peers = clients.map(handover::save).collect::<Result<_, _>>()?;
        Ok(Handover { listener, bound: self.listener.bound(), peers })
    }

    fn end_left_behind(&mut self) {
        for index in 0..self.connections.len() {
            if self.connection(index).is_some_and(|connection| connection.uses_tls()) {
                self.disconnect(index, DisconnectReason::NotHandedOver);
            }
        }
    }
}

impl KeepMemory for Server {
    fn keeps_much(&self) -> bool {
        self.connections.iter().flatten().any(|connection| connection.session.keeps_much_memory())
    }

    fn free_kept(&mut self) {
        self.connections.iter_mut().flatten().for_each(|connection| connection.session.free_kept_memory());
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for request in self.requests.drain(..) {
            request.retire();
        }
    }
}

/// The quota of `connection`, if all connections together hold `held` bytes.
fn quota_of(connection: &Connection, held: usize) -> MemoryQuota {
    MemoryQuota { others: held - connection.session.held() }
}
