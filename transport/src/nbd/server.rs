//! All clients of one disk: who is let in, whose turn it is, who has to go.
//!
//! Knows nothing about the protocol's bytes. Invariants: at most [`CONNECTIONS_MAX`] connections exist, counting
//! those that have ended and still have requests in the disk; a socket is forgotten by the watch before it is
//! closed. What needs the watch is done in [`Server::ready`]; elsewhere the server nudges itself to get there.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use disk::{Disconnected, Geometry, Request, Status, Transport};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::Mode;

use super::connection::Connection;
use super::error::{BindError, End, Event};
use super::export::Export;
use super::handover;
use super::handshake::OPTION_DATA_MAX;
use super::listener::{Address, Listener};
use super::room::Room;
use super::session::Session;
use super::wire::STRING_MAX;
use crate::log::{Log, in_full};
use crate::{Handover, HandoverError, Interest, Watch, WatchKey};

/// Connections at one time. Clients with multi-conn open 4 to 16.
const CONNECTIONS_MAX: usize = 64;
/// Of these, clients that have not finished negotiating; the oldest of them makes room for one more.
const NEGOTIATING_MAX: usize = 16;
/// Clients accepted before others get their turn.
const ACCEPTS_AT_ONCE: usize = 16;
/// Received or sent in one call: about what a Unix socket holds, beside the longest option.
const STAGING: usize = (256 << 10) + OPTION_DATA_MAX + 64;

const LISTENER: WatchKey = WatchKey(u64::MAX);
const NUDGE: WatchKey = WatchKey(u64::MAX - 1);

/// What to serve, and where.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where to listen.
    pub address: Address,
    /// The disk as clients see it.
    pub export: Export,
}

/// An NBD server for one disk.
pub struct Server {
    export: Export,
    listener: Listener,
    nudge: OwnedFd,
    nudged: bool,
    connections: Vec<Option<Connection>>,
    clients: u32,
    /// Whose turn it is to be listened to.
    turn: usize,
    requests: VecDeque<Request>,
    staging: Vec<u8>,
    log: Log<Event>,
    stopping: bool,
    /// Nothing more is taken, for a while.
    held: bool,
}

impl Server {
    /// Listens. The socket of a server that is gone is removed; one at which somebody answers is an error.
    pub fn bind(config: Config) -> Result<Server, BindError> {
        Server::bind_with(config, None)
    }

    /// The same, where a Unix socket is for this process's user only.
    pub fn bind_private(config: Config) -> Result<Server, BindError> {
        Server::bind_with(config, Some(Mode::RUSR | Mode::WUSR))
    }

    fn bind_with(config: Config, mode: Option<Mode>) -> Result<Server, BindError> {
        check_texts(&config.export)?;
        let listener = Listener::bind(&config.address, mode)?;
        Server::on(listener, config.export)
    }

    /// The same at a Unix socket that listens already, known as `path`; the path is left alone.
    pub fn on_socket(socket: OwnedFd, path: &Path, export: Export) -> Result<Server, BindError> {
        check_texts(&export)?;
        Server::on(Listener::of_socket(socket, path)?, export)
    }

