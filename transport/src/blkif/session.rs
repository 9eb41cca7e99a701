//! Performs the actions of the handshake: reads both nodes, attaches the rings, releases them.
//!
//! It knows nothing about the contents of the rings. Invariants: pages and ports of a front end that cannot be
//! connected are released; each update ends, regardless of the contents of the nodes; a connected front end is never
//! made to close because its rings cannot be attached: its state is not changed, and attaching is retried after a
//! delay; if the store fails while a front end is served, it is queried again a bounded number of times, since each
//! attempt may delay requests.

use std::collections::VecDeque;
use std::sync::Arc;

use disk::{Geometry, Request, Status};
use memory::Buffer;
use xen::{Granted, Grants, Port, Store, StoreError};

use super::attach_error::AttachError;
use super::data::{DataMode, DataTransfer};
use super::device::{Device, Limits};
use super::event::{Event, Log};
use super::kill_point::{InjectedBug, injected};
use super::node::{self, DeviceNodes, Features, FrontendPhase, KeysError, Offer, RingKeys, Rings};
use super::queue::Queue;
use super::retry::RetryBudget;
use super::ring::Ring;
use super::state::{Action, Handshake, XenbusState};
use super::{Config, GrantsPolicy, OnStop, Xen};
use crate::MemoryChange;
use crate::log::with_causes;

/// The maximum number of actions per update. Three are sufficient, unless the nodes change meanwhile.
const ACTIONS_MAX: usize = 8;

const WATCH: &str = "blkif";

/// The device as described by its two nodes.
pub struct Session {
    /// The configuration.
    pub config: Config,
    nodes: DeviceNodes,
    /// The front end's rings, while it is connected.
    pub device: Option<Device>,
    /// The buffer for the data of the current front end, as earlier ones have no requests any more.
    staging: Arc<Buffer>,
    /// Changes of buffers not reported to the engine yet, except those of the current front end.
    memory_changes: VecDeque<MemoryChange>,
    /// The number of requests of earlier front ends that have not completed.
    pub orphans: usize,
    epoch: u32,
    seen_connected: bool,
    announced: bool,
    refused: bool,
    /// See [`Handshake::inherited`]; `None` until our node was first read.
    inherited: Option<bool>,
    /// Why the rings of a front end that keeps its connection cannot be attached, and the number of attempts.
    attach_failure: Option<(String, u32)>,
    ended: bool,
    closing: CloseState,
    /// The connection to the store is lost, and all watches with it. The rings are still served.
    store_lost: bool,
    store_retries: RetryBudget,
    /// Ports that could not be closed.
    ports_to_close: Vec<Port>,
}

/// Whether the device is being closed because the server stops.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CloseState {
    Open,
    /// The release was requested from the front end.
    Requested,
    /// The release cannot be requested: the store fails, and retrying would only take time; or the rings of a connected
    /// front end are not attached, so that it would get no responses.
    Unreachable,
}

impl Session {
    /// A session with no front end connected.
    pub fn new(config: Config, nodes: DeviceNodes, staging: Arc<Buffer>) -> Session {
        // When pages are mapped for each request, the buffer is not used.
        let uses_staging = config.grants != GrantsPolicy::Map;
        let memory_changes = uses_staging.then(|| MemoryChange::Comes(staging.clone())).into_iter().collect();
        Session {
            config,
            nodes,
            device: None,
            staging,
            memory_changes,
            orphans: 0,
            epoch: 0,
            seen_connected: false,
            announced: false,
            refused: false,
            inherited: None,
            attach_failure: None,
            ended: false,
            closing: CloseState::Open,
            store_lost: false,
            store_retries: RetryBudget::default(),
            ports_to_close: Vec::new(),
        }
    }

    /// The next change of buffers that was not reported to the engine yet.
    #[inline]
    pub fn take_memory_change(&mut self) -> Option<MemoryChange> {
        match &mut self.device {
            Some(device) if self.memory_changes.is_empty() => device.take_memory_change(),
            _ => self.memory_changes.pop_front(),
        }
    }

    /// Watches both nodes.
    pub fn watch(&self, store: &mut dyn Store) -> Result<(), StoreError> {
        store.watch(&self.nodes.backend_state_path(), WATCH)?;
        store.watch(&self.nodes.frontend_state_path(), WATCH)
    }

