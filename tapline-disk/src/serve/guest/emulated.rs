//! A guest's disk that its firmware reads before there is a driver: over NBD, through QEMU, which emulates a disk for
//! it.
//!
//! Both are servers of one disk in one event loop, so a request of either sees all completed requests of the other, and
//! a flush of either covers them. It knows nothing about rings and NBD. Invariant: a request is completed by the server
//! that it came from; the disk begins and ends with the guest, while QEMU connects and disconnects as it likes.

use std::fmt;

use disk::{Disconnected, Geometry, Request, Status, Token, Transport};
use transport::{Interest, MemoryChange, Server, Watch, WatchKey, nbd};

use super::Backend;
use crate::process::log::say;
use crate::serve::event_loop::Disclose;
use vm::xen::firmware;

/// In a token: NBD's. Its own have no such bit, and a guest would have to connect 2^31 times for one that has.
const OF_NBD: u64 = 1 << 63;

/// Turned over in the watch's names of NBD's server, which are below it (clients) or have all the highest bits (the
/// listener). The guest's are all below it, and come near none of these.
const TURNED: u64 = 1 << 62;

/// Both servers of a disk.
pub struct Emulated {
    guest: Backend,
    nbd: nbd::Server,
    /// Who is asked for a request first the next time.
    nbd_first: bool,
    /// Where QEMU finds the disk may stand in the store still.
    shown: bool,
    stopped: bool,
}

/// What has happened to one of them.
pub enum Event {
    Guest(transport::blkif::Event),
    Nbd(nbd::Event),
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Event::Guest(event) => event.fmt(f),
            Event::Nbd(event) => write!(f, "for the guest's firmware: {event}"),
        }
    }
}

/// The wait, as NBD's server sees it.
struct Turned<'a>(&'a mut dyn Watch);

impl Watch for Turned<'_> {
    fn watch(&mut self, fd: std::os::fd::BorrowedFd<'_>, interest: Interest, key: WatchKey) -> std::io::Result<()> {
        self.0.watch(fd, interest, WatchKey(key.0 ^ TURNED))
    }

    fn forget(&mut self, key: WatchKey) {
        self.0.forget(WatchKey(key.0 ^ TURNED));
    }
}

impl Emulated {
    /// Both, with nothing begun.
    pub fn new(guest: Backend, nbd: nbd::Server) -> Emulated {
        Emulated { guest, nbd, nbd_first: false, shown: true, stopped: false }
    }

    fn pop_nbd(&mut self, geometry: &Geometry) -> Option<Request> {
        let request = self.nbd.pop(geometry)?;
        let token = request.token();
        Some(request.renamed(Token(token.0 | OF_NBD)))
    }

    /// QEMU is told once where the disk is, when it starts. Nothing of it is left in the store from then on.
    fn hide(&mut self) {
        if std::mem::take(&mut self.shown) {
            firmware::hide(&mut *self.guest.store, &self.guest.device).unwrap_or_else(say);
        }
    }
}

fn is_nbds(token: Token) -> bool {
    token.0 & OF_NBD != 0
}

impl Transport for Emulated {
    fn pop(&mut self, geometry: &Geometry) -> Option<Request> {
        self.nbd_first = !self.nbd_first;
        if self.nbd_first {
            return self.pop_nbd(geometry).or_else(|| self.guest.pop(geometry));
        }
        self.guest.pop(geometry).or_else(|| self.pop_nbd(geometry))
    }

    fn complete(&mut self, request: Request, status: Status) {
        let token = request.token();
        if is_nbds(token) {
            self.nbd.complete(request.renamed(Token(token.0 & !OF_NBD)), status);
        } else {
            self.guest.complete(request, status);
        }
    }

    fn publish(&mut self) -> Result<(), Disconnected> {
        // A client that has gone is no news for the guest.
        self.nbd.publish().unwrap_or(());
        self.guest.publish()
    }
}

impl Server for Emulated {
    fn start(&mut self, watch: &mut dyn Watch) -> std::io::Result<()> {
        self.nbd.start(&mut Turned(watch))?;
        // The toolstack continues when the guest's backend is served.
        self.guest.start(watch)
    }

    fn ready(&mut self, key: WatchKey, watch: &mut dyn Watch) {
        if key.0 < TURNED {
            return self.guest.ready(key, watch);
        }
        self.nbd.ready(WatchKey(key.0 ^ TURNED), &mut Turned(watch));
        if self.nbd.peers() > 0 {
            self.hide();
        }
    }

    #[inline]
    fn memory_change(&mut self) -> Option<MemoryChange> {
        self.guest.memory_change()
    }

    fn may_sleep(&mut self) -> bool {
        self.nbd.may_sleep() && self.guest.may_sleep()
    }

    fn resized(&mut self, geometry: &Geometry, watch: &mut dyn Watch) {
        self.nbd.resized(geometry, &mut Turned(watch));
        self.guest.resized(geometry, watch);
    }

    fn takes_back(&self) -> bool {
        self.guest.takes_back()
    }

    /// The guest's ring may be left to another process with its requests; there is no successor for NBD clients.
    fn recalls(&self, token: Token) -> bool {
        match is_nbds(token) {
            true => self.stopped && self.takes_back(),
            false => self.guest.recalls(token),
        }
    }

    fn is_finishing(&self) -> bool {
        self.guest.is_finishing()
    }

    fn give_back(&mut self, request: Request) {
        match is_nbds(request.token()) {
            true => self.complete(request, Status::NoSpace),
            false => self.guest.give_back(request),
        }
    }

    fn hold(&mut self, held: bool) {
        self.nbd.hold(held);
        self.guest.hold(held);
    }

    fn records_in_flight(&self) -> Option<bool> {
        self.guest.records_in_flight()
    }

    fn place_of(&self, token: Token) -> Option<String> {
        match is_nbds(token) {
            true => Some("of the guest's firmware".into()),
            false => self.guest.place_of(token),
        }
    }

    fn keeps_memory(&self) -> bool {
        self.nbd.keeps_memory()
    }

    fn free_kept_memory(&mut self) {
        self.nbd.free_kept_memory();
    }

    fn peers(&self) -> usize {
        self.guest.peers() + self.nbd.peers()
    }

    fn stop(&mut self, watch: &mut dyn Watch) {
        self.stopped = true;
        self.nbd.stop(&mut Turned(watch));
        self.guest.stop(watch);
    }
}

impl Disclose for Emulated {
    type Event = Event;

    fn take_events(&mut self) -> Vec<Event> {
        let nbd = self.nbd.take_events().into_iter().map(Event::Nbd);
        Disclose::take_events(&mut self.guest).into_iter().map(Event::Guest).chain(nbd).collect()
    }

    fn leave(&mut self) {
        self.guest.leave();
    }

    fn close(&mut self) -> bool {
        self.guest.close()
    }

    fn is_over(&self) -> bool {
        self.guest.is_over()
    }
}
