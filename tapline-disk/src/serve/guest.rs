//! A disk of a Xen guest: finds the guest, becomes the only process that serves the disk, and cleans up at its end.
//!
//! [`blkif`] handles the rings, and [`vm::xen`] the contents of xenstore nodes. Invariant: nothing is written into
//! xenstore before the image and the kernel's devices are open, so that a process that cannot serve leaves no trace;
//! when the guest is gone, or the device was detached, the process exits and unmaps everything.

use std::fmt::Display;
use std::fs::File;
use std::os::fd::AsFd;
use std::time::Duration;

use control::handed::Lent;
use disk::{Disconnected, Geometry, Request, Status, Token, Transport};
use transport::blkif::{self, GrantsPolicy, OnStop, RING_ORDER_MAX, SEGMENTS_MAX};
use transport::nbd;
use transport::{Detach, Interest, MemoryChange, Server, TakeBack, Timer, Watch, WatchKey};
use vm::xen::give::{Wish, is_read_only, make_own_end};
use vm::xen::statistics::{Files, Statistics};
use vm::xen::take;
use xen::kernel::{Evtchn, Gntdev};
use xen::xenstored::XenstoredClient;
use xen::{EventChannels, Grants, Store, StoreError};

use super::blkback_stats::BlkbackStats;
use super::event_loop::{EventLoop, Serving};
use crate::files;
use crate::process::failure::{Exit, Failure};
use crate::process::log::say;
use arguments::{GrantPolicy, Serve, XenDisk};
use vm::xen::claim::{Claim, Places};
use vm::xen::device::{Device, remove_own_end, store_failed, text, together};
use vm::xen::local::shown_to_xl;
use vm::xen::{domain, firmware, machine};

mod emulated;
mod keys;

use crate::serve::polling::Settings;
use emulated::Emulated;
use keys::{KTHREAD_PID, requested_polling, write_keys};

/// A guest's disk that only this process serves.
pub struct Claimed {
    device: Device,
    /// Whether the toolstack has made it read-only for the guest.
    pub read_only: bool,
    store: Box<dyn Store>,
    /// Reports whether the guest still exists.
    domains: Box<dyn Store>,
    grants: Box<dyn Grants>,
    channels: Box<dyn EventChannels>,
    /// Files for statistics, if they were passed.
    statistics: Option<Files>,
    /// `None` if files were passed: the sender makes sure that there is one process.
    claim: Option<Claim>,
}

impl Claimed {
    /// Finds the guest and what is needed to serve it.
    pub fn find(files: &files::Files, serve: &Serve, disk: &XenDisk) -> Result<Claimed, Failure> {
        let mut store = store(files, Lent::Store)?;
        let own = domain::own(&mut store)?;
        let guest = domain::find(&mut store, &disk.domain)?;
        let device = Device { own, kind: serve.xen_backend.clone(), guest, vdev: disk.vdev };
        let cannot = |error: std::io::Error| {
            // The error names the device, what was tried and what can be done.
            Failure::new(format!("serve {device}"), error)
        };
        let grants = match files.lent(Lent::Grants)? {
            Some(lent) => Gntdev::from_fd(lent),
            None => Gntdev::open().map_err(cannot)?,
        };
        let channels = match files.lent(Lent::EventChannels)? {
            Some(lent) => Evtchn::from_fd(lent),
            None => Evtchn::open().map_err(cannot)?,
        };
        let claim = if files.are_handed() { None } else { Some(Claim::take(&Places::of_host(), &device)?) };
        let read_only = is_read_only(&mut store, &device)?.unwrap_or(false);
        let (store, domains) = (Box::new(store), Box::new(self::store(files, Lent::Domains)?));
        let (grants, channels) = (Box::new(grants), Box::new(channels));
        Ok(Claimed { device, read_only, store, domains, grants, channels, statistics: lent_statistics(files), claim })
    }
}

/// Connects to xenstore: by a passed connection, or a new one.
fn store(files: &files::Files, connection: Lent) -> Result<XenstoredClient, Failure> {
    match files.lent(connection)? {
        Some(lent) => XenstoredClient::from_fd(lent).map_err(|error| Failure::new("talk to xenstore", error)),
        None => Ok(machine::store()?),
    }
}