    /// Returns true if the device is closed and the toolstack is removing it.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Processes the completion of a request. Without a status, the request stays in its ring for the next process.
    /// Returns `true` if it was the last one of earlier front ends.
    pub fn complete(&mut self, request: Request, status: Option<Status>, grants: &mut dyn Grants) -> bool {
        match &mut self.device {
            Some(device) => {
                if device.complete(request, status, grants) {
                    return false;
                }
            }
            None => drop(request.retire()),
        }
        self.orphans -= 1;
        self.orphans == 0
    }

    /// Reads both nodes and performs the resulting actions.
    pub fn update(&mut self, xen: &mut Xen, log: &mut Log) {
        self.ports_to_close.retain(|&port| xen.channels.unbind(port).is_err());
        if self.store_lost {
            return;
        }
        for _ in 0..ACTIONS_MAX {
            match self.perform_action(xen, log) {
                Ok(true) => {}
                Ok(false) => return self.store_retries.succeeded(),
                Err(error) => {
                    let is_usable = self.store_failed("cannot read the device's nodes in the store", &error, log);
                    let again = is_usable && self.store_retries.try_again(xen);
                    if is_usable && !again && self.device.is_none() {
                        xen.retry.arm(log);
                    }
                    return;
                }
            }
        }
        // The nodes change faster than they are read; the watch will report the last change.
    }

    /// Logs a failure of the store. Returns `false` if the connection is lost, and the store must not be used any more.
    pub fn store_failed(&mut self, what: &'static str, error: &StoreError, log: &mut Log) -> bool {
        self.store_lost |= matches!(error, StoreError::Lost { .. });
        log.failed(what, error);
        !self.store_lost
    }

    /// Returns true if the connection to the store is lost.
    pub fn is_store_lost(&self) -> bool {
        self.store_lost
    }

    /// Performs one action. Returns `false` if there is nothing to do.
    fn perform_action(&mut self, xen: &mut Xen, log: &mut Log) -> Result<bool, StoreError> {
        let seen = self.observe(&mut *xen.store)?;
        let action = seen.next();
        match action {
            Action::Wait => {
                self.ended = !seen.online && !seen.connected && matches!(seen.ours, Some(XenbusState::Closed));
                self.ended |= seen.ours.is_none();
                return Ok(false);
            }
            Action::Announce | Action::Connect { .. } if self.closing != CloseState::Open => return Ok(false),
            Action::Announce => self.announce(xen, &seen, log)?,
            Action::Connect { .. } if self.attach_failure.is_some() && xen.retry.is_armed() => return Ok(false),
            Action::Connect { write_state } => match self.connect(xen, &seen, write_state, log) {
                Ok(true) => {
                    xen.retry.succeeded();
                    self.attach_failure = None;
                    self.log_result(self.nodes.clear_error(&mut *xen.store), log);
                }
                Ok(false) => {}
                Err(AttachError::Keys(KeysError::Store(error)) | AttachError::Store(error)) => return Err(error),
                Err(error) => self.attach_failed(&error, &seen, xen, log),
            },
            Action::Finish => return Ok(self.device.as_mut().is_none_or(|device| device.finish(log))),
            Action::Disconnect(why) => self.disconnect(why, xen, log),
            Action::WriteState(state) => {
                if self.nodes.write_state(&mut *xen.store, seen.ours, state)? && state == XenbusState::Closed {
                    log.record(Event::Closed);
                }
            }
        }
        Ok(true)
    }

    /// Writes our features, and the state in which we wait for the front end.
    fn announce(&mut self, xen: &mut Xen, seen: &Handshake, log: &mut Log) -> Result<(), StoreError> {
        let mut offer = self.offer(&mut *xen.store)?;
        // The front end may have read the features that another process has offered.
        let mut phase = FrontendPhase::Starting;
        if seen.ours == Some(XenbusState::InitWait) {
            phase = FrontendPhase::Running;
            match self.nodes.announced_features(&mut *xen.store) {
                Ok(before) => offer.features = before.map_or(offer.features, |it| offer.features.merged_with(it)),
                Err(KeysError::Store(error)) => return Err(error),
                // If those cannot be served, ours are offered.
                Err(_) => {}
            }
        }
        if self.nodes.announce(&mut *xen.store, &offer, (seen.ours, Some(XenbusState::InitWait)), phase)? {
            (self.announced, self.inherited, self.attach_failure) = (true, Some(false), None);
            xen.retry.succeeded();
            log.record(Event::Announced);
        }
        Ok(())
    }