    fn on(listener: Listener, export: Export) -> Result<Server, BindError> {
        let nudge = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| BindError::Failed {
            doing: "create an eventfd for",
            on: listener.address().to_string(),
            cause: errno.into(),
        })?;
        Ok(Server {
            listener,
            export,
            nudge,
            nudged: false,
            connections: Vec::new(),
            clients: 0,
            turn: 0,
            requests: VecDeque::new(),
            staging: vec![0; STAGING],
            log: Log::default(),
            stopping: false,
            held: false,
        })
    }

    /// Goes on in the place of another process, with its socket, known as `path`, and its clients
    /// ([`crate::Server::hand_over`]).
    pub fn taken_over(handover: Handover, path: &Path, export: Export) -> Result<Server, HandoverError> {
        let Handover { listener, bound, peers } = handover;
        let refused = |error: BindError| HandoverError::Refused(in_full(&error));
        check_texts(&export).map_err(refused)?;
        let mut server =
            Server::on(Listener::of_bound(listener, path, bound).map_err(refused)?, export).map_err(refused)?;
        for (index, parcel) in peers.into_iter().enumerate().take(CONNECTIONS_MAX) {
            let connection = handover::take(parcel, |client| token_prefix(index, client))?;
            server.clients = server.clients.max(connection.client);
            server.connections.push(Some(connection));
        }
        Ok(server)
    }

    /// Where it listens; with the port that the system chose.
    pub fn address(&self) -> &Address {
        self.listener.address()
    }

    /// What has happened since the last call, for a log. How much of it to log is the caller's decision.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.log.take()
    }

    /// Has `ready` called with the watch at hand.
    fn nudge(&mut self) {
        if !self.nudged {
            self.nudged = true;
            // Fails only when the counter is full, which means that it is signalled.
            rustix::io::write(&self.nudge, &1u64.to_ne_bytes()).ok();
        }
    }

    /// Bytes held for all connections.
    fn held(&self) -> usize {
        self.connections.iter().flatten().map(|connection| connection.session.held()).fold(0, usize::saturating_add)
    }

    fn connection(&mut self, index: usize) -> Option<&mut Connection> {
        self.connections.get_mut(index)?.as_mut()
    }

    /// Listens to the client at `index`, if that may bring something.
    fn take_in(&mut self, index: usize, geometry: &Geometry) {
        let held = self.held();
        let Some(Some(connection)) = self.connections.get_mut(index) else { return };
        let room = room_of(connection, held);
        if connection.is_hungry(room) {
            let taken = connection.take_in(&mut self.staging, &self.export, geometry, room, &mut self.requests);
            if let Err(why) = taken {
                self.end(index, why);
            }
        }
    }

    fn send(&mut self, index: usize) {
        let Some(Some(connection)) = self.connections.get_mut(index) else { return };
        if connection.has_ended() {
            return;
        }
        match connection.send(&mut self.staging) {
            Err(why) => self.end(index, why),
            Ok(()) if connection.lacks_room() => self.nudge(),
            Ok(()) => {}
        }
    }

    fn send_all(&mut self) {
        for index in 0..self.connections.len() {
            self.send(index);
        }
    }

    fn end(&mut self, index: usize, why: End) {
        if let Some(connection) = self.connection(index).filter(|connection| !connection.has_ended()) {
            connection.end();
            let client = connection.client;
            self.log.note(Event::Ended { client, why });
            self.nudge();
        }
    }

    /// Everything that had to wait for the watch.
    fn catch_up(&mut self, watch: &mut dyn Watch) {
        self.nudged = false;
        for index in 0..self.connections.len() {
            let Some(connection) = self.connection(index) else { continue };
            let key = key(index, connection.client);
            if connection.is_to_close() {
                watch.forget(key);
                connection.close();
                self.bury(index);
            } else if let Some(socket) = connection.watch_for_room() {
                if let Err(error) = watch.watch(socket, Interest::ReadWrite, key) {
                    self.end(index, End::Watch(error));
                }
            }
        }
    }

    /// Frees the place of a connection of which nothing is left.
    fn bury(&mut self, index: usize) {
        if let Some(place) = self.connections.get_mut(index) {
            if place.as_ref().is_some_and(Connection::is_gone) {
                *place = None;
            }
        }
    }

    fn accept_all(&mut self, watch: &mut dyn Watch) {
        for _ in 0..ACCEPTS_AT_ONCE {
            match self.listener.accept() {
                Ok(Some(socket)) => self.admit(socket, watch),
                Ok(None) => return,
                // Out of descriptors or memory: tried again when the next client comes or one goes.
                Err(error) => return self.log.note(Event::AcceptFailed(error)),
            }
        }
        self.nudge();
    }

    fn admit(&mut self, socket: OwnedFd, watch: &mut dyn Watch) {
        self.displace_oldest(watch);
        let Some(index) = self.free_place() else {
            return self.log.note(Event::TurnedAway { limit: CONNECTIONS_MAX });
        };
        self.clients = self.clients.wrapping_add(1);
        let client = self.clients;
        if let Err(error) = watch.watch(socket.as_fd(), Interest::Read, key(index, client)) {
            return self.log.note(Event::AcceptFailed(error));
        }
        let session = Session::new(token_prefix(index, client));
        if let Some(place) = self.connections.get_mut(index) {
            *place = Some(Connection::new(client, session, socket));
        }
        self.log.note(Event::Connected { client });
        self.send(index);
    }

    /// Idle negotiation has no timer: whoever has negotiated for the longest time goes when another one comes.
    fn displace_oldest(&mut self, watch: &mut dyn Watch) {
        let negotiating = self.connections.iter().enumerate().filter_map(|(index, connection)| {
            let connection = connection.as_ref()?;
            let idle = connection.session.is_negotiating() && !connection.has_ended();
            idle.then_some((connection.client, index))
        });
        let (count, oldest) = negotiating.fold((0usize, None), |(count, oldest), candidate| {
            let older = oldest.is_none_or(|oldest| candidate < oldest);
            (count.saturating_add(1), if older { Some(candidate) } else { oldest })
        });
        let full = self.connections.iter().flatten().count() >= CONNECTIONS_MAX;
        if let Some((_, index)) = oldest.filter(|_| full || count >= NEGOTIATING_MAX) {
            self.end(index, End::Displaced);
            self.catch_up(watch);
        }
    }

    fn free_place(&mut self) -> Option<usize> {
        if let Some(index) = self.connections.iter().position(Option::is_none) {
            return Some(index);
        }
        let index = self.connections.len();
        (index < CONNECTIONS_MAX).then(|| {
            self.connections.push(None);
            index
        })
    }
}