/// Serves until the device is closed or a signal arrives, including the NBD connection for the guest's firmware in
/// `emulated`.
pub fn run(
    serve: &Serve,
    claimed: Claimed,
    emulated: Option<nbd::Server>,
    mut serving: Serving,
) -> Result<Exit, Failure> {
    let Claimed { device, read_only, mut store, domains, grants, channels, statistics, claim } = claimed;
    let read_only = read_only || serve.read_only;
    // They exist before xenstore refers readers to them.
    let blkback_stats = open_stats(&serving.files, &Places::of_host(), &device, statistics);
    make_own_end(&mut *store, &device, Wish { read_only, kept: false })?;
    write_keys(&serving.files, &mut *store, &device, serve)?;
    if let Some(most) = requested_polling(&mut *store, &device)? {
        let mode = serving.polling.settings().mode;
        serving.polling.set(Settings::new(mode, most));
    }
    let backend =
        Backend::new(config(serve, &device, read_only, serving.disk.geometry()), store, domains, grants, channels)?;
    serving.blkback_stats = blkback_stats;
    say(format_args!("serving {device}: {}", device.backend()));
    // The loop drops everything; the claim is dropped last, when nothing of the guest is mapped any more.
    let ended = match emulated {
        None => EventLoop::new(backend, serving).and_then(EventLoop::run),
        Some(nbd) => EventLoop::new(Emulated::new(backend, nbd), serving).and_then(EventLoop::run),
    };
    drop(claim);
    ended
}

/// Takes the files passed for statistics, before images are opened, like all descriptors for Xen.
fn lent_statistics(files: &files::Files) -> Option<Files> {
    let lent = |lent| files.lent_optional(lent).map(File::from);
    Some(Files { vbd3: lent(Lent::Statistics)?, td3: lent(Lent::StatisticsByPid)? })
}

/// Opens the statistics; a failure is only logged, because the disk must be served. With passed files no others can be
/// created, so these are passed too.
fn open_stats(files: &files::Files, places: &Places, device: &Device, handed: Option<Files>) -> Option<BlkbackStats> {
    let place = &places.statistics;
    let opened = match handed {
        Some(files) => BlkbackStats::over(files),
        None if files.are_handed() => return None,
        None => BlkbackStats::open(&Statistics::of(place, device.guest, device.vdev)),
    };
    let failed = |error| say(format_args!("no statistics for xsiostat and its like in {}: {error}", place.display()));
    opened.map_err(failed).ok()
}

fn config(serve: &Serve, device: &Device, read_only: bool, geometry: Geometry) -> blkif::Config {
    blkif::Config {
        domain: device.guest,
        device: device.vdev.number(),
        backend: device.backend(),
        geometry,
        read_only,
        grants: match serve.grants {
            GrantPolicy::Auto => GrantsPolicy::Auto,
            GrantPolicy::Copy => GrantsPolicy::Copy,
            GrantPolicy::Map => GrantsPolicy::Map,
            GrantPolicy::Persistent => GrantsPolicy::Persistent,
        },
        max_ring_pages_order: RING_ORDER_MAX,
        max_queues: serve.queues,
        max_segments: SEGMENTS_MAX,
        on_stop: match serve.on_stop {
            arguments::OnStop::Close => OnStop::Close,
            arguments::OnStop::Leave => OnStop::Leave,
        },
    }
}

/// The key of events about domains, outside the range of the server's keys.
const DOMAINS: WatchKey = WatchKey(1 << 32);
const TIME_IS_UP: WatchKey = WatchKey((1 << 32) + 1);

/// The time that a guest has to release the disk when the process stops. Linux's driver takes milliseconds, but while
/// file systems are mounted it waits for them without limit.
const CLOSING_MAX: Duration = Duration::from_secs(1);

/// A server, and whether its guest still exists.
struct Backend {
    server: blkif::Server,
    device: Device,
    /// A connection of its own, because the server's receives the server's replies and events.
    store: Box<dyn Store>,
    guest: GuestState,
    leaving: bool,
    /// Whether the guest was requested to release the disk because the process stops.
    closing: bool,
    /// Limits the time for that; it runs only then.
    timer: Timer,
    time_is_up: bool,
    /// Whether xl's configuration names the disk, so that xl has its own node for it.
    attached_by_xl: bool,
    /// The node where xl requests the detach of a disk of its own domain, and waits for it.
    shown_to_xl: Option<String>,
}

/// The state of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GuestState {
    /// The toolstack has created its nodes, but not yet the domain.
    Awaited,
    /// The domain exists.
    Seen,
    /// The domain is dying or dead, its nodes are gone, or xl has detached the disk.
    Gone,
}

impl Backend {
    fn new(
        config: blkif::Config,
        server: Box<dyn Store>,
        store: Box<dyn Store>,
        grants: Box<dyn Grants>,
        channels: Box<dyn EventChannels>,
    ) -> Result<Backend, Failure> {
        let device = Device::of_backend(&config.backend);
        let device =
            device.ok_or_else(|| Failure::new("serve a guest's disk", "its xenstore node has no such path"))?;
        let timer = Timer::new().map_err(|error| Failure::new("create a timer", error))?;
        let (guest, leaving) = (GuestState::Awaited, config.on_stop == OnStop::Leave);
        let (closing, time_is_up, attached_by_xl) = (false, false, false);
        let server = blkif::Server::new(config, server, grants, channels).map_err(Failure::said)?;
        let shown_to_xl = shown_to_xl(&device);
        let mut backend =
            Backend { server, device, store, guest, leaving, closing, timer, time_is_up, attached_by_xl, shown_to_xl };
        backend.attached_by_xl = backend.has_xl_node()?;
        Ok(backend)
    }