    /// Handles a failure to attach the rings.
    fn attach_failed(&mut self, error: &AttachError, seen: &Handshake, xen: &mut Xen, log: &mut Log) {
        let (errno, why) = (error.errno(), with_causes(error));
        let attempts = self.attach_failure.as_ref().map_or(0, |(_, attempts)| *attempts) + 1;
        let again = error.should_retry(seen, attempts);
        if !again && matches!(seen.theirs, Some(XenbusState::Closing | XenbusState::Closed)) {
            // The front end has released its rings, and expects no responses in them.
            (self.inherited, self.attach_failure) = (Some(false), None);
            return xen.wake();
        }
        if !again {
            self.log_result(self.nodes.report_error(&mut *xen.store, errno, &why), log);
            log.record(Event::Refused { why });
            (self.refused, self.attach_failure) = (true, None);
            // The next update makes it close.
            return xen.wake();
        }
        if self.attach_failure.as_ref().is_none_or(|(before, _)| *before != why) {
            self.log_result(self.nodes.report_error(&mut *xen.store, errno, &why), log);
            log.record(Event::Retrying { why: why.clone() });
        }
        self.attach_failure = Some((why, attempts));
        xen.retry.arm(log);
    }

    /// Logs a failed report to the administrator, which must not stop the handshake.
    fn log_result(&self, result: Result<(), StoreError>, log: &mut Log) {
        if let Err(error) = result {
            log.failed("cannot report the device's state in the store", &error);
        }
    }

    fn observe(&mut self, store: &mut dyn Store) -> Result<Handshake, StoreError> {
        let ours = node::state(store, &self.nodes.backend_state_path())?;
        let theirs = node::state(store, &self.nodes.frontend_state_path())?;
        let online = self.nodes.is_online(store)?;
        let connected = self.device.is_some();
        self.seen_connected |= connected && theirs == Some(XenbusState::Connected);
        let in_use = matches!(ours, Some(XenbusState::Connected | XenbusState::Closing));
        let inherited = *self.inherited.get_or_insert(in_use) && !injected(InjectedBug::ClosedUnanswered);
        if ours.is_none() || matches!(theirs, None | Some(XenbusState::Initialising | XenbusState::InitWait)) {
            // The front end whose rings could not be attached no longer exists.
            self.attach_failure = None;
        }
        // A refused front end that has left these states has restarted.
        self.refused &= matches!(theirs, Some(XenbusState::Initialised | XenbusState::Connected));
        let finishing = self.device.as_ref().is_some_and(Device::is_finishing);
        let unanswered = self.device.as_mut().is_some_and(|device| !device.is_finished());
        let (seen_connected, announced, refused) = (self.seen_connected, self.announced, self.refused);
        Ok(Handshake {
            ours,
            theirs,
            online,
            connected,
            finishing,
            unanswered,
            seen_connected,
            draining: self.orphans > 0,
            announced,
            refused,
            inherited,
        })
    }

    fn offer(&self, store: &mut dyn Store) -> Result<Offer, StoreError> {
        let geometry = self.config.geometry;
        let features = Features {
            ring_order: self.config.max_ring_pages_order,
            queues: self.config.max_queues,
            segments: self.config.max_segments,
            persistent: matches!(self.config.grants, GrantsPolicy::Persistent | GrantsPolicy::Auto),
        };
        Ok(Offer {
            geometry: Geometry { read_only: geometry.read_only || self.config.read_only, ..geometry },
            discard: self.nodes.may_discard(store)?,
            features,
        })
    }

