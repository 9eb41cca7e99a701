//! A blkif back end: serves the disk of a Xen guest over rings in pages that the guest grants.
//!
//! [`Server`] serves one device, whose front end it finds through the store, and is the [`disk::Transport`] of the
//! disk. It knows nothing about the disk behind it, and blocks only on replies of the store, each for a bounded time.
//!
//! Invariants: a closing front end gets its responses before its rings are released, since its driver waits for them; a
//! front end is connected only when all requests of the previous one have completed, so that no late write of the old
//! one reaches data of the new one.
//!
//! | file | contents |
//! |---|---|
//! | `state` | the handshake, as a pure function |
//! | `node` | the keys of both ends in the store |
//! | `session` | the actions of the handshake |
//! | `attach_error` | why attaching failed |
//! | `retry` | the retries of failed operations |
//! | `device` | the queues of one front end |
//! | `queue`, `ring`, `abi` | one ring |
//! | `request` | the parser of entries |
//! | `data`, `pool`, `persistent` | access to the guest's pages |
//! | `event` | events to be logged |
//! | `kill_point` | the points at which tests kill the process, and the bugs that they inject |

mod abi;
mod attach_error;
mod data;
mod device;
mod event;
mod kill_point;
#[cfg(test)]
mod model;
mod node;
mod persistent;
mod pool;
mod queue;
mod request;
mod retry;
mod ring;
mod session;
mod state;

use std::fmt::Display;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use disk::{Disconnected, Geometry, Request, Status, Token, Transport};
use memory::Buffer;
use rustix::event::{EventfdFlags, eventfd};
use xen::{DomId, EventChannels, Grants, Port, Store};

use crate::{Detach, Interest, MemoryChange, TakeBack, Timer, Watch, WatchKey};

pub use event::Event;
pub use request::SEGMENTS_MAX;
pub use ring::Broken;

use device::Device;
use event::Log;
use retry::{RetryBudget, RetryTimer};
use session::Session;

/// The largest ring, as a power of two of pages: 512 requests. Linux's front end uses that size.
pub const RING_ORDER_MAX: u32 = 4;

/// The maximum number of queues of one disk.
pub const QUEUES_MAX: u16 = 64;

const STORE: WatchKey = WatchKey(0);
const CHANNELS: WatchKey = WatchKey(1);
const WAKE: WatchKey = WatchKey(2);
const TRIM: WatchKey = WatchKey(3);
const RETRY: WatchKey = WatchKey(4);

/// Memory for large requests is freed when it was not needed for this time.
const TRIM_AFTER: Duration = Duration::from_secs(1);

/// Ports, or events of the store, processed before other work.
const BATCH_MAX: usize = 64;

/// How a guest's pages are accessed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GrantsPolicy {
    /// Data is copied, in one call per pass.
    Copy,
    /// Pages are mapped for each request.
    Map,
    /// Pages stay mapped if the front end supports it; otherwise data is copied.
    Persistent,
    /// The mode measured to be best for the front end that connects.
    #[default]
    Auto,
}

/// The treatment of a front end when the server stops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnStop {
    /// The release of the device is requested, when the server stops at the latest; [`Detach::close`] requests it
    /// earlier, which gives the front end time.
    #[default]
    Close,
    /// It is not notified, and another process takes over its rings.
    Leave,
}

/// The configuration of a device.
#[derive(Clone, Debug)]
pub struct Config {
    /// The guest.
    pub domain: DomId,
    /// The device number.
    pub device: u32,
    /// The path of our node in the store.
    pub backend: String,
    /// Size and limits of the disk.
    pub geometry: Geometry,
    /// Refuse writes even if the disk is writable.
    pub read_only: bool,
    /// How the guest's pages are accessed.
    pub grants: GrantsPolicy,
    /// The largest ring, as a power of two of pages: at most [`RING_ORDER_MAX`].
    pub max_ring_pages_order: u32,
    /// The maximum number of queues: 1 to [`QUEUES_MAX`].
    pub max_queues: u16,
    /// The maximum number of segments of an indirect request, at most [`SEGMENTS_MAX`]; zero to not offer such
    /// requests.
    pub max_segments: u16,
    /// The treatment of the front end when the server stops.
    pub on_stop: OnStop,
}

