//! A disk of a Xen guest: finds the guest, becomes the only process that serves the disk, and cleans up at its end.
//!
//! The rings are the business of [`blkif`], the nodes' contents that of [`vm::xen`]. Invariant:
//! nothing is written into xenstore before the image and the kernel's devices are open, so that a process that cannot
//! serve leaves no trace; when the guest is gone, or the device was detached, the process exits and unmaps everything.

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
use keys::{KTHREAD_PID, asked_polling, leave_word};

/// The guest's disk, which nobody else serves from now on.
pub struct Claimed {
    device: Device,
    /// The toolstack has said that the guest may not write.
    pub read_only: bool,
    store: Box<dyn Store>,
    /// Where it is heard whether the guest is still there.
    domains: Box<dyn Store>,
    grants: Box<dyn Grants>,
    channels: Box<dyn EventChannels>,
    /// Files for statistics, where they are handed.
    statistics: Option<Files>,
    /// Whoever hands files to this process sees itself that there is one.
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
            // The error names the device, what was tried and what may be done.
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

/// A connection to the store: one that is lent, or one of our own.
fn store(files: &files::Files, which: Lent) -> Result<XenstoredClient, Failure> {
    match files.lent(which)? {
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
    // They are there before the store sends readers to them.
    let blkback_stats = open_stats(&serving.files, &Places::of_host(), &device, statistics);
    make_own_end(&mut *store, &device, Wish { read_only, kept: false })?;
    leave_word(&serving.files, &mut *store, &device, serve)?;
    if let Some(most) = asked_polling(&mut *store, &device)? {
        let mode = serving.polling.settings().mode;
        serving.polling.set(Settings::new(mode, most));
    }
    let backend =
        Backend::new(config(serve, &device, read_only, serving.disk.geometry()), store, domains, grants, channels)?;
    serving.blkback_stats = blkback_stats;
    say(format_args!("serving {device}: {}", device.backend()));
    // The loop takes all with it; the claim goes last, when nothing of the guest is mapped any more.
    let ended = match emulated {
        None => EventLoop::new(backend, serving).and_then(EventLoop::run),
        Some(nbd) => EventLoop::new(Emulated::new(backend, nbd), serving).and_then(EventLoop::run),
    };
    drop(claim);
    ended
}

/// What was handed for statistics. It is taken before images are opened, like all that is lent.
fn lent_statistics(files: &files::Files) -> Option<Files> {
    let lent = |lent| files.lent_perhaps(lent).map(File::from);
    Some(Files { vbd3: lent(Lent::Statistics)?, td3: lent(Lent::StatisticsByPid)? })
}

/// A lack of statistics must not keep a disk from being served. With passed files none can be created: they are passed,
/// too.
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

/// Our own name for what the store says of domains, among those of the server.
const DOMAINS: WatchKey = WatchKey(1 << 32);
const TIME_IS_UP: WatchKey = WatchKey((1 << 32) + 1);

/// How long a guest has to let the disk go when the process is to stop. Linux's driver takes milliseconds, and one that
/// waits for its file systems takes as long as they are mounted.
const CLOSING_MAX: Duration = Duration::from_secs(1);

/// The server, and whether its guest is still there.
struct Backend {
    server: blkif::Server,
    device: Device,
    /// A connection of our own: the server's answers and events are its own.
    store: Box<dyn Store>,
    guest: Guest,
    leaving: bool,
    /// The guest was asked to release the disk because the process is to stop.
    closing: bool,
    /// How long it has for that: it runs only then.
    timer: Timer,
    time_is_up: bool,
    /// xl's configuration has named the disk, and xl has a node of its own for it.
    is_xls: bool,
    /// Where xl says that a disk of its own domain is to go, and waits until it has.
    shown_to_xl: Option<String>,
}

/// What is known of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Guest {
    /// The toolstack has made its nodes, and it not yet.
    Awaited,
    /// It is there.
    Seen,
    /// It dies, or is dead, or its nodes are gone, or xl has taken the disk from it.
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
        let (guest, leaving) = (Guest::Awaited, config.on_stop == OnStop::Leave);
        let (closing, time_is_up, is_xls) = (false, false, false);
        let server = blkif::Server::new(config, server, grants, channels).map_err(Failure::said)?;
        let shown_to_xl = shown_to_xl(&device);
        let mut backend =
            Backend { server, device, store, guest, leaving, closing, timer, time_is_up, is_xls, shown_to_xl };
        backend.is_xls = backend.xl_has_it()?;
        Ok(backend)
    }