impl Transport for Server {
    fn pop(&mut self, geometry: &Geometry) -> Option<Request> {
        // Each client is listened to once at most: endless nonsense of one is no endless loop here.
        let count = self.connections.len();
        for step in 0..count {
            if !self.requests.is_empty() || self.stopping || self.held {
                break;
            }
            let index = self.turn.wrapping_add(step) % count;
            self.take_in(index, geometry);
            if !self.requests.is_empty() {
                self.turn = index.wrapping_add(1);
            }
        }
        let request = self.requests.pop_front();
        if request.is_none() {
            self.turn = self.turn.wrapping_add(1);
            // Answers that the disk has no part in: those of the negotiation, and errors.
            self.send_all();
        }
        request
    }

    fn complete(&mut self, request: Request, status: Status) {
        let index = index_of(&request);
        let Some(Some(connection)) = self.connections.get_mut(index) else {
            debug_assert!(false, "an answer to nobody: {:?}", request.token());
            request.retire();
            return;
        };
        if connection.has_ended() {
            connection.session.complete(request, status, None);
            connection.session.hang_up();
            return self.bury(index);
        }
        let follow = (!self.stopping).then_some((&self.export.geometry, &mut self.requests));
        connection.session.complete(request, status, follow);
    }

    fn publish(&mut self) -> Result<(), Disconnected> {
        self.send_all();
        Ok(())
    }
}

impl crate::Server for Server {
    fn start(&mut self, watch: &mut dyn Watch) -> io::Result<()> {
        self.listener.begin();
        watch.watch(self.listener.fd(), Interest::Read, LISTENER)?;
        watch.watch(self.nudge.as_fd(), Interest::Read, NUDGE)?;
        // Of a process before this one.
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
            LISTENER | NUDGE => {
                self.catch_up(watch);
                if !self.stopping && !self.held {
                    self.accept_all(watch);
                }
            }
            WatchKey(key) => {
                let index = usize::try_from(key >> 32).unwrap_or(usize::MAX);
                let client = key & u64::from(u32::MAX);
                let named = |connection: &&mut Connection| u64::from(connection.client) == client;
                if let Some(connection) = self.connection(index).filter(named) {
                    connection.wake();
                    self.send(index);
                }
            }
        }
    }

    fn may_sleep(&mut self) -> bool {
        let held = self.held();
        let hungry = |connection: &Connection| connection.is_hungry(room_of(connection, held));
        self.requests.is_empty() && (self.stopping || self.held || !self.connections.iter().flatten().any(hungry))
    }

    /// NBD has no word for it: a client was told the size when it came, and keeps to that.
    fn resized(&mut self, geometry: &Geometry, _watch: &mut dyn Watch) {
        self.export.geometry = *geometry;
    }

    fn hold(&mut self, held: bool) {
        self.held = held;
        if !held {
            // Whoever has come meanwhile is waiting.
            self.nudge();
        }
    }

    fn can_hand_over(&self) -> bool {
        true
    }

    fn hand_over(&self) -> Result<Handover, HandoverError> {
        if !self.requests.is_empty() {
            return Err(HandoverError::NotNow("requests are under way"));
        }
        let listener = self.listener.fd().try_clone_to_owned();
        let listener = listener.map_err(|error| HandoverError::Failed("duplicate a listening socket", error))?;
        let clients = self.connections.iter().flatten().filter(|connection| !connection.has_ended());
        let peers = clients.map(handover::told).collect::<Result<_, _>>()?;
        Ok(Handover { listener, bound: self.listener.bound(), peers })
    }

    fn peers(&self) -> usize {
        self.connections.iter().flatten().filter(|connection| !connection.has_ended()).count()
    }

    fn stop(&mut self, watch: &mut dyn Watch) {
        self.stopping = true;
        watch.forget(LISTENER);
        self.listener.remove_path();
        for request in std::mem::take(&mut self.requests) {
            if let Some(connection) = self.connection(index_of(&request)) {
                connection.session.turn_away(request);
            } else {
                request.retire();
            }
        }
        self.send_all();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        for request in self.requests.drain(..) {
            request.retire();
        }
    }
}

/// Whether what clients are told fits into what they are told it with.
fn check_texts(export: &Export) -> Result<(), BindError> {
    for (what, text) in [("the name", &export.name), ("the description", &export.description)] {
        if text.len() > STRING_MAX {
            return Err(BindError::TextTooLong { what, len: text.len(), max: STRING_MAX });
        }
    }
    Ok(())
}

/// What the others leave to `connection`, if all together hold so much.
fn room_of(connection: &Connection, held: usize) -> Room {
    Room { others: held.saturating_sub(connection.session.held()) }
}

/// The watch's name for a connection: a place and, since places are used again, whose it is.
fn key(index: usize, client: u32) -> WatchKey {
    WatchKey(u64::try_from(index).unwrap_or(u64::MAX).wrapping_shl(32) | u64::from(client))
}

/// All of a token but the lowest 16 bits, which belong to the session.
fn token_prefix(index: usize, client: u32) -> u64 {
    u64::try_from(index).unwrap_or(u64::MAX).wrapping_shl(48) | u64::from(client).wrapping_shl(16)
}

fn index_of(request: &Request) -> usize {
    usize::try_from(request.token().0 >> 48).unwrap_or(usize::MAX)
}
