//! A blkif back end: the disk of a Xen guest, over rings in pages that the guest grants.
//!
//! [`Server`] serves one device, whose front end it finds in the store, and is the [`disk::Transport`] of the disk. It knows
//! nothing about the disk behind it, and waits for nothing but answers of the store, each for a bounded time.
//!
//! Invariants: one that closes has its answers before its rings are let go, since its driver waits for them; a front end is
//! connected only when the requests of the one before are all completed, so that no late write of
//! the old falls into what the new one does.
//!
//! | file | knows |
//! |---|---|
//! | `state` | the handshake, as a function |
//! | `node` | what both ends write about themselves |
//! | `session` | does what the handshake asks for |
//! | `not_connected` | why it could not be done |
//! | `retry` | what is tried again, and when |
//! | `device` | the queues of one front end |
//! | `queue`, `ring`, `abi` | one ring |
//! | `request` | what an entry asks for |
//! | `data`, `pool`, `persistent` | the guest's pages |
//! | `event` | what to log |
//! | `moment` | where tests kill it, and mistakes that they must find |

mod abi;
mod data;
mod device;
mod event;
#[cfg(test)]
mod model;
mod moment;
mod node;
mod not_connected;
mod persistent;
mod pool;
mod queue;
mod request;
mod retry;
mod ring;
mod session;
mod state;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use disk::{Disconnected, Geometry, Request, Status, Token, Transport};
use memory::Buffer;
use rustix::event::{EventfdFlags, eventfd};
use xen::{DomId, EventChannels, Grants, Port, Store};

use crate::{Interest, MemoryChange, Timer, Watch, WatchKey};

pub use event::Event;
pub use request::SEGMENTS_MAX;
pub use ring::Broken;

use device::Device;
use event::Log;
use retry::{Patience, Retry};
use session::Session;

/// The largest ring: 16 pages, 512 requests. Linux's front end asks for as much.
pub const RING_ORDER_MAX: u32 = 4;

/// Queues of one disk.
pub const QUEUES_MAX: u16 = 64;

const STORE: WatchKey = WatchKey(0);
const CHANNELS: WatchKey = WatchKey(1);
const WAKE: WatchKey = WatchKey(2);
const REST: WatchKey = WatchKey(3);
const RETRY: WatchKey = WatchKey(4);

/// How long memory that only large requests need is kept for the next of them.
const REST_AFTER: Duration = Duration::from_secs(1);

/// Ports, or events of the store, taken in before others have their turn.
const TURN: usize = 64;

/// How a guest's pages are reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GrantsPolicy {
    /// Data are copied, all of a pass in one call.
    Copy,
    /// Pages are mapped for each request.
    Map,
    /// Pages stay mapped if the front end agrees; else data are copied.
    Persistent,
    /// What has been measured to be best for the front end that comes.
    #[default]
    Auto,
}

/// What becomes of a front end when the server stops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnStop {
    /// It is asked to let the device go, at the latest when the server stops: [`Server::close`] leaves it time for that.
    #[default]
    Close,
    /// It is not told, and another process takes its rings over.
    Leave,
}