/// Why the server could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum SetUpError {
    /// A configured limit is out of range.
    #[error("{requested} {what} requested; must be {wanted}")]
    Limit {
        /// The limited item.
        what: &'static str,
        /// The requested number.
        requested: u32,
        /// The permitted range.
        wanted: &'static str,
    },
    /// No eventfd could be created.
    #[error("cannot create an eventfd")]
    Eventfd(#[source] io::Error),
    /// No timer could be created.
    #[error("cannot create a timerfd")]
    Timer(#[source] io::Error),
    /// The store could not be read.
    #[error("cannot find the front end of {backend}")]
    Store {
        /// Our node.
        backend: String,
        /// The cause.
        #[source]
        source: xen::StoreError,
    },
}

/// The interfaces of Xen that a server uses.
struct Xen {
    store: Box<dyn Store>,
    grants: Box<dyn Grants>,
    channels: Box<dyn EventChannels>,
    /// Signalled by the server itself, for work on the next turn of the event loop.
    wake: OwnedFd,
    /// Expires when failed operations are to be retried.
    retry: RetryTimer,
}

/// A blkif server for one device.
pub struct Server {
    xen: Xen,
    session: Session,
    /// Signalled ports to be unmasked before the thread sleeps.
    masked: Vec<Port>,
    /// Expires when unused memory may be released; runs only while there is some, so that a disk wakes twice after it
    /// has become idle.
    trim_timer: Timer,
    trim_armed: bool,
    channel_retries: RetryBudget,
    unmask_retries: RetryBudget,
    store_retries: RetryBudget,
    stopped: bool,
    log: Log,
}

impl Server {
    /// Creates a server, which does nothing until it is started. Fails if the store cannot be read.
    pub fn new(
        config: Config,
        mut store: Box<dyn Store>,
        grants: Box<dyn Grants>,
        channels: Box<dyn EventChannels>,
    ) -> Result<Server, SetUpError> {
        config.check()?;
        let nodes = node::DeviceNodes::find(&mut *store, &config.backend, config.domain, config.device);
        let failed = |source| SetUpError::Store { backend: config.backend.clone(), source };
        let nodes = nodes.map_err(failed)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| SetUpError::Eventfd(errno.into()))?;
        let trim_timer = Timer::new().map_err(SetUpError::Timer)?;
        let retry = RetryTimer::new().map_err(SetUpError::Timer)?;
        let xen = Xen { store, grants, channels, wake, retry };
        let session = Session::new(config, nodes, Buffer::zeroed(pool::STAGING_LEN));
        let (masked, log, channel_retries, unmask_retries, store_retries) = Default::default();
        Ok(Server {
            xen,
            session,
            trim_timer,
            trim_armed: false,
            masked,
            channel_retries,
            unmask_retries,
            store_retries,
            stopped: false,
            log,
        })
    }

    /// The events since the last call, for the log.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.log.take()
    }

    /// Returns true if the front end is connected.
    pub fn is_connected(&self) -> bool {
        self.session.device.as_ref().is_some_and(|device| !device.is_finishing())
    }

    /// Returns true if the device is being closed and there is no front end to wait for.
    pub fn is_closed(&self) -> bool {
        self.session.is_closed()
    }

    /// Collects the signalled ports. Each stays masked until the thread is about to sleep: a guest that signals
    /// continuously wakes it once.
    fn take_ports(&mut self) {
        for _ in 0..BATCH_MAX {
            match self.xen.channels.take(&mut self.masked) {
                Ok(true) => {}
                Ok(false) => return self.channel_retries.succeeded(),
                Err(error) => {
                    self.log.failed("cannot take events from the guest", &error);
                    return self.channel_retries.failed(&mut self.xen, &mut self.log);
                }
            }
        }
        self.xen.wake();
    }

    /// Collects events of the store, and reads both nodes in any case.
    fn take_store_events(&mut self) {
        if self.session.is_store_lost() {
            return;
        }
        let mut more = true;
        for _ in 0..BATCH_MAX {
            match self.xen.store.take_event() {
                Ok(Some(_)) => {}
                Ok(None) => {
                    self.store_retries.succeeded();
                    more = false;
                    break;
                }
                Err(error) => {
                    if self.session.store_failed("cannot take events from the store", &error, &mut self.log) {
                        self.store_retries.try_again(&self.xen);
                    }
                    more = false;
                    break;
                }
            }
        }
        self.session.update(&mut self.xen, &mut self.log);
        if more {
            self.xen.wake();
        }
    }

    /// Arms the trim timer if there is memory to be released.
    fn arm_trim(&mut self) {
        if self.trim_armed || !self.session.device.as_ref().is_some_and(Device::has_excess_memory) {
            return;
        }
        match self.trim_timer.set(TRIM_AFTER) {
            Ok(()) => self.trim_armed = true,
            Err(error) => self.log.failed("cannot set a timer", &error),
        }
    }

    fn trim_expired(&mut self) {
        // The value read is the number of expirations; reading it clears the readiness.
        rustix::io::read(&self.trim_timer, &mut [0; 8]).ok();
        self.trim_armed = false;
        if let Some(device) = &mut self.session.device {
            device.trim();
        }
    }

    fn unmask(&mut self) {
        let Server { xen, session, masked, unmask_retries, log, .. } = self;
        let mut failed = false;
        masked.retain(|&port| {
            let ours = session.device.as_ref().is_some_and(|device| device.ports().any(|own| own == port));
            let error = ours.then(|| xen.channels.unmask(port).err()).flatten();
            if let Some(error) = &error {
                log.failed("cannot wait for the guest", error);
            }
            failed |= error.is_some();
            error.is_some()
        });
        match failed {
            true => unmask_retries.failed(xen, log),
            false => unmask_retries.succeeded(),
        }
    }
}