    fn xl_has_it(&mut self) -> Result<bool, Failure> {
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

    /// Takes in what the store has said of domains.
    fn hear_of_domains(&mut self) {
        // A domain more or less is one event, however often it is said.
        loop {
            match self.store.take_event() {
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) => return self.store_has_failed(error),
            }
        }
        self.look_for_guest();
        self.obey_xl().unwrap_or_else(say);
    }

    /// xl considers its disk detached when its node says Closed; that is written when this process stops.
    fn obey_xl(&mut self) -> Result<(), Failure> {
        if let Some(shown) = &self.shown_to_xl {
            if text(&mut *self.store, None, shown)?.as_deref() == Some("5") {
                take::ask(&mut *self.store, &self.device)?;
            }
        }
        Ok(())
    }

    /// Says so to xl, if it waits.
    fn tell_xl(&mut self) -> Result<(), Failure> {
        if let Some(shown) = &self.shown_to_xl {
            if text(&mut *self.store, None, shown)?.is_some() {
                self.store.write(None, shown, b"6").map_err(store_failed)?;
            }
        }
        Ok(())
    }

    /// Has the timer run. `false`: it does not, and then nothing would end a wait.
    fn begin_to_wait(&self) -> bool {
        let set = self.timer.set(CLOSING_MAX);
        set.map_err(|error| say(format_args!("cannot wait for the guest to release the disk: {error}"))).is_ok()
    }

    /// The guest's I/O does not need xenstore. Everything else does, and a restarted xenstored may have forgotten the
    /// disk, which would stop it. So reconnecting requires a decision by an administrator.
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

    fn look_for_guest(&mut self) {
        match self.found() {
            Ok(found) => self.guest = found,
            Err(failure) => say(failure),
        }
    }

    /// A guest may come, connect and be destroyed before it is looked for: one that was never seen would be awaited.
    fn see_driver(&mut self) {
        if self.guest == Guest::Awaited && self.server.peers() > 0 {
            self.guest = Guest::Seen;
        }
    }

    fn found(&mut self) -> Result<Guest, Failure> {
        let node = format!("/local/domain/{}", self.device.guest);
        let gone = self.guest == Guest::Gone || text(&mut *self.store, None, &node)?.is_none();
        if gone || (self.is_xls && !self.xl_has_it()?) {
            return Ok(Guest::Gone);
        }
        Ok(match (self.guest, self.store.is_introduced(self.device.guest).map_err(store_failed)?) {
            (_, true) => Guest::Seen,
            (Guest::Awaited, false) => Guest::Awaited,
            (_, false) => Guest::Gone,
        })
    }
}

impl Drop for Backend {
    /// A guest that was destroyed leaves our node: nobody else knows of it.
    fn drop(&mut self) {
        if self.guest == Guest::Gone {
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
        self.look_for_guest();
        watch.watch(self.timer.as_fd(), Interest::Read, TIME_IS_UP)?;
        self.server.start(watch)?;
        self.see_driver();
        Ok(())
    }

    fn ready(&mut self, key: WatchKey, watch: &mut dyn Watch) {
        match key {
            DOMAINS => self.hear_of_domains(),
            TIME_IS_UP => self.time_is_up = true,
            key => {
                self.server.ready(key, watch);
                self.see_driver();
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
            self.look_for_guest();
        }
        events.iter().for_each(|event| log(event));
    }

    fn stop(&mut self, watch: &mut dyn Watch) {
        [DOMAINS, TIME_IS_UP].into_iter().for_each(|key| watch.forget(key));
        if self.guest == Guest::Gone {
            // There is no guest left to release the disk, and the node disappears as a whole.
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
            self.tell_xl().unwrap_or_else(say);
        }
        // The loop asks for events as long as it runs.
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

    /// Everything continues until the guest has released the disk: its driver waits for the completion of its requests.
    /// A second request to stop means not to wait.
    fn close(&mut self) -> bool {
        if self.leaving || self.guest == Guest::Gone || std::mem::replace(&mut self.closing, true) {
            return true;
        }
        if self.server.close() || !self.begin_to_wait() {
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
        closed || self.guest == Guest::Gone || self.server.is_over()
    }
}

#[cfg(test)]
mod test;