/// What to serve, and to whom.
#[derive(Clone, Debug)]
pub struct Config {
    /// The guest.
    pub domain: DomId,
    /// The number of the device.
    pub device: u32,
    /// Path of our node in the store.
    pub backend: String,
    /// Size and limits of the disk.
    pub geometry: Geometry,
    /// The guest may not write, whatever the disk allows.
    pub read_only: bool,
    /// How its pages are reached.
    pub grants: GrantsPolicy,
    /// The largest ring, as a power of two of pages: at most [`RING_ORDER_MAX`].
    pub max_ring_pages_order: u32,
    /// Queues offered: 1 to [`QUEUES_MAX`].
    pub max_queues: u16,
    /// Segments of an indirect request: at most [`SEGMENTS_MAX`]; zero for no such requests.
    pub max_segments: u16,
    /// What becomes of the front end when the server stops.
    pub on_stop: OnStop,
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum SetUpError {
    /// Something was asked for that cannot be.
    #[error("{what} of {asked} are too many or too few: {wanted}")]
    Limit {
        /// What.
        what: &'static str,
        /// How much of it.
        asked: u32,
        /// What there may be.
        wanted: &'static str,
    },
    /// The system did not let us.
    #[error("cannot make an eventfd")]
    Eventfd(#[source] io::Error),
    /// Likewise.
    #[error("cannot make a timerfd")]
    Timer(#[source] io::Error),
    /// The store did not say where the front end is.
    #[error("cannot find the front end of {backend}")]
    Store {
        /// Our node.
        backend: String,
        /// Why.
        #[source]
        source: xen::StoreError,
    },
}

/// What of Xen a server uses.
struct Machine {
    store: Box<dyn Store>,
    grants: Box<dyn Grants>,
    channels: Box<dyn EventChannels>,
    /// Signalled by ourselves, for what has to wait until there is a turn again.
    wake: OwnedFd,
    /// Runs out when what has failed is to be tried again.
    retry: Retry,
}

/// A blkif server for one device.
pub struct Server {
    machine: Machine,
    session: Session,
    /// Ports that were reported and are to be unmasked before we sleep.
    masked: Vec<Port>,
    /// Runs out when memory that is kept may be given up; runs only while there is such, so that an idle disk wakes once.
    rest: Timer,
    resting: bool,
    hearing: Patience,
    unmasking: Patience,
    looking: Patience,
    stopped: bool,
    log: Log,
}

impl Server {
    /// A server that has not begun.
    pub fn new(
        config: Config,
        mut store: Box<dyn Store>,
        grants: Box<dyn Grants>,
        channels: Box<dyn EventChannels>,
    ) -> Result<Server, SetUpError> {
        config.check()?;
        let nodes = node::Nodes::find(&mut *store, &config.backend, config.domain, config.device);
        let failed = |source| SetUpError::Store { backend: config.backend.clone(), source };
        let nodes = nodes.map_err(failed)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| SetUpError::Eventfd(errno.into()))?;
        let rest = Timer::new().map_err(SetUpError::Timer)?;
        let retry = Retry::new().map_err(SetUpError::Timer)?;
        let machine = Machine { store, grants, channels, wake, retry };
        let session = Session::new(config, nodes, Buffer::zeroed(pool::STAGING_LEN));
        let (masked, log, hearing, unmasking, looking) = Default::default();
        Ok(Server { machine, session, rest, resting: false, masked, hearing, unmasking, looking, stopped: false, log })
    }

    /// What has happened since the last call, for the log.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.log.take()
    }

    /// Whether the front end is connected.
    pub fn is_connected(&self) -> bool {
        self.session.device.as_ref().is_some_and(|device| !device.is_finishing())
    }

    /// Stopping will not tell the front end, whatever was configured: another process takes its rings over, or the guest is
    /// gone. Requests that were popped are to be completed and published as ever; those that were not stay in the rings.
    pub fn leave(&mut self) {
        self.session.leave();
    }

    /// Asks the front end to let the device go, if that is what stopping means. It is served until it has.
    pub fn close(&mut self) {
        self.session.close(&mut self.machine, &mut self.log);
    }

    /// Whether the device was to be closed, and there is nobody to wait for.
    pub fn is_closed(&self) -> bool {
        self.session.is_closed()
    }

    /// Whether the device has come to its end: it is closed, and not wanted any more.
    pub fn has_ended(&self) -> bool {
        self.session.has_ended()
    }

    /// Takes in which ports were signalled. Each is masked until we are about to sleep: a guest that signals without end
    /// wakes us once.
    fn hear(&mut self) {
        for _ in 0..TURN {
            match self.machine.channels.take(&mut self.masked) {
                Ok(true) => {}
                Ok(false) => return self.hearing.worked(),
                Err(error) => {
                    self.log.failed("cannot take events from the guest", &error);
                    return self.hearing.failed(&mut self.machine, &mut self.log);
                }
            }
        }
        self.machine.wake();
    }

    /// Takes in what changed in the store. Whatever it was, both nodes are looked at.
    fn look(&mut self) {
        if self.session.is_lost() {
            return;
        }
        let mut more = true;
        for _ in 0..TURN {
            match self.machine.store.take_event() {
                Ok(Some(_)) => {}
                Ok(None) => {
                    self.looking.worked();
                    more = false;
                    break;
                }
                Err(error) => {
                    if self.session.store_failed("cannot take events from the store", &error, &mut self.log) {
                        self.looking.failed_once_more(&self.machine);
                    }
                    more = false;
                    break;
                }
            }
        }
        self.session.examine(&mut self.machine, &mut self.log);
        if more {
            self.machine.wake();
        }
    }

    /// Has the timer run if there is memory to be given up.
    fn begin_rest(&mut self) {
        if self.resting || !self.session.device.as_ref().is_some_and(Device::keeps_much) {
            return;
        }
        match self.rest.set(REST_AFTER) {
            Ok(()) => self.resting = true,
            Err(error) => self.log.failed("cannot set a timer", &error),
        }
    }

    fn take_rest(&mut self) {
        // What is read is how often it ran out, and that it is read has it wait for the next time.
        rustix::io::read(&self.rest, &mut [0; 8]).ok();
        self.resting = false;
        if let Some(device) = &mut self.session.device {
            device.rest();
        }
    }

    fn unmask(&mut self) {
        let Server { machine, session, masked, unmasking, log, .. } = self;
        let mut failed = false;
        masked.retain(|&port| {
            let ours = session.device.as_ref().is_some_and(|device| device.ports().any(|own| own == port));
            let error = ours.then(|| machine.channels.unmask(port).err()).flatten();
            if let Some(error) = &error {
                log.failed("cannot wait for the guest", error);
            }
            failed |= error.is_some();
            error.is_some()
        });
        match failed {
            true => unmasking.failed(machine, log),
            false => unmasking.worked(),
        }
    }
}

impl Config {
    fn check(&self) -> Result<(), SetUpError> {
        let Config { max_ring_pages_order, max_queues, max_segments, .. } = *self;
        let bad = |what, asked, wanted| Err(SetUpError::Limit { what, asked, wanted });
        if max_ring_pages_order > RING_ORDER_MAX {
            return bad("rings with an order", max_ring_pages_order, "0 to 4");
        }
        if !(1..=QUEUES_MAX).contains(&max_queues) {
            return bad("queues to the number", max_queues.into(), "1 to 64");
        }
        if max_segments > SEGMENTS_MAX {
            return bad("segments to the number", max_segments.into(), "0 to 256");
        }
        Ok(())
    }
}

impl Machine {
    fn wake(&self) {
        // It does not block, and one that is full is signalled already.
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).ok();
    }
}