    fn has_xl_node(&mut self) -> Result<bool, Failure> {
        let theirs = text(&mut *self.store, None, &format!("{}/backend", self.device.of_xl()))?;
        Ok(theirs.is_some_and(|backend| backend == self.device.backend()))
    }

    /// Subscribes to the creation and destruction of domains. A destroyed guest dies before its nodes disappear, and
    /// cannot be fully dead before its pages are unmapped here; one that shuts down closes its end first, which is not
    /// reported. Its name disappears with its nodes, and of these only that is written by the toolstack alone.
    fn watch_domains(&mut self) -> Result<(), Failure> {
        let name = format!("/local/domain/{}/name", self.device.guest);
        let shown = self.shown_to_xl.as_deref();
        for path in ["@introduceDomain", "@releaseDomain", &name].into_iter().chain(shown) {
            match self.store.watch(path, "guest") {
                // Only privileged domains are notified about others, unless their toolstack permits it (XSA-115). The
                // name is a substitute.
                Err(StoreError::Refused { code, .. }) if code == "EACCES" && path.starts_with('@') => {}
                watched => watched.map_err(store_failed)?,
            }
        }
        Ok(())
    }

    /// Processes events about domains.
    fn take_domain_events(&mut self) {
        // Repeated events about domains are handled as one.
        loop {
            match self.store.take_event() {
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) => return self.store_has_failed(error),
            }
        }
        self.update_guest();
        self.check_xl_request().unwrap_or_else(say);
    }

    /// Handles a request of xl. xl considers its disk detached when its node is Closed; that is written when this
    /// process stops.
    fn check_xl_request(&mut self) -> Result<(), Failure> {
        if let Some(shown) = &self.shown_to_xl {
            if text(&mut *self.store, None, shown)?.as_deref() == Some("5") {
                take::ask(&mut *self.store, &self.device)?;
            }
        }
        Ok(())
    }

    /// Reports the detach to xl, if it waits for that.
    fn confirm_to_xl(&mut self) -> Result<(), Failure> {
        if let Some(shown) = &self.shown_to_xl {
            if text(&mut *self.store, None, shown)?.is_some() {
                self.store.write(None, shown, b"6").map_err(store_failed)?;
            }
        }
        Ok(())
    }

    /// Starts the timer; returns false if that fails, since nothing would end the wait.
    fn start_timer(&self) -> bool {
        let set = self.timer.set(CLOSING_MAX);
        set.map_err(|error| say(format_args!("cannot wait for the guest to release the disk: {error}"))).is_ok()
    }

    /// Logs that the connection to xenstore failed. The guest's I/O does not need xenstore. Everything else does, and a
    /// restarted xenstored may have lost the disk's nodes, which would stop it. So an administrator must decide to
    /// reconnect.
    fn store_has_failed(&mut self, error: StoreError) {
        if !matches!(error, StoreError::Lost { .. }) {
            return say(store_failed(error));
        }
        let Device { guest, vdev, .. } = &self.device;
        say(error);
        say(format_args!("still serving {}, but a detach or the end of its guest will not be noticed", self.device));
        say(format_args!("when xenstore is back and has the disk: tapline xen upgrade {guest} {vdev}"));
        say(format_args!("to stop it, even without xenstore: tapline xen detach {guest} {vdev} --force"));
    }

    /// Removes a key from our backend's node.
    fn forget(&mut self, key: &str) {
        let path = format!("{}/{key}", self.device.backend());
        self.store.remove(None, &path).map_err(store_failed).unwrap_or_else(say);
    }

    fn update_guest(&mut self) {
        match self.guest_state() {
            Ok(state) => self.guest = state,
            Err(failure) => say(failure),
        }
    }

    /// Records that the guest exists because its driver is connected. A guest may be created, connect and be destroyed
    /// between two queries, and would otherwise be waited for forever.
    fn note_driver(&mut self) {
        if self.guest == GuestState::Awaited && self.server.peers() > 0 {
            self.guest = GuestState::Seen;
        }
    }

    fn guest_state(&mut self) -> Result<GuestState, Failure> {
        let node = format!("/local/domain/{}", self.device.guest);
        let gone = self.guest == GuestState::Gone || text(&mut *self.store, None, &node)?.is_none();
        if gone || (self.attached_by_xl && !self.has_xl_node()?) {
            return Ok(GuestState::Gone);
        }
        Ok(match (self.guest, self.store.is_introduced(self.device.guest).map_err(store_failed)?) {
            (_, true) => GuestState::Seen,
            (GuestState::Awaited, false) => GuestState::Awaited,
            (_, false) => GuestState::Gone,
        })
    }
}