    /// The offer that the front end got. It has chosen from the contents of our node, whichever process wrote them, and
    /// keeps its choice, so these are not changed until it restarts.
    fn announced_features(&self, seen: &Handshake, store: &mut dyn Store) -> Result<Offer, AttachError> {
        let offer = self.offer(store).map_err(AttachError::Store)?;
        let before = match seen.ours {
            Some(XenbusState::InitWait | XenbusState::Connected | XenbusState::Closing) => {
                self.nodes.announced_features(store).map_err(AttachError::Keys)?
            }
            _ => Some(offer.features),
        };
        let none = if seen.ours == Some(XenbusState::InitWait) { offer.features } else { Features::NONE };
        let mut features = before.unwrap_or(none);
        if injected(InjectedBug::OwnFeatures) {
            features = offer.features;
        }
        features.persistent |= injected(InjectedBug::OwnPersistence) && offer.features.persistent;
        Ok(Offer { features, ..offer })
    }

    /// Attaches the rings of the front end. Returns `false` if our node has changed meanwhile.
    fn connect(&mut self, xen: &mut Xen, seen: &Handshake, write: bool, log: &mut Log) -> Result<bool, AttachError> {
        let offer = self.announced_features(seen, &mut *xen.store)?;
        let rings = self.nodes.rings(&mut *xen.store, &offer.features).map_err(AttachError::Keys)?;
        let pages = rings.queues.first().map_or(0, |ring| ring.pages.len());
        let mut queues = Vec::with_capacity(rings.queues.len());
        let taken = rings.queues.iter().try_for_each(|keys| {
            queues.push(self.attach_ring(xen, &rings, keys, queues.len())?);
            Ok(())
        });
        let announced = taken.and_then(|()| {
            let states = (seen.ours, write.then_some(XenbusState::Connected));
            self.nodes.announce(&mut *xen.store, &offer, states, FrontendPhase::Running).map_err(AttachError::Store)
        });
        if !matches!(announced, Ok(true)) {
            queues.iter().for_each(|queue| self.unbind(queue.port, xen));
            return announced;
        }
        let (data_mode, grants) = self.data_mode(&rings);
        let taken_over = seen.ours == Some(XenbusState::Connected) && seen.theirs == Some(XenbusState::Connected);
        log.record(Event::Connected { queues: queues.len(), pages, grants, taken_over });
        self.epoch = self.epoch.wrapping_add(1);
        let data = DataTransfer::new(self.config.domain, data_mode, self.staging.clone());
        let limits =
            Limits { segments_max: offer.features.segments, read_only: self.config.read_only, discard: offer.discard };
        self.device = Some(Device::new(queues, data, limits, self.epoch));
        (self.seen_connected, self.inherited) = (false, Some(false));
        Ok(true)
    }

    /// Attaches one ring. The event channel is bound first: that fails for a driver that no longer exists, whose
    /// references may refer to other pages now.
    fn attach_ring(
        &mut self,
        xen: &mut Xen,
        rings: &Rings,
        keys: &RingKeys,
        queue: usize,
    ) -> Result<Queue, AttachError> {
        let domain = self.config.domain;
        let port = xen.channels.bind(domain, keys.port).map_err(|source| AttachError::Bind { queue, source })?;
        let mapped = xen.grants.map(domain, &keys.pages, false);
        let ring = mapped.map_err(|source| AttachError::Map { queue, source }).and_then(|granted: Arc<Granted>| {
            Ring::attach(granted.shared(), rings.layout).map_err(|source| AttachError::Ring { queue, source })
        });
        ring.map(|ring| Queue::new(ring, port)).inspect_err(|_| self.unbind(port, xen))
    }

    fn data_mode(&self, rings: &Rings) -> (DataMode, &'static str) {
        match self.config.grants {
            GrantsPolicy::Map => (DataMode::Map, "per-request mapping"),
            GrantsPolicy::Persistent | GrantsPolicy::Auto if rings.persistent => {
                (DataMode::Persistent(Box::default()), "persistent mapping")
            }
            GrantsPolicy::Copy | GrantsPolicy::Persistent | GrantsPolicy::Auto => (DataMode::Copy, "copies"),
        }
    }