impl Transport for Server {
    fn pop(&mut self, geometry: &Geometry) -> Option<Request> {
        if self.stopped {
            return None;
        }
        self.session.device.as_mut()?.pop(geometry, &mut *self.machine.grants, &mut self.log)
    }

    fn complete(&mut self, request: Request, status: Status) {
        if self.session.complete(request, Some(status), &mut *self.machine.grants) {
            self.machine.wake();
        }
    }

    fn publish(&mut self) -> Result<(), Disconnected> {
        if let Some(device) = &mut self.session.device {
            device.publish(&mut *self.machine.grants, &mut *self.machine.channels, &mut self.log);
            if device.owes_signal() {
                self.machine.retry.arm(&mut self.log);
            }
            if device.is_finishing() && device.is_finished() {
                self.machine.wake();
            }
        }
        // A front end that is gone is no news for the disk: it may come again.
        Ok(())
    }
}

impl crate::Server for Server {
    fn start(&mut self, watch: &mut dyn Watch) -> io::Result<()> {
        self.session.watch(&mut *self.machine.store).map_err(io::Error::other)?;
        watch.watch(self.machine.wake.as_fd(), Interest::Read, WAKE)?;
        watch.watch(self.machine.channels.fd(), Interest::Read, CHANNELS)?;
        watch.watch(self.machine.store.fd(), Interest::Read, STORE)?;
        watch.watch(self.rest.as_fd(), Interest::Read, REST)?;
        watch.watch(self.machine.retry.as_fd(), Interest::Read, RETRY)?;
        self.machine.wake();
        Ok(())
    }

    fn ready(&mut self, key: WatchKey, _watch: &mut dyn Watch) {
        if self.stopped {
            return;
        }
        match key {
            CHANNELS => self.hear(),
            STORE => self.look(),
            REST => self.take_rest(),
            RETRY => {
                self.machine.retry.ran_out();
                self.machine.wake();
            }
            WAKE => {
                self.hear();
                self.look();
            }
            _ => {}
        }
    }

    #[inline]
    fn memory_change(&mut self) -> Option<MemoryChange> {
        self.session.take_memory_change()
    }

    fn may_sleep(&mut self) -> bool {
        let may = match &mut self.session.device {
            Some(device) if !self.stopped => device.may_sleep(&mut self.log),
            _ => true,
        };
        if may {
            self.unmask();
            self.begin_rest();
        }
        may
    }

    fn resized(&mut self, geometry: &Geometry, _watch: &mut dyn Watch) {
        self.session.resized(geometry, &mut self.machine, &mut self.log);
    }

    /// What has no answer stays in its ring, and the next process takes it from there.
    fn takes_back(&self) -> bool {
        self.session.config.on_stop == OnStop::Leave
    }

    fn recalls(&self, _token: Token) -> bool {
        self.stopped && self.takes_back()
    }

    fn give_back(&mut self, request: Request) {
        if !self.takes_back() {
            return self.complete(request, Status::NoSpace);
        }
        self.session.complete(request, None, &mut *self.machine.grants);
    }

    fn place_of(&self, token: Token) -> Option<String> {
        Some(device::place_of(token))
    }

    fn peers(&self) -> usize {
        usize::from(self.is_connected())
    }

    fn stop(&mut self, watch: &mut dyn Watch) {
        self.stopped = true;
        [WAKE, CHANNELS, STORE, REST, RETRY].into_iter().for_each(|key| watch.forget(key));
        self.session.stop(&mut self.machine, &mut self.log);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.session.let_go(&mut self.machine, &mut self.log);
    }
}
