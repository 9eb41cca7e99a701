//! A guest's disk that the firmware reads before there is a driver: over NBD, through QEMU, which emulates a disk.
//!
//! Both are servers of one disk in one event loop, so a request of either sees all completed requests of the other, and
//! a flush of either covers them. It knows nothing about rings and NBD. Invariant: a request is completed by the server
//! that it came from; the disk begins and ends with the guest, while QEMU may connect and disconnect at any time.

use std::fmt::Display;

use disk::{Disconnected, Geometry, Request, Status, Token, Transport};
use transport::{Detach, Interest, KeepMemory, MemoryChange, Server, TakeBack, Watch, WatchKey, nbd};

use super::Backend;
use crate::process::log::say;
use vm::xen::firmware;

/// The bit that marks tokens of NBD. Its own tokens lack it, and a guest would have to connect 2^31 times to reach it.
const OF_NBD: u64 = 1 << 63;

/// Flips a bit in the watch keys of the NBD server, which are below it (clients) or have all the highest bits (the
/// listener). The guest's are all below it, and reach none of these.
const NBD_KEY_BIT: u64 = 1 << 62;

/// Both servers of a disk.
pub struct Emulated {
    guest: Backend,
    nbd: nbd::Server,
    /// Whether the next request is first looked for at the NBD server.
    nbd_first: bool,
    /// Whether xenstore may still tell QEMU where the disk is.
    shown: bool,
    stopped: bool,
}

/// The wait, as the NBD server uses it.
struct NbdWatch<'a>(&'a mut dyn Watch);

impl Watch for NbdWatch<'_> {
    fn watch(&mut self, fd: std::os::fd::BorrowedFd<'_>, interest: Interest, key: WatchKey) -> std::io::Result<()> {
        self.0.watch(fd, interest, WatchKey(key.0 ^ NBD_KEY_BIT))
    }

    fn forget(&mut self, key: WatchKey) {
        self.0.forget(WatchKey(key.0 ^ NBD_KEY_BIT));
    }
}

impl Emulated {
    /// Combines two servers that have not started.
    pub fn new(guest: Backend, nbd: nbd::Server) -> Emulated {
        Emulated { guest, nbd, nbd_first: false, shown: true, stopped: false }
    }

    fn pop_nbd(&mut self, geometry: &Geometry) -> Option<Request> {
        let request = self.nbd.pop(geometry)?;
        let token = request.token();
        Some(request.renamed(Token(token.0 | OF_NBD)))
    }

    /// Removes the disk's location from xenstore. QEMU has read it at its start, and never needs it again.
    fn hide(&mut self) {
        if std::mem::take(&mut self.shown) {
            firmware::hide(&mut *self.guest.store, &self.guest.device).unwrap_or_else(say);
        }
    }
}

fn is_of_nbd(token: Token) -> bool {
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
        if is_of_nbd(token) {
            self.nbd.complete(request.renamed(Token(token.0 & !OF_NBD)), status);
        } else {
            self.guest.complete(request, status);
        }
    }

    fn publish(&mut self) -> Result<(), Disconnected> {
        // A disconnected NBD client does not matter to the guest.
        self.nbd.publish().unwrap_or(());
        self.guest.publish()
    }
}

impl Server for Emulated {
    fn start(&mut self, watch: &mut dyn Watch) -> std::io::Result<()> {
        self.nbd.start(&mut NbdWatch(watch))?;
        // The toolstack continues when the guest's backend is served.
        self.guest.start(watch)
    }

    fn ready(&mut self, key: WatchKey, watch: &mut dyn Watch) {
        if key.0 < NBD_KEY_BIT {
            return self.guest.ready(key, watch);
        }
        self.nbd.ready(WatchKey(key.0 ^ NBD_KEY_BIT), &mut NbdWatch(watch));
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
        self.nbd.resized(geometry, &mut NbdWatch(watch));
        self.guest.resized(geometry, watch);
    }

    fn place_of(&self, token: Token) -> Option<String> {
        match is_of_nbd(token) {
            true => Some("of the guest's firmware".into()),
            false => self.guest.place_of(token),
        }
    }

    fn peers(&self) -> usize {
        self.guest.peers() + self.nbd.peers()
    }

    fn log_events(&mut self, log: &mut dyn FnMut(&dyn Display)) {
        self.guest.log_events(log);
        self.nbd.log_events(&mut |event| log(&format_args!("for the guest's firmware: {event}")));
    }

    fn stop(&mut self, watch: &mut dyn Watch) {
        self.stopped = true;
        self.nbd.stop(&mut NbdWatch(watch));
        self.guest.stop(watch);
    }
    fn takes_back(&mut self) -> Option<&mut dyn TakeBack> {
        self.guest.takes_back()?;
        Some(self)
    }

    fn keeps_memory(&mut self) -> Option<&mut dyn KeepMemory> {
        self.nbd.keeps_memory()
    }

    fn detaches(&mut self) -> Option<&mut dyn Detach> {
        self.guest.detaches()
    }
}

/// The guest's ring may be left to another process with its requests; there is no successor for NBD clients.
impl TakeBack for Emulated {
    fn recalls(&self, token: Token) -> bool {
        match is_of_nbd(token) {
            true => self.stopped,
            false => self.guest.server.recalls(token),
        }
    }

    fn give_back(&mut self, request: Request) {
        match is_of_nbd(request.token()) {
            // It has waited for space.
            true => self.complete(request, Status::NoSpace),
            false => self.guest.server.give_back(request),
        }
    }

    fn records_in_flight(&self) -> Option<bool> {
        self.guest.server.records_in_flight()
    }
}