    fn disconnect(&mut self, why: &'static str, xen: &mut Xen, log: &mut Log) {
        let Some(mut device) = self.device.take() else { return };
        let in_flight = device.shut_down();
        device.ports().for_each(|port| self.unbind(port, xen));
        self.memory_changes.extend(device.release_all_memory());
        self.orphans += in_flight;
        (self.announced, self.seen_connected) = (false, false);
        log.record(Event::Disconnected { why, in_flight });
    }

    fn unbind(&mut self, port: Port, xen: &mut Xen) {
        if xen.channels.unbind(port).is_err() {
            self.ports_to_close.push(port);
        }
    }

    /// Sets a new disk size, and notifies the front end.
    pub fn resized(&mut self, geometry: &Geometry, xen: &mut Xen, log: &mut Log) {
        self.config.geometry = *geometry;
        let connected = self.device.is_some();
        if !connected && !self.announced {
            return;
        }
        match self.nodes.resize(&mut *xen.store, geometry.len) {
            Ok(true) if connected => log.record(Event::SizeAnnounced { len: geometry.len }),
            Ok(_) => {}
            Err(error) => log.failed("cannot notify the front end of the new size", &error),
        }
    }

    /// Makes stopping leave the front end to another process.
    pub fn leave(&mut self) {
        self.config.on_stop = OnStop::Leave;
    }

    /// Requests that the front end release the device. Its requests are served until then: its driver waits for the
    /// responses.
    pub fn close(&mut self, xen: &mut Xen, log: &mut Log) {
        if self.config.on_stop == OnStop::Leave || self.closing != CloseState::Open {
            return;
        }
        let is_unreachable = self.store_lost || self.attach_failure.is_some();
        self.closing = if is_unreachable { CloseState::Unreachable } else { CloseState::Requested };
        if self.closing == CloseState::Requested && self.device.is_some() {
            let written = self.request_close(xen);
            self.record_close(written, log);
        }
    }

    fn request_close(&self, xen: &mut Xen) -> Result<(), StoreError> {
        let ours = node::state(&mut *xen.store, &self.nodes.backend_state_path())?;
        if ours.is_some_and(|ours| !matches!(ours, XenbusState::Closing | XenbusState::Closed)) {
            self.nodes.write_state(&mut *xen.store, ours, XenbusState::Closing)?;
        }
        Ok(())
    }

    fn record_close(&mut self, written: Result<(), StoreError>, log: &mut Log) {
        if let Err(error) = written {
            log.failed("cannot close the device", &error);
            self.closing = CloseState::Unreachable;
        }
    }

    /// Returns true if the device is being closed and there is no front end to wait for.
    pub fn is_closed(&self) -> bool {
        match self.closing {
            CloseState::Open => false,
            CloseState::Requested => self.device.is_none(),
            CloseState::Unreachable => true,
        }
    }

    /// Writes the final state of the device. Popped requests are answered afterwards.
    pub fn stop(&mut self, xen: &mut Xen, log: &mut Log) {
        self.close(xen, log);
        if self.closing == CloseState::Requested {
            let written = self.write_final_state(xen, log);
            self.record_close(written, log);
        }
    }

    fn write_final_state(&mut self, xen: &mut Xen, log: &mut Log) -> Result<(), StoreError> {
        if self.device.is_some() {
            let theirs = node::state(&mut *xen.store, &self.nodes.frontend_state_path())?;
            if let Some(state) = theirs.filter(|&theirs| theirs != XenbusState::Closed) {
                log.record(Event::StillUsed { state: state.name() });
            }
            return Ok(());
        }
        let ours = node::state(&mut *xen.store, &self.nodes.backend_state_path())?;
        let open = ours.is_some_and(|ours| ours != XenbusState::Closed);
        if open && self.nodes.write_state(&mut *xen.store, ours, XenbusState::Closed)? {
            log.record(Event::Closed);
        }
        Ok(())
    }

    /// Releases all resources of the front end.
    pub fn release_all(&mut self, xen: &mut Xen, log: &mut Log) {
        if self.closing == CloseState::Requested && self.device.is_some() {
            // The front end may have closed, or may have got its last responses, since `stop`.
            self.update(xen, log);
        }
        self.disconnect("the server is gone", xen, log);
        self.ports_to_close.retain(|&port| xen.channels.unbind(port).is_err());
    }
}