impl Drop for Backend {
    /// Removes the nodes of a guest that was destroyed: no other process knows of them.
    fn drop(&mut self) {
        if self.guest == GuestState::Gone {
            let device = &self.device;
            let removed = together(&mut *self.store, |store, within| remove_own_end(store, within, device));
            removed.unwrap_or_else(say);
            firmware::hide(&mut *self.store, device).unwrap_or_else(say);
        }
    }
}

impl Transport for Backend {
    fn pop(&mut self, geometry: &Geometry) -> Option<Request> {
        self.server.pop(geometry)
    }

    fn complete(&mut self, request: Request, status: Status) {
        self.server.complete(request, status);
    }

    fn publish(&mut self) -> Result<(), Disconnected> {
        self.server.publish()
    }
}

impl Server for Backend {
    fn start(&mut self, watch: &mut dyn Watch) -> std::io::Result<()> {
        self.watch_domains().map_err(|failure| std::io::Error::other(failure.to_string()))?;
        watch.watch(self.store.fd(), Interest::Read, DOMAINS)?;
        // The guest may be destroyed before the first event of xenstore arrives.
        self.update_guest();
        watch.watch(self.timer.as_fd(), Interest::Read, TIME_IS_UP)?;
        self.server.start(watch)?;
        self.note_driver();
        Ok(())
    }

    fn ready(&mut self, key: WatchKey, watch: &mut dyn Watch) {
        match key {
            DOMAINS => self.take_domain_events(),
            TIME_IS_UP => self.time_is_up = true,
            key => {
                self.server.ready(key, watch);
                self.note_driver();
            }
        }
    }

    #[inline]
    fn memory_change(&mut self) -> Option<MemoryChange> {
        self.server.memory_change()
    }

    fn may_sleep(&mut self) -> bool {
        self.server.may_sleep()
    }

    fn resized(&mut self, geometry: &Geometry, watch: &mut dyn Watch) {
        self.server.resized(geometry, watch);
    }

    fn place_of(&self, token: Token) -> Option<String> {
        self.server.place_of(token)
    }

    fn peers(&self) -> usize {
        self.server.peers()
    }

    fn log_events(&mut self, log: &mut dyn FnMut(&dyn Display)) {
        let events = self.server.take_events();
        if events.iter().any(|event| matches!(event, blkif::Event::Closed | blkif::Event::Disconnected { .. })) {
            self.update_guest();
        }
        events.iter().for_each(|event| log(event));
    }

    fn stop(&mut self, watch: &mut dyn Watch) {
        [DOMAINS, TIME_IS_UP].into_iter().for_each(|key| watch.forget(key));
        if self.guest == GuestState::Gone {
            // There is no guest to release the disk, and the node is removed as a whole.
            self.server.leave();
        } else {
            self.forget(KTHREAD_PID);
            if self.leaving {
                say(format_args!("leaving {} as it is: its guest waits for the next process", self.device));
                self.forget("tapline/pid");
            }
        }
        self.server.stop(watch);
        if !self.leaving {
            self.confirm_to_xl().unwrap_or_else(say);
        }
        // The loop only takes events while it runs.
        self.server.log_events(&mut |event| say(event));
    }

    fn takes_back(&mut self) -> Option<&mut dyn TakeBack> {
        self.server.takes_back()
    }

    fn detaches(&mut self) -> Option<&mut dyn Detach> {
        Some(self)
    }
}

impl Detach for Backend {
    fn is_finishing(&self) -> bool {
        self.server.is_finishing()
    }

    /// Continues serving until the guest has released the disk: its driver waits for the completion of its requests. A
    /// second request to stop ends the wait.
    fn close(&mut self) -> bool {
        if self.leaving || self.guest == GuestState::Gone || std::mem::replace(&mut self.closing, true) {
            return true;
        }
        if self.server.close() || !self.start_timer() {
            return true;
        }
        say(format_args!("stopping: requested the guest to release {}, serving it until then", self.device.vdev));
        false
    }

    fn leave(&mut self) {
        self.leaving = true;
        self.server.leave();
    }

    fn is_over(&self) -> bool {
        let closed = self.closing && (self.time_is_up || self.server.is_closed());
        closed || self.guest == GuestState::Gone || self.server.is_over()
    }
}

#[cfg(test)]
mod test;