impl Config {
    fn check(&self) -> Result<(), SetUpError> {
        let Config { max_ring_pages_order, max_queues, max_segments, .. } = *self;
        let bad = |what, requested, wanted| Err(SetUpError::Limit { what, requested, wanted });
        if max_ring_pages_order > RING_ORDER_MAX {
            return bad("as ring page order", max_ring_pages_order, "0 to 4");
        }
        if !(1..=QUEUES_MAX).contains(&max_queues) {
            return bad("queues", max_queues.into(), "1 to 64");
        }
        if max_segments > SEGMENTS_MAX {
            return bad("segments", max_segments.into(), "0 to 256");
        }
        Ok(())
    }
}

impl Xen {
    fn wake(&self) {
        // Does not block, and fails only if the eventfd is saturated and thus signalled already.
        rustix::io::write(&self.wake, &1u64.to_ne_bytes()).ok();
    }
}

impl Transport for Server {
    fn pop(&mut self, geometry: &Geometry) -> Option<Request> {
        if self.stopped {
            return None;
        }
        self.session.device.as_mut()?.pop(geometry, &mut *self.xen.grants, &mut self.log)
    }

    fn complete(&mut self, request: Request, status: Status) {
        if self.session.complete(request, Some(status), &mut *self.xen.grants) {
            self.xen.wake();
        }
    }

    fn publish(&mut self) -> Result<(), Disconnected> {
        if let Some(device) = &mut self.session.device {
            device.publish(&mut *self.xen.grants, &mut *self.xen.channels, &mut self.log);
            if device.has_pending_notification() {
                self.xen.retry.arm(&mut self.log);
            }
            if device.is_finishing() && device.is_finished() {
                self.xen.wake();
            }
        }
        // Not an error for the disk if the front end has disconnected: it may reconnect.
        Ok(())
    }
}

impl crate::Server for Server {
    fn start(&mut self, watch: &mut dyn Watch) -> io::Result<()> {
        self.session.watch(&mut *self.xen.store).map_err(io::Error::other)?;
        watch.watch(self.xen.wake.as_fd(), Interest::Read, WAKE)?;
        watch.watch(self.xen.channels.fd(), Interest::Read, CHANNELS)?;
        watch.watch(self.xen.store.fd(), Interest::Read, STORE)?;
        watch.watch(self.trim_timer.as_fd(), Interest::Read, TRIM)?;
        watch.watch(self.xen.retry.as_fd(), Interest::Read, RETRY)?;
        self.xen.wake();
        Ok(())
    }

    fn ready(&mut self, key: WatchKey, _watch: &mut dyn Watch) {
        if self.stopped {
            return;
        }
        match key {
            CHANNELS => self.take_ports(),
            STORE => self.take_store_events(),
            TRIM => self.trim_expired(),
            RETRY => {
                self.xen.retry.expired();
                self.xen.wake();
            }
            WAKE => {
                self.take_ports();
                self.take_store_events();
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
            Some(device) if !self.stopped => device.prepare_to_sleep(&mut self.log),
            _ => true,
        };
        if may {
            self.unmask();
            self.arm_trim();
        }
        may
    }

    fn resized(&mut self, geometry: &Geometry, _watch: &mut dyn Watch) {
        self.session.resized(geometry, &mut self.xen, &mut self.log);
    }

    fn place_of(&self, token: Token) -> Option<String> {
        Some(device::place_of(token))
    }

    fn peers(&self) -> usize {
        usize::from(self.is_connected())
    }

    #[inline]
    fn log_events(&mut self, log: &mut dyn FnMut(&dyn Display)) {
        self.take_events().iter().for_each(|event| log(event));
    }

    fn stop(&mut self, watch: &mut dyn Watch) {
        self.stopped = true;
        [WAKE, CHANNELS, STORE, TRIM, RETRY].into_iter().for_each(|key| watch.forget(key));
        self.session.stop(&mut self.xen, &mut self.log);
    }

    /// Available if the rings are left to the next process, which takes unanswered requests from them.
    fn takes_back(&mut self) -> Option<&mut dyn TakeBack> {
        if self.session.config.on_stop == OnStop::Leave { Some(self) } else { None }
    }

    fn detaches(&mut self) -> Option<&mut dyn Detach> {
        Some(self)
    }
}

impl TakeBack for Server {
    fn recalls(&self, _token: Token) -> bool {
        self.stopped
    }

    fn give_back(&mut self, request: Request) {
        self.session.complete(request, None, &mut *self.xen.grants);
    }

    /// None: there is no record besides the rings themselves.
    fn records_in_flight(&self) -> Option<bool> {
        None
    }
}

impl Detach for Server {
    fn is_finishing(&self) -> bool {
        // Pages of an earlier front end are unmapped when its requests have completed.
        self.session.orphans > 0 || self.session.device.as_ref().is_some_and(Device::is_finishing)
    }

    fn close(&mut self) -> bool {
        self.session.close(&mut self.xen, &mut self.log);
        self.session.config.on_stop == OnStop::Leave || self.is_closed()
    }

    /// Popped requests must still be completed and published; others stay in the rings.
    fn leave(&mut self) {
        self.session.leave();
    }

    fn is_over(&self) -> bool {
        self.session.has_ended()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.session.release_all(&mut self.xen, &mut self.log);
    }
}
